"""Sessions behind the keys of the API server: requests become turns of a trajectory."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from mcore_rl.agents.api_server.protocol import (
    SAMPLING,
    ChatChoice,
    ChatRequest,
    GenerateRequest,
    RefusalError,
    TextRequest,
    build_choice,
    parse_chat,
    parse_tools,
)
from mcore_rl.agents.chat_template.codec import (
    ChatCodec,
    ChatMessage,
    ChatTokenizer,
    ContextFullError,
    ImageCodec,
    ToolSpec,
    encode,
    list_images,
)
from mcore_rl.agents.loops import ApiSession
from mcore_rl.agents.session import GenerationError, Turn
from mcore_rl.config.errors import ConfigError
from mcore_rl.data.sample import TrajectoryStatus
from mcore_rl.inference.lifecycle import Gate
from mcore_rl.inference.protocol import Completion

if TYPE_CHECKING:
    from mcore_rl.agents.api_server.http_server import HttpServer  # imports fastapi

T = TypeVar("T")
MAX_AT_ONCE = 64  # turns of a session that are sampled at the same time
_HOST = "127.0.0.1"  # programs run on this machine
_CLOSE_S = 30.0  # for cancelled requests to end
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # a token of vocabularies with byte fallback
_SPACE = "\u2581"  # a space in SentencePiece's vocabularies


def draw_key() -> str:
    """Draw the key of a session."""
    return f"sk-{secrets.token_urlsafe(32)}"


class ApiServer:
    """The HTTP server of a rollout server, with a key for each session.

    The first `start` starts it. All calls are of one event loop.
    """

    def __init__(self, max_context: int, max_images: int = 0) -> None:
        """Set the limits of conversations: `max_context` tokens, and images."""
        self._max_context, self._max_images = max_context, max_images
        self._by_key: dict[bytes, SessionHandler] = {}
        self._server: HttpServer | None = None
        self._lock = asyncio.Lock()

    async def start(self) -> str:
        """Start the server, unless it runs; return the base URL for clients of OpenAI's API."""
        async with self._lock:
            if self._server is None:
                # Imported here, since fastapi is slow to import and drivers only check agents.
                from mcore_rl.agents.api_server.app import build_openai_app
                from mcore_rl.agents.api_server.http_server import HttpServer

                app = build_openai_app(self._find, self._max_context, self._max_images)
                server = HttpServer(app, _HOST)
                await server.start()
                self._server = server
        return f"{self._server.url}/v1"

    def add(self, key: str, handler: SessionHandler) -> None:
        """Give a session its key."""
        self._by_key[_hash_key(key)] = handler

    async def remove(self, key: str) -> None:
        """Invalidate a key, and cancel the requests of its session."""
        if handler := self._by_key.pop(_hash_key(key), None):
            await handler.close()

    async def close(self) -> None:
        """End the server."""
        if self._server is not None:
            await self._server.close()

    def _find(self, key: str) -> SessionHandler | None:
        return self._by_key.get(_hash_key(key))


def _hash_key(key: str) -> bytes:
    """Return a hash to look a key up by: the time of the look-up tells nothing about keys."""
    return hashlib.sha256(key.encode()).digest()


@dataclass(frozen=True, slots=True)
class SessionLimits:
    max_turns: int
    max_context: int  # tokens
    max_at_once: int = MAX_AT_ONCE


class SessionHandler:
    """Answers the requests of one key. All calls are of one event loop."""

    def __init__(
        self,
        session: ApiSession,
        codec: ChatCodec,
        tokenizer: ChatTokenizer,
        limits: SessionLimits,
        gate: Gate,
        open_role: Callable[[str], ApiSession],
    ) -> None:
        """Begin without a conversation.

        Args:
            gate: Holds requests while it is closed.
            open_role: Opens a session of another role in the same trajectory.
        """
        self.session, self.limits, self._open_role = session, limits, open_role
        self.failure: GenerationError | None = None  # of the server, which ends the step
        self._codec, self._tokenizer, self._gate = codec, tokenizer, gate
        self._tree = ConversationTree(codec)
        self._num_turns = self._num_running = self._num_requests = 0
        self._has_ended = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._by_idempotency_key: dict[str, tuple[bytes, asyncio.Task[Any]]] = {}
        self._running: dict[str, list[str]] = {}  # request ids of the client -> of the server

    # Requests.

    async def chat(self, request: ChatRequest) -> list[ChatChoice]:
        """Return the choices of an answer, each a turn."""
        request.refuse_unknown()
        self._check_stop_ids(request.stop_token_ids)
        if (num := len(request.messages)) > self.limits.max_context:  # each has a token at least
            reason = f"{num} messages are more than {self.limits.max_context} tokens"
            raise self._refuse_full(ContextFullError(reason))
        tools = parse_tools(request.tools)
        images = self._codec if isinstance(self._codec, ImageCodec) else None
        place = await self._render(
            lambda: self._tree.locate(parse_chat(request.messages, images), tools)
        )
        max_tokens = request.max_completion_tokens or request.max_tokens
        sampled = await self._sample(
            place.prompt,
            place.parent,
            request.n,
            max_tokens,
            request.list_stops(),
            images=list_images(place.messages),
        )
        choices = []
        for turn, completion in sampled:
            parsed = self._codec.parse(turn.token_ids, tools, turn.prompt_ids)
            may_call = bool(tools) and request.tool_choice != "none"
            choice = build_choice(turn, completion, parsed, self.decode_text, may_call=may_call)
            self._tree.add(place, turn, choice.sampled, choice.sent)
            choices.append(choice)
        self.session.text = str(choices[-1].message["content"] or "")
        return choices

    async def complete(self, request: TextRequest) -> list[tuple[Turn, str]]:
        """Return turns, and their texts without the token or text that ended them."""
        request.refuse_unknown()
        self._check_stop_ids(request.stop_token_ids)
        prompt = request.get_prompt()
        if isinstance(prompt, str):
            text, max_context = prompt, self.limits.max_context
            prompt = await self._render(lambda: encode(self._tokenizer, text, max_context))
        sampled = await self._sample_after_longest(
            prompt, request.n, request.max_tokens, request.list_stops()
        )
        texts = [self._decode_turn(turn, completion) for turn, completion in sampled]
        self.session.text = texts[-1]
        return [(turn, text) for (turn, _), text in zip(sampled, texts, strict=True)]

    async def generate(self, request: GenerateRequest, idempotency_key: str) -> list[Completion]:
        """Return completions of token ids; see app.GenerateHandler.

        Sampling parameters other than limits and stops are the trainer's.
        """
        return await self.start_task(
            self.run_once(idempotency_key, request, lambda: self._generate(request))
        )

    async def _generate(self, request: GenerateRequest) -> list[Completion]:
        request.refuse_unknown(SAMPLING)
        given = request.sampling_params
        self._check_stop_ids(given.stop_token_ids)
        sampled = await self._sample_after_longest(
            request.token_ids,
            given.n,
            given.max_tokens,
            tuple(filter(None, given.stop)),
            request.request_id,
        )
        turn, _ = sampled[-1]
        self.session.text = self._codec.parse(turn.token_ids, (), turn.prompt_ids).content
        return [completion for _, completion in sampled]

    def open_role(self, role: str) -> ApiSession:
        """Open a session of another role in the trajectory."""
        self._check_open()
        return self._open_role(role)

    async def abort(self, request_id: str) -> None:
        """End a request with the tokens that it has."""
        for name in self._running.get(request_id, ()):
            await self.session.session.abort(name)

    def end(self, status: TrajectoryStatus) -> None:
        """Refuse later requests; cancel running ones if the status is "aborted"."""
        self.session.status, self._has_ended = status, True
        if status == "aborted":
            self._cancel()

    def reach_limit(self) -> None:
        """Note that a limit of the trajectory has refused a request, which truncates it."""
        self.session.is_limited = True

    async def close(self) -> None:
        """Cancel all requests, and wait for their end."""
        self._has_ended = True
        self._cancel()
        if self._tasks:
            _, pending = await asyncio.wait(self._tasks, timeout=_CLOSE_S)
            if pending:
                raise TimeoutError(
                    f"{len(pending)} requests of a session have not ended in {_CLOSE_S:g} s"
                )

    def decode_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token."""
        return decode_token_bytes(self._tokenizer, token_ids)

    def decode_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, with special tokens."""
        return self._tokenizer.decode([*token_ids], skip_special_tokens=False)

    # Their work.

    def start_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start work that is cancelled when the session closes."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def run_once(
        self,
        idempotency_key: str,
        request: BaseModel,
        make: Callable[[], Coroutine[Any, Any, T]],
    ) -> T:
        """Return the result of `make`, or of the earlier request with the same idempotency key.

        With a key the work continues when its client vanishes, so that the client can ask again. A
        failure is not kept.

        Raises:
            RefusalError: The key came with another request.
        """
        if not idempotency_key:
            return await make()
        content = request.model_dump_json(exclude={"stream", "stream_options"})
        digest = hashlib.sha256((type(request).__name__ + content).encode()).digest()
        known = self._by_idempotency_key.get(idempotency_key)
        if known is None:
            task = self.start_task(make())
            known = self._by_idempotency_key[idempotency_key] = digest, task
            task.add_done_callback(lambda done: self._forget_failed(idempotency_key, done))
        if known[0] != digest:
            reason = f"the idempotency key {idempotency_key!r} came with another request before"
            raise RefusalError(409, "idempotency_key_reused", reason)
        result: T = await asyncio.shield(known[1])
        return result

    def _forget_failed(self, idempotency_key: str, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._by_idempotency_key.pop(idempotency_key, None)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _check_stop_ids(self, given: list[int]) -> None:
        allowed = sorted(self._codec.stop_ids)
        if not set(given) <= set(allowed):
            reason = f"stop_token_ids={given}; allowed: those that end turns anyway, {allowed}"
            raise RefusalError(400, "unsupported", reason, param="stop_token_ids")

    def _decode_turn(self, turn: Turn, completion: Completion) -> str:
        ends_with_token = turn.finish_reason == "stop" and not completion.stop_string
        ids = turn.token_ids[:-1] if ends_with_token else turn.token_ids
        text = self.decode_text(ids)
        return text.split(completion.stop_string)[0] if completion.stop_string else text

    def _sample_after_longest(
        self,
        prompt: list[int],
        n: int,
        max_tokens: int | None,
        stop: tuple[str, ...],
        request_id: str = "",
    ) -> Awaitable[list[tuple[Turn, Completion]]]:
        """Sample turns after the longest turn that the tokens of the prompt begin with."""
        self._check_limits(prompt, "", n)
        parent, done, images = "", 0, tuple[str, ...]()
        for turn in self.session.session.turns:
            before = turn.prompt_ids + turn.token_ids
            if len(before) > done and tuple(prompt[: len(before)]) == before:
                parent, done, images = turn.turn_id, len(before), turn.images
        size = len(self._tokenizer)
        if unknown := [token for token in prompt[done:] if not 0 <= token < size]:
            reason = f"token ids {unknown[:5]}; allowed: 0 to {size - 1}"
            raise RefusalError(400, "invalid_request", reason, param="token_ids")
        image_ids = self._codec.tokens.special_ids if isinstance(self._codec, ImageCodec) else ()
        if without_images := sorted({*image_ids} & {*prompt[done:]}):
            reason = f"token ids {without_images} stand for images; allowed: image_url of a chat"
            raise RefusalError(400, "unsupported", reason, param="token_ids")
        return self._sample(prompt, parent, n, max_tokens, stop, request_id, images)

    async def _sample(
        self,
        prompt: list[int],
        parent: str,
        n: int,
        max_tokens: int | None,
        stop: tuple[str, ...],
        request_id: str = "",
        images: tuple[str, ...] = (),
    ) -> list[tuple[Turn, Completion]]:
        """Sample `n` turns after a parent; none is kept if one fails or is cancelled.

        They become turns of the session when all have ended, in their order: so the last turn is
        the answer that the reward reads, and rewards of turns count what the client has got.
        """
        self._check_limits(prompt, parent, n)
        self._num_requests += 1
        names = [f"{self.session.session.name}/{self._num_requests}/{i}" for i in range(n)]
        self._num_turns, self._num_running = self._num_turns + n, self._num_running + n
        if request_id:
            self._running[request_id] = names
        tasks: list[asyncio.Task[tuple[Turn, Completion]]] = []
        is_complete = False
        try:
            await self._gate.wait_open()
            async with asyncio.TaskGroup() as group:
                for name in names:
                    work = self.session.session.sample(
                        prompt,
                        parent,
                        max_tokens=max_tokens,
                        stop=stop,
                        request_id=name,
                        images=images,
                    )
                    tasks.append(group.create_task(work))
            is_complete = True
        except ExceptionGroup as errors:
            error = errors.exceptions[0]
            if isinstance(error, GenerationError):
                self.failure = self.failure or error
            if isinstance(error, ContextFullError):
                raise self._refuse_full(error) from error
            raise error from error.__cause__
        finally:
            self._num_running -= n
            self._running.pop(request_id, None)
            if not is_complete:
                self._num_turns -= n
        sampled = [task.result() for task in tasks]
        self._add_turns([turn for turn, _ in sampled])
        return sampled

    def _add_turns(self, turns: Sequence[Turn]) -> None:
        """Add the turns of an answer to the session; rewards posted before have none for them."""
        self.session.session.turns += turns
        if self.session.turn_rewards:
            self.session.turn_rewards += (0.0,) * len(turns)
        if self.session.token_rewards:
            self.session.token_rewards += tuple([0.0] * len(turn.token_ids) for turn in turns)

    def _check_open(self) -> None:
        if self._has_ended:
            raise RefusalError(409, "session_ended", "the session has ended")

    def _check_limits(self, prompt: list[int], parent: str, n: int) -> None:
        """Raise RefusalError if `n` more turns after a prompt and a turn are not allowed."""
        self._check_open()
        if self._num_turns + n > self.limits.max_turns:
            self.reach_limit()
            reason = (
                f"{n} more turns after {self._num_turns}; allowed: agent.max_turns="
                f"{self.limits.max_turns}"
            )
            raise RefusalError(429, "turn_limit", reason)
        if self._num_running + n > self.limits.max_at_once:
            reason = (
                f"{self._num_running} turns are sampled; at once are allowed: "
                f"{self.limits.max_at_once}"
            )
            raise RefusalError(429, "too_many_at_once", reason, may_retry=True)
        try:
            self.session.session.compute_max_tokens(prompt, parent)
        except ContextFullError as error:
            raise self._refuse_full(error) from error

    def _refuse_full(self, error: ContextFullError) -> RefusalError:
        self.reach_limit()
        return RefusalError(400, "context_length_exceeded", str(error), param="messages")

    async def _render(self, render: Callable[[], T]) -> T:
        """Return the result of `render`, run in a thread: long texts take seconds.

        Raises:
            RefusalError: A chat template or a tokenizer raised, which may be anything.
        """
        try:
            return await asyncio.to_thread(render)
        except (RefusalError, ConfigError):
            raise
        except ContextFullError as error:
            raise self._refuse_full(error) from error
        except Exception as error:
            reason = f"this cannot be written as tokens: {type(error).__name__}: {error}"
            raise RefusalError(400, "invalid_request", reason) from error


@dataclass(frozen=True, slots=True)
class _Node:
    """A conversation up to a turn, with that turn."""

    turn: Turn
    messages: tuple[ChatMessage, ...]  # those of the policy as it sampled them


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """A place in the tree of turns to sample from."""

    prompt: list[int]
    parent: str  # a turn_id, or "" for a new conversation
    messages: tuple[ChatMessage, ...]  # those of the policy as it sampled them
    digest: bytes  # of the messages as the client has them


class ConversationTree:
    """Finds the turn that a request continues: clients send the whole conversation each time.

    Conversations are looked up by digests of their messages. Tools, roles, contents, names and
    calls have to be the same; call ids, reasoning and white space around the policy's text may
    differ, since clients drop or change them. A request that matches no turn begins a conversation.
    """

    def __init__(self, codec: ChatCodec) -> None:
        self._codec = codec
        self._nodes: dict[bytes, _Node] = {}

    def locate(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> BranchPoint:
        """Return the place after the longest known conversation that the messages begin with.

        Raises:
            ConfigError: The codec cannot render the messages.
        """
        digests = list(_hash_prefixes(messages, tools))
        for end in range(len(messages) - 1, 0, -1):
            if messages[end].role == "assistant":  # the policy did not sample it
                break
            node = self._nodes.get(digests[end - 1])
            if node is None:
                continue
            new, last = tuple(messages[end:]), node.turn
            conversation = node.messages + new
            prompt = self._codec.extend(last.prompt_ids, last.token_ids, new, tools)
            if prompt is None:  # a new sample, of the same conversation
                prompt = self._codec.render(conversation, tools)
            return BranchPoint(prompt, last.turn_id, conversation, digests[-1])
        return BranchPoint(self._codec.render(messages, tools), "", tuple(messages), digests[-1])

    def add(self, place: BranchPoint, turn: Turn, sampled: ChatMessage, sent: ChatMessage) -> None:
        """Add a turn: as the policy sampled it, and as it was sent to the client."""
        self._nodes[_hash_message(place.digest, sent)] = _Node(turn, (*place.messages, sampled))


def _hash_prefixes(messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> Iterator[bytes]:
    """Yield a digest per message, of the tools and all messages up to it."""
    digest = _hash(b"", [tool.to_dict() for tool in tools])
    for message in messages:
        digest = _hash_message(digest, message)
        yield digest


def _hash_message(before: bytes, message: ChatMessage) -> bytes:
    is_policy = message.role == "assistant"
    content = message.content.strip() if is_policy else message.content
    calls = [[call.name, dict(call.arguments)] for call in message.tool_calls]
    parts = [message.role, content, message.name, calls, *list_images([message])]
    return _hash(before, parts)


def _hash(before: bytes, value: object) -> bytes:
    return hashlib.sha256(before + json.dumps(value, sort_keys=True).encode()).digest()


def decode_token_bytes(tokenizer: Any, token_ids: Sequence[int]) -> list[bytes]:
    """Return the bytes of each token; joined they are the text in UTF-8.

    A token may be a part of a character. An id without a token has no bytes.

    Args:
        tokenizer: A tokenizer of transformers.
    """
    pieces = tokenizer.convert_ids_to_tokens([*token_ids])
    added = tokenizer.get_added_vocab()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    is_byte_level = backend is not None and "ByteLevel" in str(backend.decoder)
    return [
        b"" if piece is None
        else piece.encode() if piece in added
        else _decode_byte_level(piece) if is_byte_level
        else bytes([int(byte[1], 16)]) if (byte := _BYTE.fullmatch(piece))
        else piece.replace(_SPACE, " ").encode()
        for piece in pieces
    ]  # fmt: skip


def _decode_byte_level(piece: str) -> bytes:
    alphabet = _load_byte_alphabet()
    return b"".join(bytes([alphabet[c]]) if c in alphabet else c.encode() for c in piece)


@cache
def _load_byte_alphabet() -> dict[str, int]:
    """Return the characters that GPT-2's vocabulary, and most since, write bytes with."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}
