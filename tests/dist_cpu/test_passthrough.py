"""Fields of Megatron that settings pass through, overlapped exchanges, and Muon, on ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import optimizer_jobs
import pytest
import ranks
import tiny_families
import tiny_models

from mcore_rl.config.schema import Layout, MoEConfig, RecomputeConfig
from mcore_rl.data.batch import Batch


@ranks.spawn_on_ranks()
def train(
    path: Path,
    layout: Layout,
    batch: Batch,
    folder: Path | None,
    megatron: dict[str, Any],
    optimizer: dict[str, Any],
    recompute: RecomputeConfig | None = None,
) -> ranks.Result:
    """Take three steps; the last two of them again from a checkpoint, if there is a folder."""
    spec = ranks.build_engine_spec(path, layout)
    settings = {
        "megatron": megatron,
        "optimizer": replace(spec.engine.optimizer, **optimizer),
        "recompute": recompute or RecomputeConfig(),
    }
    spec = replace(spec, engine=replace(spec.engine, **settings))
    engine = ranks.start_engine(spec)
    share = batch.take(ranks.list_rows(engine, batch))
    steps = [engine.train_batch(share, ranks.LOSS)]
    if folder is not None:
        engine.save_checkpoint(folder / "checkpoint")
    steps += [engine.train_batch(share, ranks.LOSS) for _ in range(2)]
    buffers = [buffer for chunk in engine.wrapped_chunks for buffer in chunk.buffers]
    config = engine.chunks[0].config
    result = {
        "steps": steps,
        "num_buckets": max(len(buffer.buckets) for buffer in buffers),
        "deallocate": config.deallocate_pipeline_outputs,
    }
    if folder is not None:
        resumed = ranks.start_engine(spec)
        resumed.load_checkpoint(folder / "checkpoint")
        result["resumed"] = [resumed.train_batch(share, ranks.LOSS) for _ in range(2)]
    return result


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("qwen3_moe", tmp_path_factory.mktemp("model"))


def get_norms(result: dict[str, Any], name: str = "steps") -> list[float]:
    return [step["grad_norm"] for step in result[name]]


@pytest.mark.parametrize(
    ("layout", "megatron", "optimizer"),
    [
        (Layout(dp=2), {"bucket_size": 2000}, {"overlap": True}),
        (Layout(pp=2), {"deallocate_pipeline_outputs": True}, {}),
    ],
    ids=["ddp", "model"],
)
def test_a_field_reaches_the_model_that_is_built_and_its_ddp(path, layout, megatron, optimizer):
    batch = tiny_models.make_batch()
    plain, passed = (
        train(path, layout, batch, None, fields, optimizer) for fields in ({}, megatron)
    )
    if "bucket_size" in megatron:
        assert passed[0]["num_buckets"] > plain[0]["num_buckets"]
    assert passed[0]["deallocate"] is ("bucket_size" not in megatron) and not plain[0]["deallocate"]
    assert get_norms(passed[-1]) == pytest.approx(get_norms(plain[-1]), rel=1e-5)


def save(name: str, folder: Path) -> Path:
    config = tiny_families.cases()[name].config
    return tiny_families.save(tiny_models.build_from(config), folder / name)


@pytest.mark.parametrize("granularity", ["none", "full"])
@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2), Layout(tp=2, ep=2)], ids=str)
def test_shared_experts_beside_the_exchange_give_the_same_steps(tmp_path, layout, granularity):
    path, batch = save("deepseek_v3", tmp_path), tiny_models.make_batch()
    plain, passed = (
        train(path, layout, batch, None, fields, {}, RecomputeConfig(granularity))[-1]
        for fields in ({}, {"moe_shared_expert_overlap": True})
    )
    assert get_norms(passed) == pytest.approx(get_norms(plain), rel=1e-5)


@pytest.mark.parametrize(
    ("model", "module"),
    [("qwen3_moe", "moe_act"), ("qwen3_moe", "layernorm"), ("deepseek_v3", "mla_up_proj")],
)
def test_modules_that_are_recomputed_without_their_outputs_give_the_same_steps(
    tmp_path, model, module
):
    path, batch = save(model, tmp_path), tiny_models.make_batch()
    [plain], [recomputed] = (
        train(path, Layout(), batch, None, {}, {}, recompute)
        for recompute in (RecomputeConfig(), RecomputeConfig("selective", [module]))
    )
    assert get_norms(recomputed) == pytest.approx(get_norms(plain), rel=1e-6)


@ranks.spawn_on_ranks()
def train_experts(
    path: Path, layout: Layout, batch: Batch, moe: MoEConfig, optimizer: dict[str, Any]
) -> ranks.Result:
    """Take two steps in bfloat16, of several micro-batches and with several buckets each."""
    spec = ranks.build_engine_spec(path, layout, "bfloat16")
    settings = {
        "moe": moe,
        "megatron": {"bucket_size": 8000},
        "max_tokens_per_micro_batch": 60,
        "optimizer": replace(spec.engine.optimizer, **optimizer),
        "recompute": RecomputeConfig("selective", ["core_attn", "moe_act"]),
    }
    engine = ranks.start_engine(replace(spec, engine=replace(spec.engine, **settings)))
    share = batch.take(ranks.list_rows(engine, batch))
    return {"steps": [engine.train_batch(share, ranks.LOSS) for _ in range(2)]}


OVERLAP = {"distributed": True, "overlap": True}


@pytest.mark.parametrize(
    ("model", "layout", "optimizer"),
    [
        ("four", Layout(dp=2, ep=2), {}),
        ("four", Layout(dp=2, ep=2), OVERLAP),
        ("four", Layout(tp=2, ep=2), {}),
        ("four", Layout(pp=2, vpp=2, dp=2, ep=2), OVERLAP),
        ("deepseek_v3", Layout(dp=2, ep=2), {}),
    ],
    ids=str,
)
def test_overlapped_exchanges_give_the_same_steps(tmp_path, model, layout, optimizer):
    """Each layer of a micro-batch runs beside a layer of another one's backward pass."""
    path = optimizer_jobs.save_model(tmp_path) if model == "four" else save(model, tmp_path)
    batch = tiny_models.make_batch()
    plain, overlapped = (
        train_experts(path, layout, batch, MoEConfig(overlap=flag, aux_loss_coef=0.01), optimizer)[
            -1
        ]
        for flag in (False, True)
    )
    names = "moe/max_expert_load", "moe/min_expert_load"
    assert [plain["steps"][0][name] for name in names] == [
        overlapped["steps"][0][name] for name in names
    ]
    for expected, step in zip(plain["steps"], overlapped["steps"], strict=True):
        for name in ("loss", "grad_norm", "moe/aux_loss"):
            assert step[name] == pytest.approx(expected[name], rel=5e-3), name


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=2, ep=2), Layout(pp=2)], ids=str)
def test_muon_does_not_depend_on_the_layout_and_resumes_exactly(path, layout, tmp_path):
    batch, settings = tiny_models.make_batch(), {"name": "muon"}
    [reference] = train(path, Layout(), batch, None, {}, settings)
    result = train(path, layout, batch, tmp_path, {}, settings)[-1]
    assert get_norms(result) == pytest.approx(get_norms(reference), rel=1e-3)
    assert get_norms(result, "resumed") == get_norms(result)[1:]
    assert get_norms(reference)[1:] != get_norms(train(path, Layout(), batch, None, {}, {})[0])[1:]


def test_a_field_of_muon_changes_its_steps(path):
    batch, settings = tiny_models.make_batch(), {"name": "muon"}
    [plain], [passed] = (
        train(path, Layout(), batch, None, fields, settings)
        for fields in ({}, {"muon_momentum": 0.5})
    )
    assert get_norms(passed)[0] == get_norms(plain)[0]
    assert get_norms(passed)[2] != get_norms(plain)[2]
