"""Memory of the ranks of a run beside what `mcore-rl plan memory` says of its settings."""

from __future__ import annotations

import functools
import html
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.import_path import refuse_imports
from mcore_rl.config.schema import JOB_SCHEMAS, RLConfig, TrainConfig
from mcore_rl.observability.memory import GPU_MEMORY
from mcore_rl.tools.report.runs import SETTINGS_FILE, NoPlanError, Run, to_finite

if TYPE_CHECKING:
    from mcore_rl.planner.memory import MemoryPlan, Moment

# Kinds of a plan that torch's allocator does not hold.
_OUTSIDE = ("CUDA contexts", "NCCL", "CUDA graphs")
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1")
_ALLOCATED, _RESERVED = "max_allocated_bytes", "max_reserved_bytes"
_NO_PEAK = "no recorded peak: torch counts no memory of ranks on a CPU"


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of ranks whose plans are equal, in bytes of the fullest."""

    label: str
    planned: Mapping[str, int]  # by kind, at the fullest moment; of torch's allocator alone
    allocated: int | None  # highest in the run; None: not recorded
    reserved: int | None

    @property
    def planned_bytes(self) -> int:
        return sum(self.planned.values())


def compare_memory(run: Run) -> list[RankMemory]:
    """Return the memory of the ranks of each model, as planned and as recorded.

    Raises:
        NoPlanError: The run is not planned.
    """
    if run.kind not in JOB_SCHEMAS:
        raise NoPlanError(f"mcore-rl plan memory plans runs of {', '.join(JOB_SCHEMAS)} alone")
    recorded = _read_peaks(run)
    device_type = "cuda" if recorded else "cpu"
    where = str(run.folder / SETTINGS_FILE)
    plan = _plan(json.dumps(run.settings, sort_keys=True), where, run.kind, device_type)
    if isinstance(plan, str):
        raise NoPlanError(plan)
    return [*_match(plan, recorded)]


def _read_peaks(run: Run) -> dict[str, dict[str, Any]]:
    """Return the peaks of each role: those of each rank once the run has ended, else the highest.

    Metrics have the highest so far of the ranks of the last attempt. Empty for a run without GPUs.
    """
    if peaks := run.summary.get(GPU_MEMORY):
        return dict(peaks)
    by_role: dict[str, dict[str, Any]] = {}
    for row in run.rows:
        for name, value in row.items():
            group, _, rest = name.partition("/")
            role, _, kind = rest.rpartition("/")
            if group == GPU_MEMORY and (peak := to_finite(value)) is not None:
                by_role.setdefault(role, {})[kind] = [peak]
    return by_role


@functools.lru_cache(maxsize=16)
def _plan(settings: str, where: str, kind: str, device_type: str) -> MemoryPlan | str:
    """Plan settings, as JSON; return why there is no plan, if there is none.

    The run may be of somebody else: no code of it is imported, nothing is fetched.
    """
    from mcore_rl.cli.compose import compose_recorded  # slow to import: Hydra, torch
    from mcore_rl.jobs.remote_paths import check_is_local
    from mcore_rl.planner.memory import Conditions
    from mcore_rl.planner.memory_check import check_memory, prepare_plan

    schema: type[RLConfig] | type[TrainConfig] = JOB_SCHEMAS[kind]
    try:
        with refuse_imports():
            config = compose_recorded(schema, json.loads(settings), where)
            check_is_local(config)
            with prepare_plan(config, device_type) as (prepared, model):
                return check_memory(prepared, model, Conditions(device_type), None).plan
    except ConfigError as error:
        return str(error)


def _match(plan: MemoryPlan, recorded: Mapping[str, Mapping[str, Any]]) -> Sequence[RankMemory]:
    skipped = {role.name for role in plan.roles if role.has_servers} | {"warm_start"}
    fullest: dict[tuple[str, int], int] = {}  # moment of each rank: equal in one, not in another
    for index, moment in enumerate(plan.moments):
        if not moment.name.startswith(f"{moment.role}: ") or moment.role in skipped:
            continue  # of two processes, of servers, or of earlier processes
        for key in ((moment.role, rank) for rank in moment.ranks):
            best = fullest.setdefault(key, index)
            if _count_tensors(moment) > _count_tensors(plan.moments[best]):
                fullest[key] = index
    ranks_by_moment = defaultdict[int, list[int]](list)
    for (_, rank), index in fullest.items():
        ranks_by_moment[index].append(rank)
    moments = ((plan.moments[index], ranks) for index, ranks in ranks_by_moment.items())
    return [
        RankMemory(
            f"{moment.name}, {_format_ranks(ranks)}",
            _select_tensors(moment),
            _get_peak(recorded.get(moment.role, {}).get(_ALLOCATED), ranks),
            _get_peak(recorded.get(moment.role, {}).get(_RESERVED), ranks),
        )
        for moment, ranks in moments
    ]


def _get_peak(peaks: Sequence[int] | None, ranks: Sequence[int]) -> int | None:
    """Return the highest peak of these ranks; of all where each one's is not known."""
    if not peaks:
        return None
    known = [peaks[rank] for rank in ranks if rank < len(peaks)]
    return max(known or peaks)


def _select_tensors(moment: Moment) -> dict[str, int]:
    return {kind: size for kind, size in moment.kinds.items() if size and kind not in _OUTSIDE}


def _count_tensors(moment: Moment) -> int:
    return sum(_select_tensors(moment).values())


def _format_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks from {min(ranks)} on"


def build_memory_figure(run: Run) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return data and layout of bars: the plan by kind, and what was recorded, if something was.

    Raises:
        NoPlanError: As `compare_memory`.
    """
    rows = compare_memory(run)
    labels = [html.escape(row.label) for row in rows]
    kinds = dict.fromkeys(kind for row in rows for kind in row.planned)
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": kind,
            "meta": {"label": kind},
            "x": [row.planned.get(kind, 0) / 1e9 for row in rows],
            "y": labels,
            "offsetgroup": "plan",
            "marker": {"color": _COLORS[index % len(_COLORS)]},
        }
        for index, kind in enumerate(kinds)
    ]
    for name, symbol in (("allocated", "line-ns-open"), ("reserved", "diamond-open")):
        sizes = [getattr(row, name) for row in rows]
        if any(size is not None for size in sizes):
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": f"recorded, {name}",
                    "meta": {"label": f"recorded, {name}"},
                    "x": [None if size is None else size / 1e9 for size in sizes],
                    "y": labels,
                    "marker": {"symbol": symbol, "size": 14, "line": {"width": 3}},
                }
            )
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "GB of a rank"}},
        "yaxis": {"title": {"text": ""}, "type": "category", "autorange": "reversed"},
    }
    return data, layout


def summarize_memory(run: Run) -> str:
    """Return recorded and planned memory of the fullest ranks in words, or why it is not known."""
    try:
        rows = compare_memory(run)
    except NoPlanError as error:
        peaks = [max(kinds.get(_ALLOCATED) or [0]) for kinds in _read_peaks(run).values()]
        recorded = f"{max(peaks) / 1e9:,.3g} GB allocated" if peaks else _NO_PEAK
        return f"{recorded}; no plan: {error}"
    worst = max(rows, key=lambda row: row.planned_bytes)
    planned = f"{worst.planned_bytes / 1e9:,.3g} GB planned ({worst.label})"
    if worst.allocated is None:
        return f"{_NO_PEAK}; {planned}"
    share = worst.allocated / worst.planned_bytes
    return f"{worst.allocated / 1e9:,.3g} GB allocated, {share:.0%} of {planned}"
