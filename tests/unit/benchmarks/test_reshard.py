"""The benchmark of weight exchanges: what it refuses, and one small run of all candidates."""

from __future__ import annotations

import json
import sys

import pytest

from mcore_rl.cli import main as cli
from mcore_rl.cli.bench import main
from mcore_rl.config.errors import ConfigError
from tests.nightly import nightly
from tests.pages import select_commands


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train", "tp=2"], "--train has 2, --generate has 4, --target has 4 ranks"),
        (["--train", "tp=2,pp=2,vpp=2", "--layers", "8"], "vpp=2; allowed: 1"),
        (["--train", "tp=3"], "3"),
        (["--generate", "tp=4,ep=3"], "generate.ep=3"),
        (["--target", "zp=4"], "'zp' is unknown"),
        (["--layers", "0"], "--layers"),
        (["--bucket-mib", "0"], "--bucket-mib"),
        (["--repetitions", "0"], "--repetitions"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_rank_starts(arguments, message):
    with pytest.raises(ConfigError, match=message.replace("'", ".")):
        main(["reshard", *arguments])


TWO_RANKS = ["--train", "pp=2", "--generate", "tp=2,ep=2", "--target", "tp=2,ep=2"]


@pytest.mark.job
@pytest.mark.parametrize(
    ("layouts", "num_ranks", "share"),  # of what a gather receives: the most for an exchange
    [(TWO_RANKS, 2, 0.55), nightly(([], 4, 0.25))],
    ids=["two ranks", "four ranks"],
)
def test_a_small_run_reports_every_candidate(monkeypatch, capsys, layouts, num_ranks, share):
    """Run the command of the page with less to move."""
    [command] = select_commands("bench")
    smaller = ["--layers", "2", "--repetitions", "1", "--bucket-mib", "1", *layouts]
    monkeypatch.setattr(sys, "argv", [*command.text.split(), *smaller])
    assert cli.main() == 0
    report = json.loads(capsys.readouterr().out)
    candidates = {
        "into_vllm": {"exchange", "gather", "gather_bucketed"},
        "into_megatron": {"exchange", "megatron"},
    }
    for case, names in candidates.items():
        assert set(report[case]) == names
        for timing in report[case].values():
            assert 0 < timing["fastest_s"] <= timing["median_s"]
        # What the sockets count is what the plan says, and the frames around it.
        planned = report["planned_bytes"][case]
        assert planned <= report[case]["exchange"]["network_bytes"] < 1.02 * planned
    into_vllm, model_bytes = report["into_vllm"], report["model_bytes"]
    for name in ("gather", "gather_bucketed"):
        # Each rank has its part of the whole, and the norms of its layers.
        gathered = (num_ranks - 1) * model_bytes
        assert 0.995 * gathered < into_vllm[name]["network_bytes"] < 1.02 * gathered
    exchanged = into_vllm["exchange"]["network_bytes"]
    assert 0 < exchanged < share * into_vllm["gather"]["network_bytes"]
    assert report["into_megatron"]["megatron"]["network_bytes"] > 0
    for name, ratio in (("gather", "gather"), ("gather_bucketed", "bucketed_gather")):
        times = into_vllm[name]["median_s"] / into_vllm["exchange"]["median_s"]
        assert report[f"times_faster_than_{ratio}"] == pytest.approx(times)
