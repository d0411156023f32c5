"""Distributed checkpoints between us and Megatron, both ways, in one process."""

from __future__ import annotations

import argparse
import io
import os
import pickle

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from mcore_rl.checkpoint import dist as checkpoint_dist
from mcore_rl.checkpoint.torch_dist import DistReader
from mcore_rl.checkpoint.torch_dist_writer import DistFile, write_metadata
from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.boxes import Box

# By key: the whole tensor, and how many dims in front stack layers or experts.
TENSORS = {
    "decoder.layers.fc1.weight": (torch.arange(96.0).reshape(3, 8, 4), 1),
    "decoder.layers.experts.fc1.weight": (torch.arange(96).reshape(2, 2, 4, 6).bfloat16(), 2),
    "embedding.weight": ((torch.arange(30.0) - 15).reshape(10, 3).to(torch.float8_e4m3fn), 0),
    "counts": (torch.arange(5), 0),
    "step": (torch.tensor(3.5), 0),
}
OBJECT = "decoder.layers.fc1._extra_state"
STORED_OBJECT = f"{OBJECT}/shard_0_1"

pytestmark = pytest.mark.filterwarnings(
    "ignore:`load_state_dict` is deprecated:FutureWarning",
    "ignore:Please use DTensor instead:FutureWarning",
)


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def saving_without_cuda(monkeypatch):
    """Megatron asks the GPU, of which there is none, as it saves."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")


def layers_of(key, values=None):
    """A whole tensor as Megatron asks for it: one shard for every layer, split in two by rows."""
    whole, num_stacking = TENSORS[key]
    data = torch.zeros_like(whole) if values is None else values
    if not num_stacking:
        return [ShardedTensor.from_rank_offsets(key, data, replica_id=0)]
    shards = []
    for index in torch.cartesian_prod(*map(torch.arange, whole.shape[:num_stacking])).reshape(
        -1, num_stacking
    ):
        part = data[tuple(index)]
        stack = [(dim, int(i), whole.shape[dim]) for dim, i in enumerate(index)]
        for half, rows in enumerate(part.chunk(2)):
            shards.append(
                ShardedTensor.from_rank_offsets(
                    key,
                    rows.contiguous(),
                    *stack,
                    (num_stacking, half, 2),
                    prepend_axis_num=num_stacking,
                )
            )
    return shards


def state(*, filled):
    tensors = {key: layers_of(key, TENSORS[key][0] if filled else None) for key in TENSORS}
    flat = {
        f"{key}#{i}": shard for key, shards in tensors.items() for i, shard in enumerate(shards)
    }
    extra = io.BytesIO(b"state") if filled else None
    return {**flat, "extra": ShardedObject(OBJECT, extra, (1,), (0,))}


def saved_object(value):
    data = io.BytesIO()
    torch.save([value], data)
    return data.getvalue()


def write(folder, extra):
    """The same checkpoint by our writer: two files, tensors cut along another dim."""
    records = []
    for number in range(2):
        with DistFile(folder / f"__{number}_0.distcp") as file:
            for key, (whole, _) in TENSORS.items():
                dim = whole.dim() - 1
                if dim < 0 and number:
                    continue
                parts = whole.tensor_split(2, dim) if dim >= 0 else [whole]
                offsets = [0] * whole.dim()
                if number:
                    offsets[dim] = parts[0].shape[dim]
                file.add_tensor(key, whole.shape, offsets, parts[number])
            if number:
                file.add_object(STORED_OBJECT, extra)
        records += file.records
    write_metadata(folder, records)


def is_equal(a, b):
    return a.dtype == b.dtype and torch.equal(a.float(), b.float())


def check_loaded(loaded):
    for key in TENSORS:
        for number, wanted in enumerate(layers_of(key, TENSORS[key][0])):
            assert is_equal(loaded[f"{key}#{number}"], wanted.data), key
    assert loaded["extra"].getvalue() == b"state"


def shapes(folder):
    return checkpoint_dist.tensor_shapes(folder)


def test_megatron_reads_what_is_written(tmp_path):
    write(tmp_path, saved_object(io.BytesIO(b"state")))
    check_loaded(dist_checkpointing.load(state(filled=False), str(tmp_path)))
    check_loaded(checkpoint_dist.load(state(filled=False), tmp_path, shapes(tmp_path)))


def test_what_megatron_saves_is_read(tmp_path, saving_without_cuda):
    dist_checkpointing.save(state(filled=True), str(tmp_path))
    reader = DistReader(tmp_path)
    assert reader.tensors.keys() == TENSORS.keys()
    assert reader.objects.keys() == {STORED_OBJECT}
    for key, (whole, _) in TENSORS.items():
        assert reader.tensors[key].shape == whole.shape
        assert is_equal(reader.read(key, Box((0,) * whole.dim(), tuple(whole.shape))), whole)
    box = Box((1, 1, 1, 2), (1, 1, 2, 3))  # across the cut between two chunks
    key = "decoder.layers.experts.fc1.weight"
    assert is_equal(reader.read(key, box), TENSORS[key][0][box.slices])
    assert is_equal(reader.read("counts", Box((2,), (2,))), torch.tensor([2, 3]))


def test_objects_and_arguments_that_megatron_saves_are_safe(tmp_path, saving_without_cuda):
    """Megatron-LM keeps its arguments in common.pt."""
    common = {"args": argparse.Namespace(lr=1e-3, path=None), "iteration": 3}
    dist_checkpointing.save({**state(filled=True), **common}, str(tmp_path))
    loaded = checkpoint_dist.load(state(filled=False), tmp_path, shapes(tmp_path))
    check_loaded(loaded)
    assert (loaded["args"].lr, loaded["iteration"]) == (1e-3, 3)


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def refused(folder, canary, message):
    with pytest.raises(ConfigError, match=message):
        checkpoint_dist.load(state(filled=False), folder, shapes(folder))
    assert not canary.path.exists()


def test_an_object_that_runs_a_command_is_not_given_to_megatron(tmp_path):
    canary, folder = Canary(tmp_path / "canary"), tmp_path / "ck"
    folder.mkdir()
    write(folder, saved_object(canary))
    refused(folder, canary, r"_extra_state/shard_0_1 is damaged .*: it names posix.system")
    dist_checkpointing.load(state(filled=False), str(folder))
    assert canary.path.exists(), "Megatron runs it: without the check the command had been run"


def test_metadata_and_common_files_that_run_a_command_are_not_given_to_megatron(tmp_path):
    canary, folder = Canary(tmp_path / "canary"), tmp_path / "ck"
    folder.mkdir()
    write(folder, saved_object(None))
    torch.save({"args": canary}, folder / "common.pt")
    refused(folder, canary, r"common.pt is damaged or not safe to load: it names posix.system")
    (folder / ".metadata").write_bytes(pickle.dumps(canary))
    refused(folder, canary, r"\.metadata names posix.system")
