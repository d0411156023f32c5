"""Write the tiny model and the data of a toy task of several turns."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.agents.chat_template.codec import ChatMessage, ToolSpec
from mcore_rl.data.prepared_task import PreparedTask, write_task

P = TypeVar("P")
NUM_WARM_START = 4800  # conversations; a warm start trains on each several times
_NUM_TEXTS = 1500  # conversations to train the tokenizer on


class ConversationTask(Protocol, Generic[P]):
    """A toy task. `P` is the type of a problem; problems have different reprs."""

    name: str
    tools: Sequence[ToolSpec]

    def problems(self) -> list[P]:
        """Return all problems, in a fixed order without pattern."""

    def question(self, problem: P) -> str:
        """Return the user's question."""

    def fields(self, problem: P) -> Mapping[str, Any]:
        """Return the other columns of its row; `answer` is one."""

    def turns(self, problem: P, is_worked: bool, chance: random.Random) -> list[ChatMessage]:
        """Return the messages after the question, with those of tools or environment.

        Args:
            is_worked: In the style that earns more.
        """


def split_problems(task: ConversationTask[P]) -> tuple[list[P], list[P]]:
    """Split the problems into (train, held out); a tenth is held out, by a hash of the problem."""
    problems = task.problems()
    held_out = [zlib.crc32(repr(problem).encode()) % 10 == 0 for problem in problems]
    pairs = list(zip(problems, held_out, strict=True))
    return [p for p, is_out in pairs if not is_out], [p for p, is_out in pairs if is_out]


def prepare(
    task: ConversationTask[P], directory: Path, seed: int, worked_share: float
) -> PreparedTask:
    """Make the tokenizer, the untrained model and the data, all determined by the arguments.

    Args:
        directory: See `write_task`.
        seed: Held-out problems are the same for every seed.
        worked_share: Share, in [0, 1], of warm-start conversations in the style that earns more.
    """
    settings = {"task": task.name, "seed": seed, "worked_share": worked_share}
    return write_task(directory, settings, lambda paths: _write(task, paths, seed, worked_share))


def build_conversation(
    task: ConversationTask[P], problem: P, is_worked: bool, chance: random.Random
) -> list[ChatMessage]:
    """Return the question of a problem and the messages after it."""
    question = ChatMessage("user", task.question(problem))
    return [question, *task.turns(problem, is_worked, chance)]


def _write(task: ConversationTask[P], paths: PreparedTask, seed: int, worked_share: float) -> None:
    from mcore_rl.examples.tasks import tiny_model  # torch and transformers take seconds to import

    train, test = split_problems(task)
    chance = random.Random(seed)
    _write_prompts(task, paths.train_file, chance.sample(train, len(train)))
    _write_prompts(task, paths.test_file, test)
    warm_start = [
        build_conversation(task, problem, chance.random() < worked_share, chance)
        for problem in chance.choices(train, k=NUM_WARM_START)
    ]
    _write_rows(task, paths.warm_start_file, ({"messages": messages} for messages in warm_start))
    # The same conversations for every seed, so that every run has the same tokens.
    chance = random.Random(0)
    texts = [
        f"{message.role}\n{_format_message(message)}"
        for problem in train[:_NUM_TEXTS]
        for message in build_conversation(task, problem, chance.random() < 0.5, chance)
    ]
    tool_texts = [
        f"system\n{tool.name}({', '.join(_list_parameters(tool))})\n" for tool in task.tools
    ]
    tokenizer = tiny_model.train_tokenizer(
        [*texts, *tool_texts * _NUM_TEXTS], with_tools=bool(task.tools)
    )
    tiny_model.save_checkpoint(paths.model_dir, tokenizer, seed)


def _write_prompts(task: ConversationTask[P], path: Path, problems: Sequence[P]) -> None:
    rows = (
        {"messages": [ChatMessage("user", task.question(problem))], **task.fields(problem)}
        for problem in problems
    )
    _write_rows(task, path, rows)


def _write_rows(task: ConversationTask[P], path: Path, rows: Iterable[dict[str, Any]]) -> None:
    tools = {"tools": [tool.to_dict() for tool in task.tools]} if task.tools else {}
    table = [{**row, "messages": [m.to_dict() for m in row["messages"]], **tools} for row in rows]
    pq.write_table(pa.Table.from_pylist(table), path)


def _list_parameters(tool: ToolSpec) -> list[str]:
    properties: Any = tool.parameters["properties"]
    return list(properties)


def _format_message(message: ChatMessage) -> str:
    calls = (
        json.dumps({"name": call.name, "arguments": dict(call.arguments)})
        for call in message.tool_calls
    )
    return message.content + "".join(calls)
