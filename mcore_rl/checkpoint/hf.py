"""Hugging Face checkpoints: slices read from safetensors, tensors streamed back into shards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mcore_rl.config.errors import ConfigError
from mcore_rl.models.base import (
    HFConfig,
    family_of,
    padded_vocab_size,
    read_config,
    without_mtp,
)
from mcore_rl.reshard.boxes import Block, LogicalTensor
from mcore_rl.reshard.rules import logical_tensors

INDEX_FILE = "model.safetensors.index.json"
# What stands beside the weights and is carried along to an export.
_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")


class CheckpointReader:
    """The tensors of a checkpoint folder, opened lazily; shapes come from the headers alone."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: dict[Path, Any] = {}
        self._where = self._locate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.__exit__(None, None, None)
        self._files.clear()

    def _locate(self) -> dict[str, Path]:
        index = self.path / INDEX_FILE
        if index.is_file():
            try:
                weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{index} is not a safetensors index: {error!r}") from error
            for name in sorted(set(weight_map.values())):
                if not (self.path / name).is_file():
                    raise ConfigError(f"{index} names {name}, which is not in the folder")
            return {tensor: self.path / name for tensor, name in weight_map.items()}
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise ConfigError(
                f"model.path={str(self.path)!r}: there is no *.safetensors file in it"
            )
        return {name: file for file in files for name in self._open(file).keys()}  # noqa: SIM118

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(file, framework="pt").__enter__()
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{file} cannot be read as safetensors: {error}") from error
        return self._files[file]

    def shape(self, name: str) -> tuple[int, ...]:
        file = self._where[name]
        try:
            return tuple(self._open(file).get_slice(name).get_shape())
        except SafetensorError as error:
            raise ConfigError(f"{file} has no tensor {name}, which its index names") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape by name."""
        return {name: self.shape(name) for name in self._where}

    def config(self) -> HFConfig:
        """config.json, without layers for multi-token prediction that the weights do not have.

        transformers leaves them out when it saves a model and keeps their number in the config.
        """
        config = read_config(self.path)
        weights = family_of(config).weights(config, padded_vocab_size(config, 1))
        predicted = [w for w in weights if w.stage == "mtp" and not w.replica]
        held = any(tensor.name in self._where for tensor in logical_tensors(predicted))
        return config if held else without_mtp(config)

    def read(self, block: Block) -> torch.Tensor:
        """The elements of one block, and no others, as a new tensor."""
        part = self._open(self._where[block.tensor.name]).get_slice(block.tensor.name)
        data: torch.Tensor = part[block.box.slices]
        return data

    def check(self, expected: Iterable[LogicalTensor]) -> None:
        """Raise ConfigError unless the folder holds exactly these tensors, in these shapes."""
        wanted = {tensor.name: tensor.shape for tensor in expected}
        found = self.shapes()
        missing = sorted(wanted.keys() - found.keys())
        extra = sorted(found.keys() - wanted.keys())
        for what, names in (("lacks", missing), ("holds unexpected", extra)):
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


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A folder beside `path` to write into; it becomes `path` at the end, on an error nothing."""
    if path.exists():
        raise ConfigError(f"output folder {path} already exists; name one that does not")
    aside = path.with_name(f".{path.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)  # what a killed run left
    aside.mkdir(parents=True)
    try:
        yield aside
        aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _shards(
    tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size_bytes = 0
    for name, tensor in tensors:
        if shard and size_bytes + tensor.nbytes > max_shard_bytes:
            yield shard
            shard, size_bytes = {}, 0
        shard[name] = tensor.detach().cpu().contiguous()
        size_bytes += tensor.nbytes
    if shard:
        yield shard


def write_checkpoint(
    path: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    reference: str | Path,
    max_shard_bytes: int = 5 << 30,
    config_changes: Mapping[str, Any] | None = None,
) -> None:
    """Stream tensors into a new checkpoint folder, with config and tokenizer files of `reference`.

    At most one shard is in memory. The folder appears under its name when it is complete.
    `config_changes` are fields of config.json that differ from the reference's.

    Raises:
        ConfigError: `path` exists.
    """
    with written_aside(Path(path)) as folder:
        files: list[tuple[Path, list[str]]] = []
        total_bytes = 0
        largest = torch.empty(0)  # a small tensor may be kept in float32
        for number, shard in enumerate(_shards(tensors, max_shard_bytes), start=1):
            file = folder / f"shard-{number}"
            save_file(shard, file, metadata={"format": "pt"})
            files.append((file, list(shard)))
            total_bytes += sum(t.nbytes for t in shard.values())
            largest = max(largest, *shard.values(), key=torch.Tensor.numel)
        weight_map: dict[str, str] = {}
        for number, (file, names) in enumerate(files, start=1):
            final = "model.safetensors"
            if len(files) > 1:
                final = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            file.rename(folder / final)
            weight_map.update(dict.fromkeys(names, final))
        _copy_companions(Path(reference), folder, largest.dtype, config_changes or {})
        if len(files) > 1:
            index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=1))


def _copy_companions(
    reference: Path, folder: Path, dtype: torch.dtype, config_changes: Mapping[str, Any]
) -> None:
    """Config and tokenizer files; config.json names the dtype of the tensors beside it."""
    for pattern in _COMPANIONS:
        for companion in reference.glob(pattern):
            if companion.name != INDEX_FILE:
                shutil.copyfile(companion, folder / companion.name)
    config_file = folder / "config.json"
    if config_file.is_file():
        config = json.loads(config_file.read_text()) | dict(config_changes)
        for key in ("dtype", "torch_dtype"):  # transformers 5 and 4
            if key in config:
                config[key] = str(dtype).removeprefix("torch.")
        config_file.write_text(json.dumps(config, indent=2) + "\n")
