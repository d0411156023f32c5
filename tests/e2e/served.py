"""The server with one worker that all tests have together which swap weights.

It starts with the weights of the first of two models. A test leaves it on weights of its choice, so
each begins with an update. (parallel_server.py has the one with two workers.)
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1] / "dist_cpu"))

import tiny_families
import tiny_models

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.inference.protocol import Completion, SamplingParams
from mcore_rl.inference.vllm.server import VLLMServer
from tests.e2e.hosting import hosting

EOS, MAX_TOKENS = 1, 256
PROMPT = [3, *range(10, 40)]


class Model:
    """A checkpoint on disk, and transformers' log-probs for it."""

    def __init__(self, folder: Path, config: Any, seed: int) -> None:
        self.reference = tiny_models.build_from(config, seed)
        self.path = str(tiny_families.save_served(self.reference, folder))
        tokenizer().save_pretrained(folder)

    @torch.no_grad()
    def log_probs(
        self, prompt: list[int], response: list[int], temperature: float = 1.0
    ) -> list[float]:
        ids = torch.tensor([prompt + response])
        logits = self.reference(ids).logits[0, len(prompt) - 1 : -1]
        table = (logits / temperature).log_softmax(-1)
        return table[torch.arange(len(response)), response].tolist()

    def gap(self, prompt: list[int], completion: Completion, temperature: float = 1.0) -> float:
        reference = self.log_probs(prompt, completion.token_ids, temperature)
        pairs = zip(completion.log_probs, reference, strict=True)
        return max(abs(a - b) for a, b in pairs)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": EOS, "<bos>": 2}
    words |= {f"w{i}": i for i in range(3, tiny_models.VOCAB)}
    core = Tokenizer(models.WordLevel(words, unk_token="w3"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


@dataclass(frozen=True)
class Served:
    """A started server, a function that runs a coroutine on its event loop, and its models."""

    server: VLLMServer
    run: Callable[[Any], Any]
    models: list[Model]
    first: list[Completion]  # of PROMPT, before any update

    def take(self, seed: int) -> None:
        """Load the weights of models[seed], as the next version."""
        version = self.server.weight_version + 1
        self.run(self.server.load_checkpoint(self.models[seed].path, version))


@contextlib.contextmanager
def serving(config: Any, folder: Path, engine: dict[str, Any] | None = None) -> Iterator[Served]:
    """Yield two models of `config` under `folder`, and a server that starts with the first.

    Args:
        engine: rollout.engine of the server.
    """
    both = [Model(folder / str(seed), config, seed) for seed in (0, 1)]
    rollout = RolloutConfig(max_num_seqs=32, kv_cache_bytes=32 << 20, engine=engine or {})
    server = VLLMServer(both[0].path, "float32", MAX_TOKENS, rollout, seed=0, can_sleep=True)
    with hosting(), asyncio.Runner() as runner:
        runner.run(server.start())
        try:
            first = runner.run(server.submit(PROMPT, SamplingParams(n=2, max_tokens=24)))
            yield Served(server, runner.run, both, first)
        finally:
            runner.run(server.close())
