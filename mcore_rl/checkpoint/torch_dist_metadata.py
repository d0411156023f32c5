"""Metadata of distributed checkpoints: the contents and locations in `.metadata`, read safely.

torch pickles a torch.distributed.checkpoint.Metadata into it (filesystem.py, `finish`) and reads it
with pickle.load, which can run code. Here the pickle may use only the classes of such metadata.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import pickle
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from mcore_rl.checkpoint.files import open_atomic, write_at
from mcore_rl.checkpoint.pickle_limits import check_pickle
from mcore_rl.checkpoint.storage_location import CONTENT_METADATA
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_object
from mcore_rl.config.regular_file import read_regular

METADATA_FILE = ".metadata"
BACKEND_FILE = "metadata.json"
COMMON_KEY = "common_state/shard_0_1"  # of the object that is neither tensors nor other objects
COMMON_FILE = "common.distcp"  # of that object, in what is written here
LEGACY_COMMON_FILE = "common.pt"  # in its place before Megatron-core 0.19
# Written by Megatron's dist_checkpointing/core.py.
BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_MAX_METADATA_BYTES = 2 << 30
_MAX_DIMS = 8  # a parameter's dims, and those that stack layers and experts, are at most four
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class DistItem:
    """An item of a file: a chunk of a tensor, or an object."""

    file: str
    offset: int
    nbytes: int
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DistTensor:
    """A tensor; its chunks cover it exactly once."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[DistItem, ...]


def read_metadata(folder: Path) -> tuple[dict[str, DistTensor], dict[str, DistItem]]:
    """Return the tensors and the other objects of a checkpoint, by key.

    Raises:
        ConfigError: `folder` is no distributed checkpoint, or its metadata is damaged, needs other
            classes, or does not fit the files.
    """
    path = folder / METADATA_FILE
    _check_backend(folder)
    try:
        data = read_regular(path, _MAX_METADATA_BYTES)
        check_pickle(data, _OPCODES.split())
        tensors, objects = _parse_contents(_Unpickler(data, path).load())
        _check_files(
            folder, itertools.chain(objects.values(), *(t.chunks for t in tensors.values()))
        )
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (  # of a damaged pickle
        pickle.UnpicklingError, AttributeError, EOFError, LookupError, OverflowError, TypeError,
        ValueError,
    ) as error:  # fmt: skip
        raise ConfigError(f"{path} is damaged, or not a checkpoint's metadata: {error}") from error
    return tensors, objects


def _check_backend(folder: Path) -> None:
    path = folder / BACKEND_FILE
    if not folder.is_dir():
        raise ConfigError(f"checkpoint folder {folder} does not exist")
    if not path.exists():
        raise ConfigError(f"{folder} is not a distributed checkpoint: it has no {BACKEND_FILE}")
    backend = read_json_object(path)
    for key, allowed in BACKEND.items():
        if backend.get(key) != allowed:
            raise ConfigError(f"{path}: {key} is {backend.get(key)!r}, allowed: {allowed!r}")


class _Ignored:
    """Placeholder for values that are not used."""

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


# Stand-ins for torch's classes of the same names, with the attributes that are read here. torch's
# modules (torch/distributed/checkpoint/metadata.py and filesystem.py) import its compiler and
# distributed tensors, which takes 0.6 s of CPU time.


class Metadata:
    state_dict_metadata: Any = None
    storage_data: Any = None


class TensorStorageMetadata:
    properties: Any = None
    size: Any = None
    chunks: Any = None


class BytesStorageMetadata: ...


class ChunkStorageMetadata:
    offsets: Any = None
    sizes: Any = None


class MetadataIndex:  # torch's is hashed by what it has, which a pickle may change later
    fqn: Any = None
    offset: Any = None


class TensorProperties:
    dtype: Any = None

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0]  # the other fields are deprecated


class _StorageInfo:
    relative_path: Any = None
    offset: Any = None
    length: Any = None
    transform_descriptors: Any = None


_DCP = "torch.distributed.checkpoint"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
# All classes that torch 2.4 to 2.13 and Megatron-core 0.15 to 0.19 pickle, as pairs of module and
# name: those that are used, then those that are ignored (folder, layouts, save plans of the ranks).
_CLASSES: dict[tuple[str, str], Any] = {
    (f"{_DCP}.metadata", "Metadata"): Metadata,
    (_MEGATRON, "MCoreMetadata"): Metadata,
    (f"{_DCP}.metadata", "TensorStorageMetadata"): TensorStorageMetadata,
    (f"{_DCP}.metadata", "BytesStorageMetadata"): BytesStorageMetadata,
    (f"{_DCP}.metadata", "ChunkStorageMetadata"): ChunkStorageMetadata,
    (f"{_DCP}.metadata", "MetadataIndex"): MetadataIndex,
    (f"{_DCP}.metadata", "TensorProperties"): TensorProperties,
    (f"{_DCP}.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    **{("torch", n): dtype for n, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)},
    **dict.fromkeys(
        [
            (f"{_DCP}.metadata", "StorageMeta"),
            (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
            (f"{_DCP}.filesystem", "_StoragePrefix"),
            (f"{_DCP}.planner", "SavePlan"),
            (f"{_DCP}.planner", "WriteItem"),
            (f"{_DCP}.planner", "WriteItemType"),
            (f"{_DCP}.planner", "TensorWriteData"),
            (f"{_DCP}.planner", "BytesIOWriteData"),
            (_MEGATRON, "MCoreSavePlan"),
            ("torch.serialization", "_get_layout"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
        ],
        _Ignored,
    ),
}
# Opcodes of pickle.dump since Python 3.8 (protocols 4 and 5) for plain data and dataclasses; not
# PUT, with which a few bytes can allocate gigabytes of memo.
_OPCODES = (
    "PROTO FRAME STOP MEMOIZE BINGET LONG_BINGET MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 "
    "LONG1 BINFLOAT EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT "
    "SETITEM SETITEMS STACK_GLOBAL REDUCE NEWOBJ BUILD SHORT_BINUNICODE BINUNICODE"
)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path
        self._subclasses: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class; import nothing."""
        known = _CLASSES.get((module, name))
        if known is None:
            raise ConfigError(
                f"{self._path} names {module}.{name}, which is not in a checkpoint's metadata; it "
                "was not loaded"
            )
        if not isinstance(known, type) or known in (tuple, dict):
            return known
        if (module, name) not in self._subclasses:  # a pickle could change the class itself
            self._subclasses[module, name] = type(name, (known,), {})
        return self._subclasses[module, name]


_Offsets = tuple[int, ...]
_Locations = dict[tuple[str, _Offsets | None], tuple[str, int, int]]


def _parse_contents(unpickled: Any) -> tuple[dict[str, DistTensor], dict[str, DistItem]]:
    """Return the tensors and the other objects of unpickled metadata, by key.

    Raises:
        ValueError: The metadata is incomplete or contradicts itself.
    """
    stored = _check_type(Metadata, unpickled, "it")
    locations: _Locations = {}
    for index, info in _check_type(dict, stored.storage_data, "storage_data").items():
        key = _check_type(str, _check_type(MetadataIndex, index, "the key of an item").fqn, "a key")
        file = _check_type(_StorageInfo, info, f"the place of {key}").relative_path
        if not isinstance(file, str) or not re.fullmatch(r"(?!\.\.?$)[^/\0]+", file):
            shown = f"{file!r:.80}" if isinstance(file, str) else f"a {type(file).__name__}"
            raise ValueError(f"the file of {key} is {shown}, not a name in the folder")
        if info.transform_descriptors:
            raise ValueError(f"{key} was written through an extension, which is not supported")
        offsets = None if index.offset is None else _check_sizes(index.offset, key)
        start, nbytes = _check_sizes((info.offset, info.length), key)
        if (key, offsets) in locations:  # of two equal keys, readers might take one each
            raise ValueError(f"an item of {key} has two places")
        locations[key, offsets] = file, start, nbytes
    tensors: dict[str, DistTensor] = {}
    objects: dict[str, DistItem] = {}
    for key, entry in _check_type(dict, stored.state_dict_metadata, "state_dict_metadata").items():
        _check_type(str, key, "a key")
        if isinstance(entry, BytesStorageMetadata):
            objects[key] = DistItem(*_pop_location(locations, key, None))
        else:
            tensors[key] = _parse_tensor(key, entry, locations)
    if locations:
        raise ValueError(f"an item of {next(iter(locations))[0]} is part of no tensor")
    return tensors, objects


def _parse_tensor(key: str, entry: Any, locations: _Locations) -> DistTensor:
    entry = _check_type(TensorStorageMetadata, entry, f"the entry of {key}")
    shape = _check_sizes(entry.size, key)
    properties = _check_type(TensorProperties, entry.properties, f"properties of {key}")
    dtype = _check_type(torch.dtype, properties.dtype, f"the dtype of {key}")
    chunks = []
    for chunk in _check_type(list, entry.chunks, f"chunks of {key}"):
        box = _check_type(ChunkStorageMetadata, chunk, f"a chunk of {key}")
        offsets, sizes = _check_sizes(box.offsets, key), _check_sizes(box.sizes, key)
        if not len(offsets) == len(sizes) == len(shape):
            raise ValueError(f"a chunk of {key} has other dims than its shape {shape}")
        item = DistItem(*_pop_location(locations, key, offsets), offsets, sizes)
        if math.prod(sizes) * dtype.itemsize > item.nbytes:
            raise ValueError(f"a chunk of {key} has more elements than its item has bytes for")
        chunks.append(item)
    if not covers_once(shape, chunks):
        raise ValueError(f"the chunks of {key} do not cover its shape {shape} exactly once")
    return DistTensor(shape, dtype, tuple(chunks))


def covers_once(shape: Sequence[int], chunks: Sequence[DistItem]) -> bool:
    """Return whether boxes cover a tensor exactly once, in time linear in their number.

    The points that are corners of an odd number of boxes determine which points are covered an odd
    number of times. If they are the tensor's corners, all of it is covered and nothing outside. If
    the boxes also have as many elements as the tensor, no element is covered twice.
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


def _check_files(folder: Path, items: Iterable[DistItem]) -> None:
    """Check that all items are inside their files and do not overlap."""
    per_file: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for item in items:
        per_file[item.file].append((item.offset, item.nbytes))
    for name, locations in sorted(per_file.items()):
        path, end = folder / name, 0
        if not path.is_file():
            raise ConfigError(f"{folder} is not a complete checkpoint: it has no file {name}")
        for offset, nbytes in sorted(locations):
            if offset < end:
                raise ValueError(f"two items of {name} share the bytes at {offset}")
            end = offset + nbytes
        if end > (size := path.stat().st_size):
            raise ConfigError(f"{path} is truncated: it has {size} bytes of at least {end}")


def _pop_location(
    locations: _Locations, key: str, offsets: _Offsets | None
) -> tuple[str, int, int]:
    if (key, offsets) not in locations:
        raise ValueError(f"it does not say where {key} is stored")
    return locations.pop((key, offsets))


def _check_type(kind: type[_T], value: Any, what: str) -> _T:
    if not isinstance(value, kind):
        raise ValueError(f"{what} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _check_sizes(values: Any, key: str) -> tuple[int, ...]:
    if (
        not isinstance(values, tuple)
        or len(values) > _MAX_DIMS
        or not all(type(value) is int and 0 <= value < 1 << 63 for value in values)
    ):
        raise ValueError(f"a size or an offset of {key} is not a number of elements or bytes")
    return tuple(values)


class Record(NamedTuple):
    """An item of a `.distcp` file: a chunk of a tensor, or an object, without a dtype.

    Also valid after json.dumps and json.loads.
    """

    key: str
    shape: Sequence[int]  # of the tensor
    dtype: str | None  # "bfloat16"
    offsets: Sequence[int]
    sizes: Sequence[int]
    file: str
    offset: int
    length: int


def write_metadata(
    folder: str | Path, records: Iterable[Record], common: Mapping[str, Any] | None = None
) -> None:
    """Write `.metadata`, `common.distcp` and `metadata.json`, which complete the folder.

    Their bytes do not depend on the order of the records.

    Args:
        common: The common state, see DistReader.load_common. None: the naming of tensors alone.
    """
    file = io.BytesIO()
    torch.save([{"content_metadata": CONTENT_METADATA} if common is None else dict(common)], file)
    data = file.getvalue()
    common_record = Record(COMMON_KEY, (), None, (), (), COMMON_FILE, 0, len(data))
    metadata = _build_metadata([*records, common_record])
    for name, content in (
        (COMMON_FILE, data),
        (BACKEND_FILE, json.dumps(BACKEND).encode()),
        (METADATA_FILE, pickle.dumps(metadata, protocol=4)),
    ):
        with open_atomic(Path(folder) / name) as fd:
            write_at(fd, 0, content)


def _build_metadata(records: Iterable[Record]) -> Any:
    # These import torch's compiler, which a process that only writes tensors does not need.
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    locations: dict[MetadataIndex, _StorageInfo] = {}
    interned: dict[str, str] = {}  # pickle writes equal strings once if they are the same object
    for record in sorted(records, key=lambda record: (record.key, tuple(record.offsets))):
        key = interned.setdefault(record.key, record.key)
        file = interned.setdefault(record.file, record.file)
        if record.dtype is None:
            entries[key], index = BytesStorageMetadata(), MetadataIndex(key)
        else:
            properties = TensorProperties(getattr(torch, record.dtype))
            empty = TensorStorageMetadata(properties, torch.Size(record.shape), [])
            entry: Any = entries.setdefault(key, empty)
            chunk = ChunkStorageMetadata(torch.Size(record.offsets), torch.Size(record.sizes))
            entry.chunks.append(chunk)
            index = MetadataIndex(key, chunk.offsets)
        if index in locations:
            raise ValueError(f"two records of {key} at offsets {record.offsets}")
        locations[index] = _StorageInfo(file, record.offset, record.length)
    return Metadata(entries, storage_data=locations, version=CURRENT_DCP_VERSION)
