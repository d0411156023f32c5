"""The pages are true: the tree, the settings and the commands that they name exist."""

import doctest
import importlib
import os
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import mcore_rl
from mcore_rl.cli.compose import compose_config
from mcore_rl.cli.job import JOB_COMMANDS, SCHEMAS
from mcore_rl.cli.main import load_command, main
from mcore_rl.cli.options import parse_layout
from mcore_rl.config.describe import RENAMED, list_setting_names
from mcore_rl.config.rules import validate_rl
from mcore_rl.config.rules_engine import validate_layout
from mcore_rl.config.rules_train import validate_eval, validate_train
from mcore_rl.config.schema import Layout, RLConfig
from mcore_rl.examples.tasks import last_digit
from mcore_rl.examples.tasks.last_digit import split_problems
from mcore_rl.reshard.layout import GenerationLayout
from tests.pages import PAGES, select_commands

ROOT = Path(__file__).resolve().parents[3]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
CONFIGURATION = ROOT / "docs" / "configuration.md"
WRITER = ROOT / "tests" / "write_configuration_doc.py"
SETTINGS = [name for schema in SCHEMAS.values() for name in list_setting_names(schema)]
GROUPS = {".".join(parts[:n]) for key in SETTINGS for parts in [key.split(".")] for n in (1, 2, 3)}

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
OVERRIDE = re.compile(r"\b([a-z]\w*(?:\.\w+)+)=(?!=)")
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?")
FILE_SUFFIXES = {".md", ".py", ".sh", ".toml", ".yaml"}


def folders_of_package() -> set[str]:
    """mcore_rl/<room>/ of every folder with modules, and those that are links."""
    folders = {"benchmarks/", "examples/", "models/"}
    for folder, names, files in os.walk(ROOT / "mcore_rl"):
        names[:] = [name for name in names if name != "__pycache__"]
        if any(name.endswith(".py") for name in files) and Path(folder) != ROOT / "mcore_rl":
            folders.add(f"{Path(folder).relative_to(ROOT)}/")
    return folders


ROOMS = folders_of_package()


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=page_id)


def test_the_architecture_page_has_a_line_for_each_room():
    section = ARCHITECTURE.read_text().partition("\n## Rooms\n")[2].partition("\n## ")[0]
    rooms = re.findall(r"^\| `(\w+/)` \|", section, re.MULTILINE)
    direct = {room.removeprefix("mcore_rl/") for room in ROOMS if room.count("/") <= 2}
    assert sorted(rooms) == sorted(direct)


def contract(start: str) -> dict[str, Any]:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return next(entry for entry in linter["contracts"] if entry["name"].startswith(start))


def test_every_package_but_engine_has_its_engines_by_engine_base():
    packages = {f"mcore_rl.{path.parent.name}" for path in (ROOT / "mcore_rl").glob("*/*.py")}
    packages -= {"mcore_rl.engine", "mcore_rl.benchmarks"}  # they compare parts of engines
    assert {*contract("Engines")["source_modules"]} == packages


def test_the_layers_are_those_that_the_linter_enforces():
    layers = contract("Layers")["layers"]
    section = ARCHITECTURE.read_text().partition("\n## Layers\n")[2]
    block = FENCE.search(section)
    assert block
    assert block[2].split("\n")[:-1] == [re.sub(r" : \(\w+\)", "", layer) for layer in layers]


def claims_a_path(span: str) -> bool:
    if not PATH.fullmatch(span):
        return False
    first, suffix = span.partition("/")[0], Path(span).suffix
    is_room = f"mcore_rl/{first}/" in ROOMS and "/" in span and not suffix
    return is_room or suffix in FILE_SUFFIXES or first in {"docs", "launch", "mcore_rl", "tests"}


@each_page
def test_every_path_in_backticks_exists(page: Path):
    spans = CODE_SPAN.findall(FENCE.sub("", page.read_text()))
    named = {span for span in spans if claims_a_path(span)}
    missing = [
        n for n in named if not any((base / n).exists() for base in (ROOT, ROOT / "mcore_rl"))
    ]
    assert missing == []


@each_page
def test_every_setting_exists(page: Path):
    """For a table with settings of others see test_other_frameworks.py."""
    text = re.sub(r"^```diff\n.*?^```$", "", page.read_text(), flags=re.S | re.M)  # may add one
    if page.name == "from_verl_and_trl.md":
        text = "\n".join(line.split("|")[3] for line in text.splitlines() if line.count("|") > 3)

    def name_mapping(key: str) -> str:
        mappings = r"^(data\.sets|agent\.settings|\w+\.megatron|rollout\.engine)\..*"
        return re.sub(mappings, r"\1", key)

    named = map(name_mapping, OVERRIDE.findall(text))
    assert [key for key in named if key not in SETTINGS] == []
    spans = map(name_mapping, CODE_SPAN.findall(FENCE.sub("", text)))
    keys = [s for s in spans if re.fullmatch(r"\w+(\.\w+)+", s) and s.partition(".")[0] in GROUPS]
    assert [key for key in keys if key not in {*SETTINGS, *GROUPS, *RENAMED}] == []


def command_lines(text: str) -> Iterator[list[str]]:
    """The arguments of every `mcore-rl` and quickstart command in lines of a shell."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if "launch/quickstart.sh" in words:
            yield ["rl", "recipe=quickstart", *words[words.index("launch/quickstart.sh") + 1 :]]
        launched = words[words.index("--no-python") + 1 :] if "torchrun" in words[:1] else words
        for program in (word for word in launched[:1] if word.endswith("mcore-rl")):
            yield words[words.index(program) + 1 :]


def commands_of(page: Path) -> list[list[str]]:
    blocks = FENCE.findall(page.read_text())
    shell = [block for language, block in blocks if language == "bash"]
    return [words for block in shell for words in command_lines(block)]


def write_recipes(text: str, folder: Path) -> None:
    """The recipe that a page shows, and the files that it names, where its commands expect them."""
    for language, block in FENCE.findall(text):
        if name := re.match(r"# (\w+\.(py|yaml))\n", block):
            paths = [folder / "here" / name[1]]
        elif language == "yaml":
            paths = [folder / "here" / "mine.yaml", folder / "recipes" / "mine.yaml"]
        else:
            paths = []
        for path in paths:
            path.parent.mkdir(exist_ok=True)
            path.write_text(block)


def check_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings fit together, what only prints prints, and layouts of options fit."""
    name, arguments = words[0], words[1:]
    if name in SCHEMAS and not set(arguments) & {"--help", "--list-recipes"}:
        check = {"rl": validate_rl, "eval": validate_eval}.get(name, validate_train)
        check(compose_config(SCHEMAS[name], [a for a in arguments if not a.startswith("-")]))
        arguments = [a for a in arguments if a != "--dry-run"] + ["--print-config"]
    if name in (*SCHEMAS, "completion") or name.startswith("-"):
        monkeypatch.setattr(sys, "argv", ["mcore-rl", name, *arguments])
        assert main() == 0
        return
    options = load_command(name).build_parser().parse_args(arguments)
    for option in ("layout", "train", "target"):
        if text := getattr(options, option, None):
            validate_layout(f"--{option}", parse_layout(f"--{option}", text, Layout))
    if text := getattr(options, "generate", None):
        parse_layout("--generate", text, GenerationLayout)


@pytest.mark.job
@each_page
def test_every_command_has_settings_and_options_that_fit_together(page, monkeypatch, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "examples").symlink_to(ROOT / "examples")
    write_recipes(page.read_text(), tmp_path)
    monkeypatch.chdir(tmp_path / "here")
    for words in commands_of(page):
        check_command(words, monkeypatch)


@pytest.mark.job
@pytest.mark.parametrize("command", select_commands("prints") + select_commands("dry run"), ids=str)
def test_every_command_that_starts_nothing_prints_and_leaves_nothing(
    command, monkeypatch, capsys, tmp_path
):
    (train, test), rows = split_problems(), 960
    # Of the task of the quickstart a part, whose rows take less time to check.
    monkeypatch.setattr(last_digit, "NUM_WARM_START", rows)
    monkeypatch.setattr(last_digit, "split_problems", lambda: (train[:rows], test[:rows]))
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "examples").symlink_to(ROOT / "examples")
    write_recipes(CONFIGURATION.read_text(), tmp_path)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "argv", shlex.split(command.text))
    assert main() == 0
    captured = capsys.readouterr()
    assert (len(captured.out) > 50, captured.err) == (True, "")
    assert sorted(os.listdir()) == ["examples", "mine.yaml"]


def test_the_examples_of_the_help_are_commands_that_work(monkeypatch, tmp_path):
    write_recipes(CONFIGURATION.read_text(), tmp_path)
    monkeypatch.chdir(tmp_path / "here")
    examples = JOB_COMMANDS["rl"].examples
    commands = list(command_lines(examples.replace(" > mine.yaml", "")))
    assert len(commands) == examples.count("mcore-rl rl")
    for words in commands:
        check_command(words, monkeypatch)


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


@each_page
def test_every_link_inside_the_repository_leads_somewhere(page: Path):
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors_of(linked), target


def list_nav_pages(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        [value] = entry.values()
        yield from list_nav_pages(value) if isinstance(value, list) else (value,)


def test_the_navigation_of_the_site_has_each_page_once():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert len(nav) == 7
    assert sorted(list_nav_pages(nav)) == sorted(p.name for p in PAGES if p.parent.name == "docs")


def test_the_api_page_has_each_public_name_once():
    page = (ROOT / "docs" / "api.md").read_text()
    assert sorted(re.findall(r"^::: mcore_rl\.(\w+)$", page, re.MULTILINE)) == mcore_rl.__all__


def test_no_page_of_the_site_links_out_of_it_but_to_the_web():
    pages = [page for page in PAGES if page.parent.name == "docs"]
    links = {(p.name, link) for p in pages for link in LINK.findall(p.read_text())}
    assert [link for link in links if link[1].startswith("../")] == []


def test_the_site_is_a_gate_that_allows_no_warning():
    gate = (ROOT / "tests" / "run.sh").read_text()
    assert "gate 'docs site' build_site" in gate and "mkdocs build --strict" in gate
    kinds = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["validation"]
    assert {level for kind in kinds.values() for level in kind.values()} == {"warn"}


def test_the_tables_of_the_configuration_page_are_those_of_the_schema():
    current, writer = CONFIGURATION.read_text(), runpy.run_path(str(WRITER))
    for name in writer["PAGES"]:
        text = (CONFIGURATION.parent / name).read_text()
        is_current = text == writer["build_page"](name, text)
        assert is_current, "run: .venv/bin/python tests/write_configuration_doc.py"
    shown = set(re.findall(r"^\| `([\w.]+)` \|", current, re.MULTILINE))
    sections = re.findall(r"^### `([\w.]+)`$(.*?)(?=^###|\Z)", current, re.MULTILINE | re.DOTALL)
    for group, section in sections:  # which says whose settings it has, or who else has them
        for listed in re.findall(r"^The same settings: (.*)\.$", section, re.MULTILINE):
            for other in re.findall(r"`(.*?)`", listed):
                shown |= {key.replace(group, other, 1) for key in shown if key.startswith(group)}
        for other in re.findall(r"^Has the settings of `(.*)`, and:$", section, re.MULTILINE):
            keys = {key for key in shown if re.fullmatch(rf"{other}\.\w+", key)}
            shown |= {key.replace(other, group, 1) for key in keys}
    assert {*list_setting_names(RLConfig)} - shown == set()


@pytest.mark.parametrize("page", [p for p in PAGES if ">>> " in p.read_text()], ids=page_id)
def test_the_examples_in_pages_give_what_they_show(page: Path):
    assert doctest.testfile(str(page), module_relative=False).failed == 0


def modules_with_examples() -> list[str]:
    paths = sorted(path for room in ROOMS for path in (ROOT / room).glob("*.py"))
    names = [p.relative_to(ROOT).with_suffix("").parts for p in paths if ">>> " in p.read_text()]
    return [".".join(n if n[0] == "mcore_rl" else ("mcore_rl", *n)) for n in names]


@pytest.mark.parametrize("module", modules_with_examples())
def test_the_examples_in_docstrings_give_what_they_show(module: str):
    failed, attempted = doctest.testmod(importlib.import_module(module))
    assert attempted > 0
    assert failed == 0
