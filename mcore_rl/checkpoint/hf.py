"""Hugging Face checkpoints: boxes of their tensors, read by position from safetensors files.

safetensors' memory map of a file is not used: its pages count as memory of the process.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mcore_rl.checkpoint import files, fp8
from mcore_rl.checkpoint.quantization import (
    check_quantization_config,
    find_packed_weights,
    list_parts,
)
from mcore_rl.checkpoint.stacks import ExpertPart, is_stack, list_experts, locate_expert
from mcore_rl.config.checks import check_model_exists
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import parse_json_object, read_json_object
from mcore_rl.config.regular_file import open_regular, open_regular_fd
from mcore_rl.models.base import (
    HFConfig,
    drop_mtp_layers,
    get_family,
    get_frozen_prefixes,
    is_transposed,
    may_stack_experts,
    pad_vocab_size,
    read_config,
)
from mcore_rl.reshard.float8 import BLOCK, SCALE_SUFFIX, get_scale_shape
from mcore_rl.reshard.rules import (
    Block,
    Box,
    LogicalTensor,
    join_slices,
    list_logical_tensors,
    parse_slice,
    slice_rows,
)

INDEX_FILE = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
_DERIVED = ".rotary_emb.inv_freq"  # suffix of tensors that follow from config.json
_HEAD = "lm_head.weight"
_EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
_ROWS_PER_READ = 4096  # when a tied head is compared with the embedding
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CRC32_KEY = "mcore_rl.crc32"  # in __metadata__ of a file: JSON, 8 hex digits per tensor name
LENGTH_BYTES = 8  # size of the header length at the start of a file
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
_ROWS_BYTES = 16 << 20  # buffer of rows, when a box has some of their columns


def has_weights(path: str) -> bool:
    """Return whether a model's folder has weights, not config.json alone."""
    return any(Path(path).glob("*.safetensors*"))


def read_checkpoint_config(path: str | Path, setting: str = "model.path") -> HFConfig:
    """Read config.json and check that `CheckpointReader` supports its quantization.

    Args:
        setting: Name of the setting with the path, for messages.

    Raises:
        ConfigError: As `read_config`, or weights are quantized in another way than float8 blocks,
            MXFP4 or int4.
    """
    config = read_config(path, setting)
    quantization = config.get("quantization_config")
    if quantization is not None:
        try:
            check_quantization_config(quantization)
        except ConfigError as error:
            raise ConfigError(f"{setting}={str(path)!r}: {error}") from None
    return config


def read_frozen_tensors(path: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the frozen tensors of a checkpoint folder, as its files have them.

    Raises:
        ConfigError: The folder has no weights, or they are damaged.
    """
    file = Path(path) / "config.json"
    if file.is_file() and get_frozen_prefixes(read_json_object(file)):
        reader = CheckpointReader(path)
        for name in reader.frozen:
            yield name, reader.read_tensor(name)


def read_stacks(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the stacked experts of a checkpoint folder that may have any, by name.

    Raises:
        ConfigError: The folder has no weights, or they are damaged.
    """
    file = Path(path) / "config.json"
    is_stacking = file.is_file() and may_stack_experts(read_json_object(file))
    return CheckpointReader(path).stacks if is_stacking else {}


class CheckpointReader:
    """The tensors of a checkpoint folder, as the model has them. Keeps no file open.

    A weight in float8 blocks (checkpoint/fp8.py) and its scales are one tensor here, their product;
    so are values and scales of experts in MXFP4 or int4 (checkpoint/quantization.py).
    Rotary frequencies, which follow from config.json, are left out, as in transformers and vLLM. So
    is the output head of a model with tied embeddings; `check` compares the two. Experts that files
    have transposed (models/base.is_transposed) are here as the model has them. A slice of a stacked
    tensor is read under its own name (reshard/rules.StackSlice), too. Frozen tensors
    (Family.frozen_prefixes) are like any other, but `check` does not expect them. Experts that a
    model may stack (may_stack_experts) are here one by one.

    Args:
        setting: Name of the setting with the path, for messages.

    Raises:
        ConfigError: Index and files do not agree, a file is damaged, or weights are quantized in
            another way.
    """

    def __init__(self, path: str | Path, setting: str = "model.path") -> None:
        self.path = Path(path)
        has_config = (self.path / "config.json").is_file()
        config: HFConfig = read_checkpoint_config(self.path, setting) if has_config else {}
        located = _locate_tensors(self.path, setting)
        self._file_of = {n: file for n, file in located.items() if not n.endswith(_DERIVED)}
        self._embedding = next((name for name in _EMBEDDINGS if name in self._file_of), "")
        is_tied = config.get("tie_word_embeddings") and self._embedding
        self._tied_head = self._file_of.pop(_HEAD, None) if is_tied else None
        self._transposed = frozenset(n for n in self._file_of if is_transposed(config, n))
        self._check_transposed(config)
        self.stacks = self._find_stacks() if may_stack_experts(config) else {}
        self._frozen_prefixes = get_frozen_prefixes(config)
        entries = {name: file.entries[name] for name, file in self._file_of.items()}
        try:
            self._packed = find_packed_weights(
                {name: (entry.shape, entry.dtype) for name, entry in entries.items()}
            )
        except ConfigError as error:
            raise ConfigError(f"checkpoint {self.path}: {error}") from None
        self._scaled = self._find_scaled_weights()

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the tensors that no engine loads."""
        prefixes = self._frozen_prefixes
        return tuple(name for name in self.get_shapes() if name.startswith(prefixes))

    @property
    def quantization(self) -> str | None:
        """Format of quantized weights; None if there are none."""
        if self._scaled:
            return f"fp8, blocks of {BLOCK} x {BLOCK}"
        return next((codec.DESCRIPTION for codec in self._packed.values()), None)

    def get_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        if (part := parse_slice(name)) is not None:
            shape = self.get_shape(part.stack)[1:]
            return shape[::-1] if part.is_transposed else shape
        if (expert := self._locate_expert(name)) is not None:
            return expert.get_shape(self.stacks[expert.stack])
        if (codec := self._packed.get(name)) is not None:
            shape = codec.get_shape(self._get_entry(list_parts(name, codec)[0]).shape)
            return tuple(shape)
        shape = self._get_entry(name).shape
        return swap_last(shape) if name in self._transposed else shape

    def get_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors by name."""
        parts = {name + SCALE_SUFFIX for name in self._scaled}
        parts |= {part for name, codec in self._packed.items() for part in list_parts(name, codec)}
        parts |= self.stacks.keys()
        names = [*self._packed, *(name for name in self._file_of if name not in parts)]
        shapes = {name: self.get_shape(name) for name in names}
        for stack, shape in self.stacks.items():
            shapes |= list_experts(stack, shape)
        return shapes

    def view_as_stored(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of a tensor with its dimensions in the order of the file."""
        return tensor.transpose(-1, -2) if name in self._transposed else tensor

    def get_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of `read`'s result: the file's, or bfloat16 for a quantized tensor."""
        name = self._get_stored_name(name)
        if name in self._scaled or name in self._packed:
            return torch.bfloat16
        return self._get_entry(name).dtype

    def get_stored_dtype(self, name: str) -> torch.dtype:
        """Return the dtype in the file; of experts in MXFP4 or int4 uint8, two values."""
        name = self._get_stored_name(name)
        return torch.uint8 if name in self._packed else self._get_entry(name).dtype

    def has_checksum(self, name: str) -> bool:
        """Return whether a tensor has a checksum, which is compared when all of it is read."""
        if self._get_stored_name(name) != name or name in self._packed:
            return False
        names = [name, name + SCALE_SUFFIX] if name in self._scaled else [name]
        return all(n in self._file_of[n].crc32s for n in names)

    def list_stored(self) -> Iterator[tuple[str, Path, Entry]]:
        """Yield name, file and entry of every tensor in the files, scales included."""
        for name, file in self._file_of.items():
            yield name, file.path, file.entries[name]

    def read_config(self) -> HFConfig:
        """Read config.json of the model that the tensors form.

        It has no quantization_config: tensors are read dequantized. It has no layers for
        multi-token prediction without weights: transformers drops the layers when it saves a model
        and keeps their number in the config.
        """
        config = read_config(self.path)
        config.pop("quantization_config", None)
        weights = get_family(config).weights(config, pad_vocab_size(config, 1))
        predicted = [w for w in weights if w.stage == "mtp" and not w.replica]
        has_mtp = any(tensor.name in self._file_of for tensor in list_logical_tensors(predicted))
        return config if has_mtp else drop_mtp_layers(config)

    def read(self, block: Block, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read a block, and only its elements, into a new tensor of `dtype` or that of get_dtype.

        Raises:
            ConfigError: The tensor is damaged.
        """
        out = torch.empty(block.box.sizes, dtype=dtype or self.get_dtype(block.tensor.name))
        self.read_into(block, out)
        return out

    def read_tensor(self, name: str) -> torch.Tensor:
        """Read a tensor, in the dtype of get_dtype."""
        shape = self.get_shape(name)
        return self.read(slice_rows(LogicalTensor(name, shape), 0, shape[0], 0))

    def read_into(self, block: Block, out: torch.Tensor) -> None:
        """Read a block into `out`, which has the shape of its box.

        If the dtype differs from that of the file, the block is in memory in both.
        """
        name, box = block.tensor.name, block.box
        if (part := parse_slice(name)) is not None:
            offsets, sizes = box.offsets, box.sizes
            if part.is_transposed:
                offsets, sizes, out = offsets[::-1], sizes[::-1], out.t()
            name, out = part.stack, out.unsqueeze(0)
            box = Box((part.index, *offsets), (1, *sizes))
        if (expert := self._locate_expert(name)) is not None:
            name, out = expert.stack, out.unsqueeze(0)
            box = expert.locate(box, self.stacks[name])
        if (codec := self._packed.get(name)) is not None:
            *boxes, columns = codec.locate_blocks(box)
            parts = list_parts(name, codec)
            values = codec.dequantize(
                *(_read_stored(self._file_of[n], n, b) for n, b in zip(parts, boxes, strict=False))
            )
            out.copy_(values[:, columns])
            return
        if name in self._transposed:
            box, out = Box(swap_last(box.offsets), swap_last(box.sizes)), out.transpose(-1, -2)
        stored_dtype = self._get_entry(name).dtype
        if name in self._scaled:
            quantized = _read_stored(self._file_of[name], name, box)
            scale = name + SCALE_SUFFIX
            scales = _read_stored(self._file_of[scale], scale, _to_scale_box(box))
            origin = (box.offsets[0], box.offsets[1])
            fp8.dequantize_blocks(quantized, scales, out.dtype, origin, out)
        elif stored_dtype == out.dtype:
            self._file_of[name].read_into(name, box, out)
        else:
            out.copy_(_read_stored(self._file_of[name], name, box))

    def check(self, expected: Iterable[LogicalTensor]) -> None:
        """Raise ConfigError unless the folder has these tensors, so shaped, beside frozen ones."""
        expected_shapes = {tensor.name: tensor.shape for tensor in join_slices(expected)}
        shapes = self.get_shapes()
        missing = sorted(expected_shapes.keys() - shapes.keys())
        extra = sorted(shapes.keys() - expected_shapes.keys() - set(self.frozen))
        for what, names in (("lacks", missing), ("has unexpected", extra)):
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                raise ConfigError(
                    f"checkpoint {self.path} {what} tensor {', '.join(names[:3])}{more}"
                )
        for name, shape in expected_shapes.items():
            if shapes[name] != shape:
                raise ConfigError(
                    f"checkpoint {self.path}: tensor {name} has shape {shapes[name]}, "
                    f"but config.json asks for {shape}"
                )
            if (dtype := self.get_dtype(name)) not in _WEIGHT_DTYPES:
                raise ConfigError(
                    f"checkpoint {self.path}: tensor {name} has dtype {format_dtype(dtype)}; "
                    f"allowed: {', '.join(map(format_dtype, _WEIGHT_DTYPES))}, float8_e4m3fn with "
                    "scales of blocks, or experts in MXFP4 or int4"
                )
        self._check_tied_head()

    def _check_tied_head(self) -> None:
        """Raise ConfigError if the files have a tied head that differs from the embedding.

        transformers would not tie the two, and vLLM would.
        """
        if self._tied_head is None:
            return
        stored = {_HEAD: self._tied_head, self._embedding: self._file_of[self._embedding]}
        head, embedding = (file.entries[name] for name, file in stored.items())
        is_equal = (head.shape, head.dtype) == (embedding.shape, embedding.dtype)
        for start in range(0, head.shape[0] if is_equal else 0, _ROWS_PER_READ):
            num_rows = min(_ROWS_PER_READ, head.shape[0] - start)
            box = slice_rows(LogicalTensor(_HEAD, head.shape), start, num_rows, 0).box
            first, second = (_read_stored(file, name, box) for name, file in stored.items())
            is_equal &= torch.equal(first.view(torch.uint8), second.view(torch.uint8))
        if not is_equal:
            raise ConfigError(
                f"checkpoint {self.path} has {_HEAD}, which is not {self._embedding}, and "
                "config.json has tie_word_embeddings=true; allowed: no such tensor, an equal one, "
                "or tie_word_embeddings=false"
            )

    def _locate_expert(self, name: str) -> ExpertPart | None:
        """Return where a stack has a tensor; None for a tensor that the files have apart."""
        part = locate_expert(name) if self.stacks else None
        return part if part is not None and part.stack in self.stacks else None

    def _get_stored_name(self, name: str) -> str:
        """Return the name of the tensor of a file that has a tensor, or a slice of it."""
        part = parse_slice(name) or self._locate_expert(name)
        return name if part is None else part.stack

    def _find_stacks(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of stacked experts by name.

        Raises:
            ConfigError: One is not [experts, rows, columns].
        """
        shapes = {name: self._get_entry(name).shape for name in self._file_of if is_stack(name)}
        for name, shape in shapes.items():
            if len(shape) != 3:
                raise ConfigError(
                    f"checkpoint {self.path}: {name} has shape {shape}; allowed: [experts, 2 * "
                    "intermediate, hidden] and [experts, hidden, intermediate]"
                )
        return shapes

    def _get_entry(self, name: str) -> Entry:
        if name not in self._file_of:
            raise ConfigError(f"checkpoint {self.path} lacks tensor {name}")
        return self._file_of[name].entries[name]

    def _check_transposed(self, config: HFConfig) -> None:
        """Raise ConfigError for experts that are not transposed in the files."""
        for name in sorted(self._transposed):
            shape, hidden = self._get_entry(name).shape, config.get("hidden_size")
            if len(shape) != 3 or shape[2 if name.endswith("down_proj") else 1] != hidden:
                raise ConfigError(
                    f"checkpoint {self.path}: {name} has shape {shape}, with hidden_size={hidden}; "
                    "allowed: [experts, hidden, 2 * intermediate] and [experts, intermediate, "
                    "hidden], as published models have them and vLLM reads them"
                )

    def _find_scaled_weights(self) -> frozenset[str]:
        """Return the names of the weights in float8.

        Raises:
            ConfigError: A weight has no scales, scales have no weight, or their shapes do not fit.
        """
        where, float8 = f"checkpoint {self.path}", format_dtype(fp8.QUANTIZED)
        scaled = {n for n in self._file_of if self._get_entry(n).dtype == fp8.QUANTIZED}
        for name in self._file_of:
            base = name.removesuffix(SCALE_SUFFIX)
            if base != name and base not in scaled:
                raise ConfigError(f"{where}: {name} are scales, but there is no {base} in {float8}")
        for name in sorted(scaled):
            scale, shape = name + SCALE_SUFFIX, self.get_shape(name)
            if scale not in self._file_of:
                raise ConfigError(
                    f"{where}: {name} is in {float8}, but its scales {scale} are missing"
                )
            if len(shape) != 2:
                raise ConfigError(
                    f"{where}: {name} is in {float8} with shape {shape}; allowed: matrices"
                )
            entry, scale_shape = self._get_entry(scale), get_scale_shape(shape)
            if entry.shape != scale_shape or entry.dtype not in fp8.SCALE_DTYPES:
                raise ConfigError(
                    f"{where}: {scale} is {format_dtype(entry.dtype)} of shape {entry.shape}; "
                    f"allowed for {name}: {' or '.join(map(format_dtype, fp8.SCALE_DTYPES))} of "
                    f"shape {scale_shape}, one for each block of {BLOCK} x {BLOCK}"
                )
        return frozenset(scaled)


def swap_last(values: tuple[int, ...]) -> tuple[int, ...]:
    """Return values of dimensions with the last two of them exchanged.

    >>> swap_last((4, 64, 96))
    (4, 96, 64)
    """
    return (*values[:-2], values[-1], values[-2])


def _read_stored(file: SafetensorsFile, name: str, box: Box) -> torch.Tensor:
    out = torch.empty(box.sizes, dtype=file.entries[name].dtype)
    file.read_into(name, box, out)
    return out


def _to_scale_box(box: Box) -> Box:
    """Return the box of the scales of all blocks that a box of a weight overlaps."""
    starts = tuple(span.start // BLOCK for span in box.slices)
    ends = (-(-span.stop // BLOCK) for span in box.slices)
    return Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))


def _locate_tensors(path: Path, setting: str) -> dict[str, SafetensorsFile]:
    """Return the file of each tensor: by the index, else in model.safetensors, else in any file."""
    paths = {file.name: file for file in sorted(path.glob("*.safetensors")) if file.is_file()}
    index, weight_map = path / INDEX_FILE, None
    if index.is_file():
        weight_map = read_json_object(index).get("weight_map")
        names = weight_map.values() if isinstance(weight_map, dict) else [None]
        if not all(isinstance(name, str) for name in names):
            raise ConfigError(
                f"{index} is not a safetensors index: it has no weight_map of file names"
            )
        if absent := sorted(set(names) - paths.keys()):
            raise ConfigError(f"{index} names {absent[0]!r}, which is not in the folder")
        paths = {name: paths[name] for name in sorted(set(names))}
    elif _SINGLE_FILE in paths:
        paths = {_SINGLE_FILE: paths[_SINGLE_FILE]}
    if not paths:
        check_model_exists(setting, path)
        raise ConfigError(f"{setting}={str(path)!r}: there is no *.safetensors file in it")
    located: dict[str, SafetensorsFile] = {}
    for file in map(SafetensorsFile, paths.values()):
        for name in file.entries:
            if name in located:
                raise ConfigError(f"{located[name].path} and {file.path} both have tensor {name}")
            located[name] = file
            if weight_map is not None and weight_map.get(name) != file.path.name:
                raise ConfigError(f"{file.path} has tensor {name}, which {index} does not name")
    for name, file_name in (weight_map or {}).items():
        if name not in located:
            raise ConfigError(f"{path / file_name} has no tensor {name!r}, which {index} names")
    return located


def format_dtype(dtype: torch.dtype) -> str:
    """Return the name of a dtype.

    >>> format_dtype(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    nbytes: int


class SafetensorsFile:
    """The tensors of a file by name. Keeps no file open: any thread or process may read.

    Raises:
        ConfigError: The file cannot be read, is no safetensors file, or has unsupported dtypes.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.entries: dict[str, Entry] = {}
        self.crc32s: dict[str, int] = {}  # of files that mcore_rl wrote
        try:
            with (
                open_regular(self.path) as plain,
                safe_open(self.path, framework="numpy") as file,
            ):
                self._identity = _identify(plain.fileno())
                offset = LENGTH_BYTES + int.from_bytes(plain.read(LENGTH_BYTES), "little")
                for name in file.offset_keys():  # safetensors refuses files with gaps
                    self.entries[name] = entry = self._read_entry(
                        name, file.get_slice(name), offset
                    )
                    offset += entry.nbytes
                metadata = file.metadata() or {}
        except (SafetensorError, OSError) as error:
            quoted = "".join(c if c.isprintable() else " " for c in str(error)[:300])
            raise ConfigError(f"{self.path} cannot be read as safetensors: {quoted}") from error
        if CRC32_KEY in metadata:
            checksums = parse_json_object(metadata[CRC32_KEY].encode(), f"{self.path}: {CRC32_KEY}")
            if checksums.keys() != self.entries.keys():
                raise ConfigError(f"{self.path}: {CRC32_KEY} names other tensors than the header")
            for name, digits in checksums.items():
                if not isinstance(digits, str) or not re.fullmatch("[0-9a-f]{8}", digits):
                    raise ConfigError(
                        f"{self.path}: {CRC32_KEY} of tensor {name} is {digits!r}, not a CRC32"
                    )
                self.crc32s[name] = int(digits, 16)

    def _read_entry(self, name: str, tensor: Any, offset: int) -> Entry:
        """Return the entry of a slice of safetensors that begins at `offset` of the file."""
        if not name.isprintable():
            raise ConfigError(f"{self.path}: {name!r} is not the name of a tensor")
        dtype, shape = DTYPES.get(tensor.get_dtype()), tuple(tensor.get_shape())
        if dtype is None:
            raise ConfigError(
                f"{self.path}: tensor {name} has dtype {tensor.get_dtype()}, which is not "
                f"supported; allowed: {', '.join(DTYPES)}"
            )
        return Entry(dtype, shape, offset, math.prod(shape) * dtype.itemsize)

    def read_into(self, name: str, box: Box | None, out: torch.Tensor) -> None:
        """Read a box of a tensor (None: all of it) into `out`, which has its shape.

        The checksum is compared if all of the tensor is read. Complete rows are read directly into
        a contiguous `out`; for some of the columns, up to 16 MiB of rows are buffered.

        Raises:
            ConfigError: The tensor is damaged, or the file has changed since its header was read.
        """
        entry = self.entries[name]
        sizes = entry.shape if box is None else box.sizes
        if out.dtype != entry.dtype or tuple(out.shape) != sizes:
            raise ValueError(f"{name}: {entry.dtype} {sizes} do not fit {out.dtype} {out.shape}")
        if not entry.nbytes:
            return
        try:
            with open(open_regular_fd(self.path), "rb", buffering=0) as file:
                if _identify(file.fileno()) != self._identity:
                    raise ConfigError(f"{self.path} has changed since its header was read")
                if box is None or sizes == entry.shape:
                    self._read_whole(file.fileno(), name, entry, out)
                else:
                    _read_box(file.fileno(), entry.offset, entry.shape, box, out)
        except EOFError as error:
            raise ConfigError(f"{self.path} cannot be read: {error}") from error
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror}") from error

    def _read_whole(self, fd: int, name: str, entry: Entry, out: torch.Tensor) -> None:
        """Read all of a tensor, and compare its checksum if the file has one."""
        tensor = out if out.is_contiguous() else torch.empty(entry.shape, dtype=entry.dtype)
        expected = self.crc32s.get(name)
        memory = files.view_bytes(tensor)
        crc32 = files.read_at(fd, entry.offset, memory, with_crc32=expected is not None)
        if expected is not None and crc32 != expected:
            raise ConfigError(
                f"tensor {name} of {self.path} is damaged: its checksum is {crc32:08x} instead of "
                f"{expected:08x}"
            )
        if tensor is not out:
            out.copy_(tensor)


def _read_box(fd: int, offset: int, shape: tuple[int, ...], box: Box, out: torch.Tensor) -> None:
    """Read a box of the tensor of `shape` at `offset`."""
    row_bytes = out.element_size() * math.prod(shape[1:])
    offset += box.offsets[0] * row_bytes
    if box.sizes[1:] == shape[1:] and out.is_contiguous():
        files.read_at(fd, offset, files.view_bytes(out), with_crc32=False)
    elif len(shape) > 2:
        inner = Box(box.offsets[1:], box.sizes[1:])
        for index in range(box.sizes[0]):
            _read_box(fd, offset + index * row_bytes, shape[1:], inner, out[index])
    else:
        rows_per_read = max(1, _ROWS_BYTES // row_bytes)
        buffer = torch.empty((min(rows_per_read, box.sizes[0]), *shape[1:]), dtype=out.dtype)
        for target in out.split(rows_per_read):
            rows = buffer[: len(target)]
            files.read_at(fd, offset, files.view_bytes(rows), with_crc32=False)
            target.copy_(rows[(slice(None), *box.slices[1:])])
            offset += len(target) * row_bytes


def _identify(fd: int) -> tuple[int, ...]:
    """Return values that change when a file is replaced or modified."""
    stat = os.fstat(fd)
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
