"""The last digit of a chain of additions and multiplications, which a tiny model learns in minutes.

Every question has two styles of answer: *direct* (`#### 3`), at which the tiny model stays near
chance, and *worked* (three short equations first), which it learns quickly. Supervised training on
a mixture of both leaves a model that mostly answers directly; reinforcement learning with nothing
but an exact-match reward learns to show the work.

    Start with 5. Add 2. Add 5. Add 4. What is the last digit?
    5+2=7 / 7+5=12 / 2+4=6 / #### 6
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.data.prepared_task import PreparedTask, write_task

NUM_WARM_START = 240 * 96  # rows: the recipe's supervised steps times their batch

Operation = tuple[str, int]  # "+" or "*" and its right-hand side
Problem = tuple[int, tuple[Operation, ...]]  # the digit to start with and what is done to it

_NUM_OPERATIONS = 3
_STARTS = range(1, 10)
# Factors have no divisor in common with 10: each last digit of a product has one factor only.
_OPERATIONS: tuple[Operation, ...] = (
    *(("*", n) for n in (3, 7, 9)),
    *(("+", n) for n in range(2, 10)),
)
_PHRASES = {"+": "Add {}.", "*": "Multiply by {}."}

_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_PROMPT_SCHEMA = pa.schema([("messages", _MESSAGES), ("answer", pa.string())])
_SUPERVISED_SCHEMA = pa.schema([("messages", _MESSAGES), ("response", pa.string())])


def prepare(directory: Path, seed: int, worked_share: float) -> PreparedTask:
    """Make the tokenizer, the untrained model and the data, all determined by the arguments.

    Args:
        directory: See `write_task`.
        seed: Held-out problems are the same for every seed.
        worked_share: Share, in [0, 1], of warm-start answers that show their work.
    """

    def write(paths: PreparedTask) -> None:
        _write_data(paths, seed, worked_share)
        _write_model(paths.model_dir, seed)

    settings = {"task": "last_digit", "seed": seed, "worked_share": worked_share}
    return write_task(directory, settings, write)


def split_problems() -> tuple[list[Problem], list[Problem]]:
    """Return all 11,979 problems as (train, held out), each in a fixed random order.

    A problem is held out by its content, not by a seed.
    """
    chains = itertools.product(_OPERATIONS, repeat=_NUM_OPERATIONS)
    problems = [(start, chain) for chain in chains for start in _STARTS]
    random.Random(0).shuffle(problems)
    train = [p for p in problems if not _is_held_out(p)]
    return train, [p for p in problems if _is_held_out(p)]


def question(problem: Problem) -> str:
    start, chain = problem
    steps = " ".join(_PHRASES[sign].format(n) for sign, n in chain)
    return f"Start with {start}. {steps} What is the last digit?"


def answer(problem: Problem) -> str:
    return worked_response(problem)[-1]


def direct_response(problem: Problem) -> str:
    return f"#### {answer(problem)}"


def worked_response(problem: Problem) -> str:
    """Write an equation per line, from the last digit of the line before, and the answer."""
    digit, chain = problem
    lines = []
    for sign, n in chain:
        result = digit + n if sign == "+" else digit * n
        lines.append(f"{digit}{sign}{n}={result}")
        digit = result % 10
    return "\n".join([*lines, f"#### {digit}"])


def _is_held_out(problem: Problem) -> bool:
    return zlib.crc32(repr(problem).encode()) % 10 == 0


def _build_messages(problem: Problem) -> list[dict[str, str]]:
    return [{"role": "user", "content": question(problem)}]


def _write_data(paths: PreparedTask, seed: int, worked_share: float) -> None:
    train, test = split_problems()
    rng = random.Random(seed)
    prompts = rng.sample(train, len(train))
    drawn = rng.choices(train, k=NUM_WARM_START)
    taught = [
        (p, worked_response if rng.random() < worked_share else direct_response) for p in drawn
    ]
    _write_prompts(paths.train_file, prompts)
    _write_prompts(paths.test_file, test)
    rows = [{"messages": _build_messages(p), "response": respond(p)} for p, respond in taught]
    _write_parquet(paths.warm_start_file, rows, _SUPERVISED_SCHEMA)


def _write_prompts(path: Path, problems: Sequence[Problem]) -> None:
    rows = [{"messages": _build_messages(p), "answer": answer(p)} for p in problems]
    _write_parquet(path, rows, _PROMPT_SCHEMA)


def _write_parquet(path: Path, rows: list[dict[str, Any]], schema: pa.Schema) -> None:
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)


def _write_model(directory: Path, seed: int) -> None:
    from mcore_rl.examples.tasks import tiny_model  # torch and transformers take seconds to import

    # The same problems for every seed, so that every run has the same tokens.
    problems = split_problems()[0][:4000]
    texts = (
        text
        for p in problems
        for text in (f"user\n{question(p)}", f"assistant\n{worked_response(p)}")
    )
    tiny_model.save_checkpoint(directory, tiny_model.train_tokenizer(texts), seed)
