"""`mcore-rl data verifiers`: the tasks of a verifiers environment as training rows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.agents.verifiers.loop import TASK
from mcore_rl.agents.verifiers.process import BridgeError, BridgeProcess, VerifiersSettings
from mcore_rl.config.checks import check_at_least
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.event_loop import run_coroutine
from mcore_rl.jobs.failure import RunFailed
from mcore_rl.jobs.make_data import GROUP_ROWS

_MESSAGE = {"role", "content"}
_SCHEMA = pa.schema(
    {
        "messages": pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])),
        "answer": pa.string(),
        TASK: pa.string(),
    }
)


@dataclass(frozen=True, slots=True)
class TaskRange:
    skip: int = 0
    limit: int | None = None  # None: all tasks


def make_verifiers(settings: VerifiersSettings, tasks: TaskRange, output: Path) -> None:
    """Write one parquet file with the prompt of each task as messages, and the task as JSON.

    Raises:
        ConfigError: The environment cannot be loaded, a prompt is no text, or `output` exists.
        RunFailed: The file cannot be written. In both cases nothing is left.
    """
    check_at_least("--skip", tasks.skip, 0)
    if tasks.limit is not None:
        check_at_least("--limit", tasks.limit, 1)
    if output.suffix != ".parquet" or output.exists() or not output.parent.is_dir():
        raise ConfigError(
            f"--output={str(output)!r}; allowed: a new file in a folder that there is, NAME.parquet"
        )
    try:
        with TemporaryDirectory(dir=output.parent, prefix=".", suffix=".partial") as folder:
            file = Path(folder) / output.name
            num_rows = run_coroutine(_write_tasks(settings, tasks, file))
            if not num_rows:
                raise ConfigError(f"{settings.environment!r} has no task after --skip={tasks.skip}")
            file.rename(output)
    except BridgeError as error:
        raise ConfigError(f"--environment: {' '.join(str(error).split())}") from error
    except OSError as error:
        raise RunFailed(f"--output={str(output)!r} cannot be written: {error}") from error
    print(f"{output}: {num_rows} tasks of {settings.environment!r}")


async def _write_tasks(settings: VerifiersSettings, tasks: TaskRange, path: Path) -> int:
    """Write the tasks to a parquet file; return their number."""
    num_rows = 0
    process = BridgeProcess(settings, max_turns=1)
    try:
        with pq.ParquetWriter(path, _SCHEMA, compression="zstd") as writer:
            async for group in _read_tasks(process, tasks):
                rows = [_convert_task(task, number) for number, task in enumerate(group, num_rows)]
                writer.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA))
                num_rows += len(rows)
    finally:
        await process.close()
    return num_rows


async def _read_tasks(
    process: BridgeProcess, tasks: TaskRange
) -> AsyncIterator[list[dict[str, Any]]]:
    """Yield the tasks in groups of up to GROUP_ROWS."""
    left = tasks.limit
    while left != 0:
        num = GROUP_ROWS if left is None else min(GROUP_ROWS, left)
        reply = await process.ask("tasks", skip=tasks.skip, num=num)
        if "error" in reply:
            raise ConfigError(f"--environment: its tasks cannot be read: {reply['error']}")
        group: list[dict[str, Any]] = reply["tasks"]
        if not group:
            return
        yield group
        left = None if left is None else left - len(group)


def _convert_task(task: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the row of a task; check that its prompt is text."""
    messages = task["messages"]
    if not messages:
        raise ConfigError(f"task {number} has no prompt; allowed: environments that begin with one")
    for message in messages:
        if set(message) != _MESSAGE or not isinstance(message["content"], str):
            raise ConfigError(
                f"task {number} has the message {str(message)[:200]} in its prompt; allowed: text"
            )
    return {"messages": messages, "answer": "", TASK: task[TASK]}
