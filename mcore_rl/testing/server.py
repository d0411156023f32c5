"""Conformance of a rollout backend: `check_server` puts a GenerationServer through its contract.

    from mcore_rl.testing import check_server

    check_server(MyServer, "/models/Qwen3-0.6B", tolerance=1e-4)

The reference is transformers in float32. Weights come from checkpoints and, for a server that takes
them over a transport, from a training rank in this process.

Long because: its parts are the rules of one contract, in the order of a server's life.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.errors import ConfigError, PeerError, StateError
from mcore_rl.config.event_loop import run_coroutine
from mcore_rl.config.schema import Layout, RolloutConfig, WeightSyncConfig
from mcore_rl.data.tokenizer import has_tokenizer, read_stop_ids, read_tokenizer
from mcore_rl.inference.protocol import (
    Completion,
    GenerationServer,
    SamplingParams,
    ServerMemory,
    ServerSpec,
)
from mcore_rl.models.base import get_family
from mcore_rl.parallel.rendezvous import RendezvousServer
from mcore_rl.reshard.executor import LocalWeights
from mcore_rl.rollout.weight_updater import build_generation_layout
from mcore_rl.testing.trainer_rank import fill_parameters
from mcore_rl.weight_sync.spec import TransferSpec, build_training_side
from mcore_rl.weight_sync.transport import WeightTransport, WeightUpdate, connect

CreateServer = Callable[[ServerSpec], GenerationServer]
Check = Callable[["ServerChecks"], Awaitable[None]]
_CHECKS: dict[str, Check] = {}
_NOISE = 0.05  # standard deviation of what the new weights differ by, relative to the weights
_SEED = 1234
_PROMPT_TOKENS = 24


def check_server(
    create: CreateServer,
    model_path: str | Path,
    *,
    dtype: str = "float32",
    tolerance: float = 1e-4,
    settings: RolloutConfig | None = None,
    max_tokens: int = 48,
    timeout_s: float = 300.0,
    only: Collection[str] = (),
) -> list[str]:
    """Put a rollout backend through the contract of `GenerationServer`.

    Args:
        create: Its class, or another function from a ServerSpec.
        model_path: Hugging Face checkpoint of a small model; with a tokenizer stop strings are
            checked, too.
        tolerance: Allowed difference of a log-prob from that of transformers, in nats.
        settings: Settings of the server, such as `tp`.
        max_tokens: Length of responses; long enough that a response takes some milliseconds.
        timeout_s: Limit of the whole suite.
        only: Names of checks to run; all without it.

    Returns:
        Names of the checks that were run.

    Raises:
        AssertionError: The server breaks a rule; a sentence says what is wrong and what is allowed.
        TimeoutError: A call has not returned in time.
        ConfigError: `only` names no check.
    """
    names = [name for name in _CHECKS if name in (only or _CHECKS)]
    if unknown := sorted({*only} - _CHECKS.keys()):
        raise ConfigError(f"only={unknown}; allowed: {', '.join(_CHECKS)}")

    async def run() -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            checks = ServerChecks(
                create, str(model_path), Path(folder), dtype, tolerance,
                settings or RolloutConfig(max_num_seqs=64), max_tokens,
            )  # fmt: skip
            async with asyncio.timeout(timeout_s), checks.open():
                for name in names:
                    await _CHECKS[name](checks)
        return names

    return run_coroutine(run())


def _register(check: Check) -> Check:
    _CHECKS[check.__name__.removeprefix("check_")] = check
    return check


@dataclass
class ServerChecks:
    """A server under test, and the models that it is compared with."""

    create: CreateServer
    model_path: str
    folder: Path  # for checkpoints
    dtype: str
    tolerance: float
    settings: RolloutConfig
    max_tokens: int
    server: GenerationServer = field(init=False)
    new_path: str = field(init=False)  # checkpoint with other weights
    prompt: list[int] = field(init=False)
    stop_ids: set[int] = field(init=False)  # tokens that end a response
    references: dict[str, Any] = field(default_factory=dict)  # models of transformers, by path

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Start the server, and close it in the end."""
        self.stop_ids = list_stop_ids(self.model_path)
        vocabulary = CheckpointReader(self.model_path).read_config()["vocab_size"]
        tokens = [token for token in range(vocabulary) if token not in self.stop_ids]
        self.prompt = random.Random(_SEED).choices(tokens, k=_PROMPT_TOKENS)
        self.new_path = str(write_changed_checkpoint(self.model_path, self.folder / "changed"))
        self.server = self.build_server(self.model_path)
        await self.refuse(self.submit(), "before `start`, submit")
        await self.server.start()
        version = self.server.weight_version
        assert version == 0, f"weight_version is {version} after the start; the contract says 0"
        try:
            yield
        finally:
            await self.server.close()

    def build_server(self, path: str) -> GenerationServer:
        """Build a server that is not started."""
        length = _PROMPT_TOKENS + 4 * self.max_tokens
        spec = ServerSpec(path, self.dtype, length, self.settings, _SEED, timeout_s=120.0)
        server = self.create(spec)
        assert isinstance(server, GenerationServer), (
            f"{type(server).__name__} is no subclass of mcore_rl.inference.protocol."
            "GenerationServer"
        )
        return self.create(replace(spec, can_sleep=True)) if server.features.sleep else server

    async def submit(self, n: int = 1, request_id: str = "", **sampling: Any) -> list[Completion]:
        """Submit the prompt, by default with a seed."""
        params = SamplingParams(**{"n": n, "max_tokens": self.max_tokens, "seed": 5} | sampling)
        return await self.server.submit(self.prompt, params, request_id=request_id)

    async def refuse(self, call: Awaitable[Any], what: str) -> None:
        """Check that a call raises StateError."""
        try:
            await call
        except StateError:
            return
        except Exception as error:
            raise AssertionError(
                f"{what} raises {type(error).__name__}; the contract says StateError"
            ) from error
        raise AssertionError(f"{what} is allowed; the contract says StateError")

    def get_reference(self, path: str) -> Any:
        """Return transformers' model of a checkpoint, in float32."""
        if path not in self.references:
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging

            logging.disable_progress_bar()
            self.references[path] = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, local_files_only=True, trust_remote_code=False
            ).eval()
        return self.references[path]

    @torch.no_grad()
    def compute_logits(self, path: str, token_ids: list[int]) -> torch.Tensor:
        """Return [tokens, vocabulary]: the logits that each token of a response is sampled from."""
        ids = torch.tensor([self.prompt + token_ids])
        logits: torch.Tensor = self.get_reference(path)(ids).logits[0].float()
        return logits[len(self.prompt) - 1 : -1]

    def check_log_probs(
        self,
        completion: Completion,
        path: str,
        what: str,
        *,
        tokens: slice = slice(None),
        **sampling: Any,
    ) -> None:
        """Compare log-probs of a response's tokens with those of a forward pass of transformers."""
        logits = self.compute_logits(path, completion.token_ids)
        table = compute_log_probs(logits, SamplingParams(**sampling))
        expected = table[torch.arange(len(table)), completion.token_ids]
        gaps = (torch.tensor(completion.log_probs) - expected)[tokens].abs().tolist()
        largest = max(gaps, default=0.0)
        assert largest <= self.tolerance, (
            f"{what}: a log-prob is {largest:.2g} nats from that of transformers; allowed: "
            f"{self.tolerance:g}"
        )

    def check_whole(self, completion: Completion, version: int) -> None:
        """Check that lists have an entry for each token, and versions and reasons are right."""
        num_tokens = len(completion.token_ids)
        for name in ("log_probs", "weight_versions"):
            size = len(getattr(completion, name))
            assert size == num_tokens, f"{name} has {size} entries for {num_tokens} tokens"
        versions = sorted({*completion.weight_versions})
        assert versions == [version], (
            f"weight_versions are {versions}; the weights that chose the tokens have version "
            f"{version}"
        )
        assert completion.finish_reason in ("stop", "length"), (
            f"finish_reason is {completion.finish_reason!r}; allowed: 'stop', 'length'"
        )


@_register
async def check_responses(checks: ServerChecks) -> None:
    """Check n responses, their lengths, and their log-probs at several settings of sampling."""
    samplings: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.4, "top_k": 7},
        {"top_p": 0.7},
    ]
    for sampling in samplings:
        completions = await checks.submit(n=3, **sampling)
        what = " ".join(f"{name}={value}" for name, value in sampling.items())
        assert len(completions) == 3, f"a request of n=3 has {len(completions)} completions"
        for completion in completions:
            checks.check_whole(completion, version=0)
            assert completion.token_ids, f"{what}: a response has no token"
            checks.check_log_probs(completion, checks.model_path, what, **sampling)


@_register
async def check_greedy(checks: ServerChecks) -> None:
    """Check that temperature 0 takes the likeliest token, each time."""
    first, second = [await checks.submit(temperature=0.0, seed=seed) for seed in (5, None)]
    assert first[0].token_ids == second[0].token_ids, (
        "two greedy requests of one prompt differ; temperature=0 takes the likeliest token"
    )
    logits = checks.compute_logits(checks.model_path, first[0].token_ids)
    chosen = logits[torch.arange(len(logits)), first[0].token_ids]
    gap = float((logits.max(-1).values - chosen).max())
    assert gap <= checks.tolerance, (
        f"a greedy token is {gap:.2g} below the likeliest; allowed: {checks.tolerance:g}"
    )
    checks.check_log_probs(first[0], checks.model_path, "temperature=0")


@_register
async def check_seeds(checks: ServerChecks) -> None:
    """Check that a seed repeats a request, and that completion i is that of seed + i."""
    first, again = [await checks.submit(n=3) for _ in range(2)]
    ids = [completion.token_ids for completion in first]
    assert ids == [c.token_ids for c in again], "a request with a seed gives another response"
    assert len({*map(tuple, ids)}) > 1, "all completions of a request are equal"
    if checks.dtype == "float32":  # else another batch may round a token away
        [alone] = await checks.submit(seed=6)
        assert alone.token_ids == ids[1], "completion 1 of seed 5 is not completion 0 of seed 6"
    unseeded = [(await checks.submit(seed=None))[0].token_ids for _ in range(2)]
    assert unseeded[0] != unseeded[1], "two requests without a seed give the same response"


@_register
async def check_ends(checks: ServerChecks) -> None:
    """Check where responses end: at their length, or with a token that ends them."""
    path = checks.folder / "ends"
    for completion in await checks.submit(n=8):
        _check_end(completion, checks.stop_ids, checks.max_tokens)
    # A token that is sampled becomes one that ends a response.
    [before] = await checks.submit()
    at_end = before.token_ids[len(before.token_ids) // 2]
    shutil.copytree(checks.model_path, path, symlinks=False)
    ids = sorted({*read_stop_ids(checks.model_path), at_end})
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    server = checks.build_server(str(path))
    await server.start()
    try:
        params = SamplingParams(max_tokens=checks.max_tokens, seed=5, n=4)
        completions = await server.submit(checks.prompt, params)
    finally:
        await server.close()
    for completion in completions:
        _check_end(completion, {*checks.stop_ids, at_end}, checks.max_tokens)
    expected = before.token_ids[: before.token_ids.index(at_end) + 1]
    assert completions[0].token_ids == expected, (
        f"a response does not end with token {at_end} of generation_config.json's eos_token_id: "
        f"it has {len(completions[0].token_ids)} tokens, {len(expected)} up to that one"
    )


def _check_end(completion: Completion, stop_ids: Collection[int], max_tokens: int) -> None:
    ids, reason = completion.token_ids, completion.finish_reason
    inside = [token for token in ids[:-1] if token in stop_ids]
    assert not inside, f"a response goes on after token {inside[0]}, which ends a response"
    if reason == "stop":
        assert ids and ids[-1] in stop_ids, (
            "a response that has ended with finish_reason 'stop' lacks its end-of-sequence token"
        )
    else:
        assert len(ids) == max_tokens, (
            f"a response of finish_reason {reason!r} has {len(ids)} tokens; max_tokens is "
            f"{max_tokens}"
        )
        assert ids[-1] not in stop_ids, (
            f"a response that ends with token {ids[-1]} has finish_reason {reason!r}; it is 'stop'"
        )


@_register
async def check_stop_strings(checks: ServerChecks) -> None:
    """Check that a response ends with the token that completes a text of `stop`."""
    if not has_tokenizer(checks.model_path):
        return
    tokenizer = read_tokenizer(checks.model_path)
    [plain] = await checks.submit()
    half = plain.token_ids[: max(len(plain.token_ids) // 2, 1)]
    text, before = tokenizer.decode(half), tokenizer.decode(half[:-1])
    stop = text[-8:] if text[-8:] not in before else text
    [cut] = await checks.submit(stop=(stop, "\u2603 never written"))
    end = next(n for n in range(1, len(half) + 1) if stop in tokenizer.decode(half[:n]))
    assert cut.token_ids == half[:end], (
        f"stop={stop!r}: the response has {len(cut.token_ids)} tokens; the text is complete with "
        f"token {end}, which is its last"
    )
    assert (cut.finish_reason, cut.stop_string) == ("stop", stop), (
        f"stop={stop!r}: finish_reason is {cut.finish_reason!r} and stop_string "
        f"{cut.stop_string!r}; allowed: 'stop', and the text"
    )
    checks.check_log_probs(cut, checks.model_path, f"stop={stop!r}")


@_register
async def check_stream(checks: ServerChecks) -> None:
    """Check that a stream has the tokens of a submit."""
    submitted = await checks.submit(n=2)
    params = SamplingParams(n=2, max_tokens=checks.max_tokens, seed=5)
    parts: dict[int, list[int]] = {0: [], 1: []}
    log_probs: dict[int, list[float]] = {0: [], 1: []}
    reasons: dict[int, str | None] = {}
    async for new in checks.server.stream(checks.prompt, params):
        parts[new.index] += new.token_ids
        log_probs[new.index] += new.log_probs
        reasons[new.index] = new.finish_reason
    for index, completion in enumerate(submitted):
        assert parts[index] == completion.token_ids, "a stream has other tokens than a submit"
        assert len(log_probs[index]) == len(parts[index]), "a stream lacks log-probs of tokens"
        assert reasons[index] == completion.finish_reason, (
            f"the last tokens of a stream have finish_reason {reasons[index]!r}; of a submit it is "
            f"{completion.finish_reason!r}"
        )


@_register
async def check_start_together(checks: ServerChecks) -> None:
    """Check that requests of a block are answered after it."""
    async with checks.server.start_together():
        tasks = [asyncio.create_task(checks.submit()) for _ in range(2)]
        await asyncio.sleep(0)
    first, second = await asyncio.gather(*tasks)
    assert first[0].token_ids == second[0].token_ids, (
        "two equal seeded requests that start together have different responses"
    )


@_register
async def check_abort(checks: ServerChecks) -> None:
    """Check that an aborted request returns its tokens so far."""
    await checks.server.abort("no request of this name")
    length = 4 * checks.max_tokens
    [uncut] = await checks.submit(max_tokens=length)
    for pause_s in (0.02, 0.005, 0.0, 0.0, 0.0):  # until it is not done before the abort
        task = asyncio.create_task(checks.submit(max_tokens=length, request_id="aborted"))
        await asyncio.sleep(pause_s)
        await checks.server.abort("aborted")
        async with asyncio.timeout(30):
            [cut] = await task
        if cut.finish_reason == "abort":
            break
    assert cut.finish_reason == "abort", (
        f"a request that was aborted at once has finish_reason {cut.finish_reason!r} and "
        f"{len(cut.token_ids)} tokens; the contract says 'abort', and its tokens so far"
    )
    num_tokens = len(cut.token_ids)
    assert cut.token_ids == uncut.token_ids[:num_tokens], "an aborted request has other tokens"
    assert len(cut.log_probs) == len(cut.weight_versions) == num_tokens, (
        "an aborted response has not as many log-probs and versions as tokens"
    )
    await checks.submit(max_tokens=2)


@_register
async def check_length(checks: ServerChecks) -> None:
    """Check that a request that cannot fit is refused."""
    num_tokens = checks.server.spec.max_model_tokens - len(checks.prompt) + 1
    with expect(ConfigError, "a request beyond max_model_tokens"):
        await checks.submit(max_tokens=num_tokens)


@_register
async def check_checkpoints(checks: ServerChecks) -> None:
    """Check that a version loaded from a folder is served as by a server that starts with it."""
    server, version = checks.server, checks.server.weight_version + 1
    [before] = await checks.submit()
    broken = write_broken_checkpoint(checks.model_path, checks.folder / "broken")
    with expect(ConfigError, "load_checkpoint of a folder without a tensor"):
        await server.load_checkpoint(str(broken), version)
    unchanged = server.weight_version
    assert unchanged == version - 1, f"a checkpoint that was refused has made version {unchanged}"
    [again] = await checks.submit()
    assert again.token_ids == before.token_ids, "a checkpoint that was refused has changed weights"
    running = asyncio.create_task(checks.submit(max_tokens=4 * checks.max_tokens))
    await asyncio.sleep(0)
    await checks.refuse(
        server.load_checkpoint(checks.new_path, version), "load_checkpoint beside a request"
    )
    await running
    await server.load_checkpoint(checks.new_path, version)
    await _check_serves(checks, checks.new_path, version)
    fresh = checks.build_server(checks.new_path)
    await fresh.start()
    try:
        params = SamplingParams(temperature=0.0, max_tokens=checks.max_tokens)
        [expected] = await fresh.submit(checks.prompt, params)
    finally:
        await fresh.close()
    [greedy] = await checks.submit(temperature=0.0)
    assert greedy.token_ids == expected.token_ids, (
        "a server that has loaded a checkpoint generates other tokens than one started from it"
    )
    await server.load_checkpoint(checks.model_path, version + 1)


@_register
async def check_start_without_weights(checks: ServerChecks) -> None:
    """Check that a server that starts without weights refuses requests until it has some."""
    waiting = checks.build_server(checks.model_path)
    params = SamplingParams(temperature=0.0, max_tokens=checks.max_tokens)
    await waiting.start(reads_weights=False)
    try:
        await checks.refuse(
            waiting.submit(checks.prompt, params), "after `start(reads_weights=False)`, submit"
        )
        with contextlib.suppress(StateError):  # it may take weights from a trainer only
            await waiting.load_checkpoint(checks.model_path, 1)
            [completion] = await waiting.submit(checks.prompt, params)
            [expected] = await checks.submit(temperature=0.0)
            assert completion.token_ids == expected.token_ids, (
                "a server that started without weights generates other tokens after "
                "load_checkpoint than one that has read the checkpoint"
            )
    finally:
        await waiting.close()


async def _check_serves(checks: ServerChecks, path: str, version: int) -> None:
    """Check version and weights that a server generates with."""
    actual = checks.server.weight_version
    assert actual == version, f"weight_version is {actual} after an update to version {version}"
    for completion in await checks.submit(n=2):
        checks.check_whole(completion, version)
        checks.check_log_probs(completion, path, f"after an update to version {version}")


@_register
async def check_updates_in_flight(checks: ServerChecks) -> None:
    """Check that a running request goes on with new weights."""
    if not checks.server.features.updates_in_flight:
        return
    server, paths = checks.server, (checks.model_path, checks.new_path)
    for pause_s in (0.05, 0.01, 0.002, 0.0):  # until it comes in the middle of a response
        completions = await _update_in_flight(checks, *paths, pause_s)
        version = server.weight_version
        await server.load_checkpoint(checks.model_path, version + 1)
        if any(len({*completion.weight_versions}) > 1 for completion in completions):
            break
    assert any(version in completion.weight_versions for completion in completions), (
        "no token of requests that ran during an update has the new version; the update waits for "
        "the requests, or max_tokens is too small"
    )


async def _update_in_flight(
    checks: ServerChecks, old_path: str, new_path: str, pause_s: float
) -> list[Completion]:
    """Load a checkpoint some seconds after requests; check and return their completions."""
    server, old, length = checks.server, checks.server.weight_version, 4 * checks.max_tokens
    running = [
        asyncio.create_task(checks.submit(max_tokens=length, seed=seed)) for seed in range(4)
    ]
    await asyncio.sleep(pause_s)
    await server.load_checkpoint(new_path, old + 1, in_flight=True, recompute_cache=True)
    completions = [completion for task in running for completion in await task]
    for completion in completions:
        versions = completion.weight_versions
        assert versions == sorted(versions) and {*versions} <= {old, old + 1}, (
            f"versions of the tokens of a response are {versions} over an update from {old} to "
            f"{old + 1}"
        )
        _check_end(completion, checks.stop_ids, length)
        num_old = versions.count(old)
        for version, path, tokens in (
            (old, old_path, slice(num_old)),
            (old + 1, new_path, slice(num_old, None)),
        ):
            what = f"tokens of version {version} of a response that an update has interrupted"
            checks.check_log_probs(completion, path, what, tokens=tokens)
    return completions


@_register
async def check_transport_updates(checks: ServerChecks) -> None:
    """Check updates from a training rank, and what a failed one leaves."""
    weight_format = checks.server.features.weight_format
    if weight_format is None:
        return
    server, version = checks.server, checks.server.weight_version
    async with connect_trainer(checks) as trainer:
        for path in (checks.new_path, checks.model_path):
            version += 1
            await asyncio.gather(trainer.send(path, version), server.update(version))
            await _check_serves(checks, path, version)
        with expect(PeerError, "an update to another version than the trainer sends"):
            sending = trainer.send(checks.new_path, version + 2)
            await _gather_all(sending, server.update(version + 1))
        await checks.refuse(checks.submit(), "after an update that failed, submit")
    async with connect_trainer(checks) as trainer:
        version += 1
        await asyncio.gather(trainer.send(checks.model_path, version), server.update(version))
        await _check_serves(checks, checks.model_path, version)


async def _gather_all(sending: Awaitable[None], update: Awaitable[None]) -> None:
    """Wait for both; raise the error of the update."""
    _, outcome = await asyncio.gather(sending, update, return_exceptions=True)
    if isinstance(outcome, BaseException):
        raise outcome


@_register
async def check_sleep(checks: ServerChecks) -> None:
    """Check that a server sleeps and wakes in order, and has no weights meanwhile."""
    server, version = checks.server, checks.server.weight_version + 1
    if not server.features.sleep:
        await checks.refuse(server.sleep(), "without the feature `sleep`, sleep")
        return
    awake = await server.memory()
    await server.sleep()
    await checks.refuse(checks.submit(), "asleep, submit")
    await checks.refuse(server.sleep(), "asleep, sleep")
    await checks.refuse(server.wake("kv_cache"), 'asleep, wake("kv_cache")')
    await checks.refuse(server.load_checkpoint(checks.new_path, version), "asleep, load_checkpoint")
    asleep = await server.memory()
    assert asleep == ServerMemory(0, 0), f"a server that sleeps has {asleep}; it frees all of it"
    await server.wake("weights")
    await checks.refuse(checks.submit(), "with weights that were discarded, submit")
    await checks.refuse(server.wake("kv_cache"), 'before an update, wake("kv_cache")')
    await server.load_checkpoint(checks.new_path, version)
    await checks.refuse(checks.submit(), "without a KV cache, submit")
    await server.wake("kv_cache")
    assert await server.memory() == awake, "memory after a sleep is not that before it"
    await _check_serves(checks, checks.new_path, version)
    running = asyncio.create_task(checks.submit(max_tokens=4 * checks.max_tokens))
    await asyncio.sleep(0.01)
    await server.sleep(keep=True)
    late = asyncio.create_task(checks.submit())
    await server.wake("weights")
    await server.load_checkpoint(checks.model_path, version + 1)
    await server.wake("kv_cache")
    [through], [after] = await asyncio.gather(running, late)
    _check_end(through, checks.stop_ids, 4 * checks.max_tokens)
    checks.check_whole(after, version + 1)


@_register
async def check_close(checks: ServerChecks) -> None:
    """Check that a server may be closed twice, and refuses everything afterwards."""
    await checks.server.close()
    await checks.server.close()
    await checks.refuse(checks.submit(), "after `close`, submit")
    await checks.refuse(
        checks.server.load_checkpoint(checks.model_path, 99), "after `close`, load_checkpoint"
    )


@contextlib.contextmanager
def expect(error_class: type[Exception], what: str) -> Iterator[None]:
    """Check that a block raises an error of a class."""
    try:
        yield
    except error_class:
        return
    except Exception as error:
        raise AssertionError(
            f"{what} raises {type(error).__name__} ({error}); the contract says "
            f"{error_class.__name__}"
        ) from error
    raise AssertionError(f"{what} is allowed; the contract says {error_class.__name__}")


def compute_log_probs(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Return [tokens, vocabulary]: log-probs of the distribution that is sampled from.

    The temperature comes first, then top_k, then top_p.
    """
    table = (logits / sampling.temperature).log_softmax(-1)
    ordered, order = table.sort(-1, descending=True)
    if sampling.top_k:
        ordered[:, sampling.top_k :] = -torch.inf
        ordered = ordered.log_softmax(-1)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    ordered = ordered.masked_fill(before >= sampling.top_p, -torch.inf).log_softmax(-1)
    return torch.empty_like(table).scatter(-1, order, ordered)


def list_stop_ids(path: str) -> set[int]:
    """Return the tokens that end a response of a checkpoint's model."""
    ids = {*read_stop_ids(path)}
    if has_tokenizer(path) and (eos_id := read_tokenizer(path).eos_token_id) is not None:
        ids.add(int(eos_id))
    return ids


def write_changed_checkpoint(path: str, folder: Path) -> Path:
    """Copy a checkpoint, with noise on its matrices."""
    shutil.copytree(path, folder)
    generator = torch.Generator().manual_seed(_SEED)
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.dim() >= 2:
                noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
                tensors[name] = (tensor + _NOISE * noise).to(tensor.dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def write_broken_checkpoint(path: str, folder: Path) -> Path:
    """Copy a checkpoint without one of its tensors."""
    shutil.copytree(path, folder)
    file = min(folder.glob("*.safetensors"))
    tensors = load_file(file)
    del tensors[max(tensors)]
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@dataclass
class TrainerRank:
    """The only training rank, connected with a server."""

    transport: WeightTransport
    spec: TransferSpec

    async def send(self, path: str, version: int) -> None:
        """Send the weights of a checkpoint."""
        reader, spec = CheckpointReader(path), self.spec
        side = build_training_side(reader.read_config(), spec.training, spec.num_mtp_layers)
        weights = LocalWeights(fill_parameters(side, 0, reader.read))
        await asyncio.to_thread(self.transport.send, weights, WeightUpdate(version))


@asynccontextmanager
async def connect_trainer(checks: ServerChecks) -> AsyncIterator[TrainerRank]:
    """Connect a training rank in this process with the server, over a process group."""
    weight_format = checks.server.features.weight_format
    assert weight_format is not None  # the caller has checked
    settings = WeightSyncConfig(
        method="disaggregated", verify="full", timeout_s=20.0, bucket_bytes=1 << 20
    )
    served, config = checks.settings, CheckpointReader(checks.model_path).read_config()
    drafts = served.speculative.num_tokens > 0
    num_mtp = drafts * get_family(config).num_mtp_layers(config)
    generation = build_generation_layout(served, num_servers=1)
    spec = TransferSpec(Layout(), num_mtp, generation, checks.dtype, settings, drafts=drafts)
    spec = replace(spec, weight_format=weight_format, quantization=served.quantization)
    with RendezvousServer("127.0.0.1") as rendezvous:
        joining = asyncio.to_thread(
            connect, spec, rendezvous.endpoint, config, 0, torch.device("cpu")
        )
        transport, _ = await asyncio.gather(
            joining, checks.server.connect_weights(rendezvous.endpoint, spec, 0)
        )
        try:
            yield TrainerRank(transport, spec)
        finally:
            transport.close()
