"""Copies of a loader are followed by the views on both sides; computed values are refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.config import LoadConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader import get_model_loader

from mcore_rl.checkpoint import fp8
from mcore_rl.config.errors import ConfigError
from mcore_rl.inference.vllm import weights as vllm_weights
from mcore_rl.inference.vllm.loader_trace import trace_loader
from mcore_rl.inference.vllm.server import list_worker_parameters
from mcore_rl.inference.vllm.worker import WorkerExtension
from mcore_rl.reshard.float8 import SCALE_SUFFIX
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.weight_sync.spec import ListedParameter, build_listed_side

Weights = Iterable[tuple[str, torch.Tensor]]
TENSORS = {
    "q.weight": (6, 4), "k.weight": (2, 4), "norm.weight": (4,), "scale": (1,),
    "experts.0.up": (3, 4), "experts.1.up": (3, 4),
}  # fmt: skip


class Model(torch.nn.Module):
    """A worker of two: half of q and k in one parameter, experts stacked, the rest whole."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(4, 4))
        self.norm = torch.nn.Parameter(torch.zeros(4))
        self.scale = torch.nn.Parameter(torch.zeros(1))
        self.up = torch.nn.Parameter(torch.zeros(2, 3, 4))
        self.change = change

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            if name == "q.weight":
                self.qk.data.narrow(0, 0, 3).copy_(weight.narrow(0, 3, 3).to(torch.float64))
            elif name == "k.weight":
                self.qk.data[3:4] = weight[1:2]
            elif name == "norm.weight":
                self.norm.data.copy_(self.change(weight.clone()))
            elif name == "scale":
                self.scale.data.copy_(weight)
            else:
                self.up.data[int(name.split(".")[1])].copy_(weight)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {name: torch.randn(shape) for name, shape in TENSORS.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def describe(listed: ListedParameter) -> list[object]:
    return [(b.tensor.name, b.box.offsets, b.box.sizes, b.local_offset) for b in listed.blocks]


def test_boxes_are_those_of_the_views_that_a_loader_copies(folder):
    listed = {item.name: item for item in trace_loader(Model(), str(folder))}
    assert listed.keys() == {"qk", "norm", "scale", "up[0]", "up[1]"}
    assert sorted(describe(listed["qk"])) == [
        ("k.weight", (1, 0), (1, 4), (3, 0)),
        ("q.weight", (3, 0), (3, 4), (0, 0)),
    ]
    assert describe(listed["norm"]) == [("norm.weight", (0,), (4,), (0,))]
    assert describe(listed["scale"]) == [("scale", (0,), (1,), (0,))]
    assert describe(listed["up[1]"]) == [("experts.1.up", (0, 0), (3, 4), (0, 0))]
    assert (listed["up[0]"].shape, listed["up[0]"].dtype) == ((3, 4), "float32")
    for item in listed.values():
        assert ListedParameter.parse(item.to_list()) == item


def test_nothing_is_written_into_the_parameters(folder):
    model = Model()
    trace_loader(model, str(folder))
    assert not any(parameter.any() for parameter in model.parameters())


@pytest.mark.parametrize(
    "change", [torch.exp, lambda weight: weight + 1, lambda weight: weight.flip(0)],
    ids=["exp", "plus 1", "flip"],
)  # fmt: skip
def test_a_parameter_that_a_loader_computes_is_refused_by_name(folder, change):
    with pytest.raises(ConfigError, match=r"Model: vLLM's loader computes norm \(0 of 4 elements"):
        trace_loader(Model(change), str(folder))


def test_a_parameter_that_a_loader_fills_in_part_is_refused(folder):
    class Partial(Model):
        def load_weights(self, weights: Weights) -> None:
            super().load_weights((n, w) for n, w in weights if n != "k.weight")

    with pytest.raises(ConfigError, match=r"computes qk \(12 of 16 elements are copies\)"):
        trace_loader(Partial(), str(folder))


class Toy(torch.nn.Module):
    """A parameter `p` that `load` fills from all tensors of the checkpoint."""

    def __init__(self, shape: tuple[int, ...], load: Callable[..., Any]) -> None:
        super().__init__()
        self.p = torch.nn.Parameter(torch.full(shape, 7.0))
        self.config = {"model_type": "toy"}
        self._load = load

    def load_weights(self, weights: Weights) -> None:
        self._load(self, *(weight for _, weight in sorted(weights)))


def write_checkpoint(folder: Path, *shapes: tuple[int, ...]) -> str:
    tensors = {name: torch.randn(shape) for name, shape in zip("abcd", shapes, strict=False)}
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def copy(target: torch.Tensor, value: torch.Tensor) -> None:
    target.data.copy_(value)


def scale_weight(toy: Toy, a: torch.Tensor) -> None:
    a.add_(1)
    copy(toy.p, a)


def scale_parameter(toy: Toy, a: torch.Tensor) -> None:
    copy(toy.p, a)
    toy.p.data.mul_(2)


def clear_parameter(toy: Toy, a: torch.Tensor) -> None:
    copy(toy.p, a)
    toy.p.data[1:].zero_()


def scale_clone(toy: Toy, a: torch.Tensor) -> None:
    b = a.clone()
    b.mul_(2)
    copy(toy.p, b)


def copy_into_other_memory(toy: Toy, a: torch.Tensor) -> None:
    memory = torch.ones(4, 3)
    memory.copy_(a)
    copy(toy.p, memory)


def copy_twice_to_a_box(toy: Toy, a: torch.Tensor) -> None:
    copy(toy.p[:2], a[:2])
    copy(toy.p[:2], a[2:])


def copy_overlapping(toy: Toy, a: torch.Tensor) -> None:
    copy(toy.p[:3], a[:3])
    copy(toy.p[2:, :2], a[2:, :2])
    copy(toy.p[3:, 1:], a[3:, 1:])


def replace_parameter(toy: Toy, a: torch.Tensor) -> None:
    toy.p = torch.nn.Parameter(a)


REFUSED = {
    "weight + 1": ((4, 3), (4, 3), scale_weight),
    "parameter * 2": ((4, 3), (4, 3), scale_parameter),
    "clone * 2": ((4, 3), (4, 3), scale_clone),
    "a sum": ((4, 3), (4, 3), lambda toy, a: torch.add(a, a, out=toy.p.data)),
    "cleared": ((4, 3), (4, 3), clear_parameter),
    "ones": ((4, 3), (4, 3), lambda toy, a: toy.p.data.fill_(1)),
    "transposed": ((3, 3), (3, 3), lambda toy, a: copy(toy.p, a.t())),
    "other memory": ((4, 3), (4, 3), copy_into_other_memory),
    "a box twice": ((4, 3), (4, 3), copy_twice_to_a_box),
    "overlap": ((4, 3), (4, 3), copy_overlapping),
    "index_put": ((4, 3), (4, 3), lambda toy, a: toy.p.data.__setitem__(torch.arange(4), a)),
    "broadcast": ((4, 3), (3,), lambda toy, a: copy(toy.p, a)),
    "a dimension more in the middle": ((6, 1, 3), (6, 3), lambda toy, a: copy(toy.p, a[:, None])),
    "a dimension more at the end": ((6, 1), (6,), lambda toy, a: copy(toy.p, a[:, None])),
    "a dimension less": ((4,), (1, 4), lambda toy, a: copy(toy.p, a[0])),
    "another dimension": ((6, 1, 3), (1, 6, 3), lambda toy, a: copy(toy.p, a.view(6, 1, 3))),
    "stack of stacks": ((1, 1, 3), (3,), lambda toy, a: copy(toy.p, a[None, None])),
    "bits": ((4, 3), (4, 3), lambda toy, a: copy(toy.p, a.view(torch.int32))),
    "integers": ((4, 3), (4, 3), lambda toy, a: copy(toy.p, a.to(torch.int8))),
    "data of another dtype": ((4, 3), (4, 3), lambda toy, a: setattr(toy.p, "data", a.double())),
    "data of another shape": ((4, 3), (3, 4), lambda toy, a: setattr(toy.p, "data", a)),
    "another parameter": ((4, 3), (4, 3), replace_parameter),
}  # fmt: skip


@pytest.mark.parametrize(("shape", "source", "load"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_copy_is_refused_by_name_and_not_written(tmp_path, shape, source, load):
    toy = Toy(shape, load)
    parameter = toy.p
    with pytest.raises(ConfigError, match="Toy: vLLM's loader computes p "):
        trace_loader(toy, write_checkpoint(tmp_path, source))
    assert toy.p is parameter and bool((parameter == 7).all())


@pytest.mark.parametrize(
    "load",
    [
        lambda toy, a: a[0, 0].item(),
        lambda toy, a: a.tolist(),
        lambda toy, a: a.cpu().numpy(),
        lambda toy, a: bool(torch.isnan(a).any()),
        lambda toy, a: toy.p.data + a,
    ],
    ids=["item", "tolist", "numpy", "isnan", "sum"],
)
def test_a_loader_that_reads_values_is_refused_by_the_name_of_the_tensor(tmp_path, load):
    with pytest.raises(ConfigError, match="Toy: vLLM's loader needs values of a: "):
        trace_loader(Toy((4, 3), load), write_checkpoint(tmp_path, (4, 3)))


def assign(toy: Toy, a: torch.Tensor, b: torch.Tensor) -> None:
    toy.p.data[:2], toy.p.data[2:] = a, b


def copy_together(toy: Toy, a: torch.Tensor, b: torch.Tensor) -> None:
    torch._foreach_copy_([toy.p.data[:2], toy.p.data[2:]], [a, b])


def copy_again(toy: Toy, a: torch.Tensor, b: torch.Tensor) -> None:
    toy.p.data.zero_()
    for _ in range(2):
        assign(toy, a.to("cpu", torch.bfloat16), b)


def copy_cuts(toy: Toy, a: torch.Tensor, b: torch.Tensor) -> None:
    copy(toy.p[1:], torch.cat((b, a, b))[3:])
    copy(toy.p[:1], a[:1])


COPIES = {
    "setitem": assign,
    "foreach": copy_together,
    "data": lambda toy, a, b: setattr(toy.p, "data", torch.cat([a, b])),
    "cat": lambda toy, a, b: copy(toy.p, torch.cat((a, b))),
    "cat of cuts": copy_cuts,
    "again": copy_again,
}  # fmt: skip


@pytest.mark.parametrize("load", COPIES.values(), ids=COPIES)
def test_ways_to_copy_are_followed(tmp_path, load):
    toy = Toy((4, 3), load)
    [listed] = trace_loader(toy, write_checkpoint(tmp_path, (2, 3), (2, 3)))
    rows = [
        (name, source + row, local + row)
        for name, (source, _), (count, _), (local, _) in describe(listed)
        for row in range(count)
    ]
    assert sorted(rows, key=lambda row: row[2]) == [
        ("a", 0, 0),
        ("a", 1, 1),
        ("b", 0, 2),
        ("b", 1, 3),
    ]
    assert bool((toy.p == 7).all())


def assign_rows(toy: Toy, a: torch.Tensor, b: torch.Tensor) -> None:
    both = torch.stack([a, b])
    toy.p.data[:, :2], toy.p.data[:, 2:] = both[:, :2], both[:, 2:]


@pytest.mark.parametrize(
    "load",
    [
        lambda toy, a, b: copy(toy.p, torch.stack([a, b])),
        lambda toy, a, b: copy(toy.p[0], a) or copy(toy.p[1], b),
        assign_rows,
    ],
    ids=["stack", "rows", "stack of cuts"],
)
def test_rows_of_a_stack_are_listed_each(tmp_path, load):
    listed = trace_loader(Toy((2, 4, 3), load), write_checkpoint(tmp_path, (4, 3), (4, 3)))
    assert [(item.name, item.shape) for item in listed] == [("p[0]", (4, 3)), ("p[1]", (4, 3))]
    assert {name for name, *_ in describe(listed[1])} == {"b"}


class Attention(torch.nn.Module):
    """Query, key and value heads of a rank in one parameter, as vLLM's QKVParallelLinear."""

    def __init__(self, rank: int, tp: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.q_heads, self.kv_heads = num_heads // tp, max(1, num_kv_heads // tp)
        self.first_q = rank * self.q_heads
        self.first_kv = rank * num_kv_heads // tp
        self.qkv = torch.nn.Parameter(torch.zeros((self.q_heads + 2 * self.kv_heads) * 2, 4))
        self.norm = torch.nn.Parameter(torch.zeros(4))

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            if name == "norm":
                self.norm.data.copy_(weight)
                continue
            index = "qkv".index(name)
            start = 0 if index == 0 else self.q_heads + (index - 1) * self.kv_heads
            count, first = (
                (self.q_heads, self.first_q) if index == 0 else (self.kv_heads, self.first_kv)
            )
            target = self.qkv.data.narrow(0, start * 2, count * 2)
            target.copy_(weight.narrow(0, first * 2, count * 2))


@pytest.mark.parametrize(("num_kv_heads", "first_rows"), [(1, [0, 0, 0, 0]), (2, [0, 0, 2, 2])])
def test_key_heads_that_ranks_share_are_on_all_of_them(tmp_path, num_kv_heads, first_rows):
    shape = num_kv_heads * 2, 4
    tensors = {"q": (8, 4), "k": shape, "v": shape, "norm": (4,)}
    save_file({n: torch.randn(s) for n, s in tensors.items()}, tmp_path / "model.safetensors")
    traced = [trace_loader(Attention(rank, 4, 4, num_kv_heads), str(tmp_path)) for rank in range(4)]
    for rank, (qkv, _) in enumerate(traced):
        assert sorted(describe(qkv)) == [
            ("k", (first_rows[rank], 0), (2, 4), (2, 0)),
            ("q", (rank * 2, 0), (2, 4), (0, 0)),
            ("v", (first_rows[rank], 0), (2, 4), (4, 0)),
        ]
    lists = [[item.to_list() for item in items] for items in traced]
    ranks, weights = build_listed_side(GenerationLayout(tp=4, dp=2), lists)
    assert [(w.name, ranks.get_holders(w)) for w in weights if w.name == "norm"] == [
        ("norm", (tuple(range(8)),))
    ]


class Vocabulary(torch.nn.Module):
    """vLLM's embedding, with its own loader."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        with set_current_vllm_config(VllmConfig()):
            group: Any = SimpleNamespace(rank_in_group=rank, world_size=2)
            self.embed = VocabParallelEmbedding(size, 4, parallel_group=group)

    def load_weights(self, weights: Weights) -> None:
        for _, weight in weights:
            self.embed.weight_loader(self.embed.weight, weight)


@pytest.mark.parametrize(("size", "rows"), [(131, [96, 35]), (65, [64, 1]), (63, [32, 31])])
def test_padding_of_a_vocabulary_is_no_part_of_the_list(tmp_path, size, rows):
    path, first = write_checkpoint(tmp_path, (size, 4)), 0
    for rank, count in enumerate(rows):
        [listed] = trace_loader(Vocabulary(rank, size), path)
        assert describe(listed) == [("a", (first, 0), (count, 4), (0, 0))]
        first += count


def test_a_copy_into_the_padding_of_a_vocabulary_is_refused(tmp_path):
    model = Vocabulary(1, 131)
    model.load_weights = (
        lambda weights: [  # type: ignore[method-assign]
            copy(model.embed.weight[61:], weight[:35]) for _, weight in weights
        ]
    )
    with pytest.raises(ConfigError, match=r"computes embed.weight \(140 of 384"):
        trace_loader(model, write_checkpoint(tmp_path, (131, 4)))


def load(model: torch.nn.Module, path: Path, **options: Any) -> None:
    """Load as a server does that reads this folder."""
    vllm_weights.register_loaders()
    arguments = vllm_weights.build_loading_arguments(str(path), ep=False, **options)
    loader = get_model_loader(LoadConfig(load_format=arguments.get("load_format", "auto")))
    config: Any = SimpleNamespace(
        model=str(path), revision=None, quantization=None, multimodal_config=None, is_moe=False
    )
    with set_current_vllm_config(VllmConfig()), torch.no_grad():
        loader.load_weights(model, config)


def write_config(folder: Path, **fields: Any) -> None:
    config = {"architectures": ["ToyForCausalLM"], "model_type": "toy", **fields}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_loader_that_cannot_be_followed_loads_and_its_list_says_why(tmp_path, suffix):
    write_config(tmp_path)
    tensors = {"a": torch.randn(4, 3)}
    if suffix == "bin":
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    else:
        save_file(tensors, tmp_path / "model.safetensors")

    def read_value(toy: Toy, a: torch.Tensor) -> None:
        copy(toy.p, a + a[0, 0].item())

    toy = Toy((4, 3), read_value)
    load(toy, tmp_path)
    assert torch.equal(toy.p, tensors["a"] + tensors["a"][0, 0])
    lists, reason = vllm_weights.list_traced_parameters(toy)
    assert not lists
    assert ("needs values of a" in reason) == (suffix == "safetensors") and reason
    extension = WorkerExtension()
    extension.model_runner = SimpleNamespace(get_model=lambda: toy)

    class Engine:
        async def collective_rpc(self, method: str) -> list[Any]:
            return [([["another worker"]], ""), getattr(extension, method)()]

    with pytest.raises(ConfigError, match=r"family 'toy': .*allowed: .*'full_export'$"):
        asyncio.run(list_worker_parameters(Engine(), str(tmp_path)))


@pytest.mark.parametrize("reads_weights", [True, False])
def test_a_float8_checkpoint_of_an_unknown_family_is_dequantised_and_traced(
    tmp_path, reads_weights
):
    weight = torch.randn(256, 128)
    quantized, scales = fp8.quantize_blocks(weight)
    save_file({"a": quantized, "a" + SCALE_SUFFIX: scales}, tmp_path / "model.safetensors")
    write_config(tmp_path, quantization_config=fp8.build_quantization_config(["a"]))
    toy = Toy((256, 128), lambda toy, a: copy(toy.p, a))
    toy.config = SimpleNamespace(quantization_config=None)
    load(toy, tmp_path, reads_weights=reads_weights)
    [values], reason = vllm_weights.list_traced_parameters(toy)
    assert describe(ListedParameter.parse(values)) == [("a", (0, 0), (256, 128), (0, 0))]
    assert not reason
    if reads_weights:
        # vLLM's gpt-oss takes a field of any value for a quantisation.
        assert not hasattr(toy.config, "quantization_config")
        dequantized = fp8.dequantize_blocks(quantized, scales, torch.bfloat16)
        assert torch.equal(toy.p, dequantized.float())
