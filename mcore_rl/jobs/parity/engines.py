"""Scores and traces of the same tokens by Megatron, transformers and vLLM.

The functions run in separate processes (jobs/ranks.py). `score_with_...` return fields of Scores,
`trace_with_...` a Trace of each sequence.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from mcore_rl.models.transformers_model import load_transformers_config
from mcore_rl.parallel.devices import detect_device
from mcore_rl.parallel.mesh import Coordinate, Mesh

T = TypeVar("T")

_SEED = 0
_LOG_SOFTMAX_TOKENS = 512  # per log-softmax over the vocabulary, in float32
_TRACED = re.compile(
    r"model\.(embed_tokens|norm|layers\.\d+\.(input_layernorm|self_attn|post_attention_layernorm|mlp))"
    r"|lm_head"
)
_EXPERTS = re.compile(r"(model\.layers\.\d+\.mlp)\.experts")

# Output of each module, [tokens, dim] float32, by the name that Hugging Face gives the module.
Trace = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of the last tokens of each sequence; each list has one entry per sequence.

    Log-probs are in nats, of each token given all tokens before it.
    """

    log_probs: Sequence[Sequence[float]]
    top_ids: Sequence[Sequence[int]]  # argmax at each token


# Megatron: run by each rank of a layout


def score_with_megatron(
    spec: EngineSpec, checkpoint: str, sequences: list[list[int]]
) -> dict[str, Any]:
    """Score this data-parallel rank's share of the sequences; {} on stages before the last.

    Args:
        spec: With num_top_log_probs=1.
        checkpoint: Megatron checkpoint to load over the weights of spec.model.path; "" for none.
    """
    engine = _start_engine(spec, checkpoint)
    rows = list(range(_get_coordinate(engine).dp_rank, len(sequences), engine.layout.dp))
    batch = engine.infer_batch(_build_batch(sequences).take(rows))
    engine.close()
    if batch is None:
        return {}
    return {
        "rows": rows,
        "log_probs": [row.tolist() for row in batch.jagged("log_probs")],
        "top_ids": [row[:, 0].tolist() for row in batch.jagged("top_ids")],
    }


def merge_scores(rank_results: Sequence[dict[str, Any]]) -> Scores:
    """Merge the results of `score_with_megatron` on all ranks, in the order of the sequences."""
    scores = {}
    for result in filter(None, rank_results):
        columns = result["rows"], result["log_probs"], result["top_ids"]
        for row, *row_scores in zip(*columns, strict=True):
            scores[row] = row_scores
    log_probs, top_ids = zip(*(scores[row] for row in sorted(scores)), strict=True)
    return Scores(log_probs, top_ids)


def trace_with_megatron(
    spec: EngineSpec, checkpoint: str, sequences: list[list[int]]
) -> list[dict[str, torch.Tensor]]:
    """Trace the modules of this rank's stage; [] on replicas."""
    engine = _start_engine(spec, checkpoint)
    coordinate, traces = _get_coordinate(engine), []
    for ids in sequences:
        batch = _build_batch([ids])
        traces.append(engine.trace(batch if coordinate.dp_rank == 0 else batch.take([])))
    engine.close()
    is_replica = coordinate.dp_rank or coordinate.cp_rank or coordinate.tp_rank
    return [] if is_replica else traces


def merge_traces(
    rank_traces: Sequence[list[dict[str, torch.Tensor]]],
) -> list[dict[str, torch.Tensor]]:
    """Merge the traces of `trace_with_megatron` on all ranks, each of some stages of the model."""
    return [
        {name: output for stage in stages for name, output in stage.items()}
        for stages in zip(*filter(None, rank_traces), strict=True)
    ]


def _start_engine(spec: EngineSpec, checkpoint: str) -> BaseEngine:
    engine = create_engine("language_model", spec)
    engine.initialize()
    if checkpoint:
        engine.load_checkpoint(Path(checkpoint))
    return engine


def _get_coordinate(engine: BaseEngine) -> Coordinate:
    return Mesh(engine.layout).get_coordinate(engine.world_rank)


def _build_batch(sequences: list[list[int]]) -> Batch:
    """Build a batch in which all tokens but the first are scored."""
    return Batch(
        {
            "prompt_ids": Jagged.pack([ids[:1] for ids in sequences], np.int64),
            "response_ids": Jagged.pack([ids[1:] for ids in sequences], np.int64),
        }
    )


# Transformers, on one device: the first GPU if there is one


@torch.no_grad()
def score_with_hf(path: str, dtype: str, sequences: list[list[int]]) -> dict[str, list[list[Any]]]:
    """Score all tokens but the first of each sequence."""
    model = _load_model(path, dtype)
    log_probs, top_ids = [], []
    for ids in sequences:
        tokens = torch.tensor(ids, device=model.device)
        logits = model(tokens[None], use_cache=False).logits[0, :-1]
        log_probs.append(_compute_log_probs(logits, tokens[1:]).tolist())
        top_ids.append(logits.argmax(-1).tolist())
    return {"log_probs": log_probs, "top_ids": top_ids}


@torch.no_grad()
def trace_with_hf(
    path: str, dtype: str, sequences: list[list[int]]
) -> list[dict[str, torch.Tensor]]:
    """Trace all modules."""
    model = _load_model(path, dtype)
    traces: list[dict[str, torch.Tensor]] = []
    for name, module in model.named_modules():
        if _TRACED.fullmatch(name):
            module.register_forward_hook(partial(_record_output, traces, name))
        elif experts := _EXPERTS.fullmatch(name):
            moe = model.get_submodule(experts[1])
            router = moe.gate if hasattr(moe, "gate") else moe.router
            num_experts = router.weight.shape[0]
            record = partial(_record_routing, traces, f"{experts[1]}.gate", num_experts)
            module.register_forward_pre_hook(record)
    for ids in sequences:
        traces.append({})
        model(torch.tensor([ids], device=model.device), use_cache=False)
    return traces


def _load_model(path: str, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        path,
        config=load_transformers_config(path),
        dtype=getattr(torch, dtype),
        local_files_only=True,
        trust_remote_code=False,
    )
    return model.to(detect_device().type).eval()


def _compute_log_probs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return [tokens] float32 log-probs of the targets, from logits [tokens, vocabulary]."""
    parts = zip(logits.split(_LOG_SOFTMAX_TOKENS), targets.split(_LOG_SOFTMAX_TOKENS), strict=True)
    chosen = [part.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0] for part, ids in parts]
    return torch.cat(chosen)


def _record_output(
    traces: list[dict[str, torch.Tensor]], name: str, _: Any, __: Any, output: Any
) -> None:
    value = output[0] if isinstance(output, tuple) else output
    traces[-1][name] = value.reshape(-1, value.shape[-1]).to("cpu", torch.float32, copy=True)


def _record_routing(
    traces: list[dict[str, torch.Tensor]], name: str, num_experts: int, _: Any, inputs: Any
) -> None:
    """Record [tokens, experts] weights, 0 where not chosen, from the inputs of the experts.

    Experts of all families are called with (states, ids, weights), while the outputs of routers
    differ between families and versions.
    """
    _, ids, weights = inputs
    dense = torch.zeros(len(ids), num_experts, dtype=torch.float32, device=ids.device)
    traces[-1][name] = dense.scatter_(1, ids, weights.float()).cpu()


# vLLM: a separate server, one request at a time


@dataclass(frozen=True, slots=True)
class VLLMSpec:
    model_path: str
    dtype: str
    max_model_tokens: int  # longest sequence, plus the token that vLLM generates after a prefill
    tp: int
    timeout_s: float | None = None  # timeout of waits inside vLLM


def score_with_vllm(spec: VLLMSpec, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
    """Start a server and call `score_on_server` with it."""

    async def score(server: VLLMServer) -> dict[str, Any]:
        return await score_on_server(server, prompts, num_tokens)

    return asyncio.run(_run_with_server(spec, score))


async def score_on_server(
    server: VLLMServer, prompts: list[list[int]], num_tokens: int
) -> dict[str, Any]:
    """Continue each prompt by `num_tokens` sampled tokens; score the resulting sequences.

    Returns:
        "sequences": prompts with their continuations; "decode": fields of Scores of the
        continuations, from sampling; "prefill": fields of Scores of all tokens but the first, from
        one prefill.
    """
    decoded = [
        await server.decode(ids, num_tokens, seed=_SEED + row) for row, ids in enumerate(prompts)
    ]
    sequences = [ids + more.token_ids for ids, more in zip(prompts, decoded, strict=True)]
    prefilled = [await server.score(ids) for ids in sequences]
    return {
        "sequences": sequences,
        "decode": _list_fields(decoded),
        "prefill": _list_fields(prefilled),
    }


def trace_with_vllm(spec: VLLMSpec, sequences: list[list[int]]) -> list[dict[str, torch.Tensor]]:
    """Start a server and trace all modules."""

    async def trace(server: VLLMServer) -> list[dict[str, torch.Tensor]]:
        return [await server.trace(ids) for ids in sequences]

    return asyncio.run(_run_with_server(spec, trace, eager=True))


async def _run_with_server(
    spec: VLLMSpec, work: Callable[[VLLMServer], Awaitable[T]], *, eager: bool = False
) -> T:
    config = RolloutConfig(tp=spec.tp, max_num_seqs=4)
    path, dtype, longest = spec.model_path, spec.dtype, spec.max_model_tokens
    server = VLLMServer(path, dtype, longest, config, _SEED, timeout_s=spec.timeout_s, eager=eager)
    try:
        await server.start()
        return await work(server)
    finally:
        await server.close()


def _list_fields(scores: list[TokenScores]) -> dict[str, list[list[Any]]]:
    return {
        "log_probs": [entry.log_probs for entry in scores],
        "top_ids": [entry.top_ids for entry in scores],
    }
