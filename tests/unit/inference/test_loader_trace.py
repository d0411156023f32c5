"""What a loader copies is found in the views of its copies; what it computes is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mcore_rl.config.errors import ConfigError
from mcore_rl.inference.vllm.loader_trace import trace_loader
from mcore_rl.weight_sync.spec import ListedParameter

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


def test_a_parameter_that_a_loader_transposes_is_refused(folder):
    class Transposed(Model):
        def load_weights(self, weights: Weights) -> None:
            super().load_weights(weights)
            self.qk.data.copy_(torch.empty(4, 4, device="meta").t())

    with pytest.raises(ConfigError, match="computes qk"):
        trace_loader(Transposed(), str(folder))


def test_a_parameter_that_a_loader_fills_in_part_is_refused(folder):
    class Partial(Model):
        def load_weights(self, weights: Weights) -> None:
            super().load_weights((n, w) for n, w in weights if n != "k.weight")

    with pytest.raises(ConfigError, match=r"computes qk \(12 of 16 elements are copies\)"):
        trace_loader(Partial(), str(folder))
