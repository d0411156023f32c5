"""Images in conversations: of rows, of tools, of environments and of clients of the API."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError
from PIL import Image

from mcore_rl.agents.chat_template.codec import ChatMessage, ImageCodec, ParsedTurn
from mcore_rl.agents.chat_template.validation import select_codec
from mcore_rl.agents.environments.base import EnvironmentStep
from mcore_rl.agents.runner import AgentRunner
from mcore_rl.agents.single_turn import Prompt, SingleTurnLoop
from mcore_rl.agents.tools.base import tool
from mcore_rl.config.schema import AgentConfig
from mcore_rl.data.image_files import decode_image, inspect_image
from mcore_rl.data.images import ImageStore, ImageTokens
from mcore_rl.data.sample import Sample
from mcore_rl.inference.protocol import Completion, SamplingParams
from tests import tiny_vision
from tests.unit.data.test_images import BLUE, PAD, RED, TURNED, draw, model

__all__ = ["model"]
THIS_FILE = __file__
TOKENIZER = tiny_vision.build_tokenizer()
END = TOKENIZER.eos_token_id
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
DIGESTS = [inspect_image(content, 10**6).digest for content in (RED, BLUE)]


@dataclass
class Policy:
    """Says one text after the other; keeps the prompts and the images of the requests."""

    says: Sequence[str]
    requests: list[tuple[list[int], tuple[str, ...]]] = field(default_factory=list)

    async def submit(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str = ""
    ) -> list[Completion]:
        self.requests.append((prompt_ids, sampling.images))
        ids = [*TOKENIZER.encode(self.says[len(self.requests) - 1]), END]
        return [
            Completion(ids, [-0.5] * len(ids), "stop", [1] * len(ids)) for _ in range(sampling.n)
        ]


async def no_reward(*_: Any) -> None: ...


def build_runner(model: Path, folder: Path, says: Sequence[str], config: AgentConfig):
    tokens, store = ImageTokens.load(model), ImageStore.open(folder)
    assert tokens is not None
    for content in (RED, BLUE):
        store.add(inspect_image(content, 10**6))
    policy = Policy(says)
    runner = AgentRunner(
        policy, TOKENIZER, no_reward, config, 512, stops_on_error=True,
        images=lambda codec: ImageCodec(codec, tokens, store, 3, 10**6),
    )  # fmt: skip
    return runner, policy


def run(model: Path, folder: Path, says: Sequence[str], config: AgentConfig, program: Any = None):
    runner, policy = build_runner(model, folder, says, config)
    if program is not None:
        runner._loop._function = program  # type: ignore[attr-defined]
    messages = [{"role": "user", "content": f"{PLACEHOLDER}?", "images": DIGESTS[:1]}]
    prompt = Prompt([], 3, {}, messages=messages)

    async def run_and_close() -> list[Sample]:
        try:
            async with asyncio.timeout(50):
                return await runner.run_all([prompt], SamplingParams(max_tokens=100, seed=1))
        finally:
            await runner.close()

    return asyncio.run(run_and_close()), policy


@tool
def look() -> object:
    """Looks around."""
    return ["A door:", Image.new("RGB", (96, 64), "blue")]


def call(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'


class Rooms:
    """Shows a picture after the first turn, and is done after the second."""

    tools = ()

    def __init__(self, fields: Any) -> None:
        self._num_turns = 0

    async def reset(self) -> list[ChatMessage]:
        return []

    async def step(self, turn: ParsedTurn) -> EnvironmentStep:
        self._num_turns += 1
        message = ChatMessage("user", "Now <image> here", images=(BLUE,))
        return EnvironmentStep((message,), reward=1.0, is_done=self._num_turns > 1)

    async def close(self) -> None: ...


def check_two_turns(samples: list[Sample], policy: Policy, text: str) -> None:
    """Check a sample of two turns, whose first prompt has RED and whose second BLUE, too."""
    [sample] = samples
    assert [images for _, images in policy.requests] == [(DIGESTS[0],), (*DIGESTS,)]
    assert sample.images == (*DIGESTS,)
    ids = [*sample.prompt_ids, *sample.response_ids]
    assert ids.count(PAD) == 4 + 6
    assert sample.prompt_ids.count(PAD) == 4
    images = zip(sample.response_ids, sample.response_mask, strict=True)
    assert not any(mask for token, mask in images if token == PAD)
    assert text in TOKENIZER.decode(sample.response_ids)
    assert policy.requests[1][0] == ids[: len(policy.requests[1][0])]


def test_an_environment_shows_pictures(model, tmp_path):
    config = AgentConfig(loop="environment", environment=f"{THIS_FILE}:Rooms")
    samples, policy = run(model, tmp_path, ["a", "b"], config)
    image = "<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|>"
    check_two_turns(samples, policy, f"a<|im_end|>\n<|im_start|>user\nNow {image} here<|im_end|>")


def test_a_client_of_the_api_sends_pictures_as_data_urls(model, tmp_path):
    def part(content: bytes) -> dict[str, Any]:
        url = "data:image/png;base64," + base64.b64encode(content).decode()
        return {"type": "image_url", "image_url": {"url": url}}

    async def program(task: Any, base_url: str, api_key: str) -> None:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as ai:
            messages: list[Any] = [
                {"role": "user", "content": [part(RED), {"type": "text", "text": "?"}]}
            ]
            for content in (BLUE, None):
                answer = await ai.chat.completions.create(model="any", messages=messages)
                messages.append(answer.choices[0].message.model_dump(exclude_none=True))
                if content:
                    text = {"type": "text", "text": "And"}
                    messages.append({"role": "user", "content": [text, part(content)]})
            for wrong, reason in (
                (part(b"no image"), "not an image file"),
                ({"type": "image_url", "image_url": {"url": "https://host/a.png"}}, "data:image"),
                ({"type": "input_audio"}, "allowed: text, image_url"),
            ):
                with pytest.raises(BadRequestError, match=reason):
                    await ai.chat.completions.create(
                        model="any", messages=[{"role": "user", "content": [wrong]}]
                    )

    config = AgentConfig(
        loop="program", settings={"function": f"{THIS_FILE}:no_reward"}, max_turns=8
    )
    samples, policy = run(model, tmp_path, ["a", "b"], config, program)
    image = "<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|>"
    check_two_turns(samples, policy, f"a<|im_end|>\n<|im_start|>user\nAnd{image}<|im_end|>")


def run_program(model: Path, folder: Path, says: Sequence[str], program: Any):
    config = AgentConfig(
        loop="program", settings={"function": f"{THIS_FILE}:no_reward"}, max_turns=8
    )
    return run(model, folder, says, config, program)


def test_a_client_with_too_many_pictures_is_refused_and_cut_off(model, tmp_path):
    url = "data:image/png;base64," + base64.b64encode(RED).decode()

    async def program(task: Any, base_url: str, api_key: str) -> None:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as ai:
            for num in (3, 4):
                content = [{"type": "image_url", "image_url": {"url": url}}] * num
                ask = ai.chat.completions.create(
                    model="any", messages=[{"role": "user", "content": content}]
                )
                if num == 3:
                    await ask
                else:
                    with pytest.raises(BadRequestError, match="are more than rollout") as error:
                        await ask
                    assert error.value.code == "context_length_exceeded"

    [sample], _ = run_program(model, tmp_path, ["a"], program)
    assert sample.status == "truncated" and len(sample.images) == 3


def test_a_turn_after_a_sampled_image_token_is_refused_and_cuts_off(model, tmp_path):
    async def program(task: Any, base_url: str, api_key: str) -> None:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as ai:
            messages: list[Any] = [{"role": "user", "content": "?"}]
            answer = await ai.chat.completions.create(model="any", messages=messages)
            messages += [
                answer.choices[0].message.model_dump(exclude_none=True),
                {"role": "user", "content": "and"},
            ]
            with pytest.raises(BadRequestError, match="turn before has tokens for images"):
                await ai.chat.completions.create(model="any", messages=messages)

    [sample], policy = run_program(model, tmp_path, ["a<|image_pad|>", "b"], program)
    assert sample.status == "truncated" and len(policy.requests) == 1


@pytest.mark.parametrize("prompt", ["<|image_pad|>", "x <|video_pad|>", [PAD], [1, PAD, PAD]])
def test_image_tokens_of_a_client_without_their_images_are_refused(prompt, model, tmp_path):
    async def program(task: Any, base_url: str, api_key: str) -> None:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as ai:
            await ai.completions.create(model="any", prompt="x")
            with pytest.raises(BadRequestError, match="stand for images"):
                await ai.completions.create(model="any", prompt=prompt)

    _, policy = run_program(model, tmp_path, ["a"], program)
    assert len(policy.requests) == 1


def test_a_sampled_token_for_an_image_ends_the_trajectory(model, tmp_path):
    config = AgentConfig(loop="environment", environment=f"{THIS_FILE}:Rooms")
    [sample], policy = run(model, tmp_path, ["a<|image_pad|>", "b"], config)
    assert len(policy.requests) == 1
    assert sample.status == "truncated" and sample.images == (DIGESTS[0],)


class Pages(Rooms):
    """Answers with a text that has an image token, and perhaps an image beside it."""

    images: tuple[bytes, ...] = ()

    async def step(self, turn: ParsedTurn) -> EnvironmentStep:
        text = "<image>" * len(self.images) + "a <|image_pad|>"
        return EnvironmentStep((ChatMessage("user", text, images=self.images),))


class IllustratedPages(Pages):
    images = (BLUE,)


@pytest.mark.parametrize("environment", ["Pages", "IllustratedPages"])
def test_an_image_token_in_a_text_cuts_the_trajectory_off(environment, model, tmp_path):
    config = AgentConfig(loop="environment", environment=f"{THIS_FILE}:{environment}")
    [sample], policy = run(model, tmp_path, ["a", "b"], config)
    assert len(policy.requests) == 1
    assert sample.status == "truncated" and sample.images == (DIGESTS[0],)


def test_the_answer_of_a_tool_may_have_pictures(model, tmp_path):
    from mcore_rl.agents.tools.base import ToolSet

    async def answer() -> Any:
        async with ToolSet([look]) as tools:
            return await tools.call("look", {})

    result = asyncio.run(answer())
    assert result.text == "A door:\n<image>"
    assert [inspect_image(i, 10**6).size for i in result.images] == [(96, 64)]


@tool
def photograph() -> object:
    """Opens photographs as they are on a disk."""
    strokes = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    return [*(Image.open(io.BytesIO(turned)) for turned in (TURNED, TURNED)), strokes]


def test_pictures_of_a_tool_are_upright_and_on_white():
    from mcore_rl.agents.tools.base import ToolSet

    async def answer() -> Any:
        async with ToolSet([photograph]) as tools:
            return await tools.call("photograph", {})

    images = asyncio.run(answer()).images
    assert [inspect_image(i, 10**6).size for i in images] == [(32, 96)] * 2 + [(64, 64)]
    assert decode_image(images[2]).getpixel((9, 9)) == (255, 255, 255)


def test_turned_picture_has_the_tokens_of_what_is_seen(model, tmp_path):
    tokens, store = ImageTokens.load(model), ImageStore.open(tmp_path)
    codec = ImageCodec(select_codec(TOKENIZER), tokens, store, 3, 10**6)
    [message] = codec.add_images([ChatMessage("user", "?", images=(TURNED,))])
    ids = codec.render([message])
    _, grid = tokens.compute_pixels(TURNED)
    assert ids.count(PAD) == tokens.count((32, 96)) == tokens.count_in_grid(grid)
    assert grid[1] > grid[2]  # rows and columns


def test_too_many_pictures_cut_a_trajectory_off(model, tmp_path):
    class Gallery(Rooms):
        async def step(self, turn: ParsedTurn) -> EnvironmentStep:
            return EnvironmentStep((ChatMessage("user", "", images=(BLUE, RED)),))

    config = AgentConfig(loop="environment", environment=f"{THIS_FILE}:Rooms", max_turns=5)
    runner, policy = build_runner(model, tmp_path, ["a", "b", "c"], config)
    runner.environment = lambda task: _Opened(Gallery({}))  # type: ignore[method-assign]
    messages = [{"role": "user", "content": "?"}]

    async def generate() -> list[Sample]:
        return await runner.run_all([Prompt([], 0, {}, messages=messages)], SamplingParams(seed=1))

    [sample] = asyncio.run(generate())
    assert [len(images) for _, images in policy.requests] == [0, 2]  # 4 would be more than 3
    assert sample.status == "truncated"
    assert len(sample.images) == 2


class _Opened:
    def __init__(self, value: Any) -> None:
        self._value = value

    async def __aenter__(self) -> Any:
        return self._value

    async def __aexit__(self, *_: object) -> None: ...


def test_a_message_has_a_place_for_each_picture_or_none(model, tmp_path):
    runner, _ = build_runner(model, tmp_path, [], AgentConfig(loop="tools"))
    codec = runner.codec
    [first] = codec.add_images([ChatMessage("user", "x", images=(RED, BLUE))])
    assert first.content == 2 * PLACEHOLDER + "x"
    assert first.images == (*DIGESTS,)
    with pytest.raises(ValueError, match="'user' has 1 <image> for 2 images"):
        codec.add_images([ChatMessage("user", "<image>", images=(RED, BLUE))])
    with pytest.raises(ValueError, match="2 image placeholders in its text for 1 images"):
        codec.render([ChatMessage("user", 2 * PLACEHOLDER, images=(DIGESTS[0],))])
    with pytest.raises(ValueError, match="absolute aspect ratio"):
        codec.add_images([ChatMessage("user", "", images=(draw(1, 300),))])


def test_a_prompt_is_rendered_without_decoding_its_pictures(model, tmp_path):
    runner, _ = build_runner(model, tmp_path, [], AgentConfig(loop="tools"))
    (tmp_path / DIGESTS[1]).write_bytes(BLUE[:60])  # no pixels behind the header
    message = ChatMessage("user", PLACEHOLDER, images=(DIGESTS[1],))
    assert runner.codec.render([message]).count(PAD) == 6


def test_a_single_turn_asks_with_the_pictures_of_its_prompt():
    policy = Policy(["a"])
    loop = SingleTurnLoop(policy, TOKENIZER, no_reward)  # type: ignore[arg-type]
    samples = asyncio.run(loop.run([1, PAD], SamplingParams(n=2), 0, {}, images=(DIGESTS[0],)))
    assert policy.requests == [([1, PAD], (DIGESTS[0],))]
    assert [sample.images for sample in samples] == [(DIGESTS[0],)] * 2
