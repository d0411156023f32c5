"""Tables of samples, as a run writes them, and a short look at some of them on the screen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from mcore_rl.config.schema import SampleTablesConfig
from mcore_rl.data.batch import Batch
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
from mcore_rl.observability.console import show_line
from mcore_rl.workers.checkpointer import tell

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN = 70  # characters of a prompt or of a response


class SampleTables:
    """Writes them into the output folder. What the disk does not take is told, and left out."""

    def __init__(
        self, folder: Path, tokenizer: PreTrainedTokenizerBase, config: SampleTablesConfig
    ) -> None:
        self._folder, self._tokenizer, self._config = folder, tokenizer, config
        self._has_tokens = config.tokens and tokenizer.is_fast
        if config.tokens and not self._has_tokens:
            tell("samples.tokens: the tokenizer makes no tokenizer.json; tables have texts alone")

    def of_step(self, step: int, batch: Batch) -> None:
        """samples/step_NNNNNN.parquet, where one is due, and samples.num_shown on the screen.

        A table has the first trajectories, as many as samples.max_rows and max_tokens let in.
        """
        config = self._config
        if config.every and step % config.every == 0:
            rows = first_trajectories(batch, config.max_rows, config.max_tokens)
            kept = with_own_log_probs(batch).take(rows)
            self._write(table_path(self._folder, step), kept, len(batch))
        for row in range(min(config.num_shown, len(batch))):
            show_line(self._in_short(batch.take([row])))

    def of_evaluation(self, step: int, name: str, batch: Batch) -> None:
        """evaluations/step_NNNNNN/NAME.parquet, with all samples."""
        self._write(table_path(self._folder, step, name), batch, len(batch))

    def _write(self, path: Path, batch: Batch, num_samples: int) -> None:
        try:
            if self._has_tokens:
                self._keep_tokenizer()
            write_table(path, self.columns(batch), num_samples)
        except OSError as error:
            tell(f"{path} cannot be written: {error}; the run goes on")

    def _keep_tokenizer(self) -> None:
        """Beside the tables, so that whoever has the folder can read the tokens in them."""
        path = self._folder / SAMPLES / TOKENIZER
        if path.exists():
            return
        aside = path.with_name(f".{path.name}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(self._tokenizer.backend_tokenizer.to_str(), encoding="utf-8")
        aside.replace(path)

    def columns(self, batch: Batch) -> dict[str, pa.Array]:
        """One row a sample: docs/watching.md has what each is."""
        found = {
            **summary_columns(batch),
            "prompt": self._texts(batch, "prompt_ids"),
            "response": self._texts(batch, "response_ids"),
        }
        return found | token_columns(batch) if self._has_tokens else found

    def _texts(self, batch: Batch, name: str) -> pa.Array:
        """With special tokens, as the policy reads and writes them."""
        texts = [self._tokenizer.decode(ids.tolist()) for ids in batch.jagged(name)]
        return pa.array(texts, pa.string())

    def _in_short(self, sample: Batch) -> str:
        def plain(name: str) -> str:
            ids = sample.jagged(name)[0].tolist()
            return " ".join(self._tokenizer.decode(ids, skip_special_tokens=True).split())

        prompt, response = plain("prompt_ids")[-_SHOWN:], plain("response_ids")
        if len(response) > _SHOWN:
            response = f"{response[: _SHOWN // 2]} ... {response[-_SHOWN // 2 :]}"
        return f"  sample: reward {sample.array('rewards')[0]:.3f}  {prompt} -> {response}"
