"""One key's session: what its client asks becomes turns of a trajectory, within its limits."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from mcore_rl.agents.codec import ChatCodec, ChatTokenizer, ContextFullError, encode
from mcore_rl.agents.endpoint.fields import SAMPLING
from mcore_rl.agents.endpoint.history import History
from mcore_rl.agents.endpoint.refusal import RefusalError
from mcore_rl.agents.endpoint.token_bytes import token_bytes
from mcore_rl.agents.endpoint.wire import (
    ChatChoice,
    ChatRequest,
    TextRequest,
    chat_of,
    reply_of,
    tools_of,
)
from mcore_rl.agents.loops import Served
from mcore_rl.agents.session import GenerationError
from mcore_rl.agents.trajectory import Turn
from mcore_rl.config.errors import ConfigError
from mcore_rl.data.sample import TrajectoryStatus
from mcore_rl.inference.protocol import Completion, Gate

if TYPE_CHECKING:
    from mcore_rl.agents.endpoint.generate import GenerateRequest  # imports fastapi

T = TypeVar("T")
_CLOSE_S = 30.0  # for cancelled requests to end
MAX_AT_ONCE = 64  # turns of a session that are sampled at the same time


@dataclass(frozen=True, slots=True)
class Limits:
    max_turns: int
    max_context: int  # tokens
    max_at_once: int = MAX_AT_ONCE


class ClientSession:
    """Behind one key. All calls are of one event loop."""

    def __init__(
        self,
        served: Served,
        codec: ChatCodec,
        tokenizer: ChatTokenizer,
        limits: Limits,
        gate: Gate,
        open_role: Callable[[str], Served],
    ) -> None:
        """`open_role` opens a session of another role in the same trajectory."""
        self.served, self.limits, self._open_role = served, limits, open_role
        self.failure: GenerationError | None = None  # of the server, which ends the step
        self._codec, self._tokenizer, self._gate = codec, tokenizer, gate
        self._history = History(codec)
        self._num_turns = self._num_running = self._num_requests = 0
        self._has_ended = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._once: dict[str, tuple[bytes, asyncio.Task[Any]]] = {}
        self._running: dict[str, list[str]] = {}  # the client's request ids, and ours

    # What clients ask for.

    async def chat(self, asked: ChatRequest) -> list[ChatChoice]:
        """The choices of an answer, each a turn."""
        asked.refuse_unknown()
        self._check_stop_ids(asked.stop_token_ids)
        if (num := len(asked.messages)) > self.limits.max_context:  # each has a token at least
            told = f"{num} messages are more than {self.limits.max_context} tokens"
            raise self._full(ContextFullError(told))
        tools = tools_of(asked.tools)
        place = await self._rendered(lambda: self._history.place(chat_of(asked.messages), tools))
        limit = asked.max_completion_tokens or asked.max_tokens
        found = await self._sampled(place.prompt, place.parent, asked.n, limit, asked.stops())
        replies = []
        for turn, completion in found:
            parsed = self._codec.parse(turn.token_ids, tools, turn.prompt_ids)
            may_call = bool(tools) and asked.tool_choice != "none"
            reply = reply_of(turn, completion, parsed, self.text_of, may_call=may_call)
            self._history.add(place, turn, reply.said, reply.sent)
            replies.append(reply)
        self.served.text = str(replies[-1].message["content"] or "")
        return replies

    async def complete(self, asked: TextRequest) -> list[tuple[Turn, str]]:
        """Turns, and their texts without what ended them."""
        asked.refuse_unknown()
        self._check_stop_ids(asked.stop_token_ids)
        prompt = asked.only_prompt()
        if isinstance(prompt, str):
            text, longest = prompt, self.limits.max_context
            prompt = await self._rendered(lambda: encode(self._tokenizer, text, longest))
        found = await self._after(prompt, asked.n, asked.max_tokens, asked.stops())
        texts = [self._text(turn, completion) for turn, completion in found]
        self.served.text = texts[-1]
        return [(turn, text) for (turn, _), text in zip(found, texts, strict=True)]

    async def generate(self, asked: GenerateRequest, once: str) -> list[Completion]:
        """As generate.Holder. Temperature, seed and the like are the trainer's."""
        return await self.started(self.once(once, asked, lambda: self._generate(asked)))

    async def _generate(self, asked: GenerateRequest) -> list[Completion]:
        asked.refuse_unknown(SAMPLING)
        given = asked.sampling_params
        self._check_stop_ids(given.stop_token_ids)
        stop = tuple(filter(None, given.stop))
        found = await self._after(
            asked.token_ids, given.n, given.max_tokens, stop, asked.request_id
        )
        turn, _ = found[-1]
        self.served.text = self._codec.parse(turn.token_ids, (), turn.prompt_ids).content
        return [completion for _, completion in found]

    def opened(self, role: str) -> Served:
        """Another session of the trajectory."""
        self._check_goes_on()
        return self._open_role(role)

    async def abort(self, request_id: str) -> None:
        """Ends a request with the tokens that it has."""
        for own in self._running.get(request_id, ()):
            await self.served.session.abort(own)

    def end(self, status: TrajectoryStatus) -> None:
        """No request is answered after this; those that run are cancelled where it is aborted."""
        self.served.status, self._has_ended = status, True
        if status == "aborted":
            self._cancel()

    def reach_limit(self) -> None:
        """Note that a limit of the trajectory has refused a request: then it is truncated."""
        self.served.is_limited = True

    async def close(self) -> None:
        """Returns when nothing of it runs any more."""
        self._has_ended = True
        self._cancel()
        if self._tasks:
            _, pending = await asyncio.wait(self._tasks, timeout=_CLOSE_S)
            if pending:
                told = f"{len(pending)} requests of a session have not ended in {_CLOSE_S:g} s"
                raise TimeoutError(told)

    def bytes_of(self, token_ids: Sequence[int]) -> list[bytes]:
        return token_bytes(self._tokenizer, token_ids)

    def text_of(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode([*token_ids], skip_special_tokens=False)

    # How they are answered.

    def started(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Work that ends with the session at the latest."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def once(
        self, key: str, asked: BaseModel, make: Callable[[], Coroutine[Any, Any, T]]
    ) -> T:
        """What `make` gives; the same again for the same idempotency key, if there is one.

        With a key the work goes on when its client vanishes, so that the client can ask again.
        What fails is forgotten. Raises RefusalError where the key came with another request.
        """
        if not key:
            return await make()
        shown = type(asked).__name__ + asked.model_dump_json(exclude={"stream", "stream_options"})
        digest = hashlib.sha256(shown.encode()).digest()
        known = self._once.get(key)
        if known is None:
            known = self._once[key] = digest, self.started(make())
            known[1].add_done_callback(lambda task: self._forget_failed(key, task))
        if known[0] != digest:
            told = f"the idempotency key {key!r} came with another request before"
            raise RefusalError(409, "idempotency_key_reused", told)
        found: T = await asyncio.shield(known[1])
        return found

    def _forget_failed(self, key: str, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._once.pop(key, None)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _check_stop_ids(self, given: list[int]) -> None:
        allowed = sorted(self._codec.stop_ids)
        if not set(given) <= set(allowed):
            told = f"stop_token_ids={given}; allowed: those that end turns anyway, {allowed}"
            raise RefusalError(400, "unsupported", told, param="stop_token_ids")

    def _text(self, turn: Turn, completion: Completion) -> str:
        is_whole = turn.finish_reason == "stop" and not completion.stop_string
        ids = turn.token_ids[:-1] if is_whole else turn.token_ids
        text = self.text_of(ids)
        return text.split(completion.stop_string)[0] if completion.stop_string else text

    def _after(
        self,
        prompt: list[int],
        n: int,
        max_tokens: int | None,
        stop: tuple[str, ...],
        request_id: str = "",
    ) -> Awaitable[list[tuple[Turn, Completion]]]:
        """Turns after the longest one that the tokens of the prompt begin with."""
        self._check_room(prompt, n)
        parent, done = "", 0
        for turn in self.served.session.turns:
            before = turn.prompt_ids + turn.token_ids
            if len(before) > done and tuple(prompt[: len(before)]) == before:
                parent, done = turn.turn_id, len(before)
        size = len(self._tokenizer)
        if unknown := [token for token in prompt[done:] if not 0 <= token < size]:
            told = f"token ids {unknown[:5]}; allowed: 0 to {size - 1}"
            raise RefusalError(400, "invalid_request", told, param="token_ids")
        return self._sampled(prompt, parent, n, max_tokens, stop, request_id)

    async def _sampled(
        self,
        prompt: list[int],
        parent: str,
        n: int,
        max_tokens: int | None,
        stop: tuple[str, ...],
        request_id: str = "",
    ) -> list[tuple[Turn, Completion]]:
        """`n` turns after a parent. What is cancelled leaves none."""
        self._check_room(prompt, n)
        self._num_requests += 1
        names = [f"{self.served.session.name}/{self._num_requests}/{i}" for i in range(n)]
        self._num_turns, self._num_running = self._num_turns + n, self._num_running + n
        if request_id:
            self._running[request_id] = names
        tasks: list[asyncio.Task[tuple[Turn, Completion]]] = []
        is_whole = False
        try:
            await self._gate.wait_open()
            async with asyncio.TaskGroup() as group:
                for name in names:
                    one = self.served.session.sample(
                        prompt, parent, max_tokens=max_tokens, stop=stop, request_id=name
                    )
                    tasks.append(group.create_task(one))
            is_whole = True
        except ExceptionGroup as errors:
            error = errors.exceptions[0]
            if isinstance(error, GenerationError):
                self.failure = self.failure or error
            raise error from error.__cause__
        finally:
            self._num_running -= n
            self._running.pop(request_id, None)
            if not is_whole:
                self._num_turns -= n
                self._forget(tasks)
        return [task.result() for task in tasks]

    def _forget(self, tasks: Sequence[asyncio.Task[tuple[Turn, Completion]]]) -> None:
        """The turns of an answer that nobody gets."""
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception() is None:
                self.served.session.turns.remove(task.result()[0])

    def _check_goes_on(self) -> None:
        if self._has_ended:
            raise RefusalError(409, "session_ended", "the session has ended")

    def _check_room(self, prompt: list[int], n: int) -> None:
        """Raises RefusalError where nothing may be sampled."""
        self._check_goes_on()
        if self._num_turns + n > self.limits.max_turns:
            self.reach_limit()
            told = f"{n} more turns after {self._num_turns}; allowed: agent.max_turns="
            raise RefusalError(429, "turn_limit", f"{told}{self.limits.max_turns}")
        if self._num_running + n > self.limits.max_at_once:
            told = f"{self._num_running} turns are sampled; at once are allowed: "
            told = f"{told}{self.limits.max_at_once}"
            raise RefusalError(429, "too_many_at_once", told, may_retry=True)
        try:
            self.served.session.room(prompt)
        except ContextFullError as error:
            raise self._full(error) from error

    def _full(self, error: ContextFullError) -> RefusalError:
        self.reach_limit()
        return RefusalError(400, "context_length_exceeded", str(error), param="messages")

    async def _rendered(self, render: Callable[[], T]) -> T:
        """What `render` makes, in a thread: long texts take seconds, and other requests go on.

        Raises RefusalError where a chat template or a tokenizer raises, which may be anything.
        """
        try:
            return await asyncio.to_thread(render)
        except (RefusalError, ConfigError):
            raise
        except ContextFullError as error:
            raise self._full(error) from error
        except Exception as error:
            told = f"this cannot be written as tokens: {type(error).__name__}: {error}"
            raise RefusalError(400, "invalid_request", told) from error
