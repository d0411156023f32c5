"""The weight sync of a run, as `mcore-rl plan reshard` plans it from the run's settings."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.import_path import is_import_path
from mcore_rl.config.schema import Layout
from mcore_rl.tools.report.runs import SETTINGS_FILE, NoPlanError, Run

if TYPE_CHECKING:
    from mcore_rl.tools.plan_reshard import PlanReport, Traffic

Axes = tuple[tuple[str, Any], ...]  # of a layout, by name
MAX_CELLS = 128  # of an axis of the heatmap; of more ranks, sums over neighbours
_LAYOUT_AXES = [axis.name for axis in fields(Layout)]
_NEEDED = (
    "weight_sync.method", "model.path", "model.family", "model.dtype", "actor.backend",
    "rollout.num_servers", "rollout.tp", "rollout.dp", "rollout.ep", "rollout.lora",
    "rollout.quantization", *(f"actor.layout.{axis}" for axis in _LAYOUT_AXES),
)  # fmt: skip
_ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


def plan_traffic(run: Run) -> tuple[PlanReport, Traffic]:
    """Return what a push of the run moves, [generation ranks, training ranks] in bytes.

    Raises:
        NoPlanError: The run has no push between ranks, or its model is not here.
    """
    if run.kind != "rl":
        raise NoPlanError("no servers")
    settings = run.flat_settings
    if missing := [name for name in _NEEDED if name not in settings]:
        raise NoPlanError(f"{SETTINGS_FILE} is of another version: no {', '.join(missing)}")
    try:
        return _plan_settings(run, settings)
    except ConfigError as error:
        raise NoPlanError(str(error)) from error


def _plan_settings(run: Run, settings: Mapping[str, Any]) -> tuple[PlanReport, Traffic]:
    method, family = settings["weight_sync.method"], settings["model.family"]
    if method == "full_export" or settings["rollout.lora"] == "adapter":
        raise NoPlanError("not between ranks")
    if is_import_path(family) or settings["actor.backend"] != "megatron":
        raise NoPlanError("planned for families and ranks of Megatron here alone")
    dtype = settings["model.dtype"]
    if not isinstance(dtype, str) or dtype not in _ITEMSIZES:
        raise NoPlanError(f"model.dtype={dtype!r}")
    servers, tp, dp = (settings[f"rollout.{name}"] for name in ("num_servers", "tp", "dp"))
    layout = {axis: settings[f"actor.layout.{axis}"] for axis in _LAYOUT_AXES}
    return _plan(
        _find_model(run),
        family,
        method,
        tuple(layout.items()),
        (("tp", tp), ("dp", servers * dp), ("ep", tp * dp if settings["rollout.ep"] else 1)),
        _ITEMSIZES[dtype],
        settings["rollout.quantization"],
    )


def _find_model(run: Run) -> Path:
    """Return the folder of the run's model, of which config.json is read."""
    from mcore_rl.jobs.output import find_model_folder  # slow to import

    path = run.flat_settings["model.path"]
    return Path(path) if path else find_model_folder(str(run.folder), "RUN")


@functools.lru_cache(maxsize=16)
def _plan(
    model: Path,
    family: str,
    mode: str,
    train: Axes,
    generate: Axes,
    itemsize: int,
    quantization: str | None,
) -> tuple[PlanReport, Traffic]:
    from mcore_rl.models.base import scope_family
    from mcore_rl.reshard.layout import GenerationLayout
    from mcore_rl.tools.plan_reshard import Cluster, plan_reshard  # slow to import: torch

    layouts = Layout(**dict(train)), GenerationLayout(**dict(generate))
    with scope_family(family):
        return plan_reshard(model, mode, *layouts, Cluster(), itemsize, quantization)


def build_traffic_figure(run: Run) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return data and layout of a heatmap.

    Raises:
        NoPlanError: As `plan_traffic`.
    """
    _, traffic = plan_traffic(run)
    rows, columns = (range(0, n, -(-n // MAX_CELLS)) for n in traffic.shape)
    summed = np.add.reduceat(np.add.reduceat(traffic, [*rows], 0), [*columns], 1)
    trace = {
        "type": "heatmap",
        "x": [*map(str, columns)],
        "y": [*map(str, rows)],
        "z": (summed / 1e9).tolist(),
        "zmin": 0,
        "zmax": float(summed.max()) / 1e9,
        "colorscale": "Viridis",
        "colorbar": {"title": {"text": "GB"}},
    }
    layout = {
        "xaxis": {"title": {"text": "training rank"}, "type": "category"},
        "yaxis": {"title": {"text": "generation rank"}, "type": "category"},
    }
    return [trace], layout


def summarize_traffic(run: Run) -> str:
    """Return the bytes of a push in words, or why they are not known."""
    try:
        report, _ = plan_traffic(run)
    except NoPlanError as error:
        return f"no plan: {error}"
    moved, local = report.received_bytes / 1e9, report.same_gpu_bytes / 1e9
    return f"{moved:,.4g} GB between devices, {local:,.4g} GB inside of them"
