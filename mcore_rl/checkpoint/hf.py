"""Hugging Face checkpoints: slices of their tensors, read from safetensors files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from mcore_rl.checkpoint import fp8
from mcore_rl.checkpoint.safetensors_file import Entry, SafetensorsFile
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_object
from mcore_rl.models.base import (
    HFConfig,
    family_of,
    padded_vocab_size,
    read_config,
    without_mtp,
)
from mcore_rl.reshard.boxes import Block, Box, LogicalTensor, rows
from mcore_rl.reshard.rules import logical_tensors

INDEX_FILE = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
_DERIVED = ".rotary_emb.inv_freq"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_ROWS_AT_ONCE = 4096  # of a head that is compared with the embedding
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def read_checkpoint_config(path: str | Path, setting: str = "model.path") -> HFConfig:
    """Read the config.json of a checkpoint whose weights `CheckpointReader` can read.

    `setting` is the key of the path, for messages.

    Raises:
        ConfigError: as `read_config`, or weights are quantised in another way than float8 blocks.
    """
    config = read_config(path, setting)
    if (quantization := config.get("quantization_config")) is not None:
        try:
            fp8.check_quantization_config(quantization)
        except ConfigError as error:
            raise ConfigError(f"{setting}={str(path)!r}: {error}") from None
    return config


class CheckpointReader:
    """The tensors of a checkpoint folder as the model has them; keeps no file open.

    A weight in float8 blocks (checkpoint/fp8.py) is one tensor here: its scales have no name of
    their own, and it is read as their product. Rotary frequencies, which some checkpoints hold and
    which config.json tells, are left out, as transformers and vLLM do. So is the output head of a
    model whose config.json ties it to the embedding; `check` compares the two.

    `setting` is the key of the path, for messages.

    Raises:
        ConfigError: the index and the files do not agree, a file is damaged, or weights are
            quantised in another way.
    """

    def __init__(self, path: str | Path, setting: str = "model.path") -> None:
        self.path = Path(path)
        has_config = (self.path / "config.json").is_file()
        config: HFConfig = read_checkpoint_config(self.path, setting) if has_config else {}
        located = _located(self.path, setting)
        self._file_of = {n: file for n, file in located.items() if not n.endswith(_DERIVED)}
        is_tied = config.get("tie_word_embeddings") and _EMBEDDING in self._file_of
        self._tied_head = self._file_of.pop(_HEAD, None) if is_tied else None
        self._scaled = self._pairs()

    @property
    def is_quantized(self) -> bool:
        """Whether weights are in float8."""
        return bool(self._scaled)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape by name."""
        scales = {name + fp8.SCALE_SUFFIX for name in self._scaled}
        return {
            name: file.entries[name].shape
            for name, file in self._file_of.items()
            if name not in scales
        }

    def dtype(self, name: str) -> torch.dtype:
        """What `read` gives: the dtype of the file, bfloat16 for float8."""
        return torch.bfloat16 if name in self._scaled else self._entry(name).dtype

    def has_checksum(self, name: str) -> bool:
        """Whether damage of a tensor shows when it is read whole."""
        names = [name, name + fp8.SCALE_SUFFIX] if name in self._scaled else [name]
        return all(n in self._file_of[n].crc32s for n in names)

    def stored(self) -> Iterator[tuple[str, Path, Entry]]:
        """Every tensor of the files, scales too: its name, its file, and what it is there."""
        for name, file in self._file_of.items():
            yield name, file.path, file.entries[name]

    def config(self) -> HFConfig:
        """config.json as far as it is about the model that the tensors are.

        Without its quantization_config, since tensors are read as if there was none. Without layers
        for multi-token prediction that the weights do not have: transformers leaves them out when
        it saves a model and keeps their number in the config.
        """
        config = read_config(self.path)
        config.pop("quantization_config", None)
        weights = family_of(config).weights(config, padded_vocab_size(config, 1))
        predicted = [w for w in weights if w.stage == "mtp" and not w.replica]
        held = any(tensor.name in self._file_of for tensor in logical_tensors(predicted))
        return config if held else without_mtp(config)

    def read(self, block: Block, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The elements of one block, and no others, as a new tensor; dtype: see `dtype`.

        Raises:
            ConfigError: the tensor is damaged.
        """
        out = torch.empty(block.box.sizes, dtype=dtype or self.dtype(block.tensor.name))
        self.read_into(block, out)
        return out

    def read_whole(self, name: str) -> torch.Tensor:
        """A tensor, whole, in its `dtype`."""
        shape = self.shape(name)
        return self.read(rows(LogicalTensor(name, shape), 0, shape[0], 0))

    def read_into(self, block: Block, out: torch.Tensor) -> None:
        """The elements of one block, in the dtype of `out`, which has the shape of the box.

        In memory besides: the elements in the dtype of the file, where that is another one.
        """
        name, box = block.tensor.name, block.box
        stored = self._entry(name).dtype
        if name in self._scaled:
            quantized = _read_stored(self._file_of[name], name, box)
            scale = name + fp8.SCALE_SUFFIX
            scales = _read_stored(self._file_of[scale], scale, _blocks_of(box))
            origin = (box.offsets[0], box.offsets[1])
            fp8.dequantize_blocks(quantized, scales, out.dtype, origin, out)
        elif stored == out.dtype:
            self._file_of[name].read_into(name, box, out)
        else:
            out.copy_(_read_stored(self._file_of[name], name, box))

    def check(self, expected: Iterable[LogicalTensor]) -> None:
        """Raise ConfigError unless the folder contains exactly these tensors, in these shapes."""
        wanted = {tensor.name: tensor.shape for tensor in expected}
        found = self.shapes()
        missing = sorted(wanted.keys() - found.keys())
        extra = sorted(found.keys() - wanted.keys())
        for what, names in (("lacks", missing), ("has unexpected", extra)):
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                raise ConfigError(
                    f"checkpoint {self.path} {what} tensor {', '.join(names[:3])}{more}"
                )
        for name, shape in wanted.items():
            if found[name] != shape:
                raise ConfigError(
                    f"checkpoint {self.path}: tensor {name} has shape {found[name]}, "
                    f"but config.json asks for {shape}"
                )
            if self.dtype(name) not in _WEIGHT_DTYPES:
                raise ConfigError(
                    f"checkpoint {self.path}: tensor {name} has dtype {short(self.dtype(name))}; "
                    f"allowed: {', '.join(map(short, _WEIGHT_DTYPES))}, or float8_e4m3fn with "
                    f"scales of blocks"
                )
        self._check_tied_head()

    def _check_tied_head(self) -> None:
        """Raise ConfigError for a tied head that is in the files and not the embedding, bit by bit.

        transformers then does not tie the two, and vLLM does.
        """
        if self._tied_head is None:
            return
        files = {_HEAD: self._tied_head, _EMBEDDING: self._file_of[_EMBEDDING]}
        head, embedding = (file.entries[name] for name, file in files.items())
        is_equal = (head.shape, head.dtype) == (embedding.shape, embedding.dtype)
        for start in range(0, head.shape[0] if is_equal else 0, _ROWS_AT_ONCE):
            num_rows = min(_ROWS_AT_ONCE, head.shape[0] - start)
            box = rows(LogicalTensor(_HEAD, head.shape), start, num_rows, 0).box
            one, other = (_read_stored(file, name, box) for name, file in files.items())
            is_equal &= torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        if not is_equal:
            raise ConfigError(
                f"checkpoint {self.path} has {_HEAD}, which is not {_EMBEDDING}, and config.json "
                "has tie_word_embeddings=true; allowed: no such tensor, an equal one, or "
                "tie_word_embeddings=false"
            )

    def _entry(self, name: str) -> Entry:
        if name not in self._file_of:
            raise ConfigError(f"checkpoint {self.path} lacks tensor {name}")
        return self._file_of[name].entries[name]

    def _pairs(self) -> frozenset[str]:
        """The names of the weights in float8, each of which has its scales.

        Raises:
            ConfigError: one without the other, or scales that do not fit.
        """
        where, float8 = f"checkpoint {self.path}", short(fp8.QUANTIZED)
        scaled = {n for n in self._file_of if self._entry(n).dtype == fp8.QUANTIZED}
        for name in self._file_of:
            base = name.removesuffix(fp8.SCALE_SUFFIX)
            if base != name and base not in scaled:
                raise ConfigError(f"{where}: {name} are scales, but there is no {base} in {float8}")
        for name in sorted(scaled):
            scale, shape = name + fp8.SCALE_SUFFIX, self.shape(name)
            if scale not in self._file_of:
                raise ConfigError(
                    f"{where}: {name} is in {float8}, but its scales {scale} are missing"
                )
            if len(shape) != 2:
                raise ConfigError(
                    f"{where}: {name} is in {float8} with shape {shape}; allowed: matrices"
                )
            found, wanted = self._entry(scale), fp8.scale_shape(shape)
            if found.shape != wanted or found.dtype not in fp8.SCALE_DTYPES:
                raise ConfigError(
                    f"{where}: {scale} is {short(found.dtype)} of shape {found.shape}; allowed "
                    f"for {name}: {' or '.join(map(short, fp8.SCALE_DTYPES))} of shape {wanted}, "
                    f"one for each block of {fp8.BLOCK} x {fp8.BLOCK}"
                )
        return frozenset(scaled)


def _read_stored(file: SafetensorsFile, name: str, box: Box) -> torch.Tensor:
    out = torch.empty(box.sizes, dtype=file.entries[name].dtype)
    file.read_into(name, box, out)
    return out


def _blocks_of(box: Box) -> Box:
    """The blocks that a box of a weight touches, as a box of its scales."""
    starts = tuple(span.start // fp8.BLOCK for span in box.slices)
    ends = (-(-span.stop // fp8.BLOCK) for span in box.slices)
    return Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))


def _located(path: Path, setting: str) -> dict[str, SafetensorsFile]:
    """The file of each tensor: those of the index, else the one file, else all there are."""
    found = {file.name: file for file in sorted(path.glob("*.safetensors")) if file.is_file()}
    index, weight_map = path / INDEX_FILE, None
    if index.is_file():
        weight_map = read_json_object(index).get("weight_map")
        files = weight_map.values() if isinstance(weight_map, dict) else [None]
        if not all(isinstance(file, str) for file in files):
            raise ConfigError(
                f"{index} is not a safetensors index: it has no weight_map of file names"
            )
        if absent := sorted(set(files) - found.keys()):
            raise ConfigError(f"{index} names {absent[0]!r}, which is not in the folder")
        found = {name: found[name] for name in sorted(set(files))}
    elif _SINGLE_FILE in found:
        found = {_SINGLE_FILE: found[_SINGLE_FILE]}
    if not found:
        raise ConfigError(f"{setting}={str(path)!r}: there is no *.safetensors file in it")
    located: dict[str, SafetensorsFile] = {}
    for file in map(SafetensorsFile, found.values()):
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


def short(dtype: torch.dtype) -> str:
    """
    >>> short(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
