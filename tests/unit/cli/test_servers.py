"""mcore-rl servers: what a run is told, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_rl.cli import servers
from mcore_rl.config.errors import ConfigError
from mcore_rl.rollout.desired_servers import read_desired_servers, write_desired_servers
from tests.pages import select_commands


@pytest.mark.parametrize("line", select_commands("servers"), ids=str)
def test_commands_of_pages_run(line, tmp_path, monkeypatch, capsys):
    run = tmp_path / "outputs/mine"
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"rollout": {"num_servers": 2}}))
    if "--add 1" in line.text:
        write_desired_servers(run, {0})
    monkeypatch.chdir(tmp_path)
    servers.main(line.text.split()[2:])
    assert "outputs/mine is to have server" in capsys.readouterr().out


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with three servers."""
    (tmp_path / "config.json").write_text(json.dumps({"rollout": {"num_servers": 3}}))
    return tmp_path


def run_command(capsys: pytest.CaptureFixture[str], run: Path, *options: str) -> str:
    servers.main([str(run), *options])
    return capsys.readouterr().out.removeprefix(f"{run} is to have server ").strip()


def test_servers_leave_and_join(run, capsys):
    later = ", from the next push of weights on"
    assert run_command(capsys, run) == "0, 1, 2 of 0, 1, 2"
    assert run_command(capsys, run, "--remove", "0", "2") == f"1 of 0, 1, 2{later}"
    assert run_command(capsys, run) == "1 of 0, 1, 2"
    assert run_command(capsys, run, "--add", "0", "--remove", "1") == f"0 of 0, 1, 2{later}"
    assert read_desired_servers(run, 3) == {0}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--add", "1"], "--add 1; allowed: none now"),
        (["--remove", "3"], "--remove 3; allowed: 0, 1, 2"),
        (["--remove", "0", "1", "2"], "--remove 0, 1, 2: one server has to stay"),
        (["--remove", "one"], "invalid int value: 'one'"),
        (["--drop", "1"], "unknown option '--drop'; allowed: "),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(run, options, why):
    with pytest.raises(ConfigError, match=f"^(argument --remove: )?{why}"):
        servers.main([str(run), *options])
    assert read_desired_servers(run, 3) == {0, 1, 2}


@pytest.mark.parametrize(
    ("settings", "why"),
    [(None, "config.json cannot be read"), ("{}", "has no servers: it is no run of mcore-rl rl")],
)
def test_a_folder_without_a_run_that_has_servers_is_refused(tmp_path, settings, why):
    if settings:
        (tmp_path / "config.json").write_text(settings)
    with pytest.raises(ConfigError, match=why):
        servers.main([str(tmp_path)])
