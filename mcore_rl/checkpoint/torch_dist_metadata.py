"""What a distributed checkpoint holds, and where: its `.metadata`, read safely and checked.

torch pickles a torch.distributed.checkpoint.metadata.Metadata into it (filesystem.py, `finish`).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_rl.checkpoint import inert_pickle
from mcore_rl.checkpoint.inert_pickle import Node
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_object

METADATA_FILE = ".metadata"
BACKEND_FILE = "metadata.json"
# What Megatron's dist_checkpointing/core.py writes there and compares.
BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_MAX_DIMS = 8  # layers and experts in front of a parameter's own dims are no more than four

# All that torch 2.4 to 2.13 and Megatron-core 0.15 to 0.19 pickle.
_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
        "_MEM_FORMAT_ENCODING MetadataIndex StorageMeta"
    ),
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    # Megatron adds `all_local_plans`, the plans of the ranks that saved.
    "torch.distributed.checkpoint.planner": (
        "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData"
    ),
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
    "torch.serialization": "_get_layout",
    "pathlib": "PosixPath",  # the folder, in storage_meta
    "pathlib._local": "PosixPath",  # the same under Python 3.13
    "builtins": "getattr",  # how the first releases of Python 3.11 pickle an enum; a Node as well
}
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(module, name): None for module, names in _CLASSES.items() for name in names.split()},
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    **{("torch", n): v for n, v in vars(torch).items() if isinstance(v, torch.dtype)},
}


@dataclass(frozen=True, slots=True)
class DistChunk:
    """A box of a tensor, and the item of a file that holds it: `nbytes` bytes at `offset`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DistTensor:
    """A tensor, whole; its chunks cover it exactly once."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[DistChunk, ...]


@dataclass(frozen=True, slots=True)
class DistObject:
    """The item of a file that holds something other than a tensor."""

    file: str
    offset: int
    nbytes: int


_Places = dict[tuple[str, tuple[int, ...] | None], DistObject]


def read_metadata(folder: Path) -> tuple[dict[str, DistTensor], dict[str, DistObject]]:
    """The tensors and the other objects of a checkpoint, each by its key.

    Raises:
        ConfigError: `folder` is no distributed checkpoint, or its metadata is damaged, names what
            it should not, or does not fit the files beside it.
    """
    path = folder / METADATA_FILE
    _check_backend(folder)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    try:
        tree = inert_pickle.read(data, _ALLOWED)
    except inert_pickle.ForeignName as error:
        raise ConfigError(
            f"{path} names {error}, which is not in a checkpoint's metadata; it was not loaded"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is damaged, or not a checkpoint's metadata: {error}") from error
    try:
        tensors, objects = _contents(tree)
        _check_files(
            folder, itertools.chain(objects.values(), *(t.chunks for t in tensors.values()))
        )
    except _Unsound as error:
        raise ConfigError(f"{path} is damaged: {error}") from None
    return tensors, objects


class _Unsound(ValueError):
    """What does not hold in a checkpoint's metadata."""


def _check_backend(folder: Path) -> None:
    path = folder / BACKEND_FILE
    if not folder.is_dir():
        raise ConfigError(f"checkpoint folder {folder} does not exist")
    if not path.exists():
        raise ConfigError(f"{folder} is not a distributed checkpoint: it has no {BACKEND_FILE}")
    found = read_json_object(path)
    for key in ("sharded_backend", "sharded_backend_version"):
        if found.get(key) != BACKEND[key]:
            raise ConfigError(f"{path}: {key} is {found.get(key)!r}, allowed: {BACKEND[key]!r}")


def _contents(tree: Any) -> tuple[dict[str, DistTensor], dict[str, DistObject]]:
    metadata = _fields(tree, "Metadata", "MCoreMetadata")
    entries, stored = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(stored, dict):
        raise _Unsound("it lacks state_dict_metadata or storage_data")
    places = _places(stored)
    tensors: dict[str, DistTensor] = {}
    objects: dict[str, DistObject] = {}
    for key, entry in entries.items():
        if not isinstance(key, str):
            raise _Unsound("a key is not a string")
        if isinstance(entry, Node) and entry.kind == "BytesStorageMetadata":
            objects[key] = _taken(places, key, None)
        else:
            tensors[key] = _tensor(key, _fields(entry, "TensorStorageMetadata"), places)
    if places:
        raise _Unsound(f"an item of {next(iter(places))[0]} is part of no tensor")
    return tensors, objects


def _places(stored: Mapping[Any, Any]) -> _Places:
    places: _Places = {}
    for index, info in stored.items():
        where, what = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
        key, offsets = where.get("fqn"), where.get("offset")
        file, offset, length = (what.get(n) for n in ("relative_path", "offset", "length"))
        if not isinstance(key, str):
            raise _Unsound("the key of an item is not a string")
        if not isinstance(file, str) or not _is_plain_name(file):
            raise _Unsound(f"the file of {key} is {file!r:.80}, not a name in the folder")
        if what.get("transform_descriptors"):
            raise _Unsound(f"{key} was written through an extension, which is not supported")
        place = key, None if offsets is None else _numbers(offsets, key)
        if place in places:
            raise _Unsound(f"{key} has two items at offsets {place[1]}")
        places[place] = DistObject(file, *_numbers((offset, length), key))
    return places


def _tensor(key: str, entry: Mapping[str, Any], places: _Places) -> DistTensor:
    shape = _numbers(entry.get("size"), key)
    properties = entry.get("properties")
    if not isinstance(properties, Node) or properties.kind != "TensorProperties":
        raise _Unsound(f"{key} lacks its properties")
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, torch.dtype):
        raise _Unsound(f"{key} lacks its dtype")
    chunks = entry.get("chunks")
    if not isinstance(chunks, list):
        raise _Unsound(f"{key} lacks its chunks")
    found = []
    for chunk in chunks:
        box = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _numbers(box.get("offsets"), key), _numbers(box.get("sizes"), key)
        if not len(offsets) == len(sizes) == len(shape):
            raise _Unsound(f"a chunk of {key} has other dims than its shape {shape}")
        place = _taken(places, key, offsets)
        if math.prod(sizes) * dtype.itemsize > place.nbytes:
            raise _Unsound(f"a chunk of {key} has more elements than its item has bytes for")
        found.append(DistChunk(offsets, sizes, place.file, place.offset, place.nbytes))
    if len(shape) > _MAX_DIMS or not cover_once(shape, found):
        raise _Unsound(f"the chunks of {key} do not cover its shape {shape} exactly once")
    return DistTensor(shape, dtype, tuple(found))


def cover_once(shape: Sequence[int], chunks: Sequence[DistChunk]) -> bool:
    """Whether boxes cover a tensor exactly once, in time linear in their number.

    Whether a point is covered an odd number of times follows from the corners of the boxes that
    are corners of an odd number of them. If those are the tensor's own, all of it is covered and
    nothing outside; if the boxes have as many elements as the tensor, none is covered twice.
    """
    if len(chunks) == 1:
        return not any(chunks[0].offsets) and chunks[0].sizes == tuple(shape)
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        return False
    odd: set[tuple[int, ...]] = set(itertools.product(*((0, size) for size in shape)))
    if 0 in shape:
        odd.clear()
    for chunk in chunks:
        if 0 not in chunk.sizes:
            ends = ((o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            odd.symmetric_difference_update(itertools.product(*ends))
    return not odd


def _check_files(folder: Path, items: Iterable[DistChunk | DistObject]) -> None:
    """All items lie in their files, and no two of them share bytes."""
    per_file: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for item in items:
        per_file[item.file].append((item.offset, item.nbytes))
    for name, places in sorted(per_file.items()):
        path, end = folder / name, 0
        if not path.is_file():
            raise ConfigError(f"{folder} is not a complete checkpoint: it has no file {name}")
        for offset, nbytes in sorted(places):
            if offset < end:
                raise _Unsound(f"two items of {name} share the bytes at {offset}")
            end = offset + nbytes
        if end > (size := path.stat().st_size):
            raise ConfigError(f"{path} is cut short: it has {size} bytes of at least {end}")


def _is_plain_name(file: str) -> bool:
    return file not in ("", "..") and Path(file).name == file and "\0" not in file


def _taken(places: _Places, key: str, offsets: tuple[int, ...] | None) -> DistObject:
    place = places.pop((key, offsets), None)
    if place is None:
        raise _Unsound(f"it does not say where {key} is stored")
    return place


def _fields(node: Any, *kinds: str) -> dict[str, Any]:
    if not isinstance(node, Node) or node.kind not in kinds or not isinstance(node.state, dict):
        raise _Unsound(f"it holds something else where {kinds[0]} should be")
    return node.state


def _numbers(values: Any, key: str) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(
        type(value) is int and 0 <= value < 1 << 63 for value in values
    ):
        raise _Unsound(f"a size or an offset of {key} is not a number of elements or bytes")
    return values
