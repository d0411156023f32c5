"""Megatron's distributed checkpoints (torch_dist): ranks save shards, any layout loads them."""

from __future__ import annotations

import io
import shutil
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    merge,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    apply_factory_merges,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base

from mcore_rl.checkpoint.files import (
    INFO_FILE,
    Checksum,
    build_manifest,
    publish_folder,
    sync_file,
    write_checkpoint_info,
)
from mcore_rl.checkpoint.storage_location import CONTENT_METADATA
from mcore_rl.checkpoint.torch_dist import DistFile, DistReader
from mcore_rl.checkpoint.torch_dist_metadata import Record, write_metadata
from mcore_rl.config.atomic_file import create_folder, get_partial_path
from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.rules import Box

# Prefixes of keys: optimizer state (chained optimizers add another one), multi-token prediction,
# decoder layers.
_OPTIMIZER, _MTP, _LAYERS = ("optimizer.", "chained_"), "mtp.", "decoder.layers."

# By key: shape of a tensor, and whether its last rows may be missing (padding of the vocabulary,
# which depends on the layout).
Shapes = dict[str, tuple[tuple[int, ...], bool]]


class DistSave:
    """An asynchronous save in Megatron's format. One at a time.

    The constructor returns when the state has been copied to the host. A thread then writes one
    file of this rank into a temporary folder, which `finish` renames. Constructor and `finish` are
    collective over all ranks.

    Megatron plans the save, and DistFile writes it. Megatron's own writer is deprecated, reports no
    reason of a failure but its class, and stops garbage collection in the whole process while it
    writes (strategies/filesystem_async.py of 0.19.2, `write_preloaded_data_multithread`).
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
        self._partial_path = get_partial_path(path)
        self._reason = ""  # of a failure to write on this rank
        self._records: list[Record] = []  # written by this rank
        self._files: dict[str, Checksum] = {}
        _raise_from_rank_0(self._create_folder() if dist.get_rank() == 0 else "", path)
        shards, self._common = save_preprocess(
            {**state, "content_metadata": dict(CONTENT_METADATA)}
        )
        entries = [entry for entry in nested_values(shards) if is_main_replica(entry.replica_id)]
        tensors = [entry for entry in entries if isinstance(entry, ShardedTensor)]
        contents = tensors, serialize_objects(entries)
        self._thread: threading.Thread | None = None
        if copies is not None:
            _copy_to_host(tensors, copies)
            self._thread = threading.Thread(target=self._write, args=contents, daemon=True)
            self._thread.start()
        else:
            self._write(*contents)

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
        is_first, reason = dist.get_rank() == 0, ""
        replies: list[Any] | None = [None] * dist.get_world_size() if is_first else None
        dist.gather_object((self._reason, self._records, self._files), replies, dst=0)
        if replies is not None:
            reason = next((reason for reason, _, _ in replies if reason), "")
            reason = reason or self._publish(
                [record for _, records, _ in replies for record in records],
                {name: checksum for _, _, part in replies for name, checksum in part.items()},
            )
            if reason:
                shutil.rmtree(self._partial_path, ignore_errors=True)
        _raise_from_rank_0(reason, self._path)

    def _create_folder(self) -> str:
        """Create the temporary folder; return the reason of a failure, or an empty string."""
        try:
            create_folder(self._partial_path)
        except OSError as error:
            return str(error)
        return ""

    def _write(self, tensors: Sequence[ShardedTensor], objects: Mapping[str, bytes]) -> None:
        """Write the file of this rank, if it has shards; record the reason of a failure."""
        if not tensors and not objects:
            return
        path = self._partial_path / f"__{dist.get_rank()}_0.distcp"
        try:
            with DistFile(path) as file:
                for key, data in objects.items():
                    file.add_object(key, data)
                for shard in tensors:
                    sizes = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
                    data = shard.data.reshape(sizes)
                    file.add_tensor(shard.key, shard.global_shape, shard.global_offset, data)
            sync_file(path)
            self._records, self._files = file.records, build_manifest([path])
        except Exception as error:  # noqa: BLE001 - of any kind: other ranks wait for this one
            self._reason = f"{path.name}: {error}"

    def _publish(self, records: Sequence[Record], files: Mapping[str, Checksum]) -> str:
        """Write the last files and rename the folder, on rank 0; return the reason of a failure."""
        folder = self._partial_path
        try:
            write_metadata(folder, records, self._common)
            common_files = [file for file in folder.iterdir() if file.name not in files]
            write_checkpoint_info(folder, self._facts, {**files, **build_manifest(common_files)})
            # Each rank has synced its own file.
            publish_folder(folder, self._path, [*common_files, folder / INFO_FILE])
        except Exception as error:  # noqa: BLE001 - of any kind: other ranks wait for this one
            return str(error)
        return ""


def serialize_objects(entries: Iterable[Any]) -> dict[str, bytes]:
    """Return what a checkpoint stores of the ShardedObjects among `entries`, by key.

    Megatron writes a list for each key, of one object for each shard of a rank
    (strategies/torch.py, `_mcore_to_torch_sharded_object`).
    """
    values: dict[str, list[Any]] = defaultdict(list)
    for entry in entries:
        if isinstance(entry, ShardedObject):
            values[entry.unique_key].append(entry.data)
    objects: dict[str, bytes] = {}
    for key, parts in values.items():
        file = io.BytesIO()
        torch.save(parts, file)
        objects[key] = file.getvalue()
    return objects


def _raise_from_rank_0(reason: str, path: Path) -> None:
    """Raise OSError on every rank if rank 0 has a reason. Collective over all ranks."""
    reasons = [reason]
    dist.broadcast_object_list(reasons, src=0)
    if reasons[0]:
        raise OSError(f"{path} cannot be written: {reasons[0]}")


def _copy_to_host(shards: Iterable[ShardedTensor], copies: dict[Any, torch.Tensor]) -> None:
    """Replace the tensors of shards by copies on the host, since training continues."""
    has_device_tensors = False
    for shard in shards:
        tensor = shard.data.detach()
        if tensor.device.type != "cpu":
            shard.data = tensor.to("cpu", non_blocking=True)
            has_device_tensors = True
            continue
        place = shard.key, shard.global_offset
        copy = copies.get(place)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = copies[place] = torch.empty(tensor.shape, dtype=tensor.dtype)
        shard.data = copy.copy_(tensor)
    if has_device_tensors:
        torch.cuda.synchronize()


def has_checkpoint(path: Path) -> bool:
    """Return whether a folder has a distributed checkpoint of any program."""
    return all((path / name).is_file() for name in (".metadata", "metadata.json"))


def read_tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes of all tensors of a checkpoint, by key."""
    return {key: tensor.shape for key, tensor in DistReader(path).tensors.items()}


def are_layers_stacked(keys: Iterable[str]) -> bool:
    """Return whether a checkpoint with these keys stacks all decoder layers in one tensor.

    It depends on settings of the run that saved it (transformer_block.py:730).
    """
    return any(
        key.startswith(_LAYERS) and not key.removeprefix(_LAYERS).split(".")[0].isdigit()
        for key in keys
    )


def load(state: ShardedStateDict, path: Path) -> dict[str, Any]:
    """Load a checkpoint into the shards of `state`. Collective over all ranks.

    It has the steps of Megatron's dist_checkpointing.load, with DistReader in place of torch, which
    runs pickles (distributed/checkpoint/filesystem.py, `read_metadata`, and default_planner.py,
    `load_bytes`).

    Raises:
        ConfigError: The checkpoint is of another model, cannot be read, or would run code. The same
            on every rank. No tensor of `state` has changed, unless a stored tensor is damaged.
    """
    shards, local_values, factories = load_preprocess(state)
    entries = list(nested_values(shards))
    keys = {entry.unique_key for entry in entries if isinstance(entry, ShardedObject)}
    reason = ""
    try:
        reader = DistReader(path)
        loaded = reader.load_common()
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
    values = _load_shards(extract_sharded_base(shards)[0], reader, objects)
    try:
        merge(loaded, local_values)
        merge(loaded, values)
        return dict(apply_factory_merges(loaded, factories))
    except (CheckpointingException, ValueError) as error:  # ValueError: contents that collide
        raise ConfigError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error


def _load_shards(
    state: ShardedStateDict, reader: DistReader, objects: Mapping[str, Sequence[Any]]
) -> ShardedStateDict:
    """Return `state` with tensors and objects in place of shards. Collective over all ranks.

    Raises:
        ConfigError: A shard cannot be read; the same on every rank.
    """
    values = {key: iter(parts) for key, parts in objects.items()}

    def load_entry(entry: Any) -> Any:
        if isinstance(entry, ShardedObject):
            try:  # see serialize_objects
                return next(values[entry.unique_key])
            except (KeyError, StopIteration) as error:
                raise ConfigError(f"{reader.path} has no {entry.unique_key}") from error
        _load_tensor(entry, reader)
        return entry.data

    reason = ""
    try:
        dict_list_map_inplace(load_entry, state)
    except ConfigError as error:
        reason = str(error)
    reasons: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    if reason := next(filter(None, reasons), ""):
        raise ConfigError(reason)
    return state


def _load_tensor(shard: ShardedTensor, reader: DistReader) -> None:
    shard.init_data("cpu")
    data = shard.data = shard.data.detach()
    stored, stacked = reader.tensors[shard.key], shard.prepend_axis_num
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
    values = reader.read(shard.key, Box(tuple(shard.global_offset), sizes), out)
    if out is None:
        part.copy_(values.view(part.shape))


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
