"""Conversion of published data sets to rows to train on. Pure functions.

Each takes a published row and the instruction to append to a question, and returns the columns of a
training row. A row of another form is a ConfigError. The docstrings list the published columns.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from mcore_rl.data.files import Row
from mcore_rl.data.latex import find_last_boxed
from mcore_rl.data.rows import Message, RowColumn, read_chat

Values = dict[str, Any]
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_TEXT, _NUMBER = pa.string(), pa.int64()
_NEVER_TWICE = "Use each number at most once, with +, -, *, / and parentheses."


class RowSkipped(ValueError):
    """A valid row that is not worth training on, and why; such rows are counted."""


@dataclass(frozen=True, slots=True)
class Publisher:
    """A data set: the function that converts its rows, and their columns."""

    about: str
    example: str  # options of a command
    make: Callable[[Row, str], Values]
    columns: Mapping[str, pa.DataType]
    instruction: str | None  # default instruction; None: the data set has no questions
    is_repeated: bool = False  # the published files have each prompt many times


def gsm8k(row: Row, instruction: str) -> Values:
    """`question`, and `answer`: a solution whose last line is `#### 1,234`."""
    solution = RowColumn("answer").get_text(row)
    answer = solution.rpartition("####")[2].strip().replace(",", "").replace("$", "")
    if "####" not in solution or not re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", answer):
        raise RowColumn("answer").build_error(
            row, solution[-80:], "a solution that ends in #### NUMBER"
        )
    messages = _build_messages(RowColumn("question").get_text(row), instruction)
    return {"messages": messages, "answer": answer, "solution": solution}


def math(row: Row, instruction: str) -> Values:
    r"""`problem`, `solution` with \boxed{answer}, `level` and `type` (MATH-500: `subject`).

    MATH-500 also has a column `answer`.
    """
    solution = RowColumn("solution").get_text(row)
    answer = row.values.get("answer")
    if answer is None and not (answer := (find_last_boxed(solution) or "").strip()):
        raise RowColumn("solution").build_error(
            row, solution[-80:], r"a solution with \boxed{ANSWER}"
        )
    level = re.search("[0-9]", str(row.values.get("level")))  # "Level 5", "Level ?", or 5
    return {
        "messages": _build_messages(RowColumn("problem").get_text(row), instruction),
        "answer": str(answer),
        "solution": solution,
        "subject": row.values.get("type") or row.values.get("subject"),
        "level": int(level[0]) if level else None,
    }


def dapo(row: Row, instruction: str) -> Values:
    """`prompt`, a list of messages with its own instruction, and `reward_model.ground_truth`."""
    reward_model = RowColumn("reward_model").get(row)
    truth = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
    if not isinstance(truth, str) or not truth:
        allowed = "an object with a ground_truth of text"
        raise RowColumn("reward_model").build_error(row, reward_model, allowed)
    *before, last = read_chat(row, RowColumn("prompt"))
    messages = [*before, *_build_messages(last["content"], instruction)]
    return {"messages": messages, "answer": truth, "source": row.values.get("data_source")}


def countdown(row: Row, instruction: str) -> Values:
    """`target`, to reach with the whole numbers `nums`."""
    numbers, target = RowColumn("nums").get(row), RowColumn("target").get(row)
    if not isinstance(numbers, list) or not numbers or {type(n) for n in numbers} != {int}:
        raise RowColumn("nums").build_error(row, numbers, "a list of whole numbers")
    if type(target) is not int:
        raise RowColumn("target").build_error(row, target, "a whole number")
    question = f"Using the numbers {numbers}, make an equation that equals {target}."
    messages = _build_messages(f"{question} {_NEVER_TWICE}", instruction)
    return {"messages": messages, "answer": str(target), "nums": numbers, "target": target}


def ultrafeedback(row: Row, instruction: str) -> Values:
    """`chosen` and `rejected`, chats that begin with the same prompt, and their scores.

    The margin is `score_chosen - score_rejected`, if the row has both.
    """
    scores = [row.values.get(name) for name in ("score_chosen", "score_rejected")]
    numbers = [float(score) for score in scores if isinstance(score, int | float)]
    margin = numbers[0] - numbers[1] if len(numbers) == 2 else None
    return _build_preference(
        read_chat(row, RowColumn("chosen")), read_chat(row, RowColumn("rejected")), margin
    )


def hh(row: Row, instruction: str) -> Values:
    """`chosen` and `rejected`: texts whose turns begin with `Human:` and `Assistant:`."""
    return _build_preference(_parse_turns(row, "chosen"), _parse_turns(row, "rejected"), None)


def _build_messages(question: str, instruction: str) -> list[Message]:
    return [{"role": "user", "content": f"{question}\n{instruction}" if instruction else question}]


def _build_preference(
    chosen: list[Message], rejected: list[Message], margin: float | None
) -> Values:
    """Split off the common prefix as the prompt, up to where the assistant speaks."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    num_prompt = len(list(same))
    if num_prompt == len(chosen) == len(rejected):
        raise RowSkipped("chosen and rejected are the same")
    while num_prompt and chosen[num_prompt - 1]["role"] == "assistant":
        num_prompt -= 1
    answers = chosen[num_prompt:], rejected[num_prompt:]
    if not num_prompt:
        raise RowSkipped("chosen and rejected have different prompts")
    for answer in answers:
        roles = [message["role"] for message in answer]
        turns = [("assistant", "user")[turn % 2] for turn in range(len(roles))]
        if len(roles) % 2 == 0 or roles != turns or not all(m["content"] for m in answer):
            raise RowSkipped("an answer is empty, or does not alternate with the user")
    prompt = chosen[:num_prompt]
    return {"prompt": prompt, "chosen": answers[0], "rejected": answers[1], "margin": margin}


def _parse_turns(row: Row, name: str) -> list[Message]:
    text = RowColumn(name).get_text(row)
    before, *parts = re.split(r"\n\n(Human|Assistant):", text)
    if before.strip() or not parts:
        raise RowColumn(name).build_error(row, text, "turns that begin with Human: and Assistant:")
    turns = zip(parts[::2], parts[1::2], strict=True)
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[speaker], "content": text.strip()} for speaker, text in turns]


_PROMPT = {"messages": _MESSAGES, "answer": _TEXT}
_PREFERENCE = dict.fromkeys(("prompt", "chosen", "rejected"), _MESSAGES) | {"margin": pa.float64()}
_BOXED = r"Reason step by step, and put the final answer within \boxed{}."
PUBLISHERS = {
    "gsm8k": Publisher(
        "GSM8K: grade-school mathematics; question, answer",
        "--input train-00000-of-00001.parquet --output gsm8k-train.parquet",
        gsm8k,
        {**_PROMPT, "solution": _TEXT},
        'Reason step by step. The last line is "#### " and the number.',
    ),
    "math": Publisher(
        "MATH and MATH-500: competition mathematics; problem, solution, level, type",
        "--input algebra/train.parquet geometry/train.parquet --output math-train.parquet",
        math,
        {**_PROMPT, "solution": _TEXT, "subject": _TEXT, "level": _NUMBER},
        _BOXED,
    ),
    "dapo17k": Publisher(
        "DAPO-Math-17k: prompt, reward_model; each different prompt is kept once",
        "--input dapo-math-17k.parquet --output dapo17k.parquet",
        dapo,
        {**_PROMPT, "source": _TEXT},
        "",
        is_repeated=True,
    ),
    "countdown": Publisher(
        "Countdown: nums, target",
        "--input countdown-3to4.parquet --output countdown.parquet",
        countdown,
        {**_PROMPT, "nums": pa.list_(_NUMBER), "target": _NUMBER},
        "Reason step by step, and put the expression into <answer> </answer>, as in "
        "<answer>(1 + 2) / 3</answer>.",
    ),
    "ultrafeedback": Publisher(
        "UltraFeedback, binarized: preferences; chosen, rejected (chats), scores",
        "--input train_prefs-00000-of-00001.parquet --output preferences.parquet",
        ultrafeedback,
        _PREFERENCE,
        None,
    ),
    "hh": Publisher(
        "HH-RLHF: preferences; chosen, rejected (texts with Human: and Assistant:)",
        "--input harmless-base/train.jsonl.gz --output hh.parquet",
        hh,
        _PREFERENCE,
        None,
    ),
}
