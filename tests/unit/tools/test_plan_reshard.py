"""Reports of `mcore-rl plan reshard` for published models and small ones."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from mcore_rl.cli import plan as command
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.jobs.remote_paths import find_published
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.tools.plan_reshard import Cluster, plan_reshard
from tests.nightly import nightly
from tests.pages import ROOT, select_commands

DENSE = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 128, "hidden_size": 8,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2,
    "intermediate_size": 16, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
}  # fmt: skip
# By hand: embedding and head 2 * 128 * 8, the last norm 8; a layer has two norms 2 * 8, q and o
# 2 * 8 * 8, k and v 2 * 4 * 8, the norms of q and k 2 * 2, the MLP 3 * 16 * 8.
SPLIT, REPLICATED = 2 * 128 * 8 + 2 * (2 * 64 + 2 * 32 + 3 * 128), 8 + 2 * (16 + 4)


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    path = tmp_path / "dense.json"
    path.write_text(json.dumps(DENSE))
    return path


def test_bytes_of_a_small_model_are_those_counted_by_hand(dense):
    report, traffic = plan_reshard(
        dense, "disaggregated", Layout(tp=2), GenerationLayout(tp=2), Cluster(gpus_per_node=2)
    )
    assert [rank.received_bytes for rank in report.ranks] == [2 * (SPLIT // 2 + REPLICATED)] * 2
    assert report.received_bytes == report.lower_bound_bytes == report.across_nodes_bytes
    assert report.gather_then_slice_bytes == 2 * 2 * (SPLIT + REPLICATED)
    assert traffic.sum() == report.received_bytes
    assert report.predicted_s == pytest.approx(2 * (SPLIT // 2 + REPLICATED) * 8 / 400e9)


def test_ranks_that_share_a_gpu_and_a_layout_move_nothing(dense):
    report, _ = plan_reshard(
        dense, "colocated", Layout(tp=2), GenerationLayout(tp=2), Cluster(gpus_per_node=2)
    )
    assert report.received_bytes == report.lower_bound_bytes == report.busiest_sender_bytes == 0
    assert report.same_gpu_bytes == 2 * 2 * (SPLIT // 2 + REPLICATED)
    assert report.predicted_s == 0
    assert report.gather_then_slice_bytes == 2 * SPLIT // 2 * 2


def test_placement_puts_a_rank_where_its_weights_are(dense):
    """Stage 1 of the training ranks holds what generation rank 1 of two stages needs."""
    cluster = Cluster(gpus_per_node=4)
    report, _ = plan_reshard(dense, "colocated", Layout(pp=2), GenerationLayout(pp=2), cluster)
    assert report.received_bytes == 0


@pytest.mark.job
def test_servers_in_float8_receive_codes_and_scales():
    """A code is a byte; a scale has 4 and is one of 128 x 128, which divide the experts."""
    generate, model = GenerationLayout(tp=4, ep=4), find_published("Qwen3-30B-A3B")
    arguments = model, "disaggregated", Layout(dp=4, ep=4), generate, Cluster()
    plain, _ = plan_reshard(*arguments)
    report, _ = plan_reshard(*arguments, quantization="fp8_block")
    assert report.received_bytes == report.lower_bound_bytes
    # By hand, a layer: experts, each on one rank; q and o, split; k and v, as many heads as ranks.
    experts, heads = 128 * 3 * 768 * 2048, (2 * 32 + 2 * 4) * 128 * 2048
    saved = 48 * (experts + heads) * (1 - 4 / 128**2)
    assert plain.received_bytes - report.received_bytes == saved


@pytest.mark.job
def test_deepseek_v3_meets_the_bound_and_moves_a_thirtieth_of_gather_then_slice():
    layout = Layout(pp=16, dp=16, ep=16, first_stage_layers=3, last_stage_layers=2)
    generate = GenerationLayout(tp=32, dp=8)
    report, _ = plan_reshard(
        find_published("DeepSeek-V3"), "disaggregated", layout, generate, Cluster()
    )
    assert len(report.ranks) == 256
    for rank in report.ranks:
        assert rank.received_bytes == rank.lower_bound_bytes
    # 671,026,419,200 parameters in bfloat16 and 58 router biases in float32.
    model_bytes = 2 * 671_026_419_200 + 2 * 58 * 256
    assert report.gather_then_slice_bytes == 256 * model_bytes
    assert report.gather_then_slice_bytes > 30 * report.received_bytes


@pytest.mark.job
def test_experts_of_data_parallel_attention_are_received_once():
    """By hand: with ep=32 an expert is on one of 32 workers, without on each of four replicas.

    Shared experts are whole on each worker then, as vLLM has them (deepseek_v2.py: disable_tp where
    is_sequence_parallel), and without are split in each replica.
    """
    layout = Layout(pp=16, dp=16, ep=16, first_stage_layers=3, last_stage_layers=2)
    received = {}
    for ep in (1, 32):
        report, _ = plan_reshard(
            find_published("DeepSeek-V3"), "disaggregated", layout,
            GenerationLayout(tp=8, dp=4, ep=ep), Cluster(),
        )  # fmt: skip
        assert all(rank.received_bytes == rank.lower_bound_bytes for rank in report.ranks)
        received[ep] = report.received_bytes
    expert_bytes = 2 * 58 * 3 * 2048 * 7168  # of one expert of each layer
    assert received[1] - received[32] == 3 * 256 * expert_bytes - (32 - 4) * expert_bytes


@pytest.mark.parametrize(
    ("name", "layout", "generate"),
    [
        ("GLM-4.7-Flash", Layout(tp=4, dp=2, ep=8), GenerationLayout(tp=4, dp=2)),
        nightly(("GLM-4.7", Layout(pp=4, tp=4, dp=4, ep=16), GenerationLayout(tp=8, dp=8))),
        nightly(
            (
                "Kimi-K2-Instruct",
                Layout(pp=16, dp=16, ep=16, first_stage_layers=3, last_stage_layers=2),
                GenerationLayout(tp=32, dp=8),
            )
        ),
    ],
)
def test_published_models_meet_the_bound(name, layout, generate):
    report, _ = plan_reshard(find_published(name), "disaggregated", layout, generate, Cluster())
    assert all(rank.received_bytes == rank.lower_bound_bytes for rank in report.ranks)


def test_the_command_prints_one_json_object_and_draws_the_traffic(dense, tmp_path, capsys):
    picture = tmp_path / "traffic.png"
    command.main(
        ["reshard", "--model", str(dense), "--mode", "disaggregated", "--train", "tp=2,dp=2",
         "--generate", "tp=4", "--json", "--plot", str(picture)]
    )  # fmt: skip
    report = json.loads(capsys.readouterr().out)
    assert {"received_bytes", "lower_bound_bytes", "gather_then_slice_bytes", "peak_buffer_bytes",
            "plan_s", "predicted_s", "ranks"} <= report.keys()  # fmt: skip
    expected = {"rank", "received_bytes", "lower_bound_bytes", "local_bytes"}
    assert all(rank.keys() == expected for rank in report["ranks"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    command.main(["reshard", "--model", str(dense), "--train", "tp=2", "--generate", "tp=2"])
    assert "gather-then-slice" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--generate", "tp=3"], "--generate tp=3 does not divide the model's 4 attention heads"),
        (["--generate", "tp=2,ep=2"], "--generate ep=2: the model has 0 experts; allowed: up to 1"),
        (["--generate", "cp=2"], "--generate=cp=2: 'cp' is unknown; allowed: tp, pp, dp, ep"),
        (["--generate", "pp=3"], "the model's layers=2; allowed: at least 3"),
        (["--generate", "tp=0"], "generate.tp=0; allowed: at least 1"),
        (["--train", "tp=x"], "--train=tp=x: 'tp=x'; allowed: tp=NUMBER"),
        (["--train", "pp=4"], "--train: pp * vpp = 4 * 1 chunks"),
        (["--mode", "both"], "--mode='both'; allowed: 'colocated', 'disaggregated'"),
        (["--generate", "tp=4"], "4 generation ranks on the devices of 2 training ranks"),
        (["--mode", "disaggregated", "--nodes", "1", "--gpus-per-node", "2"], "allowed: at least"),
        (["--gpus-per-node", "0"], "--gpus-per-node=0; allowed: at least 1"),
        (["--nic-gbps", "0"], "--nic-gbps=0.0; allowed: above 0"),
        (["--nic-gbps", "fast"], "invalid float value: 'fast'; see mcore-rl plan"),
    ],
)
def test_what_cannot_be_is_refused_by_name(dense, arguments, message):
    given = ["reshard", "--model", str(dense), "--train", "tp=2", "--generate", "tp=2", *arguments]
    with pytest.raises(ConfigError) as raised:
        command.main(given)
    assert message in str(raised.value)


def test_a_model_that_is_no_model_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("[1]")
    for name in ("x.json", "nothing"):
        with pytest.raises(ConfigError):
            plan_reshard(tmp_path / name, "colocated", Layout(), GenerationLayout(), Cluster())


@pytest.mark.job
@pytest.mark.parametrize("page", select_commands("plan"), ids=str)
def test_the_command_of_the_page_reaches_the_lower_bound_that_the_page_tells(
    page, monkeypatch, capsys
):
    monkeypatch.chdir(ROOT)
    command.main([*shlex.split(page.text)[2:], "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["received_bytes"] == report["lower_bound_bytes"]
