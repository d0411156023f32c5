"""An update, a sleep and a cancel, and what each does to the caches of a vLLM server.

The server has a tower, a small KV cache and prompts in chunks. The reference is transformers in
float32 on the checkpoints of before and after.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.data.images import ImageStore, ImageTokens, inspect_image
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.inference.protocol import Completion, SamplingParams
from mcore_rl.inference.vllm.server import VLLMServer
from tests import tiny_vision
from tests.e2e.hosting import hosting, run_module
from tests.e2e.test_image_server import PLACEHOLDER, score
from tests.unit.data.test_images import draw

pytestmark = pytest.mark.server

KIND, MAX_TOKENS, BLOCK = "qwen3_vl", 512, 32
NUM_BLOCKS = 24  # of the KV cache: 768 tokens
BLOCK_BYTES = 2 * 2 * 32 * 4 * BLOCK  # layers, keys and values, values of a head, float32
PICTURES = [draw(64, 64), draw(96, 64, "blue"), draw(64, 96, "green")]
LONG = 300  # tokens of a prompt, which takes several steps


@dataclass(frozen=True)
class Vision:
    """A started server with a tower, and what its answers are compared with."""

    server: VLLMServer
    run: Callable[[Any], Any]
    paths: list[str]
    references: list[Any]  # models of transformers
    tokens: ImageTokens
    digests: list[str]

    def load(self, seed: int, **options: bool) -> Awaitable[None]:
        """Load the weights of paths[seed] as the next version."""
        version = self.server.weight_version + 1
        return self.server.load_checkpoint(self.paths[seed], version, **options)

    def take(self, seed: int) -> None:
        self.run(self.load(seed))

    def build_prompt(self, text: str, pictures: Sequence[int]) -> list[int]:
        tokenizer = load_tokenizer(self.paths[0])
        chat = [{"role": "user", "content": PLACEHOLDER * len(pictures) + text}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        return self.tokens.expand(ids, [inspect_image(PICTURES[i], 10**6).size for i in pictures])

    async def submit(
        self, prompt: list[int], pictures: Sequence[int] = (), **sampling: Any
    ) -> list[Completion]:
        settings = {"max_tokens": 8, "temperature": 0.0} | sampling
        images = tuple(self.digests[i] for i in pictures)
        return await self.server.submit(prompt, SamplingParams(images=images, **settings))

    def get_gap(
        self,
        seed: int,
        prompt: list[int],
        completion: Completion,
        pictures: Sequence[int] = (),
        first: int = 0,
    ) -> float:
        """Return the largest difference to the log-probs of references[seed] from a token on."""
        response = completion.token_ids
        if response[-1] in self.tokens.special_ids:
            response = response[:-1]
        ids = [*prompt, *response]
        if pictures:
            images = [PICTURES[i] for i in pictures]
            expected = score(self.references[seed], self.tokens, ids, images)
        else:
            with torch.no_grad():
                logits = self.references[seed](input_ids=torch.tensor([ids])).logits[0]
            labels = torch.tensor(ids[1:])[:, None]
            expected = logits[:-1].log_softmax(-1).gather(1, labels)[:, 0]
        log_probs = torch.tensor(completion.log_probs[: len(response)])
        gaps = (expected[len(prompt) - 1 :] - log_probs).abs()[first:]
        return float(gaps.max()) if len(gaps) else 0.0


@contextlib.contextmanager
def serve(folder: Path, kind: str = KIND, **settings: Any) -> Iterator[Vision]:
    paths = [folder / str(seed) for seed in (0, 1)]
    references = [tiny_vision.save(path, kind, seed) for seed, path in enumerate(paths)]
    tokens, store = ImageTokens.load(paths[0]), ImageStore.open(folder / "images")
    assert tokens is not None
    digests = [store.add(inspect_image(content, 10**6)) for content in PICTURES]
    config = RolloutConfig(
        kv_cache_bytes=NUM_BLOCKS * BLOCK_BYTES,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        engine={"enable_chunked_prefill": True},
        **settings,
    )
    server = VLLMServer(
        str(paths[0]), "float32", MAX_TOKENS, config, 0, timeout_s=120.0, can_sleep=True,
        images_folder=str(folder / "images"),
    )  # fmt: skip
    with hosting(), asyncio.Runner() as runner:
        runner.run(server.start())
        try:
            names = [str(path) for path in paths]
            yield Vision(server, runner.run, names, references, tokens, digests)
        finally:
            runner.run(server.close())


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vision]:
    with serve(tmp_path_factory.mktemp("vision")) as vision:
        yield vision


async def wait_for_tokens(vision: Vision) -> None:
    """Wait until a request that came after the others has had some tokens."""
    await vision.submit([5, 6, 7], max_tokens=5)


@pytest.mark.parametrize("in_flight", [False, True])
def test_picture_seen_again_has_the_embeddings_of_the_new_tower_after_an_update(vision, in_flight):
    vision.take(0)
    prompt = vision.build_prompt("How many?", [0])
    for seed in (0, 1, 0):
        vision.run(vision.load(seed, in_flight=in_flight))
        [completion] = vision.run(vision.submit(prompt, [0]))
        assert vision.get_gap(seed, prompt, completion, [0]) < 1e-4


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_running_pictures_go_on_after_an_update_in_flight(vision, recompute):
    vision.take(0)
    prompt = vision.build_prompt("Tell me all about it." * 3, [0, 1])

    async def work() -> list[list[Completion]]:
        await vision.submit(prompt, [0, 1])  # later ones read it from the prefix cache
        running = [
            asyncio.create_task(vision.submit(prompt, [0, 1], max_tokens=64, temperature=1.0))
            for _ in range(3)
        ]
        await wait_for_tokens(vision)
        await vision.load(1, in_flight=True, recompute_cache=recompute)
        running.append(asyncio.create_task(vision.submit(prompt, [0, 1])))
        return await asyncio.gather(*running)

    version = vision.server.weight_version + 1
    *early, [late] = vision.run(work())
    assert vision.get_gap(1, prompt, late, [0, 1]) < 1e-4
    assert any(set(c.weight_versions) == {version - 1, version} for [c] in early)
    if recompute:
        for [completion] in early:
            first = completion.weight_versions.count(version - 1)
            assert vision.get_gap(1, prompt, completion, [0, 1], first) < 1e-4


def test_pictures_continue_after_a_sleep_where_their_prompts_were_cached(vision):
    vision.take(0)
    prompt = vision.build_prompt("Tell me all about it." * 3, [0, 1])

    async def work() -> list[Completion]:
        await vision.submit(prompt, [0, 1])
        running = asyncio.create_task(
            vision.submit(prompt, [0, 1], n=2, max_tokens=64, temperature=1.0)
        )
        await wait_for_tokens(vision)
        await vision.server.sleep(keep=True)
        await vision.server.wake("weights")
        await vision.load(0)
        await vision.server.wake("kv_cache")
        return await running

    for completion in vision.run(work()):
        assert len(set(completion.weight_versions)) == 2
        assert vision.get_gap(0, prompt, completion, [0, 1]) < 1e-4


def test_requests_with_cached_pictures_continue_after_a_preemption(vision):
    """Twelve requests of about 130 tokens do not fit into 768 at once."""
    vision.take(0)
    prompts = [vision.build_prompt("Tell me more." + str(i) * 40, [0, 1, 2]) for i in range(6)]

    async def work() -> list[list[Completion]]:
        for prompt in prompts:
            await vision.submit(prompt, [0, 1, 2])
        return await asyncio.gather(
            *(
                vision.submit(prompt, [0, 1, 2], max_tokens=150, temperature=1.0, n=2)
                for prompt in prompts
            )
        )

    for prompt, completions in zip(prompts, vision.run(work()), strict=True):
        for completion in completions:
            assert vision.get_gap(0, prompt, completion, [0, 1, 2]) < 1e-4


def test_requests_in_the_queue_read_nothing_that_older_weights_have_cached(vision):
    vision.take(0)
    prompt = [*range(20, 100)]

    async def work() -> list[Completion]:
        running = asyncio.create_task(vision.submit(prompt, n=6, max_tokens=40, temperature=1.0))
        await asyncio.sleep(0.05)
        queued = [asyncio.create_task(vision.submit(prompt)) for _ in range(8)]
        await asyncio.sleep(0.02)
        await vision.load(1, in_flight=True)
        await running
        return [completion for [completion] in await asyncio.gather(*queued)]

    completions = vision.run(work())
    version = vision.server.weight_version
    new = [c for c in completions if set(c.weight_versions) == {version}]
    assert len(new) > 4
    for completion in new:
        assert vision.get_gap(1, prompt, completion) < 1e-4


def test_half_computed_prompt_starts_again_after_an_update_in_flight(vision):
    vision.take(0)
    prompt = [20 + i % 200 for i in range(LONG)]

    async def work() -> list[Completion]:
        running = [asyncio.create_task(vision.submit(prompt[i:])) for i in range(6)]
        await asyncio.sleep(0.03)
        await vision.load(1, in_flight=True)
        return [completion for [completion] in await asyncio.gather(*running)]

    completions = vision.run(work())
    version = vision.server.weight_version
    for index, completion in enumerate(completions):
        if set(completion.weight_versions) == {version}:
            assert vision.get_gap(1, prompt[index:], completion) < 1e-4


@pytest.mark.parametrize("streams", [False, True])
def test_picture_of_a_cancelled_request_is_sent_again(vision, streams):
    vision.take(0)
    prompt = vision.build_prompt("How many?", [1, 2])
    sampling = SamplingParams(
        max_tokens=8, temperature=1.0, n=2, images=tuple(vision.digests[i] for i in (1, 2))
    )

    async def count_streamed() -> int:
        return sum([len(new.token_ids) async for new in vision.server.stream(prompt, sampling)])

    async def work() -> list[Completion]:
        await vision.server._started_engine.reset_mm_cache()
        for _ in range(2):
            cancelled = asyncio.create_task(vision.submit(prompt, [1, 2]))
            for _ in range(10):
                await asyncio.sleep(0)
            time.sleep(0.5)
            cancelled.cancel()
            await asyncio.wait([cancelled])
            assert cancelled.cancelled()
        if streams:
            assert await count_streamed()
        return await vision.server.submit(prompt, sampling)

    for completion in vision.run(work()):
        assert vision.get_gap(0, prompt, completion, [1, 2]) < 1e-4


def test_prompt_of_a_cancelled_request_is_read_from_the_cache(vision):
    vision.take(0)
    prompt = vision.build_prompt("Tell me all about it." * 3, [0, 1])

    async def work() -> list[Completion]:
        cancelled = asyncio.create_task(vision.submit(prompt, [0, 1], max_tokens=200))
        await wait_for_tokens(vision)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        return await vision.submit(prompt, [0, 1], n=4, temperature=1.0)

    for completion in vision.run(work()):
        assert vision.get_gap(0, prompt, completion, [0, 1]) < 1e-4


def test_pixels_are_computed_once_until_a_sleep(vision, monkeypatch):
    """vLLM's front-end has no pixels to add where its cache has the picture."""
    vision.take(0)
    prompt, server = vision.build_prompt("How many?", [0]), vision.server
    vision.run(server._started_engine.reset_mm_cache())
    cache = server._started_engine.renderer.mm_processor_cache
    add, are_new = cache.get_and_update_item, []

    def record(item: Any, digest: str) -> Any:
        are_new.append(item is not None)
        return add(item, digest)

    async def sleep() -> None:
        await server.sleep()
        await server.wake("weights")
        await vision.load(1)
        await server.wake("kv_cache")

    monkeypatch.setattr(cache, "get_and_update_item", record)
    [first] = vision.run(vision.submit(prompt, [0]))
    assert vision.get_gap(0, prompt, first, [0]) < 1e-4
    for change in (vision.load(1), vision.load(1, in_flight=True), sleep()):
        vision.run(change)
        [completion] = vision.run(vision.submit(prompt, [0]))
        assert vision.get_gap(1, prompt, completion, [0]) < 1e-4
    assert are_new == [True, False, False, True]


def test_two_workers_reuse_nothing_of_a_picture_after_an_update_in_flight(tmp_path):
    run_module(__name__, tmp_path)  # its workers are forks, of a process that has run nothing else


def check_two_workers(folder: Path) -> None:
    with serve(folder, tp=2) as vision:
        prompt = vision.build_prompt("Tell me all about it.", [0, 1])

        async def work() -> list[Completion]:
            running = asyncio.create_task(vision.submit(prompt, [0, 1], max_tokens=200))
            await vision.submit(prompt, [0, 1], max_tokens=1)  # so the other one is cached
            await vision.load(1, in_flight=True)
            assert not running.done()
            running.cancel()
            return await vision.submit(prompt, [0, 1], max_tokens=2)

        [completion] = vision.run(work())
        assert vision.get_gap(1, prompt, completion, [0, 1]) < 1e-4


if __name__ == "__main__":
    check_two_workers(Path(sys.argv[1]))
