"""Tables of samples, as parquet, and a short look at some of them on the screen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mcore_rl.config.schema import SampleTablesConfig
from mcore_rl.data.batch import Batch
from mcore_rl.observability.console import show_line
from mcore_rl.workers.checkpointer import tell

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLES, EVALUATIONS = "samples", "evaluations"  # folders in output_dir
_SHOWN = 70  # characters of a prompt or of a response


class SampleTables:
    """Writes them into the output folder. What the disk does not take is told, and left out."""

    def __init__(
        self, folder: Path, tokenizer: PreTrainedTokenizerBase, config: SampleTablesConfig
    ) -> None:
        self._folder, self._tokenizer, self._config = folder, tokenizer, config

    def of_step(self, step: int, batch: Batch) -> None:
        """samples/step_NNNNNN.parquet, where one is due, and samples.num_shown on the screen."""
        every, num_shown = self._config.every, self._config.num_shown
        if every and step % every == 0:
            rows = batch.take(range(min(len(batch), self._config.max_rows or len(batch))))
            self._write(self._folder / SAMPLES / f"step_{step:06d}.parquet", rows)
        for row in range(min(num_shown, len(batch))):
            show_line(self._in_short(batch.take([row])))

    def of_evaluation(self, step: int, name: str, batch: Batch) -> None:
        """evaluations/step_NNNNNN/NAME.parquet, with all samples."""
        self._write(self._folder / EVALUATIONS / f"step_{step:06d}" / f"{name}.parquet", batch)

    def _write(self, path: Path, batch: Batch) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        aside = path.with_name(f".{path.name}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table(self.columns(batch)), aside, compression="zstd")
            aside.replace(path)
        except OSError as error:
            aside.unlink(missing_ok=True)
            tell(f"{path} cannot be written: {error}; the run goes on")

    def columns(self, batch: Batch) -> dict[str, list[object]]:
        """One row a sample: group, prompt, response, reward, reward/PART, reward_error,
        finish_reason, num_tokens (of the response), role (where a loop gives any) and, after
        training, advantage: the mean over the response's tokens.
        """
        found: dict[str, list[object]] = {
            "group": batch.array("group_ids").tolist(),
            "prompt": self._texts(batch, "prompt_ids"),
            "response": self._texts(batch, "response_ids"),
            "reward": batch.array("rewards").tolist(),
            "finish_reason": batch.array("finish_reasons").tolist(),
            "num_tokens": batch.jagged("response_ids").lengths.tolist(),
            "reward_error": batch.array("reward_errors").tolist(),
        }
        if "roles" in batch and (batch.array("roles") != "").any():
            found["role"] = batch.array("roles").tolist()
        for name in batch.columns:
            if name.startswith("reward/"):
                found[name] = batch.array(name).tolist()
        if "advantages" in batch:
            rows, masks = batch.jagged("advantages"), batch.jagged("response_mask")
            found["advantage"] = [
                float(row[mask != 0].mean()) if np.any(mask) else 0.0
                for row, mask in zip(rows, masks, strict=True)
            ]
        return found

    def _texts(self, batch: Batch, name: str) -> list[object]:
        """With special tokens, as the policy reads and writes them."""
        return [self._tokenizer.decode(ids.tolist()) for ids in batch.jagged(name)]

    def _in_short(self, sample: Batch) -> str:
        def plain(name: str) -> str:
            ids = sample.jagged(name)[0].tolist()
            return " ".join(self._tokenizer.decode(ids, skip_special_tokens=True).split())

        prompt, response = plain("prompt_ids")[-_SHOWN:], plain("response_ids")
        if len(response) > _SHOWN:
            response = f"{response[: _SHOWN // 2]} ... {response[-_SHOWN // 2 :]}"
        return f"  sample: reward {sample.array('rewards')[0]:.3f}  {prompt} -> {response}"
