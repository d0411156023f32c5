"""Each causal language model of transformers has the numbers of its eager model, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import ranks
import tiny_models
import torch
import transformers
import transformers_families
from safetensors.torch import load_file
from test_fsdp_engine import build_spec, refuse, start

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import FSDPConfig, Layout, LoRAConfig
from mcore_rl.data.batch import Batch
from mcore_rl.engine.base import create_engine
from mcore_rl.engine.fsdp import start_check
from mcore_rl.models.base import use_family
from tests.nightly import all_but

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FAMILIES = transformers_families.list_families()
# One of each kind: a window in the mask alone, recurrent layers, no registry.
SELECTED = [
    ("phimoe", "float32", True), ("qwen2_moe", "float32", True), ("cohere2", "bfloat16", True),
    ("mamba2", "bfloat16", True), ("falcon_h1", "float32", False), ("jamba", "bfloat16", True),
    ("bloom", "float32", False), ("rwkv", "float32", True),
]  # fmt: skip
CASES = [(kind, dtype, packs) for kind in FAMILIES for dtype in DTYPES for packs in (True, False)]


@ranks.spawn_on_ranks(1)
def score_or_refuse(path: Path, dtype: str, packing: bool, batch: Batch) -> ranks.Result:
    """Return log-probs of the engine, or why it refuses the model."""
    use_family("transformers")
    spec = build_spec(path, Layout(), {"fsdp": FSDPConfig(packing=packing)}, dtype)
    try:
        engine = ranks.start_engine(spec, lambda spec: create_engine("language_model", spec))
        scored = engine.infer_batch(batch)
    except ConfigError as error:
        return {"refusal": str(error)}
    return {"log_probs": torch.from_numpy(scored.jagged("log_probs").values.copy())}


def score_eagerly(path: Path, batch: Batch, dtype: torch.dtype) -> torch.Tensor:
    """Return log-probs by transformers, one sample at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", experts_implementation="eager", dtype=dtype
    ).eval()
    scores = []
    for prompt, response in zip(batch["prompt_ids"], batch["response_ids"], strict=True):
        ids = torch.tensor([[*prompt, *response]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        targets = torch.from_numpy(response.copy())[:, None]
        scores.append(logits.float().log_softmax(-1).gather(1, targets)[:, 0])
    return torch.cat(scores)


@pytest.mark.parametrize(("kind", "dtype", "packing"), all_but(SELECTED, CASES))
def test_family_has_the_numbers_of_its_eager_model_or_is_refused(kind, dtype, packing, tmp_path):
    path, batch = transformers_families.save(kind, tmp_path), tiny_models.make_batch()
    [result] = score_or_refuse(path, dtype, packing, batch)
    if "refusal" in result:
        reasons = ("allowed: ", "lacks tensor", "transformers refuses a field")
        assert any(reason in result["refusal"] for reason in reasons)
        return
    expected = score_eagerly(path, batch, torch.float32)
    gaps = (result["log_probs"] - expected).abs()
    if dtype == "float32":
        assert gaps.max() < 1e-4
    else:
        # No bound on the largest gap: rounding makes routers choose other experts. Of flex_olmo
        # one token differs by 0.57 nats here, and by 0.58 in transformers' own bfloat16 with sdpa;
        # the 90 tokens whose experts are those of float32 differ by at most 0.13.
        rounding = (score_eagerly(path, batch, torch.bfloat16) - expected).abs().mean()
        assert gaps.mean() < 2 * rounding + 0.005


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen2_moe", {"max_window_layers": 1}),
        ("phimoe", {"sliding_window": 12}),
        # Families here whose Megatron layers lack a field.
        ("llama", {"attention_bias": True}),
        ("qwen2", {"max_window_layers": 1}),
        ("mixtral", {"router_jitter_noise": 0.3}),
        ("minimax_m2", {"router_jitter_noise": 0.3}),
    ],
)
def test_field_that_transformers_reads_keeps_its_meaning(kind, changes, tmp_path):
    path = transformers_families.save(kind, tmp_path, **changes)
    batch = tiny_models.make_batch()
    [result] = score_or_refuse(path, "float32", True, batch)
    expected = score_eagerly(path, batch, torch.float32)
    torch.testing.assert_close(result["log_probs"], expected, rtol=0, atol=1e-4)


@ranks.spawn_on_ranks(1)
def score_and_train(path: Path, batch: Batch) -> ranks.Result:
    """Return the scores of a pass that does not train, and of one that does."""
    engine, trained = start(path, Layout(), {}), list[torch.Tensor]()
    scored = engine.infer_batch(batch).jagged("log_probs").values.copy()

    def keep_scores(inputs: Any) -> Any:
        trained.append(inputs.log_probs.detach().clone())
        return 0 * inputs.log_probs, {}

    engine.train_batch(batch, keep_scores)
    return {"scored": torch.from_numpy(scored).sort()[0], "trained": torch.cat(trained).sort()[0]}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("opt", {"layerdrop": 0.5, "dropout": 0.3, "attention_dropout": 0.3}),
        ("phimoe", {"input_jitter_noise": 0.3, "hidden_dropout": 0.3}),
        ("mixtral", {"router_jitter_noise": 0.3, "attention_dropout": 0.3}),
        ("gpt2", {}),  # dropout by default
    ],
)
def test_pass_that_trains_has_the_scores_of_one_that_does_not(kind, changes, tmp_path):
    path = transformers_families.save(kind, tmp_path, **changes)
    [result] = score_and_train(path, tiny_models.make_batch())
    torch.testing.assert_close(result["trained"], result["scored"], rtol=0, atol=1e-6)


CUT = [
    ("lfm2", 2), ("jamba", 2), ("recurrent_gemma", 2), ("mamba2", 2), ("qwen3_next", 2),
    ("rwkv", 2), ("falcon_h1", 2), ("bamba", 2), ("nemotron_h", 2), ("minimax", 2),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "cp"), all_but(CUT[:2], CUT))
def test_family_that_needs_whole_sequences_is_refused_with_cp(kind, cp, tmp_path):
    path = transformers_families.save(kind, tmp_path)
    for result in refuse(path, Layout(cp=cp), {"fsdp": FSDPConfig(packing=False)}):
        assert f"{kind}: scores of a sequence that ranks share differ" in result["sentence"]
        assert result["sentence"].endswith("allowed: layout.cp=1")


@ranks.spawn_on_ranks(1)
def score_large_or_refuse(path: Path, batch: Batch) -> ranks.Result:
    """Return what score_or_refuse does if no model counts as small."""
    limit, start_check._WHOLE_BYTES = start_check._WHOLE_BYTES, 0
    try:
        return score_or_refuse(path, "float32", True, batch)
    finally:
        start_check._WHOLE_BYTES = limit


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gpt_oss", ""),
        ("deepseek_v3", ""),
        ("gemma3_text", ""),
        ("jamba", "mix the sequences of a pack"),
        ("qwen3_next", "mix the sequences of a pack"),
        ("bloom", "do not attend through transformers' registry"),
    ],
)
def test_model_that_is_checked_by_its_first_layers_is_right_or_refused(kind, message, tmp_path):
    path, batch = transformers_families.save(kind, tmp_path), tiny_models.make_batch()
    [result] = score_large_or_refuse(path, batch)
    if message:
        assert message in result["refusal"]
        return
    expected = score_eagerly(path, batch, torch.float32)
    torch.testing.assert_close(result["log_probs"], expected, rtol=0, atol=1e-4)


@ranks.spawn_on_ranks(1)
def train_adapters(path: Path, targets: list[str], batch: Batch) -> ranks.Result:
    """Take two steps of adapters; return the gradient norms and the tensors with factors."""
    use_family("transformers")
    lora = LoRAConfig(rank=4, alpha=8.0, targets=targets) if targets else LoRAConfig(rank=4)
    try:
        engine = start(path, Layout(), {"lora": lora, "fsdp": FSDPConfig(packing=False)})
    except ConfigError as error:
        return {"refusal": str(error)}
    norms = [engine.train_batch(batch, ranks.LOSS)["grad_norm"] for _ in range(2)]
    return {"norms": norms, "tensors": sorted(f.tensor for f in engine.collect_factors())}


@pytest.mark.parametrize("kind", ["phimoe", "mixtral"])
def test_adapters_leave_out_routers_with_a_forward_pass_of_their_own(kind, tmp_path):
    path, batch = transformers_families.save(kind, tmp_path), tiny_models.make_batch()
    [result] = train_adapters(path, [], batch)
    assert all(np.isfinite(result["norms"])) and result["norms"][0] > 0
    assert {name.split(".")[-2] for name in result["tensors"]} == {
        "q_proj", "k_proj", "v_proj", "o_proj"
    }  # fmt: skip


def test_adapter_of_a_router_is_refused_by_its_name(tmp_path):
    path = transformers_families.save("phimoe", tmp_path)
    [result] = train_adapters(path, ["router"], tiny_models.make_batch())
    assert "lora.targets names router, which this model does not have" in result["refusal"]


def list_targets_without_gradient(path: Path, targets: list[str], batch: Batch) -> set[str]:
    """Return the targets whose adapters by PEFT get no gradient from a sample."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    settings = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, settings).eval()
    ids = torch.tensor([[*batch["prompt_ids"][0], *batch["response_ids"][0]]])
    adapted(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {
        name.split(".")[-4]
        for name, parameter in adapted.named_parameters()
        if "lora_B" in name and parameter.grad is None
    }


@pytest.mark.parametrize(
    ("kind", "target", "trained_targets"),
    [
        ("jamba", "dt_proj", ["in_proj", "x_proj", "out_proj"]),
        ("longcat_flash", "classifier", ["q_a_proj", "o_proj"]),
    ],
)
def test_adapter_that_gets_no_gradient_in_peft_is_refused(kind, target, trained_targets, tmp_path):
    path, batch = transformers_families.save(kind, tmp_path), tiny_models.make_batch()
    assert list_targets_without_gradient(path, [target, *trained_targets], batch) == {target}
    for targets in ([], [target, *trained_targets]):
        [result] = train_adapters(path, targets, batch)
        assert f"lora.targets has {target}, but an adapter of model.layers.0." in result["refusal"]
        assert target not in result["refusal"].partition("allowed: lora.targets of ")[2].split(", ")
    [result] = train_adapters(path, trained_targets, batch)
    assert {name.split(".")[-2] for name in result["tensors"]} == set(trained_targets)


def test_adapters_of_a_model_without_linear_layers_are_refused(tmp_path):
    path = transformers_families.save("gpt2", tmp_path)  # its layers are transformers' Conv1D
    [result] = train_adapters(path, [], tiny_models.make_batch())
    assert result["refusal"] == (
        "lora.rank=4: this model has no linear layers of torch; allowed: 0"
    )


@ranks.spawn_on_ranks(1)
def export_or_refuse(path: Path, whole_bytes: int) -> ranks.Result:
    """Return the weights that an engine exports before any step, or why it refuses the model."""
    limit, start_check._WHOLE_BYTES = start_check._WHOLE_BYTES, whole_bytes
    try:
        engine = start(path, Layout(), {"fsdp": FSDPConfig(packing=False)})
    except ConfigError as error:
        return {"refusal": str(error)}
    finally:
        start_check._WHOLE_BYTES = limit
    return {"exported": dict(engine.get_per_tensor_param())}


# Whether it is compared by its first two layers alone, as a large model is, or whole.
@pytest.mark.parametrize("whole_bytes", [0, 1 << 30])
def test_model_whose_pass_scales_its_weights_is_refused(whole_bytes, tmp_path):
    # The first pass of RWKV divides weights by 2 ** (layer // rescale_every).
    path = transformers_families.save("rwkv", tmp_path, rescale_every=2)
    [result] = export_or_refuse(path, whole_bytes)
    assert "writes to the weight rwkv.blocks.0.attention.output.weight" in result["refusal"]


def test_exported_weights_after_a_pass_are_those_of_the_checkpoint(tmp_path):
    path = transformers_families.save("rwkv", tmp_path)
    [result] = export_or_refuse(path, 0)
    for name, tensor in load_file(path / "model.safetensors").items():
        assert torch.equal(result["exported"][name], tensor), name
