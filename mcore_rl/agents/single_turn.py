"""Generate a single response per sample and compute its reward; types that all loops share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mcore_rl.data.sample import Sample
from mcore_rl.inference.protocol import Completion, Generator, SamplingParams

Message = Mapping[str, str]  # {"role": ..., "content": ...}
Content = Sequence[int] | Sequence[Message]  # token ids, or chat messages to render
# (responses to a prompt, their texts, maximum tokens of each, name of the prompt for errors):
# set reward, reward_parts and reward_error of each response
Reward = Callable[[list[Sample], list[str], int, str], Awaitable[None]]

Group = asyncio.Task[list[Sample]]  # generates the samples of a prompt


class Tokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that a loop uses."""

    def decode(self, token_ids: list[int]) -> str: ...

    def apply_chat_template(self, conversation: list[Message], **options: Any) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    content: Content
    group_id: int
    fields: dict[str, Any] = field(default_factory=dict)  # columns of the data source
    row: int = 0  # in the data source
    messages: Sequence[Message] = ()  # of the prompt column, for loops that render them
    images: tuple[str, ...] = ()  # digests of the content's images, in its order


def decode_response(tokenizer: Tokenizer, token_ids: list[int], finish_reason: str) -> str:
    """Return the text of a response, without the token that ends it."""
    return tokenizer.decode(token_ids[:-1] if finish_reason == "stop" else token_ids)


async def gather_samples(groups: Sequence[Group]) -> list[Sample]:
    """Return the samples of all groups, in order. The first failure cancels the rest."""
    try:
        return [sample for samples in await asyncio.gather(*groups) for sample in samples]
    finally:
        for group in groups:
            group.cancel()


class _Barrier:
    """Lets several tasks make their requests at the same moment."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._error: Exception | None = None

    async def release(self, generator: Generator) -> None:
        """Let the waiting tasks make their requests, which the generator starts together."""
        try:
            async with generator.start_together():
                self._open.set()
                await asyncio.sleep(0)  # each runs until it waits for its completions
        except Exception as error:  # noqa: BLE001 (raised in the waiting tasks)
            self._error = error
        self._open.set()

    async def wait(self) -> None:
        """Wait for `release`; raise the error that the generator raised in it."""
        await self._open.wait()
        if self._error is not None:
            raise self._error


class SingleTurnLoop:
    """Generates n responses to a prompt, with a reward each."""

    def __init__(self, generator: Generator, tokenizer: Tokenizer, reward: Reward) -> None:
        self._generator, self._tokenizer, self._reward = generator, tokenizer, reward
        self._releases: set[asyncio.Task[None]] = set()

    async def run_all(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Sample]:
        """Return samples of all prompts, in their order. The first failure cancels the rest."""
        return await gather_samples(self.start(prompts, sampling))

    def start(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Group]:
        """Start a group for each prompt; their requests start together. Call in an event loop."""
        barrier = _Barrier()
        groups = [asyncio.create_task(self._run_after(barrier, p, sampling)) for p in prompts]
        release = asyncio.create_task(barrier.release(self._generator))
        self._releases.add(release)  # the event loop keeps no task alive
        release.add_done_callback(self._releases.discard)
        return groups

    async def _run_after(
        self, barrier: _Barrier, prompt: Prompt, sampling: SamplingParams
    ) -> list[Sample]:
        await barrier.wait()
        return await self.run(
            prompt.content,
            sampling,
            prompt.group_id,
            prompt.fields,
            prompt.row,
            prompt.messages,
            prompt.images,
        )

    async def run(
        self,
        prompt: Content,
        sampling: SamplingParams,
        group_id: int,
        fields: dict[str, Any],
        row: int = 0,
        messages: Sequence[Message] = (),
        images: tuple[str, ...] = (),
    ) -> list[Sample]:
        """Generate `sampling.n` samples of a prompt.

        `sampling.seed` is shifted by group_id * n: vLLM gives sample i of a request seed + i, so no
        two samples share a seed while n stays the same.
        """
        prompt_ids = self._render(prompt)
        if sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + group_id * sampling.n)
        sampling = replace(sampling, images=images, group=str(group_id))
        completions = await self._generator.submit(prompt_ids, sampling)
        samples = [self._build_sample(prompt_ids, c, group_id, fields) for c in completions]
        texts = [self._decode(completion) for completion in completions]
        for number, sample in enumerate(samples):
            sample.trajectory, sample.messages, sample.images = number, messages, images
        where = f"row {row} of the data (group {group_id})"
        await self._reward(samples, texts, sampling.max_tokens, where)
        return samples

    def _render(self, prompt: Content) -> list[int]:
        ids = [token for token in prompt if isinstance(token, int)]
        if len(ids) == len(prompt):
            return ids
        messages = [message for message in prompt if isinstance(message, Mapping)]
        return self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )

    def _decode(self, completion: Completion) -> str:
        if completion.stop_string:  # it ends with text, not a token
            return self._tokenizer.decode(completion.token_ids)
        return decode_response(self._tokenizer, completion.token_ids, completion.finish_reason)

    @staticmethod
    def _build_sample(
        prompt_ids: list[int], completion: Completion, group_id: int, fields: dict[str, Any]
    ) -> Sample:
        ids, experts = completion.token_ids, completion.routed_experts
        return Sample(
            prompt_ids=prompt_ids,
            response_ids=ids,
            response_mask=[1] * len(ids),
            rollout_log_probs=completion.log_probs,
            weight_versions=completion.weight_versions,
            finish_reason=completion.finish_reason,
            group_id=group_id,
            status="truncated" if completion.finish_reason == "length" else "finished",
            fields=fields,
            routed_experts=() if experts is None else (experts,),
        )
