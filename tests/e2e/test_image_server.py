"""A server reads images as transformers does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.data.image_files import inspect_image
from mcore_rl.data.images import ImageStore, ImageTokens
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.examples.hf_server import HFServer
from mcore_rl.inference.protocol import (
    Completion,
    GenerationServer,
    SamplingParams,
    ServerSpec,
)
from mcore_rl.inference.vllm.server import VLLMServer
from tests import tiny_vision
from tests.nightly import all_but
from tests.unit.data.test_images import draw

pytestmark = pytest.mark.server
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
IMAGES = draw(64, 64), draw(96, 64, "blue")
CHAT = [
    {"role": "user", "content": f"{PLACEHOLDER}How many?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": f"And {PLACEHOLDER} here?"},
]


def score(model: Any, tokens: ImageTokens, ids: list[int], images: list[bytes]) -> torch.Tensor:
    """Return log-probs of transformers' model, [len(ids) - 1]."""
    sequence = torch.tensor([ids])
    kinds = (sequence == tokens.token_id).int()
    pixels, grids = zip(*map(tokens.compute_pixels, images), strict=True)
    grid = torch.stack(grids)
    places = model.model.get_rope_index(sequence, mm_token_type_ids=kinds, image_grid_thw=grid)[0]
    with torch.no_grad():
        logits = model(
            input_ids=sequence,
            position_ids=places,
            pixel_values=torch.cat(pixels),
            image_grid_thw=grid,
            use_cache=False,
        ).logits[0]
    return logits[:-1].log_softmax(-1).gather(1, sequence[0, 1:, None])[:, 0]


async def generate(
    path: Path, store: Path, server_class: type[GenerationServer]
) -> tuple[list[int], list[Completion]]:
    tokens, tokenizer = ImageTokens.load(path), load_tokenizer(path)
    assert tokens is not None
    images = [inspect_image(content, 10**6) for content in IMAGES]
    digests = [ImageStore.open(store).add(image) for image in images]
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    prompt = tokens.expand(ids, [image.size for image in images])
    config = RolloutConfig(kv_cache_bytes=64 << 20, max_num_seqs=8)
    server = server_class.create(
        ServerSpec(str(path), "float32", 256, config, 0, timeout_s=120.0, images_folder=str(store))
    )
    await server.start()
    try:
        sampling = SamplingParams(n=10, max_tokens=32, seed=1, images=tuple(digests))
        return prompt, await server.submit(prompt, sampling)
    finally:
        await server.close()


@pytest.mark.parametrize("server_class", [VLLMServer, HFServer])
@pytest.mark.parametrize("kind", all_but(["qwen3_vl"], tiny_vision.KINDS))
def test_log_probs_of_two_images_and_two_turns_are_those_of_transformers(
    kind, server_class, tmp_path
):
    model = tiny_vision.save(tmp_path / "model", kind)
    prompt, completions = asyncio.run(
        generate(tmp_path / "model", tmp_path / "images", server_class)
    )
    tokens = ImageTokens.load(tmp_path / "model")
    assert tokens is not None
    for completion in completions:
        num = len(completion.token_ids)
        # A token for an image ends a response, and is read by nothing.
        assert not tokens.special_ids & {*completion.token_ids[:-1]}
        if completion.token_ids[-1] in tokens.special_ids:
            assert completion.finish_reason == "length"
        read = [*prompt, *completion.token_ids]
        ids = [*read[:-1], 0] if read[-1] in tokens.special_ids else read
        expected = score(model, tokens, ids, list(IMAGES))[-num:]
        gaps = (expected - torch.tensor(completion.log_probs)).abs()
        gaps = gaps[:-1] if ids != read else gaps
        assert (gaps < 1e-5).all()
    assert len({tuple(c.token_ids) for c in completions}) == 10
    assert any(len(c.token_ids) < 32 and c.finish_reason == "length" for c in completions)
