"""What vLLM is asked, and its answers as the types of protocol.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mcore_rl.rollout.protocol import Completion, TokenScores

if TYPE_CHECKING:
    from vllm.inputs.engine import TokensInput
    from vllm.sampling_params import SamplingParams as EngineSampling


def request_of(prompt_ids: list[int], **sampling: Any) -> tuple[TokensInput, EngineSampling]:
    """`sampling`: fields of vLLM's SamplingParams; `output_kind` by its name, `cache` is the salt.

    vLLM finds stop strings in text that it decodes, which takes time: without any it decodes
    nothing. It decodes special tokens then, as agent loops do.
    """
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    kind = RequestOutputKind[sampling.pop("output_kind", "FINAL_ONLY")]
    salt, stop = sampling.pop("cache", ""), list(sampling.pop("stop", ()))
    parameters = SamplingParams(
        **{"logprobs": 0} | sampling,  # 0: of the sampled token only
        stop=stop,
        detokenize=bool(stop),
        skip_special_tokens=False,
        output_kind=kind,
    )
    # As an engine's input it goes there at once; a prompt would go through a thread first.
    return tokens_input(prompt_ids, cache_salt=salt or None), parameters


def completion_of(output: Any) -> Completion:
    if output.finish_reason not in ("stop", "length", "abort"):
        raise RuntimeError(f"vLLM ended a request with {output.finish_reason!r}")
    token_ids = list(output.token_ids)
    versions = [int(s.version) for s in output.weight_versions or () for _ in range(s.start, s.end)]
    stop = output.stop_reason if isinstance(output.stop_reason, str) else ""
    return Completion(token_ids, log_probs_of(output), output.finish_reason, versions, stop)


def log_probs_of(output: Any) -> list[float]:
    """Of the tokens of one of vLLM's CompletionOutputs."""
    return [at[token].logprob for at, token in zip(output.logprobs, output.token_ids, strict=True)]


def scores_of(token_ids: list[int], tables: Any) -> TokenScores:
    """`tables`: for each token vLLM's Logprob by id, of that token and of the most likely one."""
    log_probs = [at[token].logprob for at, token in zip(tables, token_ids, strict=True)]
    top_ids = [next(token for token, entry in at.items() if entry.rank == 1) for at in tables]
    return TokenScores(token_ids, log_probs, top_ids)
