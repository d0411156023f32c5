"""Pictures of a coloured square, whose colour a tiny vision-language model learns to name.

Each picture has a square of one of six colours at some place on grey. The answer is the first
letter of the colour. Supervised examples name the colour in some pictures, and a random colour in
others, so that the trained model mostly guesses; reinforcement learning with nothing but the
reward `choice` learns to look.
"""

from __future__ import annotations

import io
import itertools
import random
import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.data.prepared_task import PreparedTask, write_task

SIDE = 32  # pixels of a picture
COLOURS = {
    "R": (220, 40, 40),  # red
    "G": (40, 190, 40),  # green
    "B": (50, 60, 220),  # blue
    "Y": (230, 220, 40),  # yellow
    "C": (40, 210, 220),  # cyan
    "M": (210, 40, 210),  # magenta
}
QUESTION = "Colour of the square: R, G, B, Y, C or M?"
NUM_WARM_START = 120 * 48  # rows: the recipe's supervised steps times their batch

_SIZES = (12, 15, 18)  # pixels of a side of the square
_OFFSETS = range(1, 14, 3)  # pixels from the left or from the top
_GREYS = range(0, 240, 40)

_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_IMAGES = pa.list_(pa.struct([("bytes", pa.binary())]))
_PROMPT_SCHEMA = pa.schema([("messages", _MESSAGES), ("images", _IMAGES), ("answer", pa.string())])
_SUPERVISED_SCHEMA = pa.schema([("messages", _MESSAGES), ("images", _IMAGES)])


@dataclass(frozen=True, slots=True)
class Picture:
    """A square on grey."""

    colour: str  # of COLOURS
    left: int
    top: int
    size: int
    grey: int  # of the background, 0 to 255

    def to_png(self) -> bytes:
        """Draw the picture; return its PNG file."""
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (SIDE, SIDE), (self.grey,) * 3)
        right, bottom = self.left + self.size - 1, self.top + self.size - 1
        corners = (self.left, self.top, right, bottom)
        ImageDraw.Draw(image).rectangle(corners, fill=COLOURS[self.colour])
        file = io.BytesIO()
        image.save(file, "PNG")
        return file.getvalue()


def prepare(directory: Path, seed: int, worked_share: float) -> PreparedTask:
    """Make the tokenizer, the untrained model and the data, all determined by the arguments.

    Args:
        directory: See `write_task`.
        seed: Held-out pictures are the same for every seed.
        worked_share: Share, in [0, 1], of warm-start answers that name the colour; the others name
            any of the six.
    """

    def write(paths: PreparedTask) -> None:
        _write_data(paths, seed, worked_share)
        _write_model(paths.model_dir, seed)

    settings = {"task": "pictures", "seed": seed, "worked_share": worked_share}
    return write_task(directory, settings, write)


def split_pictures() -> tuple[list[Picture], list[Picture]]:
    """Return all 2,700 pictures as (train, held out), each in a fixed random order.

    A picture is held out by its content, not by a seed.
    """
    choices = itertools.product(COLOURS, _OFFSETS, _OFFSETS, _SIZES, _GREYS)
    pictures = [Picture(*choice) for choice in choices]
    random.Random(0).shuffle(pictures)
    train = [picture for picture in pictures if not _is_held_out(picture)]
    return train, [picture for picture in pictures if _is_held_out(picture)]


def _is_held_out(picture: Picture) -> bool:
    return zlib.crc32(repr(astuple(picture)).encode()) % 10 == 0


def _write_data(paths: PreparedTask, seed: int, worked_share: float) -> None:
    train, held_out = split_pictures()
    chance = random.Random(seed)
    _write_prompts(paths.train_file, chance.sample(train, len(train)))
    _write_prompts(paths.test_file, held_out)
    rows = []
    for picture in chance.choices(train, k=NUM_WARM_START):
        is_worked = chance.random() < worked_share
        answer = picture.colour if is_worked else chance.choice(list(COLOURS))
        row = _build_row(picture)
        row["messages"].append({"role": "assistant", "content": answer})
        rows.append(row)
    _write_parquet(paths.warm_start_file, rows, _SUPERVISED_SCHEMA)


def _write_prompts(path: Path, pictures: Sequence[Picture]) -> None:
    rows = [_build_row(picture) | {"answer": picture.colour} for picture in pictures]
    _write_parquet(path, rows, _PROMPT_SCHEMA)


def _build_row(picture: Picture) -> dict[str, Any]:
    """Return the question with its picture, in verl's form: `<image>` stands for the image."""
    messages = [{"role": "user", "content": f"<image>{QUESTION}"}]
    return {"messages": messages, "images": [{"bytes": picture.to_png()}]}


def _write_parquet(path: Path, rows: list[dict[str, Any]], schema: pa.Schema) -> None:
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)


def _write_model(directory: Path, seed: int) -> None:
    # torch and transformers take seconds to import
    from mcore_rl.examples.tasks import tiny_model, tiny_vision_model

    texts = [f"user\n{QUESTION}", "assistant\n", *COLOURS]
    tokenizer = tiny_model.train_tokenizer(texts, with_images=True)
    tiny_vision_model.save_checkpoint(directory, tokenizer, seed)
