"""Rewards as a run uses them: several, with weights, limits on time, and a rule for errors."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mcore_rl.config.checks import check_positive
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve_rollout import RewardTerm, list_reward_terms
from mcore_rl.config.schema import RewardConfig
from mcore_rl.data.sample import Sample
from mcore_rl.rewards.base import (
    OPTIONAL,
    TOKEN_REWARDS,
    TURN_REWARDS,
    InProcess,
    Reward,
    RewardError,
    fault,
    raised,
    rewards,
    shown,
)
from mcore_rl.rewards.processes import (
    NotLoadedError,
    ProcessDiedError,
    RewardProcesses,
    TooLateError,
    within,
)
from mcore_rl.rewards.remote import Post, RemoteReward, RemoteSettings
from mcore_rl.rewards.threads import CallError, called_in_thread

Numbers = Mapping[str, float]
_PROMPT_END_TOKENS = 32


@dataclass(frozen=True, slots=True)
class _Found:
    """What a reward found for a response."""

    numbers: Numbers
    of_turns: Sequence[float] | None
    of_tokens: Sequence[Sequence[float]] | None  # a list a turn


@dataclass(slots=True)
class _Term:
    """A reward of a run."""

    name: str  # in metrics; empty: the only one, by reward.name
    title: str  # in errors
    weight: float
    reward: Reward
    limit_s: float
    limit_key: str  # the setting of that limit
    parameters: frozenset[str]
    runs_in_thread: bool
    processes: RewardProcesses | None
    remote: RemoteReward | None
    served_by: str  # the frozen model that it asks, in place of a server of its own
    unchecked: Numbers | None
    parts: set[str] = field(default_factory=set)  # of the first response

    @property
    def is_batched(self) -> bool:
        return "texts" in self.parameters

    def problem(self, error: Exception) -> _Problem:
        if isinstance(error, TooLateError):
            return _Problem(f"{error} ({self.limit_key})")
        if isinstance(error, ProcessDiedError | NotLoadedError | CallError):
            return _Problem(error)
        return _Problem(raised(error))

    def checked(self, result: object, turn_lengths: Sequence[int]) -> _Found | _Problem:
        """What it returned for a response whose turns have so many tokens."""
        if isinstance(result, _Problem):
            return result
        if isinstance(result, Exception):
            return self.problem(result)
        if problem := fault(result, turn_lengths):
            return _Problem(f"returned {problem}")
        given: dict[str, Any] = dict(result)  # type: ignore[call-overload]
        self.parts = self.parts or set(given)
        if self.parts != set(given):
            keys = f"the keys {sorted(given)}, and {sorted(self.parts)} for an earlier response"
            return _Problem(f"returned {keys}")
        of_turns: list[Any] | None = given.pop(TURN_REWARDS, None)
        of_tokens: list[Any] | None = given.pop(TOKEN_REWARDS, None)
        return _Found(
            {name: float(value) for name, value in given.items()},
            None if of_turns is None else [*map(float, of_turns)],
            None if of_tokens is None else [[*map(float, own)] for own in of_tokens],
        )


class Judge:
    """The rewards that a config names, with a check on what they return.

    Sync functions by import path and those with the mark `in_process` run in processes of their
    own; those with the mark `in_thread` in a thread, one call at a time; others in the event loop.
    All calls are of one event loop.
    """

    def __init__(
        self,
        config: RewardConfig,
        max_tokens: int | None = None,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        """Raises ConfigError if a reward or its settings cannot work.

        Args:
            max_tokens: how long a response may be, where settings are to be checked against it.
            decode: text of token ids; None where no reward is called.
        """
        self._config, self._thread, self._decode = config, asyncio.Lock(), decode
        self.models: dict[str, Post] = {}  # how to ask frozen models, filled when they serve
        self._terms: list[_Term] = []
        for name, term in list_reward_terms(config).items():
            self._terms.append(self._term(name, term, max_tokens))

    async def __call__(
        self, samples: Sequence[Sample], texts: Sequence[str], max_tokens: int, where: str
    ) -> None:
        """Sets reward, reward_parts, those of turns and tokens, and reward_error of responses.

        Args:
            samples: responses to one prompt.
            texts: of these, without the end token.
            max_tokens: how many tokens each may have.
            where: which prompt it was, in words, for errors.

        Raises:
            RewardError: a reward raised, took too long, or returned anything but finite numbers
                with "reward" among them and the same names as for the first response; with
                reward.on_error=stop.
        """
        found: list[dict[str, _Found]] = [{} for _ in samples]  # by term
        turns = [sample.turn_texts or [text] for sample, text in zip(samples, texts, strict=True)]
        turn_ids = [sample.turn_token_ids or [sample.response_ids] for sample in samples]
        for term in self._terms:
            rows = [row for row, sample in enumerate(samples) if not sample.reward_error]
            answers = [
                {
                    "text": texts[row],
                    "fields": samples[row].fields,
                    "finish_reason": samples[row].finish_reason,
                    "num_tokens": len(samples[row].response_ids),
                    "max_tokens": max_tokens,
                    "messages": samples[row].messages,
                    "turns": turns[row],
                    "turn_token_ids": turn_ids[row],
                    "prompt_end": self._prompt_end(term, samples[row]),
                    "rewards": {n: one.numbers["reward"] for n, one in found[row].items()},
                }
                for row in rows
            ]
            for row, result in zip(rows, await self._asked(term, answers), strict=True):
                checked = term.checked(result, [*map(len, turn_ids[row])])
                if not isinstance(checked, _Problem):
                    found[row][term.name] = checked
                    continue
                problem = f"{term.title} {checked}"
                if self._config.on_error == "stop":
                    raise RewardError(_told(problem, samples[row], texts[row], where))
                samples[row].reward_error = problem
        for sample, parts in zip(samples, found, strict=True):
            if not sample.reward_error:
                self._fill(sample, parts)

    async def close(self) -> None:
        """Ends processes and connections."""
        for term in self._terms:
            for opened in (term.processes, term.remote):
                if opened is not None:
                    await opened.close()

    def _term(self, name: str, term: RewardTerm, max_tokens: int | None) -> _Term:
        key = f"reward.terms.{name}" if name else "reward"
        registry = rewards(key)
        function, bound = registry[term.name], registry.bound(term.name, term.settings)
        settings: Any = getattr(bound, "keywords", {}).get("settings")
        parameters = frozenset(inspect.signature(function).parameters)
        if "rewards" in parameters:
            self._check_other_terms(key, settings)
        if max_tokens is not None and hasattr(settings, "check_max_tokens"):
            settings.check_max_tokens(f"{key}.settings", max_tokens)
        mark: InProcess | None = getattr(function, "in_process", None)
        may_block = term.name not in registry.names and not _is_async(function)
        if may_block and not getattr(function, "in_thread", False) and "post" not in parameters:
            mark = mark or InProcess((), None, None)
        processes = None
        if mark is not None:
            asked = {
                "name": term.name,
                "settings": term.settings,
                "modules": mark.modules,
                "memory_mb": mark.memory_mb,
            }
            processes = RewardProcesses(asked, self._config.num_processes)
        own_limit: float | None = getattr(settings, "timeout_s", None)
        if own_limit is not None:
            check_positive(f"{key}.settings.timeout_s", own_limit)
        limit_s = self._config.timeout_s if own_limit is None else own_limit
        served_by: str = getattr(settings, "served_by", "")
        asks = "post" in parameters and not served_by
        return _Term(
            name=name,
            title=f"{registry.setting}={term.name!r}",
            weight=term.weight,
            reward=bound,
            limit_s=limit_s,
            limit_key="reward.timeout_s" if own_limit is None else f"{key}.settings.timeout_s",
            parameters=parameters,
            runs_in_thread=may_block and mark is None,
            processes=processes,
            remote=self._remote(key, settings, limit_s) if asks else None,
            served_by=served_by,
            unchecked=mark.unchecked if mark is not None else None,
        )

    def _prompt_end(self, term: _Term, sample: Sample) -> str:
        if self._decode is None or "prompt_end" not in term.parameters:
            return ""
        start = sample.turn_spans[-1].start if sample.turn_spans else 0
        before = [*sample.prompt_ids[-_PROMPT_END_TOKENS:], *sample.response_ids[:start]]
        return self._decode(before[-_PROMPT_END_TOKENS:])

    def _remote(self, key: str, settings: object, limit_s: float) -> RemoteReward:
        if not isinstance(settings, RemoteSettings):
            raise ConfigError(
                f"{key}.name is a reward with the parameter post; allowed: with settings that are "
                "RemoteSettings of mcore_rl.rewards.remote"
            )
        try:
            return RemoteReward(settings, limit_s)
        except ConfigError as error:
            raise ConfigError(f"{key}.settings.{error}") from error

    def _check_other_terms(self, key: str, settings: object) -> None:
        """A setting called `term` names a term before this one."""
        before = [term.name for term in self._terms]
        if hasattr(settings, "term") and settings.term not in before:
            raise ConfigError(
                f"{key}.settings.term={settings.term!r} is no term before it in reward.terms; "
                f"allowed: {', '.join(before) or 'none, as there is no term before it'}"
            )

    def _fill(self, sample: Sample, found: Mapping[str, _Found]) -> None:
        """From the results of all terms."""
        weighted = [(term.weight, found[term.name]) for term in self._terms]
        sample.reward = sum(weight * one.numbers["reward"] for weight, one in weighted)
        rows = [[weight * r for r in one.of_turns] for weight, one in weighted if one.of_turns]
        sample.turn_rewards = [sum(of_turn) for of_turn in zip(*rows, strict=True)]
        lists = [(weight, one.of_tokens) for weight, one in weighted if one.of_tokens]
        sample.token_rewards = [
            [sum(weight * own[turn][at] for weight, own in lists) for at in range(len(first))]
            for turn, first in enumerate(lists[0][1] if lists else ())
        ]
        if lists and not sample.turn_texts:  # the response is the turn
            sample.process_rewards = list(sample.token_rewards[0])
        for name, one in found.items():
            for part, value in one.numbers.items():
                if part != "reward":
                    sample.reward_parts[f"{name}/{part}" if name else part] = value
                elif name:  # a term's reward is called as the term is
                    sample.reward_parts[name] = value

    async def _asked(self, term: _Term, answers: Sequence[Mapping[str, Any]]) -> Sequence[object]:
        """For each answer what the reward returned."""
        if not term.is_batched:
            return await asyncio.gather(*(self._called(term, answer) for answer in answers))
        if not answers:
            return []
        columns: dict[str, Any] = {n: [answer[n] for answer in answers] for n in answers[0]}
        columns["max_tokens"] = answers[0]["max_tokens"]
        results = await self._called(term, columns)
        if isinstance(results, Sequence) and not isinstance(results, str):
            if len(results) == len(answers):
                return results
        elif isinstance(results, _Problem):
            return [results] * len(answers)
        problem = _Problem(f"returned {shown(results)} for {len(answers)} responses")
        return [problem] * len(answers)

    async def _called(self, term: _Term, answer: Mapping[str, Any]) -> object:
        """What one call returned."""
        given = [answer[name] for name in ("text", "fields", "finish_reason")]
        asks = term.remote is not None or bool(term.served_by)
        post = term.remote.post if term.remote else self.models.get(term.served_by)
        known = {**answer, "post": post} if asks else answer
        optional = {name: known[name] for name in OPTIONAL if name in term.parameters}
        try:
            if term.processes is not None:
                return _result_of(await term.processes.call(given, optional, term.limit_s))
            if term.runs_in_thread:
                async with self._thread:
                    call = partial(term.reward, *given, **optional)
                    return await within(term.limit_s, called_in_thread(call))
            result = term.reward(*given, **optional)
            if asks:  # each request has the limit, once it has a place
                return await result
            return await within(term.limit_s, result) if inspect.isawaitable(result) else result
        except Exception as error:  # noqa: BLE001 (of a function that is not ours)
            is_unchecked = term.unchecked and isinstance(error, TooLateError | ProcessDiedError)
            return term.unchecked if is_unchecked else term.problem(error)


def check_columns(config: RewardConfig, columns: Collection[str]) -> None:
    """Raises ConfigError where the settings of a reward name a column that the data lacks."""
    for name, term in list_reward_terms(config).items():
        key = f"reward.terms.{name}" if name else "reward"
        settings: Any = rewards(key).settings(term.name, term.settings)
        if hasattr(settings, "check_columns"):
            settings.check_columns(f"{key}.settings", columns)


def answer_check(config: RewardConfig) -> Callable[[object], None]:
    """Return a check of a row's answer, which raises ValueError where no response can earn it."""
    checks: list[partial[object]] = []
    for name, term in list_reward_terms(config).items():
        registry = rewards(f"reward.terms.{name}" if name else "reward")
        check = getattr(registry[term.name], "check_answer", None)
        if check is not None and term.weight:  # a reward without weight is only a metric
            checks.append(partial(check, settings=registry.settings(term.name, term.settings)))

    def check_all(answer: object) -> None:
        for check in checks:
            check(answer)

    return check_all


def check_judges(config: RewardConfig, models: Collection[str]) -> None:
    """Raises ConfigError where a reward asks a frozen model that the run does not have."""
    for name, term in list_reward_terms(config).items():
        key = f"reward.terms.{name}" if name else "reward"
        served_by = term.settings.get("served_by", "")
        if served_by and served_by not in models:
            allowed = ", ".join(sorted(models)) or "none, as the run has no frozen model (models)"
            raise ConfigError(f"{key}.settings.served_by={served_by!r}; allowed: {allowed}")


class _Problem(str):
    """Why there is no result."""


def _result_of(answer: Mapping[str, Any]) -> object:
    """What a process answered, with the errors in a batched result in their places."""
    if "error" in answer:
        return _Problem(answer["error"])
    for number, error in answer["errors"].items():
        answer["result"][int(number)] = _Problem(error)
    return answer["result"]


def _is_async(function: Reward) -> bool:
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def _told(problem: str, sample: Sample, text: str, where: str) -> str:
    return (
        f"{problem}; it must return a dict of finite numbers, with 'reward' and the same keys for "
        f"every response. It was asked about {where}, with the fields {shown(sample.fields)} and "
        f"the response {shown(text)}"
    )
