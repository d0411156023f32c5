"""A conversation with the policy or a frozen model, which owns its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from mcore_rl.agents.chat_template.codec import (
    ChatCodec,
    ChatMessage,
    ContextFullError,
    ParsedTurn,
    ToolSpec,
    encodable_message,
)
from mcore_rl.agents.trajectory import Turn, VersionSpan, num_routed
from mcore_rl.inference.protocol import Completion, Generator, SamplingParams


class GenerationError(RuntimeError):
    """The server has failed, and with it the step; its cause says how."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the policy said in a turn."""

    parsed: ParsedTurn
    finish_reason: str  # "stop", "length" or "abort"


class ChatSession:
    """Messages go in, turns of a model come out; what was sampled is never rendered again.

    `model` is the name of a frozen one, whose turns are not trained; "" is the policy. A `role`
    makes it a `trajectory` of its own (its number in the group), to be compared with those of the
    same role only.

    The messages of all turns are kept only to render them anew where the last turn cannot be gone
    on from (`ChatCodec.extend`).
    """

    def __init__(
        self,
        name: str,
        generator: Generator,
        codec: ChatCodec,
        sampling: SamplingParams,
        max_context: int,
        *,
        model: str = "",
        role: str = "",
        trajectory: int = 0,
    ) -> None:
        """`max_context`: tokens of a prompt and what follows it. `sampling.max_tokens`: a turn's.

        A `sampling.seed` is that of the first turn; those of later ones are drawn from it.
        """
        self.name, self._generator, self._codec = name, generator, codec
        self._sampling, self._max_context = sampling, max_context
        self.model, self.role, self.trajectory = model, role, trajectory
        self._messages: list[ChatMessage] = []
        self._goes_on = False  # whether the last turn is in the context
        self._num_asked = 0  # turns that were begun
        self.turns: list[Turn] = []  # in the order in which they ended

    async def ask(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
        *,
        state: str | None = None,
    ) -> Answer:
        """The policy's answer to messages that came since its last one.

        `state` names the state of an environment that it is in: turns of a group with equal names
        are compared by advantages that need them.

        Raises:
            ContextFullError: the conversation has as many tokens as it may have.
            GenerationError: the server failed. It is no failure of the loop, and not to be caught.
        """
        prompt = self._prompt(messages, tools)
        parent = self.turns[-1].turn_id if self.turns else ""
        _, completion = await self.sample(prompt, parent, state=state)
        parsed = self._codec.parse(completion.token_ids, tools, prompt)
        self._messages += [*messages, parsed.message()]
        self._goes_on = True
        return Answer(parsed, completion.finish_reason)

    def room(self, prompt: Sequence[int]) -> int:
        """Tokens that an answer to a prompt may have.

        Raises:
            ContextFullError: none.
        """
        room = self._max_context - len(prompt)
        if room < 1:
            raise ContextFullError(f"{len(prompt)} of {self._max_context} tokens are used")
        return min(self._sampling.max_tokens, room)

    async def sample(
        self,
        prompt: Sequence[int],
        parent: str,
        *,
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        request_id: str = "",
        state: str | None = None,
    ) -> tuple[Turn, Completion]:
        """A turn after any earlier one, its `parent`, or "" for the first of a conversation.

        Several may run at the same time: each has the seed of its number. Raises as `ask`.
        """
        most = self.room(prompt)
        number, self._num_asked = self._num_asked, self._num_asked + 1
        sampling = replace(
            self._sampling,
            n=1,
            max_tokens=min(most, max_tokens or most),
            stop=(*self._sampling.stop, *stop),
            seed=turn_seed(self._sampling.seed, number),
            experts_from=self._num_routed(prompt, parent),
        )
        try:
            [completion] = await self._generator.submit(
                list(prompt), sampling, request_id=request_id
            )
        except Exception as error:
            raise GenerationError(f"{type(error).__name__}: {error}") from error
        self.turns.append(self._turn(number, parent, prompt, completion, state))
        return self.turns[-1], completion

    async def abort(self, request_id: str) -> None:
        """Ends a request of `sample` with the tokens that it has."""
        await self._generator.abort(request_id)

    def begin_anew(self) -> None:
        """The next messages begin a new context: all that was said before is left out of it."""
        self._messages, self._goes_on = [], False

    def num_tokens(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> int:
        """Tokens of the prompt that `ask` would make of these messages.

        One more than the context has for a text that is too long to be tokenised.
        """
        try:
            return len(self._prompt(messages, tools))
        except ContextFullError:
            return self._max_context + 1

    def _prompt(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> list[int]:
        messages = [*map(encodable_message, messages)]
        if self._goes_on:
            last = self.turns[-1]
            found = self._codec.extend(last.prompt_ids, last.token_ids, messages, tools)
            if found is not None:
                return found
        return self._codec.render([*map(encodable_message, self._messages), *messages], tools)

    def _num_routed(self, prompt: Sequence[int], parent: str) -> int | None:
        """As SamplingParams.experts_from, after the turn `parent` and those before it."""
        if self._sampling.experts_from is None:
            return None
        turns, path = {turn.turn_id: turn for turn in self.turns}, list[Turn]()
        while parent:
            path.insert(0, turns[parent])
            parent = path[0].parent
        return num_routed(tuple(prompt), path)

    def _turn(
        self,
        number: int,
        parent: str,
        prompt: Sequence[int],
        completion: Completion,
        state: str | None,
    ) -> Turn:
        return Turn(
            session_id=self.name,
            turn_id=str(number),
            parent=parent,
            prompt_ids=tuple(prompt),
            token_ids=tuple(completion.token_ids),
            log_probs=tuple(completion.log_probs),
            weight_versions=version_spans(completion.weight_versions),
            finish_reason=completion.finish_reason,
            routed_experts=completion.routed_experts,
            state=state,
        )


def version_spans(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """Of the version of each token.

    >>> [(span.version, span.start, span.end) for span in version_spans([3, 3, 4])]
    [(3, 0, 2), (4, 2, 3)]
    """
    spans, start = [], 0
    for version, run in groupby(versions):
        end = start + len(list(run))
        spans.append(VersionSpan(version, start, end))
        start = end
    return tuple(spans)


def turn_seed(seed: int | None, turn: int) -> int | None:
    """That of the first turn is the trajectory's; the others are drawn by np.random.SeedSequence.

    In [0, 2**62), where no first turn has its seed (rollout/manager.py).
    """
    if seed is None or turn == 0:
        return seed
    return _drawn(seed, turn)


def session_seed(seed: int | None, number: int) -> int | None:
    """Of a trajectory's sessions the first has its seed; those of the others are drawn from it.

    In [0, 2**62), as those of later turns.
    """
    if seed is None or number == 0:
        return seed
    return _drawn(seed, 0, number)


def _drawn(*entropy: int) -> int:
    (drawn,) = np.random.SeedSequence(entropy).generate_state(1, np.uint64)
    return int(drawn >> np.uint64(2))
