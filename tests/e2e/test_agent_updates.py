"""An episode of several turns on a real server whose weights change between its turns.

The environment is scripted and updates the server while it is asked. What the sample has to be is
written by hand: the text that the chat template puts around the turns, and for each turn the
log-probs of transformers with the weights of that turn.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mcore_rl.agents.chat_template.codec import ChatMessage, ParsedTurn, ToolSpec
from mcore_rl.agents.environments.base import EnvironmentStep
from mcore_rl.agents.runner import AgentRunner
from mcore_rl.agents.single_turn import Prompt
from mcore_rl.config.schema import AgentConfig
from mcore_rl.data.sample import Sample, TurnSpan
from mcore_rl.inference.protocol import Completion, Generator, SamplingParams
from tests.e2e.served import EOS, MAX_TOKENS, Served
from tests.unit.agents.families import template_of

pytestmark = pytest.mark.server

END = "<|im_end|>"
TURN_TOKENS = 48  # three turns are longer than a block of the prefix cache
GO = "\n<|im_start|>assistant\n"
QUESTION_TEXT = f"<|im_start|>user\nAdd.{END}{GO}"
# What follows the end of the first turn, and of the second one.
BETWEEN = (
    f"\n<|im_start|>user\n<tool_response>\n4\n</tool_response>{END}{GO}",
    f"\n<|im_start|>user\nAnd?{END}{GO}",
)


def tokenizer_of_characters() -> PreTrainedTokenizerFast:
    """Build a tokenizer of as many tokens as the served model has, whose end ends a turn."""
    special = ["<unk>", END, "<|im_start|>", "<tool_call>", "</tool_call>"]
    special += ["<tool_response>", "</tool_response>"]
    assert special[EOS] == END
    tokens = special + [c for c in string.printable + "üßïé東京🌊½Ω" if c not in "\r\x0b\x0c\t"]
    tokens += [f"<unused {number}>" for number in range(131 - len(tokens))]
    core = Tokenizer(models.WordLevel(dict(zip(tokens, range(131), strict=True)), "<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        chat_template=template_of("published/qwen3-2507"),
    )


class Updating:
    """Gives the server other weights after the first turn and after the second one."""

    tools: Sequence[ToolSpec] = ()

    def __init__(self, fields: dict[str, Any]) -> None:
        self._served: Served = fields["served"]
        self._turns = 0

    async def reset(self) -> Sequence[ChatMessage]:
        return []

    async def step(self, turn: ParsedTurn) -> EnvironmentStep:
        self._turns += 1
        if self._turns == 3:
            return EnvironmentStep(reward=1.0, is_done=True)
        server, models = self._served.server, self._served.models
        await server.load_checkpoint(models[self._turns % 2].path, server.weight_version + 1)
        says = ChatMessage("tool", "4", name="add") if self._turns == 1 else None
        return EnvironmentStep((says or ChatMessage("user", "And?"),), reward=0.5)

    async def close(self) -> None:
        pass


@dataclass
class Recording:
    """The server, and what it has been asked and has answered."""

    server: Generator
    seen: list[tuple[list[int], Completion]] = field(default_factory=list)

    def start_together(self) -> AbstractAsyncContextManager[None]:
        return self.server.start_together()

    async def submit(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> list[Completion]:
        completions = await self.server.submit(prompt_ids, sampling, request_id=request_id)
        self.seen += [(prompt_ids, completion) for completion in completions]
        return completions


async def no_reward(*_: object) -> None:
    raise AssertionError("the rewards are the environment's")


@dataclass(frozen=True)
class Episode:
    sample: Sample
    seen: list[tuple[list[int], Completion]]
    version: int  # of its first turn
    tokenizer: PreTrainedTokenizerFast

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module")
def episode(shared_server: Served) -> Episode:
    shared_server.take(0)
    version, recording = shared_server.server.weight_version, Recording(shared_server.server)
    config = AgentConfig(
        "environment", environment=f"{__file__}:Updating", max_turn_tokens=TURN_TOKENS
    )
    tokenizer = tokenizer_of_characters()
    runner = AgentRunner(recording, tokenizer, no_reward, config, MAX_TOKENS, stops_on_error=True)
    conversation = [{"role": "user", "content": "Add."}]
    prompt = Prompt([], 0, {"served": shared_server}, messages=conversation)
    sampling = SamplingParams(n=1, seed=5, max_tokens=MAX_TOKENS)
    [sample] = shared_server.run(runner.run_all([prompt], sampling))
    return Episode(sample, recording.seen, version, tokenizer)


def test_ids_masks_and_versions_are_those_written_by_hand(episode):
    ids, mask, versions, spans = [], [], [], []
    for turn, (prompt, completion) in enumerate(episode.seen):
        assert prompt == episode.ids(QUESTION_TEXT) + ids
        spans.append(TurnSpan(str(turn), len(ids), len(ids) + len(completion.token_ids)))
        ends = completion.token_ids[-1] == EOS
        assert completion.finish_reason == ("stop" if ends else "length")
        between = [] if turn == 2 else episode.ids(("" if ends else END) + BETWEEN[turn])
        ids += completion.token_ids + between
        mask += [1] * len(completion.token_ids) + [0] * len(between)
        versions += [episode.version + turn] * len(completion.token_ids) + [-1] * len(between)
    sample = episode.sample
    assert (sample.prompt_ids, sample.response_ids) == (episode.ids(QUESTION_TEXT), ids)
    assert (sample.response_mask, sample.weight_versions) == (mask, versions)
    assert sample.turn_spans == tuple(spans) and len(spans) == 3
    assert (sample.status, sample.reward) == ("finished", 2.0)
    assert mask.count(0) > 20 and len(sample.prompt_ids) + len(ids) > 128


def test_log_probs_of_each_turn_are_those_of_transformers_with_its_weights(episode, shared_server):
    sample, gaps, of_others = episode.sample, [], []
    for turn, span in enumerate(sample.turn_spans):
        before = sample.prompt_ids + sample.response_ids[: span.start]
        turn_ids = sample.response_ids[span.start : span.end]
        served = sample.rollout_log_probs[span.start : span.end]
        for model, into in ((turn % 2, gaps), (1 - turn % 2, of_others)):
            expected = shared_server.models[model].log_probs(before, turn_ids)
            into.append(max(abs(a - b) for a, b in zip(served, expected, strict=True)))
    assert max(gaps) < 1e-4
    assert min(of_others) > 0.01  # guards: the weights of another turn are told apart
    context = [
        p for p, m in zip(sample.rollout_log_probs, sample.response_mask, strict=True) if not m
    ]
    assert set(context) == {0.0}
