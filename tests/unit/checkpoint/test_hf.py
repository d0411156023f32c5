"""Checkpoint folders are read by slices and checked before use, in float8 blocks too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mcore_rl.checkpoint.fp8 import build_quantization_config, dequantize_blocks, quantize_blocks
from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.errors import ConfigError
from mcore_rl.jobs.remote_paths import find_published
from mcore_rl.reshard.rules import Block, Box, LogicalTensor

TENSORS = {"a": torch.arange(12.0).reshape(4, 3), "b": torch.arange(5.0)}
EXPECTED = [LogicalTensor("a", (4, 3)), LogicalTensor("b", (5,))]
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def block(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Block:
    return Block(LogicalTensor(name, ()), Box(offsets, sizes), (0,) * len(offsets))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    save_file(TENSORS, path / SINGLE)
    (path / "config.json").write_text("{}")
    return path


def with_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_a_block_is_read_as_the_slice_of_its_tensor(folder):
    reader = CheckpointReader(folder)
    reader.check(EXPECTED)
    values = reader.read(block("a", (1, 1), (2, 2)))
    assert torch.equal(values, TENSORS["a"][1:3, 1:3])
    assert (reader.get_dtype("a"), reader.quantization) == (torch.float32, None)


def test_a_block_is_read_in_another_dtype_if_given(folder):
    reader, expected = CheckpointReader(folder), TENSORS["a"][1:3].bfloat16()
    assert torch.equal(reader.read(block("a", (1, 0), (2, 3)), torch.bfloat16), expected)
    out = torch.zeros(4, 3, dtype=torch.bfloat16)
    reader.read_into(block("a", (1, 0), (2, 3)), out[2:])
    assert torch.equal(out[2:], expected)
    assert not out[:2].any()


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ([*EXPECTED, LogicalTensor("c", (1,))], "lacks tensor c"),
        (EXPECTED[:1], "has unexpected tensor b"),
        (
            [EXPECTED[0], LogicalTensor("b", (6,))],
            r"tensor b has shape \(5,\), but config.json asks",
        ),
    ],
)
def test_missing_extra_and_misshapen_tensors_are_named(folder, expected, message):
    with pytest.raises(ConfigError, match=message):
        CheckpointReader(folder).check(expected)


def test_rotary_frequencies_of_a_checkpoint_are_no_weights(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({**TENSORS, name: torch.ones(32)}, folder / SINGLE)
    reader = CheckpointReader(folder)
    reader.check(EXPECTED)
    assert reader.get_shapes().keys() == TENSORS.keys()


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROWS = torch.arange(5000.0)[:, None].expand(-1, 2).contiguous()  # more than are compared at once


def tied_folder(path: Path, head: torch.Tensor, *, is_tied: bool = True) -> CheckpointReader:
    (path / "config.json").write_text(json.dumps({"tie_word_embeddings": is_tied}))
    save_file({EMBEDDING: ROWS}, path / "one.safetensors")
    save_file({HEAD: head}, path / "two.safetensors")
    return CheckpointReader(path)


def test_a_tied_head_that_equals_the_embedding_is_no_weight(tmp_path):
    reader = tied_folder(tmp_path, ROWS.clone())
    reader.check([LogicalTensor(EMBEDDING, (5000, 2))])
    assert reader.get_shapes() == {EMBEDDING: (5000, 2)}
    assert [name for name, _, _ in reader.list_stored()] == [EMBEDDING]


@pytest.mark.parametrize(
    "head",
    [
        ROWS.clone().index_fill_(0, torch.tensor([4999]), 1.0),
        ROWS.clone().index_fill_(0, torch.tensor([0]), -0.0),
        ROWS.double(),
        ROWS[:4999].clone(),
    ],
    ids=["last row", "sign of zero", "dtype", "rows"],
)
def test_a_tied_head_that_is_not_the_embedding_is_refused(tmp_path, head):
    """vLLM would take the embedding, and transformers this head."""
    message = f"has {HEAD}, which is not {EMBEDDING}, .*=true; allowed: no such tensor"
    with pytest.raises(ConfigError, match=message):
        tied_folder(tmp_path, head).check([LogicalTensor(EMBEDDING, (5000, 2))])


def test_a_head_that_is_not_tied_is_a_weight_although_it_equals_the_embedding(tmp_path):
    reader = tied_folder(tmp_path, ROWS.clone(), is_tied=False)
    assert reader.get_shapes().keys() == {EMBEDDING, HEAD}
    with pytest.raises(ConfigError, match=f"has unexpected tensor {HEAD}"):
        reader.check([LogicalTensor(EMBEDDING, (5000, 2))])


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e5m2, torch.bool])
def test_a_tensor_of_another_dtype_than_weights_have_is_named(folder, dtype):
    save_file({"a": torch.zeros(4, 3, dtype=dtype), "b": TENSORS["b"]}, folder / SINGLE)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ConfigError, match=f"tensor a has dtype {name}; allowed: float32, bfloat16"):
        CheckpointReader(folder).check(EXPECTED)


def test_a_name_that_the_folder_lacks_is_an_error(folder):
    reader = CheckpointReader(folder)
    for call in (reader.get_shape, reader.get_dtype):
        with pytest.raises(ConfigError, match="lacks tensor z"):
            call("z")


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no .*safetensors file in it"):
        CheckpointReader(tmp_path)


def test_a_damaged_file_is_named(folder):
    (folder / SINGLE).write_bytes(b"not a header")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read as safetensors"):
        CheckpointReader(folder)


def test_shapes_of_a_checkpoint_in_parts_come_from_its_files(tmp_path):
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(4)}, tmp_path / "two.safetensors")
    assert CheckpointReader(tmp_path).get_shapes() == {"a": (2, 3), "b": (4,)}
    with_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    save_file({"c": torch.zeros(4)}, tmp_path / "three.safetensors")  # not of the checkpoint
    assert CheckpointReader(tmp_path).get_shapes() == {"a": (2, 3), "b": (4,)}


def test_the_one_file_of_a_model_is_read_and_not_what_lies_beside_it(folder):
    save_file({"x": torch.zeros(1)}, folder / "consolidated.safetensors")
    assert CheckpointReader(folder).get_shapes() == {"a": (4, 3), "b": (5,)}


def test_a_tensor_in_two_files_is_named(tmp_path):
    for name in ("one", "two"):
        save_file({"a": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match=r"one\.safetensors and .*two\.\w+ both have tensor a"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "model-00002-of-00002.safetensors"}, "names 'model-00002-of-00002.*', which is not"),
        ({"a": "../model/model.safetensors"}, "names '../model/model.*', which is not"),
        ({"a": SINGLE, "b": SINGLE, "z": SINGLE}, r"model\.safetensors has no tensor 'z', which"),
        ({"a": SINGLE}, r"model\.safetensors has tensor b, which .* does not name"),
        ({"a": 1}, "it has no weight_map of file names"),
        ([], "it has no weight_map of file names"),
        ({}, "there is no .*safetensors file in it"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(folder, weight_map, message):
    with_index(folder, weight_map)
    with pytest.raises(ConfigError, match=message):
        CheckpointReader(folder)


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000])
def test_an_index_that_is_no_json_object_is_refused(folder, text):
    (folder / INDEX).write_text(text)
    with pytest.raises(ConfigError, match=rf"{INDEX} (is not valid JSON|is a JSON list)"):
        CheckpointReader(folder)


# Float8 blocks.

WEIGHT, SCALES = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight_scale_inv"
TENSOR = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
Q, S = quantize_blocks(TENSOR)


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    """Its scales in another file, as they may be."""
    path = tmp_path / "quantized"
    path.mkdir()
    save_file({WEIGHT: Q, "norm": TENSORS["b"]}, path / "one.safetensors")
    save_file({SCALES: S}, path / "two.safetensors")
    config = {"quantization_config": build_quantization_config([WEIGHT])}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_weight_in_float8_is_one_tensor(quantized):
    reader = CheckpointReader(quantized)
    reader.check([LogicalTensor(WEIGHT, (300, 200)), LogicalTensor("norm", (5,))])
    assert reader.quantization == "fp8, blocks of 128 x 128"
    assert reader.get_shapes() == {WEIGHT: (300, 200), "norm": (5,)}
    assert (reader.get_dtype(WEIGHT), reader.get_dtype("norm")) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("offsets", "sizes"), [((0, 0), (300, 200)), ((120, 0), (60, 200)), ((131, 127), (2, 2))]
)
def test_a_box_of_a_weight_in_float8_is_the_slice_of_the_product(quantized, dtype, offsets, sizes):
    expected = dequantize_blocks(Q, S, dtype or torch.bfloat16)[Box(offsets, sizes).slices]
    values = CheckpointReader(quantized).read(block(WEIGHT, offsets, sizes), dtype)
    assert values.dtype == expected.dtype
    assert torch.equal(values, expected)


def test_scales_may_be_in_bfloat16(quantized):
    save_file({SCALES: S.bfloat16()}, quantized / "two.safetensors")
    values = CheckpointReader(quantized).read(block(WEIGHT, (0, 0), (300, 200)))
    assert torch.equal(values, dequantize_blocks(Q, S.bfloat16(), torch.bfloat16))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({WEIGHT: Q}, {"x": S}, f"{WEIGHT} is in float8_e4m3fn, but its scales {SCALES}"),
        ({WEIGHT: TENSOR}, {SCALES: S}, f"{SCALES} are scales, but there is no {WEIGHT} in float8"),
        ({"x": TENSOR}, {SCALES: S}, f"{SCALES} are scales, but there is no {WEIGHT} in float8"),
        (
            {WEIGHT: Q},
            {SCALES: S[:2]},
            r"shape \(2, 2\); allowed .* of shape \(3, 2\), one for each",
        ),
        (
            {WEIGHT: Q},
            {SCALES: S.double()},
            "is float64 of shape .* allowed .*: float32 or bfloat16",
        ),
        ({WEIGHT: Q[0]}, {SCALES: S}, r"float8_e4m3fn with shape \(200,\); allowed: matrices"),
    ],
)
def test_values_and_scales_that_do_not_fit_are_named(quantized, first, second, message):
    save_file({name: t.contiguous() for name, t in first.items()}, quantized / "one.safetensors")
    save_file({name: t.contiguous() for name, t in second.items()}, quantized / "two.safetensors")
    with pytest.raises(ConfigError, match=message):
        CheckpointReader(quantized)


# Experts: slices of a stack, and in MXFP4.

STACK = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1))


def test_a_slice_of_a_stack_is_read_under_its_own_name(tmp_path):
    save_file({"e": STACK, "b": STACK[0].clone()}, tmp_path / "model.safetensors")
    reader = CheckpointReader(tmp_path)
    slices = [LogicalTensor(f"e[{i}].T", (6, 4)) for i in range(3)]
    reader.check([*slices, *(LogicalTensor(f"b[{i}]", (6,)) for i in range(4))])
    assert reader.get_shapes() == {"e": (3, 4, 6), "b": (4, 6)}
    assert torch.equal(reader.read_tensor("e[2].T"), STACK[2].T)
    assert torch.equal(reader.read_tensor("e[1]"), STACK[1])
    assert torch.equal(reader.read_tensor("b[3]"), STACK[0, 3])
    box = Block(LogicalTensor("e[1].T", (6, 4)), Box((2, 1), (3, 2)), (0, 0))
    assert torch.equal(reader.read(box), STACK[1].T[2:5, 1:3])
    with pytest.raises(ConfigError, match=r"tensor e has shape \(3, 4, 6\), but .* \(2, 4, 6\)"):
        reader.check([*slices[:2], LogicalTensor("b", (4, 6))])
    with pytest.raises(ValueError, match="e: its slices are"):
        reader.check([slices[0], slices[2]])


GENERATOR = torch.Generator().manual_seed(2)
BLOCKS = torch.randint(0, 256, (3, 6, 2, 16), generator=GENERATOR, dtype=torch.uint8)
EXPONENTS = torch.randint(100, 140, (3, 6, 2), generator=GENERATOR, dtype=torch.uint8)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    path = tmp_path / "packed"
    path.mkdir()
    save_file({"e_blocks": BLOCKS, "e_scales": EXPONENTS}, path / "model.safetensors")
    (path / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    return path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_in_mxfp4_are_those_that_transformers_makes_of_them(packed, dtype):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    expected = convert_moe_packed_tensors(BLOCKS, EXPONENTS, dtype=dtype)
    reader = CheckpointReader(packed)
    assert reader.quantization == "mxfp4, blocks of 32"
    assert reader.get_shapes() == {"e": (3, 64, 6)} == {"e": tuple(expected.shape)}
    assert reader.get_dtype("e") == reader.get_dtype("e[0].T") == torch.bfloat16
    box = Box((1, 30, 2), (2, 5, 3))
    assert torch.equal(
        reader.read(Block(LogicalTensor("e", (3, 64, 6)), box, (0, 0, 0)), dtype),
        expected[box.slices],
    )
    assert torch.equal(reader.read_tensor("e").to(dtype), expected)
    assert torch.equal(reader.read_tensor("e[2].T").to(dtype), expected[2].T)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"e_blocks": BLOCKS}, "e_blocks is there, but e_scales is missing; allowed: all"),
        ({"e_scales": EXPONENTS}, "e_scales is there, but e_blocks is missing"),
        (
            {"e_blocks": BLOCKS, "e_scales": EXPONENTS[:2]},
            r"e_scales has shape \(2, 6, 2\); allowed",
        ),
        ({"e_blocks": BLOCKS[..., :8], "e_scales": EXPONENTS}, r"e_blocks has shape .*; allowed"),
        ({"e_blocks": BLOCKS, "e_scales": EXPONENTS.float()}, "has dtype torch.float32; allowed"),
    ],
)
def test_blocks_and_scales_that_do_not_fit_are_named(packed, tensors, message):
    save_file({n: t.contiguous() for n, t in tensors.items()}, packed / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        CheckpointReader(packed)


INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "kv_cache_scheme": None,
    "sparsity_config": {}, "transform_config": {},
    "quantization_status": "compressed", "ignore": ["lm_head", "re:.*self_attn.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "input_activations": None, "output_activations": None,
            "weights": {
                "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                "group_size": 32, "actorder": None, "block_structure": None, "dynamic": False,
                "observer": "minmax", "observer_kwargs": {},
            },
        }
    },
}  # fmt: skip
# All values of 4 bits, in whatever order; rows that no round number divides.
GROUPS = {
    "e.weight_packed": torch.randint(-(2**31), 2**31, (7, 12), generator=GENERATOR).int(),
    "e.weight_scale": torch.randn(7, 3, generator=GENERATOR).bfloat16(),
    "e.weight_shape": torch.tensor([7, 96]),
}


@pytest.fixture
def int4(tmp_path: Path) -> Path:
    path = tmp_path / "int4"
    path.mkdir()
    save_file({**GROUPS, "logit_scale": torch.ones(1)}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": INT4}))
    return path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_in_int4_are_those_that_compressed_tensors_makes_of_them(int4, dtype):
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    parts = {name.removeprefix("e."): tensor for name, tensor in GROUPS.items()}
    scheme = QuantizationScheme(**INT4["config_groups"]["group_0"])
    expected = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
    assert expected.dtype == torch.bfloat16
    reader = CheckpointReader(int4)
    assert reader.quantization == "int4, groups of 32"
    assert reader.get_shapes() == {"e.weight": (7, 96), "logit_scale": (1,)}
    assert reader.get_dtype("e.weight") == torch.bfloat16
    assert torch.equal(reader.read_tensor("e.weight"), expected)
    for box in (Box((0, 0), (7, 96)), Box((2, 30), (3, 5)), Box((6, 32), (1, 64))):
        block = Block(LogicalTensor("e.weight", (7, 96)), box, (0, 0))
        assert torch.equal(reader.read(block, dtype), expected[box.slices].to(dtype))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"e.weight_scale": None}, "packed is there, but e.weight_scale is missing; allowed: all"),
        ({"e.weight_packed": None}, "e.weight_scale is there, but e.weight_packed is missing"),
        (
            {"e.weight_packed": GROUPS["e.weight_packed"][:, :5]},
            r"e.weight_packed has shape \(7, 5\); allowed: .* multiple of 32 columns",
        ),
        (
            {"e.weight_scale": GROUPS["e.weight_scale"][:, :2]},
            r"e.weight_scale is torch.bfloat16 of shape \(7, 2\); allowed: .* of shape \(7, 3\)",
        ),
        ({"e.weight_scale": GROUPS["e.weight_scale"].half()}, "torch.float16 .*: torch.bfloat16"),
        ({"e.weight_packed": GROUPS["e.weight_packed"].long()}, "torch.int64 .*: torch.int32"),
        ({"e.weight_zero_point": torch.zeros(1)}, "unexpected tensor e.weight_zero_point"),
    ],
)
def test_values_and_scales_of_int4_that_do_not_fit_are_named(int4, change, message):
    tensors = {n: t.contiguous() for n, t in {**GROUPS, **change}.items() if t is not None}
    save_file(tensors, int4 / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        CheckpointReader(int4).check([LogicalTensor("e.weight", (7, 96))])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "int-quantized"}, "format='int-quantized' is not .* 'pack-quantized'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme=.* allowed: None"),
        ([], r"quantization_config=\[\] is not an object"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config=.* allowed: None"),
        ({"config_groups": {}}, "config_groups={} is not supported; allowed: an object of groups"),
        ({"config_groups": {"a": 1}}, "config_groups.a=1 is not supported; allowed: an object"),
        ({"num_bits": 8}, "config_groups.group_0.weights.num_bits=8 is not .* allowed: 4"),
        ({"group_size": 128}, "weights.group_size=128 is not .* allowed: 32"),
        ({"symmetric": False}, "weights.symmetric=False is not .* allowed: True"),
        ({"actorder": "group"}, "weights.actorder='group' is not .* allowed: None"),
        ({"strategy": None}, "weights.strategy=None is not .* allowed: 'group'"),
    ],
)
def test_other_schemes_of_compressed_tensors_are_refused(int4, change, message):
    quantization = json.loads(json.dumps(INT4))
    weights = quantization["config_groups"]["group_0"]["weights"]
    for name, value in change.items() if change else ():
        (weights if name in weights else quantization)[name] = value
    quantization = quantization if change else change
    (int4 / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    with pytest.raises(ConfigError, match=message):
        CheckpointReader(int4)


def test_weights_that_are_quantised_in_another_way_are_refused(folder):
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    with pytest.raises(
        ConfigError, match="quant_method='gptq' is not supported; allowed: 'fp8', 'mxfp4'"
    ):
        CheckpointReader(folder)


def test_the_config_of_a_quantised_model_is_that_of_the_model(quantized):
    config = json.loads((find_published("DeepSeek-V3") / "config.json").read_text())
    config["quantization_config"] = build_quantization_config([])
    (quantized / "config.json").write_text(json.dumps(config))
    values = CheckpointReader(quantized).read_config()
    del config["quantization_config"]
    assert values == config | {"num_nextn_predict_layers": 0}  # the weights have none
