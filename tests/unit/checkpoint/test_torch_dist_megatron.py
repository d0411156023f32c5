"""Distributed checkpoints between us and Megatron, both ways, in one process."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import resource
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from mcore_rl.checkpoint import megatron as checkpoint_dist
from mcore_rl.checkpoint.files import check_checkpoint
from mcore_rl.checkpoint.storage_location import CONTENT_METADATA
from mcore_rl.checkpoint.torch_dist import DistFile, DistReader
from mcore_rl.checkpoint.torch_dist_metadata import COMMON_KEY, write_metadata
from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.rules import Box

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
    "ignore:torch.distributed is disabled:UserWarning",
    "ignore:The argument order of load has been changed:UserWarning",
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


def build_shards(key, values=None):
    """Build the shards that Megatron requests: one per layer, split in two by rows."""
    tensor, num_stacking = TENSORS[key]
    data = torch.zeros_like(tensor) if values is None else values
    if not num_stacking:
        return [ShardedTensor.from_rank_offsets(key, data, replica_id=0)]
    shards = []
    for index in torch.cartesian_prod(*map(torch.arange, tensor.shape[:num_stacking])).reshape(
        -1, num_stacking
    ):
        part = data[tuple(index)]
        stack = [(dim, int(i), tensor.shape[dim]) for dim, i in enumerate(index)]
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
    tensors = {key: build_shards(key, TENSORS[key][0] if filled else None) for key in TENSORS}
    flat = {
        f"{key}#{i}": shard for key, shards in tensors.items() for i, shard in enumerate(shards)
    }
    extra = io.BytesIO(b"state") if filled else None
    return {**flat, "extra": ShardedObject(OBJECT, extra, (1,), (0,))}


def serialize(value):
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def serialize_object(value):
    return serialize([value])


def write(folder, extra):
    """Write the same checkpoint by our writer: two files, tensors split along another dim."""
    records = []
    for number in range(2):
        with DistFile(folder / f"__{number}_0.distcp") as file:
            for key, (tensor, _) in TENSORS.items():
                dim = tensor.dim() - 1
                if dim < 0 and number:
                    continue
                parts = tensor.tensor_split(2, dim) if dim >= 0 else [tensor]
                offsets = [0] * tensor.dim()
                if number:
                    offsets[dim] = parts[0].shape[dim]
                file.add_tensor(key, tensor.shape, offsets, parts[number])
            if number:
                file.add_object(STORED_OBJECT, extra)
        records += file.records
    write_metadata(folder, records)
    return records


def is_equal(a, b):
    return a.dtype == b.dtype and torch.equal(a.float(), b.float())


def check_loaded(loaded):
    for key in TENSORS:
        for number, expected in enumerate(build_shards(key, TENSORS[key][0])):
            assert is_equal(loaded[f"{key}#{number}"], expected.data), key
    assert loaded["extra"].getvalue() == b"state"


def test_megatron_reads_what_is_written(tmp_path):
    write(tmp_path, serialize_object(io.BytesIO(b"state")))
    check_loaded(dist_checkpointing.load(state(filled=False), str(tmp_path)))
    check_loaded(checkpoint_dist.load(state(filled=False), tmp_path))


def test_what_megatron_saves_is_read(tmp_path, saving_without_cuda):
    dist_checkpointing.save(state(filled=True), str(tmp_path))
    reader = DistReader(tmp_path)
    assert reader.tensors.keys() == TENSORS.keys()
    assert reader.objects.keys() == {STORED_OBJECT}
    for key, (tensor, _) in TENSORS.items():
        assert reader.tensors[key].shape == tensor.shape
        assert is_equal(reader.read(key, Box((0,) * tensor.dim(), tuple(tensor.shape))), tensor)
    box = Box((1, 1, 1, 2), (1, 1, 2, 3))  # across the cut between two chunks
    key = "decoder.layers.experts.fc1.weight"
    assert is_equal(reader.read(key, box), TENSORS[key][0][box.slices])
    assert is_equal(reader.read("counts", Box((2,), (2,))), torch.tensor([2, 3]))


def test_objects_and_arguments_that_megatron_saves_are_safe(tmp_path, saving_without_cuda):
    """Megatron-LM keeps its arguments in the common state."""
    common = {"args": argparse.Namespace(lr=1e-3, path=None), "iteration": 3}
    dist_checkpointing.save({**state(filled=True), **common}, str(tmp_path))
    loaded = checkpoint_dist.load(state(filled=False), tmp_path)
    check_loaded(loaded)
    assert (loaded["args"].lr, loaded["iteration"]) == (1e-3, 3)


# Saves by DistSave


def save(path, values, copies=None):
    checkpoint_dist.DistSave(values, path, {"dtype": "float32"}, copies).finish(60)


@pytest.mark.parametrize("copies", [None, {}], ids=["at once", "in the background"])
def test_megatron_and_we_read_what_dist_save_writes(tmp_path, copies):
    common = {"iteration": 3, "optimizer": {"param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95)}]}}
    save(tmp_path / "ck", {**state(filled=True), **common}, copies)
    check_checkpoint(tmp_path / "ck")
    for loaded in (
        dist_checkpointing.load(state(filled=False), str(tmp_path / "ck")),
        checkpoint_dist.load(state(filled=False), tmp_path / "ck"),
    ):
        check_loaded(loaded)
        assert {name: loaded[name] for name in common} == common
    metadata = dist_checkpointing.load_content_metadata(str(tmp_path / "ck"))
    assert metadata == CONTENT_METADATA


def test_what_changes_after_a_save_began_is_not_saved(tmp_path, monkeypatch):
    """Start to write when the tensors have changed; then again, into the same buffers."""
    copies, buffers = {}, []
    may_write, write_file = threading.Event(), checkpoint_dist.DistSave._write

    def write_later(*args):
        may_write.wait(60)
        write_file(*args)

    monkeypatch.setattr(checkpoint_dist.DistSave, "_write", write_later)
    for number in range(2):
        values = {
            f"{key}#{i}": shard
            for key, (tensor, _) in TENSORS.items()
            for i, shard in enumerate(build_shards(key, (tensor.float() + number).to(tensor.dtype)))
        }
        shards = [shard.data for shard in values.values()]
        may_write.clear()
        folder = tmp_path / str(number)
        pending = checkpoint_dist.DistSave(values, folder, {}, copies)
        expected = [shard.clone() for shard in shards]
        for shard in shards:
            shard.zero_()
        assert not pending.is_written
        may_write.set()
        pending.finish(60)
        buffers.append({place: tensor.data_ptr() for place, tensor in copies.items()})
        loaded = dist_checkpointing.load(
            {name: value for name, value in state(filled=False).items() if name != "extra"},
            str(folder),
        )
        for name, value in zip(values, expected, strict=True):
            assert is_equal(loaded[name], value), name
    assert buffers[0] == buffers[1]


def test_every_file_is_on_the_disk_before_the_folder_has_its_name(tmp_path, monkeypatch):
    synced, sync = [], os.fsync

    def record(fd):
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        assert (tmp_path / "ck").exists() == (synced[-1] == tmp_path.name)
        sync(fd)

    monkeypatch.setattr(os, "fsync", record)
    save(tmp_path / "ck", state(filled=True))
    assert sorted(synced[:-2]) == sorted(path.name for path in (tmp_path / "ck").iterdir())
    assert synced[-2:] == [".ck.partial", tmp_path.name]


def build_misshapen_shard():
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 2))
    shard.data = torch.zeros(3)
    return shard


@pytest.mark.parametrize("copies", [None, {}], ids=["at once", "in the background"])
@pytest.mark.parametrize(
    ("file_bytes", "more", "reason"),
    [
        (100, {}, r"__0_0\.distcp: .*File too large"),
        (50_000, {"settings": "x" * 100_000}, r".*File too large: '.*common\.distcp'"),
        (1 << 30, {"w": build_misshapen_shard()}, r"__0_0\.distcp: shape .* is invalid for"),
    ],
    ids=["file of the rank", "common state", "tensor"],
)
def test_any_failure_to_write_is_an_os_error_and_leaves_nothing(
    tmp_path, copies, file_bytes, more, reason
):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, limits[1]))
    try:
        with pytest.raises(OSError, match=f"ck cannot be written: {reason}"):
            save(tmp_path / "ck", {**state(filled=True), **more}, copies)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
    save(tmp_path / "ck", state(filled=True))
    check_checkpoint(tmp_path / "ck")


# Files that would run code


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def refused(folder, canary, message):
    with pytest.raises(ConfigError, match=message):
        checkpoint_dist.load(state(filled=False), folder)
    assert not canary.path.exists()


def test_an_object_that_runs_a_command_is_not_given_to_megatron(tmp_path):
    canary, folder = Canary(tmp_path / "canary"), tmp_path / "ck"
    folder.mkdir()
    write(folder, serialize_object(canary))
    refused(folder, canary, r"_extra_state/shard_0_1 is damaged .*: it names posix.system")
    dist_checkpointing.load(state(filled=False), str(folder))
    assert canary.path.exists(), "Megatron runs it: without the check the command had been run"


def test_metadata_and_common_files_that_run_a_command_are_not_given_to_megatron(tmp_path):
    canary, folder = Canary(tmp_path / "canary"), tmp_path / "ck"
    folder.mkdir()
    records = write(folder, serialize_object(None))
    write_metadata(folder, records, {"args": canary})
    refused(folder, canary, r"common_state/shard_0_1 is damaged .*: it names posix.system")
    torch.save({"args": canary}, folder / "common.pt")
    refused(folder, canary, r"common.pt: the common state is damaged .*: it names posix.system")
    (folder / ".metadata").write_bytes(pickle.dumps(canary))
    refused(folder, canary, r"\.metadata names posix.system")


class HostilePickler(pickle._Pickler):
    """Names os.system as `pair`, and writes a Change as a change of an earlier object."""

    def __init__(self, file, pair=("posix", "system")):
        super().__init__(file, 4)
        self.pair = pair

    def save(self, obj, save_persistent_id=True):
        if not isinstance(obj, Change):
            return super().save(obj, save_persistent_id)
        super().save(obj.changed)
        super().save(obj.state)
        self.write(pickle.BUILD)

    def save_global(self, obj, name=None):
        if obj is not os.system:
            return super().save_global(obj, name)
        for text in self.pair:
            self.save(text)
        self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)


class Change:
    def __init__(self, changed, state):
        self.changed, self.state = changed, state


def pickled(value, *pair):
    file = io.BytesIO()
    HostilePickler(file, *pair).dump(value)
    return file.getvalue()


DCP = "torch.distributed.checkpoint"


@pytest.mark.parametrize(
    "pair",
    [
        (f"{DCP}.filesystem", "os.system"),
        (f"{DCP}.metadata", "os.system"),
        (DCP, "filesystem.os.system"),
        ("megatron.core.dist_checkpointing.strategies.torch", "os.system"),
    ],
    ids=str,
)
def test_a_command_under_another_modules_name_is_not_run(tmp_path, pair):
    canary, folder = Canary(tmp_path / "canary"), tmp_path / "ck"
    folder.mkdir()
    write(folder, serialize_object(None))
    stored = pickle.loads((folder / ".metadata").read_bytes())
    stored.planner_data = canary
    (folder / ".metadata").write_bytes(pickled(stored, pair))
    pickle.loads((folder / ".metadata").read_bytes())
    assert canary.path.exists(), "an unpickler of Python runs it"
    canary.path.unlink()
    refused(folder, canary, rf"\.metadata names {'.'.join(pair)}, which is not in")


def test_metadata_of_a_single_rank_is_not_read_in_place_of_a_damaged_one(tmp_path):
    """Refuse it, while torch would read it when it cannot unpickle .metadata."""
    canary, folder = Canary(tmp_path / "canary"), tmp_path / "ck"
    folder.mkdir()
    write(folder, serialize_object(None))
    stored = pickle.loads((folder / ".metadata").read_bytes())
    stored.planner_data = canary
    (folder / "__0.metadata").write_bytes(pickle.dumps(stored))
    (folder / ".metadata").write_bytes(pickled(stored, (f"{DCP}.planner", "missing")))
    refused(folder, canary, r"\.metadata names torch.distributed.checkpoint.planner.missing")


def test_an_object_with_two_places_is_refused(tmp_path):
    """Store a dict with two equal keys, one changed after insertion: lookup and iteration differ,
    so that an object could be loaded from another location than the checked one.
    """
    canary, folder = Canary(tmp_path / "canary"), tmp_path / "ck"
    folder.mkdir()
    write(folder, serialize_object(canary))
    stored = pickle.loads((folder / ".metadata").read_bytes())
    safe = serialize_object(io.BytesIO(b"state"))
    (folder / "__2_0.distcp").write_bytes(safe)
    index = MetadataIndex("other")
    stored.storage_data[index] = _StorageInfo("__2_0.distcp", 0, len(safe))
    stored.later = [Change(index, {"fqn": STORED_OBJECT})]
    (folder / ".metadata").write_bytes(pickled(stored))
    refused(folder, canary, f"an item of {STORED_OBJECT} has two places")


def replace_common(data):
    def change(folder):
        (folder / "common.distcp").write_bytes(data)
        stored = pickle.loads((folder / ".metadata").read_bytes())
        for index, place in stored.storage_data.items():
            if index.fqn == COMMON_KEY:
                place.length = len(data)
        (folder / ".metadata").write_bytes(pickle.dumps(stored))

    return change


def remove_common(folder):
    stored = pickle.loads((folder / ".metadata").read_bytes())
    del stored.state_dict_metadata[COMMON_KEY]
    stored.storage_data = {i: p for i, p in stored.storage_data.items() if i.fqn != COMMON_KEY}
    (folder / ".metadata").write_bytes(pickle.dumps(stored))


NO_DICT = "the common state is no dict; allowed: what Megatron writes"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: torch.save([1], folder / "common.pt"), rf"common\.pt: {NO_DICT}"),
        (replace_common(serialize([1])), rf"common\.distcp: {NO_DICT}"),
        (replace_common(serialize([])), rf"common\.distcp: {NO_DICT}"),
        (replace_common(serialize({})), rf"common\.distcp: {NO_DICT}"),
        (remove_common, "has neither common_state/shard_0_1 nor common.pt; allowed: what Megatr"),
        (
            lambda folder: write(folder, serialize(5)),
            "_extra_state/shard_0_1 is no list; allowed: what Megatron writes",
        ),
    ],
)
def test_contents_that_megatron_does_not_write_are_refused(tmp_path, change, message):
    write(tmp_path, serialize_object(None))
    change(tmp_path)
    with pytest.raises(ConfigError, match=message):
        checkpoint_dist.load(state(filled=False), tmp_path)


def test_a_damaged_tensor_is_refused(tmp_path):
    write(tmp_path, serialize_object(io.BytesIO(b"state")))
    for path in tmp_path.glob("__*.distcp"):
        data = bytearray(path.read_bytes())
        start = data.index(TENSORS["counts"][0].tensor_split(2)[path.name[2] == "1"].numpy().data)
        data[start] ^= 1
        path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"_0.distcp: counts is damaged .*Bad CRC-32"):
        checkpoint_dist.load(state(filled=False), tmp_path)


def test_rows_of_padding_that_are_not_stored_are_zero(tmp_path):
    write(tmp_path, serialize_object(io.BytesIO(b"state")))
    requested, key = state(filled=False), "embedding.weight"
    padded = torch.full((6, 3), 7.0)
    for number in range(3):  # rows 12 to 17 have none stored, 6 to 11 have four
        requested[f"{key}#{number}"] = ShardedTensor.from_rank_offsets(
            key, padded.clone(), (0, number, 3), replica_id=0, allow_shape_mismatch=True
        )
    loaded = checkpoint_dist.load(requested, tmp_path)
    rows = torch.cat([loaded[f"{key}#{number}"] for number in range(3)])
    assert torch.equal(rows[:10], TENSORS[key][0].float())
    assert not rows[10:].any()
