"""New weights in a vLLM worker: our weight transfer engine, and our loaders.

Any vLLM server of the pinned version can be updated: one that is started with
`--weight-transfer-config '{"backend": "mcore_rl"}'` gets `ShardTransferEngine` from this package's
plugin (pyproject.toml, vllm.general_plugins). vLLM's four phases are init (join all ranks), start,
update (receive a version) and finish.

Weights are written through vLLM's layerwise reload (model_executor/model_loader/reload of vLLM
0.32): a module gets its parameters in their raw layout, then vLLM recomputes what it derives from
them (oneDNN packs, absorbed MLA projections, quantisation) and copies the result into the live
storage, which graphs refer to. Shards are copied into place: no full tensor is ever assembled, and
one module at a time is in memory twice.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.kv_cache import KVCacheScaleParameter
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
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

from mcore_rl.checkpoint import fp8
from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.checkpoint.quantization import is_readable
from mcore_rl.config.errors import ConfigError, PeerError
from mcore_rl.models.base import HFConfig, get_vllm_weights, read_config
from mcore_rl.parallel.rendezvous import RendezvousEndpoint
from mcore_rl.reshard import ops
from mcore_rl.reshard.executor import ReceivedSlice
from mcore_rl.reshard.float8 import SCALE_SUFFIX
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.reshard.rules import Shard
from mcore_rl.weight_sync.receiver import ChecksumVerifier
from mcore_rl.weight_sync.spec import (
    ListedParameter,
    TransferSpec,
    WorkerLayout,
    build_generation_side,
    check_worker_layout,
    read_served_config,
)
from mcore_rl.weight_sync.transport import (
    DENSE,
    StreamError,
    WeightTransport,
    WeightUpdate,
    connect,
)

# Names of our loaders among vLLM's load formats.
DEQUANTIZED_FORMAT = "mcore_rl"
QUANTIZED_FORMAT = "mcore_rl_quantized"
TRACED_FORMAT = "mcore_rl_traced"
NO_WEIGHTS_FORMAT = "mcore_rl_no_weights"


@dataclass
class ConnectInfo(WeightTransferInitInfo):
    """Arguments of vLLM's init phase."""

    endpoint: dict[str, Any]  # fields of a RendezvousEndpoint
    spec: dict[str, Any]  # TransferSpec.to_dict
    first_rank: int  # generation rank of this server's first worker


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Arguments of vLLM's update phase."""

    version: int
    format: str = DENSE


class ShardTransferEngine(WeightTransferEngine[ConnectInfo, UpdateInfo]):
    """Receives this worker's shards from the training ranks."""

    init_info_cls = ConnectInfo
    update_info_cls = UpdateInfo

    _rank = 0  # generation rank
    _transport: WeightTransport | None = None

    def init_transfer_engine(self, init_info: ConnectInfo) -> None:
        """Connect to all training ranks and all workers of servers; return when all are connected.

        May be called again, when training ranks or servers have joined or left.

        Raises:
            ConfigError: vLLM's layout of this worker's parameters is not that of the family's
                rules; else as `connect`.
        """
        self.shutdown()  # of an earlier connection
        spec = TransferSpec.parse(init_info.spec)
        config = read_served_config(spec, self.model_config.model)
        parallel = self.parallel_config
        first_rank = init_info.first_rank + parallel.data_parallel_index * parallel.world_size
        self._rank = rank = first_rank + get_tp_group().rank_in_group
        if spec.worker_lists:
            self._check_list(spec.worker_lists[rank % len(spec.worker_lists)])
        else:
            ranks, (_, weights) = build_generation_side(
                config, spec.generation, drafts=spec.drafts, quantization=spec.quantization
            )
            check_worker_layout(read_worker_layout(self.model), ranks, weights, rank, spec.dtype)
        endpoint = RendezvousEndpoint(**init_info.endpoint)
        self._transport = connect(spec, endpoint, config, spec.num_training + rank, self.device)

    def _check_list(self, parameters: list[list[Any]]) -> None:
        traced, reason = list_traced_parameters(self.model)
        if reason:
            raise build_trace_error(self.model_config.model, reason)
        if [ListedParameter.parse(values) for values in traced] != [
            ListedParameter.parse(values) for values in parameters
        ]:
            raise ConfigError(
                f"generation rank {self._rank}: vLLM's loader puts weights in other places than on "
                "the server whose parameters were listed; allowed: servers with equal settings"
            )

    def start_weight_update(self) -> None:
        """Make every module wait for its parameters, also after an update that failed."""
        make_reloadable(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive a version; it has arrived when this returns."""
        self.receive_weights(self.parse_update_info(update_info))

    @torch.no_grad()
    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive all shards of a version and write them into the modules.

        Raises:
            StreamError, ReshardError, ValueError: the weights received are not complete or wrong.
        """
        if self._transport is None:
            raise StreamError("no trainer has been joined: init_weight_transfer_engine comes first")
        update = WeightUpdate(update_info.version, update_info.format)
        writer = ShardWriter(self.model, self._rank)
        try:
            with contextlib.closing(self._transport.receive(update)) as buckets:
                for slices in buckets:
                    writer.write(slices)
        except PeerError:
            self.shutdown()  # so that peers that wait for this worker fail at once, too
            raise
        writer.finish()

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        """Compute what vLLM derives from parameters, and serve with the new weights."""
        finalize_layerwise_reload(self.model, self.model_config)
        repack_output_heads(self.model)

    def shutdown(self) -> None:
        """Disconnect."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()


@torch.no_grad()
def load_by_rules(model: Any, vllm_config: VllmConfig, path: str, *, drafts: bool = False) -> None:
    """Load a Hugging Face folder by the rules of its family, in place of vLLM's reload.

    Args:
        drafts: The model has a draft model (drafts.join_models).

    Raises:
        ConfigError: The folder is damaged.
        ValueError: It has not all weights.
    """
    reader, parallel = CheckpointReader(path), vllm_config.parallel_config
    tp, dp = parallel.tensor_parallel_size, parallel.data_parallel_size
    layout = GenerationLayout(tp=tp, dp=dp, ep=tp * dp if parallel.enable_expert_parallel else 1)
    ranks, (_, weights) = build_generation_side(reader.read_config(), layout, drafts=drafts)
    rank = parallel.data_parallel_index * tp + get_tp_group().rank_in_group
    make_reloadable(model)
    initialize_layerwise_reload(model)
    writer = ShardWriter(model, rank)
    for weight in weights:
        holders = ranks.get_holders(weight)
        shard = next((index for index, members in enumerate(holders) if rank in members), None)
        if shard is None:
            continue
        dtype = torch.float32 if weight.float32 else vllm_config.model_config.dtype
        name = ranks.get_local_name(weight)
        writer.write(
            ReceivedSlice(name, block.local_offset, reader.read(block, dtype), rank)
            for block in weight.rule.get_blocks(Shard(shard, len(holders)))
        )
    writer.finish()
    finalize_layerwise_reload(model, vllm_config.model_config)
    repack_output_heads(model)


def read_worker_layout(model: Any) -> WorkerLayout:
    """Return names, shapes and dtypes of a model's parameters before vLLM packs them."""
    return WorkerLayout(_list_raw_parameters(model), _list_local_experts(model))


def make_reloadable(model: Any) -> None:
    """Undo what would make vLLM's layerwise reload skip modules."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            # The last update failed: initialize_layerwise_reload would skip this half-filled layer
            # (model_executor/model_loader/reload/layerwise.py:103).
            _place_kernel_tensors(layer, info)
            info.reset()
        method: Any = getattr(layer, "quant_method", None)
        if current_platform.is_cpu() and getattr(method, "moe_kernel", None) is not None:
            # With a kernel in place a reload skips the CPU expert prepack, and the experts' output
            # is garbage (model_executor/layers/fused_moe/unquantized_fused_moe_method.py:187).
            method.moe_kernel = None
        for parameter in layer.parameters(recurse=False):
            loader = getattr(parameter, "weight_loader", None)
            if isinstance(loader, functools.partial):
                # A reload reads the names of loaders, and MiniMax-M2's norms have partial ones
                # (model_executor/model_loader/reload/layerwise.py:407).
                functools.update_wrapper(loader, loader.func)


def repack_output_heads(model: torch.nn.Module) -> None:
    """Rebuild the oneDNN pack of an output head that is tied to the embedding; CPU only.

    The head gets no weights of its own, so its pack would stay old
    (model_executor/model_loader/reload/layerwise.py:271 puts its tensors back, unpacked).
    """
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def _list_raw_parameters(model: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of each parameter before vLLM packs it, in the order of modules.

    Parameters in SKIP_TENSORS are never on the meta device and are written in place. The router's
    bias has two names.
    """
    parameters: dict[str, tuple[tuple[int, ...], str]] = {}
    seen = set()
    for prefix, layer in model.named_modules():
        raw = {
            name: tensor
            for name, tensor in get_layerwise_info(layer).restore_metadata[0].items()
            if not isinstance(tensor, KVCacheScaleParameter)  # of a checkpoint alone, if at all
        }
        for name, parameter in layer._parameters.items():
            if parameter is not None and name in SKIP_TENSORS and id(parameter) not in seen:
                raw[name] = parameter
                seen.add(id(parameter))
        for name, tensor in raw.items():
            dtype = str(tensor.dtype).partition(".")[2]
            parameters[f"{prefix}.{name}"] = tuple(tensor.shape), dtype
    return parameters


def _list_local_experts(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the expert of each row of the stacked parameters, under expert parallelism."""
    experts = {}
    for prefix, layer in model.named_modules():
        local_ids = getattr(layer, "_expert_map", None)  # -1: on another worker
        if local_ids is None:
            continue
        # Global ids in the order of the local rows; the -1 sort first and are cut off.
        order = local_ids.argsort(stable=True)[-int((local_ids >= 0).sum()) :]
        for name in get_layerwise_info(layer).restore_metadata[0]:
            experts[f"{prefix}.{name}"] = tuple(order.tolist())
    return experts


class ShardWriter:
    """Writes received slices into modules.

    A module is allocated at its first slice, and processed by vLLM after its last.
    """

    def __init__(self, model: Any, generation_rank: int) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        # Elements received of parameters that vLLM does not count, by id of the parameter.
        self._uncounted = Counter[int]()
        self._verifier = ChecksumVerifier(generation_rank)

    def write(self, pieces: Iterable[ReceivedSlice]) -> None:
        """Write all slices of a bucket, in an order that keeps at most one module incomplete.

        First the module begun by an earlier bucket, then modules that the bucket completes.

        Raises:
            ValueError: the values in a parameter are not the trainer's.
        """
        by_module: dict[str, list[ReceivedSlice]] = {}
        for piece in pieces:
            by_module.setdefault(_split_target(piece.target)[0], []).append(piece)
        for prefix in sorted(by_module, key=lambda name: self._get_priority(name, by_module[name])):
            for piece in by_module[prefix]:
                self._copy(piece)
        self._verifier.check()

    def _get_priority(self, prefix: str, pieces: list[ReceivedSlice]) -> tuple[bool, int]:
        """Return whether a module has not begun, and how many elements it lacks afterwards."""
        layer = self._modules.get(prefix)
        if layer is None:
            raise ValueError(f"{pieces[0].target}: vLLM has no such module")
        info = get_layerwise_info(layer)
        counted = (
            p.data.numel() for p in pieces if _split_target(p.target)[1] not in SKIP_LOAD_TENSORS
        )
        return info.load_numel == 0, get_layer_size(layer) - info.load_numel - sum(counted)

    def _copy(self, piece: ReceivedSlice) -> None:
        prefix, name, index = _split_target(piece.target)
        layer = self._modules[prefix]
        info = get_layerwise_info(layer)
        is_counted = name not in SKIP_LOAD_TENSORS
        if is_counted and not info.can_load():
            raise ValueError(f"{piece.target}: received more elements than its module has")
        if is_counted and info.load_numel == 0:
            _begin_layer(layer, info)
        parameter = getattr(layer, name).data
        box = (parameter if index is None else parameter[index])[piece.slices]
        if box.shape != piece.data.shape or box.dtype != piece.data.dtype:
            raise ValueError(
                f"{piece.target}: {piece.data.dtype} {tuple(piece.data.shape)} does not fit at "
                f"{piece.offset} of {parameter.dtype} {tuple(parameter.shape)}"
            )
        box.copy_(piece.data)
        if not is_counted:
            self._uncounted[id(getattr(layer, name))] += box.numel()
        self._verifier.add(piece, box)
        if is_counted:
            info.load_numel += box.numel()
            if info.load_numel >= get_layer_size(layer) and not is_deferred_attention_layer(layer):
                self._verifier.compute()  # before vLLM changes or frees the parameters
                _layerwise_process(layer, info)

    def finish(self) -> None:
        """Check that every module got all of its parameters. Raises ValueError."""
        for layer in self._modules.values():
            info = get_layerwise_info(layer)
            is_waiting = info.can_load() and info.load_numel == 0
            # All rows of this worker are padding, so that no slice has begun the layer.
            if is_waiting and _is_padding(layer) and not _is_tied(self._model, layer):
                _begin_layer(layer, info)
                _layerwise_process(layer, info)
        short = [
            prefix
            for prefix, layer in self._modules.items()
            if get_layerwise_info(layer).can_load()
            and not is_deferred_attention_layer(layer)
            and any(
                parameter is not None and name not in SKIP_LOAD_TENSORS
                for name, parameter in layer._parameters.items()
            )
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


def _split_target(target: str) -> tuple[str, str, int | None]:
    """Return module, parameter and row (of a stacked parameter) of a target.

    >>> _split_target("model.layers.1.mlp.experts.w2_weight[3]")
    ('model.layers.1.mlp.experts', 'w2_weight', 3)
    """
    prefix, _, name = target.rpartition(".")
    name, bracket, index = name.partition("[")
    return prefix, name, int(index[:-1]) if bracket else None


def _begin_layer(layer: Any, info: Any) -> None:
    """Allocate the parameters of a module."""
    materialize_layer(layer, info)
    info.load_numel = _zero_padding(layer)


def _is_padding(layer: Any) -> bool:
    """Return whether this worker has no row of the vocabulary, only padding."""
    is_vocabulary = isinstance(layer, VocabParallelEmbedding)
    return is_vocabulary and layer.shard_indices.num_org_elements == 0


def _zero_padding(layer: Any) -> int:
    """Zero what no tensor of a checkpoint fills, as vLLM's loader does.

    Rows of a vocabulary that no token has, and biases of experts' down-projections on other ranks
    than the first, whose sum has them once (model_executor/models/gpt_oss.py).

    Returns:
        The number of elements.
    """
    bias = getattr(layer, "w2_bias", None)
    if bias is not None and layer.moe_config.moe_parallel_config.tp_rank:
        bias.data.zero_()
        return int(bias.numel())
    if not isinstance(layer, VocabParallelEmbedding):
        return 0
    rows = layer.shard_indices.num_org_elements
    paddings = [
        p.data[rows:] for p in (layer.weight, getattr(layer, "bias", None)) if p is not None
    ]
    for padding in paddings:
        padding.zero_()
    return sum(padding.numel() for padding in paddings)


def _is_tied(model: Any, layer: Any) -> bool:
    """Return whether a layer is an output head tied to the embedding."""
    tied = getattr(model.config, "tie_word_embeddings", False)
    return bool(tied) and isinstance(layer, ParallelLMHead)


def build_loading_arguments(
    model_path: str, *, ep: bool, reads_weights: bool = True, quantization: str | None = None
) -> dict[str, Any]:
    """Return vLLM's engine arguments that choose a loader; none for vLLM's own.

    Args:
        quantization: rollout.quantization.

    Raises:
        ConfigError: The family has no rules of vLLM's parameters, as float8 needs.
    """
    loading = {"load_format": TRACED_FORMAT} if _is_unknown(read_config(model_path)) else {}
    if quantization is None:
        loading |= _build_dequantized_arguments(model_path, ep=ep)
    else:
        loading = _build_quantized_arguments(model_path, ep=ep)
    return loading if reads_weights else loading | {"load_format": NO_WEIGHTS_FORMAT}


def _build_dequantized_arguments(model_path: str, *, ep: bool) -> dict[str, Any]:
    """Return vLLM's engine arguments for a quantized checkpoint that we dequantize, or none.

    vLLM itself handles other quantisations.
    """
    config = read_config(model_path)
    quantization = config.get("quantization_config")
    if quantization is None:
        has_files = any(Path(model_path).glob("*.safetensors"))
        if not has_files or CheckpointReader(model_path).quantization is None:
            return {}
    elif not is_readable(quantization):
        return {}
    plain: dict[str, Any] = {"quantization_config": None}
    if "quantization_config" in (config.get("text_config") or {}):
        plain["text_config"] = dict(plain)
    return {
        "load_format": DEQUANTIZED_FORMAT,
        "hf_overrides": plain,
        # Experts of other workers are neither read nor dequantised.
        "enable_ep_weight_filter": ep,
    }


def _build_quantized_arguments(model_path: str, *, ep: bool) -> dict[str, Any]:
    """Return vLLM's engine arguments for a model that is served in float8 blocks.

    Sets the environment that engine and worker processes inherit: DeepGEMM would round the scales
    to powers of two and quantise the weights once more (model_executor/layers/quantization/utils/
    fp8_utils.py, deepgemm_post_process_fp8_weight_block).
    """
    os.environ |= {"VLLM_USE_DEEP_GEMM": "0", "VLLM_MOE_USE_DEEP_GEMM": "0"}
    weights = get_vllm_weights(read_config(model_path))
    names = [tensor.name for weight in weights for tensor in weight.rule.tensors]
    return {
        "load_format": QUANTIZED_FORMAT,
        "hf_overrides": {"quantization_config": fp8.build_quantization_config(names)},
        "enable_ep_weight_filter": ep,
    }


def _is_unknown(config: HFConfig) -> bool:
    """Return whether this package has no rules of vLLM's parameters for a config.json."""
    try:
        return not get_vllm_weights(config)
    except ConfigError:
        return True


def list_traced_parameters(model: Any) -> tuple[list[list[Any]], str]:
    """Return the lists of a model that one of our loaders has traced; [] for others.

    The second value is why the trace failed, or "".
    """
    parameters: list[ListedParameter] = getattr(model, "mcore_rl_parameters", [])
    reason: str = getattr(model, "mcore_rl_trace_error", "")
    return [parameter.to_list() for parameter in parameters], reason


def register_loaders() -> None:
    """Register our loaders with vLLM, as load formats."""
    register_model_loader(DEQUANTIZED_FORMAT)(_DequantizingLoader)
    register_model_loader(QUANTIZED_FORMAT)(_QuantizingLoader)
    register_model_loader(NO_WEIGHTS_FORMAT)(_NoWeightsLoader)
    register_model_loader(TRACED_FORMAT)(_TracedLoader)


class _DequantizingLoader(DefaultModelLoader):
    """Loads checkpoints in float8 blocks, MXFP4 or int4 in the server's dtype.

    Weights are dequantised as they are read, by the trainer's reader, and the model is built
    without the quantisation: it takes the same shards as that of a plain checkpoint.
    """

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Load all parameters."""
        _trace(model, model_config)
        config: Any = getattr(model, "config", None)
        if getattr(config, "quantization_config", "") is None:
            # vLLM's gpt-oss takes any value for a quantisation (model_executor/models/gpt_oss.py,
            # load_weights).
            del config.quantization_config
        super().load_weights(model, model_config)

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and values of each tensor that this worker needs."""
        # For "Loading weights took ..." of vLLM, whose own iterator sets it.
        self.counter_before_loading_weights = time.perf_counter()
        reader = CheckpointReader(model_config.model)
        for name in reader.get_shapes():
            if not should_skip_weight(name, self.local_expert_ids):
                yield name, reader.view_as_stored(name, reader.read_tensor(name))


class _QuantizingLoader(_DequantizingLoader):
    """Loads checkpoints of any form in float8 blocks: the codes and scales that a trainer sends.

    A trainer reads the weights in the dtype of the model, and quantises them when it sends. Those
    of a checkpoint in float8 blocks become the same codes again (checkpoint/fp8.py).
    """

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and values of each tensor that this worker needs."""
        for name, tensor in super().get_all_weights(model_config, model):
            if not fp8.is_block_quantized(name, tuple(tensor.shape)):
                yield name, tensor
                continue
            weight = tensor.to(model_config.dtype)
            quantized = ops.allocate_quantized(weight)
            ops.quantize_boxes([(weight, quantized)])
            yield name, quantized.values
            yield name + SCALE_SUFFIX, quantized.scales


class _TracedLoader(DefaultModelLoader):
    """Loads a checkpoint as vLLM does, and records where its tensors go (loader_trace.py)."""

    def __init__(self, load_config: LoadConfig) -> None:
        # vLLM's loader refuses formats that it does not know (default_loader.py, load_format).
        super().__init__(replace(load_config, load_format=LoadConfig.load_format))

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Load all parameters."""
        _trace(model, model_config)
        super().load_weights(model, model_config)


def _trace(model: Any, model_config: ModelConfig) -> None:
    """Record where the tensors of a checkpoint go, if no family has the rules.

    A failure is raised when the parameters are listed: a server that gets no weights, or whole
    checkpoints, does without.
    """
    if not _is_unknown(read_config(model_config.model)):
        return
    from mcore_rl.inference.vllm.loader_trace import trace_loader

    try:
        model.mcore_rl_parameters = trace_loader(model, model_config.model)
    except Exception as error:  # noqa: BLE001 (of any code of a model)
        is_ours = isinstance(error, ConfigError)
        model.mcore_rl_trace_error = str(error) if is_ours else f"{type(error).__name__}: {error}"


def build_trace_error(model_path: str, reason: str) -> ConfigError:
    """Return the error of a server whose parameters are needed and whose trace failed."""
    family = read_config(model_path).get("model_type")
    return ConfigError(
        f"model.path={model_path!r} of family {family!r}: {reason}; allowed: "
        "weight_sync.method='full_export'"
    )


class _NoWeightsLoader(DummyModelLoader):
    """Fills parameters with small random numbers; an update writes all of them.

    vLLM's dummy loader also fills buffers, and scales of a quantised KV cache, which no update
    writes.
    """

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Fill all parameters."""
        _trace(model, model_config)
        for parameter in model.parameters():
            if not isinstance(parameter, KVCacheScaleParameter):
                initialize_single_dummy_weight(parameter)
