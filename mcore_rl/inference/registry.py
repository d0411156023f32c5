"""Backends of generation servers by `backend` of their settings: a name, or an import path."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.import_path import is_import_path, load_user_class
from mcore_rl.config.packages import check_installed
from mcore_rl.config.schema import RolloutConfig, SGLangConfig
from mcore_rl.inference.protocol import GenerationServer, ServerFeatures, ServerSpec

# Of `vllm serve` on GPUs of 70 GiB and more (vllm/engine/arg_utils.py:2935).
DEFAULT_BATCHED_TOKENS = 8192
EXAMPLE = "mcore_rl.examples.hf_server:HFServer"  # of transformers alone
# Imported on use: a run with servers of a user's own needs no vLLM.
BACKENDS: Mapping[str, str] = MappingProxyType(
    {
        "vllm": "mcore_rl.inference.vllm.server:VLLMServer",
        "sglang": "mcore_rl.inference.sglang.server:SGLangServer",
    }
)


def load_server_class(settings: RolloutConfig, key: str = "rollout") -> type[GenerationServer]:
    """Return the class of a backend: that of a name, or of `path/to/file.py:MyServer`.

    Args:
        key: Name of the settings in errors.

    Raises:
        ConfigError: there is none of that name, or it is no subclass of GenerationServer.
    """
    backend = settings.backend
    if not is_import_path(backend):
        module, _, name = BACKENDS[backend].partition(":")
        server_class: type[GenerationServer] = getattr(importlib.import_module(module), name)
        return server_class
    loaded: type[GenerationServer] = load_user_class(
        f"{key}.backend", backend, GenerationServer, BACKENDS
    )
    return loaded


def create_server(spec: ServerSpec) -> GenerationServer:
    """Build the server of spec.settings.backend, or this node of it."""
    return load_server_class(spec.settings).create(spec)


def check_server_settings(
    settings: RolloutConfig, key: str = "rollout", *, device: str
) -> ServerFeatures:
    """Check the settings of servers against what their backend can do; return its features.

    Args:
        key: Name of the settings in errors.
        device: Where they run, "cpu" or "cuda".

    Raises:
        ConfigError: there is no such backend, or it does not allow a setting.
    """
    server_class = load_server_class(settings, key)
    features, backend = server_class.features, f"{key}.backend={settings.backend!r}"
    if not features.tensor_parallel and settings.tp > 1:
        raise ConfigError(f"{key}.tp={settings.tp}: a server of {backend} has one rank; allowed: 1")
    if not features.tensor_parallel and settings.ep:
        raise ConfigError(f"{key}.ep=true: a server of {backend} has one rank; allowed: false")
    if not features.data_parallel and settings.dp > 1:
        raise ConfigError(
            f"{key}.dp={settings.dp}: a server of {backend} has one data-parallel rank; allowed: 1"
        )
    if not features.multi_node and settings.nodes_per_server > 1:
        raise ConfigError(
            f"{key}.nodes_per_server={settings.nodes_per_server}: a server of {backend} runs on "
            "one node; allowed: 1"
        )
    if not features.sglang and settings.sglang != SGLangConfig():
        raise ConfigError(
            f"{key}.sglang={settings.sglang} has no part in {backend}; allowed: "
            f"{key}.backend='sglang'"
        )
    if not features.engine and settings.engine:
        other = f", or {key}.sglang.arguments" if features.sglang else ""
        raise ConfigError(
            f"{key}.engine={settings.engine} has no part in {backend}; allowed: "
            f"{key}.backend='vllm'{other}"
        )
    if not features.drafts and settings.speculative.num_tokens:
        raise ConfigError(
            f"{key}.speculative.num_tokens={settings.speculative.num_tokens} has no part in "
            f"{backend}; allowed: 0, or {key}.backend='vllm'"
        )
    server_class.check_settings(settings, key)
    server_class.check_device(settings, key, device)
    return features


def check_server_package(settings: RolloutConfig, key: str = "rollout") -> None:
    """Raise ConfigError if the package of a backend is not installed. A plan needs none."""
    package = load_server_class(settings, key).package
    check_installed(f"{key}.backend={settings.backend!r}", package, repr(EXAMPLE))


def check_adapter_rank(setting: str, rank: int, servers: RolloutConfig) -> None:
    """Raise ConfigError if servers take no adapters of a rank; `setting` begins the error."""
    highest = load_server_class(servers).features.max_adapter_rank
    if highest is not None and rank > highest:
        raise ConfigError(
            f"{setting}={rank}: servers of rollout.backend={servers.backend!r} take adapters of "
            f"rank up to {highest}; allowed: at most as much"
        )
