"""Damaged and hostile files end in one clear error, or are read as everybody else reads them.

Each case is written, opened and read in this process, from a fixed seed. A crash would end the
test run; a hang shows in the time that a case may take.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open

import mcore_rl.models  # noqa: F401  (fills the family registry)
from mcore_rl.checkpoint.fp8 import build_quantization_config, is_block_quantized, quantize_blocks
from mcore_rl.checkpoint.hf import INDEX_FILE, CheckpointReader, SafetensorsFile
from mcore_rl.checkpoint.hf_writer import TensorPlan, plan_shards, write_index, write_shard
from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import FIELDS, get_family, get_model_sizes, pad_vocab_size, read_config
from mcore_rl.reshard.rules import Box, Weight, check_cover, list_logical_tensors
from tests.nightly import all_but

NUM_HEADERS, NUM_BYTES, NUM_CONFIGS, NUM_INDICES = 800, 400, 350, 150
LIMIT_S = 10.0  # of one case, on a busy machine
DEEP = 20_000  # more than any parser's stack

# What may stand where a number, a name or a list belongs, as JSON text.
VALUES = [
    "null", "true", "false", "0", "-0", "-1", "1", "2", "3", "7", "64", "1.0", "0.5", "1e3",
    "1e999", "NaN", "-Infinity", "4294967296", "9223372036854775807", "9223372036854775808",
    "18446744073709551616", "1" + "0" * 400, "9" * 5000, '""', '"7"', '"F32"', '"BF16"', '"F4"',
    '"U64"', '"\\ud800"', '"\\u0000"', '"a\\nb"', '"' + "x" * 5000 + '"', "[]", "[1]", "[0, 4]",
    "[4, 0]", "[-1, 3]", "[1099511627776]", "[0, 9223372036854775808]", "[2, 3, 4]", "[[]]", "{}",
    '{"a": 1}', '["a"]', "[null]", "[" * 200 + "]" * 200, "[" * DEEP, '{"a":' * DEEP,
]  # fmt: skip


@contextmanager
def check_outcome(case: object, outcomes: Counter[str]) -> Iterator[None]:
    """Check that the block ends soon, normally or with a ConfigError of one printable line."""
    start = time.monotonic()
    try:
        yield
        outcomes["accepted"] += 1
    except ConfigError as error:
        assert str(error).isprintable(), (case, str(error))
        assert len(str(error)) < 8000, case
        outcomes["refused"] += 1
    assert time.monotonic() - start < LIMIT_S, case


def replace_text(rng: random.Random, text: str) -> str:
    """Replace a value of a JSON text, or drop or repeat a part of it."""
    marks = [i for i, character in enumerate(text) if character in "{}[],:"]
    start, end = sorted(rng.sample(marks, 2))
    match rng.randrange(4):
        case 0:
            return text[: start + 1] + rng.choice(VALUES) + text[end:]
        case 1:
            return text[:start] + text[end:]
        case 2:
            return text[:end] + text[start:]
        case _:
            return text.replace(rng.choice(["F32", "BF16", "shape", "0", "1", "4"]), "2", 1)


def replace_value(rng: random.Random, value: Any) -> str:
    """Replace a value of an object, however deep; return it as JSON."""
    places: list[tuple[Any, Any]] = []

    def visit(node: Any) -> None:
        keys = node.keys() if isinstance(node, dict) else range(len(node))
        for key in keys:
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                visit(node[key])

    value = json.loads(json.dumps(value))
    visit(value)
    node, key = rng.choice(places)
    node[key] = "@"
    return json.dumps(value).replace('"@"', rng.choice(VALUES))


def build_file(text: str, data: bytes) -> bytes:
    header = text.encode()
    return len(header).to_bytes(8, "little") + header + data


def read_all(path: Path) -> None:
    """Read a file by our reader, and compare with the library if it is accepted."""
    file = SafetensorsFile(path)
    with safe_open(path, framework="pt") as library:
        assert sorted(library.keys()) == sorted(file.entries)
        for name, entry in file.entries.items():
            out = torch.empty(entry.shape, dtype=entry.dtype)
            file.read_into(name, None, out)
            tensor = library.get_tensor(name)
            assert (tensor.dtype, tensor.shape) == (out.dtype, out.shape)
            assert bytes_equal(tensor, out)
            if out.numel() and out.dim():
                box = Box((0,) * out.dim(), (1,) * out.dim())
                first = torch.empty(box.sizes, dtype=entry.dtype)
                file.read_into(name, box, first)
                assert bytes_equal(first, tensor[box.slices])


def bytes_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def is_refused_by_the_library(path: Path) -> bool:
    try:
        with safe_open(path, framework="pt"):
            return False
    except (SafetensorError, OSError):
        return True


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], bytes]]:
    """Header and data of small files: one as the library writes it, one with checksums."""
    folder = tmp_path_factory.mktemp("sources")
    tensors = {"a": torch.arange(12.0).reshape(4, 3), "b": torch.arange(4.0).bfloat16()}
    plans = [TensorPlan(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]
    [shard] = plan_shards(plans, 1 << 20)
    write_shard(folder, shard, tensors.items())
    data = (folder / shard.file).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    plain = {name: info for name, info in header.items() if name != "__metadata__"}
    return [(header, data[8 + length :]), (plain, data[8 + length :])]


def change_header(rng: random.Random, header: dict[str, Any]) -> str:
    """Return a header that may be valid: other dtypes, shapes and names for the same bytes."""
    header = json.loads(json.dumps(header))
    info = header[rng.choice("ab")]
    match rng.randrange(6):
        case 0:
            info["dtype"] = rng.choice(["F32", "I32", "U32", "F16", "I16", "BF16", "U16", "F64"])
        case 1:
            info["shape"] = rng.choice([[3, 4], [12], [2, 2, 3], [4, 1], [2, 2], [1, 12, 1]])
        case 2:
            header[rng.choice(["c", "", "é", " ", "x" * 1000])] = header.pop("a")
        case 3:
            header["none"] = {
                "dtype": "F32",
                "shape": rng.choice([[0], [0, 9]]),
                "data_offsets": [0, 0],
            }
        case 4:
            info["more"] = [{"a": 1}]
        case _:
            header = dict(reversed(header.items()))
    return json.dumps(header, indent=rng.choice([None, 1]))


def damage_header(rng: random.Random, header: dict[str, Any], data: bytes) -> bytes:
    choice = rng.randrange(3)
    if choice == 0:
        return build_file(change_header(rng, header), data)
    text = replace_value(rng, header) if choice == 1 else replace_text(rng, json.dumps(header))
    if rng.random() < 0.1:
        text = (
            rng.choice(["", " ", "\ufeff", "{", "[" * DEEP, '{"a":' * DEEP, "null", "\x00"]) + text
        )
    if rng.random() < 0.1:
        data = data[: rng.randrange(len(data))] + rng.randbytes(rng.randrange(20))
    return build_file(text, data)


def damage_bytes(rng: random.Random, header: dict[str, Any], data: bytes) -> bytes:
    data_bytes = bytearray(build_file(json.dumps(header), data))
    match rng.randrange(5):
        case 0:
            data_bytes[rng.randrange(8)] = rng.randrange(256)  # the length
        case 1:
            del data_bytes[rng.randrange(len(data_bytes)) :]
        case 2:
            data_bytes[rng.randrange(8, len(data_bytes))] ^= 1 << rng.randrange(8)
        case 3:
            start = rng.randrange(len(data_bytes))
            data_bytes[start : start + rng.randrange(30)] = rng.randbytes(rng.randrange(30))
        case _:
            data_bytes = bytearray(rng.randbytes(rng.randrange(200)))
    return bytes(data_bytes)


@pytest.mark.parametrize(
    ("damaged", "count"), [(damage_header, NUM_HEADERS), (damage_bytes, NUM_BYTES)]
)
def test_damaged_safetensors_files(tmp_path, sources, damaged: Callable[..., bytes], count):
    rng, outcomes = random.Random(4), Counter[str]()
    path = tmp_path / "a.safetensors"
    for case in range(count):
        path.write_bytes(damaged(rng, *sources[case % 2]))
        refused = outcomes["refused"]
        with check_outcome(case, outcomes):
            read_all(path)
        if is_refused_by_the_library(path):
            assert outcomes["refused"] > refused, case
    assert os.listdir(tmp_path) == ["a.safetensors"]
    assert min(outcomes["accepted"], outcomes["refused"]) > count // 50, outcomes


# Folders of tiny models.

_ATTENTION: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 12, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
    "tie_word_embeddings": False, "max_position_embeddings": 64, "attention_bias": False,
}  # fmt: skip
_GROUPED = {**_ATTENTION, "num_key_value_heads": 2, "head_dim": 2}
_SHARED = {
    "moe_intermediate_size": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
}  # fmt: skip
CONFIGS: list[dict[str, Any]] = [
    {**_GROUPED, "architectures": ["LlamaForCausalLM"], "mlp_bias": False, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }},
    {**_GROUPED, "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False,
     "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True},
    {**_GROUPED, "architectures": ["Qwen3ForCausalLM"], "rope_parameters": {"rope_theta": 1e6}},
    {**_GROUPED, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "mlp_only_layers": [1],
     "num_experts_per_tok": 2, "decoder_sparse_step": 1, "norm_topk_prob": True,
     "moe_intermediate_size": 4},
    {**_GROUPED, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4,
     "num_experts_per_tok": 2, "sliding_window": None},
    {**_GROUPED, **_SHARED, "architectures": ["Glm4MoeForCausalLM"], "use_qk_norm": True,
     "partial_rotary_factor": 0.5},
    {**_ATTENTION, **_SHARED, "architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 4,
     "kv_lora_rank": 4, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 2,
     "num_key_value_heads": 4, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
     "moe_layer_freq": 1, "quantization_config": build_quantization_config([]), "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
     }},
]  # fmt: skip


def save(folder: Path, config: dict[str, Any]) -> Path:
    """Write a model's folder of two files, in float8 if its config says so."""
    folder.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for tensor in list_logical_tensors(get_family(config).weights(config, config["vocab_size"])):
        tensors[tensor.name] = torch.ones(tensor.shape)
        if "quantization_config" in config and is_block_quantized(tensor.name, tensor.shape):
            q, scales = quantize_blocks(tensors[tensor.name])
            tensors |= {tensor.name: q, f"{tensor.name}_scale_inv": scales}
    plans = [TensorPlan(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]
    shards = plan_shards(plans, sum(plan.nbytes for plan in plans) * 2 // 3)
    for shard in shards:
        write_shard(folder, shard, [(name, tensors[name]) for name in shard.entries])
    write_index(folder, shards)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [save(root / str(number), config) for number, config in enumerate(CONFIGS)]


def open_model(folder: Path) -> None:
    """Check a model as before conversion or a run.

    If it is accepted, the folder has the tensors of the rules, in their shapes, and the rules read
    each element of them once.
    """
    reader = CheckpointReader(folder)
    weights = build_rules(reader.read_config())
    reader.check(list_logical_tensors(weights))
    check_cover(weights, 1)


def build_rules(config: dict[str, Any]) -> tuple[Weight, ...]:
    family = get_family(config)
    family.config_map(config)
    get_model_sizes(config)
    return family.weights(config, pad_vocab_size(config, 1))


def test_the_models_are_accepted_as_they_are(folders):
    assert {folder.name for folder in folders} == set("0123456")
    for folder in folders:
        open_model(folder)


def fuzz_file(
    folders: list[Path], name: str, count: int, fields: list[str], seed: int
) -> Counter[str]:
    rng, outcomes = random.Random(seed), Counter[str]()
    originals = {folder: (folder / name).read_text() for folder in folders}
    for case in range(count):
        folder = folders[case % len(folders)]
        before = sorted(os.listdir(folder))
        config = json.loads(originals[folder])
        match rng.randrange(4):
            case 0:
                text = replace_text(rng, originals[folder])
            case 1 if fields:
                text = json.dumps(config | {rng.choice(fields): "@"})
                text = text.replace('"@"', rng.choice(VALUES))
            case _:
                text = replace_value(rng, config)
        (folder / name).write_text(text)
        with check_outcome((case, text[:2000]), outcomes):
            open_model(folder)
        assert sorted(os.listdir(folder)) == before
        (folder / name).write_text(originals[folder])
    return outcomes


def test_damaged_configs(folders):
    """Damage fields, also of other families: they have no effect, or are named."""
    outcomes = fuzz_file(folders, "config.json", NUM_CONFIGS, sorted(FIELDS), seed=5)
    assert min(outcomes["accepted"], outcomes["refused"]) > NUM_CONFIGS // 50, outcomes


def test_damaged_indices(folders):
    outcomes = fuzz_file(folders, INDEX_FILE, NUM_INDICES, [], seed=6)
    assert min(outcomes["accepted"], outcomes["refused"]) > 0, outcomes


@pytest.mark.parametrize("number", all_but((3, 5), range(len(CONFIGS))))
def test_every_field_of_a_config_may_hold_anything(tmp_path, number):
    """Check that accepted configs give rules that read each element of each tensor once."""
    outcomes, file = Counter[str](), tmp_path / "config.json"
    values = ["null", "true", "0", "-1", "3", "1.5", "NaN", '"7"', "[{}]", "{}"]
    for name in FIELDS:
        for value in values:
            file.write_text(json.dumps(CONFIGS[number] | {name: "@"}).replace('"@"', value))
            with check_outcome((name, value), outcomes):
                check_cover(build_rules(read_config(tmp_path)), 1)
    assert min(outcomes["accepted"], outcomes["refused"]) > len(FIELDS), outcomes
