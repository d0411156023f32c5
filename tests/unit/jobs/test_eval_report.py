"""What a table of an evaluation says of a response."""

import json

import numpy as np

from mcore_rl.config.schema import ScoringConfig
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.sample import Sample
from mcore_rl.jobs.eval_report import SetSamples


class Tokenizer:
    def decode(self, token_ids):
        return "".join({0: "<end>"}.get(token, f"{token}.") for token in token_ids)


def responses(*answers: tuple[list[int], str], stop=()) -> list[str]:
    prompt = Batch.collate([Sample([5], [1], [1], [0.0], [0], "stop", 0)]).select("prompt_ids")
    prompt = prompt.with_columns(
        group_ids=np.array([0]),
        rows=np.array([0]),
        fields=Jagged.pack_texts([json.dumps({"answer": "1"})]),
    )
    made = [
        Sample([5], ids, [1] * len(ids), [0.0] * len(ids), [0] * len(ids), end, 0)
        for ids, end in answers
    ]
    found = SetSamples.of(prompt, Batch.collate(made), Tokenizer(), None, ScoringConfig(), stop)
    return found.columns["response"]


def test_a_response_is_shown_without_the_token_that_ends_it():
    assert responses(([1, 2, 0], "stop"), ([1, 2], "length")) == ["1.2.", "1.2."]


def test_of_a_response_that_a_stop_string_ends_all_is_text():
    assert responses(([1, 2], "stop"), ([1, 0], "stop"), stop=["2."]) == ["1.2.", "1."]
