"""Requests as vLLM takes them, and its outputs as completions and scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mcore_rl.data.sample import RoutedExperts
from mcore_rl.inference.protocol import Completion, TokenScores

if TYPE_CHECKING:
    from vllm.inputs.engine import TokensInput
    from vllm.sampling_params import SamplingParams as EngineSampling


def build_request(prompt_ids: list[int], **sampling: Any) -> tuple[TokensInput, EngineSampling]:
    """Return vLLM's prompt and sampling parameters.

    Args:
        sampling: Fields of vLLM's SamplingParams, with `output_kind` by name; `cache`, the salt of
            the prefix cache; `experts_from`, see our SamplingParams. None returns the experts of
            the response only, if the server records any.
    """
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    kind = RequestOutputKind[sampling.pop("output_kind", "FINAL_ONLY")]
    salt, stop = sampling.pop("cache", ""), list(sampling.pop("stop", ()))
    experts_from = sampling.pop("experts_from", None)
    parameters = SamplingParams(
        **{"logprobs": 0} | sampling,  # 0: of the sampled token only
        stop=stop,
        detokenize=bool(stop),  # vLLM looks for stop strings in decoded text, which takes time
        skip_special_tokens=False,  # as agent loops decode
        output_kind=kind,
        routed_experts_prompt_start=len(prompt_ids) if experts_from is None else experts_from,
    )
    # An engine input skips the thread that a prompt goes through.
    return tokens_input(prompt_ids, cache_salt=salt or None), parameters


def build_completion(output: Any, reason: str, experts_from: int | None = None) -> Completion:
    """Convert one of vLLM's CompletionOutputs, which has ended for this reason."""
    if output.finish_reason not in ("stop", "length", "abort"):
        raise RuntimeError(f"vLLM ended a request with {output.finish_reason!r}")
    token_ids = list(output.token_ids)
    versions = [int(s.version) for s in output.weight_versions or () for _ in range(s.start, s.end)]
    stop = output.stop_reason if isinstance(output.stop_reason, str) else ""
    experts = None
    if experts_from is not None and output.routed_experts is not None:
        ids = output.routed_experts  # uint8 or uint16, which torch cannot index with
        ids = ids if ids.dtype == np.uint8 else ids.astype(np.int16)
        experts = RoutedExperts(experts_from, ids)
    return Completion(token_ids, get_log_probs(output), reason, versions, stop, experts)


def has_failed(output: Any) -> bool:
    """Return whether one of the responses of vLLM's RequestOutput has ended in an error."""
    return any(completion.finish_reason == "error" for completion in output.outputs)


def get_log_probs(output: Any) -> list[float]:
    """Return the log-prob of each token of one of vLLM's CompletionOutputs."""
    pairs = zip(output.logprobs, output.token_ids, strict=True)
    return [entries[token].logprob for entries, token in pairs]


def build_scores(token_ids: list[int], logprobs: Any) -> TokenScores:
    """Build scores from vLLM's Logprob entries by token id, per position.

    Each position has the entries of its token and of the most likely one.
    """
    pairs = zip(logprobs, token_ids, strict=True)
    log_probs = [entries[token].logprob for entries, token in pairs]
    top_ids = [
        next(token for token, entry in entries.items() if entry.rank == 1) for entries in logprobs
    ]
    return TokenScores(token_ids, log_probs, top_ids)
