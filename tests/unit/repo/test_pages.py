"""Every command of the pages is run by a test, or says what it needs that is not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import pages
from tests.pages import FENCE, KINDS, NEEDS, PAGES, ROOT, Command, list_commands, select_commands

COMMANDS = [command for page in PAGES for command in list_commands(page)]
PROGRAMS = ("bash ", "eval ", "mcore-rl", "pytest", "python ", ".venv/bin/")


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_has_a_test_that_runs_it_or_says_what_it_needs(command: Command):
    assert command.needs in NEEDS if command.needs else command.kind, (
        f"no test runs it: give it a kind in tests/pages.py, or end it with one of "
        f"{[f'# needs {need}' for need in sorted(NEEDS)]}"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_commands_and_a_test_that_takes_them_from_the_pages(kind: str):
    assert select_commands(kind)
    [file] = [path for path in ROOT.glob("tests/**/*.py") if path.match(f"{KINDS[kind][1]}.py")]
    assert f'select_commands("{kind}")' in file.read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_stand_in_blocks_that_are_marked_as_bash(page: Path):
    for language, block in FENCE.findall(page.read_text()):
        if language != "bash":
            assert [line for line in block.splitlines() if line.startswith(PROGRAMS)] == []


def test_ci_runs_the_script_that_the_pages_name():
    scripts = {command.text.split()[1] for command in select_commands("ci")}
    assert scripts == {"tests/run.sh"}
    assert '/../tests/run.sh" --all "$@"' in (ROOT / ".ci/run").read_text()


def test_ci_runs_the_set_up_that_the_pages_name():
    lines = (ROOT / "tests/run.sh").read_text().splitlines()
    assert {f"{command.text} || exit 1" for command in select_commands("set-up")} <= {*lines}


def test_the_kind_of_a_command_follows_from_its_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(
        "```bash\n"
        ".venv/bin/mcore-rl rl seed=1 \\\n    --dry-run   # check\n"
        "mcore-rl rl --dry-run seed=1\n"
        "mcore-rl serve\n"
        "mcore-rl convert x   # needs GPUs\n"
        "```\n```\nmcore-rl no command\n```\n"
    )
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    name = "docs/page.md"
    assert [(c, c.kind) for c in list_commands(page)] == [
        (Command(name, "mcore-rl rl seed=1 --dry-run", ""), "dry run"),
        (Command(name, "mcore-rl rl --dry-run seed=1", ""), "dry run"),
        (Command(name, "mcore-rl serve", ""), ""),
        (Command(name, "mcore-rl convert x", "GPUs"), "conversion"),
    ]
