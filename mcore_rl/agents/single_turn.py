"""From a prompt to finished samples: generate and compute rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mcore_rl.data.sample import Sample
from mcore_rl.inference.protocol import Completion, Generator, SamplingParams

Message = Mapping[str, str]  # {"role": ..., "content": ...}
Content = Sequence[int] | Sequence[Message]  # token ids, or chat messages still to be rendered
# (responses to one prompt, their texts, tokens that each may have, which prompt it was, in words):
# sets reward, reward_parts and reward_error of each
Reward = Callable[[list[Sample], list[str], int, str], Awaitable[None]]

Group = asyncio.Task[list[Sample]]  # the samples of one prompt, as they are made


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
    messages: Sequence[Message] = ()  # of the prompt column, for a loop that renders them itself


def text_of(tokenizer: Tokenizer, token_ids: list[int], finish_reason: str) -> str:
    """The text of a response, without the token that ends it."""
    return tokenizer.decode(token_ids[:-1] if finish_reason == "stop" else token_ids)


async def samples_of_all(groups: Sequence[Group]) -> list[Sample]:
    """Samples of all groups, in order. The first failure cancels the rest."""
    try:
        return [sample for samples in await asyncio.gather(*groups) for sample in samples]
    finally:
        for group in groups:
            group.cancel()


class _Opening:
    """The moment at which the requests of several tasks are made."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._error: Exception | None = None

    async def hold(self, generator: Generator) -> None:
        """Let all that wait make their requests, which then start together."""
        try:
            async with generator.start_together():
                self._event.set()
                await asyncio.sleep(0)  # each runs until it waits for its completions
        except Exception as error:  # noqa: BLE001 (told to all that wait)
            self._error = error
        self._event.set()

    async def passed(self) -> None:
        """Raises what kept the generator from holding them."""
        await self._event.wait()
        if self._error is not None:
            raise self._error


class SingleTurnLoop:
    """One prompt, n responses, one reward each."""

    def __init__(self, generator: Generator, tokenizer: Tokenizer, reward: Reward) -> None:
        self._generator, self._tokenizer, self._reward = generator, tokenizer, reward
        self._opening: set[asyncio.Task[None]] = set()

    async def run_all(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Sample]:
        """Samples of all prompts, in the prompts' order. The first failure cancels the rest."""
        return await samples_of_all(self.start(prompts, sampling))

    def start(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Group]:
        """A group for each prompt, whose requests are made together. Call it in an event loop."""
        opening = _Opening()
        groups = [asyncio.create_task(self._run_in(opening, p, sampling)) for p in prompts]
        held = asyncio.create_task(opening.hold(self._generator))
        self._opening.add(held)  # the event loop keeps no task alive
        held.add_done_callback(self._opening.discard)
        return groups

    async def _run_in(
        self, opening: _Opening, prompt: Prompt, sampling: SamplingParams
    ) -> list[Sample]:
        await opening.passed()
        at = prompt.group_id, prompt.fields, prompt.row, prompt.messages
        return await self.run(prompt.content, sampling, *at)

    async def run(
        self,
        prompt: Content,
        sampling: SamplingParams,
        group_id: int,
        fields: dict[str, Any],
        row: int = 0,
        messages: Sequence[Message] = (),
    ) -> list[Sample]:
        """`sampling.n` samples of one prompt.

        A `sampling.seed` is shifted by group_id * n: vLLM gives sample i of a request seed + i, so
        that no two samples share a seed while n stays the same.
        """
        prompt_ids = self._prompt_ids(prompt)
        if sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + group_id * sampling.n)
        completions = await self._generator.submit(prompt_ids, sampling)
        samples = [self._sample(prompt_ids, c, group_id, fields) for c in completions]
        texts = [self._text(completion) for completion in completions]
        for number, sample in enumerate(samples):
            sample.trajectory, sample.messages = number, messages
        where = f"row {row} of the data (group {group_id})"
        await self._reward(samples, texts, sampling.max_tokens, where)
        return samples

    def _prompt_ids(self, prompt: Content) -> list[int]:
        ids = [token for token in prompt if isinstance(token, int)]
        if len(ids) == len(prompt):
            return ids
        messages = [message for message in prompt if isinstance(message, Mapping)]
        return self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )

    def _text(self, completion: Completion) -> str:
        if completion.stop_string:  # then it ends with text
            return self._tokenizer.decode(completion.token_ids)
        return text_of(self._tokenizer, completion.token_ids, completion.finish_reason)

    @staticmethod
    def _sample(
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
