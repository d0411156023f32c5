"""Registry of rewards, by name or by import path, and decorators for their functions.

A reward reads the text of a response, the fields of its prompt and its finish reason, or only the
first or the first two of these. The text is the answer, behind the thoughts of a reasoning model,
unless reward.text=response; `turns` have all. It returns a finite number, or a dict of them with
the total under "reward" and other metrics under other names, the same names for every response.
"turn_rewards" may be a list: the share of the total of each turn of the policy. "token_rewards" may
be a list of lists: the share of each token of each turn.

A batched reward takes the lists `texts`, `fields` and `finish_reasons` of some or all responses to
one prompt, and returns a list of such results; an exception in the list fails that response only.
Either kind may be async, and may have more parameters, which it gets by name (a batched one as
lists, except max_tokens):

- `num_tokens`: tokens of the response, with its end token; of an agent, those of its turns;
- `max_tokens`: limit of num_tokens;
- `messages`: the prompt, dicts in OpenAI's form;
- `turns`: the texts of all turns of the policy; without an agent, the response;
- `turn_token_ids`: the token ids of the turns, with their end tokens;
- `prompt_end`: the text of the last tokens before the last turn, where a chat template may have
  begun the answer, as with <think>;
- `rewards`: the unweighted results of the terms before it in reward.terms, by name;
- `post`: sends a request to the server of its settings, which are `RemoteSettings` (remote.py). The
  time limit is then per request, not per call.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from mcore_rl.algorithms.registry import Registry
from mcore_rl.config.errors import ConfigError

Reward = Callable[..., Any]  # a function with its settings bound
# (text, finish_reason) -> the answer in the response as text, None without one
FindAnswer = Callable[[str, str], str | None]
# (field `answer`, settings of the reward): raises ValueError if no response can earn the reward
CheckAnswer = Callable[[Any, Any], object]
R = TypeVar("R", bound=Reward)


class RewardError(RuntimeError):
    """A reward raised, took too long, or returned an invalid result."""


OPTIONAL = (
    "num_tokens", "max_tokens", "messages", "turns", "turn_token_ids", "prompt_end", "rewards",
    "post",
)  # fmt: skip
TURN_REWARDS = "turn_rewards"  # in a result: a number per turn
TOKEN_REWARDS = "token_rewards"  # in a result: a list per turn, with a number per token
_MAX_SHOWN = 200  # characters of a response or of its fields in an error
_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = (sysconfig.get_paths()["stdlib"], "site-packages")
# Arguments of other frameworks in terms of ours, by the parameter that tells the framework.
_OTHER_FORMS: Mapping[str, tuple[str, Mapping[str, str]]] = MappingProxyType(
    {
        "completions": ("TRL", {"completions": "texts", "prompts": "messages"}),
        "solution_str": (
            "verl",
            {"solution_str": "text", "ground_truth": "fields['answer']", "extra_info": "fields"},
        ),
    }
)


class _RewardRegistry(Registry[Reward]):
    def count_parameters(self, name: str) -> int:
        """Return how many of `parameters` a reward takes; see Registry.

        Raises:
            ConfigError: It has the parameters of TRL's or verl's rewards, too.
        """
        signature = self._get_signature(name)
        for parameter, (framework, replacements) in _OTHER_FORMS.items():
            if parameter in signature.parameters:
                raise ConfigError(
                    f"{self.setting}={name!r} takes {signature}, as rewards of {framework}; "
                    f"allowed: {_write_call(self[name], signature, replacements)}"
                    " (docs/from_verl_and_trl.md)"
                )
        return super().count_parameters(name)


def _write_call(
    function: Reward, signature: inspect.Signature, replacements: Mapping[str, str]
) -> str:
    """Write a lambda that calls a function of another framework; columns are its other parameters.

    Args:
        replacements: Arguments in terms of the parameters of our rewards.
    """
    is_batched = "texts" in replacements.values()
    arguments = []
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        column = f"[row['{name}'] for row in fields]" if is_batched else f"fields['{name}']"
        arguments.append(f"{name}={replacements.get(name, column)}")
    parameters = "texts, fields, finish_reasons" if is_batched else "text, fields"
    parameters += ", messages" * ("prompts" in signature.parameters)
    called = getattr(function, "__name__", "")
    called = called if called.isidentifier() else "reward"
    return f"lambda {parameters}: {called}({', '.join(arguments)})"


_REWARDS = _RewardRegistry(
    "reward.name", ("text", "fields", "finish_reason"), "reward.settings", OPTIONAL, 1
)
_BUILT_IN = ("code", "length", "math", "remote", "text")  # modules that register rewards

register_reward = _REWARDS.register


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """Options of a reward with the decorator `run_in_process`."""

    modules: tuple[str, ...]  # imported before the first call, outside of its time limit
    # Result of a call that takes too long or ends its process; None: an error.
    unchecked: Mapping[str, float] | None
    memory_mb: int | None  # address space of the process, in MiB; None: unlimited


def run_in_process(
    *modules: str, unchecked: Mapping[str, float] | None = None, memory_mb: int | None = None
) -> Callable[[R], R]:
    """Run a reward in separate processes, as a decorator; they are killed at the time limit.

    For code that a response can make run forever or take all memory: a MemoryError ends the
    process, too. The default for functions by import path that are not async. The process finds
    the reward by its name or import path; arguments and result are JSON.

    Args:
        modules: Modules to import before the first call, outside of its time limit.
        unchecked: Result of a call that is killed; None: an error.
        memory_mb: Limit of the address space, in MiB.
    """

    def mark(function: R) -> R:
        function.in_process = ProcessOptions(modules, unchecked, memory_mb)  # type: ignore[attr-defined]
        return function

    return mark


def gives(*parts: str) -> Callable[[R], R]:
    """Declare, as a decorator, the parts that a reward returns besides "reward".

    Settings that name a part can then be checked before a run starts.
    """

    def mark(function: R) -> R:
        function.parts = parts  # type: ignore[attr-defined]
        return function

    return mark


def get_parts(key: str, name: str) -> tuple[str, ...] | None:
    """Return the parts that a reward declares with `gives`; None if it does not declare any.

    `key` names its settings in errors: reward, or reward.terms.NAME.
    """
    parts: tuple[str, ...] | None = getattr(get_registry(key)[name], "parts", None)
    return parts


def run_in_thread(function: R) -> R:
    """Run a reward by import path in a thread of the rollout worker, as a decorator.

    For a function that is not async and uses something that only this process has or that is too
    large to be there twice: a connection, a model. A call that exceeds its time is abandoned, not
    stopped.
    """
    function.in_thread = True  # type: ignore[attr-defined]
    return function


# Earlier names of the decorators.
in_process, in_thread = run_in_process, run_in_thread


def with_answers(find: Callable[[Any], FindAnswer | None]) -> Callable[[R], R]:
    """Declare, as a decorator, how to find the answer of a response, for majority votes.

    `find` takes the settings of the reward (None if it has none), and returns the finder, or None
    if answers cannot be compared with these settings. Equal answer texts are equal answers.
    """

    def mark(function: R) -> R:
        function.answers_with = find  # type: ignore[attr-defined]
        return function

    return mark


def reads_answer(check: CheckAnswer) -> Callable[[R], R]:
    """Declare, as a decorator, how to check the field `answer` of a row before a run.

    `check` takes the field and the settings of the reward, and raises ValueError if no response can
    earn the reward with this answer.
    """

    def mark(function: R) -> R:
        function.check_answer = check  # type: ignore[attr-defined]
        return function

    return mark


def get_answer_finder(key: str, name: str, settings: Mapping[str, object]) -> FindAnswer | None:
    """Return the finder of answers that a reward declares; None if it declares none.

    `key` names its settings in errors: reward, or reward.terms.NAME.
    """
    registry = get_registry(key)
    find = getattr(registry[name], "answers_with", None)
    return find(registry.build_settings(name, settings)) if find else None


def get_registry(key: str = "reward") -> Registry[Reward]:
    """Return the registry of rewards; errors name its settings `key`.name and `key`.settings."""
    for module in _BUILT_IN:
        importlib.import_module(f"mcore_rl.rewards.{module}")
    return _REWARDS.copy_for(f"{key}.name", f"{key}.settings")


def get_reward(name: str, settings: Mapping[str, object] | None = None) -> Reward:
    """Return the reward of a name with its settings; ConfigError as Registry.bind."""
    return get_registry().bind(name, settings or {})


def get_answer(fields: Mapping[str, Any], name: str) -> str:
    """Return the field `answer`, for the reward of this name, as text.

    Raises:
        ConfigError: the field is missing, or neither text nor a number.
    """
    if "answer" not in fields:
        raise ConfigError(
            f"reward.name={name!r} needs the field 'answer' (data.answer_column); "
            f"this sample has {', '.join(sorted(fields)) or 'no field'}"
        )
    return format_answer(fields["answer"], name)


def format_answer(answer: object, name: str) -> str:
    """Return an answer as text, a whole number without decimals: 7.0 of a float column is 7."""
    if isinstance(answer, str):
        return answer
    if not isinstance(answer, Real | Decimal):
        raise build_answer_error(answer, name, "text or a number")
    if isinstance(answer, float | Decimal) and math.isfinite(answer) and not answer % 1:
        return str(int(answer))
    return str(answer)


def build_answer_error(answer: object, name: str, allowed: str) -> ConfigError:
    """Build the error for an answer of the data that a reward cannot use."""
    return ConfigError(
        f"data.answer_column has {shorten_repr(answer)}; allowed with reward.name={name!r}: "
        f"{allowed}"
    )


def find_fault(result: object, turn_lengths: Sequence[int]) -> str:
    """Describe why a reward's result is invalid for turns of so many tokens; "" if it is valid."""
    if not isinstance(result, Mapping):
        return f"{shorten_repr(result)}, which is no number and no dict but {type(result).__name__}"
    if "reward" not in result:
        return f"a dict without 'reward', with the keys {shorten_repr(list(result))}"
    for name, value in result.items():
        if not isinstance(name, str):
            return f"the key {shorten_repr(name)}, which is no text"
        if name == TURN_REWARDS:
            if not isinstance(value, Sequence) or not all(map(_is_finite, value)):
                return f"{shorten_repr(value)} for {name!r}, which is no list of finite numbers"
            if len(value) != len(turn_lengths):
                return f"{len(value)} numbers for {name!r} of {len(turn_lengths)} turns"
        elif name == TOKEN_REWARDS:
            if problem := find_token_fault(value, turn_lengths):
                return problem
        elif not _is_finite(value):
            return f"{shorten_repr(value)} for {name!r}, which is no finite number"
    return ""


def find_token_fault(value: object, turn_lengths: Sequence[int]) -> str:
    """Describe why `token_rewards` are invalid for turns of so many tokens; "" if valid."""
    lists = value if isinstance(value, Sequence) else [value]
    for numbers in lists:
        if not isinstance(numbers, Sequence) or not all(map(_is_finite, numbers)):
            return (
                f"{shorten_repr(value)} for {TOKEN_REWARDS!r}, which is no list of lists of numbers"
            )
    if len(lists) != len(turn_lengths):
        return f"{len(lists)} lists for {TOKEN_REWARDS!r} of {len(turn_lengths)} turns"
    for number, (numbers, length) in enumerate(zip(lists, turn_lengths, strict=True)):
        if len(numbers) != length:
            return (
                f"{len(numbers)} numbers for {TOKEN_REWARDS!r} of turn {number}, of {length} tokens"
            )
    return ""


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # a whole number beyond any float
        return False


def describe_exception(error: BaseException) -> str:
    """Describe an exception of a user's code in one line, with the line of the user's file."""
    text = f"raised {type(error).__name__}: {' '.join(str(error).split())[:_MAX_SHOWN]}"
    return f"{text.rstrip()} {_locate(error)}".rstrip()


def _locate(error: BaseException) -> str:
    """Return the last line of the file that this package has called; "" for a library's."""
    frames = traceback.extract_tb(error.__traceback__)
    outer = [frame for frame in frames if not Path(frame.filename).is_relative_to(_PACKAGE)]
    if not outer or any(part in outer[0].filename for part in _LIBRARIES):
        return ""
    last = [frame for frame in outer if frame.filename == outer[0].filename][-1]
    return f"({Path(last.filename).name}:{last.lineno}: {(last.line or '')[:_MAX_SHOWN]})"


def shorten_repr(value: object) -> str:
    """Return the repr of a value, cut to the length that errors show."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
