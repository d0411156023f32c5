"""Files of images: decoded as vLLM's and transformers' loaders do, within limits."""

from __future__ import annotations

import base64
import io
import struct
import time
import zlib
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from mcore_rl.data.image_files import (
    MAX_EXIF_BYTES,
    ImageError,
    convert_to_rgb,
    decode_image,
    inspect_image,
)

MIB = 1 << 20
RGBA = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 9, 4), dtype=np.uint8))
RGB = RGBA.convert("RGB")
GREY = RGB.convert("L")
PALETTE = RGB.quantize(16)
XMP = '<rdf:Description tiff:Orientation="8"/>'


def save(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turn(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def add_text(key: str, value: str) -> PngInfo:
    info = PngInfo()
    info.add_itxt(key, value)
    return info


def build_chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def put_behind_pixels(file: bytes, *chunks: bytes) -> bytes:
    return file[:-12] + b"".join(chunks) + file[-12:]


OPAQUE = {
    **{f"jpeg {i}": save(RGB, "JPEG", exif=turn(i)) for i in range(10)},
    **{f"png {i}": save(RGB, exif=turn(i)) for i in (5, 6)},
    **{f"webp {i}": save(RGB, "WEBP", exif=turn(i)) for i in (3, 8)},
    "jpeg with damaged exif": save(RGB, "JPEG", exif=b"Exif\0\0II*\0\xff\xff"),
    "exif behind the pixels": put_behind_pixels(
        save(RGB), build_chunk(b"eXIf", turn(6).tobytes()[6:])
    ),
    "jpeg xmp": save(RGB, "JPEG", xmp=XMP.encode()),
    "png xmp": save(RGB, pnginfo=add_text("XML:com.adobe.xmp", XMP)),
    "cmyk": save(RGB.convert("CMYK"), "JPEG"),
    "grey jpeg": save(GREY, "JPEG"),
    "grey bmp": save(GREY, "BMP"),
    "bitmap": save(GREY.convert("1")),
    "palette": save(PALETTE),
    "gif": save(PALETTE, "GIF"),
}
TRANSPARENT = {
    "rgba": save(RGBA),
    "rgba turned": save(RGBA, exif=turn(7)),
    "rgba webp": save(RGBA, "WEBP", lossless=True),
    "rgba bmp": save(RGBA, "BMP"),
    "moving rgba": save(RGBA, save_all=True, append_images=[RGBA.rotate(180)]),
    "grey alpha": save(RGBA.convert("LA")),
    "palette": save(PALETTE, transparency=3),
    "palette of alphas": save(PALETTE, transparency=bytes(range(0, 256, 17))),
    "gif": save(PALETTE, "GIF", transparency=3),
    "grey": save(GREY, transparency=GREY.getpixel((0, 0))),
    "rgb": save(RGB, transparency=RGB.getpixel((0, 0))),
    "bitmap": save(GREY.convert("1"), transparency=0),
}


@pytest.fixture(scope="module")
def load_by_vllm() -> Callable[[bytes], Image.Image]:
    from vllm.multimodal.media.image import ImageMediaIO  # slow to import

    return lambda file: ImageMediaIO().load_bytes(file).media


def load_by_transformers(file: bytes) -> Image.Image:
    from transformers.image_utils import load_image  # slow to import

    return load_image(base64.b64encode(file).decode())


def check_pixels(file: bytes, expected: Image.Image) -> None:
    decoded = decode_image(file)
    assert inspect_image(file, 54).size == decoded.size == expected.size
    np.testing.assert_array_equal(np.asarray(decoded), np.asarray(expected))


@pytest.mark.parametrize("name", OPAQUE)
def test_image_is_decoded_as_by_vllm_and_transformers(name, load_by_vllm):
    file = OPAQUE[name]
    check_pixels(file, load_by_vllm(file))
    if "damaged" not in name:  # which transformers refuses
        check_pixels(file, load_by_transformers(file))


@pytest.mark.parametrize("name", TRANSPARENT)
def test_transparent_image_is_on_white_as_by_vllm(name, load_by_vllm):
    check_pixels(TRANSPARENT[name], load_by_vllm(TRANSPARENT[name]))


def test_black_strokes_on_a_transparent_png_stay_visible():
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    image.putpixel((1, 2), (0, 0, 0, 255))
    pixels = np.asarray(decode_image(save(image))).min(-1)
    assert pixels[2, 1] == 0
    assert (pixels == 255).sum() == 15


@pytest.mark.parametrize("transparency", [None, 0x1234])
def test_grey_of_16_bits_is_scaled_as_by_opencv(transparency):
    values = np.linspace(0, 65535, 54).astype(np.uint16).reshape(6, 9)
    values[0, 0] = 0x1234
    options = {} if transparency is None else {"transparency": transparency}
    file = save(Image.fromarray(values), **options)
    expected = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR).copy()
    if transparency is not None:
        expected[0, 0] = 255
    check_pixels(file, Image.fromarray(expected))


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV", "F", "LA", "P", "I;16"])
def test_image_of_a_tool_may_have_a_mode_that_png_has_not(mode):
    image = Image.fromarray(np.full((2, 3), 9, np.uint16)) if mode == "I;16" else RGB.convert(mode)
    assert convert_to_rgb(image).mode == "RGB"


def build_segment(marker: int, data: bytes) -> bytes:
    return bytes((0xFF, marker)) + struct.pack(">H", len(data) + 2) + data


def insert(file: bytes, place: int, extra: bytes) -> bytes:
    return file[:place] + extra + file[place:]


JPEG, PNG, GIF = save(RGB, "JPEG"), save(RGB), save(PALETTE, "GIF")
GIF_START = 13 + 3 * (2 << (GIF[10] & 7))
EXIF = b"Exif\0\0"
PROGRESSIVE = save(RGB, "JPEG", progressive=True)
SCAN = PROGRESSIVE[PROGRESSIVE.rfind(b"\xff\xda") : -2]
PROFILE = build_chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(MIB)))
PIXELS = build_chunk(b"IDAT")


def build_bmp_of_runs(num_runs: int) -> bytes:
    runs = b"\1\2" * num_runs
    header = struct.pack("<IiiHHIIiiII", 40, num_runs, 1, 1, 8, 1, len(runs), 0, 0, 256, 0)
    start = 14 + len(header) + 1024
    return (
        b"BM" + struct.pack("<IHHI", start + len(runs), 0, 0, start) + header + bytes(1024) + runs
    )


def build_webp(*chunks: bytes) -> bytes:
    file = save(RGB, "WEBP", exif=turn(1)) + b"".join(chunks)
    return file[:4] + struct.pack("<I", len(file) - 8) + file[8:]


# Built by the tests, as they are large.
ATTACKS = {
    "exif of 8 bytes": (
        lambda: insert(JPEG, 2, build_segment(0xE1, EXIF) * (8 * MIB // 10)),
        "bytes of EXIF",
    ),
    "long exif": (
        lambda: insert(JPEG, 2, build_segment(0xE1, EXIF + bytes(60000)) * 2),
        "bytes of EXIF",
    ),
    "long segments": (
        lambda: insert(JPEG, 2, build_segment(0xED, bytes(60000)) * 200),
        "bytes of metadata",
    ),
    "tables": (lambda: insert(JPEG, 2, build_segment(0xDB, b"\0" + b"\1" * 64) * 100), "65 tables"),
    "padding": (lambda: insert(JPEG, 2, b"\xff" * 4 * MIB), "10001 segments"),
    "restarts": (lambda: insert(JPEG, 2, b"\xff\xd0" * 4 * MIB), "10001 segments"),
    "markers without a segment": (lambda: insert(JPEG, 2, b"\xff\xc8" * 4 * MIB), "10001 segments"),
    "scans": (lambda: PROGRESSIVE[:-2] + SCAN * 200 + PROGRESSIVE[-2:], "scans"),
    "empty png chunks": (lambda: insert(PNG, 33, build_chunk(b"teSt") * (8 * MIB // 12)), "chunks"),
    "empty pixels": (lambda: insert(PNG, 33, PIXELS * (8 * MIB // 12)), "chunks"),
    "chunks behind the pixels": (
        lambda: put_behind_pixels(PNG, build_chunk(b"teSt") * MIB),
        "chunks",
    ),
    "colour profiles": (lambda: insert(PNG, 33, PROFILE * 500), "2 colour profiles"),
    "long chunk": (
        lambda: insert(PNG, 33, build_chunk(b"teSt", bytes(9 * MIB))),
        "bytes of metadata",
    ),
    "long exif of png": (
        lambda: insert(PNG, 33, build_chunk(b"eXIf", bytes(MAX_EXIF_BYTES + 1))),
        "bytes of EXIF",
    ),
    "comment of gif": (
        lambda: insert(GIF, GIF_START, b"!\xfe" + b"\1a" * 4 * MIB + b"\0"),
        "10001 blocks",
    ),
    "empty gif blocks": (lambda: insert(GIF, GIF_START, b"!\xfe\0" * MIB), "10001 blocks"),
    "bytes between gif blocks": (lambda: insert(GIF, GIF_START, b"a" * MIB), "10001 blocks"),
    "webp chunks": (lambda: build_webp(b"abcd" + bytes(4), *[b"abcd" + bytes(4)] * MIB), "chunks"),
    "long exif of webp": (
        lambda: build_webp(b"EXIF" + struct.pack("<I", 2 * MIB) + bytes(2 * MIB)),
        "bytes of EXIF",
    ),
    "bmp of runs": (lambda: build_bmp_of_runs(MIB), "bytes of a BMP in runs"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_metadata_of_an_image_is_limited_before_it_is_parsed(name):
    build, reason = ATTACKS[name]
    file = build()
    for read in (lambda: inspect_image(file, 1 << 24), lambda: decode_image(file)):
        start_s = time.process_time()
        with pytest.raises(ImageError, match=f"has .*{reason}.*; allowed: up to"):
            read()
        assert time.process_time() - start_s < 0.5


def test_usual_metadata_is_within_the_limits():
    profile = bytes(200_000)
    exif = turn(6)
    exif[0x010E] = "a" * 50_000
    assert inspect_image(save(RGB, "JPEG", icc_profile=profile, exif=exif), 54).size == (6, 9)
    assert inspect_image(save(RGB, icc_profile=profile, exif=exif), 54).size == (6, 9)
    assert inspect_image(save(PALETTE, "GIF", comment=b"a" * 100_000), 54).size == (9, 6)
    noise = Image.fromarray(np.random.default_rng(1).integers(0, 256, (512, 512), dtype=np.uint8))
    lines = b"".join(b"\0" + line.tobytes() for line in np.asarray(noise))
    data = zlib.compress(lines)
    pieces = [build_chunk(b"IDAT", data[i : i + 64]) for i in range(0, len(data), 64)]
    split = save(noise)[:33] + b"".join(pieces) + build_chunk(b"IEND")
    np.testing.assert_array_equal(np.asarray(decode_image(split).convert("L")), np.asarray(noise))


@pytest.mark.parametrize("kind", ["TIFF", "PPM", "ICO", "TGA", "JPEG2000"])
def test_other_formats_of_pillow_are_refused_by_those_that_are_read(kind):
    with pytest.raises(ImageError, match="allowed: PNG, JPEG, WEBP, GIF, BMP"):
        inspect_image(save(RGB, kind), 10**6)


def test_file_with_more_bytes_than_its_pixels_may_have_is_refused():
    with pytest.raises(ImageError, match=r"is a file of 9437\d+ bytes; allowed: up to 8388824"):
        inspect_image(JPEG + bytes(9 * MIB), 54)
