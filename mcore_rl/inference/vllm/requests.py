"""What vLLM is asked, and its answers as the types of protocol.py."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from mcore_rl.config.errors import PeerError
from mcore_rl.data.sample import RoutedExperts
from mcore_rl.inference.protocol import Completion, TokenScores

if TYPE_CHECKING:
    from vllm.inputs.engine import TokensInput
    from vllm.sampling_params import SamplingParams as EngineSampling
    from vllm.v1.engine.async_llm import AsyncLLM


def timeout_arguments(timeout_s: float | None) -> dict[str, Any]:
    """The engine arguments; what else vLLM limits goes into the environment."""
    if timeout_s is None:
        return {}
    seconds = math.ceil(timeout_s)
    os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = str(seconds)
    os.environ["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] = str(seconds)
    names = "distributed_timeout_seconds", "cpu_distributed_timeout_seconds"
    return dict.fromkeys(names, seconds)


def request_of(prompt_ids: list[int], **sampling: Any) -> tuple[TokensInput, EngineSampling]:
    """`sampling`: fields of vLLM's SamplingParams; `output_kind` by its name, `cache` is the salt.

    Without `experts_from` only those of the response come back, where the server records any.

    vLLM finds stop strings in text that it decodes, which takes time: without any it decodes
    nothing. It decodes special tokens then, as agent loops do.
    """
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    kind = RequestOutputKind[sampling.pop("output_kind", "FINAL_ONLY")]
    salt, stop = sampling.pop("cache", ""), list(sampling.pop("stop", ()))
    first = sampling.pop("experts_from", None)
    parameters = SamplingParams(
        **{"logprobs": 0} | sampling,  # 0: of the sampled token only
        stop=stop,
        detokenize=bool(stop),
        skip_special_tokens=False,
        output_kind=kind,
        routed_experts_prompt_start=len(prompt_ids) if first is None else first,
    )
    # As an engine's input it goes there at once; a prompt would go through a thread first.
    return tokens_input(prompt_ids, cache_salt=salt or None), parameters


def completion_of(output: Any, experts_from: int | None = None) -> Completion:
    """Of one of vLLM's CompletionOutputs, with the experts from a token on if one is given."""
    if output.finish_reason not in ("stop", "length", "abort"):
        raise RuntimeError(f"vLLM ended a request with {output.finish_reason!r}")
    token_ids = list(output.token_ids)
    versions = [int(s.version) for s in output.weight_versions or () for _ in range(s.start, s.end)]
    stop = output.stop_reason if isinstance(output.stop_reason, str) else ""
    routed = None
    if experts_from is not None and output.routed_experts is not None:
        ids = output.routed_experts  # uint8 or uint16, which torch cannot index with
        routed = RoutedExperts(experts_from, ids if ids.dtype == np.uint8 else ids.astype(np.int16))
    reason = output.finish_reason
    return Completion(token_ids, log_probs_of(output), reason, versions, stop, routed)


def log_probs_of(output: Any) -> list[float]:
    """Of the tokens of one of vLLM's CompletionOutputs."""
    return [at[token].logprob for at, token in zip(output.logprobs, output.token_ids, strict=True)]


def scores_of(token_ids: list[int], tables: Any) -> TokenScores:
    """`tables`: for each token vLLM's Logprob by id, of that token and of the most likely one."""
    log_probs = [at[token].logprob for at, token in zip(tables, token_ids, strict=True)]
    top_ids = [next(token for token, entry in at.items() if entry.rank == 1) for at in tables]
    return TokenScores(token_ids, log_probs, top_ids)


async def on_workers(engine: AsyncLLM, what: str, method: str, arguments: dict[str, Any]) -> None:
    """A method of vLLM's workers that may fail on some of them: then RuntimeError or PeerError.

    An exception there would leave the other workers' answers in the queue, to be read as those
    of the next call (v1/executor/multiproc_executor.py:433).
    """
    errors = await engine.collective_rpc("attempt", args=(method, arguments))
    if any(errors):
        reasons = "; ".join(f"worker {i}: {e[0]}" for i, e in enumerate(errors) if e)
        is_peers = all(e[1] for e in errors if e)
        raise (PeerError if is_peers else RuntimeError)(f"{what} failed: {reasons}")


async def update_workers(engine: AsyncLLM, version: int) -> None:
    """vLLM's phases of a weight update by our engine on all workers. Raises as `on_workers`."""
    what, info = f"weight update to version {version}", {"update_info": {"version": version}}
    await on_workers(engine, what, "begin_weight_update", {})
    await on_workers(engine, what, "update_weights", info)
    await on_workers(engine, what, "finish_weight_update", {})
