"""Writes the tables of docs/configuration.md from mcore_rl/config/describe.py.

What stands outside of the two markers of the page is written by hand and kept.

    python tests/write_configuration_doc.py
"""

import json
from collections.abc import Iterator
from pathlib import Path

from mcore_rl.config.describe import SettingGroup, list_setting_groups
from mcore_rl.config.schema import RLConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
BEGIN = "<!-- written by tests/write_configuration_doc.py: begin -->\n"
END = "<!-- written by tests/write_configuration_doc.py: end -->\n"


def section(group: SettingGroup) -> Iterator[str]:
    """A docstring, then a row a setting."""
    yield f"### {f'`{group.key}`' if group.key else 'Of the whole run'}\n\n"
    if group.about:
        yield f"{group.about}\n\n"
    yield "| Setting | Default | Meaning |\n|---|---|---|\n"
    for setting in group.settings:
        meaning = setting.meaning.replace("|", "\\|")
        yield f"| `{setting.key}` | `{json.dumps(setting.default)}` | {meaning} |\n"
    yield "\n"


def page(current: str) -> str:
    """The page with its generated part made anew."""
    before, _, rest = current.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = "".join(line for group in list_setting_groups(RLConfig()) for line in section(group))
    return f"{before}{BEGIN}\n{made}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
