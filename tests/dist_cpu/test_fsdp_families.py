"""Each causal language model of transformers has the numbers of its eager model, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks
import tiny_models
import torch
import transformers
import transformers_families
from test_fsdp_engine import build_spec, start

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import FSDPConfig, Layout
from mcore_rl.data.batch import Batch
from mcore_rl.engine.base import create_engine
from mcore_rl.models.base import use_family
from tests.nightly import all_but

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FAMILIES = transformers_families.list_families()
# One of each kind: a window in the mask alone, recurrent layers, chunks, no registry.
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
        assert "allowed: " in result["refusal"] or "lacks tensor" in result["refusal"]
        return
    expected = score_eagerly(path, batch, torch.float32)
    gaps = (result["log_probs"] - expected).abs()
    if dtype == "float32":
        assert gaps.max() < 1e-4
    else:
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
