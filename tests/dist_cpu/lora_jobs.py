"""Jobs of test_lora.py on ranks, and its oracle: low-rank adapters in plain autograd."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ranks
import tiny_models
import torch
import transformers
from torch.func import functional_call

from mcore_rl.config.schema import Layout, LoRAConfig, RecomputeConfig
from mcore_rl.data.batch import Batch
from mcore_rl.engine.base import EngineSpec
from mcore_rl.engine.megatron.engine import MegatronEngine

Result = ranks.Result
SETTINGS = LoRAConfig(rank=4, alpha=8.0)
SCALE = SETTINGS.alpha / SETTINGS.rank

_SHAPE: dict[str, Any] = {
    "vocab_size": tiny_models.VOCAB, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "dtype": "float32",
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1,
    "n_group": 4, "topk_group": 1, "first_k_dense_replace": 1, "num_mtp_layers": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
_LATENT_TARGETS = ["q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj"]
TARGETS = {
    "qwen3": SETTINGS.targets,
    "qwen3_moe": SETTINGS.targets,
    "qwen3_next": SETTINGS.targets,
    "deepseek_v3": [f"linear_{n}" for n in (*_LATENT_TARGETS, "proj", "fc1", "fc2")],
}


def configs() -> dict[str, transformers.PretrainedConfig]:
    grouped = {**_SHAPE, "num_key_value_heads": 2, "head_dim": 24}
    return {
        # Two ranks with two chunks each.
        "qwen3": transformers.Qwen3Config(
            **grouped | {"num_hidden_layers": 4}, tie_word_embeddings=True
        ),
        "qwen3_moe": transformers.Qwen3MoeConfig(
            **grouped, **_EXPERTS, num_experts=8, tie_word_embeddings=False
        ),
        "qwen3_next": tiny_models.configs()["qwen3_next"],
        "deepseek_v3": transformers.DeepseekV3Config(**_SHAPE, **_EXPERTS, **_LATENT),
    }


def build(model: str) -> Any:
    return tiny_models.build_from(configs()[model])


def lora_spec(path: Path, layout: Layout, dtype: str = "float32", **settings: Any) -> EngineSpec:
    """Return the spec of an engine with adapters; `settings` are fields of EngineConfig."""
    spec = ranks.build_engine_spec(path, layout, dtype)
    model = path.name  # of its checkpoint's folder
    lora = replace(SETTINGS, targets=TARGETS[model])
    return replace(spec, engine=replace(spec.engine, **{"lora": lora} | settings))


def adapters(engine: MegatronEngine) -> Iterator[Any]:
    for chunk in engine.chunks:
        yield from chunk.lora.values()


@torch.no_grad()
def set_factors(engine: MegatronEngine) -> None:
    """Every B from noise, the same whole B at every layout."""
    for adapter in adapters(engine):
        parts = []
        for run in adapter.shard.rows:
            generator = torch.Generator().manual_seed(sum(run.tensor.encode()))
            noise = torch.randn(run.total, SETTINGS.rank, generator=generator) * 0.1
            parts.append(noise[run.start : run.start + run.count])
        adapter.B.copy_(torch.cat(parts))


def factors(engine: MegatronEngine) -> list[dict[str, Any]]:
    """The factors of this rank, cut at the borders of Hugging Face tensors."""
    pieces = []
    for adapter in adapters(engine):
        shard = adapter.shard
        parts = adapter.B.detach().clone().split([run.count for run in shard.rows])
        for run, part in zip(shard.rows, parts, strict=True):
            a = {"A_of": shard.name, "A": adapter.A.detach().clone()}
            offsets = {"first_row": run.start, "first_input": shard.first_input}
            pieces.append({"tensor": run.tensor, "B": part} | a | offsets)
    return pieces


def scores(
    engine: MegatronEngine, batch: Batch, *, adapters: bool = True
) -> list[torch.Tensor] | None:
    """Log-probs of this rank's samples, on the last pipeline stage."""
    share = batch.take(ranks.list_rows(engine, batch))
    scored = engine.infer_batch(share, adapters=adapters)
    if scored is None:
        return None
    return [torch.from_numpy(values.copy()) for values in scored.jagged("log_probs")]


def frozen(engine: MegatronEngine) -> list[torch.Tensor]:
    from mcore_rl.engine.megatron.weights import get_local_tensors

    return [t.detach().clone() for c in engine.chunks for t in get_local_tensors(c).values()]


def state_numel(engine: MegatronEngine) -> int:
    """Elements of Adam's first moments on this rank."""
    parts = engine.optimizer.chained_optimizers
    states = [state for part in parts for state in part.optimizer.state.values()]
    return sum(state["exp_avg"].numel() for state in states)


def parity(path: Path, layout: Layout, batch: Batch, dtype: str = "float32") -> Result:
    """Scores and exports before and after B is set, and two steps with what they changed."""
    plain = scores(ranks.start_engine(ranks.build_engine_spec(path, layout, dtype)), batch)
    engine = ranks.start_engine(lora_spec(path, layout, dtype))
    start = {"plain": plain, "fresh": scores(engine, batch)}
    start["fresh_export"] = dict(engine.get_per_tensor_param())
    set_factors(engine)
    share = batch.take(ranks.list_rows(engine, batch))
    before = frozen(engine)
    result = {
        "rows": ranks.list_rows(engine, batch),
        "log_probs": scores(engine, batch),
        "exported": dict(engine.get_per_tensor_param()),
        "factors": factors(engine),
        "steps": [engine.train_batch(share, ranks.LOSS) for _ in range(2)],
        "trained": dict(engine.get_per_tensor_param()),
        "trained_factors": factors(engine),
        "without_adapters": scores(engine, batch, adapters=False),
        "with_adapters": scores(engine, batch),
        "frozen_is_equal": all(map(torch.equal, frozen(engine), before)),
        "state_numel": state_numel(engine),
        "factor_numel": sum(p.numel() for a in adapters(engine) for p in a.parameters()),
    }
    return start | result


def steps(path: Path, layout: Layout, batch: Batch, **settings: Any) -> Result:
    """Two steps with other settings of the engine."""
    spec = lora_spec(path, layout)
    spec = replace(spec, engine=replace(spec.engine, **settings))
    engine = ranks.start_engine(spec)
    set_factors(engine)
    share = batch.take(ranks.list_rows(engine, batch))
    taken = [engine.train_batch(share, ranks.LOSS) for _ in range(2)]
    return {"steps": taken, "trained": dict(engine.get_per_tensor_param())}


def full_recompute(path: Path, layout: Layout, batch: Batch) -> Result:
    return steps(path, layout, batch, recompute=RecomputeConfig(granularity="full"))


def selective_recompute(path: Path, layout: Layout, batch: Batch) -> Result:
    recompute = RecomputeConfig(granularity="selective", modules=["core_attn", "moe"])
    return steps(path, layout, batch, recompute=recompute)


def overlapped(path: Path, layout: Layout, batch: Batch) -> Result:
    """The sharded optimizer, with communication behind the computation."""
    optimizer = ranks.build_engine_spec(path, layout).engine.optimizer
    sharded = replace(optimizer, distributed=True, overlap=True)
    return steps(path, layout, batch, optimizer=sharded)


def experts_only(path: Path, layout: Layout, batch: Batch) -> Result:
    """In a model of expert layers linear_fc2 is that of experts: nothing else is trained."""
    return steps(path, layout, batch, lora=replace(SETTINGS, targets=["linear_fc2"]))


def resume(path: Path, layout: Layout, batch: Batch, folder: Path, dtype: str) -> Result:
    """Four steps in one go, and two, a checkpoint, and two more in a new engine."""
    engine = ranks.start_engine(lora_spec(path, layout, dtype))
    set_factors(engine)
    share = batch.take(ranks.list_rows(engine, batch))
    taken = [engine.train_batch(share, ranks.LOSS) for _ in range(2)]
    engine.save_checkpoint(folder)
    taken += [engine.train_batch(share, ranks.LOSS) for _ in range(2)]
    other = resumed(path, layout, batch, folder, dtype)
    return {"steps": taken, "trained": dict(engine.get_per_tensor_param()), "resumed": other}


def resumed(
    path: Path,
    layout: Layout,
    batch: Batch,
    folder: Path,
    dtype: str,
    saved_again: Path | None = None,
) -> Result:
    """Two steps from a checkpoint; with `saved_again`, which is to be one of it, by a sharded
    optimizer.
    """
    spec = lora_spec(path, layout, dtype)
    optimizer = replace(spec.engine.optimizer, distributed=saved_again is not None)
    engine = ranks.start_engine(replace(spec, engine=replace(spec.engine, optimizer=optimizer)))
    engine.load_checkpoint(folder)
    if saved_again is not None:
        engine.save_checkpoint(saved_again)
    share = batch.take(ranks.list_rows(engine, batch))
    taken = [engine.train_batch(share, ranks.LOSS) for _ in range(2)]
    return {"steps": taken, "trained": dict(engine.get_per_tensor_param())}


def refusals(path: Path, layout: Layout, folder: Path) -> Result:
    """Return the errors for a checkpoint of another alpha, and for a wrong target."""
    from mcore_rl.config.errors import ConfigError

    messages = []
    other = ranks.start_engine(lora_spec(path, layout, lora=replace(SETTINGS, alpha=16.0)))
    wrong = lora_spec(path, layout, lora=replace(SETTINGS, targets=["linear_qkv", "q_proj"]))
    for act in (lambda: other.load_checkpoint(folder), lambda: ranks.start_engine(wrong)):
        try:
            act()
        except ConfigError as error:
            messages.append(str(error))
    return {"messages": messages}


def formed_weights(path: Path, layout: Layout, batch: Batch) -> Result:
    """In bfloat16: the weights that forward calls ran on, against those of an export."""
    engine = ranks.start_engine(lora_spec(path, layout, "bfloat16"))
    set_factors(engine)
    formed: dict[str, torch.Tensor] = {}
    for name, adapter in engine.chunks[0].lora.items():
        adapter.register_forward_hook(
            lambda module, args, output, name=name: formed.__setitem__(name, output.clone())
        )
    engine.infer_batch(batch.take(ranks.list_rows(engine, batch)))
    used = dict(formed)
    formed.clear()
    list(engine.get_per_tensor_param())
    return {"used": used, "exported": dict(formed)}


def join_factors(factors: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the factors of each tensor, joined from the runs of rows that one rank has."""
    tensors = dict.fromkeys(f["tensor"] for f in factors)
    for tensor in tensors:
        runs = sorted((f for f in factors if f["tensor"] == tensor), key=lambda f: f["first_row"])
        yield runs[0] | {"B": torch.cat([run["B"] for run in runs])}


class Adapted:
    """A transformers model with frozen weights and trainable factors, in plain autograd."""

    def __init__(
        self, model: Any, checkpoint: Mapping[str, torch.Tensor], factors: list[dict[str, Any]]
    ) -> None:
        self.model = model.requires_grad_(False)
        self.checkpoint = checkpoint
        joined = list(join_factors(factors))
        # Tensors of one Megatron weight share their A.
        self.a = {f["A_of"]: f["A"].clone().requires_grad_() for f in joined}
        self.b = {f["tensor"]: f["B"].clone().requires_grad_() for f in joined}
        self.a_of = {f["tensor"]: f["A_of"] for f in joined}

    def parameters(self) -> list[torch.Tensor]:
        return [*self.a.values(), *self.b.values()]

    def __call__(self, ids: torch.Tensor) -> Any:
        return functional_call(self.model, self._weights(), (ids,))

    def _weights(self) -> dict[str, torch.Tensor]:
        """Adapted weights by the names of the model, which stacks the experts of a layer."""
        actual = {
            tensor: self.checkpoint[tensor] + SCALE * b @ self.a[self.a_of[tensor]]
            for tensor, b in self.b.items()
        }
        for name, parameter in self.model.named_parameters():
            path, _, last = name.rpartition(".")
            if last not in ("gate_up_proj", "down_proj"):
                continue
            parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
            experts = [
                torch.cat([actual.pop(f"{path}.{expert}.{part}.weight") for part in parts])
                for expert in range(len(parameter))
            ]
            actual[name] = torch.stack(experts)
        return actual
