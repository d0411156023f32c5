"""Images of data rows: read, placed in chats, stored, and as tokens."""

from __future__ import annotations

import base64
import io
import json
import runpy
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import mcore_rl
from mcore_rl.config.describe import list_setting_names
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import ConversationsConfig, DataConfig, RLConfig
from mcore_rl.data.datasets import load_prompts, load_supervised
from mcore_rl.data.examples import load_chats, load_conversations
from mcore_rl.data.image_files import ImageError, decode_image, inspect_image, read_data_url
from mcore_rl.data.images import ImageStore, ImageTokens, RowImages, load_row_images
from mcore_rl.data.tokenizer import load_tokenizer
from tests import tiny_vision
from tests.odd_files import make_odd_file
from tests.pages import ROOT
from tests.unit.repo.test_docs import write_recipes

PAD = tiny_vision.get_special_id("<|image_pad|>")


def draw(width: int, height: int, colour: str = "red", kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, kind)
    return file.getvalue()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_vision.build_config("qwen3_vl").save_pretrained(path)
    tiny_vision.build_tokenizer().save_pretrained(path)
    tiny_vision.write_processor(path, "qwen3_vl")
    return path


@pytest.fixture(scope="module")
def tokens(model: Path) -> ImageTokens:
    tokens = ImageTokens.load(model)
    assert tokens is not None
    return tokens


def make_odd_files(folder: Path) -> None:
    """Make entries that are no files of images, and a link to one elsewhere."""
    make_odd_file(folder / "pipe", "pipe")
    make_odd_file(folder / "socket", "socket")
    make_odd_file(folder / "huge.png", "huge")
    (folder / "loop").symlink_to("loop")
    elsewhere = folder.with_name(folder.name + "_elsewhere.png")
    elsewhere.write_bytes(RED)
    (folder / "link.png").symlink_to(elsewhere)


def load(model: Path, path: Path, **settings: object):
    data = DataConfig(prompt_column="prompt", images_column="images", **settings)
    images = load_row_images(data, str(model), str(path.parent / "out"), max_images=3)
    assert images is not None
    prompts = load_prompts(
        path, data, load_tokenizer(model), images=RowImages(**_fields(images, path.parent))
    )
    return prompts, images


def _fields(images: RowImages, folder: Path) -> dict[str, object]:
    names = ("column", "tokens", "store", "max_pixels", "max_images")
    return {name: getattr(images, name) for name in names} | {"folder": folder}


def write(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps({"answer": "", **row}) + "\n" for row in rows))
    return path


def to_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


def draw_turned(width: int, height: int, orientation: int = 6) -> bytes:
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (width, height), "red").save(file, "JPEG", exif=exif)
    return file.getvalue()


TURNED = draw_turned(96, 32)  # seen as 32 x 96
RED, BLUE = draw(64, 64), draw(96, 64, "blue")  # 4 and 6 tokens


FORMS = {
    "verl": (user("a<image>b<image>"), [RED, BLUE]),
    "parts": (
        user([
            {"type": "text", "text": "a"}, {"type": "image"},
            {"type": "text", "text": "b"}, {"type": "image"},
        ]),
        [RED, BLUE],
    ),
    "openai": (
        user([
            {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": to_url(RED)}},
            {"type": "text", "text": "b"}, {"type": "image", "image": to_url(BLUE)},
        ]),
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_each_form_have_the_tokens_of_their_images_in_place(form, model, tokens, tmp_path):
    chat, images = FORMS[form]
    path = write(
        tmp_path / "rows.jsonl", {"prompt": chat, "images": [to_url(i) for i in images] or None}
    )
    prompts, _ = load(model, path)
    [prompt] = prompts.take([0])
    text = load_tokenizer(model).decode(prompt.prompt_ids)
    image = "<|vision_start|>{}<|vision_end|>"
    red, blue = (image.format("<|image_pad|>" * n) for n in (4, 6))
    assert f"user\na{red}b{blue}<|im_end|>" in text
    assert [*prompt.images] == [inspect_image(content, 10**6).digest for content in (RED, BLUE)]
    assert prompt.messages[0]["images"] == [*prompt.images]
    assert prompt.fields == {"answer": ""}  # without the files


def test_images_without_a_place_come_first_in_the_first_user_message(model, tmp_path):
    chat = [{"role": "system", "content": "s"}, *user("u")]
    path = write(tmp_path / "rows.jsonl", {"prompt": chat, "images": to_url(RED)})
    [prompt] = load(model, path)[0].take([0])
    text = load_tokenizer(model).decode(prompt.prompt_ids)
    assert "user\n<|vision_start|><|image_pad|>" in text
    assert prompt.prompt_ids.count(PAD) == 4


def test_parquet_rows_of_bytes_and_of_paths_beside_the_file(model, tmp_path):
    (tmp_path / "blue.png").write_bytes(BLUE)
    table = pa.table({
        "prompt": [user("<image>?"), user("<image>?")],
        "images": [[{"bytes": RED, "path": None}], [{"bytes": None, "path": "blue.png"}]],
        "answer": ["red", "blue"],
    })  # fmt: skip
    pq.write_table(table, tmp_path / "rows.parquet")
    prompts, images = load(model, tmp_path / "rows.parquet")
    taken = prompts.take([0, 1])
    assert [p.prompt_ids.count(PAD) for p in taken] == [4, 6]
    images.store.open_folder()
    assert [images.store.read(p.images[0]) for p in taken] == [RED, BLUE]


def test_paths_below_images_dir_are_read_and_no_others(model, tmp_path):
    (tmp_path / "pictures" / "deep").mkdir(parents=True)
    place = tmp_path / "pictures" / "deep" / "red.png"
    place.write_bytes(RED)
    (tmp_path / "pictures" / "link.png").symlink_to(place)
    names = ["deep/red.png", str(place), "link.png"]
    rows = [{"prompt": user("<image>"), "images": [name]} for name in names]
    path = write(tmp_path / "rows.jsonl", *rows, {"prompt": user("?"), "images": ["rows.jsonl"]})
    data = DataConfig(
        prompt_column="prompt", images_column="images", images_dir=str(tmp_path / "pictures")
    )
    images = load_row_images(data, str(model), str(tmp_path / "out"))
    assert images is not None
    tokenizer = load_tokenizer(model)
    with pytest.raises(ConfigError, match=r"row 3 has an entry .*rows\.jsonl.*No such file"):
        load_prompts(path, data, tokenizer, images=images.open_beside(str(path)))
    write(path, *rows)
    prompts = load_prompts(path, data, tokenizer, images=images.open_beside(str(path)))
    assert len({prompt.images for prompt in prompts.take([0, 1, 2])}) == 1


def test_turned_image_of_a_row_has_the_tokens_of_what_is_seen(model, tokens, tmp_path):
    row = {"prompt": user("<image>"), "images": [to_url(TURNED)]}
    [prompt] = load(model, write(tmp_path / "rows.jsonl", row))[0].take([0])
    values, grid = tokens.compute_pixels(TURNED)
    assert prompt.prompt_ids.count(PAD) == tokens.count_in_grid(grid) == tokens.count((32, 96))
    assert len(values) == grid.prod()


def test_a_row_without_images_is_text_among_rows_with_them(model, tmp_path):
    rows = {"prompt": user("a")}, {"prompt": user("<image>"), "images": [to_url(RED)]}
    prompts, _ = load(model, write(tmp_path / "rows.jsonl", *rows))
    assert [len(p.images) for p in prompts.take([0, 1])] == [0, 1]


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"images": [to_url(b"GIF89a")]}, r"row 0 has an entry of column 'images'.* not an image"),
        ({"images": ["gone.png"]}, "row 0 .*'gone.png', which cannot be read .No such file"),
        ({"images": ["../a.png"]}, r"'../a.png', which cannot be read .outside of the folder"),
        ({"images": ["/dev/zero"]}, "'/dev/zero', which cannot be read .outside of the folder"),
        ({"images": ["/proc/self/environ"]}, "which cannot be read .outside of the folder"),
        ({"images": ["link.png"]}, "'link.png', which cannot be read .outside of the folder"),
        ({"images": ["pipe"]}, "'pipe', which cannot be read .a pipe, no regular file"),
        ({"images": [{"bytes": None, "path": "socket"}]}, "which cannot be read .a socket, no reg"),
        ({"images": ["."]}, "'.', which cannot be read .Is a directory"),
        ({"images": ["huge.png"]}, "which cannot be read .it has more than 8508608 bytes"),
        ({"images": ["loop"]}, "which cannot be read .Too many levels of symbolic links"),
        ({"images": ["https://host/a.png"]}, "row 0 .*allowed: an image file as bytes"),
        (
            {"prompt": user([{"type": "image_url", "image_url": {"url": "https://host/a.png"}}])},
            "row 0 has an image in its messages that is 'https://host/a.png'; allowed: an image",
        ),
        ({"prompt": user([{"type": "image"}])}, "without a file or URL, and no column 'images'"),
        ({"images": [to_url(draw(200, 200))]}, "200 x 200 pixels; allowed: up to 30000"),
        ({"images": ["a\0.png"]}, "row 0 has an entry of column 'images'.*cannot be read"),
        ({"images": ["data:image/png;base64,\u00e9"]}, "row 0 .*damaged base64"),
        ({"images": [3]}, "row 0 .*'3'; allowed"),
        ({"prompt": user("<image>"), "images": [to_url(RED)] * 2}, "1 more than its messages"),
        ({"prompt": user("<image><image>"), "images": [to_url(RED)]}, "row 0 has fewer images"),
        ({"images": [to_url(RED)] * 4}, "row 0 has 4 images; allowed: up to rollout.max_images=3"),
        ({"images": [to_url(draw(1, 250))]}, "row 0 of 1 x 250 pixels: absolute aspect ratio"),
        ({"prompt": user("<|image_pad|>"), "images": [to_url(RED)]}, "2 image placeholders"),
        ({"prompt": user([{"type": "video"}])}, "parts of the types text"),
    ],
)
def test_a_wrong_row_is_one_error_that_names_it(row, error, model, tmp_path):
    make_odd_files(tmp_path)
    path = write(tmp_path / "rows.jsonl", {"prompt": user("?"), **row})
    with pytest.raises(ConfigError, match=error):
        load(model, path, max_image_pixels=30000)


def test_a_column_that_no_row_has_is_named(model, tmp_path):
    path = write(tmp_path / "rows.jsonl", {"prompt": user("?"), "pictures": [to_url(RED)]})
    with pytest.raises(ConfigError, match=r"no row has column .images. .data.images_column., nor"):
        load(model, path)


def test_images_without_their_setting_are_refused_or_named(model, tmp_path):
    tokenizer = load_tokenizer(model)
    entry = {"type": "image_url", "image_url": {"url": to_url(RED)}}
    path = write(tmp_path / "rows.jsonl", {"prompt": user([entry])})
    with pytest.raises(
        ConfigError, match=r"row 0 .* has an image in a .*data.images_column=images"
    ):
        load_prompts(path, DataConfig(), tokenizer)
    path = write(tmp_path / "rows.jsonl", {"prompt": user("<image>?"), "image": to_url(RED)})
    with pytest.raises(ConfigError, match=r"row 0 has <image> .* data.images_column=image, or"):
        load_prompts(path, DataConfig(), tokenizer)
    path = write(tmp_path / "rows.jsonl", {"prompt": user("?"), "images": [to_url(RED)]})
    *_, line = load_prompts(path, DataConfig(), tokenizer).describe_columns()
    assert "prompts are text alone: column 'images' is not read" in line


def test_the_rows_of_the_tutorial_have_their_pictures(model, tmp_path, monkeypatch):
    write_recipes((ROOT / "docs" / "tutorial_images.md").read_text(), tmp_path)
    runs: list[tuple[Any, ...]] = []
    monkeypatch.setattr(mcore_rl, "grpo", lambda *args, **options: runs.append((*args, options)))
    monkeypatch.setattr(sys, "argv", ["train.py", "pictures/model"])
    runpy.run_path(str(tmp_path / "here" / "train.py"))
    [(_, _, rows, options)] = runs
    assert set(options["settings"]) <= set(list_setting_names(RLConfig))
    path = write(tmp_path / "rows.jsonl", *({"prompt": row["messages"]} for row in rows[:2]))
    prompts, images = load(model, path)
    for row in range(2):
        [digest] = prompts[row].images
        red, green, blue = decode_image(images.store.read(digest)).getpixel((5, 5))
        assert (red > 200, green > 100, blue) == ((True, False, 0), (False, True, 0))[row]


def test_a_damaged_file_is_an_error_when_its_row_is_drawn(model, tmp_path):
    noise = io.BytesIO()
    Image.effect_noise((64, 64), 90).save(noise, "PNG")
    cut = noise.getvalue()[:-900]
    path = write(tmp_path / "rows.jsonl", {"prompt": user("?"), "images": [to_url(cut)]})
    prompts, _ = load(model, path)
    with pytest.raises(ConfigError, match="row 0 has an image that is a damaged image file"):
        prompts.take([0])


def test_a_model_without_images_refuses_the_column_by_its_type(model, tmp_path):
    config = json.loads((model / "config.json").read_text()) | {"model_type": "llava"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    data = DataConfig(images_column="images")
    with pytest.raises(ConfigError, match="model_type 'llava' takes no images; allowed: qwen"):
        load_row_images(data, str(tmp_path), str(tmp_path))


def test_tokens_of_an_image_are_as_many_as_its_merged_patches(tokens):
    for size in ((64, 64), (96, 64), (33, 47), (1000, 600)):
        values, grid = tokens.compute_pixels(draw(*size))
        assert len(values) == grid.prod()
        assert tokens.count(size) == tokens.count_in_grid(grid) == grid.prod() // 4


def test_collapse_undoes_expand(tokens):
    ids = [1, tokens.token_id, 2, 3, tokens.token_id]
    expanded = tokens.expand(ids, [(64, 64), (96, 64)])
    assert len(expanded) == 3 + 4 + 6
    assert tokens.collapse(expanded) == ids
    with pytest.raises(ImageError, match="2 image placeholders in its text for 1 images"):
        tokens.expand(ids, [(64, 64)])


def test_a_store_writes_once_it_is_open_and_names_what_it_lacks(tmp_path):
    store = ImageStore(tmp_path / "images")
    digest = store.add(inspect_image(RED, 10**6))
    assert not store.folder.exists()
    assert store.read(digest) == RED
    store.open_folder()
    assert [p.name for p in store.folder.iterdir()] == [digest]
    assert ImageStore.open(store.folder).read(digest) == RED
    with pytest.raises(ConfigError, match=r"image 00 is not in .*images"):
        store.read("00")


def test_threads_may_add_the_same_image(tmp_path):
    noise = draw(1000, 1000, kind="BMP")
    image = inspect_image(noise, 10**6)
    for number in range(5):
        store, barrier = ImageStore.open(tmp_path / str(number)), threading.Barrier(8)

        def add(store: ImageStore = store, barrier: threading.Barrier = barrier) -> bytes:
            barrier.wait()
            return store.read(store.add(image))

        with ThreadPoolExecutor(8) as threads:
            added = [threads.submit(add) for _ in range(8)]
            assert all(result.result() == noise for result in added)
        assert [path.name for path in store.folder.iterdir()] == [image.digest]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_formats(kind):
    assert inspect_image(draw(9, 7, kind=kind), 63).size == (9, 7)


@pytest.mark.parametrize(
    "url", ["data:text/html;base64,AA", "file:///etc/passwd", "data:image/png,"]
)
def test_other_urls_are_refused(url):
    with pytest.raises(ImageError, match="allowed: a data:image"):
        read_data_url(url)


def test_supervised_rows_train_on_no_image_token(model, tmp_path):
    chat = [*user("<image>?"), {"role": "assistant", "content": "red"}]
    path = write(tmp_path / "rows.jsonl", {"messages": chat, "images": [to_url(RED)]})
    data, tokenizer = ConversationsConfig(images_column="images"), load_tokenizer(model)
    images = load_row_images(data, str(model), str(tmp_path))
    examples = load_conversations(str(path), data, tokenizer, images=images)
    batch = examples.take([0])
    prompt, response = batch.jagged("prompt_ids")[0], batch.jagged("response_ids")[0]
    assert (prompt == PAD).sum() == 4
    assert tokenizer.decode(response) == "red<|im_end|>"
    assert batch.array("images").tolist() == [inspect_image(RED, 10**6).digest]
    assert images.store.read(str(batch.array("images")[0])) == RED


def test_an_image_behind_the_last_trained_message_is_left_out_with_it(model, tmp_path):
    answer = {"role": "assistant", "content": "red"}
    pairs = [
        [*user("<image>?"), answer, *user("<image>!")],
        [*user("<image>?"), answer, *user("<image>!"), answer | {"train": False}],
        [*user("<image>?"), answer, *user("<image>!"), answer],
    ]
    rows = [{"messages": chat, "images": [to_url(RED), to_url(BLUE)]} for chat in pairs]
    path = write(tmp_path / "rows.jsonl", *rows)
    data, tokenizer = ConversationsConfig(images_column="images"), load_tokenizer(model)
    images = load_row_images(data, str(model), str(tmp_path))
    batch = load_conversations(str(path), data, tokenizer, images=images).take([0, 1, 2])
    red, blue = (inspect_image(content, 10**6).digest for content in (RED, BLUE))
    assert batch.array("images").tolist() == [red, red, f"{red} {blue}"]
    parts = zip(batch.jagged("prompt_ids"), batch.jagged("response_ids"), strict=True)
    assert [[*a, *b].count(PAD) for a, b in parts] == [4, 4, 10]


def test_a_whole_prompt_trains_on_no_image_token(model, tmp_path):
    chat = [*user("<image>?"), {"role": "assistant", "content": "red"}]
    path = write(tmp_path / "rows.jsonl", {"messages": chat, "images": [to_url(RED)]})
    data = ConversationsConfig(images_column="images", train_on_prompt=True)
    images = load_row_images(data, str(model), str(tmp_path))
    batch = load_conversations(str(path), data, load_tokenizer(model), images=images).take([0])
    ids, mask = batch.jagged("response_ids")[0], batch.jagged("response_mask")[0]
    assert (ids == PAD).sum() == 4
    assert (mask == (ids != PAD)).all()


def test_a_warm_start_has_the_images_of_its_rows(model, tmp_path):
    chat = [*user("<image>?"), {"role": "assistant", "content": "red"}]
    rows = {"messages": chat, "images": [to_url(RED)]}, {"messages": user("x") + chat[1:]}
    path = write(tmp_path / "rows.jsonl", *rows)
    data, tokenizer = DataConfig(images_column="images"), load_tokenizer(model)
    images = load_row_images(data, str(model), str(tmp_path))
    chats = load_chats(str(path), data, 64, tokenizer, images=images)
    assert [bool(name) for name in chats.array("images").tolist()] == [True, False]
    path = write(
        tmp_path / "pairs.jsonl",
        {"messages": user("<image>?"), "response": "red", "images": [to_url(RED)]},
    )
    pairs = load_supervised(str(path), data, "response", tokenizer, images)
    assert pairs.jagged("prompt_ids")[0].tolist().count(PAD) == 4


def test_rows_are_checked_with_few_images_in_memory(model, tmp_path):
    (tmp_path / "large.bmp").write_bytes(draw(512, 512, kind="BMP"))
    rows = [{"prompt": user("<image>?"), "images": ["large.bmp"]}] * 300
    path = write(tmp_path / "rows.jsonl", *rows)
    data = DataConfig(prompt_column="prompt", images_column="images")
    images, tokenizer = load_row_images(data, str(model), str(tmp_path)), load_tokenizer(model)
    reader = RowImages(**_fields(images, tmp_path))
    tracemalloc.start()
    try:
        load_prompts(path, data, tokenizer, images=reader)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 64 << 20  # all of them: 225 MiB
