"""Conversations with the policy or a frozen model: sessions, and the turns that they record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from mcore_rl.agents.chat_template.codec import (
    ChatCodec,
    ChatMessage,
    ContextFullError,
    ImageCodec,
    ParsedTurn,
    ToolSpec,
    list_images,
    replace_message_surrogates,
)
from mcore_rl.data.image_files import ImageError
from mcore_rl.data.sample import RoutedExperts
from mcore_rl.inference.protocol import Completion, Generator, SamplingParams


class GenerationError(RuntimeError):
    """The server failed, which ends the step; the cause is the server's error."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of a turn that one version of the weights sampled."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Turn:
    """A completion as the server sampled it."""

    session_id: str
    turn_id: str  # unique in its session
    parent: str  # turn_id of the turn that it continues; empty: first turn of a conversation
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]  # nats, one per token
    weight_versions: tuple[VersionSpan, ...]  # cover the tokens, in order
    finish_reason: str  # "stop", "length" or "abort"
    # Experts of the tokens that the parent has none for, if this continues it; else of all tokens.
    routed_experts: RoutedExperts | None = None
    token_rewards: tuple[float, ...] = ()  # shares of the trajectory's reward; one per token or ()
    state: str | None = None  # state of the environment that the turn was taken in, if known
    images: tuple[str, ...] = ()  # digests of the prompt's images, in its order

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        if len(self.log_probs) != length:
            raise ValueError(
                f"turn {self.turn_id!r} has {len(self.log_probs)} log_probs for {length} tokens"
            )
        if self.token_rewards and len(self.token_rewards) != length:
            raise ValueError(
                f"turn {self.turn_id!r} has {len(self.token_rewards)} token_rewards "
                f"for {length} tokens"
            )
        spans = self.weight_versions
        bounds = [0, *(bound for span in spans for bound in (span.start, span.end)), length]
        is_adjoining = all(bounds[i] == bounds[i + 1] for i in range(0, len(bounds), 2))
        if not is_adjoining or any(span.start >= span.end for span in spans):
            raise ValueError(
                f"turn {self.turn_id!r} has weight_versions {spans} for {length} tokens; "
                f"spans have to cover each token once, in order"
            )


@dataclass(frozen=True, slots=True)
class Answer:
    """A turn of the model, parsed."""

    parsed: ParsedTurn
    finish_reason: str  # "stop", "length" or "abort"


class ChatSession:
    """A conversation: messages go in, turns of a model come out.

    Sampled tokens are never rendered again. Messages of all turns are kept for one case: if the
    template would rewrite the last turn (`ChatCodec.extend`), they are rendered anew.

    Attributes:
        model: Name of a frozen model, whose turns are not trained. "" is the policy.
        role: Makes the session a `trajectory` of its own (its number in the group), compared only
            with sessions of the same role.
        turns: In the order in which they were answered; choices of one request in theirs.
    """

    def __init__(
        self,
        name: str,
        generator: Generator,
        codec: ChatCodec,
        sampling: SamplingParams,
        max_context: int,
        *,
        max_response: int | None = None,
        model: str = "",
        role: str = "",
        trajectory: int = 0,
    ) -> None:
        """Begin a conversation without messages.

        Args:
            sampling: Parameters of each turn; `max_tokens` limits a turn. `seed` is for the first
                turn; seeds of later turns are drawn from it.
            max_context: Tokens of a prompt and its completion.
            max_response: Tokens of all turns of a conversation, without those of tools and
                templates; a new context has as many again. None: no limit but the context.
        """
        self.name, self._generator, self._codec = name, generator, codec
        self._sampling, self._max_context = sampling, max_context
        self._max_response = max_response
        self.model, self.role, self.trajectory = model, role, trajectory
        self._messages: list[ChatMessage] = []
        self._can_extend = False  # whether the last turn is in the context
        self._num_started = 0  # turns
        self._cleared: set[str] = set()  # turn ids of earlier contexts
        self.turns: list[Turn] = []

    async def ask(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
        *,
        state: str | None = None,
    ) -> Answer:
        """Return the model's answer to the messages since its last answer.

        Args:
            state: Name of the state that the environment is in. Advantages that need it compare
                turns of a group with equal names.

        Raises:
            ContextFullError: The conversation or its turns have as many tokens as they may have,
                or the conversation as many images, or a text has tokens for images.
            GenerationError: The server failed. This is no failure of the loop; do not catch it.
        """
        messages = self._add_images(messages)
        prompt = self._build_prompt(messages, tools)
        parent = self.turns[-1].turn_id if self.turns else ""
        images = list_images([*self._messages, *messages])
        turn, completion = await self.sample(prompt, parent, state=state, images=images)
        self.turns.append(turn)
        parsed = self._codec.parse(completion.token_ids, tools, prompt)
        self._messages += [*messages, parsed.to_message()]
        self._can_extend = True
        return Answer(parsed, completion.finish_reason)

    def compute_max_tokens(self, prompt: Sequence[int], parent: str) -> int:
        """Return how many tokens an answer to a prompt after the turn `parent` may have.

        Raises:
            ContextFullError: None.
        """
        free = self._max_context - len(prompt)
        if free < 1:
            raise ContextFullError(f"{len(prompt)} of {self._max_context} tokens are used")
        if self._max_response is not None:
            used = self._count_sampled(parent)
            if used >= self._max_response:
                raise ContextFullError(f"{used} of {self._max_response} response tokens are used")
            free = min(free, self._max_response - used)
        return min(self._sampling.max_tokens, free)

    def _count_sampled(self, parent: str) -> int:
        """Return how many tokens the turns of a context have, up to the turn `parent`."""
        turns, num_tokens = {turn.turn_id: turn for turn in self.turns}, 0
        while parent and parent not in self._cleared:
            num_tokens += len(turns[parent].token_ids)
            parent = turns[parent].parent
        return num_tokens

    async def sample(
        self,
        prompt: Sequence[int],
        parent: str,
        *,
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        request_id: str = "",
        state: str | None = None,
        images: tuple[str, ...] = (),
    ) -> tuple[Turn, Completion]:
        """Sample a turn after any earlier turn. Several may run at once; each has its own seed.

        It is no part of `turns` until the caller appends it.

        Args:
            parent: turn_id of the earlier turn; "" begins a conversation.
            images: Digests of the prompt's images, in its order.

        Raises:
            ContextFullError, GenerationError: As `ask`.
        """
        limit = self.compute_max_tokens(prompt, parent)
        if isinstance(self._codec, ImageCodec):
            sampled = [turn.token_ids for turn in self.turns if turn.turn_id == parent]
            self._codec.check_limits(images, *sampled)
        number, self._num_started = self._num_started, self._num_started + 1
        sampling = replace(
            self._sampling,
            n=1,
            max_tokens=min(limit, max_tokens or limit),
            stop=(*self._sampling.stop, *stop),
            seed=draw_turn_seed(self._sampling.seed, number),
            experts_from=self._count_routed(prompt, parent),
            images=images,
        )
        try:
            [completion] = await self._generator.submit(
                list(prompt), sampling, request_id=request_id
            )
        except Exception as error:
            raise GenerationError(f"{type(error).__name__}: {error}") from error
        turn = Turn(
            session_id=self.name,
            turn_id=str(number),
            parent=parent,
            prompt_ids=tuple(prompt),
            token_ids=tuple(completion.token_ids),
            log_probs=tuple(completion.log_probs),
            weight_versions=group_versions(completion.weight_versions),
            finish_reason=completion.finish_reason,
            routed_experts=completion.routed_experts,
            state=state,
            images=images,
        )
        return turn, completion

    async def abort(self, request_id: str) -> None:
        """End a request of `sample` with the tokens that it has."""
        await self._generator.abort(request_id)

    def clear_context(self) -> None:
        """Begin a new context: the next prompt has only the next messages."""
        self._messages, self._can_extend = [], False
        self._cleared = {turn.turn_id for turn in self.turns}

    def count_prompt_tokens(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()
    ) -> int:
        """Return how many tokens the prompt has that `ask` would build of these messages.

        A text too long to be tokenised counts as one more than the context has.
        """
        try:
            return len(self._build_prompt(self._add_images(messages), tools))
        except ContextFullError:
            return self._max_context + 1

    def _add_images(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """Store new images of messages; raise ImageError for any if the model takes none."""
        if isinstance(self._codec, ImageCodec):
            return self._codec.add_images(messages)
        if any(message.images for message in messages):
            raise ImageError("a message has images, and the model of the session takes none")
        return messages

    def _build_prompt(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]
    ) -> list[int]:
        try:
            return self._render(messages, tools)
        except ImageError as error:  # anybody may write a token for an image
            raise ContextFullError(f"a text has tokens for images: it {error}") from error

    def _render(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> list[int]:
        messages = [*map(replace_message_surrogates, messages)]
        if self._can_extend:
            last = self.turns[-1]
            prompt = self._codec.extend(last.prompt_ids, last.token_ids, messages, tools)
            if prompt is not None:
                return prompt
        history = map(replace_message_surrogates, self._messages)
        return self._codec.render([*history, *messages], tools)

    def _count_routed(self, prompt: Sequence[int], parent: str) -> int | None:
        """Return `SamplingParams.experts_from` for a prompt after the turn `parent`."""
        if self._sampling.experts_from is None:
            return None
        turns, path = {turn.turn_id: turn for turn in self.turns}, list[Turn]()
        while parent:
            path.insert(0, turns[parent])
            parent = path[0].parent
        return count_routed_tokens(tuple(prompt), path)


def is_continuation(prompt_ids: tuple[int, ...], parent: Turn | None) -> bool:
    """Return whether a prompt begins with all tokens of a parent."""
    if parent is None:
        return False
    before = parent.prompt_ids + parent.token_ids
    return prompt_ids[: len(before)] == before


def count_routed_tokens(prompt_ids: tuple[int, ...], turns: Sequence[Turn]) -> int:
    """Return how many tokens of a prompt, from the first, have experts recorded by earlier turns.

    The experts are those that the tokens were sampled with, whatever weights recompute them. The
    last token of a turn never ran through the model: its experts come with the next turn.

    Args:
        turns: The turns that the prompt may continue, each after its parent.
    """
    for turn in reversed(turns):
        if not is_continuation(prompt_ids, turn):
            break
        if (routed := turn.routed_experts) is not None:
            return routed.start + len(routed.ids)
        prompt_ids = turn.prompt_ids
    return 0


def group_versions(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """Group the weight versions of tokens into spans.

    >>> [(span.version, span.start, span.end) for span in group_versions([3, 3, 4])]
    [(3, 0, 2), (4, 2, 3)]
    """
    spans, start = [], 0
    for version, run in groupby(versions):
        end = start + len(list(run))
        spans.append(VersionSpan(version, start, end))
        start = end
    return tuple(spans)


def draw_turn_seed(seed: int | None, turn: int) -> int | None:
    """Return the seed of a turn: the trajectory's for the first, else drawn from it.

    Drawn seeds are in [0, 2**62), where no first turn has its seed (rollout/manager.py).
    """
    if seed is None or turn == 0:
        return seed
    return _draw_seed(seed, turn)


def draw_session_seed(seed: int | None, number: int) -> int | None:
    """Return the seed of a session: the trajectory's for the first, else drawn as of turns."""
    if seed is None or number == 0:
        return seed
    return _draw_seed(seed, 0, number)


def _draw_seed(*entropy: int) -> int:
    (drawn,) = np.random.SeedSequence(entropy).generate_state(1, np.uint64)
    return int(drawn >> np.uint64(2))
