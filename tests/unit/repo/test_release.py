"""Files for those who find the project on a host: images, workflows, forms, the list of changes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.pages import list_commands

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMAGES = sorted((ROOT / "launch" / "docker").iterdir())
INSTRUCTION = re.compile(r"^([A-Z]+) (.*)$")


def read_instructions(file: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, with their arguments on one line."""
    text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    matches = [INSTRUCTION.match(line) for line in lines]
    assert None not in matches, lines
    return [(match[1], match[2]) for match in matches]


@pytest.mark.parametrize("file", IMAGES, ids=lambda file: file.name)
def test_an_image_is_set_up_by_the_script_as_a_user_of_few_rights(file: Path):
    instructions = read_instructions(file)
    names = [name for name, _ in instructions]
    arguments = {name: [text for other, text in instructions if other == name] for name in names}
    assert names[0] == "FROM" and names.count("FROM") == 1
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+-[\w.-]+", arguments["FROM"][0])  # pinned
    assert arguments["USER"] == ["trainer"]
    set_up = next(text for text in arguments["RUN"] if "launch/setup_env.sh" in text)
    assert names.index("USER") < instructions.index(("RUN", set_up))
    for copied in arguments["COPY"]:
        for source in copied.split()[1:-1]:
            assert (ROOT / source).exists()
    assert not any(word in file.read_text() for word in ("TOKEN", "PASSWORD", "SECRET", "ARG "))
    lane = "gpu" if file.suffix == ".gpu" else "cpu"
    assert any(f"MCORE_RL_LANE={lane}" in text for text in arguments["ENV"])


def test_an_image_of_gpus_has_the_toolkit_that_set_up_compiles_with():
    instructions = dict(read_instructions(ROOT / "launch/docker/Dockerfile.gpu"))
    pins = (ROOT / "launch/requirements/gpu.txt").read_text()
    [cuda] = re.findall(r"^nvidia-cuda-nvcc==(\d+\.\d+)\.", pins, re.MULTILINE)
    assert instructions["FROM"].startswith(f"nvidia/cuda:{cuda}.") and "-devel-" in str(
        instructions
    )


def test_images_leave_out_what_git_ignores_at_the_top():
    ignored = {line.strip("/") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    built = {".git", ".venv*", "**/*.so", "**/__pycache__", "build", "dist", "outputs"}
    assert built <= ignored
    for name in ("mcore_rl", "csrc", "launch", "tests", "docs", "README.md", "LICENSE"):
        assert not {name, f"**/{name}"} & ignored  # what set-up and the package need


def test_the_workflow_runs_the_commands_of_the_readme():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    [job] = workflow["jobs"].values()
    commands = job["strategy"]["matrix"]["command"]
    assert commands == [command.text for command in list_commands(ROOT / "README.md")][:2]
    assert job["steps"][-1] == {"run": "${{ matrix.command }}"}
    assert workflow["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_a_form_for_issues_has_labelled_fields(name: str):
    form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
    assert form["name"] and form["description"]
    assert all(field["attributes"]["label"] for field in form["body"])
    assert any(field.get("validations", {}).get("required") for field in form["body"])


def test_the_newest_entry_of_the_changes_is_of_this_version():
    [newest, *_] = re.findall(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest == PROJECT["version"]


def test_the_citation_says_what_the_package_says():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["title"], citation["license"]) == (PROJECT["name"], PROJECT["license"])
    assert citation["abstract"] == PROJECT["description"]
    assert {"cff-version", "message", "authors"} <= citation.keys()
