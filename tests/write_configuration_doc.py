"""Writes the tables of docs/configuration.md from mcore_rl/config/describe.py.

What stands outside of the two markers of the page is written by hand and kept.

    python tests/write_configuration_doc.py
"""

import json
from collections.abc import Iterator
from pathlib import Path

from mcore_rl.config.describe import Setting, SettingGroup, list_setting_groups
from mcore_rl.config.schema import RLConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
BEGIN = "<!-- written by tests/write_configuration_doc.py: begin -->\n"
END = "<!-- written by tests/write_configuration_doc.py: end -->\n"

# Engines repeat the groups of this one, which the page shows once.
SHOWN_ENGINE = "actor"


def build_row(setting: Setting, key: str) -> str:
    meaning = setting.meaning.replace("|", "\\|")
    return f"| `{key}` | `{json.dumps(setting.default)}` | {meaning} |\n"


def list_rows(group: SettingGroup) -> list[str]:
    """Return the rows of a group under the names of its fields."""
    return [build_row(setting, setting.key.rpartition(".")[2]) for setting in group.settings]


def build_section(group: SettingGroup, groups: list[SettingGroup]) -> Iterator[str]:
    """Yield a heading, the docstring, and a row a setting, without what another group shows."""
    shown_engine = next(other for other in groups if other.key == SHOWN_ENGINE)
    rows = list_rows(group)
    repeats = [other for other in groups if list_rows(other) == rows]
    shown = next((other for other in repeats if other.key.startswith(f"{SHOWN_ENGINE}.")), group)
    if shown is not group:
        return
    extends = group is not shown_engine and {*list_rows(shown_engine)} < {*rows}
    yield f"### {f'`{group.key}`' if group.key else 'Top level'}\n\n"
    if group.about:
        yield f"{group.about}\n\n"
    if extends:
        yield f"Has the settings of `{SHOWN_ENGINE}`, and:\n\n"
    if others := [f"`{other.key}`" for other in repeats if other is not group]:
        yield f"The same settings: {', '.join(others)}.\n\n"
    yield "| Setting | Default | Meaning |\n|---|---|---|\n"
    for setting, row in zip(group.settings, rows, strict=True):
        if not (extends and row in list_rows(shown_engine)):
            yield build_row(setting, setting.key)
    yield "\n"


def page(current: str) -> str:
    """The page with its generated part made anew."""
    before, _, rest = current.partition(BEGIN)
    _, _, after = rest.partition(END)
    groups = list(list_setting_groups(RLConfig()))
    made = "".join(line for group in groups for line in build_section(group, groups))
    return f"{before}{BEGIN}\n{made}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
