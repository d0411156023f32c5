"""Rewards by name, or by import path.

A reward reads the text of a response, the fields of its prompt and why generation ended, and
returns its total under "reward" and other metrics under other names. All are
finite numbers, and the names are the same for every response. Under "turn_rewards" it may have a
list: how much of the total each turn of the policy has earned; and under "token_rewards" a list for
each turn: how much each of its tokens has.

A batched reward takes the lists `texts`, `fields` and `finish_reasons`, of some or all responses to
one prompt, and returns a list of such results. Either kind may be async, and may have more
parameters, which it gets by name (a batched one as lists, but for max_tokens):

- `num_tokens`: tokens of the response, its end token included;
- `max_tokens`: how many it may have at most;
- `messages`: of the prompt, dicts in OpenAI's form;
- `turns`: the texts of all turns of the policy; of one without tools, the response;
- `turn_token_ids`: the same as tokens, with those that end a turn;
- `prompt_end`: the text of the last tokens before the last turn, where a chat template may have
  begun the answer, as with <think>;
- `rewards`: what the terms before it in reward.terms found, by name, without their weights;
- `post`: asks the server of its settings, which are `RemoteSettings` (remote.py). A reward with it
  has a limit on each request, and none on the rest of what it does.

A batched one may have an exception in the place of a result, for that response alone.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any, TypeVar

from mcore_rl.algorithms.registry import Registry
from mcore_rl.config.errors import ConfigError

Reward = Callable[..., Any]  # with its settings bound
# (text of a response, why generation ended) -> the answer in it as text, None without one
FindAnswer = Callable[[str, str], str | None]
# (the field `answer`, the settings of a reward): raises ValueError where no response can earn it
CheckAnswer = Callable[[Any, Any], object]
R = TypeVar("R", bound=Reward)


class RewardError(RuntimeError):
    """A reward raised, took too long, or returned an invalid result."""


OPTIONAL = (
    "num_tokens", "max_tokens", "messages", "turns", "turn_token_ids", "prompt_end", "rewards",
    "post",
)  # fmt: skip
TURN_REWARDS = "turn_rewards"  # in a result: one a turn
TOKEN_REWARDS = "token_rewards"  # in a result: a list a turn, with one a token
_SHOWN = 200  # characters of a response or of its fields in an error
_REWARDS: Registry[Reward] = Registry(
    "reward.name", ("text", "fields", "finish_reason"), "reward.settings", OPTIONAL
)
_BUILT_IN = (
    "http_reward",
    "judge_reward",
    "length",
    "rules_code",
    "rules_math",
    "rules_text",
)  # modules that register rewards when imported

register_reward = _REWARDS.register


@dataclass(frozen=True, slots=True)
class InProcess:
    """How a reward with the mark `in_process` is run."""

    modules: tuple[str, ...]  # imported before its first call, whose time they do not take
    # The result for a response that a call takes too long for or ends its process; None: an error.
    unchecked: Mapping[str, float] | None
    memory_mb: int | None  # address space of the process, in MiB; None: no limit of ours


def in_process(
    *modules: str, unchecked: Mapping[str, float] | None = None, memory_mb: int | None = None
) -> Callable[[R], R]:
    """Decorator of a reward that is called in processes of its own, which its time limit kills.

    A MemoryError ends the process, too.

    For code that a response can make run for ever, or take all memory. A function by import path
    that is not async needs no mark, but for other than the defaults. The process finds the reward
    by its name or import path; arguments and result are JSON.
    """

    def mark(function: R) -> R:
        function.in_process = InProcess(modules, unchecked, memory_mb)  # type: ignore[attr-defined]
        return function

    return mark


def gives(*parts: str) -> Callable[[R], R]:
    """Decorator of a reward that returns these beside "reward", and never others.

    Settings that name a part can then be checked before a run starts.
    """

    def mark(function: R) -> R:
        function.parts = parts  # type: ignore[attr-defined]
        return function

    return mark


def parts_of(key: str, name: str) -> tuple[str, ...] | None:
    """What a reward says that it returns beside "reward"; None for one that does not say.

    `key` names its settings in errors: reward, or reward.terms.NAME.
    """
    found: tuple[str, ...] | None = getattr(rewards(key)[name], "parts", None)
    return found


def in_thread(function: R) -> R:
    """Decorator of a reward by import path that is called in a thread of the server.

    For one that is not async and has what is in this process only, or too large to be there twice:
    a connection, a model. A call that takes too long goes on, with nobody waiting for it.
    """
    function.in_thread = True  # type: ignore[attr-defined]
    return function


def with_answers(find: Callable[[Any], FindAnswer | None]) -> Callable[[R], R]:
    """Decorator of a reward that checks an answer: how to find that, for majority votes.

    `find` gets the settings of the reward (None for one without settings), and returns None where
    answers cannot be told apart with these. Responses with the same text as their answer have the
    same answer.
    """

    def mark(function: R) -> R:
        function.answers_with = find  # type: ignore[attr-defined]
        return function

    return mark


def reads_answer(check: CheckAnswer) -> Callable[[R], R]:
    """Decorator of a reward that compares with the field `answer`: how to check one before a run.

    `check` gets the field and the settings of the reward, and raises ValueError where no response
    can earn the reward of a row with this answer.
    """

    def mark(function: R) -> R:
        function.check_answer = check  # type: ignore[attr-defined]
        return function

    return mark


def answers_of(key: str, name: str, settings: Mapping[str, object]) -> FindAnswer | None:
    """How to find the answers that a reward checks; None for one that does not say.

    `key` names its settings in errors: reward, or reward.terms.NAME.
    """
    registry = rewards(key)
    find = getattr(registry[name], "answers_with", None)
    return find(registry.build_settings(name, settings)) if find else None


def rewards(key: str = "reward") -> Registry[Reward]:
    """The registry; in errors its settings are `key`.name and `key`.settings."""
    for module in _BUILT_IN:
        importlib.import_module(f"mcore_rl.rewards.{module}")
    return _REWARDS.copy_for(f"{key}.name", f"{key}.settings")


def get_reward(name: str, settings: Mapping[str, object] | None = None) -> Reward:
    """The reward that reward.name names, with its settings; ConfigError as Registry.bound."""
    return rewards().bind(name, settings or {})


def answer_of(fields: Mapping[str, Any], name: str) -> str:
    """Return the field that the reward of this name compares with, as text.

    Raises ConfigError without it, or where it is neither text nor a number.
    """
    if "answer" not in fields:
        raise ConfigError(
            f"reward.name={name!r} needs the field 'answer' (data.answer_column); "
            f"this sample has {', '.join(sorted(fields)) or 'no field'}"
        )
    return answer_text(fields["answer"], name)


def answer_text(answer: object, name: str) -> str:
    """Return an answer as text, a whole number without decimals: 7.0 of a float column is 7."""
    if isinstance(answer, str):
        return answer
    if not isinstance(answer, Real | Decimal):
        raise wrong_answer(answer, name, "text or a number")
    if isinstance(answer, float | Decimal) and math.isfinite(answer) and not answer % 1:
        return str(int(answer))
    return str(answer)


def wrong_answer(answer: object, name: str, allowed: str) -> ConfigError:
    return ConfigError(
        f"data.answer_column has {shown(answer)}; allowed with reward.name={name!r}: {allowed}"
    )


def fault(found: object, turn_lengths: Sequence[int]) -> str:
    """Why a reward's result is invalid for turns of so many tokens; empty if it is valid."""
    if not isinstance(found, Mapping):
        return f"{shown(found)}, which is no dict but {type(found).__name__}"
    if "reward" not in found:
        return f"a dict without 'reward', with the keys {shown(list(found))}"
    for name, value in found.items():
        if not isinstance(name, str):
            return f"the key {shown(name)}, which is no text"
        if name == TURN_REWARDS:
            if not isinstance(value, Sequence) or not all(map(_is_finite, value)):
                return f"{shown(value)} for {name!r}, which is no list of finite numbers"
            if len(value) != len(turn_lengths):
                return f"{len(value)} numbers for {name!r} of {len(turn_lengths)} turns"
        elif name == TOKEN_REWARDS:
            if problem := token_fault(value, turn_lengths):
                return problem
        elif not _is_finite(value):
            return f"{shown(value)} for {name!r}, which is no finite number"
    return ""


def token_fault(value: object, turn_lengths: Sequence[int]) -> str:
    """Why `token_rewards` are invalid for turns of so many tokens; empty if they are valid."""
    lists = value if isinstance(value, Sequence) else [value]
    for own in lists:
        if not isinstance(own, Sequence) or not all(map(_is_finite, own)):
            return f"{shown(value)} for {TOKEN_REWARDS!r}, which is no list of lists of numbers"
    if len(lists) != len(turn_lengths):
        return f"{len(lists)} lists for {TOKEN_REWARDS!r} of {len(turn_lengths)} turns"
    for number, (own, length) in enumerate(zip(lists, turn_lengths, strict=True)):
        if len(own) != length:
            return f"{len(own)} numbers for {TOKEN_REWARDS!r} of turn {number}, of {length} tokens"
    return ""


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # a whole number beyond any float
        return False


def raised(error: BaseException) -> str:
    return f"raised {type(error).__name__}: {' '.join(str(error).split())[:_SHOWN]}"


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
