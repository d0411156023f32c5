"""Damage to distributed checkpoints: told by one clear error, or of no consequence."""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
import zipfile

import pytest
import torch

from mcore_rl.checkpoint.torch_dist import DistFile, DistReader
from mcore_rl.checkpoint.torch_dist_metadata import write_metadata
from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.rules import Box
from tests.nightly import all_but

SEED = 4
TENSORS = {
    "decoder.layers.0.w": torch.arange(24.0).reshape(4, 6),
    "decoder.layers.1.w": torch.arange(24.0).reshape(4, 6) + 100,
    "stacked": (torch.arange(36).reshape(3, 3, 4) % 17).bfloat16(),
    "count": torch.tensor(7),
}
FILES = ("__0_0.distcp", "__1_0.distcp")


def serialize(value):
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Write two files, each with a half of every tensor, and one object."""
    folder = tmp_path_factory.mktemp("whole")
    records = []
    for number, name in enumerate(FILES):
        with DistFile(folder / name) as file:
            for key, tensor in TENSORS.items():
                if tensor.dim() and number < 2:
                    half = (tensor.shape[0] + 1) // 2
                    part = tensor[:half] if number == 0 else tensor[half:]
                    start = (half * number, *[0] * (tensor.dim() - 1))
                    file.add_tensor(key, tensor.shape, start, part)
                elif number == 0:
                    file.add_tensor(key, (), (), tensor)
            if number == 1:
                file.add_object("w._extra_state/shard_0_1", serialize([None]))
        records += file.records
    write_metadata(folder, records)
    return folder


def read_all(folder):
    """Read all tensors that the checkpoint has keys for."""
    reader = DistReader(folder)
    for key in reader.objects:
        reader.load_object(key)
    return {
        key: reader.read(key, Box((0,) * len(tensor.shape), tensor.shape))
        for key, tensor in reader.tensors.items()
    }


def read_or_refuse(folder, *, all_keys):
    """ "refused" with one clear line, or "right"; anything else fails the test."""
    try:
        results = read_all(folder)
    except ConfigError as error:
        text = str(error)
        assert str(folder) in text
        assert "\n" not in text
        assert len(text) < 600
        return "refused"
    if all_keys:
        assert results.keys() == TENSORS.keys()
    for key in results.keys() & TENSORS.keys():
        assert results[key].dtype == TENSORS[key].dtype
        assert torch.equal(results[key], TENSORS[key]), key
    return "right"


def flip_bit(data, rng):
    position = rng.randrange(len(data))
    return (
        data[:position] + bytes([data[position] ^ (1 << rng.randrange(8))]) + data[position + 1 :]
    )


def shorten(data, rng):
    return data[: rng.randrange(len(data))]


def overwrite(data, rng):
    position, size = rng.randrange(len(data)), rng.randint(1, 40)
    return (
        data[:position]
        + rng.randbytes(len(data[position : position + size]))
        + data[position + size :]
    )


def move_part(data, rng):
    """Move a part elsewhere, without a change of the length."""
    a, b, c = sorted(rng.sample(range(len(data) + 1), 3))
    return data[:a] + data[b:c] + data[a:b] + data[c:]


DAMAGES = [flip_bit, flip_bit, flip_bit, shorten, overwrite, move_part]


def damage_repeatedly(checkpoint, folder, names, count, *, all_keys):
    """Return the results of reading after each of `count` damages to one file."""
    rng = random.Random(SEED)
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    results = []
    for number in range(count):
        name, damage = rng.choice(names), DAMAGES[number % len(DAMAGES)]
        data = (checkpoint / name).read_bytes()
        (folder / name).write_bytes(damage(data, rng))
        results.append(read_or_refuse(folder, all_keys=all_keys))
        (folder / name).write_bytes(data)
    return results


def test_an_undamaged_checkpoint_is_right(checkpoint):
    assert read_or_refuse(checkpoint, all_keys=True) == "right"


def test_damaged_data_is_refused_or_has_no_consequence(checkpoint, tmp_path):
    results = damage_repeatedly(checkpoint, tmp_path, FILES, 600, all_keys=True)
    assert results.count("refused") > 300
    assert results.count("right") > 20  # padding, dates, names that nobody reads


def test_every_flipped_bit_of_a_tensors_bytes_is_refused(checkpoint, tmp_path):
    data = (checkpoint / FILES[0]).read_bytes()
    start = data.index(TENSORS["decoder.layers.0.w"][:2].numpy().tobytes())
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    for bit in range(0, 8 * 48, 3):
        changed = bytearray(data)
        changed[start + bit // 8] ^= 1 << bit % 8
        (tmp_path / FILES[0]).write_bytes(changed)
        with pytest.raises(ConfigError, match=r"__0_0.distcp: decoder.layers.0.w is damaged"):
            read_all(tmp_path)


@pytest.mark.parametrize(
    "key",
    all_but(("w._extra_state/shard_0_1",), ("stacked", "w._extra_state/shard_0_1")),
)
def test_every_flipped_bit_of_an_items_pickle_is_refused(checkpoint, tmp_path, key):
    """Damage a pickle, which has for example the strides of a tensor."""
    stored = pickle.loads((checkpoint / ".metadata").read_bytes())
    place = next(p for index, p in stored.storage_data.items() if index.fqn == key)
    data = (checkpoint / place.relative_path).read_bytes()
    pickled = zipfile.ZipFile(io.BytesIO(data[place.offset :][: place.length])).read(
        "archive/data.pkl"
    )
    start = data.index(pickled, place.offset)
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    for bit in range(0, 8 * len(pickled), 3):
        changed = bytearray(data)
        changed[start + bit // 8] ^= 1 << bit % 8
        (tmp_path / place.relative_path).write_bytes(changed)
        with pytest.raises(ConfigError, match=f"{key} is damaged"):
            read_all(tmp_path)


def test_damaged_metadata_is_refused_or_what_is_read_is_right(checkpoint, tmp_path):
    results = damage_repeatedly(checkpoint, tmp_path, [".metadata"], 600, all_keys=False)
    assert results.count("refused") > 300


def test_a_shorter_metadata_is_refused(checkpoint, tmp_path):
    data = (checkpoint / ".metadata").read_bytes()
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    for size in range(0, len(data), 3):
        (tmp_path / ".metadata").write_bytes(data[:size])
        with pytest.raises(ConfigError, match=r"\.metadata is damaged, or not"):
            DistReader(tmp_path)


# Files that would run code


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def canary(tmp_path):
    """The pickle of a command, which works."""
    path = tmp_path / "canary"
    pickle.loads(pickle.dumps(Canary(path)))
    assert path.exists()
    path.unlink()
    return Canary(path)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_metadata_that_runs_a_command_is_not_loaded(checkpoint, tmp_path, canary, protocol):
    folder = shutil.copytree(checkpoint, tmp_path / "ck")
    (folder / ".metadata").write_bytes(pickle.dumps(canary, protocol))
    expected = "names posix.system, which is not in a checkpoint's metadata; it was not loaded"
    with pytest.raises(ConfigError, match=expected if protocol > 3 else "opcode"):
        DistReader(folder)
    assert not canary.path.exists()


def test_metadata_with_a_command_somewhere_inside_is_not_loaded(checkpoint, tmp_path, canary):
    folder = shutil.copytree(checkpoint, tmp_path / "ck")
    stored = pickle.loads((folder / ".metadata").read_bytes())
    stored.planner_data = {"a": [canary]}
    (folder / ".metadata").write_bytes(pickle.dumps(stored))
    with pytest.raises(ConfigError, match=r"names posix\.system"):
        DistReader(folder)
    assert not canary.path.exists()


@pytest.mark.parametrize("key", ["count", "w._extra_state/shard_0_1"])
def test_items_that_run_a_command_are_not_loaded(checkpoint, tmp_path, canary, key):
    folder = shutil.copytree(checkpoint, tmp_path / "ck")
    evil = serialize([canary, TENSORS["count"]])
    stored = pickle.loads((folder / ".metadata").read_bytes())
    place = next(p for index, p in stored.storage_data.items() if index.fqn == key)
    place.relative_path, place.offset, place.length = "__2_0.distcp", 0, len(evil)
    (folder / "__2_0.distcp").write_bytes(evil)
    (folder / ".metadata").write_bytes(pickle.dumps(stored))
    with pytest.raises(ConfigError, match=r"__2_0.distcp: .* it names posix\.system, which is not"):
        read_all(folder)
    assert not canary.path.exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4:UserWarning")
@pytest.mark.parametrize("is_legacy", [True, False])
def test_a_common_state_that_runs_a_command_is_not_loaded(checkpoint, tmp_path, canary, is_legacy):
    folder = shutil.copytree(checkpoint, tmp_path / "ck")
    message = r"common\.(pt|distcp): .*common.state.* is damaged .*: "
    for protocol, reason in ((2, "it names posix.system, which"), (4, r"Unsupported operand \d+$")):
        write_common(folder, {"args": canary}, protocol, is_legacy=is_legacy)
        with pytest.raises(ConfigError, match=message + reason):
            DistReader(folder).load_common()
    assert not canary.path.exists()


def write_common(folder, values, protocol, *, is_legacy):
    """Replace the common state: in common.pt, as before Megatron-core 0.19, or as an object."""
    if is_legacy:
        torch.save(values, folder / "common.pt", pickle_protocol=protocol)
        return
    torch.save([values], folder / "common.distcp", pickle_protocol=protocol)
    stored = pickle.loads((folder / ".metadata").read_bytes())
    place = next(p for p in stored.storage_data.values() if p.relative_path == "common.distcp")
    place.length = (folder / "common.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(stored))


@pytest.mark.parametrize("is_legacy", [True, False])
def test_the_common_state_is_read_from_either_place(checkpoint, tmp_path, is_legacy):
    folder = shutil.copytree(checkpoint, tmp_path / "ck")
    assert DistReader(folder).load_common()["content_metadata"]["non_homogeneous_layers"]
    write_common(folder, {"iteration": 7}, 2, is_legacy=is_legacy)
    assert DistReader(folder).load_common() == {"iteration": 7}


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 cut short", b"\x80\x02garbage"])
def test_a_damaged_common_file_is_refused(checkpoint, tmp_path, data):
    folder = shutil.copytree(checkpoint, tmp_path / "ck")
    (folder / "common.pt").write_bytes(data)
    with pytest.raises(ConfigError, match=r"common.pt: the common state is damaged"):
        DistReader(folder).load_common()


def test_every_flipped_bit_of_the_common_state_is_refused(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "ck")
    data = (folder / "common.distcp").read_bytes()
    pickled = zipfile.ZipFile(io.BytesIO(data)).read("archive/data.pkl")
    start = data.index(pickled)
    for bit in range(0, 8 * len(pickled), 3):
        changed = bytearray(data)
        changed[start + bit // 8] ^= 1 << bit % 8
        (folder / "common.distcp").write_bytes(changed)
        with pytest.raises(ConfigError, match=r"common.distcp: common_state/shard_0_1 is damaged"):
            DistReader(folder).load_common()
