"""The device that Megatron runs on, the modules of its layers, and the patches for a CPU.

On CPUs real Megatron-core runs over gloo. Megatron names "cuda" in hundreds of places, so
engine code is written for CUDA (`torch.cuda.current_device()`), and without a GPU
`install()` makes them use the CPU. Every patch names the upstream file:line
(megatron/core of 0.19.2) that it corrects, and fails at start if that symbol no longer exists.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _device

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.observability.process import exempt_imports_from_gc
from mcore_rl.parallel.devices import DEVICES
from mcore_rl.parallel.store import guard_gloo

_CPU = torch.device("cpu")
MEGATRON_CORE = "0.19.2"  # the only version that the engine and the patches below are tested with
_cuda: torch.device | None = None  # the device behind "cuda" on a CPU; None on a GPU
_modules = "torch"  # modules of Megatron's layers that install() chose: "te" or "torch"


def get_device_type() -> str:
    """Return "cuda" if a GPU is visible and `install` did not choose the CPU, else "cpu"."""
    return "cuda" if _cuda is None and torch.cuda.is_available() else "cpu"


def get_collective_backend() -> str:
    return DEVICES[get_device_type()].backend


def is_transformer_engine_installed() -> bool:
    """Say whether Transformer Engine and its part for torch are installed, without importing them.

    The wheel of that part has its library in transformer_engine/wheel_lib, where only Transformer
    Engine looks for it (common/__init__.py, _get_shared_object_file); a build from source has it
    beside the package.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return False
    if importlib.util.find_spec("transformer_engine_torch") is not None:
        return True
    return any(importlib.metadata.distributions(name="transformer_engine_torch"))


def choose_modules(setting: str, device: str = "", key: str = "actor") -> str:
    """Choose the modules of the layers: "te" (Transformer Engine) or "torch" (layers.py).

    Args:
        setting: EngineConfig.modules. "auto" is Transformer Engine on a GPU if it is installed.
        device: "cuda" or "cpu" of ranks on other nodes, which check their own installation; ""
            is the device of this process.
        key: Name of the settings of the engine, for errors.

    Raises:
        ConfigError: "te" without a GPU or without Transformer Engine.
    """
    has_gpu = (device or get_device_type()) == "cuda"
    is_elsewhere = device not in ("", get_device_type())
    is_installed = is_elsewhere or is_transformer_engine_installed()
    if setting == "te" and not (has_gpu and is_installed):
        missing = "transformer-engine[pytorch], which is not installed" if has_gpu else "a GPU"
        raise ConfigError(f"{key}.modules='te' needs {missing}; allowed: 'auto', 'torch'")
    return "te" if setting != "torch" and has_gpu and is_installed else "torch"


def build_rank_environment(layout: Layout, device: str) -> dict[str, str]:
    """Return the variables to start the process of a training rank on "cuda" or "cpu" with.

    Overlap of tensor- and context-parallel communication needs kernels to start in the order of
    their launch (tensor_parallel/layers.py:621). Before Blackwell that takes a single hardware
    queue, and CUDA reads the variable once. A driver without a GPU does not know the GPUs of the
    ranks and sets the single queue, which is correct on all of them. A variable that is already set
    is kept.
    """
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if device == "cpu" or layout.tp == layout.cp == 1 or name in os.environ:
        return {}
    is_blackwell = get_device_type() == "cuda" and torch.cuda.get_device_capability()[0] >= 10
    return {} if is_blackwell else {name: "1"}


def build_config_flags() -> dict[str, Any]:
    """Return the TransformerConfig arguments that choose kernels of CUDA and Transformer Engine."""
    fused = get_device_type() == "cuda"
    return {
        # Transformer Engine's linears accumulate in place without this flag (model.py,
        # fuse_weight_gradients). If Megatron marked the first micro-batch for them, they would
        # overwrite the gradients of earlier calls (module/linear.py:1231 of 2.20). The next flag
        # keeps it from doing so; its other use is float8 (extensions/transformer_engine.py:1083).
        "gradient_accumulation_fusion": False,
        "disable_parameter_transpose_cache": _modules == "te",
        "masked_softmax_fusion": fused,
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
        "apply_rope_fusion": fused and _modules == "te",
        "persist_layer_norm": fused,
        "moe_permute_fusion": fused and _modules == "te",
        "use_cpu_initialization": False,
    }


def install(num_threads: int, modules: str = "auto", *, on_cpu: bool = False) -> None:
    """Prepare this process for Megatron; without a GPU, make "cuda" mean the CPU.

    Args:
        num_threads: CPU threads of torch.
        modules: EngineConfig.modules.
        on_cpu: Use the CPU even if there is a GPU. The process stays on it.

    Raises:
        ConfigError: Another version of Megatron-core is installed; Transformer Engine is required
            and is not installed, or fails to import.
    """
    global _cuda, _modules
    torch.set_num_threads(num_threads)
    silence_imports()
    if _cuda is not None:
        return
    if get_device_type() == "cuda" and not on_cpu:
        _modules = choose_modules(modules)
        if _modules == "te":
            _import_transformer_engine()
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        _check_megatron()
        if _modules == "torch":
            _use_torch_modules()
            _use_foreach_norm()
        _keep_plain_queries()
        _sum_indexer_losses()
        _replay_picked_keys()
        return
    _cuda = _CPU
    _patch_torch()
    _patch_torch_cuda()
    guard_gloo()
    with exempt_imports_from_gc():
        _check_megatron()  # imports Megatron
        choose_modules(modules)
        _patch_megatron()
        _use_torch_modules()
        _keep_plain_queries()
        _sum_indexer_losses()
        _replay_picked_keys()


def _import_transformer_engine() -> None:
    """Import Transformer Engine: Megatron ignores one that fails to import, and fails later."""
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"Transformer Engine is installed and does not import ({error}); make .venv again with "
            "launch/setup_env.sh, or set actor.modules='torch'"
        ) from error


def _check_megatron() -> None:
    from megatron.core import package_info

    version = package_info.__version__.partition("+")[0]  # without the commit
    if version != MEGATRON_CORE:
        raise ConfigError(f"megatron-core {version} is installed; supported: {MEGATRON_CORE}")


@contextlib.contextmanager
def use_meta_device() -> Iterator[None]:
    """Make "cuda" mean torch's meta device: models have shapes and no memory. CPUs only."""
    global _cuda
    if _cuda is None:
        raise RuntimeError("use_meta_device() before install() on a CPU")
    _cuda = torch.device("meta")
    try:
        yield
    finally:
        _cuda = _CPU


def silence_imports() -> None:
    """Hide Megatron's warnings of missing kernels and torch's of a CUDA without a GPU.

    Both come with the first import: on the CPU all kernels are missing.
    """
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _patch_torch() -> None:
    """Make device="cuda" the CPU, .cuda() the tensor itself, pinned memory plain memory.

    Functions are replaced one by one. A torch function mode would see every operation, which costs
    5 to 8 % of the time of a rank with a small model. A function that is missing here ends in
    torch's own error: not compiled with CUDA.
    """
    # Fill its cache now: `with torch.device(...)` compares with the original factories.
    _device._device_constructors()
    # optimizer/optimizer.py:690, clip_grads.py:112, pipeline_parallel/schedules.py:749,
    # transformer/utils.py:39, models/common/embeddings/rope_utils.py:62.
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange"):
        _replace(torch, name, _redirect_device(getattr(torch, name)))
    # optimizer/optimizer.py:586, models/common/embeddings/rope_utils.py:64
    _replace(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor)
    # pipeline_parallel/utils.py:269
    _replace(torch.Tensor, "record_stream", lambda tensor, stream: None)
    original = torch.Tensor.type

    def get_cuda_type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(tensor, *args, **kwargs)
        return original(tensor).replace("torch.", "torch.cuda.", 1)

    # optimizer/clip_grads.py:174 and distrib_optimizer.py:401 compare with CUDA's name.
    _replace(torch.Tensor, "type", get_cuda_type)


def _redirect_device(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _cuda
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


class _NullStream:
    """A CUDA stream or event on the CPU, where all work is synchronous."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> _NullStream:
        return self

    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...


def _patch_torch_cuda() -> None:
    null = _NullStream()

    @contextlib.contextmanager
    def stream(_: Any) -> Iterator[None]:
        yield

    replacements: dict[str, Any] = {
        "current_device": lambda: _cuda,  # tensor_parallel/layers.py:305 and 174 more
        "synchronize": lambda *_, **__: None,  # pipeline_parallel/p2p_communication.py:263
        "empty_cache": lambda: None,
        "current_stream": lambda *_, **__: null,  # transformer/moe/token_dispatcher.py:922
        "default_stream": lambda *_, **__: null,
        "Stream": _NullStream,  # transformer/moe/token_dispatcher.py:469
        "Event": _NullStream,
        "stream": stream,
        # The "CUDA" generator is the CPU's, or seeds are lost: tensor_parallel/random.py:118.
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "manual_seed": torch.default_generator.manual_seed,
    }
    for name, replacement in replacements.items():
        _replace(torch.cuda, name, replacement)
    # jit_fuser is torch.compile (megatron/core/jit.py:20). It gains nothing at this size, needs a
    # compiler, and takes half of the time of importing Megatron.
    _replace(torch, "compile", _skip_compile)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if "megatron.core.jit" in sys.modules:
        torch.compiler.set_stance("force_eager")


def _skip_compile(model: Any = None, **_: Any) -> Any:
    """Stand in for torch.compile, as a function or a decorator with arguments."""
    return model if model is not None else lambda function: function


def _replace(module: Any, name: str, replacement: Any) -> Any:
    """Set module.name and return the original, which must exist: an upgrade fails here."""
    if not hasattr(module, name):
        raise RuntimeError(
            f"{module.__name__}.{name} is gone: the patches for the CPU have to be revisited"
        )
    original = getattr(module, name)
    setattr(module, name, replacement)
    return original


def _use_torch_modules() -> None:
    """Make Megatron's Transformer Engine layer spec build the modules of layers.py."""
    from megatron.core.extensions import transformer_engine_spec_provider
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.models.gpt import (
        experimental_attention_variant_module_specs,
        gpt_layer_specs,
    )
    from megatron.core.ssm.gated_delta_net import common, gdn
    from megatron.core.tensor_parallel import random as parallel_random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla

    from mcore_rl.engine.megatron import attention, delta_net, layers

    # models/common/embeddings/rope_utils.py:189 loops over the sequences of a pack.
    _replace(rope_utils, "_apply_rotary_pos_emb_thd", attention.rotate_pack)
    _replace(transformer_engine_spec_provider, "TESpecProvider", layers.TorchSpecProvider)
    gpt_layer_specs.TESpecProvider = layers.TorchSpecProvider
    gpt_layer_specs.TENorm = layers.RMSNorm
    gpt_layer_specs.HAVE_TE = True
    experimental_attention_variant_module_specs.TESpecProvider = layers.TorchSpecProvider
    # gated_delta_net/common.py:141 asks for fla, and gdn.py:214 and :242 call its kernels.
    _replace(common, "HAVE_FLA", True)
    _replace(common, "l2norm", delta_net.l2norm)
    _replace(gdn, "causal_conv1d", delta_net.causal_conv1d)
    _replace(gdn, "chunk_gated_delta_rule", delta_net.chunk_gated_delta_rule)
    # multi_latent_attention.py:525 and :572, and absorbed_mla.py:282 and :329, compare with this
    # class to find replicated projections.
    _replace(multi_latent_attention, "TELinear", layers.ReplicatedLinear)
    _replace(absorbed_mla, "TELinear", layers.ReplicatedLinear)
    # tensor_parallel/random.py:742 takes its own default, False, for float8, whose names the failed
    # import (line 87) never bound.
    parallel_random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def _keep_plain_queries() -> None:
    """Project queries without a norm where they have no latents (DeepSeek-V2-Lite, Moonlight).

    transformer/mla_qk_norm_config.py:148 builds a second norm into that projection if latents of
    keys and values have one.
    """
    from megatron.core.transformer import multi_latent_attention

    class Resolver(multi_latent_attention.QKNormConfigResolver):
        def resolve(self) -> dict[str, Any]:
            modules: dict[str, Any] = super().resolve()
            return modules if self.has_q_lora else {**modules, "linear_q_proj": self.linear_impl}

    _replace(multi_latent_attention, "QKNormConfigResolver", Resolver)


def _sum_indexer_losses() -> None:
    """Sum the losses of indexers (step.pop_indexer_loss).

    transformer/experimental_attention_variant/dsa.py:278 has them by layer of the first model of
    the process, which may have fewer layers than the next.
    """
    from megatron.core.transformer.experimental_attention_variant import dsa

    helper = dsa.DSAIndexerLossLoggingHelper

    def save(loss: torch.Tensor, *_: Any, **__: Any) -> None:
        helper.tracker["sum"] = helper.tracker.get("sum", 0) + loss.detach()

    _replace(helper, "save_loss_to_tracker", staticmethod(save))


def _replay_picked_keys() -> None:
    """Let indexers return keys of another pass (indexer_replay.py): dsa.py:563 picks them."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    from mcore_rl.engine.megatron.indexer_replay import replay_picks

    _replace(dsa, "fused_qk_topk_naive", replay_picks(dsa.fused_qk_topk_naive))


def _use_foreach_norm() -> None:
    """Keep the norm of gradients on the GPU: utils.py:1325 copies that of each one to the host."""
    from megatron.core.optimizer import clip_grads

    def compute_norm(
        chunk_size: int, flag: torch.Tensor, tensors: list[list[torch.Tensor]], per_tensor: bool
    ) -> tuple[torch.Tensor, None]:
        norms = torch._foreach_norm(tensors[0])
        return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None

    _replace(clip_grads, "l2_norm_impl", compute_norm)


def _patch_megatron() -> None:
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel import random as parallel_random
    from megatron.core.transformer.moe import token_dispatcher

    def get_state(
        device: Any = None, clone: bool = False, graph_safe: bool = False
    ) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    # tensor_parallel/random.py:303 and :318 read torch.cuda.default_generators.
    _replace(parallel_random, "_get_cuda_rng_state", get_state)
    _replace(parallel_random, "_set_cuda_rng_state", set_state)
    # moe_utils.py:1184 converts CUDA tensors only; gloo needs host lists, too.
    _replace(token_dispatcher, "maybe_move_tensor_to_cpu", _move_to_host)
    gather = _replace(mappings, "_gather_along_first_dim", None)
    mappings._gather_along_first_dim = _pad_gather(gather)


def _move_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.cpu().numpy() if torch.is_tensor(tensor) and as_numpy else tensor


def _pad_gather(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Pad the uneven parts that tensor_parallel/mappings.py:154 gathers: gloo refuses them."""

    def gather(
        input_: torch.Tensor,
        group: Any,
        output_split_sizes: Any = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return original(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        gathered = input_.new_empty((max(sizes) * len(sizes), *input_.shape[1:]))
        torch.distributed.all_gather_into_tensor(gathered, padded, group=group)
        parts = gathered.chunk(len(sizes))
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    return gather
