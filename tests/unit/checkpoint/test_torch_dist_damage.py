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

from mcore_rl.checkpoint.torch_dist import DistReader
from mcore_rl.checkpoint.torch_dist_writer import DistFile, write_metadata
from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.boxes import Box
from tests.nightly import all_but

SEED = 4
TENSORS = {
    "decoder.layers.0.w": torch.arange(24.0).reshape(4, 6),
    "decoder.layers.1.w": torch.arange(24.0).reshape(4, 6) + 100,
    "stacked": (torch.arange(36).reshape(3, 3, 4) % 17).bfloat16(),
    "count": torch.tensor(7),
}
FILES = ("__0_0.distcp", "__1_0.distcp")


def saved(value):
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two files, each with a half of every tensor that has one, and one object."""
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
                file.add_object("w._extra_state/shard_0_1", saved([None]))
        records += file.records
    write_metadata(folder, records)
    return folder


def read_all(folder):
    """All tensors, as far as the checkpoint has keys for them."""
    reader = DistReader(folder)
    for key in reader.objects:
        reader.load_object(key)
    return {
        key: reader.read(key, Box((0,) * len(tensor.shape), tensor.shape))
        for key, tensor in reader.tensors.items()
    }


def outcome(folder, *, all_keys):
    """ "refused" with one clear line, or "right"; anything else fails the test."""
    try:
        found = read_all(folder)
    except ConfigError as error:
        text = str(error)
        assert str(folder) in text
        assert "\n" not in text
        assert len(text) < 600
        return "refused"
    if all_keys:
        assert found.keys() == TENSORS.keys()
    for key in found.keys() & TENSORS.keys():
        assert found[key].dtype == TENSORS[key].dtype
        assert torch.equal(found[key], TENSORS[key]), key
    return "right"


def flipped(data, rng):
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def shortened(data, rng):
    return data[: rng.randrange(len(data))]


def overwritten(data, rng):
    at, size = rng.randrange(len(data)), rng.randint(1, 40)
    return data[:at] + rng.randbytes(len(data[at : at + size])) + data[at + size :]


def moved(data, rng):
    """A part taken out and put in elsewhere: the length stays."""
    a, b, c = sorted(rng.sample(range(len(data) + 1), 3))
    return data[:a] + data[b:c] + data[a:b] + data[c:]


DAMAGES = [flipped, flipped, flipped, shortened, overwritten, moved]


def outcomes(whole, folder, names, count, *, all_keys):
    """What comes of `count` damages, each to one file."""
    rng = random.Random(SEED)
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    found = []
    for number in range(count):
        name, damage = rng.choice(names), DAMAGES[number % len(DAMAGES)]
        data = (whole / name).read_bytes()
        (folder / name).write_bytes(damage(data, rng))
        found.append(outcome(folder, all_keys=all_keys))
        (folder / name).write_bytes(data)
    return found


def test_an_undamaged_checkpoint_is_right(whole):
    assert outcome(whole, all_keys=True) == "right"


def test_damaged_data_is_refused_or_has_no_consequence(whole, tmp_path):
    found = outcomes(whole, tmp_path, FILES, 600, all_keys=True)
    assert found.count("refused") > 300
    assert found.count("right") > 20  # padding, dates, names that nobody reads


def test_every_flipped_bit_of_a_tensors_bytes_is_refused(whole, tmp_path):
    data = (whole / FILES[0]).read_bytes()
    start = data.index(TENSORS["decoder.layers.0.w"][:2].numpy().tobytes())
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
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
def test_every_flipped_bit_of_an_items_pickle_is_refused(whole, tmp_path, key):
    """It says, say, in which order a tensor's bytes stand."""
    stored = pickle.loads((whole / ".metadata").read_bytes())
    place = next(p for index, p in stored.storage_data.items() if index.fqn == key)
    data = (whole / place.relative_path).read_bytes()
    pickled = zipfile.ZipFile(io.BytesIO(data[place.offset :][: place.length])).read(
        "archive/data.pkl"
    )
    start = data.index(pickled, place.offset)
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    for bit in range(0, 8 * len(pickled), 3):
        changed = bytearray(data)
        changed[start + bit // 8] ^= 1 << bit % 8
        (tmp_path / place.relative_path).write_bytes(changed)
        with pytest.raises(ConfigError, match=f"{key} is damaged"):
            read_all(tmp_path)


def test_damaged_metadata_is_refused_or_what_is_read_is_right(whole, tmp_path):
    found = outcomes(whole, tmp_path, [".metadata"], 600, all_keys=False)
    assert found.count("refused") > 300


def test_a_shorter_metadata_is_refused(whole, tmp_path):
    data = (whole / ".metadata").read_bytes()
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
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
def test_metadata_that_runs_a_command_is_not_loaded(whole, tmp_path, canary, protocol):
    folder = shutil.copytree(whole, tmp_path / "ck")
    (folder / ".metadata").write_bytes(pickle.dumps(canary, protocol))
    expected = "names posix.system, which is not in a checkpoint's metadata; it was not loaded"
    with pytest.raises(ConfigError, match=expected if protocol > 3 else "opcode"):
        DistReader(folder)
    assert not canary.path.exists()


def test_metadata_with_a_command_somewhere_inside_is_not_loaded(whole, tmp_path, canary):
    folder = shutil.copytree(whole, tmp_path / "ck")
    stored = pickle.loads((folder / ".metadata").read_bytes())
    stored.planner_data = {"a": [canary]}
    (folder / ".metadata").write_bytes(pickle.dumps(stored))
    with pytest.raises(ConfigError, match=r"names posix\.system"):
        DistReader(folder)
    assert not canary.path.exists()


@pytest.mark.parametrize("key", ["count", "w._extra_state/shard_0_1"])
def test_items_that_run_a_command_are_not_loaded(whole, tmp_path, canary, key):
    folder = shutil.copytree(whole, tmp_path / "ck")
    evil = saved([canary, TENSORS["count"]])
    stored = pickle.loads((folder / ".metadata").read_bytes())
    place = next(p for index, p in stored.storage_data.items() if index.fqn == key)
    place.relative_path, place.offset, place.length = "__2_0.distcp", 0, len(evil)
    (folder / "__2_0.distcp").write_bytes(evil)
    (folder / ".metadata").write_bytes(pickle.dumps(stored))
    with pytest.raises(ConfigError, match=r"__2_0.distcp: .* it names posix\.system, which is not"):
        read_all(folder)
    assert not canary.path.exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4:UserWarning")
def test_a_common_file_that_runs_a_command_is_told(whole, tmp_path, canary):
    folder = shutil.copytree(whole, tmp_path / "ck")
    torch.save({"args": canary}, folder / "common.pt")
    with pytest.raises(ConfigError, match=r"common.pt is damaged .*: it names posix.system, which"):
        DistReader(folder).load_common()
    torch.save({"args": canary}, folder / "common.pt", pickle_protocol=4)
    with pytest.raises(ConfigError, match=r"common.pt is damaged .*: Unsupported operand \d+$"):
        DistReader(folder).load_common()
    assert not canary.path.exists()


def test_a_checkpoint_may_be_without_a_common_file(whole, tmp_path):
    """As megatron-core 0.19 writes them."""
    folder = shutil.copytree(whole, tmp_path / "ck")
    DistReader(folder).load_common()
    (folder / "common.pt").unlink()
    DistReader(folder).load_common()


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 cut short", b"\x80\x02garbage"])
def test_a_damaged_common_file_is_told(whole, tmp_path, data):
    folder = shutil.copytree(whole, tmp_path / "ck")
    (folder / "common.pt").write_bytes(data)
    with pytest.raises(ConfigError, match=r"common.pt is damaged"):
        DistReader(folder).load_common()
