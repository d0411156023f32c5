"""Which device Megatron runs on, with whose modules, and all that makes it run on a CPU.

The CPU lane runs real Megatron-core over gloo. Megatron names "cuda" in hundreds of places, so
engine code is written for CUDA (`torch.cuda.current_device()`), and without a GPU
`install()` makes them use the CPU. Every patch names the upstream file:line
(megatron/core of 0.16.1) that it corrects, and asserts that the symbol it replaces is still there.
"""

from __future__ import annotations

import contextlib
import functools
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
from mcore_rl.engine.lane import lane
from mcore_rl.observability.process import exempt_imports_from_gc
from mcore_rl.parallel.store import guard_gloo

_CPU = torch.device("cpu")
MEGATRON_CORE = "0.16.1"  # the one version that the patches below, and the engine, were run on
_cuda: torch.device | None = None  # what "cuda" means in the CPU lane; None: not that lane
_modules = "torch"  # whose modules install() has put into Megatron's layers


def device_name() -> str:
    """The lane: "cuda" when a GPU is visible and the CPU's was not asked for, else "cpu"."""
    return lane() if _cuda is None else "cpu"


def collective_backend() -> str:
    return "nccl" if device_name() == "cuda" else "gloo"


def chosen_modules(asked: str, device: str = "", setting: str = "actor.modules") -> str:
    """Whose modules the layers are made of: "te", Transformer Engine's, or "torch", our own.

    `asked` is EngineConfig.modules; "auto" takes Transformer Engine's on a GPU where it is
    installed. `device` is "cuda" or "cpu" where ranks run on other nodes; what is installed there,
    they see for themselves. Raises ConfigError, which names `setting`, where "te" is asked for and
    cannot be had.
    """
    has_gpu = (device or device_name()) == "cuda"
    names = "transformer_engine", "transformer_engine_torch"
    is_elsewhere = device not in ("", device_name())
    is_installed = is_elsewhere or all(importlib.util.find_spec(name) for name in names)
    if asked == "te" and not (has_gpu and is_installed):
        missing = "transformer-engine[pytorch], which is not installed" if has_gpu else "a GPU"
        raise ConfigError(f"{setting}='te' needs {missing}; allowed: 'auto', 'torch'")
    return "te" if asked != "torch" and has_gpu and is_installed else "torch"


def rank_environment(layout: Layout, device: str) -> dict[str, str]:
    """Variables that the process of a training rank on "cuda" or "cpu" must be started with.

    Megatron counts on kernels starting in the order in which they were sent, where tensor- or
    context-parallel messages are under way beside them (tensor_parallel/layers.py:526). Before
    Blackwell that takes a single queue to the GPU, and CUDA reads the variable once. A driver
    without a GPU cannot tell which GPUs ranks have, and takes the single queue, which is right on
    all; a variable that is set there counts.
    """
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if device == "cpu" or layout.tp == layout.cp == 1 or name in os.environ:
        return {}
    is_blackwell = device_name() == "cuda" and torch.cuda.get_device_capability()[0] >= 10
    return {} if is_blackwell else {name: "1"}


def config_flags() -> dict[str, Any]:
    """TransformerConfig arguments that differ: kernels of CUDA, and those of Transformer Engine."""
    fused = device_name() == "cuda"
    return {
        # Transformer Engine's products add in place (model.py, fuse_weight_gradients), without the
        # flag. Told which micro-batch is the first, they would overwrite the sum of earlier calls
        # with its gradient (module/linear.py:1231 of 2.20), so Megatron does not tell them: what
        # else it is told for are weights in float8 (extensions/transformer_engine.py:672).
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
    """Prepare this process for Megatron; without a GPU, put the CPU in CUDA's place.

    `modules` are EngineConfig's. `on_cpu` takes the CPU lane even where there is a GPU. The process
    then stays in that lane. Raises ConfigError for a Megatron-core of another version, and for a
    Transformer Engine that is wanted and not there or does not import.
    """
    global _cuda, _modules
    torch.set_num_threads(num_threads)
    _quiet()
    if _cuda is not None:
        return
    if device_name() == "cuda" and not on_cpu:
        _modules = chosen_modules(modules)
        if _modules == "te":
            _import_transformer_engine()
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        _check_megatron()
        if _modules == "torch":
            _use_torch_modules()
        return
    _cuda = _CPU
    _patch_torch()
    _patch_torch_cuda()
    guard_gloo()
    with exempt_imports_from_gc():
        _check_megatron()  # imports Megatron
        chosen_modules(modules)
        _patch_megatron()
        _use_torch_modules()


def _import_transformer_engine() -> None:
    """Megatron itself continues without one that does not import, and fails much later."""
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"Transformer Engine is installed and does not import ({error}); make .venv again with "
            "launch/setup_env.sh, or set actor.modules='torch'"
        ) from error


def _check_megatron() -> None:
    from megatron.core import package_info

    found = package_info.__version__
    if found != MEGATRON_CORE:
        raise ConfigError(f"megatron-core {found} is installed; supported: {MEGATRON_CORE}")


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Inside, "cuda" means torch's meta device: models have shapes and no memory. CPU lane only."""
    global _cuda
    if _cuda is None:
        raise RuntimeError("without_memory() before install() of the CPU lane")
    _cuda = torch.device("meta")
    try:
        yield
    finally:
        _cuda = _CPU


def _quiet() -> None:
    """Megatron warns at import about every optional kernel that is absent; on the CPU all are."""
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    logging.getLogger("megatron").setLevel(logging.ERROR)


def _patch_torch() -> None:
    """device="cuda" becomes the CPU, .cuda() the tensor itself, pinned memory plain memory.

    The spellings are replaced one by one, and not by a torch function mode, which would look at
    every operation: 5 to 8 % of the time of a rank with a small model. One that is missed ends in
    torch's own error, that it was not compiled with CUDA.
    """
    # Cached: `with torch.device(...)` goes by the functions themselves, and not by what wraps them.
    _device._device_constructors()
    # optimizer/optimizer.py:473, clip_grads.py:103, pipeline_parallel/schedules.py:596,
    # transformer/utils.py:35, models/common/embeddings/rope_utils.py:62.
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange"):
        _replace(torch, name, _made_here(getattr(torch, name)))
    # optimizer/optimizer.py:375, models/common/embeddings/rope_utils.py:64
    _replace(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor)
    original = torch.Tensor.type

    def spelled(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """optimizer/clip_grads.py:167 and distrib_optimizer.py:361 compare with CUDA's spelling."""
        if args or kwargs:
            return original(tensor, *args, **kwargs)
        return original(tensor).replace("torch.", "torch.cuda.", 1)

    _replace(torch.Tensor, "type", spelled)


def _made_here(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _cuda
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


class _NullStream:
    """Replaces a CUDA stream or event where all work is synchronous."""

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
        "current_device": lambda: _cuda,  # tensor_parallel/layers.py:261 and 174 more
        "synchronize": lambda *_, **__: None,  # pipeline_parallel/p2p_communication.py:242
        "empty_cache": lambda: None,
        "current_stream": lambda *_, **__: null,  # transformer/moe/token_dispatcher.py:871
        "default_stream": lambda *_, **__: null,
        "Stream": _NullStream,  # transformer/moe/token_dispatcher.py:445
        "Event": _NullStream,
        "stream": stream,
        # The "CUDA" generator is the CPU's, or seeds are lost: tensor_parallel/random.py:55.
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "manual_seed": torch.default_generator.manual_seed,
    }
    for name, replacement in replacements.items():
        _replace(torch.cuda, name, replacement)
    # jit_fuser is torch.compile (megatron/core/jit.py:20), which buys nothing at this size, costs a
    # compiler, and half of the time that importing Megatron takes.
    _replace(torch, "compile", _not_compiled)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if "megatron.core.jit" in sys.modules:
        torch.compiler.set_stance("force_eager")


def _not_compiled(model: Any = None, **_: Any) -> Any:
    """torch.compile, as a function and as a decorator with arguments, without compiling."""
    return model if model is not None else lambda function: function


def _replace(module: Any, name: str, replacement: Any) -> Any:
    """Set module.name, which must exist: an upgrade that moves it must fail here."""
    if not hasattr(module, name):
        raise RuntimeError(f"{module.__name__}.{name} is gone: the CPU lane has to be revisited")
    original = getattr(module, name)
    setattr(module, name, replacement)
    return original


def _use_torch_modules() -> None:
    """One layer spec in any case: Transformer Engine's, over modules with its parameter names."""
    from megatron.core.extensions import transformer_engine_spec_provider
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    from mcore_rl.engine.megatron import layers

    _replace(transformer_engine_spec_provider, "TESpecProvider", layers.TorchSpecProvider)
    gpt_layer_specs.TESpecProvider = layers.TorchSpecProvider
    gpt_layer_specs.TENorm = layers.RMSNorm
    gpt_layer_specs.HAVE_TE = True
    # multi_latent_attention.py:408 and :453 ask by this name which projections are replicated.
    _replace(multi_latent_attention, "TELinear", layers.ReplicatedLinear)
    # moe_utils.py:1192 reads a name that a failed import (line 20) never bound.
    moe_utils.te_general_gemm = None


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

    # tensor_parallel/random.py:235 and :250 reach for torch.cuda.default_generators
    _replace(parallel_random, "_get_cuda_rng_state", get_state)
    _replace(parallel_random, "_set_cuda_rng_state", set_state)
    # moe_utils.py:1093 turns only CUDA tensors into the host lists that gloo needs, too.
    _replace(token_dispatcher, "maybe_move_tensor_to_cpu", _to_host)
    gather = _replace(mappings, "_gather_along_first_dim", None)
    mappings._gather_along_first_dim = _even_gather(gather)


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.cpu().numpy() if torch.is_tensor(tensor) and as_numpy else tensor


def _even_gather(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """tensor_parallel/mappings.py:150 gathers an uneven list, which gloo refuses: pad it."""

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
