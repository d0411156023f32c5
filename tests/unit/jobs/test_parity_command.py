"""`mcore-rl verify`: its options, and one line for each that is wrong."""

from __future__ import annotations

import json
import sys

import pytest

from mcore_rl.cli.main import main
from mcore_rl.config.schema import Layout
from mcore_rl.jobs.parity import run
from mcore_rl.jobs.parity.compare import Scores, compare
from mcore_rl.jobs.parity.run import Pair, ParityReport
from mcore_rl.jobs.parity.settings import Request

GOOD = ["--model", "here", "--layout", "tp=2,pp=2,last_stage_layers=1", "--against", "hf,vllm"]


def status(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["mcore-rl", "verify", *arguments])
    try:
        return main()
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: parity"),
        (["pairity"], "unknown command 'pairity'; did you mean parity?"),
        (["parity", "--layout", "tp=1", "--against", "hf"], "required: --model"),
        (["parity", *GOOD, "--tolerance", "small"], "invalid float value: 'small'"),
        (["parity", *GOOD, "--shards", "3"], "unknown option '--shards'; allowed: "),
        (["parity", *GOOD, "--layout", "tp=2,xp=3"], "--layout=tp=2,xp=3: 'xp' is unknown"),
        (["parity", *GOOD, "--layout", "tp=two"], "--layout=tp=two: 'tp=two'"),
        (["parity", *GOOD], "--model='here' does not exist"),
    ],
)
def test_a_wrong_option_ends_with_status_2_and_one_line(monkeypatch, capsys, arguments, message):
    assert status(monkeypatch, *arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.startswith("mcore-rl verify: ")
    assert printed.err.count("\n") == 1


def test_the_help_tells_tolerances_and_exit_status(monkeypatch, capsys):
    assert status(monkeypatch, "parity", "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "1e-4 in float32, 2.0 in bfloat16",
        "Exit status: 0",
        "--reference",
        "--checkpoint",
    ):
        assert part in text


@pytest.mark.parametrize(("passed", "expected"), [(True, 0), (False, 1)])
@pytest.mark.parametrize("as_json", [True, False])
def test_the_status_is_the_outcome_and_json_is_alone(
    monkeypatch, capsys, passed, expected, as_json
):
    asked = []

    def fake(request: Request) -> ParityReport:
        asked.append(request)
        gap = compare([[1, 2]], Scores([[-1.5]], [[2]]), Scores([[-1.0]], [[2]]))
        pair = Pair(True, gap) if passed else Pair(False, gap, "lm_head", {"lm_head": 0.5})
        return ParityReport(1e-4, None, Layout(), "float32", {}, {"megatron~hf": pair}, {})

    monkeypatch.setattr(run, "run", fake)
    options = ["--json"] if as_json else []
    assert status(monkeypatch, "parity", *GOOD, "--tolerance", "0.5", *options) == expected
    assert asked == [
        Request("here", Layout(tp=2, pp=2, last_stage_layers=1), ("hf", "vllm"), tolerance=0.5)
    ]
    text = capsys.readouterr().out
    if as_json:
        assert json.loads(text)["passed"] is passed
    else:
        assert ("passed" if passed else "the first module that differs is lm_head") in text
