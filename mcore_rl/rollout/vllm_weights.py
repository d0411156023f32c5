"""New weights inside a vLLM worker: streamed as Hugging Face has them, or as the rank's own shards.

Both go through vLLM's layerwise reload (model_executor/model_loader/reload of vLLM 0.32): a module
gets its parameters in their raw layout, then vLLM redoes what it derives from them (packs of the
CPU, absorbed MLA projections, quantisation) and copies the result into the live storage, which
graphs refer to. Of a stream vLLM's loaders cut what the rank needs. Shards are written where they
belong, so that no full tensor is ever formed, and one module at a time is in memory twice.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    _layerwise_process,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import (
    SKIP_LOAD_TENSORS,
    SKIP_TENSORS,
    materialize_layer,
)
from vllm.model_executor.model_loader.reload.utils import get_layer_size
from vllm.platforms import current_platform

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.errors import PeerError
from mcore_rl.reshard.executor import Arrival, crc32_of
from mcore_rl.weight_sync.announced import Announced
from mcore_rl.weight_sync.checkpoint_engine import RoutePlan
from mcore_rl.weight_sync.colocated import ShardEndpoint, receive_shards
from mcore_rl.weight_sync.disaggregated import checkpoint_engine, endpoint_of
from mcore_rl.weight_sync.manifest import verified
from mcore_rl.weight_sync.shared_memory import site_of
from mcore_rl.weight_sync.stream import StreamEndpoint, receive


class WeightReceiver:
    """Mixed into vLLM's worker class; `collective_rpc` calls its methods on every worker."""

    model_runner: Any
    vllm_config: Any
    device: torch.device
    rank: int  # of the worker in its engine

    def receive_weights(
        self, host: str, port: int, token: str, timeout_s: float, version: int
    ) -> None:
        """Replace all weights by those of a stream. Never raises: `weight_error` tells.

        An exception here would leave the other workers' answers in the queue, to be read as those
        of the next call (v1/executor/multiproc_executor.py:433).
        """
        endpoint = StreamEndpoint(host, port, token, timeout_s)
        with (
            self._errors_kept(),
            contextlib.closing(receive(endpoint, version)) as tensors,
            self._reloading() as model,
        ):
            expected = CheckpointReader(self.vllm_config.model_config.model).shapes()
            model.load_weights(verified(tensors, expected))

    def receive_shards(self, endpoints: list[tuple[str, str, float, int]], version: int) -> None:
        """Replace all weights by shards; `endpoints` are the fields of each worker's.

        Never raises, as receive_weights.
        """
        endpoint = ShardEndpoint(*endpoints[self.rank])
        with self._errors_kept():
            buckets = receive_shards(endpoint, version, self.device)
            self._write_shards(buckets, endpoint.generation_rank)

    def join_checkpoint_engine(self, text: str) -> None:
        """Make this worker's end; JSON of endpoint, plan, first worker of the server.

        Never raises, as receive_weights.
        """
        fields, plan_fields, first_worker = json.loads(text)
        plan = RoutePlan.from_dict(plan_fields)
        self._generation_rank = first_worker + self.rank
        with self._errors_kept():
            self._checkpoint_engine = checkpoint_engine(
                endpoint_of(plan, fields),
                plan,
                CheckpointReader(self.vllm_config.model_config.model).config(),
                plan.training.world_size + self._generation_rank,
                self.device,
            )

    def receive_checkpoint(self, version: int) -> None:
        """Replace all weights by the shards of this rank. Never raises, as receive_weights."""
        with self._errors_kept():
            buckets = self._checkpoint_engine.receive_weights(version)
            self._write_shards(buckets, self._generation_rank)

    def _write_shards(
        self, buckets: Generator[list[Arrival], None, None], generation_rank: int
    ) -> None:
        with contextlib.closing(buckets), self._reloading() as model:
            writer = _ShardWriter(model, generation_rank)
            for pieces in buckets:
                writer.write(pieces)
            writer.finish()

    def weight_error(self) -> tuple[str, bool] | None:
        """What went wrong in the last update of this worker, and whether the trainer is blamed."""
        return self._weight_error

    def weight_layout(self) -> str:
        """An Announced as JSON (weight_sync/announced.py)."""
        model = self.model_runner.get_model()
        announced = Announced(site_of(self.device), _raw_parameters(model), _local_experts(model))
        return announced.to_json()

    @contextlib.contextmanager
    def _reloading(self) -> Iterator[Any]:
        """Inside, every module waits for its parameters; then those that vLLM derives are made.

        An update that breaks off leaves some modules as they were and some as they are to be.
        """
        model = self.model_runner.get_model()
        for layer in model.modules():
            _make_reloadable(layer)
        initialize_layerwise_reload(model)
        yield model
        finalize_layerwise_reload(model, self.vllm_config.model_config)
        if current_platform.is_cpu():
            _repack_output_heads(model)

    @contextlib.contextmanager
    def _errors_kept(self) -> Iterator[None]:
        self._weight_error: tuple[str, bool] | None = None
        try:
            with set_current_vllm_config(self.vllm_config), torch.no_grad():
                yield
        except Exception as error:  # noqa: BLE001 (kept, and asked for afterwards)
            reason = f"{type(error).__name__}: {error}"
            self._weight_error = reason, isinstance(error, PeerError)


def _make_reloadable(layer: torch.nn.Module) -> None:
    info = get_layerwise_info(layer)
    if info.can_load() and info.kernel_tensors is not None:
        # An update that broke off: initialize_layerwise_reload would skip this half-filled layer
        # (model_executor/model_loader/reload/layerwise.py:103).
        _place_kernel_tensors(layer, info)
        info.reset()
    method: Any = getattr(layer, "quant_method", None)
    if current_platform.is_cpu() and getattr(method, "moe_kernel", None) is not None:
        # With a kernel in place a reload skips the CPU expert prepack, and the experts' output is
        # garbage (model_executor/layers/fused_moe/unquantized_fused_moe_method.py:187).
        method.moe_kernel = None


def _repack_output_heads(model: torch.nn.Module) -> None:
    """A head tied to the embedding gets no weights of its own, so its oneDNN pack would stay old.

    (model_executor/model_loader/reload/layerwise.py:271 puts its tensors back, unpacked.)
    """
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def _raw_parameters(model: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each parameter before vLLM packs it, by name, in the order of modules.

    Those that are never on the meta device are written in place. The router's bias has two names.
    """
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    seen = set()
    for prefix, layer in model.named_modules():
        raw = dict(get_layerwise_info(layer).restore_metadata[0])
        for name, parameter in layer._parameters.items():
            if parameter is not None and name in SKIP_TENSORS and id(parameter) not in seen:
                raw[name] = parameter
                seen.add(id(parameter))
        for name, tensor in raw.items():
            found[f"{prefix}.{name}"] = tuple(tensor.shape), str(tensor.dtype).partition(".")[2]
    return found


def _local_experts(model: Any) -> dict[str, tuple[int, ...]]:
    """Under expert parallelism, which experts the rows of a stacked parameter are, in order."""
    found = {}
    for prefix, layer in model.named_modules():
        places = getattr(layer, "_expert_map", None)
        if places is None:
            continue
        order = places.argsort(stable=True)[-int((places >= 0).sum()) :]
        for name in get_layerwise_info(layer).restore_metadata[0]:
            found[f"{prefix}.{name}"] = tuple(order.tolist())
    return found


class _ShardWriter:
    """Writes pieces into modules, each of which is made at its first piece and done at its last."""

    def __init__(self, model: Any, generation_rank: int) -> None:
        self._model, self._rank = model, generation_rank
        self._modules = dict(model.named_modules())

    def write(self, pieces: Iterable[Arrival]) -> None:
        """All pieces of a bucket: of a module that has begun, of those that they complete, others.

        So one module has begun and is not complete, at any time.
        """
        by_module: dict[str, list[Arrival]] = {}
        for piece in pieces:
            by_module.setdefault(_split(piece.target)[0], []).append(piece)
        for prefix in sorted(by_module, key=lambda prefix: self._turn(prefix, by_module[prefix])):
            for piece in by_module[prefix]:
                self._place(piece)

    def _turn(self, prefix: str, pieces: list[Arrival]) -> tuple[bool, int]:
        """Whether a module has yet to begin, and how many elements it will lack."""
        layer = self._modules.get(prefix)
        if layer is None:
            raise ValueError(f"{pieces[0].target}: vLLM has no such module")
        info = get_layerwise_info(layer)
        counted = (p.data.numel() for p in pieces if _split(p.target)[1] not in SKIP_LOAD_TENSORS)
        return info.load_numel == 0, get_layer_size(layer) - info.load_numel - sum(counted)

    def _place(self, piece: Arrival) -> None:
        prefix, name, index = _split(piece.target)
        layer = self._modules[prefix]
        info = get_layerwise_info(layer)
        is_counted = name not in SKIP_LOAD_TENSORS
        if is_counted and not info.can_load():
            raise ValueError(f"{piece.target}: more elements came than its module holds")
        if is_counted and info.load_numel == 0:
            materialize_layer(layer, info)
            info.load_numel = _zero_padding(layer)
        parameter = getattr(layer, name).data
        box = (parameter if index is None else parameter[index])[_slices(piece)]
        if box.shape != piece.data.shape or box.dtype != piece.data.dtype:
            raise ValueError(
                f"{piece.target}: {piece.data.dtype} {tuple(piece.data.shape)} does not fit at "
                f"{piece.offset} of {parameter.dtype} {tuple(parameter.shape)}"
            )
        box.copy_(piece.data)
        self._check(piece, box)
        if is_counted:
            info.load_numel += box.numel()
            if info.load_numel >= get_layer_size(layer) and not is_deferred_attention_layer(layer):
                _layerwise_process(layer, info)

    def _check(self, piece: Arrival, box: torch.Tensor) -> None:
        """What stands in the parameter, against what the trainer had."""
        if piece.crc32 is None:
            return
        found = crc32_of(box, box.dtype)
        if found != piece.crc32:
            raise ValueError(
                f"{piece.target}, box at {piece.offset} of {tuple(box.shape)} from training rank "
                f"{piece.source_rank}: the checksum on generation rank {self._rank} is "
                f"{found:08x}, and was {piece.crc32:08x}"
            )

    def finish(self) -> None:
        """Raises ValueError when a module did not get all of its parameters."""
        short = [
            prefix
            for prefix, layer in self._modules.items()
            if get_layerwise_info(layer).can_load()
            and not is_deferred_attention_layer(layer)
            and any(parameter is not None for parameter in layer._parameters.values())
            and not _is_tied(self._model, layer)
        ]
        if short:
            raise ValueError(f"{len(short)} modules did not get all weights: {short[:5]}")


def _split(target: str) -> tuple[str, str, int | None]:
    """Module, parameter and row of a stacked one.

    >>> _split("model.layers.1.mlp.experts.w2_weight[3]")
    ('model.layers.1.mlp.experts', 'w2_weight', 3)
    """
    prefix, _, name = target.rpartition(".")
    name, bracket, index = name.partition("[")
    return prefix, name, int(index[:-1]) if bracket else None


def _slices(piece: Arrival) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.data.shape, strict=True))


def _zero_padding(layer: Any) -> int:
    """Set rows of a vocabulary that no token has to zero, as vLLM's loader does; their elements."""
    if not isinstance(layer, VocabParallelEmbedding):
        return 0
    padding = layer.weight.data[layer.shard_indices.num_org_elements :]
    padding.zero_()
    return padding.numel()


def _is_tied(model: Any, layer: Any) -> bool:
    """A head that is the embedding: see _repack_output_heads."""
    tied = getattr(model.config, "tie_word_embeddings", False)
    return bool(tied) and isinstance(layer, ParallelLMHead)
