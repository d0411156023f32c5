"""The FSDP2 engine equals plain torch on any ranks, for families with and without rules here."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import tiny_models
import torch
import torch_reference
import transformers
from safetensors.torch import load_file

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import FSDPConfig, Layout, LoRAConfig, RecomputeConfig
from mcore_rl.data.batch import Batch
from mcore_rl.engine.base import EngineSpec, create_engine
from mcore_rl.engine.offload import HostMirror
from mcore_rl.parallel.mesh import Mesh
from tests import tiny_vision
from tests.nightly import all_but

TEMPERATURE = 0.7
_SHAPE: dict[str, Any] = {
    "vocab_size": tiny_models.VOCAB, "hidden_size": 48, "intermediate_size": 72,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 12,
    "linear_value_head_dim": 12, "shared_expert_intermediate_size": 24,
}  # fmt: skip
_RANDOM = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attention_dropout": 0.1}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {**_EXPERTS, "norm_topk_prob": True},
    # None of these has rules of Megatron or vLLM here.
    "gemma2": {"sliding_window": 8, "attn_logit_softcapping": 0.5},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 12},
    "olmo3": {"sliding_window": 8},
    "phi3": {},  # stacked projections in the checkpoint
    # A head with a bias, and dropout, which is off.
    "phi": {"num_key_value_heads": 4, **_RANDOM},
    "cohere2": {"sliding_window": 8, "logit_scale": 0.3},  # its head is not one matrix
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 8},  # sinks
    "deepseek_v3": {
        "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "first_k_dense_replace": 1, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
        "num_key_value_heads": 4, "head_dim": 8,
    },
    "tied": {**_EXPERTS, "norm_topk_prob": True, "tie_word_embeddings": True},  # qwen3_moe
    "mixtral": {"num_local_experts": 6, "intermediate_size": 22},  # rows of 88 bytes
    # It mixes the sequences of a pack.
    "qwen3_next": {**_EXPERTS, **_LINEAR, "num_nextn_predict_layers": 0},
}  # fmt: skip
LAYOUTS = {
    "one rank": (Layout(), {}),
    "dp2": (Layout(dp=2), {"recompute": RecomputeConfig(granularity="full")}),
    "cp2": (Layout(cp=2), {}),
    "dp3": (Layout(dp=3), {}),
    "dp2 cp2": (Layout(dp=2, cp=2), {}),
    "replicas": (Layout(dp=4), {"fsdp": FSDPConfig(num_replicas=2)}),
    "offload": (Layout(dp=2), {"fsdp": FSDPConfig(cpu_offload=True)}),
    "ep2": (Layout(dp=2, ep=2), {}),
    "dp2 cp2 ep2": (Layout(dp=2, cp=2, ep=2), {}),
    "replicas ep2": (Layout(dp=4, ep=2), {"fsdp": FSDPConfig(num_replicas=2)}),
}
DENSE = ("one rank", "dp2", "cp2", "dp3", "dp2 cp2", "replicas", "offload")
VISION = ("one rank", "dp2", "dp3", "replicas", "offload")
DIVIDED = ("qwen3_moe", "tied", "mixtral", "deepseek_v3")
CASES = [
    *((family, name) for family in FAMILIES if family != "qwen3_next" for name in DENSE),
    *((family, name) for family in tiny_vision.KINDS for name in VISION),
    *((family, name) for family in DIVIDED for name in LAYOUTS if name.endswith("ep2")),
]  # fmt: skip
SELECTED = [
    ("qwen3", "replicas"), ("qwen3", "offload"), ("qwen3_moe", "dp3"),
    ("gemma2", "cp2"), ("gemma3_text", "dp2 cp2"),
    ("olmo3", "one rank"), ("phi3", "dp2"), ("cohere2", "cp2"), ("gpt_oss", "cp2"),
    ("deepseek_v3", "cp2"), ("deepseek_v3", "ep2"), ("qwen3_moe", "dp2 cp2 ep2"),
    ("mixtral", "ep2"), ("phi", "dp2"), ("tied", "ep2"),
    ("qwen2_5_vl", "one rank"), ("qwen3_vl_moe", "dp2"),
]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, paths = tmp_path_factory.mktemp("models"), {}
    for name, changes in FAMILIES.items():
        kind = "qwen3_moe" if name == "tied" else name
        config = transformers.AutoConfig.for_model(kind, **(_SHAPE | changes))
        paths[name] = folder / name
        tiny_models.build_from(config).save_pretrained(paths[name])
    for kind in tiny_vision.KINDS:  # texts alone
        paths[kind] = folder / kind
        tiny_vision.save(paths[kind], kind)
    return paths


def build_spec(
    path: Path, layout: Layout, changes: dict[str, Any], dtype: str = "float32"
) -> EngineSpec:
    spec = ranks.build_engine_spec(path, layout, dtype)
    optimizer = replace(spec.engine.optimizer, eps=torch_reference.EPSILON)
    engine = replace(spec.engine, backend="fsdp", optimizer=optimizer, **changes)
    return replace(spec, engine=engine, model=replace(spec.model, family="transformers"))


def start(path: Path, layout: Layout, changes: dict[str, Any], kind: str = "language_model") -> Any:
    spec = build_spec(path, layout, changes)
    engine = ranks.start_engine(spec, lambda spec: create_engine(kind, spec))
    engine.mesh = Mesh(layout)
    return engine


@ranks.spawn_on_ranks()
def run_steps(path: Path, layout: Layout, changes: dict[str, Any], batch: Batch) -> ranks.Result:
    """Score the batch and take three steps."""
    engine = start(path, layout, changes)
    rows = ranks.list_rows(engine, batch)
    share = batch.take(rows)
    scored = engine.infer_batch(share, temperature=TEMPERATURE)
    scores = {
        name: {row: torch.from_numpy(v.copy()) for row, v in zip(rows, column, strict=True)}
        for name in ("log_probs", "entropy")
        for column in [scored.jagged(name)]
    }
    exported = dict(engine.get_per_tensor_param())
    steps = [engine.train_batch(share, ranks.LOSS)]
    leave_and_return(engine)
    steps += [engine.train_batch(share, ranks.LOSS) for _ in range(2)]
    trained = dict(engine.get_per_tensor_param())
    return scores | {"steps": steps, "exported": exported, "trained": trained}


def leave_and_return(engine: Any) -> None:
    """Free the memory of parts of an engine and get them back, as from a GPU."""
    mirrors = {part: HostMirror() for part in ("parameters", "optimizer state")}
    for part, mirror in mirrors.items():
        mirror.offload(engine.list_tensors(part), engine.device)
        assert mirror.num_bytes
        assert all(not t.untyped_storage().nbytes() for t in engine.list_tensors(part))
    for mirror in mirrors.values():
        mirror.reload()


def join_rows(results: list[ranks.Result], name: str) -> torch.Tensor:
    """Join the rows of all ranks; ranks with the same row have the same values."""
    rows: dict[int, torch.Tensor] = {}
    for result in results:
        for row, value in result[name].items():
            assert torch.equal(rows.setdefault(row, value), value)
    return torch.cat([rows[row] for row in sorted(rows)])


def check_steps(path: Path, layout: Layout, changes: dict[str, Any]) -> None:
    batch = tiny_models.make_batch()
    results = run_steps(path, layout, changes, batch)
    reader = CheckpointReader(path)
    stored = {name: reader.read_tensor(name) for name in reader.get_shapes()}
    exported, trained = results[0]["exported"], results[0]["trained"]
    assert all(not result["exported"] for result in results[1:])
    assert exported.keys() == stored.keys() == trained.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, stored[name]), name
    model = torch_reference.load(path)
    with torch.no_grad():
        for name, rows in torch_reference.score(model, batch, TEMPERATURE).items():
            torch.testing.assert_close(join_rows(results, name), torch.cat(rows), rtol=0, atol=1e-5)
    assert all(result["steps"] == results[0]["steps"] for result in results)
    settings = build_spec(path, layout, changes).engine.optimizer
    norms, weights = torch_reference.train(path, batch, settings, num_steps=3)
    assert [s["grad_norm"] for s in results[0]["steps"]] == pytest.approx(norms, rel=1e-5)
    for name, tensor in trained.items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=3e-6, msg=name)


@pytest.mark.parametrize(("family", "name"), all_but(SELECTED, CASES))
def test_scores_and_three_steps_equal_plain_torch(models, family, name):
    check_steps(models[family], *LAYOUTS[name])


@ranks.spawn_on_ranks()
def run_bfloat16(path: Path, layout: Layout, batch: Batch) -> ranks.Result:
    """Scores, gradient norm and weights with products in bfloat16, of a trainer and a scorer."""
    spec = build_spec(path, layout, {}, "bfloat16")
    engine = ranks.start_engine(spec, lambda spec: create_engine("language_model", spec))
    engine.mesh = Mesh(layout)
    share = batch.take(ranks.list_rows(engine, batch))
    scores = engine.infer_batch(share).jagged("log_probs").values.copy()
    frozen = create_engine("language_model", replace(spec, total_steps=0))
    frozen.initialize()
    scorer_scores = frozen.infer_batch(share).jagged("log_probs").values.copy()
    frozen_dtypes = sorted({str(t.dtype) for t in frozen.get_local_weights().stored.values()})
    frozen.close()
    step = engine.train_batch(share, ranks.LOSS)
    trained = dict(engine.get_per_tensor_param())
    return {
        "scores": torch.from_numpy(scores),
        "scorer_scores": torch.from_numpy(scorer_scores),
        "frozen_dtypes": frozen_dtypes,
        "grad_norm": step["grad_norm"],
        "dtypes": sorted({str(t.dtype) for t in trained.values()}),
    }


@pytest.mark.parametrize(
    "family", all_but(["qwen3", "deepseek_v3"], ["qwen3", "deepseek_v3", *tiny_vision.KINDS])
)
def test_a_bfloat16_model_has_float32_weights_and_scores_within_its_rounding(models, family):
    path, batch = models[family], tiny_models.make_batch()
    results = run_bfloat16(path, Layout(dp=2), batch)
    model = torch_reference.load(path)
    with torch.no_grad():
        expected = torch.cat(torch_reference.score(model, batch, 1.0)["log_probs"])
    for name in ("scores", "scorer_scores"):
        gaps = (torch.cat([result[name] for result in results]) - expected).abs()
        assert gaps.mean() < 0.05 and gaps.max() < 0.5
    settings = build_spec(path, Layout(dp=2), {}).engine.optimizer
    norms, _ = torch_reference.train(path, batch, settings, num_steps=1)
    assert results[0]["grad_norm"] == pytest.approx(norms[0], rel=0.05)
    buffers = ["torch.float32"] if family == "deepseek_v3" else []  # the bias of its routers
    assert results[0]["dtypes"] == ["torch.bfloat16", *buffers]
    assert results[0]["frozen_dtypes"] == ["torch.bfloat16", *buffers]


@ranks.spawn_on_ranks()
def refuse(path: Path, layout: Layout, changes: dict[str, Any]) -> ranks.Result:
    with pytest.raises(ConfigError) as caught:
        start(path, layout, changes)
    return {"sentence": str(caught.value)}


def test_recurrent_layers_are_not_split_over_ranks_even_without_packs(models):
    unpacked = {"fsdp": FSDPConfig(packing=False)}
    for result in refuse(models["qwen3_next"], Layout(cp=2), unpacked):
        assert "qwen3_next: scores of a sequence that ranks share differ" in result["sentence"]
        assert result["sentence"].endswith("allowed: layout.cp=1")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("bloom", "differ from those of transformers' eager model|do not take packs"),
        ("gpt_neox_japanese", "differ from those of transformers' eager model|do not take packs"),
        ("stablelm", "its layers in transformers do not take packs"),
        ("gptj", "does not build it with these fields and functions"),
    ],
)
def test_a_family_that_does_not_attend_through_the_registry_is_refused(kind, message, tmp_path):
    changes = {
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "rotary_dim": 8,
        "hidden_size": 48,
        "partial_rotary_factor": 0.5,
    }
    config = transformers.AutoConfig.for_model(kind, **(_SHAPE | changes))
    tiny_models.build_from(config).save_pretrained(tmp_path)
    for result in refuse(tmp_path, Layout(), {"fsdp": FSDPConfig(packing=False)}):
        assert re.search(message, result["sentence"]), result


def test_a_family_that_mixes_the_sequences_of_a_pack_is_refused_by_its_number(models):
    for result in refuse(models["qwen3_next"], Layout(dp=2), {}):
        assert "qwen3_next: scores of two sequences in one pack differ" in result["sentence"]
        assert result["sentence"].endswith("allowed: fsdp.packing=false")


def test_without_packing_such_a_family_equals_plain_torch(models):
    check_steps(models["qwen3_next"], Layout(dp=2), {"fsdp": FSDPConfig(packing=False)})


@ranks.spawn_on_ranks()
def save(path: Path, layout: Layout, batch: Batch, folder: Path) -> ranks.Result:
    """Take four steps in one go; save after the second."""
    engine = start(path, layout, {})
    share = batch.take(ranks.list_rows(engine, batch))
    steps = [engine.train_batch(share, ranks.LOSS) for _ in range(2)]
    engine.save_checkpoint(folder)
    steps += [engine.train_batch(share, ranks.LOSS) for _ in range(2)]
    return {"steps": steps, "trained": dict(engine.get_per_tensor_param())}


@ranks.spawn_on_ranks()
def resume(path: Path, layout: Layout, batch: Batch, folder: Path) -> ranks.Result:
    engine = start(path, layout, {})
    engine.load_checkpoint(folder)
    share = batch.take(ranks.list_rows(engine, batch))
    saved = dict(engine.get_per_tensor_param())
    steps = [engine.train_batch(share, ranks.LOSS) for _ in range(2)]
    return {"steps": steps, "saved": saved, "trained": dict(engine.get_per_tensor_param())}


RESUMED = [
    ("qwen3_moe", "dp3"), ("qwen3_moe", "dp2 cp2 ep2"), ("qwen3_moe", "one rank"),
    ("qwen3_vl_moe", "dp3"), ("qwen2_5_vl", "one rank"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "name"), all_but(RESUMED[:-1], RESUMED))
def test_a_checkpoint_of_two_ranks_goes_on_in_any_layout(models, family, name, tmp_path_factory):
    path, batch, layout = models[family], tiny_models.make_batch(), LAYOUTS[name][0]
    folder = tmp_path_factory.getbasetemp() / "fsdp_checkpoint" / family
    saving = Layout(dp=2, ep=2 if family == "qwen3_moe" else 1)
    if not folder.exists():
        save(path, saving, batch, folder)
    saved = save(path, saving, batch, folder)[0]
    resumed = resume(path, layout, batch, folder)[0]
    for step, expected in zip(resumed["steps"], saved["steps"][2:], strict=True):
        assert step == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for name, tensor in resumed["trained"].items():
        torch.testing.assert_close(tensor, saved["trained"][name], rtol=0, atol=3e-6, msg=name)


@ranks.spawn_on_ranks()
def score_values(path: Path, layout: Layout, batch: Batch) -> ranks.Result:
    """Values of a critic that starts from a language model, before and after a step."""
    engine = start(path, layout, {}, "value_model")
    rows = ranks.list_rows(engine, batch)
    share = batch.take(rows)
    zeros = engine.infer_batch(share).jagged("values").values
    engine.train_batch(share, fit_values)
    values = engine.infer_batch(share).jagged("values")
    exported = dict(engine.get_per_tensor_param())
    return {
        "zeros": bool(np.all(zeros == 0)),
        "values": {row: torch.from_numpy(v.copy()) for row, v in zip(rows, values, strict=True)},
        "exported": exported,
        "config": dict(engine.hf_config),
    }


def fit_values(inputs: Any) -> Any:
    return (inputs.values - inputs.columns["advantages"]).square(), {}


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(cp=2)], ids=["dp2", "cp2"])
def test_an_exported_critic_has_the_values_of_the_engine(models, layout, tmp_path):
    batch = tiny_models.make_batch()
    results = score_values(models["qwen3"], layout, batch)
    assert all(result["zeros"] for result in results)
    config = transformers.AutoConfig.for_model(**results[0]["config"])
    assert config.architectures == ["Qwen3ForTokenClassification"]
    model = transformers.AutoModelForTokenClassification.from_config(config).float().eval()
    missing, unexpected = model.load_state_dict(results[0]["exported"], strict=False)
    assert (missing, unexpected) == ([], [])
    values = join_rows(results, "values")
    expected = []
    for prompt, response in zip(batch["prompt_ids"], batch["response_ids"], strict=True):
        ids = torch.tensor([[*prompt, *response]])
        with torch.no_grad():
            expected.append(model(ids).logits[0, len(prompt) - 1 : -1, 0])
    assert values.abs().max() > 1e-3
    torch.testing.assert_close(values, torch.cat(expected), rtol=0, atol=1e-5)


@ranks.spawn_on_ranks()
def train_adapters(path: Path, layout: Layout, batch: Batch, folder: Path) -> ranks.Result:
    """Take two steps of adapters, save, and take two more."""
    engine = start(path, layout, {"lora": LORA})
    share = batch.take(ranks.list_rows(engine, batch))
    exported = dict(engine.get_per_tensor_param())
    steps = [engine.train_batch(share, ranks.LOSS) for _ in range(2)]
    engine.save_checkpoint(folder)
    steps += [engine.train_batch(share, ranks.LOSS) for _ in range(2)]
    scored = engine.infer_batch(share).jagged("log_probs").values.copy()
    base = engine.infer_batch(share, adapters=False).jagged("log_probs").values.copy()
    local = engine.get_local_weights()
    return {
        "steps": steps,
        "exported": exported,
        "merged": dict(engine.get_per_tensor_param()),
        "factors": {factors.tensor: factors[1:] for factors in engine.collect_factors()},
        "scored": torch.from_numpy(scored),
        "base": torch.from_numpy(base),
        "rows": {name: len(merge()) for name, merge in local.computed.items()},
    }


LORA = LoRAConfig(rank=4, alpha=8.0)


@ranks.spawn_on_ranks()
def resume_adapters(path: Path, layout: Layout, batch: Batch, folder: Path) -> ranks.Result:
    engine = start(path, layout, {"lora": LORA})
    engine.load_checkpoint(folder)
    share = batch.take(ranks.list_rows(engine, batch))
    steps = [engine.train_batch(share, ranks.LOSS) for _ in range(2)]
    return {"steps": steps, "merged": dict(engine.get_per_tensor_param())}


@pytest.mark.parametrize("family", all_but(["qwen3", "phi3"], ["qwen3", "phi3", "qwen3_vl"]))
def test_adapters_train_resume_and_export_as_peft_has_them(models, family, tmp_path):
    path, batch = models[family], tiny_models.make_batch()
    result = train_adapters(path, Layout(dp=2), batch, tmp_path / "saved")[0]
    stored = load_file(path / "model.safetensors")
    for name, tensor in result["exported"].items():  # B is 0
        assert torch.equal(tensor, stored[name]), name
    changed = {n for n, tensor in result["merged"].items() if not torch.equal(tensor, stored[n])}
    assert changed == result["factors"].keys() and changed
    assert not any("visual" in name for name in changed)
    for name, (a, b) in result["factors"].items():
        merged = stored[name] + 2.0 * b @ a
        torch.testing.assert_close(result["merged"][name], merged, rtol=0, atol=1e-6, msg=name)
    model = torch_reference.load(path)
    share = batch.take(range(6))
    for state, name in ((stored, "base"), (result["merged"], "scored")):
        model.load_state_dict(unfuse(model, state), strict=False)
        with torch.no_grad():
            expected = torch.cat(torch_reference.score(model, share, 1.0)["log_probs"])
        torch.testing.assert_close(result[name], expected, rtol=0, atol=1e-5)
    resumed = resume_adapters(path, Layout(dp=3), batch, tmp_path / "saved")[0]
    for step, expected_step in zip(resumed["steps"], result["steps"][2:], strict=True):
        assert step == pytest.approx(expected_step, rel=1e-5, abs=1e-6)
    for name, tensor in result["merged"].items():
        torch.testing.assert_close(resumed["merged"][name], tensor, rtol=0, atol=3e-6, msg=name)


def unfuse(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint under the names of the parameters of a model."""
    names = model.state_dict().keys()
    return {name: tensor for name, tensor in state.items() if name in names}
