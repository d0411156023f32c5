"""Images in the FSDP2 engine: as transformers alone has them, whatever images other ranks have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import tiny_models
import torch
import torch_reference
from test_fsdp_engine import LAYOUTS, TEMPERATURE, build_spec, join_rows

from mcore_rl.config.schema import FSDPConfig, Layout
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.image_files import inspect_image
from mcore_rl.data.images import ImageStore, ImageTokens
from mcore_rl.engine.base import create_engine
from mcore_rl.parallel.mesh import Mesh
from tests import tiny_vision
from tests.nightly import all_but
from tests.unit.data.test_images import draw

SIZES = {"red": (64, 64), "blue": (96, 64), "green": (40, 130)}
IMAGES = {name: inspect_image(draw(*size, name), 10**6) for name, size in SIZES.items()}
# Images of the samples: before the prompt's text, and inside the response.
SAMPLES = {0: ("red", ""), 1: ("red", ""), 2: ("red", "blue"), 3: ("", "green"), 4: ("blue", "")}
VIDEO = tiny_vision.get_special_id("<|video_pad|>")


def make_batch(tokens: ImageTokens) -> Batch:
    """Samples of two turns, with and without images; one ends with a token for an image."""
    batch = tiny_models.make_batch()
    prompts, responses = ([*batch.jagged(f"{n}_ids")] for n in ("prompt", "response"))
    marks = tiny_vision.build_tokenizer().encode("<|vision_start|><|image_pad|><|vision_end|>")
    names = [""] * len(batch)
    for row, (first, second) in SAMPLES.items():
        images = [IMAGES[name] for name in (first, second) if name]
        names[row] = " ".join(image.digest for image in images)
        if first:
            ids = tokens.expand(marks, [IMAGES[first].size])
            prompts[row] = np.array([*ids, *prompts[row]])
        if second:
            ids = tokens.expand(marks, [IMAGES[second].size])
            responses[row] = np.array([*responses[row], *ids, 7, 8])
    responses[1] = np.array([*responses[1], VIDEO])
    responses[4] = np.array([*responses[4], tokens.token_id])
    lengths = [len(r) for r in responses]
    columns = {}
    for name, column in batch.columns.items():
        rows = [np.resize(row, n) for row, n in zip(column, lengths, strict=True)]
        columns[name] = Jagged.pack(rows, column.values.dtype)
    return Batch(
        columns
        | {
            "prompt_ids": Jagged.pack(prompts, np.int64),
            "response_ids": Jagged.pack(responses, np.int64),
            "images": np.array(names),
        }
    )


def start(path: Path, images: Path, layout: Layout, changes: dict[str, Any]) -> Any:
    spec = build_spec(path, layout, changes)
    model = replace(spec.model, family="transformers")
    spec = replace(spec, model=model, images_folder=str(images))
    engine = ranks.start_engine(spec, lambda spec: create_engine("language_model", spec))
    engine.mesh = Mesh(layout)
    return engine


@ranks.spawn_on_ranks()
def run_steps(
    path: Path, images: Path, layout: Layout, changes: dict[str, Any], batch: Batch
) -> ranks.Result:
    """Score the batch, and take three steps."""
    engine = start(path, images, layout, changes)
    num_computed, compute = 0, engine.vision._tokens.compute_pixels

    def count(content: bytes) -> Any:
        nonlocal num_computed
        num_computed += 1
        return compute(content)

    engine.vision._tokens.compute_pixels = count
    rows = ranks.list_rows(engine, batch)
    share = batch.take(rows)
    scored = engine.infer_batch(share, temperature=TEMPERATURE)
    scores = {
        name: {row: torch.from_numpy(v.copy()) for row, v in zip(rows, column, strict=True)}
        for name in ("log_probs", "entropy")
        for column in [scored.jagged(name)]
    }
    steps = [engine.train_batch(share, ranks.LOSS) for _ in range(3)]
    trained = dict(engine.get_per_tensor_param())
    different = {name for names in share.array("images").tolist() for name in names.split()}
    assert num_computed == len(different)  # once for the samples of a group, and all passes
    return scores | {"steps": steps, "trained": trained, "num": num_computed}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ImageStore:
    store = ImageStore.open(tmp_path_factory.mktemp("images"))
    for image in IMAGES.values():
        store.add(image)
    return store


CASES = [(kind, n) for kind in tiny_vision.KINDS for n in ("one rank", "dp2", "dp3", "replicas")]
SELECTED = [("qwen2_5_vl", "one rank"), ("qwen3_vl", "dp2"), ("qwen3_vl_moe", "dp3")]


@pytest.mark.parametrize(("kind", "name"), all_but(SELECTED, CASES))
def test_scores_and_three_steps_equal_plain_torch(kind, name, store, tmp_path):
    path = tmp_path / kind
    tiny_vision.save(path, kind)
    tokens = ImageTokens.load(path)
    assert tokens is not None
    batch, (layout, changes) = make_batch(tokens), LAYOUTS[name]
    results = run_steps(path, store.folder, layout, changes, batch)
    if layout.dp > 1:
        assert results[0]["num"] and not results[-1]["num"]  # a rank without images
    pixels = {i.digest: tokens.compute_pixels(i.content) for i in IMAGES.values()}
    model = torch_reference.load(path)
    with torch.no_grad():
        expected = torch_reference.score(model, batch, TEMPERATURE, pixels)
        for column, rows in expected.items():
            joined = join_rows(results, column)
            torch.testing.assert_close(joined, torch.cat(rows), rtol=0, atol=1e-5)
    settings = build_spec(path, layout, changes).engine.optimizer
    norms, weights = torch_reference.train(path, batch, settings, 3, pixels)
    assert [s["grad_norm"] for s in results[0]["steps"]] == pytest.approx(norms, rel=1e-5)
    for tensor, value in results[0]["trained"].items():
        torch.testing.assert_close(value, weights[tensor], rtol=0, atol=3e-6, msg=tensor)


@ranks.spawn_on_ranks(1)
def score_packs(path: Path, images: Path, batch: Batch) -> ranks.Result:
    """Score in packs and one by one."""
    scores = []
    for packing in (True, False):
        engine = start(path, images, Layout(), {"fsdp": FSDPConfig(packing=packing)})
        scores.append(torch.from_numpy(engine.infer_batch(batch).jagged("log_probs").values.copy()))
    missing = batch.with_columns(images=np.array([""] * len(batch)))
    with pytest.raises(ValueError, match="has 4 image tokens, and its 0 images are 0"):
        engine.infer_batch(missing)
    return {"packed": scores[0], "alone": scores[1]}


def test_packs_with_images_keep_sequences_apart(store, tmp_path):
    tiny_vision.save(tmp_path / "model", "qwen3_vl")
    tokens = ImageTokens.load(tmp_path / "model")
    assert tokens is not None
    [result] = score_packs(tmp_path / "model", store.folder, make_batch(tokens))
    torch.testing.assert_close(result["packed"], result["alone"], rtol=0, atol=1e-5)


@ranks.spawn_on_ranks(1)
def score_texts(path: Path, batch: Batch) -> ranks.Result:
    """Score in the engine of a run without images."""
    spec = build_spec(path, Layout(), {})
    spec = replace(spec, model=replace(spec.model, family="transformers"))
    engine = ranks.start_engine(spec, lambda spec: create_engine("language_model", spec))
    return {"log_probs": torch.from_numpy(engine.infer_batch(batch).jagged("log_probs").values)}


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_image_tokens_are_text_in_a_run_without_images(kind, tmp_path):
    tiny_vision.save(tmp_path / "model", kind)
    batch, image = tiny_models.make_batch(), tiny_vision.get_special_id("<|image_pad|>")
    responses = batch.jagged("response_ids")
    ids = responses.values.copy()
    ids[responses.offsets[:-1] + responses.lengths // 2] = image  # as a turn before may have it
    batch = batch.with_columns(response_ids=responses.with_values(ids))
    [result] = score_texts(tmp_path / "model", batch)
    with torch.no_grad():
        expected = torch_reference.score(torch_reference.load(tmp_path / "model"), batch, 1.0)
    torch.testing.assert_close(
        result["log_probs"], torch.cat(expected["log_probs"]), rtol=0, atol=1e-5
    )
