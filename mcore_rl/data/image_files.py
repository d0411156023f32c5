"""Image files of data, tools and clients: limited, measured, and decoded to RGB as vLLM does.

Servers elsewhere, and the evaluations of others, show a model what vLLM's loader makes of a file
(vllm/multimodal/media/image.py): turned upright by its EXIF orientation, and on white where it is
transparent. Only grey of 16 bits differs: Pillow's `convert` cuts it off at 255, so that almost all
of it is white there.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# Pillow reads metadata by Python code, some microseconds for each segment, chunk or block.
MAX_PARTS = 10_000
MAX_METADATA_BYTES = 8 << 20
MAX_EXIF_BYTES = 1 << 16  # a segment of JPEG; its entries may all name the same bytes
MAX_SCANS = 100  # of a progressive JPEG, each a pass over all pixels; encoders write about ten
_MAX_TABLES = 64  # segments of a JPEG that are no metadata
_MAX_RUNS_BYTES = 1 << 20  # of a BMP of runs, which Pillow decodes by Python code
_PIXEL_BYTES = 4  # allowed in a file for each pixel: those of an uncompressed one
_PART_BYTES = 1024  # a file may have a part more for as many bytes: PNGs split their pixels
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,")
_ORIENTATION = 0x0112
_TURNED = range(5, 9)  # orientations that swap width and height
_LATE_METADATA = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")


class ImageError(ValueError):
    """An image that cannot be used, with what is allowed."""


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image by the digest of its file."""

    digest: str
    content: bytes = field(repr=False)
    size: tuple[int, int]  # width, height, as it is seen


def inspect_image(content: bytes, max_pixels: int) -> StoredImage:
    """Read the format and size of an image file.

    Raises:
        ImageError: it is none, or has more pixels, bytes or metadata than allowed.
    """
    if len(content) > (max_bytes := compute_max_bytes(max_pixels)):
        raise ImageError(
            f"is a file of {len(content)} bytes; allowed: up to {max_bytes}, from "
            f"data.max_image_pixels={max_pixels}"
        )
    has_late_metadata = _check_parts(content)
    with _open(content) as image:
        size = image.size
        if size[0] * size[1] > max_pixels:
            raise ImageError(
                f"is an image of {size[0]} x {size[1]} pixels; allowed: up to {max_pixels} "
                "(data.max_image_pixels)"
            )
        if _read_orientation(image, is_loaded=has_late_metadata) in _TURNED:
            size = size[1], size[0]
    return StoredImage(hashlib.blake2b(content, digest_size=16).hexdigest(), content, size)


def compute_max_bytes(max_pixels: int) -> int:
    """Return the bytes that a file of an image may have."""
    return _PIXEL_BYTES * max_pixels + MAX_METADATA_BYTES


def decode_image(content: bytes) -> Image:
    """Decode an image file to RGB.

    Raises:
        ImageError: it is damaged.
    """
    _check_parts(content)
    with _open(content) as image:
        try:
            image.load()
            return convert_to_rgb(image)
        except ImageError:
            raise
        except Exception as error:  # of damaged files any
            raise ImageError(
                f"is a damaged image file: {error}; allowed: a complete file"
            ) from error


def convert_to_rgb(image: Image) -> Image:
    """Convert an image to RGB: upright, on white where it is transparent."""
    from PIL import Image

    turn = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }.get(_read_orientation(image, is_loaded=True))
    if turn is not None:
        image = image.transpose(turn)
    if image.mode == "RGB":
        return image.copy()  # as vLLM, with the one colour that its file may call transparent
    if image.mode.startswith("I;16"):
        return _convert_grey16(image)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        converted = Image.new("RGB", image.size, "white")
        converted.paste(image, mask=image.getchannel("A"))
        return converted
    return image.convert("RGB")


def read_data_url(url: str) -> bytes:
    """Return the file in a data: URL.

    Raises:
        ImageError: it is none of an image in base64.
    """
    head = _DATA_URL.match(url)
    if head is None:
        raise ImageError(f"is {url[:40]!r}; allowed: a data:image/...;base64 URL")
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except ValueError as error:
        raise ImageError(f"has damaged base64 in {url[:40]!r} ({error})") from error


@contextmanager
def _open(content: bytes) -> Iterator[Image]:
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise ImageError(f"{error}; allowed: fewer pixels (data.max_image_pixels)") from error
    except Exception as error:  # of damaged files any
        raise ImageError(
            f"is not an image file ({len(content)} bytes); allowed: {', '.join(FORMATS)}"
        ) from error
    with image:
        yield image


def _read_orientation(image: Image, *, is_loaded: bool) -> int:
    """Return the orientation by EXIF or XMP, as Pillow finds it; 1 is upright.

    Args:
        is_loaded: The pixels may be decoded to find it: a PNG can have it behind them.
    """
    from PIL.Image import Image

    with suppress(Exception):  # as vLLM: an image with damaged metadata stays as it is
        if is_loaded:
            image.load()
    sizes = [len(image.info.get(name, "")) for name in ("exif", "Raw profile type exif")]
    _require("bytes of EXIF", max(sizes[0], sizes[1] // 2), MAX_EXIF_BYTES)  # one is hexadecimal
    orientation = 1
    with suppress(Exception):
        # The method of PngImageFile decodes the pixels.
        orientation = Image.getexif(image).get(_ORIENTATION, 1)
    return orientation if isinstance(orientation, int) else 1


def _convert_grey16(image: Image) -> Image:
    """Convert grey of 16 bits by its high bytes, as Pillow reads other images of 16 bits."""
    from PIL import Image

    values = np.asarray(image)
    grey = (values >> 8).astype(np.uint8)
    if isinstance(transparent := image.info.get("transparency"), int):
        grey[values == transparent] = 255
    return Image.fromarray(grey).convert("RGB")


def _check_parts(content: bytes) -> bool:
    """Check how much besides pixels a file has; return whether a PNG has metadata behind them.

    Raises:
        ImageError: there is more than allowed.
    """
    if content.startswith(b"\x89PNG"):
        return _check_png(content)
    if content.startswith(b"\xff\xd8"):
        _check_jpeg(content)
    elif content.startswith(b"GIF8"):
        _check_gif(content)
    elif content.startswith(b"RIFF"):
        _check_webp(content)
    elif content.startswith(b"BM") and content[30:34] in (b"\1\0\0\0", b"\2\0\0\0"):
        _require("bytes of a BMP in runs", len(content), _MAX_RUNS_BYTES)
    return False


def _require(what: str, number: int, most: int) -> None:
    if number > most:
        raise ImageError(f"has {number} {what} or more; allowed: up to {most}")


def _check_png(content: bytes) -> bool:
    place, num_parts, num_bytes, num_profiles = 8, 0, 0, 0
    has_pixels = has_late_metadata = False
    most = MAX_PARTS + len(content) // _PART_BYTES
    while place + 8 <= len(content):
        length, kind = int.from_bytes(content[place : place + 4]), content[place + 4 : place + 8]
        num_parts += 1
        _require("chunks", num_parts, most)
        if kind == b"IDAT":
            has_pixels = True
        elif kind not in (b"fdAT", b"IEND"):
            num_bytes += length
            _require("bytes of metadata", num_bytes, MAX_METADATA_BYTES)
        if kind == b"iCCP":  # each is decompressed
            num_profiles += 1
            _require("colour profiles", num_profiles, 1)
        if kind == b"eXIf":
            _require("bytes of EXIF", length, MAX_EXIF_BYTES)
        has_late_metadata |= has_pixels and kind in _LATE_METADATA
        place += 12 + length
    return has_late_metadata


def _check_jpeg(content: bytes) -> None:
    """Walk the segments up to the pixels, as JpegImageFile._open does."""
    place, num_parts, num_tables, num_bytes, num_exif_bytes = 2, 0, 0, 0, 0
    while place + 1 < len(content):
        num_parts += 1  # a byte of padding takes Pillow as long as a segment
        _require("segments", num_parts, MAX_PARTS)
        marker = content[place + 1] if content[place] == 0xFF else 0xFF
        if marker in (0, 0xC8, 0xFF) or 0xD0 <= marker <= 0xD9 or 0xF0 <= marker <= 0xFD:
            place += 1 if marker == 0xFF else 2
            continue
        length = max(int.from_bytes(content[place + 2 : place + 4]), 2)
        if 0xE0 <= marker <= 0xEF or marker == 0xFE:
            num_bytes += length
            _require("bytes of metadata", num_bytes, MAX_METADATA_BYTES)
            if content[place + 4 : place + 8] == b"Exif":
                num_exif_bytes += length
                _require("bytes of EXIF", num_exif_bytes, MAX_EXIF_BYTES)
        else:
            num_tables += 1
            _require("tables", num_tables, _MAX_TABLES)
        place += 2 + length
        if marker == 0xDA:
            break
    _require("scans", content.count(b"\xff\xda", place), MAX_SCANS)


def _check_gif(content: bytes) -> None:
    """Walk the blocks up to the first picture, the only one that is decoded."""
    flags = content[10] if len(content) > 10 else 0
    place, num_parts = 13 + (3 * (2 << (flags & 7)) if flags & 0x80 else 0), 0
    while place < len(content) and content[place] not in b",;":
        num_parts += 1
        if content[place] != ord("!"):
            place += 1
        else:
            place += 2
            while length := content[place] if place < len(content) else 0:
                num_parts += 1
                _require("blocks", num_parts, MAX_PARTS)
                place += 1 + length
            place += 1
        _require("blocks", num_parts, MAX_PARTS)


def _check_webp(content: bytes) -> None:
    place, num_parts = 12, 0
    most = MAX_PARTS + len(content) // _PART_BYTES
    while place + 8 <= len(content):
        num_parts += 1
        _require("chunks", num_parts, most)
        kind, length = (
            content[place : place + 4],
            int.from_bytes(content[place + 4 : place + 8], "little"),
        )
        if kind == b"EXIF":
            _require("bytes of EXIF", length, MAX_EXIF_BYTES)
        place += 8 + length + length % 2
