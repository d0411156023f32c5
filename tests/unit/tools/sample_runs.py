"""Runs with tables of samples, made by hand for tests of `mcore-rl samples`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mcore_rl.data.batch import Batch
from mcore_rl.data.sample import Sample, TurnSpan
from mcore_rl.data.sample_tables import (
    build_summary_columns,
    build_token_columns,
    get_table_path,
    write_table,
)

START, END = "<|im_start|>", "<|im_end|>"
SPECIAL = (START, END, "<｜User｜>", "<｜Assistant｜>")  # noqa: RUF001
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>")
ASSISTANT = f"{START}assistant\n"
HOSTILE = "<script>alert(1)</script>\x1b[2J\x1b]0;mine\x07\r\x9b31m\u202e\0&"


def byte_tokenizer() -> Tokenizer:
    """Build a tokenizer in which every byte is a token, so that most characters are several."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([], trainer)
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    return made


BYTES = byte_tokenizer()


def ids(text: str) -> list[int]:
    return BYTES.encode(text, add_special_tokens=False).ids


def sample(
    prompt: str,
    *parts: tuple[str, str],
    version: int = 3,
    untrained: tuple[int, ...] = (),
    **fields,
) -> Sample:
    """Build a sample; parts of the response are ("turn", text) or ("context", text)."""
    response: list[int] = []
    mask: list[int] = []
    spans: list[TurnSpan] = []
    for kind, text in parts:
        token_ids = ids(text)
        if kind == "turn":
            spans.append(TurnSpan(str(len(spans)), len(response), len(response) + len(token_ids)))
        chosen = kind == "turn" and len(spans) - 1 not in untrained
        response += token_ids
        mask += [int(chosen)] * len(token_ids)
    return Sample(
        prompt_ids=ids(prompt),
        response_ids=response,
        response_mask=mask,
        rollout_log_probs=[-1.0 * chosen for chosen in mask],
        weight_versions=[version if chosen else -1 for chosen in mask],
        finish_reason=fields.pop("finish_reason", "stop"),
        turn_spans=tuple(spans),
        **fields,
    )


def trained(samples: list[Sample], gaps: dict[tuple[int, int], float]) -> Batch:
    """Build a batch; log-probs of the trainer differ at (sample, response token)."""
    batch = Batch.collate(samples)
    rows = [row.copy() for row in batch.jagged("rollout_log_probs")]
    for (row, token), gap in gaps.items():
        rows[row][token] -= gap
    column = batch.jagged("rollout_log_probs").with_values(np.concatenate(rows))
    mask = batch.jagged("response_mask")
    advantages = column.with_values(np.where(mask.values, np.float32(0.5), np.float32(0)))
    return batch.with_columns(log_probs=column, advantages=advantages)


def written(run: Path, step: int, batch: Batch, evaluation: str = "") -> Path:
    """Write the folder of a run with the files of a step."""
    (run / "samples").mkdir(parents=True, exist_ok=True)
    (run / "config.json").write_text("{}")
    BYTES.save(str(run / "samples" / "tokenizer.json"))
    columns = build_summary_columns(batch) | build_token_columns(batch)
    write_table(get_table_path(run, step, evaluation), columns, len(batch))
    return run
