"""Conversion by NVIDIA's Megatron-Bridge, for model families that only it knows. GPU lane.

It builds the whole model on the GPUs and writes a checkpoint of its own kind, which this engine
does not load: no family of ours says what it contains (megatron/bridge/models/conversion/
auto_bridge.py of 0.6.2: import_ckpt, from_auto_config, export_ckpt).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from mcore_rl.checkpoint.hf_writer import atomic_dir
from mcore_rl.config.errors import ConfigError


def import_hf(model: Path, output: Path) -> None:
    """A Hugging Face folder as a checkpoint of Megatron-Bridge, in a new folder.

    Raises:
        ConfigError: Megatron-Bridge or a GPU is missing, or `output` exists.
    """
    bridge = _auto_bridge()
    with atomic_dir(output) as folder:
        bridge.import_ckpt(hf_model_id=str(model), megatron_path=str(folder))


def export_hf(checkpoint: Path, reference: Path, output: Path) -> None:
    """The other direction; `reference` is a Hugging Face folder of the same model.

    Raises:
        ConfigError: Megatron-Bridge or a GPU is missing, or `output` exists.
    """
    bridge = _auto_bridge().from_auto_config(str(checkpoint), str(reference))
    with atomic_dir(output) as folder:
        bridge.export_ckpt(megatron_path=str(checkpoint), hf_path=str(folder))


def _auto_bridge() -> Any:
    installed = importlib.util.find_spec("megatron.bridge") is not None
    if not installed or not torch.cuda.is_available():
        missing = "a GPU" if installed else "the package megatron-bridge"
        raise ConfigError(
            f"--bridge=megatron-bridge: {missing} is not installed; it needs GPUs and, in a "
            'separate environment, pip install "mcore-rl[bridge]"'
        )
    from megatron.bridge import AutoBridge

    return AutoBridge
