"""Checkpoints and data of against_trl.py, from the output folder of a quickstart."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers

NEVER = "<|never|>"  # end of sequence that no response has: all responses are of the same length


@dataclass(frozen=True)
class Shape:
    """A model and the size of a step."""

    prompts: int
    group_size: int
    optimizer_steps: int  # of a step; with one, neither side needs a log-prob pass
    questions: int  # of the quickstart in a prompt
    max_prompt_tokens: int
    kv_cache_bytes: int  # of the vLLM server
    has_dense_model: bool = False  # random weights, instead of the quickstart's warm start


SHAPES = {
    "quickstart": Shape(64, 8, 2, 1, 64, 80 << 20),
    "dense-70m": Shape(4, 8, 1, 2, 80, 256 << 20, has_dense_model=True),
}


def write_inputs(quickstart: Path, shape: Shape, folder: Path) -> dict[str, Any]:
    """Write the checkpoint and the prompts of a shape under `folder`; return their paths."""
    checkpoint, data = folder / "checkpoint", folder / "train.parquet"
    shutil.copytree(quickstart / "warm_start", checkpoint)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    tokenizer.add_special_tokens({"eos_token": NEVER})
    tokenizer.save_pretrained(checkpoint)
    if shape.has_dense_model:
        vocab_size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
        model = _make_dense_model(vocab_size)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype="float32", trust_remote_code=False
        )
    _exclude_token(model, tokenizer.eos_token_id)
    model.save_pretrained(checkpoint)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((checkpoint / name).read_text())
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        (checkpoint / name).write_text(json.dumps(settings | ends))
    rows = pq.read_table(quickstart / "task" / "train.parquet").to_pylist()
    pq.write_table(pa.Table.from_pylist(_join_questions(rows, shape.questions)), data)
    return {"checkpoint": str(checkpoint), "data": str(data)}


def _make_dense_model(vocab_size: int) -> Any:
    """Make a Qwen3 of 72 M parameters with random weights."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=11,
        num_attention_heads=12,
        num_key_value_heads=6,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        dtype="float32",
    )
    return transformers.Qwen3ForCausalLM(config)


def _exclude_token(model: Any, token: int) -> None:
    """Change a model with an untied output head so that it never samples a token.

    Feature 0 of the residual stream is 1 at every token and in every layer, and only the logit of
    that token reads it: -1000 over the root mean square of the other features.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:  # what layers add to the stream
                weight[..., 0, :] = 0.0
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.model.norm.weight[0] = 1.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[token] = 0.0
        model.lm_head.weight[token, 0] = -1000.0


def _join_questions(rows: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """Join the questions of `size` rows to one prompt, with the answer of the last."""
    return [
        {
            "messages": [{
                "role": "user",
                "content": " ".join(row["messages"][0]["content"] for row in rows[i : i + size]),
            }],
            "answer": rows[i + size - 1]["answer"],
        }
        for i in range(0, len(rows) - size + 1, size)
    ]  # fmt: skip
