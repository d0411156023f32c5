"""Storages freed and made again: every view has its values, and what was elsewhere stays there."""

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from megatron.core.transformer import TransformerConfig

from mcore_rl.config.schema import EngineConfig, OptimizerConfig
from mcore_rl.engine import offload
from mcore_rl.engine.base import MALLOC_VARIABLES
from mcore_rl.engine.megatron import device, passthrough
from mcore_rl.engine.megatron.offload import build_memory_report, move_parts
from mcore_rl.engine.megatron.optimizer import build_optimizer, wrap_chunks
from mcore_rl.engine.offload import HostMirror, move_storages
from mcore_rl.parallel.groups import use_single_rank_groups

CPU = torch.device("cpu")


def test_views_keep_their_values_and_share_one_copy():
    buffer = torch.arange(1001.0)
    view, half = buffer[3:500].view(7, 71), torch.arange(5).to(torch.bfloat16)
    expected = view.clone(), half.clone()
    mirror = HostMirror()
    for _ in range(2):  # the block is used again
        mirror.offload([view, buffer, half, view], CPU)
        assert buffer.untyped_storage().nbytes() == half.untyped_storage().nbytes() == 0
        assert mirror.num_bytes == 4 * 1001 + 2 * 5
        mirror.reload()
        assert mirror.num_bytes == 0
        assert torch.equal(view, expected[0]) and torch.equal(half, expected[1])
        buffer += 1
        expected[0].add_(1)
        assert torch.equal(view, expected[0])


def test_tensors_of_another_device_stay_where_they_are():
    on_host, on_device = torch.arange(9.0), torch.empty(9, device="meta")
    mirror = HostMirror()
    mirror.offload([on_host], torch.device("meta"))
    assert mirror.num_bytes == 0 and on_host.sum() == 36
    mirror.offload([on_host, on_device], CPU)
    assert mirror.num_bytes == 36 and on_device.untyped_storage().nbytes() == 36


def test_what_is_away_is_not_offloaded_again():
    tensor = torch.ones(3)
    mirror = HostMirror()
    mirror.offload([tensor], CPU)
    with pytest.raises(RuntimeError, match="reload it first"):
        mirror.offload([torch.ones(4)], CPU)
    mirror.reload()
    assert tensor.tolist() == [1, 1, 1]
    mirror.reload()  # nothing is left to reload
    assert tensor.tolist() == [1, 1, 1]


def test_on_cpus_parameters_stay_where_they_are():
    model = torch.nn.Linear(2, 2)
    before = model.weight.data_ptr()
    move_parts([model], None, "host", ["parameters", "optimizer state", "gradients"], {})
    assert model.weight.data_ptr() == before


class MirrorOfHost(HostMirror):
    """A mirror whose device is this host's memory, under the name of another device."""

    def offload(self, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
        assert device == torch.device("meta")
        super().offload(tensors, CPU)


def test_named_parts_move_once_and_return_alone(monkeypatch):
    num_trims = []
    module = SimpleNamespace(empty_cache=lambda: num_trims.append(1))
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    tensors = {"parameters": torch.arange(5.0), "optimizer state": torch.arange(7.0)}
    expected = {part: tensor.clone() for part, tensor in tensors.items()}
    mirrors = {part: MirrorOfHost() for part in tensors}

    def move(place: str, *parts: str) -> list[int]:
        listed = {part: lambda part=part: [tensors[part]] for part in tensors}
        move_storages(listed, place, parts, mirrors, torch.device("meta"))
        return [tensor.untyped_storage().nbytes() for tensor in tensors.values()]

    assert move("host", "gradients") == [20, 28]  # not one of these
    assert move("host", "parameters") == [0, 28]
    assert move("host", "parameters", "optimizer state") == [0, 0]  # one is away already
    assert len(num_trims) == 3
    assert move("device", "optimizer state", "gradients") == [0, 28]
    assert move("device", "parameters") == [20, 28]
    assert move("device", "parameters") == [20, 28]
    assert len(num_trims) == 3  # what returns needs the memory
    assert all(torch.equal(tensors[part], expected[part]) for part in tensors)


def test_memory_report_counts_what_is_on_the_host_and_not_on_the_device():
    model = torch.nn.Linear(3, 2)  # 8 numbers
    model.register_buffer("steps", torch.zeros(5))
    model.weight.grad = torch.zeros_like(model.weight)  # 6 numbers
    mirrors = {"parameters": HostMirror(), "optimizer state": HostMirror()}
    before = build_memory_report([model], None, (), mirrors)
    assert (before.parameters_bytes, before.gradients_bytes, before.on_device_bytes) == (52, 24, 76)
    mirrors["parameters"].offload([*model.parameters(), *model.buffers()], CPU)
    away = build_memory_report([model], None, ("parameters",), mirrors)
    assert (away.parameters_bytes, away.gradients_bytes, away.on_device_bytes) == (52, 24, 24)


def test_what_stays_in_the_same_memory_counts_as_away_and_a_shared_storage_once():
    """The rows of 6 numbers have another name in the second layer; on CPUs none moves."""
    first, second = torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(3, 2, bias=False)
    second.weight = torch.nn.Parameter(first.weight.data.view(2, 3))
    second.register_buffer("steps", torch.zeros(5))
    report = build_memory_report([first, second], None, ("parameters",), {})
    assert (report.parameters_bytes, report.on_device_bytes) == (4 * 6 + 4 * 5, 0)


@pytest.mark.parametrize(
    ("use", "variables", "is_returned"),
    [
        (0.5, MALLOC_VARIABLES, False),
        (0.51, MALLOC_VARIABLES, True),
        (0.5, MALLOC_VARIABLES | {"MALLOC_TRIM_THRESHOLD_": "131072"}, True),
        (0.5, {}, True),
    ],
)
def test_on_cpus_ranks_return_freed_memory_unless_half_is_free(
    monkeypatch, use, variables, is_returned
):
    monkeypatch.setattr(offload, "compute_memory_use", lambda: use)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    process = psutil.Process()
    tensors = [torch.ones(16_384) for _ in range(1_000)]
    before = process.memory_info().rss
    del tensors[1::2]  # 33 MB in pieces of the heap, which glibc alone does not return
    offload.move_storages({}, "host", (), {}, CPU)
    returned = before - process.memory_info().rss
    tensors.clear()
    monkeypatch.setattr(offload, "compute_memory_use", lambda: 1.0)
    offload.move_storages({}, "host", (), {}, CPU)  # leave nothing to tests of memory
    assert returned > 25_000_000 if is_returned else returned < 5_000_000


@pytest.fixture
def single_rank() -> Iterator[None]:
    device.install(1)
    with use_single_rank_groups():
        yield


def build_trained(dtype: torch.dtype) -> tuple[torch.nn.Linear, list[Any], Any]:
    """Build a layer of 6 weights in Megatron's DDP, and its optimizer."""
    layer: Any = torch.nn.Linear(3, 2, bias=False, dtype=dtype)
    layer.config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    fields = passthrough.read_engine_fields(EngineConfig())
    chunks = wrap_chunks([layer], OptimizerConfig(), fields)
    optimizer, _ = build_optimizer(chunks, OptimizerConfig(), fields, dtype, total_steps=3)
    return layer, chunks, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_megatron_model_are_freed_and_are_zero_when_they_return(single_rank, dtype):
    """Count 6 float32 gradients in the buffer of DDP and 6 of the optimizer's weights outside."""
    layer, chunks, optimizer = build_trained(dtype)
    mirrors = {"parameters": HostMirror(), "optimizer state": HostMirror()}

    def count_bytes() -> int:
        return build_memory_report(chunks, optimizer, (), mirrors).gradients_bytes

    chunks[0](torch.ones(1, 3, dtype=dtype)).sum().backward()
    assert layer.weight.main_grad.tolist() == [[1, 1, 1]] * 2
    for part in optimizer.chained_optimizers:
        for weight in (weight for group in part.param_groups for weight in group["params"]):
            weight.grad = torch.ones(2, 3)
    assert count_bytes() == 24 + 24
    move_parts(chunks, optimizer, "host", ["parameters", "optimizer state"], mirrors)
    assert count_bytes() == 24 + 24 and layer.weight.main_grad.sum() == 6
    move_parts(chunks, optimizer, "host", ["gradients"], mirrors)
    assert count_bytes() == 0
    move_parts(chunks, optimizer, "device", ["parameters", "optimizer state"], mirrors)
    assert count_bytes() == 0
    move_parts(chunks, optimizer, "device", ["gradients"], mirrors)
    assert layer.weight.main_grad.tolist() == [[0, 0, 0]] * 2
    assert count_bytes() == 24


@pytest.mark.parametrize(("dtype", "num_bytes"), [(torch.float32, 48), (torch.bfloat16, 72)])
def test_state_of_a_megatron_optimizer_is_moments_and_float32_weights_of_a_narrow_model(
    single_rank, dtype, num_bytes
):
    """Two moments of 6 numbers and, in bfloat16, 6 float32 weights; a step count of 4 bytes."""
    layer, chunks, optimizer = build_trained(dtype)
    chunks[0](torch.ones(1, 3, dtype=dtype)).sum().backward()
    optimizer.step()
    report = build_memory_report(chunks, optimizer, (), {})
    assert report.optimizer_state_bytes - num_bytes in (0, 4)  # FusedAdam counts in its groups
    assert report.parameters_bytes == layer.weight.nbytes


@pytest.mark.parametrize(("dtype", "num_weights"), [(torch.float32, 0), (torch.bfloat16, 6)])
def test_state_of_an_optimizer_moves_without_the_weights_of_the_model(
    single_rank, monkeypatch, dtype, num_weights
):
    layer, chunks, optimizer = build_trained(dtype)
    chunks[0](torch.ones(1, 3, dtype=dtype)).sum().backward()
    optimizer.step()
    weights = layer.weight.clone()
    module = SimpleNamespace(empty_cache=lambda: None)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "meta")
    monkeypatch.setattr("mcore_rl.engine.megatron.offload.get_device_type", lambda: "cuda")
    mirrors = {part: MirrorOfHost() for part in ("parameters", "optimizer state")}
    move_parts(chunks, optimizer, "host", ["optimizer state"], mirrors)
    num_numbers = 2 * 6 + num_weights
    assert mirrors["optimizer state"].num_bytes - 4 * num_numbers in (0, 4)  # count of steps
    assert mirrors["parameters"].num_bytes == 0 and torch.equal(layer.weight, weights)
    move_parts(chunks, optimizer, "host", ["parameters"], mirrors)
    assert layer.weight.untyped_storage().nbytes() == 0
    move_parts(chunks, optimizer, "device", ["parameters", "optimizer state"], mirrors)
    assert torch.equal(layer.weight, weights)
