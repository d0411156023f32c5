"""Steps of the three trainers, the search of layouts, and the commands."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mcore_rl.cli.compose import compose_config
from mcore_rl.cli.plan import main
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import TRANSFORMERS
from mcore_rl.config.schema import EngineConfig, Layout, RLConfig
from mcore_rl.jobs.placement import resolve_for_nodes
from mcore_rl.jobs.remote_paths import find_published
from mcore_rl.models.base import read_config, scope_family
from mcore_rl.planner.calibrate import build_float8_product, measure_seconds
from mcore_rl.planner.flops import count_work
from mcore_rl.planner.generation import Lengths
from mcore_rl.planner.hardware import load_hardware
from mcore_rl.planner.layout import (
    Candidate,
    SearchResult,
    estimate_training_bytes,
    search_layouts,
    search_trainers,
)
from mcore_rl.planner.memory import Conditions, plan_memory
from mcore_rl.planner.step import StepTime, predict_step
from mcore_rl.planner.training import Load, TrainingModel
from tests.pages import FENCE, ROOT, Command, select_commands
from tests.published_runs import (
    RUNS,
    format_tables,
    predict_step_s,
    read_model,
    search_step_s,
    search_update_s,
)

H100 = load_hardware("h100")
LENGTHS = Lengths(2000, 8192)


def predict(mode: str, placement: str, **changes: Any) -> StepTime:
    config = build_config("Qwen3-30B-A3B", mode, placement)
    config.actor.layout.dp, config.actor.layout.ep = 16, 8
    config.rollout.tp, config.rollout.num_servers = 2, 8
    config.rollout.kv_cache_bytes = 30 << 30
    model = read_model({"model": "Qwen3-30B-A3B"})
    return predict_step(config, model, H100, LENGTHS, **changes)


def build_config(name: str, mode: str, placement: str) -> RLConfig:
    config = RLConfig()
    config.model.path, config.model.dtype = name, "bfloat16"
    config.trainer.mode, config.placement.rollout = mode, placement
    config.weight_sync.method = "colocated" if placement == "shared" else "disaggregated"
    config.trainer.prompts_per_step, config.algorithm.group_size = 64, 16
    config.data.max_prompt_tokens, config.rollout.max_response_tokens = 1024, 8192
    config.actor.optimizer.distributed = config.actor.optimizer.overlap = True
    return config


def test_parts_of_a_step_add_up_for_each_trainer() -> None:
    shared = predict("sync", "shared")
    work = shared.generation.total_s + shared.training_s + shared.offload_s
    assert shared.step_s == pytest.approx(work + shared.weight_sync_s)
    assert shared.num_devices == 16

    separate = predict("sync", "own")
    generation, training = separate.generation.total_s, separate.training_s
    assert separate.step_s == pytest.approx(generation + training + separate.weight_sync_s)
    assert (separate.trainer_idle_s, separate.servers_idle_s) == (generation, training)
    assert separate.num_devices == 32

    ahead = predict("one_step_off", "own")
    assert ahead.step_s == pytest.approx(max(generation, training) + ahead.weight_sync_s)
    assert ahead.trainer_idle_s == pytest.approx(max(0, generation - training))
    assert ahead.servers_idle_s == pytest.approx(max(0, training - generation))

    streaming = predict("fully_async", "own")
    assert streaming.step_s < ahead.step_s  # no server drains


def test_log_probs_of_reference_and_old_policy_are_passes() -> None:
    config = build_config("Qwen3-8B", "sync", "shared")
    config.actor.layout.dp = config.rollout.num_servers = 8
    model = read_model({"model": "Qwen3-8B"})
    plain = predict_step(config, model, H100, LENGTHS)
    config.algorithm.kl_coef = 0.01
    config.algorithm.log_prob_pass = "always"
    both = predict_step(config, model, H100, LENGTHS)
    assert plain.log_probs_s == plain.reference_s == 0
    assert both.log_probs_s == both.reference_s > 0
    assert both.step_s == pytest.approx(plain.step_s + 2 * both.log_probs_s)


def test_an_actor_with_adapters_is_its_reference() -> None:
    config = build_config("Qwen3-8B", "sync", "shared")
    config.actor.layout.dp = config.rollout.num_servers = 8
    config.actor.lora.rank, config.algorithm.kl_coef = 8, 0.01
    step = predict_step(config, read_model({"model": "Qwen3-8B"}), H100, LENGTHS)
    assert step.reference_s > 0 and step.num_devices == 8


def test_reward_model_and_teachers_have_a_pass_each(tmp_path: Path) -> None:
    config = build_config("Qwen3-8B", "sync", "shared")
    config.actor.layout.dp = config.rollout.num_servers = 8
    model = read_model({"model": "Qwen3-8B"})
    (tmp_path / "config.json").write_text(json.dumps(model))
    plain = predict_step(config, model, H100, LENGTHS)
    config.reward_model.model_path, config.reward_model.layout.dp = str(tmp_path), 8
    teacher = {"model_path": str(tmp_path), "layout": {"dp": 4}}
    config.teacher.models = {"one": teacher, "two": {**teacher, "layout": {"dp": 8}}}
    config.placement.teacher = "own"
    step = predict_step(config, model, H100, LENGTHS)
    samples = config.trainer.prompts_per_step * config.algorithm.group_size
    load = Load(samples * (LENGTHS.mean + LENGTHS.prompt), LENGTHS.sequence)
    engine = EngineConfig(layout=Layout(dp=8))
    forward_s = TrainingModel(count_work(model), engine, H100).predict_forward(load)
    # Without the output layer: 151,936 of 8.19 B parameters a token, and float32 logits.
    assert 0.8 * forward_s < step.reward_model_s < 0.95 * forward_s
    assert step.teachers_s == pytest.approx(3 * forward_s, rel=0.01)  # on four devices, on eight
    assert step.scores_s == step.reward_model_s + step.teachers_s
    assert step.training_s == pytest.approx(plain.training_s + step.scores_s)
    assert step.num_devices == 8 + 4 + 8


@pytest.mark.parametrize(("hardware", "is_faster"), [("h100", True), ("a100_80", False)])
def test_float8_products_take_their_rate_or_that_of_the_next_dtype(
    hardware: str, is_faster: bool
) -> None:
    config = build_config("Qwen3-8B", "sync", "shared")
    config.actor.layout.dp = config.rollout.num_servers = 8
    model, device = read_model({"model": "Qwen3-8B"}), load_hardware(hardware)
    wide = predict_step(config, model, device, LENGTHS).update.compute_s
    config.actor.fp8.recipe = "blockwise"
    step = predict_step(config, model, device, LENGTHS)
    assert (step.update.compute_s < 0.75 * wide) == is_faster
    assert 0 < step.mfu < 1


def test_weight_sync_takes_the_bytes_of_its_plan() -> None:
    step = predict("sync", "own", sync_bytes=45e9)
    assert step.weight_sync_s == pytest.approx(1 + 2 * 20e-6)


@pytest.mark.parametrize(
    "run", RUNS["steps"], ids=[f"{r['name']}-{r['mode']}" for r in RUNS["steps"]]
)
def test_published_steps_take_at_least_what_is_predicted(run: dict[str, Any]) -> None:
    assert 0.3 < predict_step_s(run) / run["step_s"] <= 1.0


@pytest.mark.job
def test_the_page_has_the_tables_of_published_runs() -> None:
    page = Path(__file__).parents[3] / "docs" / "planning_step.md"
    text = page.read_text()
    for table in format_tables().split("\n\n"):
        assert table.strip() in text, "run python -m tests.published_runs"


def search(
    name: str, num_devices: int, mode: str = "sync", placement: str = "shared"
) -> SearchResult:
    config = build_config(name, mode, placement)
    return search_layouts(config, read_model({"model": name}), H100, num_devices, LENGTHS)


def test_search_returns_the_fastest_layouts_that_fit() -> None:
    result = search("Qwen3-30B-A3B", 32)
    steps = [candidate.step.step_s for candidate in result.best]
    assert len(steps) == 10 and steps == sorted(steps)
    for candidate in result.best:
        assert candidate.engine.layout.world_size == 32
        assert candidate.rollout.num_servers * candidate.rollout.num_workers == 32
        assert max(candidate.training_bytes, candidate.serving_bytes) <= H100.memory_bytes
        assert candidate.reason
    assert all(layout.missing_bytes > 0 for layout in result.exceeding)


def list_runs(kind: str, most_gpus: int) -> list[Any]:
    """Return the published runs as parameters; those on more GPUs are of the nightly lane."""
    return [
        pytest.param(
            run,
            id=f"{run['name']}-{run['gpus']}-{run.get('mode', run['hardware'])}-{index}",
            marks=[pytest.mark.nightly] * (run["gpus"] > most_gpus),
        )
        for index, run in enumerate(RUNS[kind])
    ]


@pytest.mark.job
@pytest.mark.parametrize("run", list_runs("training", 128))
def test_search_is_at_least_as_fast_as_a_published_training_layout(run: dict[str, Any]) -> None:
    published_s, fastest_s = search_update_s(run)
    assert fastest_s <= published_s


@pytest.mark.parametrize("run", list_runs("steps", 16))
def test_search_is_at_least_as_fast_as_the_layouts_of_a_published_step(
    run: dict[str, Any],
) -> None:
    assert search_step_s(run) <= predict_step_s(run)


@pytest.mark.job
def test_search_varies_experts_tensor_parallelism_recompute_and_the_place_of_adam() -> None:
    model = read_model({"model": "Qwen3-30B-A3B"})
    config = build_config("Qwen3-30B-A3B", "sync", "shared")
    work, load = count_work(model), Load(2_000_000, 3000)
    seen = set()
    for gigabytes in (85, 45, 30):
        device = replace(H100, memory_bytes=gigabytes * 10**9)
        trainers, exceeding, _ = search_trainers(config, model, work, device, 16, load)
        for trainer in (*trainers, *exceeding):
            engine = trainer.engine
            seen.add((engine.recompute.granularity, engine.optimizer.cpu_offload))
            seen.add(engine.layout.etp)
    assert {("selective", False), ("full", False), ("full", True), 1, 2} <= seen


def paste(candidate: Candidate, *settings: str) -> RLConfig:
    """Compose the overrides of a candidate, and resolve what comes of them."""
    config = compose_config(RLConfig, [*settings, *candidate.overrides])
    return resolve_for_nodes(config, "cuda", needs_data=False)


@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        (
            ("critic", "reward_model"),
            ["algorithm.advantage=gae", "reward_model.model_path=MODEL", "algorithm.kl_coef=0.01"],
        ),
        (
            ("teacher",),
            ["algorithm.distillation.loss=sampled_kl", "teacher.models.big.model_path=MODEL"],
        ),
    ],
)
def test_overrides_are_pasted_for_every_engine_of_a_run(
    keys: tuple[str, ...], settings: list[str], tmp_path: Path
) -> None:
    model = read_model({"model": "Qwen3-8B"})
    (tmp_path / "config.json").write_text(json.dumps(model))
    words = ["recipe=qwen3_8b", "model.path=MODEL", "algorithm.filter.group_filter=''", *settings]
    words = [word.replace("MODEL", str(tmp_path)) for word in words]
    composed = compose_config(RLConfig, words)
    config = resolve_for_nodes(composed, "cuda", needs_data=False)
    for candidate in search_layouts(config, model, H100, 16, LENGTHS).best[:3]:
        pasted = paste(candidate, *words)
        assert pasted.actor.layout == candidate.engine.layout
        assert pasted.actor.recompute.granularity == candidate.engine.recompute.granularity
        assert pasted.rollout == candidate.rollout
        for key in keys:
            engine = getattr(pasted, key)
            vpp = candidate.engine.layout.vpp if key == "critic" else 1
            assert engine.layout == replace(candidate.engine.layout, vpp=vpp)
        total = plan_memory(pasted, model, Conditions()).worst.total
        assert max(candidate.training_bytes, candidate.serving_bytes) == total


def test_devices_of_roles_on_pools_of_their_own_are_not_searched(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(read_model({"model": "Qwen3-8B"})))
    config = build_config("Qwen3-8B", "sync", "shared")
    config.reward_model.model_path, config.reward_model.layout.tp = str(tmp_path), 8
    config.placement.reward_model = "own"
    model = read_model({"model": "Qwen3-8B"})
    for candidate in search_layouts(config, model, H100, 16, LENGTHS).best:
        assert candidate.engine.layout.world_size == 8
        assert candidate.config.reward_model.layout == Layout(tp=8)
    with pytest.raises(ConfigError, match=r"--devices=8: reward_model take 8 of them; allowed:"):
        search_layouts(config, model, H100, 8, LENGTHS)


def test_a_setting_that_no_layout_allows_is_refused_by_name() -> None:
    config = build_config("Qwen3-8B", "sync", "shared")
    config.weight_sync.method = "disaggregated"
    with pytest.raises(ConfigError, match=r"weight_sync\.method='disaggregated'"):
        search_layouts(config, read_model({"model": "Qwen3-8B"}), H100, 8, LENGTHS)


def test_a_backend_without_layouts_of_megatron_is_refused_by_name() -> None:
    config = build_config("Qwen3-8B", "sync", "shared")
    config.actor.backend = "fsdp"
    with pytest.raises(ConfigError, match=r"actor\.backend='fsdp'.*allowed: 'megatron'"):
        search_layouts(config, read_model({"model": "Qwen3-8B"}), H100, 8, LENGTHS)


def test_a_backend_whose_passes_are_not_timed_is_refused_by_name() -> None:
    config = build_config("Qwen3-8B", "sync", "shared")
    config.actor.backend = "fsdp"
    with pytest.raises(ConfigError, match=r"backend='fsdp': the time .* allowed: 'megatron'"):
        predict_step(config, read_model({"model": "Qwen3-8B"}), H100, LENGTHS)


def test_a_precision_aware_optimizer_has_a_smaller_state() -> None:
    config = build_config("Qwen3-8B", "sync", "shared")
    config.actor.layout.dp = config.rollout.num_servers = 8
    model = read_model({"model": "Qwen3-8B"})
    plain = predict_step(config, model, H100, LENGTHS)
    estimate = estimate_training_bytes(TrainingModel(count_work(model), config.actor, H100))
    moments = {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
    config.actor.megatron = {"use_precision_aware_optimizer": True, **moments}
    aware = predict_step(config, model, H100, LENGTHS)
    small = estimate_training_bytes(TrainingModel(count_work(model), config.actor, H100))
    assert small["optimizer"] == pytest.approx(estimate["optimizer"] * 6 / 12)
    # Adam reads a gradient of 4 bytes, reads and writes its state, and writes the weight.
    ratio = (4 + 2 * 6 + 2) / (4 + 2 * 12 + 2)
    assert aware.update.optimizer_s == pytest.approx(plain.update.optimizer_s * ratio)
    assert aware.offload_s < plain.offload_s


@pytest.mark.nightly
def test_search_of_1024_devices_has_layouts_of_whole_nodes() -> None:
    result = search("DeepSeek-V3", 1024, "fully_async", "own")
    for candidate in result.best:
        servers = candidate.rollout.num_servers * candidate.rollout.num_workers
        assert candidate.engine.layout.world_size + servers <= 1024
        assert candidate.engine.layout.world_size % 8 == 0


def test_search_without_a_layout_that_fits_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"--devices=8: no layout of 671.0 B.*allowed: more"):
        search("DeepSeek-V3", 8)


def test_each_rank_of_servers_has_a_cache_for_its_sequences_alone() -> None:
    model = read_model({"model": "Qwen3-30B-A3B"})  # 48 layers with 4 key heads of 128
    best = search("Qwen3-30B-A3B", 32).best
    assert any(candidate.rollout.dp > 1 for candidate in best)
    for candidate in best:
        rollout, config = candidate.rollout, candidate.config
        groups = -(-config.trainer.prompts_per_step // rollout.num_servers)
        sequences = min(-(-groups * config.algorithm.group_size // rollout.dp), 1024)
        blocks = sequences * -(-config.max_sequence_tokens // 32) + 1
        cache = blocks * 32 * 48 * 2 * max(1, 4 // rollout.tp) * 128 * 2
        plan = plan_memory(config, model, Conditions(memory_bytes=H100.memory_bytes))
        [role] = [role for role in plan.roles if role.has_servers]
        assert role.stages[0].cache_bytes <= cache
        generate = next(moment for moment in plan.moments if moment.name == "rollout: generate")
        if role.stages[0].cache_bytes < cache:
            assert generate.total == pytest.approx(0.9 * H100.memory_bytes, abs=10)
        assert candidate.serving_bytes <= max(0.9 * H100.memory_bytes, generate.total)
        assert "rollout.kv_cache_bytes=null" in candidate.overrides


def test_a_longer_pipeline_is_chosen_for_less_memory() -> None:
    roomy = search("Qwen3-8B", 16).best[0]
    config = build_config("Qwen3-8B", "sync", "shared")
    small = replace(H100, memory_bytes=40_000_000_000)
    tight = search_layouts(config, read_model({"model": "Qwen3-8B"}), small, 16, LENGTHS).best[0]
    assert tight.training_bytes < roomy.training_bytes
    assert tight.step.step_s > roomy.step.step_s


def test_layouts_without_a_tenth_of_the_memory_to_spare_come_after_slower_ones() -> None:
    config, model = build_config("Qwen3-8B", "sync", "shared"), read_model({"model": "Qwen3-8B"})
    device = replace(H100, memory_bytes=44_000_000_000)
    best = search_layouts(config, model, device, 2, LENGTHS).best
    sizes = [max(candidate.training_bytes, candidate.serving_bytes) for candidate in best]
    has_margin = [size <= 0.9 * 44e9 for size in sizes]
    assert has_margin == [candidate.has_margin for candidate in best]
    assert {*has_margin} == {True, False} and has_margin == sorted(has_margin, reverse=True)
    times = [candidate.step.step_s for candidate in best]
    assert min(times) < times[0] == min(itertools.compress(times, has_margin))


def test_plan_layout_marks_layouts_without_a_margin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(read_model({"model": "Qwen3-8B"})))
    device = replace(H100, memory_bytes=44_000_000_000)
    (tmp_path / "small.yaml").write_text(device.to_yaml())
    words = ["recipe=qwen3_8b", f"model.path={tmp_path}", "--devices=2"]
    main(["layout", *words, f"--hardware={tmp_path}/small.yaml"])
    assert "after all others" in capsys.readouterr().out


def test_layouts_for_the_hardware_of_a_cpu_are_planned_without_cuda() -> None:
    config, model = build_config("Qwen3-8B", "sync", "shared"), read_model({"model": "Qwen3-8B"})
    best = search_layouts(config, model, replace(H100, device="cpu"), 16, LENGTHS).best[0]
    plan = plan_memory(best.config, model, Conditions("cpu"))
    assert max(best.training_bytes, best.serving_bytes) == plan.worst.total


# Commands


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(find_published("DeepSeek-V3") / "config.json", folder)  # quantised, as published
    return folder


def test_plan_step_prints_each_part(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["recipe=dsv3_671b", f"model.path={model}"]
    main(["step", *settings, "--hardware", "h200", "--json"])
    step = json.loads(capsys.readouterr().out)
    assert step["step_s"] > step["generation"]["decode_s"] > 0
    assert step["update"]["expert_parallel_s"] > 0
    main(["step", *settings, "--hardware", "h200"])
    text = capsys.readouterr().out
    assert "expert-parallel exchange" in text and "MFU of the update" in text


@pytest.mark.job
def test_plan_layout_writes_a_recipe_that_a_run_accepts(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fastest.yaml"
    settings = ["recipe=dsv3_671b", f"model.path={model}"]
    main(["layout", *settings, "--hardware", "h200", "--devices", "256", "--write", str(path)])
    text = capsys.readouterr().out
    assert f"wrote {path}" in text and "actor.layout.tp=" in text and "decided by" in text
    config = compose_config(RLConfig, [f"recipe={path}"])
    resolved = resolve_for_nodes(config, "cuda", needs_data=False)
    pasted = [
        word for line in text.splitlines() if line.startswith("actor.") for word in line.split()
    ]
    assert resolved.actor.layout == compose_config(RLConfig, [*settings, *pasted]).actor.layout
    assert resolved.actor.layout.world_size <= 256


# Lines of their output that a page may show in the block after that of the command.
STARTS: dict[str, tuple[str, ...]] = {
    "memory": ("memory: ",),
    "step": ("generation ", "update, ", "a step "),
    "layout": (),
    "calibrate": (),
}


def list_shown_lines(command: Command) -> list[str]:
    blocks = [b.replace("\\\n", " ") for _, b in FENCE.findall((ROOT / command.page).read_text())]
    place = next(i for i, b in enumerate(blocks) if command.text in " ".join(b.split()))
    return blocks[place + 1].splitlines() if place + 1 < len(blocks) else []


ON_PAGES = {command.text: command for command in select_commands("planner")}  # each once


@pytest.mark.job
@pytest.mark.parametrize("command", ON_PAGES.values(), ids=str)
def test_commands_of_the_pages_run_and_print_what_the_pages_show(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    words = command.text.split()[2:]
    assert main(words) == 0
    printed = capfd.readouterr().out.splitlines()
    same = [c for c in select_commands("planner") if c.text == command.text]
    shown = {line for c in same for line in list_shown_lines(c)}
    assert {line for line in shown if line.startswith(STARTS[words[0]])} <= {*printed}
    if words[0] == "layout":  # it writes a recipe, which is what the settings to paste make
        settings = [word for word in words if "=" in word and word[:2] != "--"]
        [pasted] = [line.split() for line in printed if line.startswith("actor.layout.")]
        written = compose_config(RLConfig, [f"recipe={words[words.index('--write') + 1]}"])
        assert compose_config(RLConfig, [*settings, *pasted]) == written


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["step", "--hardware", "h100"], "no settings; allowed: recipe=NAME"),
        (["step", "recipe=dsv3_671b", "--hardware", "h300"], "--hardware='h300' is unknown"),
        (["step", "model.path=MODEL", "--hardware", "h100", "--prompt-tokens", "0"], "--prompt-"),
        (
            [
                "step",
                "model.path=MODEL",
                "--hardware",
                "h100",
                "--lengths",
                "x",
                "--response-tokens",
                "9",
            ],
            "--response-tokens with --lengths",
        ),
        (["layout", "recipe=dsv3_671b", "--hardware", "h100"], "required: --devices"),
        (["layout", "model.path=MODEL", "--hardware", "h100", "--devices", "0"], "--devices=0"),
        (
            ["layout", "model.path=MODEL", "--hardware", "h100", "--devices", "1000000000"],
            "--devices=1000000000: no layout divides the model, with at least one sequence",
        ),
        (["step", "model.path=MODEL", "--hardware", "h100", "--length-sigma", "9"], "0 to 5"),
        (
            ["step", "model.path=MODEL", "--hardware", "h100", "--prompt-tokens", "1e9"],
            "data.max_prompt_tokens=",
        ),
        (["step", "model.path=MODEL", "--hardware", "h100", "actor.layout.tp=3"], "tp=3"),
        (["calibrate", "--device", "tpu"], "--device='tpu'; allowed: 'cuda', 'cpu'"),
    ],
)
def test_senseless_input_gets_one_error(arguments: list[str], message: str, model: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        main([word.replace("MODEL", str(model)) for word in arguments])


@pytest.mark.job
@pytest.mark.parametrize(("name", "dtype"), [("cpu", "float32"), ("h100", "bfloat16")])
def test_defaults_of_settings_are_those_of_the_device_in_a_hardware_file(
    name: str, dtype: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(load_hardware(name).to_yaml())
    steps = []
    for hardware, settings in (
        (name, []),
        (name, [f"model.dtype={dtype}"]),
        (str(tmp_path / "mine.yaml"), []),
    ):
        main(["step", f"model.path={model}", *settings, "--hardware", hardware, "--json"])
        steps.append(json.loads(capsys.readouterr().out))
    assert steps == [steps[0]] * 3


@pytest.mark.job
def test_calibrate_writes_a_file_that_plans_accept(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    main(["calibrate", "--device", "cpu", "--base", "h100", "--write", str(path)])
    hardware = load_hardware(str(path))
    assert hardware.device == "cpu"
    assert 1e9 < hardware.get_flops("float32") < 1e13
    assert 1e8 < hardware.memory_rate < 1e12
    assert 1e-8 < hardware.kernel_latency_s < 1e-3
    assert 1e7 < hardware.get_link(2).rate < 1e12 and 1e-6 < hardware.nvlink_latency_s < 1.0
    measured = {field for field, source in hardware.sources.items() if "measured on a" in source}
    expected = {"network_bandwidth", "network_share", "network_latency_s"}
    assert hardware.sources.keys() - measured == expected | {"nvlink_domain", "devices_per_node"}


def test_seconds_of_a_gpu_are_those_between_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events count milliseconds; what the host does before the first one does not count."""
    milliseconds = 100.0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.recorded = milliseconds

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: Event) -> float:
            return end.recorded - self.recorded

    def run_kernel() -> None:
        nonlocal milliseconds
        milliseconds += 4.0

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    assert measure_seconds(run_kernel, "cuda", calls=3) == pytest.approx(0.004)


def test_a_rate_is_of_one_thread_whatever_the_others_do() -> None:
    """CPU seconds: a call that waits or sleeps takes none of them."""
    assert measure_seconds(lambda: time.sleep(0.05), "cpu") < 0.01


def test_the_float8_product_of_a_rate_is_the_product() -> None:
    left, right = (torch.eye(32)[torch.randperm(32)] for _ in range(2))
    actual = build_float8_product(left, right)()
    assert actual.float().tolist() == (left @ right.t()).tolist()


def test_a_users_family_is_planned_without_a_change() -> None:
    example = Path(__file__).parents[3] / "examples" / "my_family.py"
    config = {**read_model({"model": "Llama-2-7b-hf"}), "architectures": ["MistralForCausalLM"]}
    with scope_family(f"{example}:FAMILY"):
        work = count_work(config)
    assert work.parameters == 6_738_415_616  # of Llama 2, whose tensors Mistral's are
    engine = RLConfig().actor
    assert TrainingModel(work, engine, H100).count_local_parameters() == (6_738_411_520, 0)


def test_a_tied_model_of_such_a_backend_is_refused_by_name_too(tmp_path: Path) -> None:
    transformers.GPT2Config(architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    config = build_config("Qwen3-8B", "sync", "shared")
    config.actor.backend = "fsdp"
    with scope_family(TRANSFORMERS), pytest.raises(ConfigError, match=r"the time of its passes"):
        predict_step(config, read_config(tmp_path), H100, LENGTHS)
