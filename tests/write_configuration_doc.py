"""Writes tables of docs/configuration.md, from_verl_and_trl.md and passthrough.md from the code.

What stands outside of the two markers of a page is written by hand and kept.

    python tests/write_configuration_doc.py
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from mcore_rl.cli import other_names
from mcore_rl.config.describe import Setting, SettingGroup, list_setting_groups
from mcore_rl.config.schema import RLConfig
from mcore_rl.engine.megatron import passthrough
from mcore_rl.inference.vllm import engine_arguments

DOCS = Path(__file__).resolve().parents[1] / "docs"
BEGIN = "<!-- written by tests/write_configuration_doc.py: begin -->\n"
END = "<!-- written by tests/write_configuration_doc.py: end -->\n"

# Engines repeat the groups of this one, which the page shows once.
SHOWN_ENGINE = "actor"


def build_row(setting: Setting, key: str, has_ranges: bool = True) -> str:
    meaning = setting.meaning.replace("|", "\\|")
    numbers = f" {setting.range} |" if has_ranges else ""
    return f"| `{key}` | `{json.dumps(setting.default)}` |{numbers} {meaning} |\n"


def list_rows(group: SettingGroup) -> list[str]:
    """Return the rows of a group under the names of its fields."""
    return [build_row(setting, setting.key.rpartition(".")[2]) for setting in group.settings]


def build_rows(settings: Sequence[Setting]) -> Iterator[str]:
    """Yield a table; it has a column of ranges if a setting is a number."""
    has_ranges = any(setting.range for setting in settings)
    yield f"| Setting | Default |{' Range |' if has_ranges else ''} Meaning |\n"
    yield f"|---|---|---|{'---|' if has_ranges else ''}\n"
    for setting in settings:
        yield build_row(setting, setting.key, has_ranges)


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
    if equal_groups := [f"`{other.key}`" for other in repeats if other is not group]:
        yield f"The same settings: {', '.join(equal_groups)}.\n\n"
    hidden = {*list_rows(shown_engine)} if extends else set()
    pairs = zip(group.settings, rows, strict=True)
    yield from build_rows([setting for setting, row in pairs if row not in hidden])
    yield "\n"


def build_settings() -> str:
    groups = list(list_setting_groups(RLConfig()))
    return "".join(line for group in groups for line in build_section(group, groups))


NEEDED = {
    "te": "Transformer Engine's modules",
    "cuda": "GPUs",
    "flex": "`actor.moe.dispatcher=flex`",
    "muon": "`actor.optimizer.name=muon`",
}


def build_table(head: str, table: Mapping[str, str], key: str, *, is_code: bool = False) -> str:
    """Return a table with a row for each text, and the fields that have it."""
    fields: dict[str, list[str]] = {}
    for name, text in table.items():
        fields.setdefault(text.format(key=key), []).append(f"`{name}`")
    rows = [
        f"| {f'`{text}`' if is_code else text} | {', '.join(names)} |\n"
        for text, names in fields.items()
    ]
    return f"| {head} | Fields |\n|---|---|\n{''.join(rows)}\n"


def build_refusals() -> str:
    """Return what is refused of the fields of Megatron and vLLM."""
    rules = {
        "Megatron": ("actor", passthrough.RULES),
        "vLLM": ("rollout", engine_arguments.RULES),
    }
    text = ""
    for name, (key, rule) in rules.items():
        text += f"## Refused fields of {name}\n\n`*` stands for any characters.\n\n"
        text += build_table("Decided by", rule.owned, key, is_code=True)
        text += build_table("Wrong here", rule.denied, key)
        for field, (values, reason) in rule.values.items():
            allowed = ", ".join(f"`{value}`" for value in values)
            text += f"`{field}` may be {allowed}: {reason}.\n\n"
        if rule is passthrough.RULES:
            needs = {field: NEEDED[need] for field, need in passthrough.NEEDS.items()}
            text += build_table("Needs", needs, key)
    return text + build_table("Decided by a CPU", engine_arguments.CPU_OWNED, "rollout")


def build_names() -> str:
    """Return the tables of names of verl and TRL, a section each."""
    text = ""
    for section in dict.fromkeys(row.section for row in other_names.ROWS):
        text += f"### {section}\n\n| verl | TRL | Ours | |\n|---|---|---|---|\n"
        for row in other_names.ROWS:
            if row.section == section:
                verl = map(other_names.get_full_name, row.verl)
                cells = (", ".join(f"`{name}`" for name in names) for names in (verl, row.trl))
                our_cell = ", ".join(f"`{name}`" for name in row.our_names) or "none"
                text += f"| {' | '.join(cells)} | {our_cell} | {row.note} |\n".replace(
                    "|  |", "| |"
                )
        text += "\n"
    return text


PAGES: Mapping[str, Callable[[], str]] = {
    "configuration.md": build_settings,
    "from_verl_and_trl.md": build_names,
    "passthrough.md": build_refusals,
}


def build_page(name: str, current: str) -> str:
    """Return a page with its generated part made anew."""
    before, _, rest = current.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{PAGES[name]()}{END}{after}"


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(build_page(name, (DOCS / name).read_text()))
