"""Backends by import path: what they are refused for before a run, and defaults of engines."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mcore_rl.cli.compose import compose_config
from mcore_rl.config.errors import ConfigError, StateError
from mcore_rl.config.rules_engine import validate_engine
from mcore_rl.config.schema import (
    EngineConfig,
    FSDPConfig,
    Layout,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    RecomputeConfig,
    RLConfig,
    SFTConfig,
)
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.engine.base import (
    BaseEngine,
    EngineSpec,
    check_engine_settings,
    create_engine,
    load_backend,
    use_engine_family,
)
from mcore_rl.engine.steps import compute_learning_rate
from mcore_rl.jobs import supervised_preflight
from mcore_rl.jobs.placement import check_engines, resolve_for_nodes
from mcore_rl.jobs.supervised_preflight import resolve_for_device
from mcore_rl.models.base import get_user_family, use_family

ROOT = Path(__file__).parents[3]
HF_BACKEND = f"{ROOT / 'examples/hf_engine.py'}:BACKEND"
ENGINE = """
from mcore_rl.config.errors import ConfigError
from mcore_rl.engine.base import Backend, BaseEngine

class Engine(BaseEngine):
    def initialize(self): ...
    def infer_batch(self, batch, *, temperature=1.0, adapters=True, replay=True): ...
    def train_batch(self, batch, loss_function, *, temperature=1.0): ...
    def get_local_weights(self): ...
    def move(self, place, parts): self.moved = place, parts
    def save_checkpoint(self, path): self.saved = path
    def load_checkpoint(self, path): ...

def check_model(key, engine, hf_config):
    raise ConfigError(f"{key}: {hf_config['architectures'][0]} is not for this engine")

BACKEND = Backend({"language_model": Engine}, settings=("layout.dp", "optimizer"))
OPEN = Backend({"language_model": Engine})
PICKY = Backend({"language_model": Engine}, check_model=check_model)
OTHER = {"language_model": Engine}
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "engine.py").write_text(ENGINE)
    return str(tmp_path / "engine.py")


@pytest.fixture
def engine(path) -> Any:
    config = EngineConfig(backend=f"{path}:BACKEND")
    return create_engine("language_model", EngineSpec(ModelConfig(), config, seed=0))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("BACKENDS", r"actor.backend='.*': '.*engine.py' has no 'BACKENDS'; it has: .*, OPEN"),
        ("OTHER", r"actor.backend='.*:OTHER' is no mcore_rl.engine.base.Backend; allowed: one"),
        ("Engine", r"actor.backend='.*:Engine' is no mcore_rl.engine.base.Backend"),
    ],
)
def test_an_import_path_that_is_no_backend_is_refused_by_its_setting(path, name, message):
    config = EngineConfig(backend=f"{path}:{name}")
    validate_engine("actor", config)  # imports nothing
    with pytest.raises(ConfigError, match=message):
        check_engine_settings("actor", config, "language_model", "cpu")


def test_a_file_that_cannot_be_imported_is_refused_with_the_reason(tmp_path):
    (tmp_path / "bad.py").write_text("import nothing_of_that_name")
    with pytest.raises(ConfigError, match=r"critic.backend=.*cannot be imported: ModuleNotFound"):
        load_backend(EngineConfig(backend=f"{tmp_path}/bad.py:BACKEND"), "critic")
    with pytest.raises(ConfigError, match=r"engine.backend=.*cannot be imported: FileNotFound"):
        load_backend(EngineConfig(backend=f"{tmp_path}/none.py:BACKEND"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": Layout(tp=2)}, r"actor.layout.tp=2: .*:BACKEND does not read it; allowed: 1$"),
        ({"moe": MoEConfig(router_replay="record")}, r"actor.moe.router_replay='record': .*'off'$"),
        ({"modules": "te"}, r"actor.modules='te': .* does not read it; allowed: 'auto'$"),
        ({"mtp_loss_coef": 0.1}, r"actor.mtp_loss_coef=0.1: .* does not read it; allowed: 0.0$"),
    ],
)
def test_a_setting_that_an_engine_does_not_read_is_refused(path, changes, message):
    config = replace(EngineConfig(backend=f"{path}:BACKEND"), **changes)
    with pytest.raises(ConfigError, match=message):
        check_engine_settings("actor", config, "language_model", "cpu")
    for backend in (f"{path}:OPEN", "megatron"):  # they check settings themselves
        if changes.get("modules") != "te":
            check_engine_settings("a", replace(config, backend=backend), "language_model", "cpu")


def test_settings_that_an_engine_reads_and_those_of_its_processes_are_its_own(path):
    optimizer = OptimizerConfig(lr=1.0, cpu_offload=True)  # of Megatron it needs `distributed`
    config = EngineConfig(
        backend=f"{path}:BACKEND", layout=Layout(dp=4), optimizer=optimizer, threads_per_rank=3
    )
    check_engine_settings("actor", config, "language_model", "cpu")
    with pytest.raises(ConfigError, match=r"actor.optimizer.cpu_offload=true needs"):
        check_engine_settings("actor", replace(config, backend="megatron"), "language_model", "cpu")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(modules="mine"), "actor.modules='mine'; allowed: 'auto', 'te', 'torch'"),
        (
            EngineConfig(moe=MoEConfig(dispatcher="mine")),
            "actor.moe.dispatcher='mine'; allowed: 'alltoall', 'allgather', 'flex'",
        ),
        (
            EngineConfig(recompute=RecomputeConfig("selective", ["mine"])),
            "actor.recompute.modules='mine'; allowed: 'core_attn', 'mlp'",
        ),
        (
            EngineConfig(moe=MoEConfig(dispatcher="allgather"), layout=Layout(pp=2)),
            r"actor.moe.dispatcher='allgather' with actor.layout.pp=2",
        ),
        (
            EngineConfig(mtp_loss_coef=0.1, recompute=RecomputeConfig("full")),
            r"actor.recompute.granularity='full' with actor.mtp_loss_coef=0.1",
        ),
    ],
)
def test_rules_of_megatrons_settings_hold_for_megatron_alone(path, config, message):
    custom = replace(config, backend=f"{path}:OPEN")
    check_engine_settings("actor", custom, "language_model", "cpu")
    with pytest.raises(ConfigError, match=message):
        check_engine_settings("actor", config, "language_model", "cpu")


def test_settings_of_fsdp_are_refused_with_megatron():
    config = EngineConfig(fsdp=FSDPConfig(num_replicas=2))
    with pytest.raises(ConfigError, match=r"actor.fsdp.num_replicas=2: megatron does not read it"):
        check_engine_settings("actor", config, "language_model", "cpu")


QUICKSTART = (
    "recipe=quickstart", f"actor.backend={HF_BACKEND}", "actor.layout.tp=1", "actor.layout.ep=1",
    "actor.layout.dp=2",
)  # fmt: skip


MEGATRON = ("actor.backend=megatron", "warm_start.layout.dp=2")


def check(*overrides: str) -> None:
    """Check the settings of a job, as a run does before it fetches a model."""
    resolve_for_nodes(compose_config(RLConfig, [*QUICKSTART, *overrides]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), r"^warm_start.moe_aux_loss_coef=0.01: actor.backend=.*not read it; allowed: 0.0$"),
        (
            ("warm_start.moe_aux_loss_coef=0", "warm_start.layout.tp=2"),
            r"^warm_start.layout.tp=2: actor.backend='.*' does not read it; allowed: 1$",
        ),
        (
            ("warm_start.num_steps=0", f"critic.backend={HF_BACKEND}", "algorithm.advantage=gae"),
            r"critic.backend='.*' has no engine of 'value_model'; allowed: language_model$",
        ),
        (
            (
                "warm_start.num_steps=0", "reward_model.model_path=x",
                f"reward_model.backend={HF_BACKEND}", "algorithm.filter.group_filter=''",
            ),
            r"reward_model.backend='.*' has no engine of 'reward_model'; allowed: language_model$",
        ),
        (("warm_start.num_steps=0", "actor.lora.rank=4"), r"^actor.lora.rank=4: .*allowed: 0$"),
        (
            (*MEGATRON, "warm_start.optimizer.cpu_offload=true"),
            r"^warm_start.optimizer.cpu_offload=true needs warm_start.optimizer.distributed=true;",
        ),
        (
            (*MEGATRON, "actor.moe.dispatcher=allgather", "warm_start.layout.pp=2"),
            r"^warm_start.moe.dispatcher='allgather' with warm_start.layout.pp=2: packs of a",
        ),
        (
            (
                *MEGATRON, "actor.modules=tee", "task.name=''", "model.path=hf:no/such",
                "data.train_file=x", "data.test_file=x", "warm_start.train_file=x",
            ),
            r"^actor.modules='tee'; allowed: 'auto', 'te', 'torch'$",
        ),
        (
            ("actor.backend=fsdp", "warm_start.moe_aux_loss_coef=0", "warm_start.layout.tp=2"),
            r"^warm_start.layout.tp=2: actor.backend='fsdp' does not read it; allowed: 1$",
        ),
    ],
)  # fmt: skip
def test_a_job_checks_the_backend_of_every_role(overrides, message):
    with pytest.raises(ConfigError, match=message):
        check(*overrides)


def test_a_backend_checks_the_model_before_a_job_starts(path):
    hf_config = {"architectures": ["SomeForCausalLM"]}
    config = EngineConfig(backend=f"{path}:PICKY")
    with pytest.raises(ConfigError, match=r"^engine: SomeForCausalLM is not for this engine$"):
        load_backend(config).check_model("engine", config, hf_config)


def test_an_engine_is_made_of_the_class_of_its_file(engine):
    assert type(engine).__name__ == "Engine" and isinstance(engine, BaseEngine)
    with pytest.raises(ConfigError, match=r"backend=.* has no engine of 'value_model'; "):
        create_engine("value_model", engine.spec)


def test_an_engine_without_a_trace_of_its_own_says_so(engine):
    with pytest.raises(ConfigError, match=r"engine.py:BACKEND: this engine has no trace"):
        engine.trace(Batch({}))


def test_a_save_in_the_background_is_one_that_waits_unless_an_engine_has_its_own(engine):
    saving = engine.begin_save(Path("folder"))
    assert engine.saved == Path("folder") and saving.is_written
    saving.finish(1.0)


def test_an_engine_moves_the_parts_that_are_named_and_remembers_them(engine):
    engine.to("host", optimizer=False)
    assert engine.moved == ("host", {"parameters", "gradients"})
    engine.require("optimizer state")
    with pytest.raises(StateError, match="the engine's gradients are away"):
        engine.require("optimizer state", "gradients")
    engine.to("device", model=False, optimizer=False)
    engine.require("gradients")
    with pytest.raises(StateError, match="the engine's parameters are away"):
        engine.require("parameters")


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("bound", "is_taken"), [(0.3, True), (0.2, False)])
def test_by_default_a_step_with_scores_is_a_pass_and_a_step(engine, world, bound, is_taken):
    ids = Jagged.pack([[1, 2], [3]], np.int64)
    zeros, mask = ids.with_values(np.zeros(3, np.float32)), ids.with_values(np.array([1, 0, 1]))
    values = ids.with_values(np.array([-0.1, -9.0, 0.25], np.float32))
    batch = Batch(
        {"prompt_ids": ids, "response_ids": ids, "rollout_log_probs": zeros, "gap_mask": mask}
    )
    seen: list[Batch] = []
    engine.device = torch.device("cpu")
    engine.infer_batch = lambda rows, *, temperature: rows.with_columns(
        log_probs=values, entropy=zeros
    )
    engine.train_batch = lambda rows, loss, *, temperature: seen.append(rows) or {"loss": 1.0}
    bounds = {"max_logprob_gap": bound, "mean_logprob_gap": 1.0}
    step = engine.train_batch_with_scores(batch, len, bounds=bounds)
    assert step.gaps == pytest.approx({"max_logprob_gap": 0.25, "mean_logprob_gap": 0.175})
    assert step.metrics == ({"loss": 1.0} if is_taken else {})
    assert np.array_equal(step.scores.jagged("log_probs").values, values.values)
    assert [rows.jagged("log_probs") for rows in seen] == [values] * is_taken


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_learning_rates_are_those_of_megatrons_schedule(schedule, warmup_steps):
    from mcore_rl.engine.megatron import device

    device.install(1)
    from mcore_rl.engine.megatron.optimizer import build_schedule

    config = OptimizerConfig(
        lr=1e-2, min_lr=1e-3, schedule=schedule, warmup_steps=warmup_steps,
        wsd_decay_steps=4 if schedule == "wsd" else 0,
    )  # fmt: skip
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    megatron = build_schedule(optimizer, config, 10)
    for step in range(1, 13):
        megatron.step(increment=1)
        expected = optimizer.param_groups[0]["lr"]
        assert compute_learning_rate(config, step, 10) == pytest.approx(expected, rel=1e-12), step


def test_float8_products_of_a_supervised_run_in_float32_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(supervised_preflight, "detect_device_type", lambda: "cuda")
    monkeypatch.setattr(supervised_preflight, "check_engine_settings", lambda *_, **__: None)
    settings = [f"model.path={tmp_path}", "data.train_file=rows.jsonl", "engine.fp8.recipe=mxfp8"]
    config = compose_config(SFTConfig, [*settings, "model.dtype=float32"])
    with pytest.raises(ConfigError, match=r"^engine.fp8.recipe='mxfp8' with model.dtype='float32'"):
        resolve_for_device(config)


@pytest.mark.parametrize("backend", [HF_BACKEND, "megatron"])
@pytest.mark.parametrize("check", ["rl", "sft"])
def test_images_for_an_engine_that_reads_none_are_refused(check, backend, tmp_path):
    settings = ["data.images_column=pictures", f"model.path={tmp_path}"]
    with pytest.raises(ConfigError, match=r"'pictures': .*backend=.* takes no images"):
        if check == "rl":
            config = compose_config(RLConfig, ["recipe=quickstart_images", *settings])
            check_engines(replace(config, actor=EngineConfig(backend=backend)), "cpu")
        else:
            config = compose_config(SFTConfig, [*settings, "data.train_file=rows.jsonl"])
            resolve_for_device(replace(config, engine=EngineConfig(backend=backend)))


@pytest.mark.parametrize(
    ("backend", "given", "family"),
    [
        ("megatron", "", ""),
        ("fsdp", "", "transformers"),
        ("fsdp", f"{ROOT}/examples/my_family.py:FAMILY", f"{ROOT}/examples/my_family.py:FAMILY"),
        ("{file}:OPEN", "", ""),
        ("{file}:ANY", "", "transformers"),
    ],
)
def test_the_family_of_a_model_is_that_of_the_settings_or_else_of_the_engine(
    tmp_path, backend, given, family
):
    any_model = 'ANY = Backend(OTHER, family="transformers")\n'
    (tmp_path / "mine.py").write_text(ENGINE + any_model)
    model = ModelConfig(family=given)
    engine = EngineConfig(backend=backend.format(file=tmp_path / "mine.py"))
    try:
        use_engine_family("actor", model, engine)
        assert model.family == get_user_family() == family
    finally:
        use_family("")


def test_an_engine_of_a_user_may_take_images(tmp_path):
    (tmp_path / "mine.py").write_text(ENGINE + "BACKEND = Backend(OTHER, takes_images=True)\n")
    engine = EngineConfig(backend=f"{tmp_path / 'mine.py'}:BACKEND")
    check_engine_settings("actor", engine, "language_model", "cpu", images_column="images")
    check_engine_settings(
        "actor", EngineConfig(backend="fsdp"), "language_model", "cpu", images_column="i"
    )


THREADS = """
import threading
import psutil

ends = threading.Event()
for index in range(6):
    is_done = threading.Event()
    def touch(is_done=is_done):
        b"x" * (32 << 20)
        is_done.set()
        ends.wait()
    threading.Thread(target=touch).start()
    is_done.wait()
    if index == 0:
        before = psutil.Process().memory_info().rss
print(psutil.Process().memory_info().rss - before)
ends.set()
"""


def test_threads_of_a_rank_on_a_cpu_take_memory_that_other_threads_have_freed():
    """Each update of the weights runs in a thread of its own, while others live."""
    environment = load_backend(EngineConfig()).build_rank_environment(Layout(), "cpu")
    program = [sys.executable, "-c", THREADS]
    growth = subprocess.check_output(program, env=os.environ | environment)
    assert int(growth) < 32 << 20


def test_ranks_on_cpus_keep_freed_memory_whatever_their_engine_and_variables_of_a_user_stay(
    path, monkeypatch
):
    for backend in (f"{path}:BACKEND", "megatron"):
        loaded = load_backend(EngineConfig(backend=backend))
        assert loaded.build_rank_environment(Layout(), "cuda") == {}
        assert loaded.build_rank_environment(Layout(), "cpu") == {
            "MALLOC_ARENA_MAX": "1",
            "MALLOC_MMAP_MAX_": "0",
            "MALLOC_TRIM_THRESHOLD_": "1099511627776",
        }
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "9")
    assert "MALLOC_MMAP_MAX_" not in loaded.build_rank_environment(Layout(), "cpu")
