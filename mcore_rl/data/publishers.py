"""Rows as publishers of data sets ship them, made into rows to train on. Pure functions.

Each takes a row of the publisher's and the instruction that follows a question, and returns a row
of ours. A row of another form is refused with a ConfigError.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from mcore_rl.data.files import Row
from mcore_rl.data.latex import last_boxed
from mcore_rl.data.rows import Column, Message, chat

Values = dict[str, Any]
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_TEXT, _NUMBER = pa.string(), pa.int64()
_NEVER_TWICE = "Use each number at most once, with +, -, *, / and parentheses."


class LeftOut(ValueError):
    """A row of the right form that teaches nothing, and why; such rows are counted."""


@dataclass(frozen=True, slots=True)
class Publisher:
    """A data set: how its rows are made, and what they contain."""

    about: str
    example: str  # the options of one command
    make: Callable[[Row, str], Values]
    columns: Mapping[str, pa.DataType]
    instruction: str | None  # added to a question unless another is given; None: it asks none
    is_repeated: bool = False  # whether the publisher ships one prompt many times


def gsm8k(row: Row, instruction: str) -> Values:
    """`question`, and `answer`: a solution whose last line is `#### 1,234`."""
    solution = Column("answer").text(row)
    answer = solution.rpartition("####")[2].strip().replace(",", "").replace("$", "")
    if "####" not in solution or not re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", answer):
        raise Column("answer").refusal(row, solution[-80:], "a solution that ends in #### NUMBER")
    messages = _asked(Column("question").text(row), instruction)
    return {"messages": messages, "answer": answer, "solution": solution}


def math(row: Row, instruction: str) -> Values:
    r"""`problem`, `solution` with \boxed{answer}, `level` and `type` (MATH-500: `subject`).

    MATH-500 has the `answer` in a column of its own, too.
    """
    solution = Column("solution").text(row)
    answer = row.values.get("answer")
    if answer is None and not (answer := (last_boxed(solution) or "").strip()):
        raise Column("solution").refusal(row, solution[-80:], r"a solution with \boxed{ANSWER}")
    level = re.search("[0-9]", str(row.values.get("level")))  # "Level 5", "Level ?", or 5
    return {
        "messages": _asked(Column("problem").text(row), instruction),
        "answer": str(answer),
        "solution": solution,
        "subject": row.values.get("type") or row.values.get("subject"),
        "level": int(level[0]) if level else None,
    }


def dapo(row: Row, instruction: str) -> Values:
    """`prompt`, a list of messages with its own instruction, and `reward_model.ground_truth`."""
    reward_model = Column("reward_model").of(row)
    truth = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
    if not isinstance(truth, str) or not truth:
        allowed = "an object with a ground_truth of text"
        raise Column("reward_model").refusal(row, reward_model, allowed)
    *before, last = chat(row, Column("prompt"))
    messages = [*before, *_asked(last["content"], instruction)]
    return {"messages": messages, "answer": truth, "source": row.values.get("data_source")}


def countdown(row: Row, instruction: str) -> Values:
    """`nums`, whole numbers, and the `target` that they have to make."""
    numbers, target = Column("nums").of(row), Column("target").of(row)
    if not isinstance(numbers, list) or not numbers or {type(n) for n in numbers} != {int}:
        raise Column("nums").refusal(row, numbers, "a list of whole numbers")
    if type(target) is not int:
        raise Column("target").refusal(row, target, "a whole number")
    question = f"Using the numbers {numbers}, make an equation that equals {target}."
    messages = _asked(f"{question} {_NEVER_TWICE}", instruction)
    return {"messages": messages, "answer": str(target), "nums": numbers, "target": target}


def ultrafeedback(row: Row, instruction: str) -> Values:
    """`chosen` and `rejected`, chats that begin with the same prompt, and the score of each.

    The margin is `score_chosen - score_rejected`, where both are there.
    """
    scores = [row.values.get(name) for name in ("score_chosen", "score_rejected")]
    numbers = [float(score) for score in scores if isinstance(score, int | float)]
    margin = numbers[0] - numbers[1] if len(numbers) == 2 else None
    return _preference(chat(row, Column("chosen")), chat(row, Column("rejected")), margin)


def hh(row: Row, instruction: str) -> Values:
    """`chosen` and `rejected`: texts whose turns begin with `Human:` and `Assistant:`."""
    return _preference(_turns(row, "chosen"), _turns(row, "rejected"), None)


def _asked(question: str, instruction: str) -> list[Message]:
    return [{"role": "user", "content": f"{question}\n{instruction}" if instruction else question}]


def _preference(chosen: list[Message], rejected: list[Message], margin: float | None) -> Values:
    """What both begin with is the prompt, up to where the assistant speaks."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    num_prompt = len(list(same))
    if num_prompt == len(chosen) == len(rejected):
        raise LeftOut("chosen and rejected are the same")
    while num_prompt and chosen[num_prompt - 1]["role"] == "assistant":
        num_prompt -= 1
    answers = chosen[num_prompt:], rejected[num_prompt:]
    if not num_prompt:
        raise LeftOut("chosen and rejected have different prompts")
    for answer in answers:
        roles = [message["role"] for message in answer]
        turns = [("assistant", "user")[turn % 2] for turn in range(len(roles))]
        if len(roles) % 2 == 0 or roles != turns or not all(m["content"] for m in answer):
            raise LeftOut("an answer is empty, or does not alternate with the user")
    prompt = chosen[:num_prompt]
    return {"prompt": prompt, "chosen": answers[0], "rejected": answers[1], "margin": margin}


def _turns(row: Row, name: str) -> list[Message]:
    text = Column(name).text(row)
    before, *parts = re.split(r"\n\n(Human|Assistant):", text)
    if before.strip() or not parts:
        raise Column(name).refusal(row, text, "turns that begin with Human: and Assistant:")
    turns = zip(parts[::2], parts[1::2], strict=True)
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[speaker], "content": said.strip()} for speaker, said in turns]


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
