"""Megatron's distributed checkpoints (torch_dist): ranks save shards, any layout loads them."""

from __future__ import annotations

import queue
import shutil
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.base import (
    StrategyAction,
    register_default_strategy,
)
from megatron.core.dist_checkpointing.strategies.common import (
    TorchCommonLoadStrategy,
    TorchCommonSaveStrategy,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from torch.distributed.checkpoint.api import CheckpointException

from mcore_rl.checkpoint.files import (
    INFO_FILE,
    Checksum,
    build_manifest,
    publish_folder,
    write_checkpoint_info,
)
from mcore_rl.checkpoint.storage_location import CONTENT_METADATA
from mcore_rl.checkpoint.torch_dist import DistReader
from mcore_rl.checkpoint.torch_dist_metadata import COMMON_FILE
from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.rules import Box

# Prefixes of keys: optimizer state (chained optimizers add another one), multi-token prediction,
# decoder layers.
_OPTIMIZER, _MTP, _LAYERS = ("optimizer.", "chained_"), "mtp.", "decoder.layers."

# By key: shape of a tensor, and whether its last rows may be missing (padding of the vocabulary,
# which depends on the layout).
Shapes = dict[str, tuple[tuple[int, ...], bool]]


class DistSave:
    """An asynchronous save by Megatron's strategy. One at a time.

    The constructor returns when the state has been copied to the host. A thread, and processes that
    Megatron forks, then write into a temporary folder, which `finish` renames. Constructor and
    `finish` are collective over all ranks.
    """

    def __init__(
        self,
        state: ShardedStateDict,
        path: Path,
        facts: Mapping[str, Any],
        copies: dict[Any, torch.Tensor] | None,
    ) -> None:
        """Start to save.

        Args:
            facts: Content of the checkpoint info, see files.read_checkpoint_info.
            copies: Buffers for tensors that are on the host already, reused by the next save: the
                first write to new memory is slow. Device tensors are copied to memory that torch
                caches. None: write before returning.

        Raises:
            ConfigError: `path` exists.
            OSError: The folder cannot be created; the same on every rank.
        """
        if path.exists():
            raise ConfigError(f"checkpoint folder {path} already exists; name one that does not")
        self._path, self._facts = path, facts
        self._partial_path = path.with_name(f".{path.name}.partial")
        self._reason = ""  # of a failure to write on this rank
        self._files: dict[str, Checksum] = {}  # written by this rank
        _raise_from_rank_0(self._create_folder() if dist.get_rank() == 0 else "", path)
        # Megatron would start a process for the queue of results (filesystem_async.py:51), which
        # takes seconds and outlives a rank that is killed.
        filesystem_async._results_queue = queue.Queue()
        self._strategy = _ShardedStrategy("torch_dist", 1)
        self._common = _CommonStrategy("torch", 1)
        register_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1, self._common)
        self._request = dist_checkpointing.save(
            state,
            str(self._partial_path),
            sharded_strategy=self._strategy,
            async_sharded_save=True,
            content_metadata=dict(CONTENT_METADATA),
        )
        arguments = list(self._request.async_fn_args)
        if self._request.preload_fn is not None:  # None: this rank has nothing to write
            arguments[1] = self._request.preload_fn()
            if copies is not None:
                arguments[1] = _copy_to_host(arguments[1], self._request.async_fn_args[1], copies)
        self._thread: threading.Thread | None = None
        if copies is not None:
            self._thread = threading.Thread(target=self._write, args=(arguments,), daemon=True)
            self._thread.start()
        else:
            self._write(arguments)

    @property
    def is_written(self) -> bool:
        """True when this rank has written its part."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self, timeout_s: float | None = None) -> None:
        """Wait until all ranks have written, and rename the folder. Collective over all ranks.

        Raises:
            OSError: It cannot be written; the same on every rank. The folder is removed.
            RuntimeError: Writing takes longer than `timeout_s`.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise RuntimeError(f"{self._path} has not been written in {timeout_s:g} s")
        try:
            self._request.finalize_fns[0]()  # gathers the results and writes .metadata
        except CheckpointException as error:  # on every rank; only rank 0 has the reasons
            failures = [failure for failure, _ in error.failures.values()]
            self._reason = self._reason or (str(failures[0]) if failures else "")
        reason = self._reason or self._strategy.reason or self._common.reason
        replies: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(replies, (reason, self._files))
        reason = next((reason for reason, _ in replies if reason), "")
        if dist.get_rank() == 0:
            reason = reason or self._publish([files for _, files in replies])
            if reason:
                shutil.rmtree(self._partial_path, ignore_errors=True)
        _raise_from_rank_0(reason, self._path)

    def _create_folder(self) -> str:
        """Create the temporary folder; return the reason of a failure, or an empty string."""
        try:
            shutil.rmtree(self._partial_path, ignore_errors=True)  # of a killed run
            self._partial_path.mkdir(parents=True)
        except OSError as error:
            return str(error)
        return ""

    def _write(self, arguments: list[Any]) -> None:
        if self._request.async_fn is None:
            return
        try:
            self._request.async_fn(*arguments)
            self._files = build_manifest(Path(file) for file, _, _ in arguments[1])
        except OSError as error:  # no process can be started, or a file is missing after a fault
            self._reason = str(error)

    def _publish(self, written: Sequence[dict[str, Checksum]]) -> str:
        """Write the last files and rename the folder, on rank 0; return the reason of a failure."""
        folder = self._partial_path
        try:
            save_config(CheckpointingConfig("torch_dist", 1), str(folder))
            files = {name: checksum for part in written for name, checksum in part.items()}
            common_files = [file for file in folder.iterdir() if file.name not in files]
            write_checkpoint_info(folder, self._facts, files | build_manifest(common_files))
            # Megatron's writers sync the files of tensors.
            publish_folder(folder, self._path, [*common_files, folder / INFO_FILE])
        except OSError as error:
            return str(error)
        return ""


class _ShardedStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Records why .metadata could not be written: an exception on rank 0 would block the others."""

    reason = ""

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any) -> Any:
        finish = writer.finish

        def finish_or_record(metadata: Any, results: Any) -> None:
            try:
                finish(metadata, results)
            except OSError as error:
                self.reason = str(error)

        writer.finish = finish_or_record
        return super()._get_save_and_finalize_callbacks(writer, planned)


class _CommonStrategy(TorchCommonSaveStrategy):  # type: ignore[misc]
    """Records why common.pt could not be written."""

    reason = ""

    def save_common(self, state: Any, folder: Any) -> None:
        try:
            super().save_common(state, folder)
        except (OSError, RuntimeError) as error:  # RuntimeError: of torch's writer
            self.reason = f"{COMMON_FILE}: {str(error).splitlines()[0]}"


def _raise_from_rank_0(reason: str, path: Path) -> None:
    """Raise OSError on every rank if rank 0 has a reason. Collective over all ranks."""
    reasons = [reason]
    dist.broadcast_object_list(reasons, src=0)
    if reasons[0]:
        raise OSError(f"{path} cannot be written: {reasons[0]}")


def _copy_to_host(loaded: Any, originals: Any, copies: dict[Any, torch.Tensor]) -> Any:
    """Copy tensors that were on the host already, since training continues; return all of them."""
    buckets = []
    for (file, key, (data, tensors)), (_, _, (_, before)) in zip(loaded, originals, strict=True):
        copied = []
        for (item, tensor), (_, original) in zip(tensors, before, strict=True):
            if tensor is original:
                copy = copies.get(item.index)
                if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                    copy = copies[item.index] = torch.empty_like(tensor)
                tensor = copy.copy_(tensor)
            copied.append((item, tensor))
        buckets.append((file, key, (data, copied)))
    return buckets


def has_checkpoint(path: Path) -> bool:
    """Return whether a folder has a distributed checkpoint of any program."""
    return all((path / name).is_file() for name in (".metadata", "metadata.json"))


def read_tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes of all tensors of a checkpoint, by key."""
    return {key: tensor.shape for key, tensor in DistReader(path).tensors.items()}


def are_layers_stacked(keys: Iterable[str]) -> bool:
    """Return whether a checkpoint with these keys stacks all decoder layers in one tensor.

    It depends on settings of the run that saved it (transformer_block.py:822).
    """
    return any(
        key.startswith(_LAYERS) and not key.removeprefix(_LAYERS).split(".")[0].isdigit()
        for key in keys
    )


def load(state: ShardedStateDict, path: Path) -> dict[str, Any]:
    """Load a checkpoint into the shards of `state`. Collective over all ranks.

    DistReader reads tensors and plain data for Megatron and torch, which open no file: torch runs
    pickles (distributed/checkpoint/filesystem.py, `read_metadata`, and default_planner.py,
    `load_bytes`).

    Raises:
        ConfigError: The checkpoint is of another model, cannot be read, or would run code. The same
            on every rank. No tensor of `state` has changed, unless a stored tensor is damaged.
    """
    entries = list(nested_values(load_preprocess(state)[0]))
    keys = {entry.unique_key for entry in entries if isinstance(entry, ShardedObject)}
    reason = ""
    try:
        reader = DistReader(path)
        if not isinstance(common := reader.load_common(), dict):
            reason = f"{path / COMMON_FILE} is missing or no dict; allowed: what Megatron writes"
        objects = {key: reader.load_object(key) for key in sorted(keys & reader.objects.keys())}
        if wrong := [key for key, values in objects.items() if not isinstance(values, list)]:
            reason = f"{path}: {wrong[0]} is no list; allowed: what Megatron writes"
    except ConfigError as error:
        reason = str(error)
    replies: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(replies, (_list_shapes(entries), reason))
    expected: Shapes = {}
    for shapes, failure in replies:
        if failure:
            raise ConfigError(failure)
        expected |= shapes
    stored = {key: tensor.shape for key, tensor in reader.tensors.items()}
    if problems := find_differences(stored, expected):
        more = f"; {len(problems) - 1} more differ" if len(problems) > 1 else ""
        raise ConfigError(f"{path} is a checkpoint of another model: {problems[0]}{more}")
    try:
        loaded: dict[str, Any] = dist_checkpointing.load(
            state, str(path), _LoadShards(reader, objects), _LoadCommon(common)
        )
    except ConfigError:
        raise
    except (CheckpointingException, ValueError) as error:  # ValueError: contents that collide
        raise ConfigError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    return loaded


class _LoadShards(TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Loads shards by DistReader, and returns objects that it has loaded."""

    def __init__(self, reader: DistReader, objects: Mapping[str, Any]) -> None:
        super().__init__()
        self._reader = reader
        self._objects = {key: iter(values) for key, values in objects.items()}

    def load(self, state: ShardedStateDict, path: Any) -> Any:
        """Return `state` with tensors and objects in place of shards. Collective over all ranks.

        Raises:
            ConfigError: A shard cannot be read; the same on every rank.
        """
        reason = ""
        try:
            dict_list_map_inplace(self._load_entry, state)
        except ConfigError as error:
            reason = str(error)
        reasons: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
        if reason := next(filter(None, reasons), ""):
            raise ConfigError(reason)
        return state

    def _load_entry(self, entry: Any) -> Any:
        if isinstance(entry, ShardedObject):
            try:  # Megatron writes a list for each key, of one object for each shard of a rank
                return next(self._objects[entry.unique_key])
            except (KeyError, StopIteration) as error:
                raise ConfigError(f"{self._reader.path} has no {entry.unique_key}") from error
        self._load_tensor(entry)
        return entry.data

    def _load_tensor(self, shard: ShardedTensor) -> None:
        shard.init_data("cpu")
        data = shard.data = shard.data.detach()
        stored, stacked = self._reader.tensors[shard.key], shard.prepend_axis_num
        sizes = (1,) * stacked + tuple(shard.local_shape)
        if shard.allow_shape_mismatch:  # padding rows that are not stored are zero
            data.zero_()
            bounds = zip(shard.global_offset, sizes, stored.shape, strict=True)
            sizes = tuple(max(0, min(start + n, end) - start) for start, n, end in bounds)
        if 0 in sizes:
            return
        part = data[tuple(map(slice, sizes[stacked:]))]
        is_read_in_place = part.is_contiguous() and part.is_cpu and part.dtype == stored.dtype
        out = part.view(sizes) if is_read_in_place else None
        values = self._reader.read(shard.key, Box(tuple(shard.global_offset), sizes), out)
        if out is None:
            part.copy_(values.view(part.shape))


class _LoadCommon(TorchCommonLoadStrategy):  # type: ignore[misc]
    """Returns the contents of common.pt that DistReader has loaded."""

    def __init__(self, common: dict[str, Any]) -> None:
        self._common = common

    def load_common(self, path: Any) -> dict[str, Any]:
        return self._common


def find_differences(stored: Mapping[str, tuple[int, ...]], expected: Shapes) -> list[str]:
    """List the differences between the tensors of a checkpoint and those `expected` by all ranks.

    Optimizer state that is not expected is ignored: an inference engine loads the model only. So
    are layers for multi-token prediction of a model without them.
    """
    problems = [f"it has no {key}" for key in sorted(expected.keys() - stored.keys())]
    has_mtp = any(key.startswith(_MTP) for key in expected)
    ignored = _OPTIMIZER if has_mtp else (*_OPTIMIZER, _MTP)
    unused = (key for key in stored.keys() - expected.keys() if not key.startswith(ignored))
    problems += [f"the model has no {key}" for key in sorted(unused)]
    for key in sorted(expected.keys() & stored.keys()):
        shape, padded = expected[key]
        first = 1 if padded else 0
        if len(shape) != len(stored[key]) or shape[first:] != stored[key][first:]:
            problems.append(f"{key} has shape {stored[key]} there and {shape} here")
    return problems


def _list_shapes(entries: Iterable[Any]) -> Shapes:
    return {
        tensor.key: (tuple(tensor.global_shape), bool(tensor.allow_shape_mismatch))
        for tensor in entries
        if isinstance(tensor, ShardedTensor)
    }
