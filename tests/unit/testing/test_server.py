"""The suite of rollout backends: the example passes it, and each check finds a fault."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "dist_cpu"))

import tiny_families
import tiny_models

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.inference.lifecycle import Call, State
from mcore_rl.inference.protocol import (
    Completion,
    GenerationServer,
    NewTokens,
    SamplingParams,
    ServerSpec,
)
from mcore_rl.inference.registry import load_server_class
from mcore_rl.testing import check_server
from mcore_rl.testing.server import compute_log_probs
from tests.e2e.served import tokenizer
from tests.fakes import FakeServer

ROOT = Path(__file__).parents[3]
HFServer: Any = load_server_class(RolloutConfig(backend=f"{ROOT}/examples/hf_server.py:HFServer"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models"), "qwen3")


def save_model(folder: Path, family: str) -> Path:
    config = tiny_families.served_config(family)
    path = tiny_families.save_served(tiny_models.build_from(config), folder / family)
    tokenizer().save_pretrained(path)
    return path


@pytest.mark.job
def test_the_example_keeps_the_contract_to_1e5_nats(model):
    names = check_server(HFServer, model, tolerance=1e-5)
    assert names[0] == "responses" and names[-1] == "close" and len(names) == 15


@pytest.mark.job
@pytest.mark.parametrize(
    "family",
    [
        "qwen3_moe",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("qwen2", "llama", "mixtral", "deepseek_v3", "glm4_moe")
        ),
    ],
)
def test_the_example_gets_the_weights_of_each_family_from_a_trainer(tmp_path, family):
    names = ["responses", "checkpoints", "transport_updates"]
    assert check_server(HFServer, save_model(tmp_path, family), tolerance=1e-5, only=names) == names


Change = Callable[[Completion, SamplingParams], Completion]


class Changing(HFServer):
    """A server that changes its requests and completions; a fault overrides one of the methods."""

    def change_sampling(self, sampling: SamplingParams) -> SamplingParams:
        return sampling

    def change(self, completion: Completion, sampling: SamplingParams) -> Completion:
        return completion

    async def submit(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> list[Completion]:
        self.prompt_ids = prompt_ids
        changed = self.change_sampling(sampling)
        completions = await super().submit(prompt_ids, changed, request_id=request_id)
        return [self.change(completion, sampling) for completion in completions]


class OtherLogProbs(Changing):
    """A server whose log-probs are of another distribution than the one it samples from."""

    ignored: ClassVar[dict[str, Any]]

    @torch.no_grad()
    def change(self, completion: Completion, sampling: SamplingParams) -> Completion:
        ids = torch.tensor([self.prompt_ids + completion.token_ids])
        logits = self._model(ids).logits[0, len(self.prompt_ids) - 1 : -1]
        table = compute_log_probs(logits, replace(sampling, **self.ignored))
        log_probs = table[torch.arange(len(table)), completion.token_ids].tolist()
        return replace(completion, log_probs=log_probs)


class NoTemperature(OtherLogProbs):
    ignored: ClassVar = {"temperature": 1.0}


class NotRenormalized(OtherLogProbs):
    ignored: ClassVar = {"top_p": 1.0, "top_k": 0}


class WrongVersion(Changing):
    def change(self, completion: Completion, sampling: SamplingParams) -> Completion:
        return replace(completion, weight_versions=[7] * len(completion.token_ids))


class OneLogProbTooFew(Changing):
    def change(self, completion: Completion, sampling: SamplingParams) -> Completion:
        return replace(completion, log_probs=completion.log_probs[1:])


class OtherReason(Changing):
    def change(self, completion: Completion, sampling: SamplingParams) -> Completion:
        return replace(completion, finish_reason="eos")


class OneCompletion(Changing):
    def change_sampling(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, n=1)


class WarmGreedy(Changing):
    def change_sampling(self, sampling: SamplingParams) -> SamplingParams:
        is_greedy = sampling.temperature == 0
        return replace(sampling, temperature=1.0, seed=5) if is_greedy else sampling


class NoSeeds(Changing):
    def change_sampling(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, seed=None)


class EqualCompletions(HFServer):
    def _create_generator(self, seed: int | None, index: int) -> torch.Generator:
        return super()._create_generator(seed, 0)


class SeedsFurtherApart(HFServer):
    def _create_generator(self, seed: int | None, index: int) -> torch.Generator:
        return super()._create_generator(seed, 2 * index)


class OneSeedForAll(HFServer):
    def _create_generator(self, seed: int | None, index: int) -> torch.Generator:
        return super()._create_generator(1 if seed is None else seed, index)


class MissingEnd(Changing):
    def change(self, completion: Completion, sampling: SamplingParams) -> Completion:
        end = -1 if completion.finish_reason == "stop" else None
        names = "token_ids", "log_probs", "weight_versions"
        return replace(completion, **{name: getattr(completion, name)[:end] for name in names})


class NoEnd(HFServer):
    def __init__(self, spec: ServerSpec) -> None:
        super().__init__(spec)
        self._stop_ids = set()


class EndOfTokenizerOnly(HFServer):
    def __init__(self, spec: ServerSpec) -> None:
        super().__init__(spec)
        self._stop_ids = {self._tokenizer.eos_token_id}


class OneTokenTooFew(Changing):
    def change_sampling(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, max_tokens=sampling.max_tokens - 1)


class NoStopStrings(Changing):
    def change_sampling(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, stop=())


class StopStringUnnamed(Changing):
    def change(self, completion: Completion, sampling: SamplingParams) -> Completion:
        return replace(completion, stop_string="")


class StreamWithoutEnd(HFServer):
    async def stream(self, *args: Any, **options: Any) -> AsyncIterator[NewTokens]:
        async for new in super().stream(*args, **options):
            yield replace(new, finish_reason=None)


class StreamWithoutLastToken(HFServer):
    async def stream(self, *args: Any, **options: Any) -> AsyncIterator[NewTokens]:
        async for new in super().stream(*args, **options):
            yield replace(new, token_ids=new.token_ids[:-1], log_probs=new.log_probs[:-1])


class NeverStarts(HFServer):
    @asynccontextmanager
    async def start_together(self) -> AsyncIterator[None]:
        self._may_generate.hold("start")
        yield


class NoAbort(HFServer):
    async def abort(self, request_id: str) -> None: ...


class AbortOfNobodyFails(HFServer):
    async def abort(self, request_id: str) -> None:
        raise KeyError(request_id)


class AnyLength(HFServer):
    def _check_length(self, *_: object) -> None: ...


class AnyCheckpoint(HFServer):
    async def load_checkpoint(self, path: str, version: int, **options: bool) -> None:
        async with self._pause(Call.UPDATE, keep=False):
            await asyncio.to_thread(self._load_model, path, None)
            self._version = version


class UpdateBesideRequests(HFServer):
    async def load_checkpoint(self, path: str, version: int, **options: bool) -> None:
        await super().load_checkpoint(path, version, in_flight=True)


class OldWeights(HFServer):
    def _load_model(self, path: str | None, tensors: Any) -> None:
        super()._load_model(self.spec.model_path, None)


class OldVersion(HFServer):
    async def load_checkpoint(self, path: str, version: int, **options: bool) -> None:
        await super().load_checkpoint(path, self.weight_version, **options)


class UpdateWaits(HFServer):
    async def load_checkpoint(self, path: str, version: int, **options: bool) -> None:
        while options and not all(r.result.done() for r in self._responses):
            await asyncio.sleep(0.01)
        await super().load_checkpoint(path, version, **options)


class NewestVersion(Changing):
    def change(self, completion: Completion, sampling: SamplingParams) -> Completion:
        return replace(completion, weight_versions=[self._version] * len(completion.token_ids))


class UpdateWithoutWeights(HFServer):
    def _load_model(self, path: str | None, tensors: Any) -> None:
        if tensors is None:
            super()._load_model(path, None)


class UpdateWithoutErrors(HFServer):
    async def update(self, version: int, **options: bool) -> None:
        try:
            await super().update(version, **options)
        except RuntimeError:
            self._lifecycle.state = State.SERVING


class ServesAfterFailure(HFServer):
    async def update(self, version: int, **options: bool) -> None:
        try:
            await super().update(version, **options)
        except RuntimeError:
            self._lifecycle.state = State.SERVING
            self._may_generate.release("weights")
            raise


class LightSleep(HFServer):
    async def sleep(self, *, keep: bool = False) -> None:
        model = self._model
        await super().sleep(keep=keep)
        self._model = model


class WakesWithoutWeights(HFServer):
    async def wake(self, tag: Any) -> None:
        self._lifecycle.state = State.SERVING


class SleepsByNobodysLeave(FakeServer):
    def __init__(self, spec: ServerSpec) -> None:
        super().__init__()
        self._lifecycle.state = State.NEW

    async def start(self) -> None:
        self._lifecycle.state = State.SERVING

    async def submit(self, *_: Any, **__: Any) -> list[Completion]:
        async with self._request_gate.run_request():
            return []

    async def sleep(self, *, keep: bool = False) -> None: ...


class ServesWhenClosed(HFServer):
    async def close(self) -> None: ...


class ClosesOnce(HFServer):
    async def close(self) -> None:
        if self._scheduler is None and self._lifecycle.state is State.CLOSED:
            raise RuntimeError("it is closed")
        await super().close()


class NeedsNoStart(HFServer):
    def __init__(self, spec: ServerSpec) -> None:
        super().__init__(spec)
        self._lifecycle.state = State.SERVING

    async def submit(self, *args: Any, **options: Any) -> list[Completion]:
        return []


FAULTS: list[tuple[str, type[GenerationServer], str]] = [
    ("responses", NoTemperature, "temperature=0.6: a log-prob is .* nats from that of transform"),
    ("responses", NotRenormalized, "temperature=1.4 top_k=7: a log-prob is .* nats from"),
    ("responses", WrongVersion, r"weight_versions are \[7\]; the weights .* have version 0"),
    ("responses", OneLogProbTooFew, r"log_probs has \d+ entries for \d+ tokens"),
    ("responses", OtherReason, "finish_reason is 'eos'; allowed: 'stop', 'length'"),
    ("responses", OneCompletion, "a request of n=3 has 1 completions"),
    ("responses", NeedsNoStart, "before `start`, submit is allowed; the contract says StateError"),
    ("greedy", WarmGreedy, "a greedy token is .* below the likeliest"),
    ("seeds", NoSeeds, "a request with a seed gives another response"),
    ("seeds", EqualCompletions, "all completions of a request are equal"),
    ("seeds", SeedsFurtherApart, "completion 1 of seed 5 is not completion 0 of seed 6"),
    ("seeds", OneSeedForAll, "two requests without a seed give the same response"),
    ("ends", MissingEnd, "lacks its end-of-sequence token"),
    ("ends", NoEnd, "a response goes on after token"),
    ("ends", EndOfTokenizerOnly, "a response goes on after token"),
    (
        "ends",
        OneTokenTooFew,
        "a response of finish_reason 'length' has 47 tokens; max_tokens is 48",
    ),
    ("stop_strings", NoStopStrings, "the text is complete with token"),
    ("stop_strings", StopStringUnnamed, "stop_string ''; allowed: 'stop', and the text"),
    ("stream", StreamWithoutEnd, "the last tokens of a stream have finish_reason None"),
    ("stream", StreamWithoutLastToken, "a stream has other tokens than a submit"),
    ("abort", NoAbort, "a request that was aborted at once has finish_reason"),
    ("length", AnyLength, "a request beyond max_model_tokens is allowed; .* says ConfigError"),
    ("checkpoints", AnyCheckpoint, "load_checkpoint of a folder without a tensor is allowed"),
    ("checkpoints", UpdateBesideRequests, "load_checkpoint beside a request is allowed"),
    ("checkpoints", OldWeights, "after an update to version 1: a log-prob is"),
    ("checkpoints", OldVersion, "weight_version is 0 after an update to version 1"),
    ("updates_in_flight", UpdateWaits, "no token of requests that ran .* has the new version"),
    ("updates_in_flight", NewestVersion, "tokens of version .* an update has interrupted: a log-"),
    ("transport_updates", UpdateWithoutWeights, "after an update to version 1: a log-prob is"),
    ("transport_updates", UpdateWithoutErrors, "another version than the trainer sends is allowed"),
    ("transport_updates", ServesAfterFailure, "after an update that failed, submit is allowed"),
    ("sleep", LightSleep, "a server that sleeps has ServerMemory"),
    ("sleep", WakesWithoutWeights, r'asleep, wake\("kv_cache"\) is allowed'),
    ("sleep", SleepsByNobodysLeave, "without the feature `sleep`, sleep is allowed"),
    ("close", ServesWhenClosed, "after `close`, submit is allowed"),
]


@pytest.mark.job
@pytest.mark.parametrize(
    ("name", "server", "message"), FAULTS, ids=[fault.__name__ for _, fault, _ in FAULTS]
)
def test_a_fault_is_reported_with_a_sentence_on_it(model, name, server, message):
    with pytest.raises(AssertionError, match=message):
        check_server(server, model, only=[name], tolerance=1e-4)


@pytest.mark.parametrize(
    ("name", "server", "error"),
    [
        ("abort", AbortOfNobodyFails, KeyError),
        ("start_together", NeverStarts, TimeoutError),
        ("close", ClosesOnce, RuntimeError),
    ],
)
def test_an_error_or_a_wait_of_a_server_ends_the_suite(model, name, server, error):
    with pytest.raises(error):
        check_server(server, model, only=[name], timeout_s=5)


def test_other_classes_and_names_are_refused(model):
    with pytest.raises(AssertionError, match=r"dict is no subclass of .*GenerationServer"):
        check_server(lambda spec: {}, model)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match=r"only=\['speed'\]; allowed: responses, greedy"):
        check_server(HFServer, model, only=["speed"])
