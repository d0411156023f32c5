"""The digest of rows tells other rows from the same ones, in any file and in any process."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_rl.config.schema import ConversationsConfig, DataConfig, PairsConfig
from mcore_rl.data.datasets import load_prompts
from mcore_rl.data.examples import load_conversations, load_pairs
from mcore_rl.data.files import Digest
from mcore_rl.examples.tasks import tiny_model

ROWS = [
    {"messages": [{"role": "user", "content": f"Add {i} and 1."}], "answer": str(i), "level": i}
    for i in range(4)
]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_model.train_tokenizer(["user\nAdd 1 and 2.", "assistant\n#### 3"] * 20)


def jsonl(folder: Path, rows: list) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_equal_rows_of_any_source_have_one_digest(tmp_path, tokenizer):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet", row_group_size=3)
    (tmp_path / "mine.py").write_text(f"def rows():\n    yield from {ROWS!r}\n")
    sources = [jsonl(tmp_path, ROWS), tmp_path / "rows.parquet", f"{tmp_path}/mine.py:rows"]
    digests = {load_prompts(source, DataConfig(), tokenizer).digest for source in sources}
    assert len(digests) == 1


def changed(change) -> list:
    rows = copy.deepcopy(ROWS)
    return change(rows) or rows


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[2]["messages"][0].update(content="Add 2 and 2."),
        lambda rows: rows[2].update(answer="9"),
        lambda rows: rows[2].update(level=7),
        lambda rows: rows[::-1],
        lambda rows: rows[:3],
        lambda rows: [*rows, rows[0]],
    ],
    ids=["prompt", "answer", "another column", "order", "fewer", "more"],
)
def test_other_rows_to_answer_have_another_digest(tmp_path, tokenizer, change):
    before = load_prompts(jsonl(tmp_path, ROWS), DataConfig(), tokenizer).digest
    after = load_prompts(jsonl(tmp_path, changed(change)), DataConfig(), tokenizer).digest
    assert before != after


def test_a_prompt_that_is_left_out_counts_in_the_digest(tmp_path, tokenizer):
    short = DataConfig(max_prompt_tokens=40, long_prompts="drop")
    digests = set()
    for text in ("Add. " * 60, "Sum. " * 60):
        rows = [*ROWS, {**ROWS[0], "messages": [{"role": "user", "content": text}]}]
        prompts = load_prompts(jsonl(tmp_path, rows), short, tokenizer)
        assert prompts.num_dropped == 1
        digests.add(prompts.digest)
    assert len(digests) == 2


def says(text: str, **keys) -> dict:
    return {"role": "assistant", "content": text, **keys}


def test_other_conversations_have_another_digest(tmp_path, tokenizer):
    # Other words, and the same words of which others are trained on.
    request, digests = {"role": "user", "content": "Add 1 and 2."}, []
    for first in (says("3"), says("4"), says("3", train=False)):
        rows = [{"messages": [request, first, request, says("3")]}]
        path = jsonl(tmp_path, rows)
        digests.append(load_conversations(path, ConversationsConfig(), tokenizer).digest)
    assert len(set(digests)) == 3


def test_other_pairs_have_another_digest(tmp_path, tokenizer):
    # Other answers, answers that are exchanged, another margin.
    prompt, digests = [{"role": "user", "content": "Add 1 and 2."}], []
    for chosen, rejected, margin in (("3", "4", 1), ("3", "5", 1), ("4", "3", 1), ("3", "4", 2)):
        row = {"prompt": prompt, "chosen": [says(chosen)], "rejected": [says(rejected)]}
        path = jsonl(tmp_path, [row | {"margin": margin}])
        config = PairsConfig(margin_column="margin")
        digests.append(load_pairs(path, config, tokenizer).digest)
    assert len(set(digests)) == 4


OTHER_PROCESS = """
from mcore_rl.data.files import Digest
class Own: pass
digest = Digest()
digest.add({"set": {"a", "bc", "def"}, "own": Own(), (1, 2): "no key of JSON", "bytes": b"x"})
print(digest.hexdigest())
"""


def test_a_digest_of_sets_and_objects_is_the_same_in_every_process():
    result = {
        subprocess.run(
            [sys.executable, "-c", OTHER_PROCESS],
            env=os.environ | {"PYTHONHASHSEED": str(seed)},
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout
        for seed in (1, 2)
    }  # fmt: skip
    assert len(result) == 1


def test_every_element_of_an_array_counts():
    digests = set()
    for place in (0, 5000, 9999):
        digest, array = Digest(), np.zeros(10_000)
        array[place] = 1
        digest.add({"image": array})
        digests.add(digest.hexdigest())
    assert len(digests) == 3
