"""Weights written into a vLLM model as the rank's own shards.

Through vLLM's layerwise reload (model_executor/model_loader/reload of vLLM 0.32): a module gets its
parameters in their raw layout, then vLLM recomputes what it derives from them (packs of the CPU,
absorbed MLA projections, quantisation) and copies the result into the live storage, which graphs
refer to. Shards are copied into place, so that no full tensor is ever assembled, and one
module at a time is in memory twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
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
from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight
from vllm.platforms import current_platform

from mcore_rl.reshard import ops
from mcore_rl.reshard.executor import ReceivedSlice
from mcore_rl.weight_sync.worker_layout import WorkerLayout

NO_WEIGHTS = "mcore_rl_no_weights"  # the load format of a server whose trainer sends them first


def register_loader() -> None:
    """Register `NO_WEIGHTS` with vLLM, as one of its load formats."""
    register_model_loader(NO_WEIGHTS)(_NoWeightsLoader)


class _NoWeightsLoader(DummyModelLoader):
    """Fill parameters with small random numbers; an update writes all of them.

    vLLM's own loader also fills buffers, which no update writes.
    """

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        for parameter in model.parameters():
            initialize_single_dummy_weight(parameter)


def worker_layout(model: Any) -> WorkerLayout:
    """A model's parameters before vLLM packs them."""
    return WorkerLayout(_raw_parameters(model), _local_experts(model))


def begin_reload(model: Any) -> None:
    """From now on every module waits for its parameters. After an update that broke off, too."""
    make_reloadable(model)
    initialize_layerwise_reload(model)


def finish_reload(model: Any, model_config: Any) -> None:
    """Make what vLLM derives from parameters, and serve with them."""
    finalize_layerwise_reload(model, model_config)
    repack_output_heads(model)


def make_reloadable(model: Any) -> None:
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            # An update that broke off: initialize_layerwise_reload would skip this half-filled
            # layer (model_executor/model_loader/reload/layerwise.py:103).
            _place_kernel_tensors(layer, info)
            info.reset()
        method: Any = getattr(layer, "quant_method", None)
        if current_platform.is_cpu() and getattr(method, "moe_kernel", None) is not None:
            # With a kernel in place a reload skips the CPU expert prepack, and the experts' output
            # is garbage (model_executor/layers/fused_moe/unquantized_fused_moe_method.py:187).
            method.moe_kernel = None


def repack_output_heads(model: torch.nn.Module) -> None:
    """A head tied to the embedding gets no weights of its own, so its oneDNN pack would stay old.

    (model_executor/model_loader/reload/layerwise.py:271 puts its tensors back, unpacked.)
    """
    if not current_platform.is_cpu():
        return
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


class ShardWriter:
    """Writes pieces into modules, each of which is made at its first piece and done at its last."""

    def __init__(self, model: Any, generation_rank: int) -> None:
        self._model, self._rank = model, generation_rank
        self._modules = dict(model.named_modules())
        self._uncounted = Counter[int]()  # elements of parameters that vLLM does not count, by id
        # Checked pieces in their places: without checksums so far, and with them.
        self._written: list[tuple[ReceivedSlice, torch.Tensor]] = []
        self._summed: list[tuple[list[ReceivedSlice], torch.Tensor]] = []

    def write(self, pieces: Iterable[ReceivedSlice]) -> None:
        """All pieces of a bucket: of a module that has begun, of those that they complete, others.

        So one module has begun and is not complete, at any time. Raises ValueError when the values
        in a parameter are not the trainer's.
        """
        by_module: dict[str, list[ReceivedSlice]] = {}
        for piece in pieces:
            by_module.setdefault(_split(piece.target)[0], []).append(piece)
        for prefix in sorted(by_module, key=lambda prefix: self._turn(prefix, by_module[prefix])):
            for piece in by_module[prefix]:
                self._place(piece)
        self._compute_checksums()
        self._check()

    def _turn(self, prefix: str, pieces: list[ReceivedSlice]) -> tuple[bool, int]:
        """Whether a module has yet to begin, and how many elements it will lack."""
        layer = self._modules.get(prefix)
        if layer is None:
            raise ValueError(f"{pieces[0].target}: vLLM has no such module")
        info = get_layerwise_info(layer)
        counted = (p.data.numel() for p in pieces if _split(p.target)[1] not in SKIP_LOAD_TENSORS)
        return info.load_numel == 0, get_layer_size(layer) - info.load_numel - sum(counted)

    def _place(self, piece: ReceivedSlice) -> None:
        prefix, name, index = _split(piece.target)
        layer = self._modules[prefix]
        info = get_layerwise_info(layer)
        is_counted = name not in SKIP_LOAD_TENSORS
        if is_counted and not info.can_load():
            raise ValueError(f"{piece.target}: received more elements than its module has")
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
        if not is_counted:
            self._uncounted[id(getattr(layer, name))] += box.numel()
        if piece.checksum is not None:
            self._written.append((piece, box))
        if is_counted:
            info.load_numel += box.numel()
            if info.load_numel >= get_layer_size(layer) and not is_deferred_attention_layer(layer):
                self._compute_checksums()  # before vLLM changes or frees the parameters
                _layerwise_process(layer, info)

    def _compute_checksums(self) -> None:
        if self._written:
            checksums = ops.compute_checksums((box, box.dtype) for _, box in self._written)
            self._summed.append(([piece for piece, _ in self._written], checksums))
            self._written = []

    def _check(self) -> None:
        """Compare the values in parameters with the trainer's. A GPU is read once."""
        if not self._summed:
            return
        values = torch.cat([checksums for _, checksums in self._summed]).tolist()
        pieces = [piece for some, _ in self._summed for piece in some]
        self._summed = []
        for piece, value in zip(pieces, values, strict=True):
            if piece.checksum is not None and value != piece.checksum:
                received, expected = (f"{n % (1 << 64):016x}" for n in (value, piece.checksum))
                raise ValueError(
                    f"{piece.target}, box at {piece.offset} of {tuple(piece.data.shape)} from "
                    f"training rank {piece.source_rank}: the checksum on generation rank "
                    f"{self._rank} is {received}, and was {expected}"
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
        short += [
            f"{prefix}.{name}"
            for prefix, layer in self._modules.items()
            for name, parameter in layer._parameters.items()
            if name in SKIP_LOAD_TENSORS and parameter is not None
            and self._uncounted[id(parameter)] < parameter.numel()
        ]  # fmt: skip
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


def _slices(piece: ReceivedSlice) -> tuple[slice, ...]:
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
