"""Memory plans: hand-worked cases, published configs, verdicts, and what makes a run fit."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml

from mcore_rl.cli.main import main
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import resolve_placement
from mcore_rl.config.schema import (
    DataConfig,
    EngineConfig,
    Float8Config,
    FSDPConfig,
    Layout,
    ModelConfig,
    OptimizerConfig,
    RecomputeConfig,
    RLConfig,
    RolloutConfig,
)
from mcore_rl.jobs.remote_paths import find_published
from mcore_rl.models.base import get_family
from mcore_rl.planner.activations import count_copies, count_layer_bytes
from mcore_rl.planner.fixes import Fix, apply_change, find_fixes, list_changes
from mcore_rl.planner.hardware import load_hardware
from mcore_rl.planner.memory import (
    CONTEXT_BYTES,
    NCCL_EXCHANGE_BYTES,
    NCCL_GROUP_BYTES,
    NCCL_PAIR_BYTES,
    Conditions,
    MemoryLimit,
    MemoryPlan,
    Moment,
    count_nccl_bytes,
    plan_memory,
)
from mcore_rl.planner.memory_check import find_device
from mcore_rl.planner.report import COLUMNS, describe_verdict
from tests.nightly import nightly
from tests.published_runs import RUNS, format_memory_table, plan_run_memory

ROOT = Path(__file__).resolve().parents[3]
CPU = Conditions("cpu", imbalance=1.0)
# Elements of a layer of Llama-3.1-70B for a token: input, norms, queries and keys twice and values,
# the result of attention with its projection and the sum, gate, up and product.
LLAMA = 8192 + 2 * 8192 + 2 * (8192 + 1024) + 1024 + 8192 + 2 * 8192 + 3 * 28672
# Of one of DeepSeek-V3, whose heads have 192 and 128 dims: latents of 1536 and 512, twice, and a
# rotary key; 8 of 256 experts, and a shared one. Routing: scores and map, and 24 bytes a choice.
DEEPSEEK = (
    7168 + 2 * 7168 + 4 * 128 * 192 + 128 * 128 + 2 * (1536 + 512) + 64
    + 128 * 128 + 2 * 7168 + 8 * (7168 + 3 * 2048) + 3 * 2048
)  # fmt: skip
AWARE = {"use_precision_aware_optimizer": True}
BFLOAT16_MOMENTS = {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
DEEPSEEK_ROUTER_BYTES = 256 * 8 + 8 * 24


def build_config(layout: Layout, **engine: object) -> RLConfig:
    config = RLConfig(
        model=ModelConfig(dtype="bfloat16"),
        data=DataConfig(max_prompt_tokens=1000),
        actor=EngineConfig(layout=layout, max_tokens_per_micro_batch=4096, **engine),  # type: ignore[arg-type]
        rollout=RolloutConfig(max_response_tokens=3000, kv_cache_bytes=4 << 30),
    )
    return replace(config, placement=resolve_placement(config))


def read_model(name: str) -> dict[str, object]:
    config = json.loads((find_published(name) / "config.json").read_text())
    return {**config.get("text_config", {}), **config}


def find_rl_fixes(config: RLConfig, model: dict[str, object], device: MemoryLimit) -> list[Fix]:
    return find_fixes(
        config,
        partial(list_changes, model=model),
        lambda changed: plan_memory(changed, model, Conditions()).worst.total,
        device.memory_bytes,
    )


def get_moments(plan: MemoryPlan) -> dict[str, Moment]:
    return {moment.name: moment for moment in plan.moments}


@pytest.mark.parametrize(
    ("name", "layout", "bytes_per_token"),
    [
        ("Llama-3.1-70B", Layout(), 2 * LLAMA),
        ("Llama-3.1-70B", Layout(tp=8), 2 * LLAMA / 8),
        ("DeepSeek-V3", Layout(), 2 * DEEPSEEK + DEEPSEEK_ROUTER_BYTES),
    ],
)
def test_a_layer_of_fused_modules_stores_what_is_counted_by_hand(name, layout, bytes_per_token):
    fields = get_family(read_model(name)).config_map(read_model(name))
    last = fields["num_layers"] - 1
    parts = count_layer_bytes(fields, last, layout, 2, "te")
    assert sum(parts.values()) == pytest.approx(bytes_per_token)


def test_the_first_stage_has_the_most_micro_batches_in_flight():
    assert [count_copies(Layout(pp=4), stage, 8) for stage in range(4)] == [[4], [3], [2], [1]]
    assert count_copies(Layout(pp=4), 0, 2) == [2]
    # (2 - 0 - 1) * 2 + 2 + 1 passes of a chunk: micro-batches 0 and 1 of both, and one of the first
    assert count_copies(Layout(pp=2, vpp=2), 0, 8) == [3, 2]


def test_an_update_has_weights_gradients_and_its_share_of_adam():
    optimizer = OptimizerConfig(distributed=True)
    config = build_config(Layout(tp=2, dp=2), optimizer=optimizer)
    plan = plan_memory(config, read_model("Qwen3-8B"), CPU)
    parameters = plan.roles[0].stages[0].parameters
    update, generate = get_moments(plan)["actor: update"], get_moments(plan)["rollout: generate"]
    assert update.kinds["weights"] == 2 * parameters
    assert update.kinds["gradients"] == 4 * parameters
    assert update.kinds["optimizer"] == 12 * parameters // 2
    assert generate.total == generate.kinds["weights"] + (4 << 30)
    push = get_moments(plan)["weight sync"]
    assert push.total == 2 * parameters + generate.kinds["weights"] + 2 * (64 << 20)
    config.actor.optimizer.cpu_offload = True
    offloaded = plan_memory(config, read_model("Qwen3-8B"), CPU)
    assert "optimizer" not in get_moments(offloaded)["actor: update"].kinds
    # A gradient, a weight and two moments in float32, on both ranks of each shard.
    assert offloaded.host["optimizer on the host"] == 4 * (12 * parameters // 2) // 12 * 16


@pytest.mark.parametrize(
    ("dtype", "engine", "bytes_per_parameter"),
    [
        # Two moments and a main weight in float32, which float32 weights are themselves.
        ("bfloat16", {}, 4 + 4 + 4),
        ("float32", {}, 4 + 4),
        # The precision-aware optimizer has the lower half of a main weight.
        ("bfloat16", {"megatron": AWARE}, 4 + 4 + 2),
        ("bfloat16", {"megatron": {**AWARE, "exp_avg_dtype": "bfloat16"}}, 2 + 4 + 2),
        ("bfloat16", {"megatron": {**AWARE, **BFLOAT16_MOMENTS}}, 2 + 2 + 2),
        ("bfloat16", {"megatron": {**AWARE, "store_param_remainders": False}}, 4 + 4 + 4),
        ("bfloat16", {"megatron": AWARE, "fp8": Float8Config("blockwise")}, 4 + 4 + 4),
    ],
)
def test_optimizer_state_has_the_dtypes_of_its_settings(dtype, engine, bytes_per_parameter):
    config = build_config(Layout(dp=4), optimizer=OptimizerConfig(distributed=True), **engine)
    config.model.dtype = dtype
    [stage] = plan_memory(config, read_model("Qwen3-8B"), CPU).roles[0].stages
    assert stage.optimizer_bytes == bytes_per_parameter * stage.parameters // 4


def test_gpus_have_contexts_and_communicators_of_all_processes_on_them():
    assert count_nccl_bytes(Layout()) == 0
    # tp, data-parallel ranks, and all ranks
    assert count_nccl_bytes(Layout(tp=2, dp=4)) == NCCL_PAIR_BYTES + 2 * NCCL_GROUP_BYTES
    # data-parallel and all ranks; experts are on every rank, and tokens go to 7 others
    nccl_bytes = count_nccl_bytes(Layout(dp=8, ep=8))
    assert nccl_bytes == 2 * NCCL_GROUP_BYTES + NCCL_EXCHANGE_BYTES
    plan = plan_memory(build_config(Layout(tp=2)), read_model("Qwen3-8B"), Conditions())
    update = get_moments(plan)["actor: update"]
    assert update.kinds["CUDA contexts"] == 2 * CONTEXT_BYTES  # the trainer's and the server's
    config = build_config(Layout(tp=2))
    config.placement.rollout = "own"
    alone = get_moments(plan_memory(config, read_model("Qwen3-8B"), Conditions()))
    assert alone["actor: update"].kinds["CUDA contexts"] == CONTEXT_BYTES
    assert {"weight sync, trainer", "weight sync, servers"} <= alone.keys()


def test_the_warm_start_has_the_devices_to_itself():
    config = build_config(Layout(tp=2))
    config.warm_start.num_steps, config.warm_start.layout = 1, Layout(tp=2)
    moments = get_moments(plan_memory(config, read_model("Qwen3-8B"), Conditions()))
    alone = count_nccl_bytes(config.warm_start.layout)
    assert moments["warm_start: update"].kinds["CUDA contexts"] == CONTEXT_BYTES
    assert moments["warm_start: update"].kinds["NCCL"] == alone
    # The trainer's, and the server's.
    assert moments["actor: update"].kinds["CUDA contexts"] == 2 * CONTEXT_BYTES


def test_recorded_keys_of_indexers_stay_on_the_device():
    config = build_config(Layout(dp=16, ep=16))
    config.trainer.prompts_per_step, config.algorithm.group_size = 16, 1
    model = read_model("DeepSeek-V3.2")
    assert "indexer keys" not in get_moments(plan_memory(config, model, CPU))["actor: update"].kinds
    config.actor.indexer_replay = "record"
    moments = get_moments(plan_memory(config, model, CPU))
    of_a_token = 61 * 2048 * 4  # 0.5 MB: layers, keys, 32-bit positions
    # A sample of 4,000 tokens, and its copy for the host; in the update the copy is of its pack.
    assert moments["actor: log-probs"].kinds["indexer keys"] == 2 * 4000 * of_a_token
    assert moments["actor: update"].kinds["indexer keys"] == 2 * 4000 * of_a_token
    config.algorithm.kl_coef = 0.1
    reference = get_moments(plan_memory(config, model, CPU))["reference: log-probs"]
    assert "indexer keys" not in reference.kinds


def test_a_critic_computes_values():
    config = build_config(Layout(tp=2))
    config.algorithm.advantage = "gae"
    moments = get_moments(plan_memory(config, read_model("Qwen3-8B"), CPU))
    assert {"critic: values", "critic: update"} <= moments.keys()
    assert "critic: log-probs" not in moments


def test_uneven_experts_take_more_on_the_fullest_rank():
    config, model = build_config(Layout(dp=8, ep=8)), read_model("Qwen3-30B-A3B")
    even, uneven = (
        get_moments(plan_memory(config, model, Conditions("cuda", imbalance)))["actor: update"]
        for imbalance in (1.0, 2.0)
    )
    # 48 layers route independently: twice the mean in one of them is 1 + 1 / sqrt(48) in all.
    expected = (1 + 1 / math.sqrt(48)) * even.kinds["MoE dispatch"]
    assert uneven.kinds["MoE dispatch"] == pytest.approx(expected, abs=2)


@pytest.mark.parametrize("granularity", ["selective", "full"])
def test_recompute_takes_less_than_none(granularity):
    model, recompute = read_model("Qwen3-8B"), RecomputeConfig(granularity, ["mlp"])
    none, less = (
        get_moments(plan_memory(build_config(Layout(), **engine), model, CPU))["actor: update"]
        for engine in ({}, {"recompute": recompute})
    )
    assert less.kinds["activations"] < 0.7 * none.kinds["activations"]


@pytest.mark.parametrize("name", ["DeepSeek-V3", nightly("Kimi-K2-Instruct"), "gpt-oss-20b"])
def test_a_quantised_config_is_planned_as_what_it_becomes(name):
    model, config = read_model(name), build_config(Layout())
    plain = {key: value for key, value in model.items() if key != "quantization_config"}
    assert "quantization_config" in model
    assert plan_memory(config, model, CPU).moments == plan_memory(config, plain, CPU).moments


@pytest.fixture
def plan(monkeypatch, capsys):
    """Run `mcore-rl plan memory --json` with some arguments; return exit status and report."""

    def run(*arguments: str) -> tuple[int, dict]:
        monkeypatch.setattr(sys, "argv", ["mcore-rl", "plan", "memory", *arguments, "--json"])
        status = main()
        return status, json.loads(capsys.readouterr().out)

    return run


@pytest.mark.job
def test_671b_fits_its_gpus_and_not_half_of_them(plan):
    words = ["DeepSeek-V3", "recipe=dsv3_671b"]
    half = ["actor.layout.dp=4", "actor.layout.ep=8", "rollout.num_servers=4"]

    status, report = plan(*words, "--hardware=h100")
    assert (status, report["fits"], report["fixes"]) == (0, True, [])
    status, report = plan(*words, *half, "--hardware=h100")
    assert (status, report["fits"]) == (1, False)
    worst = report["moments"][report["worst"]]
    assert worst["name"] == "actor: update" and worst["total"] > 110e9
    assert report["fixes"]
    status, report = plan(*words, *half, "--hardware=h200")
    assert (status, report["fits"]) == (0, True)


@pytest.mark.job
@pytest.mark.parametrize(
    "index",
    range(len(RUNS["memory"])),
    ids=[f"{run['system']}-{run['name']}-{run['gpus']}" for run in RUNS["memory"]],
)
def test_published_runs_fit_if_they_ran_and_only_then(index):
    run, plan = RUNS["memory"][index], plan_run_memory(index)
    config_gpus = plan.roles[0].num_ranks
    servers = next(role for role in plan.roles if role.name == "rollout")
    is_shared = "placement.rollout=own" not in run["settings"]
    assert run["gpus"] == config_gpus + (0 if is_shared else servers.num_ranks)
    assert servers.num_ranks == config_gpus
    fits = plan.worst.total <= MemoryLimit.parse(run["hardware"]).memory_bytes
    assert fits == run["fits"], f"{plan.worst.name}: {plan.worst.total / 1e9:.1f} GB"


@pytest.mark.job
def test_the_page_has_the_table_of_published_runs():
    page = (ROOT / "docs" / "planning.md").read_text()
    assert format_memory_table().strip() in page, "run python -m tests.published_runs"


def test_settings_that_make_a_run_fit_do():
    config, model = build_config(Layout(tp=2, dp=4)), read_model("Qwen3-8B")
    device = MemoryLimit.parse("62")
    fixes = find_rl_fixes(config, model, device)
    assert fixes
    for fix in fixes:
        texts = [text.partition("=") for text in fix.overrides]
        change = tuple((key, yaml.safe_load(value)) for key, _, value in texts)
        changed = apply_change(config, change)
        assert plan_memory(changed, model, Conditions()).worst.total == fix.total
        assert fix.fits == (fix.total <= device.memory_bytes)


def test_a_cheap_change_is_tried_again_when_another_moment_is_the_fullest():
    model, config = read_model("Qwen3-8B"), build_config(Layout(tp=2, dp=4))
    config.rollout.kv_cache_bytes = 80 << 30  # generation is the fullest, then the update
    [fix] = find_rl_fixes(config, model, MemoryLimit.parse("68"))
    assert fix.fits and "actor.optimizer.distributed=true" in fix.overrides
    assert f"rollout.kv_cache_bytes={40 << 30}" in fix.overrides
    assert "communication" not in fix.cost


def test_a_cache_of_the_default_size_fills_a_gpu_to_nine_tenths():
    """Qwen3-8B on a GPU of 80 GB, for 512 sequences of 4,000 tokens."""
    model, config = read_model("Qwen3-8B"), build_config(Layout(tp=2))
    config.rollout.kv_cache_bytes = None
    need = (512 * 4000 + 32) * 36 * 2 * 8 * 128 * 2
    moments = get_moments(plan_memory(config, model, Conditions(memory_bytes=80_000_000_000)))
    assert moments["rollout: generate"].total == pytest.approx(72e9, abs=10)
    for memory_bytes in (0, 500_000_000_000):  # not known, and more than is needed
        plan = plan_memory(config, model, Conditions(memory_bytes=memory_bytes))
        assert get_moments(plan)["rollout: generate"].kinds["KV cache"] == need
    [server] = [role for role in plan_memory(config, model, CPU).roles if role.has_servers]
    assert server.stages[0].cache_bytes == 4 << 30


def test_changes_together_take_no_more_gpus_than_they_say():
    model, config = read_model("Qwen3-8B"), build_config(Layout(tp=2, dp=4))
    [fix] = find_rl_fixes(config, model, MemoryLimit.parse("5"))
    assert not fix.fits
    values = {
        key: yaml.safe_load(text) for key, _, text in (t.partition("=") for t in fix.overrides)
    }
    sizes = [values.get(f"actor.layout.{axis}", 1) for axis in ("tp", "pp", "cp", "dp")]
    assert math.prod(sizes) == 8 * (2 if "twice the GPUs" in fix.cost else 1), fix


def test_the_verdict_names_the_worst_ranks_and_how_much_is_missing():
    plan = plan_memory(build_config(Layout(tp=2)), read_model("Qwen3-8B"), Conditions())
    total = plan.worst.total / 1e9
    [fits] = describe_verdict(plan, MemoryLimit("GPU", plan.worst.total + 10**9), [])
    assert fits.startswith("memory: fits") and fits.endswith("1.0 GB are left")
    line = describe_verdict(plan, MemoryLimit("GPU", plan.worst.total - 2 * 10**9), [])[0]
    assert f"{total:,.1f} of {total - 2:,.1f} GB of GPU (actor: update, ranks 0-1 of" in line
    assert line.endswith("2.0 GB are missing")


def test_fsdp_gathers_a_layer_and_the_root():
    engine = {"backend": "fsdp", "recompute": RecomputeConfig("full")}
    config = build_config(Layout(dp=8), **engine)
    moments = get_moments(plan_memory(config, read_model("Qwen3-8B"), Conditions()))
    embedding, layer = 151936 * 4096, 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288 + 2 * 4096
    # Log-probs have the root, with its norm, a layer, and the next one in a buffer, in bfloat16.
    scores = moments["actor: log-probs"].kinds["gathered weights"]
    assert scores == 2 * (2 * embedding + 4096 + 2 * layer)
    # An update also has gradients: of the head, of one matrix, and those that are reduced.
    update = moments["actor: update"].kinds["gathered weights"]
    assert update == scores + 2 * embedding + 2 * 4096 * 12288 + 4 * layer


def test_fsdp_with_cpu_offload_has_weights_gradients_and_adam_on_the_host():
    config = build_config(Layout(dp=8), backend="fsdp", fsdp=FSDPConfig(cpu_offload=True))
    plan = plan_memory(config, read_model("Qwen3-8B"), Conditions("cpu"))
    update = get_moments(plan)["actor: update"].kinds
    assert update["weights"] == update["gradients"] == update["optimizer"] == 0
    parameters = plan.roles[0].stages[0].parameters
    assert plan.host["FSDP2 on the host"] == 8 * 16 * parameters
    assert "offloaded weights" not in plan.host and plan.uncounted == ("actor",)
    [servers] = [role for role in plan.roles if role.name == "rollout"]
    # Boxes of the shards are copied to the buckets of a weight sync; the shards stay.
    assert get_moments(plan)["weight sync"].kinds["weights"] == servers.stages[0].weight_bytes


def test_every_kind_of_a_plan_has_a_column():
    columns = {kind for kinds in COLUMNS.values() for kind in kinds}
    shared = build_config(Layout(dp=8), backend="fsdp")
    separate = build_config(Layout(ep=8, dp=8), indexer_replay="record")
    separate.placement.rollout = "own"
    for config, name in ((shared, "Qwen3-8B"), (separate, "DeepSeek-V3.2")):
        moments = plan_memory(config, read_model(name), Conditions()).moments
        assert {kind for moment in moments for kind in moment.kinds} <= columns


def test_the_verdict_names_roles_whose_activations_are_not_counted(monkeypatch, capsys):
    words = ["recipe=quickstart_fsdp", "actor.fsdp.packing=false", "--hardware=h100"]
    monkeypatch.setattr(sys, "argv", ["mcore-rl", "plan", "memory", *words])
    assert main() == 0
    verdict = capsys.readouterr().out.splitlines()[0]
    assert "without activations of warm_start, actor" in verdict


def test_hardware_has_a_name_or_gigabytes():
    assert MemoryLimit.parse("80.5") == MemoryLimit("GPU", 80_500_000_000)
    assert MemoryLimit.parse("h200").memory_bytes > 140e9


def test_ranks_on_the_hardware_of_a_cpu_have_no_cuda_contexts(plan, tmp_path):
    (tmp_path / "mine.yaml").write_text(load_hardware("cpu").to_yaml())
    (tmp_path / "config.json").write_text(json.dumps(read_model("Qwen3-8B")))
    _, report = plan(f"model.path={tmp_path}", f"--hardware={tmp_path / 'mine.yaml'}")
    assert all("CUDA contexts" not in moment["kinds"] for moment in report["moments"])


def test_nodes_with_gpus_do_not_have_the_hardware_of_a_cpu():
    message = "--gpus-per-node=8: --hardware='cpu' has device: cpu; allowed: hardware with"
    with pytest.raises(ConfigError, match=message):
        find_device("cpu", 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hardware=h1000"], "--hardware='h1000' is unknown"),
        (["--hardware=80GB"], "or gigabytes"),
        (["--hardware="], "--hardware='' is unknown"),
        (["--hardware=-3"], "--hardware='-3'; allowed: a name, a file, or gigabytes above 0"),
        (["--imbalance=0.5"], "--imbalance=0.5; allowed: a number from 1"),
        (["--concurrency=-1"], "--concurrency=-1"),
        (["--device-type=tpu"], "--device-type='tpu'"),
        (
            ["--device-type=cuda", "--hardware=cpu"],
            "the device of --hardware='cpu' is 'cpu'; allowed:",
        ),
        (["actor.layout.tp=3"], "actor.layout.tp=3"),
        (["actor.layut.tp=2"], "actor.layut"),
        (["rollout.engine.max_num_sequences=2"], "rollout.engine.max_num_sequences"),
        (["rollout.engine.compilation_config=eager"], "rollout.engine.compilation_config"),
        (["actor.megatron.exp_avg_dtype=bfloat16"], "needs actor.megatron.use_precision_aware"),
        (
            [
                "actor.megatron.use_precision_aware_optimizer=true",
                "actor.optimizer.distributed=false",
            ],
            "needs actor.optimizer.distributed=true",
        ),
    ],
)
def test_senseless_input_gets_one_error(options, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(json.dumps(read_model("Qwen3-8B")))
    words = ["recipe=qwen3_8b", f"model.path={tmp_path}", *options]
    monkeypatch.setattr(sys, "argv", ["mcore-rl", "plan", "memory", *words])
    assert main() == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error


def test_a_family_of_a_user_is_planned(tmp_path, monkeypatch, capsys):
    model = read_model("Qwen3-8B") | {"architectures": ["MyForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(model))
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\n"
        "from mcore_rl.models.qwen3 import FAMILY as BASE\n"
        'FAMILY = replace(BASE, name="mine", architecture="MyForCausalLM")\n'
    )
    words = ["recipe=qwen3_8b", f"model.path={tmp_path}", f"model.family={tmp_path}/mine.py:FAMILY"]
    monkeypatch.setattr(sys, "argv", ["mcore-rl", "plan", "memory", *words, "--json"])
    assert main() == 0
    assert json.loads(capsys.readouterr().out)["moments"][0]["kinds"]["weights"] > 8e9


@pytest.mark.job
@pytest.mark.parametrize(
    ("name", "setting"), [("DeepSeek-V3", "rollout.quantization=fp8_block"), ("DeepSeek-V3.2", "")]
)
def test_what_gpus_alone_can_is_planned_on_a_machine_without_them(plan, name, setting):
    """Float8 servers and sparse attention, which vLLM has not on CPUs."""
    settings = [setting] if setting else []
    _, report = plan(name, "recipe=dsv3_671b", *settings, "--hardware=h200")
    assert report["fits"]
