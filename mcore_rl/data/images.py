"""Images of a run: read from data rows, stored once by content, and as tokens of a model.

Text has a placeholder for each image, as the model's chat template writes it; token ids have as
many image tokens as the image has merged patches. Samples name images by digest, and never hold
pixels.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rl.config.errors import ConfigError, describe_error
from mcore_rl.config.json_file import read_json_object
from mcore_rl.config.regular_file import find_below, read_regular
from mcore_rl.config.schema import ConversationsConfig, DataConfig
from mcore_rl.data.batch import IMAGES
from mcore_rl.data.image_files import (
    ImageError,
    StoredImage,
    compute_max_bytes,
    decode_image,
    inspect_image,
    read_data_url,
)
from mcore_rl.data.rows import IMAGE_MARK, Message, RowColumn

if TYPE_CHECKING:
    import torch

    from mcore_rl.data.files import Row

# Model types whose images are tokens as described above, with the placeholder of their templates.
PLACEHOLDERS = dict.fromkeys(
    ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), "<|vision_start|><|image_pad|><|vision_end|>"
)
IMAGE = "<image>"  # in texts of rows in verl's form, and of new messages: the place of an image
_ALLOWED = (
    "an image file as bytes, {bytes, path}, a path below the data's folder or data.images_dir, "
    "or a data: URL"
)


class ImageStore:
    """Image files in a folder, by digest; added ones stay in memory until `open_folder`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._pending: dict[str, bytes] | None = {}

    @classmethod
    def open(cls, folder: str | Path) -> ImageStore:
        """Open the store of a run that has started."""
        store = cls(folder)
        store.open_folder()
        return store

    def open_folder(self) -> None:
        """Write the images added so far, and from now on each at once."""
        pending, self._pending = self._pending or {}, None
        for digest, content in pending.items():
            self._write(digest, content)

    def add(self, image: StoredImage) -> str:
        """Add an image; return its digest.

        Raises:
            ImageError: it is damaged.
        """
        if self._pending is not None:
            decode_image(image.content)
            self._pending[image.digest] = image.content
        elif not (self.folder / image.digest).exists():
            decode_image(image.content)
            self._write(image.digest, image.content)
        return image.digest

    def _write(self, digest: str, content: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Threads, ranks and nodes may write the same.
        partial = self.folder / f".{digest}.{uuid.uuid4().hex}.partial"
        partial.write_bytes(content)
        partial.rename(self.folder / digest)

    def read(self, digest: str) -> bytes:
        """Return the file of an image.

        Raises:
            ConfigError: there is none of this digest.
        """
        if self._pending and digest in self._pending:
            return self._pending[digest]
        try:
            return (self.folder / digest).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"image {digest} is not in {self.folder} ({error.strerror}): images of a run are "
                "in its output folder, which all nodes must see"
            ) from error


class ImageTokens:
    """The tokens and pixel values of images, by the image processor of a checkpoint.

    Attributes:
        token_id: The image token.
        placeholder: Text of an image, before its image token is repeated.
        special_ids: Tokens that stand for images and videos, which a model should never sample.
    """

    def __init__(self, model_path: str | Path) -> None:
        """Load the processor; see `load`."""
        from transformers import AutoImageProcessor

        config = read_json_object(Path(model_path, "config.json"))
        self.token_id: int = config["image_token_id"]
        names = ("image", "video", "vision_start", "vision_end")
        self.special_ids = frozenset(
            config[f"{name}_token_id"] for name in names if f"{name}_token_id" in config
        )
        self.placeholder = PLACEHOLDERS[config["model_type"]]
        self._processor = AutoImageProcessor.from_pretrained(
            model_path, local_files_only=True, trust_remote_code=False
        )
        self._merge = int(self._processor.merge_size) ** 2  # patches in a token

    @classmethod
    def load(cls, model_path: str | Path) -> ImageTokens | None:
        """Load the image processor of a checkpoint folder; None if the model takes no images.

        Raises:
            ConfigError: the folder has no processor, or one that does not load.
        """
        if read_json_object(Path(model_path, "config.json")).get("model_type") not in PLACEHOLDERS:
            return None
        try:
            return cls(model_path)
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise ConfigError(
                f"model.path={str(model_path)!r}: its image processor does not load: "
                f"{describe_error(error, 300)}; allowed: a folder with preprocessor_config.json"
            ) from error

    def count(self, size: tuple[int, int]) -> int:
        """Return the number of tokens of an image of a width and height.

        Raises:
            ImageError: the processor takes no image of this shape.
        """
        width, height = size
        try:
            patches = self._processor.get_number_of_image_patches(height, width, {})
        except ValueError as error:
            raise ImageError(f"of {width} x {height} pixels: {error}") from error
        return int(patches) // self._merge

    def count_in_grid(self, grid: torch.Tensor) -> int:
        """Return the number of tokens of an image's grid (frames, rows, columns)."""
        return int(grid.prod()) // self._merge

    def expand(self, ids: Sequence[int], sizes: Sequence[tuple[int, int]]) -> list[int]:
        """Repeat the image token of each image.

        Raises:
            ImageError: there are more or fewer image tokens than images.
        """
        if (num := sum(token == self.token_id for token in ids)) != len(sizes):
            raise ImageError(
                f"has {num} image placeholders in its text for {len(sizes)} images; allowed: one "
                "for each"
            )
        counts = iter(map(self.count, sizes))
        repeats = ([t] * next(counts) if t == self.token_id else [t] for t in ids)
        return [token for repeated in repeats for token in repeated]

    def collapse(self, ids: Iterable[int]) -> list[int]:
        """Undo `expand`: leave one image token for each image."""
        runs = ((token, list(run)) for token, run in groupby(ids))
        return [t for token, run in runs for t in (run[:1] if token == self.token_id else run)]

    def compute_pixels(self, content: bytes) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an image's pixel values [patches, values] and grid (frames, rows, columns)."""
        values = self._processor(images=[decode_image(content)], return_tensors="pt")
        return values["pixel_values"], values["image_grid_thw"][0]


@dataclass(frozen=True, slots=True)
class RowImages:
    """Reads the images of data rows, and places them in their messages."""

    column: RowColumn
    tokens: ImageTokens
    store: ImageStore
    max_pixels: int
    max_images: int | None = None  # of a row
    folder: Path = Path()  # of relative paths; no other path is read
    images_dir: str = ""  # data.images_dir

    def open_beside(self, source: str) -> RowImages:
        """Return the reader of the images of a source of rows."""
        return replace(self, folder=Path(self.images_dir or Path(source).parent))

    def place(self, row: Row, messages: Sequence[Message]) -> list[StoredImage]:
        """Write a placeholder into the text of messages for each image; return the images.

        Content is text with "<image>" where images belong, as verl has it, or was a list of parts,
        as TRL has it (`read_chat`). Without any, images come first in the first message of the
        user. Messages with images get their digests as `images`.

        Raises:
            ConfigError: the row has other images than placeholders, or one that cannot be used.
        """
        value = row.values.get(self.column.name)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not any(IMAGE_MARK in (message["content"] or "") for message in messages):
            _mark_texts(messages, len(values))
        rest, images = iter(values), list[StoredImage]()
        for message in messages:
            inline = message.pop("images", [])
            num = (message["content"] or "").count(IMAGE_MARK)
            placed = [
                self._inspect(row, next(rest, None) if v is None else v, is_inline=v is not None)
                for v in inline or [None] * num
            ]
            if placed:
                message["content"] = message["content"].replace(IMAGE_MARK, self.tokens.placeholder)
                message["images"] = [image.digest for image in placed]
            images += placed
        if num_left := len(list(rest)):
            raise row.build_error(
                f"has {len(values)} images in {self.column}, {num_left} more than its messages "
                "have places for; allowed: one for each"
            )
        if self.max_images is not None and len(images) > self.max_images:
            raise row.build_error(
                f"has {len(images)} images; allowed: up to rollout.max_images={self.max_images}"
            )
        return images

    def check_column(self, source: str, num_images: int, names: Collection[str]) -> None:
        """Raise ConfigError if a source has neither images nor the column.

        Args:
            source: Begins the error.
            num_images: Images of all rows.
            names: Columns that any row has.
        """
        if not num_images and self.column.name not in names:
            raise ConfigError(
                f"{source}: no row has {self.column}, nor images in its messages; rows have: "
                f"{', '.join(sorted(names))}"
            )

    def _inspect(self, row: Row, entry: Any, *, is_inline: bool) -> StoredImage:
        if entry is None and self.column.name not in row.values:
            raise row.build_error(
                f"has an image in its messages without a file or URL, and no {self.column} to take "
                f"it from; it has: {', '.join(row.values)}"
            )
        if entry is None:
            raise row.build_error(
                f"has fewer images in {self.column} than places in its messages; allowed: one for "
                "each"
            )
        try:
            return inspect_image(self._read(entry), self.max_pixels)
        except ImageError as error:
            place = "image in its messages" if is_inline else f"entry of {self.column}"
            raise row.build_error(f"has an {place} that {error}") from error

    def _read(self, entry: Any) -> bytes:
        """Return the file of an entry."""
        if isinstance(entry, Mapping):
            content, path = entry.get("bytes"), entry.get("path") or entry.get("url")
            entry = content if content is not None else path
        if isinstance(entry, bytes):
            return entry
        if not isinstance(entry, str) or not entry or "://" in entry:
            raise ImageError(f"is {str(entry)[:40]!r}; allowed: {_ALLOWED}")
        if entry.startswith("data:"):
            return read_data_url(entry)
        try:
            path = find_below(self.folder, entry)
            return read_regular(path, compute_max_bytes(self.max_pixels))
        except (OSError, ValueError) as error:  # ValueError: a null byte
            raise ImageError(
                f"is the path {entry[:200]!r}, which cannot be read "
                f"({getattr(error, 'strerror', error)}); allowed: {_ALLOWED}"
            ) from error


def _mark_texts(messages: Sequence[Message], num_images: int) -> None:
    """Mark the places of images in texts: "<image>", else the begin of the first user message."""
    if not num_images:
        return
    texts = [message["content"] or "" for message in messages]
    if any(IMAGE in text for text in texts):
        for message in messages:
            message["content"] = message["content"] and message["content"].replace(
                IMAGE, IMAGE_MARK
            )
        return
    user = next((m for m in messages if m["role"] == "user"), messages[0])
    user["content"] = IMAGE_MARK * num_images + (user["content"] or "")


def load_row_images(
    data: DataConfig | ConversationsConfig,
    model_path: str,
    output_dir: str,
    max_images: int | None = None,
) -> RowImages | None:
    """Load what reads the images of data rows; None without data.images_column.

    Raises:
        ConfigError: the model takes no images.
    """
    if not data.images_column:
        return None
    tokens = ImageTokens.load(model_path)
    if tokens is None:
        kind = read_json_object(Path(model_path, "config.json")).get("model_type")
        raise ConfigError(
            f"data.images_column={data.images_column!r}: model.path={model_path!r} of model_type "
            f"{kind!r} takes no images; allowed: {', '.join(PLACEHOLDERS)}, or "
            "data.images_column=''"
        )
    return RowImages(
        RowColumn(data.images_column, "data.images_column"),
        tokens,
        ImageStore(get_images_folder(data, output_dir)),
        data.max_image_pixels,
        max_images,
        images_dir=data.images_dir,
    )


def get_images_folder(data: DataConfig | ConversationsConfig, output_dir: str) -> str:
    """Return the folder of the run's ImageStore; "" for a run without images."""
    return str(Path(output_dir).absolute() / IMAGES) if data.images_column else ""
