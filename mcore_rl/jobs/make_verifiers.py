"""The tasks of an environment of verifiers, as rows that mcore-rl trains on."""

from __future__ import annotations

import asyncio
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
    limit: int | None = None  # None: all that there are


def make_verifiers(settings: VerifiersSettings, tasks: TaskRange, output: Path) -> None:
    """One parquet file: each task's prompt as messages, and the task itself as JSON.

    Raises:
        ConfigError: the environment cannot be loaded, a prompt is no text, or `output` exists.
        RunFailed: the file cannot be written. In both cases nothing is left.
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
            made = Path(folder) / output.name
            num_rows = asyncio.run(_written(settings, tasks, made))
            if not num_rows:
                raise ConfigError(f"{settings.environment!r} has no task after --skip={tasks.skip}")
            made.rename(output)
    except BridgeError as error:
        raise ConfigError(f"--environment: {' '.join(str(error).split())}") from error
    except OSError as error:
        raise RunFailed(f"--output={str(output)!r} cannot be written: {error}") from error
    print(f"{output}: {num_rows} tasks of {settings.environment!r}")


async def _written(settings: VerifiersSettings, tasks: TaskRange, path: Path) -> int:
    num_rows = 0
    process = BridgeProcess(settings, max_turns=1)
    try:
        with pq.ParquetWriter(path, _SCHEMA, compression="zstd") as writer:
            async for rows in _read(process, tasks):
                found = [_row(row, number) for number, row in enumerate(rows, num_rows)]
                writer.write_table(pa.Table.from_pylist(found, schema=_SCHEMA))
                num_rows += len(found)
    finally:
        await process.close()
    return num_rows


async def _read(process: BridgeProcess, tasks: TaskRange) -> AsyncIterator[list[dict[str, Any]]]:
    left = tasks.limit
    while left != 0:
        num = GROUP_ROWS if left is None else min(GROUP_ROWS, left)
        found = await process.ask("tasks", skip=tasks.skip, num=num)
        if "error" in found:
            raise ConfigError(f"--environment: its tasks cannot be read: {found['error']}")
        rows: list[dict[str, Any]] = found["tasks"]
        if not rows:
            return
        yield rows
        left = None if left is None else left - len(rows)


def _row(row: dict[str, Any], number: int) -> dict[str, Any]:
    messages = row["messages"]
    if not messages:
        raise ConfigError(f"task {number} has no prompt; allowed: environments that begin with one")
    for message in messages:
        if set(message) != _MESSAGE or not isinstance(message["content"], str):
            raise ConfigError(
                f"task {number} has the message {str(message)[:200]} in its prompt; allowed: text"
            )
    return {"messages": messages, "answer": "", TASK: row[TASK]}
