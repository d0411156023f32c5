"""Reward manager: the weighted rewards of a run, with time limits and a rule for errors."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any

from mcore_rl.config.checks import check_positive
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.event_loop import run_coroutine
from mcore_rl.config.import_path import is_import_path
from mcore_rl.config.rules_rollout import list_reward_terms
from mcore_rl.config.schema import RewardConfig, RewardTerm
from mcore_rl.data.sample import Sample
from mcore_rl.data.thoughts import find_answer
from mcore_rl.rewards.processes import (
    CallError,
    CallTimeoutError,
    NotLoadedError,
    ProcessDiedError,
    RewardProcessPool,
    call_in_thread,
    encode_objects,
    wait_within,
)
from mcore_rl.rewards.registry import (
    OPTIONAL,
    TOKEN_REWARDS,
    TURN_REWARDS,
    ProcessOptions,
    Reward,
    RewardError,
    describe_exception,
    find_fault,
    get_registry,
    shorten_repr,
)
from mcore_rl.rewards.remote import Post, RemoteReward, RemoteSettings

Numbers = Mapping[str, float]
_PROMPT_END_TOKENS = 32


class _Failure(str):
    """The reason why a reward failed for a response."""


@dataclass(frozen=True, slots=True)
class _Result:
    """Validated result of a reward for a response."""

    values: Numbers
    turn_rewards: Sequence[float] | None
    token_rewards: Sequence[Sequence[float]] | None  # a list per turn


@dataclass(slots=True)
class _Term:
    """A reward of a run."""

    name: str  # in metrics; empty for reward.name, without terms
    title: str  # in errors
    weight: float
    reward: Reward
    limit_s: float
    limit_key: str  # setting of limit_s
    parameters: frozenset[str]
    num_positional: int  # of text, fields and finish_reason, or of lists of them
    runs_in_thread: bool
    processes: RewardProcessPool | None
    remote: RemoteReward | None
    served_by: str  # frozen model of the run that it calls; empty: none
    unchecked: Numbers | None
    parts: set[str] = field(default_factory=set)  # keys of the result for the first response

    @property
    def is_batched(self) -> bool:
        return "texts" in self.parameters

    def describe_failure(self, error: Exception) -> _Failure:
        if isinstance(error, CallTimeoutError):
            return _Failure(f"{error} ({self.limit_key})")
        if isinstance(error, ProcessDiedError | NotLoadedError | CallError):
            return _Failure(error)
        return _Failure(describe_exception(error))

    def validate(self, result: object, turn_lengths: Sequence[int]) -> _Result | _Failure:
        """Check the result for a response whose turns have so many tokens."""
        if isinstance(result, _Failure):
            return result
        if isinstance(result, Exception):
            return self.describe_failure(result)
        if isinstance(result, Real):
            result = {"reward": result}
        if fault := find_fault(result, turn_lengths):
            return _Failure(f"returned {fault}")
        values: dict[str, Any] = dict(result)  # type: ignore[call-overload]
        self.parts = self.parts or set(values)
        if self.parts != set(values):
            keys = f"the keys {sorted(values)}, and {sorted(self.parts)} for an earlier response"
            return _Failure(f"returned {keys}")
        turn_rewards: list[Any] | None = values.pop(TURN_REWARDS, None)
        token_rewards: list[Any] | None = values.pop(TOKEN_REWARDS, None)
        return _Result(
            {name: float(value) for name, value in values.items()},
            None if turn_rewards is None else [*map(float, turn_rewards)],
            None if token_rewards is None else [[*map(float, turn)] for turn in token_rewards],
        )


class RewardManager:
    """Computes the rewards of a config, and checks their results.

    Synchronous functions by import path and those with the decorator `run_in_process` run in
    separate processes, those with `run_in_thread` in a thread, one call at a time, others in the
    event loop. All calls are of one event loop.
    """

    def __init__(
        self,
        config: RewardConfig,
        max_tokens: int | None = None,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        """Find the functions and check their settings.

        Args:
            config: Rewards and limits.
            max_tokens: Limit of response tokens to check settings against; None: unknown.
            decode: Text of token ids, with special tokens. None: prompts open no thoughts.

        Raises:
            ConfigError: a reward or a setting is not valid.
        """
        self._config, self._thread_lock, self._decode = config, asyncio.Lock(), decode
        self.models: dict[str, Post] = {}  # clients of frozen models, added when these serve
        self._terms: list[_Term] = []
        for name, term in list_reward_terms(config).items():
            self._terms.append(self._build_term(name, term, max_tokens))

    async def __call__(
        self, samples: Sequence[Sample], texts: Sequence[str], max_tokens: int, where: str
    ) -> None:
        """Set reward, reward_parts, rewards of turns and tokens, and reward_error of responses.

        Args:
            samples: Responses to one prompt.
            texts: Their texts, without the end token; of an agent, what its loop has rewarded.
            max_tokens: Limit of their tokens.
            where: Description of the prompt, for errors.

        Raises:
            RewardError: a reward failed, with reward.on_error=stop: it raised, took too long, or
                did not return finite numbers with "reward" and the names of the first response.
        """
        results: list[dict[str, _Result]] = [{} for _ in samples]  # by term
        turns = [sample.turn_texts or [text] for sample, text in zip(samples, texts, strict=True)]
        turn_ids = [sample.turn_token_ids or [sample.response_ids] for sample in samples]
        prompt_ends = [self._decode_prompt_end(sample) for sample in samples]
        texts = [*map(self._choose_text, texts, turns, prompt_ends)]
        for term in self._terms:
            rows = [row for row, sample in enumerate(samples) if not sample.reward_error]
            calls = [
                {
                    "text": texts[row],
                    "fields": samples[row].fields,
                    "finish_reason": samples[row].finish_reason,
                    "num_tokens": sum(map(len, turn_ids[row])),
                    "max_tokens": max_tokens,
                    "messages": samples[row].messages,
                    "turns": turns[row],
                    "turn_token_ids": turn_ids[row],
                    "prompt_end": prompt_ends[row],
                    "rewards": {n: earlier.values["reward"] for n, earlier in results[row].items()},
                }
                for row in rows
            ]
            for row, returned in zip(rows, await self._call_all(term, calls), strict=True):
                result = term.validate(returned, [*map(len, turn_ids[row])])
                if not isinstance(result, _Failure):
                    results[row][term.name] = result
                    continue
                reason = f"{term.title} {result}"
                if self._config.on_error == "stop":
                    raise RewardError(_describe_error(reason, samples[row], texts[row], where))
                samples[row].reward_error = reason
        for sample, by_term in zip(samples, results, strict=True):
            if not sample.reward_error:
                self._combine(sample, by_term)

    async def close(self) -> None:
        """End processes and connections."""
        for term in self._terms:
            for resource in (term.processes, term.remote):
                if resource is not None:
                    await resource.close()

    def _build_term(self, name: str, term: RewardTerm, max_tokens: int | None) -> _Term:
        key = f"reward.terms.{name}" if name else "reward"
        registry = get_registry(key)
        function, bound = registry[term.name], registry.bind(term.name, term.settings)
        settings: Any = getattr(bound, "keywords", {}).get("settings")
        parameters = frozenset(inspect.signature(function).parameters)
        if "rewards" in parameters:
            self._check_term_setting(key, settings)
        if max_tokens is not None and hasattr(settings, "check_max_tokens"):
            settings.check_max_tokens(f"{key}.settings", max_tokens)
        options: ProcessOptions | None = getattr(function, "in_process", None)
        may_block = term.name not in registry.names and not _is_async(function)
        if may_block and not getattr(function, "in_thread", False) and "post" not in parameters:
            options = options or ProcessOptions((), None, None)
        processes = None
        if options is not None:
            message = {
                "name": term.name,
                "settings": term.settings,
                "modules": options.modules,
                "memory_mb": options.memory_mb,
                "objects": encode_objects(term.name),
            }
            processes = RewardProcessPool(message, self._config.num_processes)
        timeout_s: float | None = getattr(settings, "timeout_s", None)
        if timeout_s is not None:
            check_positive(f"{key}.settings.timeout_s", timeout_s)
        limit_s = self._config.timeout_s if timeout_s is None else timeout_s
        served_by: str = getattr(settings, "served_by", "")
        is_remote = "post" in parameters and not served_by
        return _Term(
            name=name,
            title=f"{registry.setting}={term.name!r}",
            weight=term.weight,
            reward=bound,
            limit_s=limit_s,
            limit_key="reward.timeout_s" if timeout_s is None else f"{key}.settings.timeout_s",
            parameters=parameters,
            num_positional=registry.count_parameters(term.name),
            runs_in_thread=may_block and options is None,
            processes=processes,
            remote=self._build_remote(key, settings, limit_s) if is_remote else None,
            served_by=served_by,
            unchecked=options.unchecked if options is not None else None,
        )

    def _choose_text(self, text: str, turns: Sequence[str], prompt_end: str) -> str:
        """Return the text that rewards read of a response (reward.text).

        Args:
            text: The response, or what an agent's loop gives: the content of its last turn,
                mostly without thoughts, or a text of its own.
            turns: All turns, with thoughts.
        """
        content = text.strip()
        if self._config.text == "response":
            return turns[-1] if content in turns[-1] else text
        # A content that is the whole turn may have the thoughts that the prompt has opened.
        return find_answer(text, prompt_end if content == turns[-1].strip() else "")

    def _decode_prompt_end(self, sample: Sample) -> str:
        if self._decode is None:
            return ""
        start = sample.turn_spans[-1].start if sample.turn_spans else 0
        before = [*sample.prompt_ids[-_PROMPT_END_TOKENS:], *sample.response_ids[:start]]
        return self._decode(before[-_PROMPT_END_TOKENS:])

    def _build_remote(self, key: str, settings: object, limit_s: float) -> RemoteReward:
        if not isinstance(settings, RemoteSettings):
            raise ConfigError(
                f"{key}.name is a reward with the parameter post; allowed: with settings that are "
                "RemoteSettings of mcore_rl.rewards.remote"
            )
        try:
            return RemoteReward(settings, limit_s)
        except ConfigError as error:
            raise ConfigError(f"{key}.settings.{error}") from error

    def _check_term_setting(self, key: str, settings: object) -> None:
        """Check that a setting called `term` names an earlier term."""
        before = [term.name for term in self._terms]
        if hasattr(settings, "term") and settings.term not in before:
            raise ConfigError(
                f"{key}.settings.term={settings.term!r} is no term before it in reward.terms; "
                f"allowed: {', '.join(before) or 'none, as there is no term before it'}"
            )

    def _combine(self, sample: Sample, results: Mapping[str, _Result]) -> None:
        """Set the weighted sums of all terms, and their parts."""
        weighted = [(term.weight, results[term.name]) for term in self._terms]
        sample.reward = sum(weight * result.values["reward"] for weight, result in weighted)
        rows = [
            [weight * reward for reward in result.turn_rewards]
            for weight, result in weighted
            if result.turn_rewards
        ]
        sample.turn_rewards = [sum(terms) for terms in zip(*rows, strict=True)]
        lists = [(w, result.token_rewards) for w, result in weighted if result.token_rewards]
        sample.token_rewards = [
            [sum(w * rewards[turn][token] for w, rewards in lists) for token in range(len(first))]
            for turn, first in enumerate(lists[0][1] if lists else ())
        ]
        if lists and not sample.turn_texts:  # the response is the turn
            sample.process_rewards = list(sample.token_rewards[0])
        for name, result in results.items():
            for part, value in result.values.items():
                if part != "reward":
                    sample.reward_parts[f"{name}/{part}" if name else part] = value
                elif name:  # the reward of a term has the name of the term
                    sample.reward_parts[name] = value

    async def _call_all(self, term: _Term, calls: Sequence[Mapping[str, Any]]) -> Sequence[object]:
        """Return the result of the reward for each response."""
        if not term.is_batched:
            return await asyncio.gather(*(self._call(term, arguments) for arguments in calls))
        if not calls:
            return []
        columns: dict[str, Any] = {n: [arguments[n] for arguments in calls] for n in calls[0]}
        columns["max_tokens"] = calls[0]["max_tokens"]
        results = await self._call(term, columns)
        if isinstance(results, Sequence) and not isinstance(results, str):
            if len(results) == len(calls):
                return results
        elif isinstance(results, _Failure):
            return [results] * len(calls)
        failure = _Failure(f"returned {shorten_repr(results)} for {len(calls)} responses")
        return [failure] * len(calls)

    async def _call(self, term: _Term, arguments: Mapping[str, Any]) -> object:
        """Return what one call returns, or why it failed."""
        names = ("text", "fields", "finish_reason")[: term.num_positional]
        positional = [arguments[name] for name in names]
        has_post = term.remote is not None or bool(term.served_by)
        post = term.remote.post if term.remote else self.models.get(term.served_by)
        available = {**arguments, "post": post} if has_post else arguments
        optional = {name: available[name] for name in OPTIONAL if name in term.parameters}
        try:
            if term.processes is not None:
                answer = await term.processes.call(positional, optional, term.limit_s)
                return _unpack(answer)
            if term.runs_in_thread:
                async with self._thread_lock:
                    call = partial(term.reward, *positional, **optional)
                    return await wait_within(term.limit_s, call_in_thread(call))
            result = term.reward(*positional, **optional)
            if has_post:  # the limit is per request
                return await result
            is_async = inspect.isawaitable(result)
            return await wait_within(term.limit_s, result) if is_async else result
        except Exception as error:  # noqa: BLE001 (of a user's function)
            is_unchecked = term.unchecked and isinstance(error, CallTimeoutError | ProcessDiedError)
            return term.unchecked if is_unchecked else term.describe_failure(error)


def try_functions(config: RewardConfig, sample: Sample, text: str, where: str) -> list[str]:
    """Call the functions outside the package on a sample, as a run calls them; return their names.

    Clients of servers (`post`) are not called, nor functions that read the results of other terms.

    Raises:
        ConfigError: One failed, with reward.on_error=stop. Otherwise a line is printed.
    """
    terms = {
        name: term
        for name, term in list_reward_terms(config).items()
        if is_import_path(term.name) and _can_be_called_alone(name, term)
    }
    for name in terms:
        alone = replace(config, terms={name: config.terms[name]} if name else {}, on_error="stop")
        try:
            run_coroutine(_call_once(alone, sample, text, where))
        except RewardError as error:
            if config.on_error == "stop":
                raise ConfigError(str(error)) from error
            print(f"{error} (reward.on_error={config.on_error!r}: the run goes on)")
    return [term.name for term in terms.values()]


def _can_be_called_alone(name: str, term: RewardTerm) -> bool:
    function = get_registry(f"reward.terms.{name}" if name else "reward")[term.name]
    return not {"post", "rewards"} & {*inspect.signature(function).parameters}


async def _call_once(config: RewardConfig, sample: Sample, text: str, where: str) -> None:
    manager = RewardManager(replace(config, num_processes=1))
    try:
        await manager([sample], [text], len(sample.response_ids), where)
    finally:
        await manager.close()


def check_columns(config: RewardConfig, columns: Collection[str]) -> None:
    """Raise ConfigError if the settings of a reward name a column that the data lacks."""
    for name, term in list_reward_terms(config).items():
        key = f"reward.terms.{name}" if name else "reward"
        settings: Any = get_registry(key).build_settings(term.name, term.settings)
        if hasattr(settings, "check_columns"):
            settings.check_columns(f"{key}.settings", columns)


def build_answer_check(config: RewardConfig) -> Callable[[object], None] | None:
    """Return a check that raises ValueError for an answer that can earn no reward.

    None: no reward says that it reads an answer (`reads_answer`).
    """
    checks, reads_answer = list[partial[object]](), False
    for name, term in list_reward_terms(config).items():
        registry = get_registry(f"reward.terms.{name}" if name else "reward")
        check = getattr(registry[term.name], "check_answer", None)
        reads_answer |= check is not None
        if check is not None and term.weight:  # a reward without weight is only a metric
            checks.append(
                partial(check, settings=registry.build_settings(term.name, term.settings))
            )

    def check_all(answer: object) -> None:
        for check in checks:
            check(answer)

    return check_all if reads_answer else None


def check_judge_models(config: RewardConfig, models: Collection[str]) -> None:
    """Raise ConfigError if a reward calls a frozen model that the run does not have."""
    for name, term in list_reward_terms(config).items():
        key = f"reward.terms.{name}" if name else "reward"
        served_by = term.settings.get("served_by", "")
        if served_by and served_by not in models:
            allowed = ", ".join(sorted(models)) or "none, as the run has no frozen model (models)"
            raise ConfigError(f"{key}.settings.served_by={served_by!r}; allowed: {allowed}")


def _unpack(answer: Mapping[str, Any]) -> object:
    """Return the result in a process's answer, with the failures of a batched result."""
    if "error" in answer:
        return _Failure(answer["error"])
    for number, error in answer["errors"].items():
        answer["result"][int(number)] = _Failure(error)
    return answer["result"]


def _is_async(function: Reward) -> bool:
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def _describe_error(reason: str, sample: Sample, text: str, where: str) -> str:
    return (
        f"{reason}; it must return a finite number, or a dict of them with 'reward' and the same "
        f"keys for every response. It was asked about {where}, with the fields "
        f"{shorten_repr(sample.fields)} and "
        f"the response {shorten_repr(text)}"
    )
