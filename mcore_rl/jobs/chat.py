"""Chat with a checkpoint in the terminal, with one vLLM server in this process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers.decoders import DecodeStream

import mcore_rl.models  # noqa: F401  (fills the family registry)
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import DTYPE_OF_DEVICE
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.controller.compilers import prepare_compilers
from mcore_rl.controller.process_cleanup import clean_up_on_exit
from mcore_rl.data.tokenizer import check_tokenizer_matches, load_tokenizer
from mcore_rl.inference.protocol import Generator, SamplingParams
from mcore_rl.inference.vllm.server import VLLMServer
from mcore_rl.jobs.output import find_model_folder, read_chat_date
from mcore_rl.jobs.remote_paths import fetch_model
from mcore_rl.models.base import get_field, read_config
from mcore_rl.models.rope import count_positions
from mcore_rl.observability.console import show_waiting
from mcore_rl.parallel.devices import detect_device

_COMMANDS = "/reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C ends an answer"


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Options of `mcore-rl chat`."""

    model: str  # a Hugging Face folder, or the output folder of a run
    system: str
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...]
    max_tokens: int  # per answer
    max_context: int  # tokens of the whole conversation
    seed: int | None
    dtype: str
    tp: int
    kv_cache_bytes: int | None  # None: what the conversation needs
    timeout_s: float


@dataclass(slots=True)
class Chat:
    """A conversation with a server."""

    server: Generator
    tokenizer: Any
    sampling: SamplingParams
    max_context: int
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    async def answer(self, text: str) -> None:
        """Generate and print an answer, token by token.

        If it is cancelled, the conversation keeps what was generated.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt_ids = self.tokenize(messages)
        num_left = self.max_context - len(prompt_ids)
        if num_left < 1:
            print(f"the conversation has {len(prompt_ids)} of {self.max_context} tokens: /reset")
            return
        sampling = replace(self.sampling, max_tokens=min(self.sampling.max_tokens, num_left))
        stream, response = DecodeStream(skip_special_tokens=True), ""
        reason: str | None = None
        try:
            async for new in self.server.stream(prompt_ids, sampling):
                for token in new.token_ids:
                    piece = stream.step(self.tokenizer.backend_tokenizer, token) or ""
                    response += piece
                    print(piece, end="", flush=True)
                reason = new.finish_reason
        finally:
            ends = {"stop": "", "length": " ... (cut off)"}
            print(ends.get(reason or "", " ..."), flush=True)
            self.messages = [*messages, {"role": "assistant", "content": response}]

    def tokenize(self, messages: list[dict[str, str]]) -> list[int]:
        """Apply the chat template.

        Raises:
            ConfigError: The template refuses the messages.
        """
        from jinja2 import TemplateError  # comes with transformers

        try:
            token_ids: list[int] = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except TemplateError as error:
            raise ConfigError(f"the model's chat template refuses this: {error}") from error
        return token_ids


def run(settings: ChatSettings) -> None:
    """Answer each line of standard input until its end or /exit.

    Raises:
        ConfigError: A setting or the model is wrong.
        TimeoutError: The server has not started in time.
    """
    model = fetch_model("DIR", settings.model)
    path = str(find_model_folder(model, "DIR"))
    tokenizer = load_tokenizer(path, read_chat_date(model))
    hf_config = read_config(path)
    check_tokenizer_matches(tokenizer, get_field(hf_config, "vocab_size"))
    if not tokenizer.is_fast:
        raise ConfigError(f"{path} has no tokenizer.json, which text is decoded by as it comes")
    longest = count_positions(hf_config) or settings.max_context
    context = min(settings.max_context, longest)
    sampling = SamplingParams(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        stop=settings.stop,
        max_tokens=settings.max_tokens,
        seed=settings.seed,
    )
    rollout = RolloutConfig(tp=settings.tp, max_num_seqs=1, kv_cache_bytes=settings.kv_cache_bytes)
    device = detect_device().type
    dtype = DTYPE_OF_DEVICE[device] if settings.dtype == "auto" else settings.dtype
    prepare_compilers()
    with clean_up_on_exit(), asyncio.Runner() as runner:
        seed, limit = settings.seed or 0, settings.timeout_s
        server = VLLMServer(path, dtype, context, rollout, seed, timeout_s=limit)
        chat = Chat(server, tokenizer, sampling, context, settings.system)
        # The template may refuse a system message.
        chat.tokenize([*chat.messages, {"role": "user", "content": "?"}])
        try:
            with show_waiting(f"loading {path}", has_lines=False):
                runner.run(asyncio.wait_for(server.start(), limit))
            _answer_lines(chat, runner)
        finally:
            runner.run(server.close())


def _answer_lines(chat: Chat, runner: asyncio.Runner) -> None:
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(_COMMANDS)
    for line in _read_lines(is_terminal):
        text = line.strip()
        if text == "/exit":
            return
        if text == "/reset":
            chat.reset()
        elif text.startswith("/"):
            print(f"{text.split()[0]} is no command: {_COMMANDS}")
        elif text:
            try:
                runner.run(chat.answer(text))
            except KeyboardInterrupt:
                if not is_terminal:
                    raise


def _read_lines(is_terminal: bool) -> Iterator[str]:
    """Yield lines of standard input until its end; Ctrl-C while typing drops the line."""
    if not is_terminal:
        yield from sys.stdin
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (edits the line of input())
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return
