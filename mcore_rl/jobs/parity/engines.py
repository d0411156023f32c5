"""What each engine says of the same tokens. Each runs in processes of its own: jobs/ranks.py.

`..._scores` are fields of Scores. `..._traces` are, of each sequence, what the modules put out:
float32 [tokens, dim] by name.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.engine.base import BaseEngine, EngineSpec, create_engine
from mcore_rl.inference.protocol import TokenScores
from mcore_rl.inference.vllm.server import VLLMServer
from mcore_rl.jobs.parity.compare import Scores
from mcore_rl.models.base import HFConfig, count_kv_elements_per_token
from mcore_rl.parallel.mesh import Coordinate, Mesh

T = TypeVar("T")

_SEED = 0
_LEAST_CACHE_BYTES = 64 << 20
_BLOCK_TOKENS = 128  # on a CPU (vllm/platforms/cpu.py:293)
_TOKENS_AT_ONCE = 512  # log-softmax of a whole vocabulary, in float32
_TRACED = re.compile(
    r"model\.(embed_tokens|norm|layers\.\d+\.(input_layernorm|self_attn|post_attention_layernorm|mlp))"
    r"|lm_head"
)
_EXPERTS = re.compile(r"(model\.layers\.\d+\.mlp)\.experts")


# Megatron: what the ranks of a layout run


def megatron_scores(
    spec: EngineSpec, checkpoint: str, sequences: list[list[int]]
) -> dict[str, Any]:
    """Of the sequences that the rank's data-parallel share has; {} on stages before the last.

    Weights are those of spec.model.path or, where it is not "", of the Megatron checkpoint. `spec`
    must ask for the likeliest id of each token.
    """
    engine = _started(spec, checkpoint)
    rows = list(range(_place(engine).dp_rank, len(sequences), engine.layout.dp))
    scored = engine.infer_batch(_batch(sequences).take(rows))
    engine.close()
    if scored is None:
        return {}
    return {
        "rows": rows,
        "log_probs": [row.tolist() for row in scored.jagged("log_probs")],
        "top_ids": [row[:, 0].tolist() for row in scored.jagged("top_ids")],
    }


def gathered(by_rank: Sequence[dict[str, Any]]) -> Scores:
    """What `megatron_scores` returned on all ranks, in the order of the sequences."""
    found = {}
    for rank in filter(None, by_rank):
        for row, *scores in zip(rank["rows"], rank["log_probs"], rank["top_ids"], strict=True):
            found[row] = scores
    log_probs, top_ids = zip(*(found[row] for row in sorted(found)), strict=True)
    return Scores(log_probs, top_ids)


def megatron_traces(
    spec: EngineSpec, checkpoint: str, sequences: list[list[int]]
) -> list[dict[str, torch.Tensor]]:
    """Of the modules of the rank's stage; [] on replicas."""
    engine = _started(spec, checkpoint)
    at, found = _place(engine), []
    for ids in sequences:
        batch = _batch([ids])
        found.append(engine.trace(batch if at.dp_rank == 0 else batch.take([])))
    engine.close()
    return found if at.dp_rank == at.cp_rank == at.tp_rank == 0 else []


def joined(by_rank: Sequence[list[dict[str, torch.Tensor]]]) -> list[dict[str, torch.Tensor]]:
    """What `megatron_traces` returned on all ranks, of the modules of the whole model."""
    return [
        {name: value for stage in stages for name, value in stage.items()}
        for stages in zip(*filter(None, by_rank), strict=True)
    ]


def _started(spec: EngineSpec, checkpoint: str) -> BaseEngine:
    engine = create_engine("language_model", spec)
    engine.initialize()
    if checkpoint:
        engine.load_checkpoint(Path(checkpoint))
    return engine


def _place(engine: BaseEngine) -> Coordinate:
    return Mesh(engine.layout).get_coordinate(engine.world_rank)


def _batch(sequences: list[list[int]]) -> Batch:
    """All tokens but the first are to be scored."""
    return Batch(
        {
            "prompt_ids": Jagged.pack([ids[:1] for ids in sequences], np.int64),
            "response_ids": Jagged.pack([ids[1:] for ids in sequences], np.int64),
        }
    )


# Transformers, on one device: the GPU where there is one


@torch.no_grad()
def hf_scores(path: str, dtype: str, sequences: list[list[int]]) -> dict[str, list[list[Any]]]:
    """Of all tokens but the first of each sequence."""
    model = _loaded(path, dtype)
    log_probs, top_ids = [], []
    for ids in sequences:
        tokens = torch.tensor(ids, device=model.device)
        logits = model(tokens[None], use_cache=False).logits[0, :-1]
        log_probs.append(_log_probs(logits, tokens[1:]).tolist())
        top_ids.append(logits.argmax(-1).tolist())
    return {"log_probs": log_probs, "top_ids": top_ids}


@torch.no_grad()
def hf_traces(path: str, dtype: str, sequences: list[list[int]]) -> list[dict[str, torch.Tensor]]:
    model = _loaded(path, dtype)
    found: list[dict[str, torch.Tensor]] = []
    for name, module in model.named_modules():
        if _TRACED.fullmatch(name):
            module.register_forward_hook(partial(_keep, found, name))
        elif experts := _EXPERTS.fullmatch(name):
            num_experts = model.get_submodule(f"{experts[1]}.gate").weight.shape[0]
            keep = partial(_keep_routing, found, f"{experts[1]}.gate", num_experts)
            module.register_forward_pre_hook(keep)
    for ids in sequences:
        found.append({})
        model(torch.tensor([ids], device=model.device), use_cache=False)
    return found


def _loaded(path: str, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), local_files_only=True
    )
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _log_probs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[tokens] float32 log-probs of the targets, from [tokens, vocabulary]."""
    parts = zip(logits.split(_TOKENS_AT_ONCE), targets.split(_TOKENS_AT_ONCE), strict=True)
    chosen = [part.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0] for part, ids in parts]
    return torch.cat(chosen)


def _keep(found: list[dict[str, torch.Tensor]], name: str, _: Any, __: Any, output: Any) -> None:
    value = output[0] if isinstance(output, tuple) else output
    found[-1][name] = value.reshape(-1, value.shape[-1]).to("cpu", torch.float32, copy=True)


def _keep_routing(
    found: list[dict[str, torch.Tensor]], name: str, num_experts: int, _: Any, inputs: Any
) -> None:
    """Experts are called with (states, ids, weights); [tokens, experts] weights, 0 elsewhere.

    What routers return differs from family to family and from version to version.
    """
    _, ids, weights = inputs
    dense = torch.zeros(len(ids), num_experts, dtype=torch.float32, device=ids.device)
    found[-1][name] = dense.scatter_(1, ids, weights.float()).cpu()


# vLLM: a server of its own, one request at a time


@dataclass(frozen=True, slots=True)
class ServerSpec:
    model_path: str
    dtype: str
    max_model_tokens: int  # of a sequence, and one more, which vLLM generates after a prefill
    tp: int
    kv_cache_bytes: int
    timeout_s: float | None = None  # of waits inside vLLM


def vllm_scores(spec: ServerSpec, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
    """`scored` by a server that is started for it."""
    return asyncio.run(_serving(spec, lambda server: scored(server, prompts, num_tokens)))


async def scored(server: VLLMServer, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
    """Continues each prompt by `num_tokens` sampled ones, and scores what comes out of that.

    "sequences": prompts with their continuations. "decode": fields of Scores, of the continuations
    as they were sampled. "prefill": the same of all tokens but the first, from one pass over them.
    """
    decoded = [
        await server.decode(ids, num_tokens, seed=_SEED + row) for row, ids in enumerate(prompts)
    ]
    sequences = [ids + more.token_ids for ids, more in zip(prompts, decoded, strict=True)]
    prefilled = [await server.score(ids) for ids in sequences]
    return {"sequences": sequences, "decode": _fields(decoded), "prefill": _fields(prefilled)}


def vllm_traces(spec: ServerSpec, sequences: list[list[int]]) -> list[dict[str, torch.Tensor]]:
    async def traced(server: VLLMServer) -> list[dict[str, torch.Tensor]]:
        return [await server.trace(ids) for ids in sequences]

    return asyncio.run(_serving(spec, traced, eager=True))


def kv_cache_bytes(config: HFConfig, num_tokens: int) -> int:
    """An upper bound on what the cache of four sequences takes, at four bytes an element."""
    num_tokens += _BLOCK_TOKENS  # vLLM rounds up to whole blocks
    return max(_LEAST_CACHE_BYTES, 4 * num_tokens * 4 * count_kv_elements_per_token(config))


async def _serving(
    spec: ServerSpec, work: Callable[[VLLMServer], Awaitable[T]], *, eager: bool = False
) -> T:
    config = RolloutConfig(tp=spec.tp, max_num_seqs=4, kv_cache_bytes=spec.kv_cache_bytes)
    path, dtype, longest = spec.model_path, spec.dtype, spec.max_model_tokens
    server = VLLMServer(path, dtype, longest, config, _SEED, timeout_s=spec.timeout_s, eager=eager)
    try:
        await server.start()
        return await work(server)
    finally:
        await server.close()


def _fields(scores: list[TokenScores]) -> dict[str, list[list[Any]]]:
    return {
        "log_probs": [entry.log_probs for entry in scores],
        "top_ids": [entry.top_ids for entry in scores],
    }
