"""Samples of a run: tables on disk, and some on the screen."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mcore_rl.config.atomic_file import write_file
from mcore_rl.config.schema import SampleLogConfig
from mcore_rl.controller.dispatch import RankGroup
from mcore_rl.data.batch import IMAGES, Batch, Samples
from mcore_rl.data.routed_experts import list_expert_columns
from mcore_rl.data.sample_tables import (
    SAMPLES,
    TOKENIZER,
    build_summary_columns,
    build_token_columns,
    drop_server_log_probs,
    get_table_path,
    select_first_trajectories,
    write_table,
)
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.engine.worker import apply_on_rank_zero
from mcore_rl.observability.console import show_line
from mcore_rl.observability.warnings import warn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN = 58  # characters of a prompt or of a response: two rows of a terminal have both


class SampleLog:
    """Writes samples into the output folder. A table that cannot be written costs a warning."""

    def __init__(
        self,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        config: SampleLogConfig,
        workers: RankGroup | None = None,
    ) -> None:
        """Prepare.

        Args:
            workers: Rank 0 of them writes the tables, where the columns are, with the tokenizer
                loaded from the same path. None: this process writes them.
        """
        self._folder, self._tokenizer, self._config = folder, tokenizer, config
        self._workers = workers
        self._has_tokens = config.tokens and tokenizer.is_fast
        if config.tokens and not self._has_tokens:
            warn(
                "sample_log.tokens: the tokenizer makes no tokenizer.json; tables have texts alone"
            )

    def write_step(self, step: int, batch: Samples) -> None:
        """Write samples/step_NNNNNN.parquet, where it is due; show sample_log.num_shown of them.

        A table has the first trajectories, as many as sample_log.max_rows and max_tokens let in.
        """
        config, rows = self._config, list[int]()
        if config.every and step % config.every == 0:
            rows = select_first_trajectories(batch, config.max_rows, config.max_tokens)
        shown = range(min(config.num_shown, len(batch)))
        selected = rows + [row for row in shown if row not in rows]
        places = [selected.index(row) for row in shown]
        if selected:
            path = get_table_path(self._folder, step)
            for line in self._write(path, batch.take(selected), len(batch), len(rows), places):
                show_line(f"step {step}: {line}")

    def write_evaluation(self, step: int, name: str, batch: Samples) -> None:
        """Write evaluations/step_NNNNNN/NAME.parquet, with all samples."""
        self._write(get_table_path(self._folder, step, name), batch, len(batch), len(batch), [])

    def _write(
        self, path: Path, batch: Samples, num_samples: int, num_rows: int, shown: list[int]
    ) -> list[str]:
        """Write a table of the first `num_rows`, if there are any; return a line for each of
        `shown`.
        """
        refused = ""
        if num_rows and self._has_tokens:
            try:
                self._write_tokenizer()
            except OSError as error:
                refused, num_rows = str(error), 0
        args = self._has_tokens, path, num_samples, num_rows, shown
        if self._workers is None:
            assert isinstance(batch, Batch)  # the workers of a run write those by reference
            error_text, lines = write_and_show(batch, self._tokenizer, *args)
        else:
            columns = batch.drop_columns(*list_expert_columns(batch))
            source = self._tokenizer.name_or_path
            error_text, lines = apply_on_rank_zero(
                self._workers, _load_write_and_show, columns, source, *args
            )
        if refused := refused or error_text:
            warn(f"{path} cannot be written: {refused}; the run goes on")
        return lines

    def _write_tokenizer(self) -> None:
        """Write it beside the tables, so that their tokens can be read."""
        path = self._folder / SAMPLES / TOKENIZER
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, self._tokenizer.backend_tokenizer.to_str())


@functools.cache
def _load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    return load_tokenizer(path, needs_template=False)


def _load_write_and_show(batch: Batch, path: str, *args: Any) -> tuple[str, list[str]]:
    return write_and_show(batch, _load_tokenizer(path), *args)


def write_and_show(
    batch: Batch,
    tokenizer: PreTrainedTokenizerBase,
    has_tokens: bool,
    path: Path,
    num_samples: int,
    num_rows: int,
    shown: list[int],
) -> tuple[str, list[str]]:
    """Write a table of the first rows; return why the disk refused, or "", and lines of `shown`."""
    lines, table = _format_lines(batch.take(shown), tokenizer), batch.take(range(num_rows))
    try:
        if num_rows:
            write_table(path, build_table(table, tokenizer, has_tokens), num_samples)
    except OSError as error:
        return str(error), lines
    return "", lines


def build_table(
    batch: Batch, tokenizer: PreTrainedTokenizerBase, has_tokens: bool
) -> dict[str, pa.Array]:
    """Return the columns of a table, one row a sample (docs/watching.md)."""
    batch = drop_server_log_probs(batch)
    columns = {
        **build_summary_columns(batch),
        "prompt": _decode(batch, tokenizer, "prompt_ids"),
        "response": _decode(batch, tokenizer, "response_ids"),
    }
    return columns | build_token_columns(batch) if has_tokens else columns


def _decode(batch: Batch, tokenizer: PreTrainedTokenizerBase, name: str) -> pa.Array:
    """Decode with special tokens, as the policy reads and writes them."""
    texts = [tokenizer.decode(ids.tolist()) for ids in batch.jagged(name)]
    return pa.array(texts, pa.string())


def _format_lines(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return a line for each sample."""

    def decode(name: str, row: int) -> str:
        ids = batch.jagged(name)[row].tolist()
        return " ".join(tokenizer.decode(ids, skip_special_tokens=True).split())

    lines = []
    for row, reward in enumerate(batch.array("rewards")):
        prompt, response = decode("prompt_ids", row), decode("response_ids", row)
        prompt = prompt.removesuffix(" assistant")  # the header of the response
        if num_images := len(batch.array(IMAGES)[row].split()) if IMAGES in batch else 0:
            prompt = f"[{num_images} image{'s' * (num_images > 1)}] {prompt}"
        if len(prompt) > _SHOWN:  # from the beginning of a word on
            end = prompt[-_SHOWN + 4 :]
            prompt = f"... {end.partition(' ')[2] or end}"
        if len(response) > _SHOWN:
            response = f"{response[: _SHOWN // 2]} ... {response[-_SHOWN // 2 :]}"
        lines.append(f"sample, reward {reward:.3f}  {prompt} -> {response}")
    return lines
