"""Moving a training engine's memory between its device and the host, by Megatron's own means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel

from mcore_rl.config.errors import ConfigError
from mcore_rl.engine.megatron.device import device_name


def move(
    chunks: Sequence[Any],
    optimizer: Any,
    device: str,
    *,
    parameters: bool,
    optimizer_state: bool,
    grad: bool,
) -> None:
    """Move what is asked for to "cpu" or to the engine's device.

    Raises:
        ConfigError: `device` is neither.
    """
    home = device_name()
    if device not in ("cpu", home):
        raise ConfigError(f"engine.to({device!r}): allowed: 'cpu', {home!r}")
    if home == "cpu":  # host and device are one
        return
    buffers = [
        buffer
        for chunk in chunks
        if isinstance(chunk, DistributedDataParallel)
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    # Parameters live in the buffers only when the optimizer is distributed.
    if parameters and all(buffer.param_data is None for buffer in buffers):
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.data = parameter.data.to(device)
    for buffer in buffers:
        if device == "cpu":
            buffer.offload_to_cpu(move_params=parameters, move_grads=grad)
        else:
            buffer.reload_from_cpu(move_params=parameters, move_grads=grad)
    if optimizer is not None and optimizer_state:
        if device == "cpu":
            optimizer.offload_to_cpu()
        else:
            optimizer.restore_from_cpu()
