"""What a distributed checkpoint contains, and where: its `.metadata`, read safely and checked.

torch pickles a torch.distributed.checkpoint.Metadata into it (filesystem.py, `finish`),
and a pickle is a program. Here it may use only the classes of such metadata, and torch is not given
the file: its unpickler would import what the names say. (A file made for it can still end the
process, with a key nested too deep for the stack.)
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
import pickletools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

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
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class DistItem:
    """`nbytes` bytes at `offset` of a file: the chunk of a tensor at `offsets`, or an object."""

    file: str
    offset: int
    nbytes: int
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DistTensor:
    """A tensor, whole; its chunks cover it exactly once."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[DistItem, ...]


def read_metadata(folder: Path) -> tuple[dict[str, DistTensor], dict[str, DistItem]]:
    """The tensors and the other objects of a checkpoint, each by its key.

    Raises:
        ConfigError: `folder` is no distributed checkpoint, or its metadata is damaged, names what
            it should not, or does not fit the files beside it.
    """
    path = folder / METADATA_FILE
    _check_backend(folder)
    try:
        data = path.read_bytes()
        _check_opcodes(data)
        tensors, objects = _contents(_Unpickler(data, path).load())
        _check_files(
            folder, itertools.chain(objects.values(), *(t.chunks for t in tensors.values()))
        )
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (  # what a damaged program ends with
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
    found = read_json_object(path)
    for key in ("sharded_backend", "sharded_backend_version"):
        if found.get(key) != BACKEND[key]:
            raise ConfigError(f"{path}: {key} is {found.get(key)!r}, allowed: {BACKEND[key]!r}")


class _Ignored:
    """Placeholder for values that are not used."""

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


# What is read of torch's classes of the same names (torch/distributed/checkpoint/metadata.py, and
# filesystem.py), whose modules import torch's compiler and its tensors, for 0.6 s of CPU time.


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


@dataclass(frozen=True)
class MetadataIndex:
    fqn: Any = None
    offset: Any = None


class TensorProperties:
    dtype: Any = None

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0]  # all else is deprecated


class _StorageInfo:
    relative_path: Any = None
    offset: Any = None
    length: Any = None
    transform_descriptors: Any = None


_DCP = "torch.distributed.checkpoint"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
# All that torch 2.4 to 2.13 and Megatron-core 0.15 to 0.19 pickle, as exact pairs of module and
# name: what is read, then what is not (the folder, layouts, the plans of the ranks that saved).
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
# What pickle.dump writes since Python 3.8 (protocols 4 and 5) for plain data and dataclasses.
# Without the PUT opcodes, with which a few bytes can ask for gigabytes of memo.
_OPCODES = (
    "PROTO FRAME STOP MEMOIZE BINGET LONG_BINGET MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 "
    "LONG1 BINFLOAT EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT "
    "SETITEM SETITEMS STACK_GLOBAL REDUCE NEWOBJ BUILD SHORT_BINUNICODE BINUNICODE"
)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path
        self._own: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Look a pair up; nothing is imported, and no attribute of a module is read."""
        known = _CLASSES.get((module, name))
        if known is None:
            raise ConfigError(
                f"{self._path} names {module}.{name}, which is not in a checkpoint's metadata; it "
                "was not loaded"
            )
        if not isinstance(known, type) or known in (tuple, dict):
            return known
        if (module, name) not in self._own:  # classes of this pickle's own: it could change ours
            self._own[module, name] = type(name, (known,), {})
        return self._own[module, name]


def _check_opcodes(data: bytes) -> None:
    """Raise ValueError unless these are opcodes of plain data, whole, from the start to STOP."""
    allowed, at = set(_OPCODES.split()), None
    for opcode, _, at in pickletools.genops(data):
        if opcode.name not in allowed:
            raise ValueError(f"opcode {opcode.name} at byte {at}")
    if at != len(data) - 1:
        raise ValueError("it has data after its end")


_Offsets = tuple[int, ...]
_Places = dict[tuple[str, _Offsets | None], tuple[str, int, int]]


def _contents(found: Any) -> tuple[dict[str, DistTensor], dict[str, DistItem]]:
    stored = _as(Metadata, found, "it")
    places: _Places = {}
    for index, info in _as(dict, stored.storage_data, "storage_data").items():
        key = _as(str, _as(MetadataIndex, index, "the key of an item").fqn, "a key")
        file = _as(_StorageInfo, info, f"the place of {key}").relative_path
        if not isinstance(file, str) or not re.fullmatch(r"(?!\.\.?$)[^/\0]+", file):
            raise ValueError(f"the file of {key} is {file!r:.80}, not a name in the folder")
        if info.transform_descriptors:
            raise ValueError(f"{key} was written through an extension, which is not supported")
        offsets = None if index.offset is None else _numbers(index.offset, key)
        start, nbytes = _numbers((info.offset, info.length), key)
        if (key, offsets) in places:  # of two equal keys, readers might take one each
            raise ValueError(f"an item of {key} has two places")
        places[key, offsets] = file, start, nbytes
    tensors: dict[str, DistTensor] = {}
    objects: dict[str, DistItem] = {}
    for key, entry in _as(dict, stored.state_dict_metadata, "state_dict_metadata").items():
        _as(str, key, "a key")
        if isinstance(entry, BytesStorageMetadata):
            objects[key] = DistItem(*_taken(places, key, None))
        else:
            tensors[key] = _tensor(key, entry, places)
    if places:
        raise ValueError(f"an item of {next(iter(places))[0]} is part of no tensor")
    return tensors, objects


def _tensor(key: str, entry: Any, places: _Places) -> DistTensor:
    entry = _as(TensorStorageMetadata, entry, f"what is said of {key}")
    shape = _numbers(entry.size, key)
    properties = _as(TensorProperties, entry.properties, f"properties of {key}")
    dtype = _as(torch.dtype, properties.dtype, f"the dtype of {key}")
    chunks = []
    for chunk in _as(list, entry.chunks, f"chunks of {key}"):
        box = _as(ChunkStorageMetadata, chunk, f"a chunk of {key}")
        offsets, sizes = _numbers(box.offsets, key), _numbers(box.sizes, key)
        if not len(offsets) == len(sizes) == len(shape):
            raise ValueError(f"a chunk of {key} has other dims than its shape {shape}")
        item = DistItem(*_taken(places, key, offsets), offsets, sizes)
        if math.prod(sizes) * dtype.itemsize > item.nbytes:
            raise ValueError(f"a chunk of {key} has more elements than its item has bytes for")
        chunks.append(item)
    if len(shape) > _MAX_DIMS or not cover_once(shape, chunks):
        raise ValueError(f"the chunks of {key} do not cover its shape {shape} exactly once")
    return DistTensor(shape, dtype, tuple(chunks))


def cover_once(shape: Sequence[int], chunks: Sequence[DistItem]) -> bool:
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


def _check_files(folder: Path, items: Iterable[DistItem]) -> None:
    """All items are inside their files, and no two of them overlap."""
    per_file: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for item in items:
        per_file[item.file].append((item.offset, item.nbytes))
    for name, places in sorted(per_file.items()):
        path, end = folder / name, 0
        if not path.is_file():
            raise ConfigError(f"{folder} is not a complete checkpoint: it has no file {name}")
        for offset, nbytes in sorted(places):
            if offset < end:
                raise ValueError(f"two items of {name} share the bytes at {offset}")
            end = offset + nbytes
        if end > (size := path.stat().st_size):
            raise ConfigError(f"{path} is truncated: it has {size} bytes of at least {end}")


def _taken(places: _Places, key: str, offsets: _Offsets | None) -> tuple[str, int, int]:
    if (key, offsets) not in places:
        raise ValueError(f"it does not say where {key} is stored")
    return places.pop((key, offsets))


def _as(kind: type[_T], value: Any, what: str) -> _T:
    if not isinstance(value, kind):
        raise ValueError(f"{what} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _numbers(values: Any, key: str) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(
        type(value) is int and 0 <= value < 1 << 63 for value in values
    ):
        raise ValueError(f"a size or an offset of {key} is not a number of elements or bytes")
    return tuple(values)
