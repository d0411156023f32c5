"""Tables of samples, as a run writes them, and a short look at some of them on the screen."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mcore_rl.config.schema import SampleLogConfig
from mcore_rl.controller.batch_ops import near
from mcore_rl.controller.dispatch import Group
from mcore_rl.data.batch import Batch, Samples
from mcore_rl.data.routed_experts import columns_of_experts
from mcore_rl.data.sample_tables import (
    SAMPLES,
    TOKENIZER,
    first_trajectories,
    summary_columns,
    table_path,
    token_columns,
    with_own_log_probs,
    write_table,
)
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.observability.console import show_line
from mcore_rl.trainers.checkpointing import tell

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN = 58  # characters of a prompt or of a response: two rows of a terminal have both


class SampleTables:
    """Writes them into the output folder. What the disk does not take is told, and left out."""

    def __init__(
        self,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        config: SampleLogConfig,
        group: Group | None = None,
    ) -> None:
        """`group`: rank 0 of it writes batches that are not here. It reads the same tokenizer from
        where this one came from.
        """
        self._folder, self._tokenizer, self._config = folder, tokenizer, config
        self._group = group
        self._has_tokens = config.tokens and tokenizer.is_fast
        if config.tokens and not self._has_tokens:
            tell(
                "sample_log.tokens: the tokenizer makes no tokenizer.json; tables have texts alone"
            )

    def of_step(self, step: int, batch: Samples) -> None:
        """samples/step_NNNNNN.parquet, where one is due, and sample_log.num_shown on the screen.

        A table has the first trajectories, as many as sample_log.max_rows and max_tokens let in.
        """
        config, rows = self._config, list[int]()
        if config.every and step % config.every == 0:
            rows = first_trajectories(batch, config.max_rows, config.max_tokens)
        shown = range(min(config.num_shown, len(batch)))
        of_both = rows + [row for row in shown if row not in rows]
        places = [of_both.index(row) for row in shown]
        if of_both:
            path = table_path(self._folder, step)
            for line in self._write(path, batch.take(of_both), len(batch), len(rows), places):
                show_line(f"step {step}: {line}")

    def of_evaluation(self, step: int, name: str, batch: Samples) -> None:
        """evaluations/step_NNNNNN/NAME.parquet, with all samples."""
        self._write(table_path(self._folder, step, name), batch, len(batch), len(batch), [])

    def _write(
        self, path: Path, batch: Samples, num_samples: int, num_rows: int, shown: list[int]
    ) -> list[str]:
        """A table of the first `num_rows`, if there are any; a line for each row that is shown."""
        refused = ""
        if num_rows and self._has_tokens:
            try:
                self._keep_tokenizer()
            except OSError as error:
                refused, num_rows = str(error), 0
        written = self._has_tokens, path, num_samples, num_rows, shown
        found, lines = self._there(_written_and_shown, batch, *written)
        if refused := refused or found:
            tell(f"{path} cannot be written: {refused}; the run goes on")
        return lines

    def _there(self, function: Callable[..., Any], batch: Samples, *args: object) -> Any:
        if isinstance(batch, Batch):
            return function(batch, self._tokenizer, *args)
        assert self._group is not None  # given where there are such batches
        source = self._tokenizer.name_or_path
        names = {*batch.names} - {*columns_of_experts(batch)}
        return near(self._group, _with_tokenizer, batch, function, source, *args, reads=names)

    def _keep_tokenizer(self) -> None:
        """Beside the tables, so that whoever has the folder can read the tokens in them."""
        path = self._folder / SAMPLES / TOKENIZER
        if path.exists():
            return
        aside = path.with_name(f".{path.name}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(self._tokenizer.backend_tokenizer.to_str(), encoding="utf-8")
        aside.replace(path)


@functools.cache
def _tokenizer(path: str) -> PreTrainedTokenizerBase:
    return load_tokenizer(path)


def _with_tokenizer(batch: Batch, function: Callable[..., Any], path: str, *args: object) -> Any:
    return function(batch, _tokenizer(path), *args)


def _written_and_shown(
    batch: Batch,
    tokenizer: PreTrainedTokenizerBase,
    has_tokens: bool,
    path: Path,
    num_samples: int,
    num_rows: int,
    shown: list[int],
) -> tuple[str, list[str]]:
    """Why the disk does not take a table of the first rows, "" if it does; and lines of some."""
    lines, table = _in_short(batch.take(shown), tokenizer), batch.take(range(num_rows))
    try:
        if num_rows:
            write_table(path, table_columns(table, tokenizer, has_tokens), num_samples)
    except OSError as error:
        return str(error), lines
    return "", lines


def table_columns(
    batch: Batch, tokenizer: PreTrainedTokenizerBase, has_tokens: bool
) -> dict[str, pa.Array]:
    """One row a sample: docs/watching.md has what each is."""
    batch = with_own_log_probs(batch)
    found = {
        **summary_columns(batch),
        "prompt": _texts(batch, tokenizer, "prompt_ids"),
        "response": _texts(batch, tokenizer, "response_ids"),
    }
    return found | token_columns(batch) if has_tokens else found


def _texts(batch: Batch, tokenizer: PreTrainedTokenizerBase, name: str) -> pa.Array:
    """With special tokens, as the policy reads and writes them."""
    texts = [tokenizer.decode(ids.tolist()) for ids in batch.jagged(name)]
    return pa.array(texts, pa.string())


def _in_short(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """A line a sample."""

    def plain(name: str, row: int) -> str:
        ids = batch.jagged(name)[row].tolist()
        return " ".join(tokenizer.decode(ids, skip_special_tokens=True).split())

    lines = []
    for row, reward in enumerate(batch.array("rewards")):
        prompt, response = plain("prompt_ids", row), plain("response_ids", row)
        prompt = prompt.removesuffix(" assistant")  # the header of the response
        if len(prompt) > _SHOWN:  # from the beginning of a word on
            end = prompt[-_SHOWN + 4 :]
            prompt = f"... {end.partition(' ')[2] or end}"
        if len(response) > _SHOWN:
            response = f"{response[: _SHOWN // 2]} ... {response[-_SHOWN // 2 :]}"
        lines.append(f"sample, reward {reward:.3f}  {prompt} -> {response}")
    return lines
