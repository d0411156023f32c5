"""Megatron's distributed checkpoints (torch_dist): ranks write shards, any layout reads them."""

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

from mcore_rl.checkpoint.checkpoint_info import INFO_FILE, write_checkpoint_info
from mcore_rl.checkpoint.manifest import manifest_of
from mcore_rl.checkpoint.raw_file import name_folder
from mcore_rl.checkpoint.storage_location import CONTENT_METADATA
from mcore_rl.checkpoint.torch_dist import COMMON_FILE, DistReader
from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.boxes import Box

# How keys begin: of optimizer state (several optimizers may have prefixes of their own), of layers
# for multi-token prediction, of decoder layers.
_OPTIMIZER, _MTP, _LAYERS = ("optimizer.", "chained_"), "mtp.", "decoder.layers."

# Of a tensor of a checkpoint: its shape, and whether rows may be missing at the end (vocabulary
# padding, whose length follows from the layout).
Shapes = dict[str, tuple[tuple[int, ...], bool]]


class DistSave:
    """A checkpoint that is being written, aside, by Megatron's asynchronous strategy.

    It has been copied to the host when this has been made. Then writing goes on beside what else
    the process does, in a thread and in processes that Megatron forks; the folder appears under its
    name in `finish`. One at a time. Collective over all ranks, as `finish` is.
    """

    def __init__(
        self,
        state: ShardedStateDict,
        path: Path,
        facts: Mapping[str, Any],
        copies: dict[Any, torch.Tensor] | None,
    ) -> None:
        """Without `copies` it has been written on return.

        `copies` keep what is copied from the host to the host, for the next save to use again:
        memory that a process touches first is slow. Tensors on a device go to memory that torch
        keeps.

        `facts` go into the checkpoint info, where checkpoint_info.read_checkpoint_info finds them.

        Raises:
            ConfigError: `path` exists.
            OSError: it cannot be made; the same on every rank.
        """
        if path.exists():
            raise ConfigError(f"checkpoint folder {path} already exists; name one that does not")
        self._path, self._facts = path, facts
        self._aside = path.with_name(f".{path.name}.partial")
        self._reason = ""  # why this rank could not write its part
        self._files: dict[str, tuple[int, int]] = {}  # that this rank has written
        _agree(self._make_folder() if dist.get_rank() == 0 else "", path)
        # Results stay in this process. Megatron would start one for their queue
        # (filesystem_async.py:51): seconds, and it outlives a rank that is killed.
        filesystem_async._results_queue = queue.Queue()
        self._strategy = _ShardedStrategy("torch_dist", 1)
        self._common = _CommonStrategy("torch", 1)
        register_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1, self._common)
        self._request = dist_checkpointing.save(
            state,
            str(self._aside),
            sharded_strategy=self._strategy,
            async_sharded_save=True,
            content_metadata=dict(CONTENT_METADATA),
        )
        arguments = list(self._request.async_fn_args)
        if self._request.preload_fn is not None:  # else this rank has nothing to write
            arguments[1] = self._request.preload_fn()
            if copies is not None:
                arguments[1] = _copied(arguments[1], self._request.async_fn_args[1], copies)
        self._thread: threading.Thread | None = None
        if copies is not None:
            self._thread = threading.Thread(target=self._write, args=(arguments,), daemon=True)
            self._thread.start()
        else:
            self._write(arguments)

    @property
    def is_written(self) -> bool:
        """Whether `finish` has nothing to wait for on this rank."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self, timeout_s: float | None = None) -> None:
        """Wait until all is written; the folder then has its name. Collective over all ranks.

        Raises:
            OSError: it cannot be written; the same on every rank, and nothing is left.
            RuntimeError: writing takes longer than `timeout_s`.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise RuntimeError(f"{self._path} has not been written in {timeout_s:g} s")
        try:
            self._request.finalize_fns[0]()  # gathers what was written, and writes .metadata
        except CheckpointException as error:  # on every rank; only rank 0 is told why
            failures = [failure for failure, _ in error.failures.values()]
            self._reason = self._reason or (str(failures[0]) if failures else "")
        failed = self._reason or self._strategy.reason or self._common.reason
        replies: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(replies, (failed, self._files))
        failed = next((reason for reason, _ in replies if reason), "")
        if dist.get_rank() == 0:
            failed = failed or self._publish([files for _, files in replies])
            if failed:
                shutil.rmtree(self._aside, ignore_errors=True)
        _agree(failed, self._path)

    def _make_folder(self) -> str:
        """Why it cannot be made."""
        try:
            shutil.rmtree(self._aside, ignore_errors=True)  # what a killed run left
            self._aside.mkdir(parents=True)
        except OSError as error:
            return str(error)
        return ""

    def _write(self, arguments: list[Any]) -> None:
        if self._request.async_fn is None:
            return
        try:
            self._request.async_fn(*arguments)
            self._files = manifest_of(Path(file) for file, _, _ in arguments[1])
        except OSError as error:  # no process can be started, or a file is missing after a fault
            self._reason = str(error)

    def _publish(self, written: Sequence[dict[str, tuple[int, int]]]) -> str:
        """On rank 0: the last files, and the name. Why it cannot be done."""
        try:
            save_config(CheckpointingConfig("torch_dist", 1), str(self._aside))
            files = {name: sums for part in written for name, sums in part.items()}
            others = [file for file in self._aside.iterdir() if file.name not in files]
            write_checkpoint_info(self._aside, self._facts, files | manifest_of(others))
            # Megatron's writers force the files of tensors onto the disk themselves.
            name_folder(self._aside, self._path, [*others, self._aside / INFO_FILE])
        except OSError as error:
            return str(error)
        return ""


class _ShardedStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Keeps why .metadata could not be written: raised on rank 0, others would wait for it."""

    reason = ""

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any) -> Any:
        finish = writer.finish

        def guarded(metadata: Any, results: Any) -> None:
            try:
                finish(metadata, results)
            except OSError as error:
                self.reason = str(error)

        writer.finish = guarded
        return super()._get_save_and_finalize_callbacks(writer, planned)


class _CommonStrategy(TorchCommonSaveStrategy):  # type: ignore[misc]
    """The same for common.pt."""

    reason = ""

    def save_common(self, state: Any, folder: Any) -> None:
        try:
            super().save_common(state, folder)
        except (OSError, RuntimeError) as error:  # torch's writer raises the latter
            self.reason = f"{COMMON_FILE}: {str(error).splitlines()[0]}"


def _agree(reason: str, path: Path) -> None:
    """Raise OSError on every rank when rank 0 has a reason. Collective over all ranks."""
    reasons = [reason]
    dist.broadcast_object_list(reasons, src=0)
    if reasons[0]:
        raise OSError(f"{path} cannot be written: {reasons[0]}")


def _copied(loaded: Any, originals: Any, copies: dict[Any, torch.Tensor]) -> Any:
    """`loaded` on the host, with copies of tensors that were there anyway: the model trains on."""
    result = []
    for (file, key, (data, tensors)), (_, _, (_, before)) in zip(loaded, originals, strict=True):
        copied = []
        for (item, tensor), (_, original) in zip(tensors, before, strict=True):
            if tensor is original:
                copy = copies.get(item.index)
                if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                    copy = copies[item.index] = torch.empty_like(tensor)
                tensor = copy.copy_(tensor)
            copied.append((item, tensor))
        result.append((file, key, (data, copied)))
    return result


def is_checkpoint(path: Path) -> bool:
    """Whether the folder contains a distributed checkpoint of any program."""
    return all((path / name).is_file() for name in (".metadata", "metadata.json"))


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Of every tensor of a checkpoint, whole, by its key."""
    return {key: tensor.shape for key, tensor in DistReader(path).tensors.items()}


def are_layers_stacked(keys: Iterable[str]) -> bool:
    """Whether a checkpoint with these keys has one tensor for all decoder layers.

    Which it is follows from settings of the run that saved it (transformer_block.py:822).
    """
    return any(
        key.startswith(_LAYERS) and not key.removeprefix(_LAYERS).split(".")[0].isdigit()
        for key in keys
    )


def load(state: ShardedStateDict, path: Path) -> dict[str, Any]:
    """Read the checkpoint's contents into the shards that `state` asks for. Collective over ranks.

    Megatron and torch get tensors and plain data that DistReader has read. They open none of the
    files: torch runs pickles (distributed/checkpoint/filesystem.py, `read_metadata`, and
    default_planner.py, `load_bytes`).

    Raises:
        ConfigError: the checkpoint is of another model or cannot be read, or not without running
            code from it. The same on every rank; unless a tensor is damaged, before any of the
            tensors of `state` is written to.
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
    dist.all_gather_object(replies, (_requested(entries), reason))
    wanted: Shapes = {}
    for request, unsafe in replies:
        if unsafe:
            raise ConfigError(unsafe)
        wanted |= request
    stored = {key: tensor.shape for key, tensor in reader.tensors.items()}
    if problems := differences(stored, wanted):
        more = f"; {len(problems) - 1} more differ" if len(problems) > 1 else ""
        raise ConfigError(f"{path} is a checkpoint of another model: {problems[0]}{more}")
    try:
        loaded: dict[str, Any] = dist_checkpointing.load(
            state, str(path), _LoadShards(reader, objects), _LoadCommon(common)
        )
    except ConfigError:
        raise
    except (CheckpointingException, ValueError) as error:  # the latter of contents that collide
        raise ConfigError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    return loaded


class _LoadShards(TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Fill shards through DistReader, and hand out objects that it has loaded."""

    def __init__(self, reader: DistReader, objects: Mapping[str, Any]) -> None:
        super().__init__()
        self._reader = reader
        self._objects = {key: iter(values) for key, values in objects.items()}

    def load(self, state: ShardedStateDict, path: Any) -> Any:
        """Return `state` with tensors and objects in place of shards. Collective over ranks.

        Raises:
            ConfigError: one cannot be read; the same on every rank.
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
        if shard.allow_shape_mismatch:  # rows of padding that are not stored are zero
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
    """Hand out the contents of common.pt that DistReader has loaded."""

    def __init__(self, common: dict[str, Any]) -> None:
        self._common = common

    def load_common(self, path: Any) -> dict[str, Any]:
        return self._common


def differences(stored: Mapping[str, tuple[int, ...]], wanted: Shapes) -> list[str]:
    """What of the `wanted` tensors of all ranks is not in a checkpoint, and the other way round.

    Optimizer state that is not wanted is ignored: an engine for inference reads the model. So
    are layers for multi-token prediction where the model has none: it is not trained to predict.
    """
    found = [f"it has no {key}" for key in sorted(wanted.keys() - stored.keys())]
    predicts = any(key.startswith(_MTP) for key in wanted)
    left_alone = _OPTIMIZER if predicts else (*_OPTIMIZER, _MTP)
    unused = (key for key in stored.keys() - wanted.keys() if not key.startswith(left_alone))
    found += [f"the model has no {key}" for key in sorted(unused)]
    for key in sorted(wanted.keys() & stored.keys()):
        shape, padded = wanted[key]
        first = 1 if padded else 0
        if len(shape) != len(stored[key]) or shape[first:] != stored[key][first:]:
            found.append(f"{key} has shape {stored[key]} there and {shape} here")
    return found


def _requested(asked: Iterable[Any]) -> Shapes:
    return {
        tensor.key: (tuple(tensor.global_shape), bool(tensor.allow_shape_mismatch))
        for tensor in asked
        if isinstance(tensor, ShardedTensor)
    }
