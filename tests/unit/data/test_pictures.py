"""The task `pictures`: its images, its rows, and the tiny vision-language model."""

import io
import json
import os
import subprocess
import sys
from collections import Counter

import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers.utils import is_torchvision_available

from mcore_rl.data.prepared_task import PreparedTask
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.examples.tasks.pictures import (
    COLOURS,
    NUM_WARM_START,
    QUESTION,
    SIDE,
    Picture,
    prepare,
    split_pictures,
)
from mcore_rl.rewards.registry import get_reward

SEED, WORKED_SHARE = 3, 0.35
CHAT = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
PROMPT = (
    f"<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{QUESTION}<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> PreparedTask:
    return prepare(tmp_path_factory.mktemp("run") / "task", SEED, WORKED_SHARE)


def read_rows(path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def open_image(row: dict) -> Image.Image:
    return Image.open(io.BytesIO(row["images"][0]["bytes"]))


def read_colour(row: dict) -> str:
    """Return the letter of the colour that the image of a row has beside grey."""
    counts = Counter(open_image(row).get_flattened_data())
    assert len(counts) == 2 and counts.total() == SIDE**2
    (colour,) = [letter for letter, rgb in COLOURS.items() if rgb in counts]
    return colour


def read_files(task: PreparedTask) -> dict[str, bytes]:
    root = task.model_dir.parent
    return {str(f.relative_to(root)): f.read_bytes() for f in root.rglob("*") if f.is_file()}


def test_a_picture_is_a_png_of_a_square_on_grey():
    image = Image.open(io.BytesIO(Picture("C", left=4, top=7, size=12, grey=80).to_png()))
    assert (image.format, image.mode, image.size) == ("PNG", "RGB", (SIDE, SIDE))
    square = [(x, y) for y in range(SIDE) for x in range(SIDE) if image.getpixel((x, y))[0] != 80]
    assert square == [(x, y) for y in range(7, 19) for x in range(4, 16)]
    assert image.getpixel((4, 7)) == COLOURS["C"]


def test_every_square_lies_within_its_picture_and_no_picture_is_on_both_sides():
    train, held_out = split_pictures()
    assert (len(train), len(held_out)) == (2411, 289)
    assert len({*train, *held_out}) == 2700
    for picture in train + held_out:
        assert max(picture.left, picture.top) + picture.size < SIDE
    assert Counter(picture.colour for picture in held_out).keys() == COLOURS.keys()


@pytest.mark.parametrize("name", ["train_file", "test_file", "warm_start_file"])
def test_rows_have_an_image_for_each_placeholder(task, name):
    for row in read_rows(getattr(task, name)):
        assert row["messages"][0] == {"role": "user", "content": f"<image>{QUESTION}"}
        assert len(row["images"]) == 1 and open_image(row).size == (SIDE, SIDE)


@pytest.mark.parametrize("name", ["train_file", "test_file"])
def test_the_answer_is_the_colour_and_earns_the_reward_alone(task, name):
    reward = get_reward("choice", {"letters": "".join(COLOURS)})
    for row in read_rows(getattr(task, name))[::20]:
        assert row["answer"] == read_colour(row)
        earned = {letter: reward(letter, row, "stop")["reward"] for letter in COLOURS}
        assert earned == {letter: float(letter == row["answer"]) for letter in COLOURS}


def test_no_held_out_image_is_in_another_file(task):
    held_out, train, warm_start = (
        {row["images"][0]["bytes"] for row in read_rows(path)}
        for path in (task.test_file, task.train_file, task.warm_start_file)
    )
    assert not held_out & train
    assert warm_start <= train


@pytest.mark.parametrize("worked_share", [0.0, WORKED_SHARE, 1.0])
def test_worked_share_is_the_share_of_answers_that_look(tmp_path, worked_share):
    rows = read_rows(prepare(tmp_path / "task", SEED, worked_share).warm_start_file)
    assert len(rows) == NUM_WARM_START
    assert {len(row["messages"]) for row in rows} == {2}
    right = sum(row["messages"][1]["content"] == read_colour(row) for row in rows[::8])
    expected = worked_share + (1 - worked_share) / len(COLOURS)
    assert right / len(rows[::8]) == pytest.approx(expected, abs=0.05)


def test_held_out_pictures_do_not_depend_on_the_seed(task, tmp_path):
    actual, expected = read_files(prepare(tmp_path / "task", SEED + 1, 0.35)), read_files(task)
    differ = {name for name in expected if actual[name] != expected[name]}
    seeded = {"task.json", "train.parquet", "warm_start.parquet", "model/model.safetensors"}
    assert differ == seeded


@pytest.mark.job
def test_the_same_seed_writes_the_same_bytes_in_another_process(task, tmp_path):
    code = (
        "import sys; from pathlib import Path; "
        "from mcore_rl.examples.tasks.pictures import prepare; "
        f"prepare(Path(sys.argv[1]), {SEED}, {WORKED_SHARE})"
    )
    directory = tmp_path / "task"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    subprocess.run([sys.executable, "-c", code, str(directory)], check=True, env=environment)
    expected = read_files(task)
    again = {name: (directory / name).read_bytes() for name in expected}
    assert again == expected
    assert len(list(directory.rglob("*"))) == len(list(task.model_dir.parent.rglob("*")))


def test_making_the_model_leaves_the_random_state_alone(tmp_path):
    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)
    prepare(tmp_path / "task", SEED, WORKED_SHARE)
    assert torch.equal(torch.rand(1), expected)


def test_an_image_is_one_marker_of_the_prompt_and_each_letter_a_token(task):
    tokenizer = load_tokenizer(task.model_dir)
    assert tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False) == PROMPT
    text = [{"role": "user", "content": QUESTION}]
    assert QUESTION in tokenizer.apply_chat_template(text, tokenize=False)
    config = json.loads((task.model_dir / "config.json").read_text())
    assert tokenizer.encode(PROMPT).count(config["image_token_id"]) == 1
    for letter in COLOURS:
        (token,) = tokenizer.encode(letter)
        assert tokenizer.decode([token, config["image_token_id"]], skip_special_tokens=True) == (
            letter
        )


def test_transformers_loads_the_model_and_its_answer_depends_on_the_image(task):
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(task.model_dir)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert sum(p.numel() for p in model.parameters()) == 392_320
    images = AutoImageProcessor.from_pretrained(task.model_dir, backend="pil")
    pictures = [Picture(colour, 4, 4, 18, 40) for colour in "RB"]
    inputs = images(
        [Image.open(io.BytesIO(picture.to_png())) for picture in pictures], return_tensors="pt"
    )
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 4]] * 2
    prompt = PROMPT.replace("<|image_pad|>", "<|image_pad|>" * 4)
    ids = torch.tensor([load_tokenizer(task.model_dir).encode(prompt)] * 2)
    kinds = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        red, blue = model(input_ids=ids, mm_token_type_ids=kinds, **inputs).logits[:, -1]
    assert (red - blue).abs().max() > 1e-3


@pytest.mark.skipif(not is_torchvision_available(), reason="needs torchvision")
def test_transformers_loads_the_processor(task):
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(task.model_dir)
    text = processor.apply_chat_template(CHAT, add_generation_prompt=True)
    image = Image.open(io.BytesIO(Picture("R", 4, 4, 18, 40).to_png()))
    inputs = processor(text=[text], images=[image], return_tensors="pt")
    assert (inputs["input_ids"] == processor.image_token_id).sum() == 4
