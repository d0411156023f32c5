"""The commands by name, from options as the command line gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from mcore_rl.config.checks import exists, one_of
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.engine.megatron.bridge import export_hf, import_hf
from mcore_rl.jobs.convert import inspect, to_hf, to_megatron, verify
from mcore_rl.jobs.convert.options import Resources, parse_bytes

BRIDGES = ("megatron-bridge",)


def hf_to_mcore(
    *,
    model: Path,
    output: Path,
    layout: Layout,
    dtype: str | None,
    workers: int | None,
    max_memory: str | None,
    bridge: str | None,
) -> int:
    exists("--model", model)
    resources = _resources(workers, max_memory)
    if bridge is not None:
        _check_bridge(
            bridge, layout=layout != Layout(), dtype=dtype, workers=workers, max_memory=max_memory
        )
        import_hf(model, output)
    else:
        to_megatron.convert(model, output, layout, dtype, resources)
    return 0


def mcore_to_hf(
    *,
    checkpoint: Path,
    output: Path,
    reference: Path | None,
    dtype: str | None,
    max_shard_size: str,
    lora: str,
    workers: int | None,
    max_memory: str | None,
    bridge: str | None,
) -> int:
    exists("--checkpoint", checkpoint)
    if reference is not None:
        exists("--reference", reference)
    resources = _resources(workers, max_memory)
    shard_bytes = parse_bytes("--max-shard-size", max_shard_size)
    if bridge is not None:
        _check_bridge(bridge, dtype=dtype, workers=workers, max_memory=max_memory)
        if reference is None:
            raise ConfigError(f"--bridge={bridge} needs --reference")
        export_hf(checkpoint, reference, output)
    else:
        to_hf.convert(checkpoint, output, reference, dtype, shard_bytes, lora, resources)
    return 0


def _check_bridge(bridge: str, **options: object) -> None:
    one_of("--bridge", bridge, BRIDGES)
    for name, value in options.items():
        if value:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} with --bridge={bridge}, which goes its own way")


def show(*, folder: Path, json: bool) -> int:
    exists("DIR", folder)
    inspect.inspect(folder, as_json=json)
    return 0


def compare(*, a: Path, b: Path, json: bool) -> int:
    for folder in (a, b):
        exists("DIR", folder)
    return 0 if verify.verify(a, b, as_json=json) else 1


def _resources(workers: int | None, max_memory: str | None) -> Resources:
    memory = None if max_memory is None else parse_bytes("--max-memory", max_memory)
    return Resources(workers, memory)


COMMANDS: Mapping[str, Callable[..., int]] = {
    "hf-to-mcore": hf_to_mcore,
    "mcore-to-hf": mcore_to_hf,
    "inspect": show,
    "verify": compare,
}
