"""The commands by name, from options as the command line gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mcore_rl.config.checks import check_choice, check_exists
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.engine.megatron.bridge import export_hf, import_hf
from mcore_rl.jobs.convert import inspect, to_hf, to_megatron, verify
from mcore_rl.jobs.convert.options import Resources, parse_bytes

BRIDGES = ("megatron-bridge",)


def hf_to_mcore(*, model: Path, output: Path, layout: Layout, **options: Any) -> int:
    check_exists("--model", model)
    resources, dtype = _resources(**options), options["dtype"]
    if _asks_for_bridge({"layout": layout != Layout(), **options}):
        import_hf(model, output)
    else:
        to_megatron.convert(model, output, layout, dtype, resources)
    return 0


def mcore_to_hf(
    *,
    checkpoint: Path,
    output: Path,
    reference: Path | None,
    max_shard_size: str,
    lora: str,
    **options: Any,
) -> int:
    check_exists("--checkpoint", checkpoint)
    if reference is not None:
        check_exists("--reference", reference)
    resources, dtype = _resources(**options), options["dtype"]
    shard_bytes = parse_bytes("--max-shard-size", max_shard_size)
    if not _asks_for_bridge(options):
        to_hf.convert(checkpoint, output, reference, dtype, shard_bytes, lora, resources)
    elif reference is None:
        raise ConfigError(f"--bridge={options['bridge']} needs --reference")
    else:
        export_hf(checkpoint, reference, output)
    return 0


def _asks_for_bridge(options: Mapping[str, Any]) -> bool:
    if options["bridge"] is None:
        return False
    check_choice("--bridge", options["bridge"], BRIDGES)
    for name, value in options.items():
        if value and name != "bridge":
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} with --bridge={options['bridge']}, which does not use it")
    return True


def show(*, folder: Path, json: bool) -> int:
    check_exists("DIR", folder)
    inspect.inspect(folder, as_json=json)
    return 0


def compare(*, a: Path, b: Path, json: bool) -> int:
    for folder in (a, b):
        check_exists("DIR", folder)
    return 0 if verify.verify(a, b, as_json=json) else 1


def _resources(*, workers: int | None, max_memory: str | None, **_: Any) -> Resources:
    memory = None if max_memory is None else parse_bytes("--max-memory", max_memory)
    return Resources(workers, memory)


COMMANDS: Mapping[str, Callable[..., int]] = {
    "hf-to-mcore": hf_to_mcore,
    "mcore-to-hf": mcore_to_hf,
    "inspect": show,
    "verify": compare,
}
