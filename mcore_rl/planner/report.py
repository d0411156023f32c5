"""Tables of a memory plan, its verdict, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from mcore_rl.observability.console import get_stdout_console, print_rows, show_line
from mcore_rl.planner.fixes import Fix
from mcore_rl.planner.memory import CachePlan, Conditions, MemoryLimit, MemoryPlan

WASTEFUL = 4.0  # caches of a user's size from so many times the need are named
# Columns of print_memory, and the kinds in each.
COLUMNS = {
    "weights": ("weights",),
    "grads": ("gradients",),
    "optim": ("optimizer",),
    "activ": ("activations", "logits"),
    "MoE": ("MoE dispatch",),
    "KV": ("KV cache",),
    "other": (
        "gathered weights",
        "indexer keys",
        "buffers",
        "CUDA contexts",
        "NCCL",
        "CUDA graphs",
        "workspace",
        "fragmentation",
    ),
}


def print_verdict(
    plan: MemoryPlan, device: MemoryLimit, fixes: Sequence[Fix], console: Console | None = None
) -> None:
    """Print whether a run fits, by how much, and what makes it fit."""
    console = console or get_stdout_console()
    for line in describe_verdict(plan, device, fixes):
        show_line(line, console)


def describe_verdict(plan: MemoryPlan, device: MemoryLimit, fixes: Sequence[Fix]) -> list[str]:
    """Return the lines of print_verdict."""
    worst, size = plan.worst, device.memory_bytes
    spare = size - worst.total
    where = f"{worst.name}, ranks {format_ranks(worst.ranks)} of {worst.role}"
    needs = f"{worst.total / 1e9:,.1f} of {size / 1e9:,.1f} GB of {device.name} ({where})"
    if plan.uncounted:
        needs += f", without activations of {', '.join(plan.uncounted)}"
    if spare >= 0:
        return [f"memory: fits, {needs}; {spare / 1e9:,.1f} GB are left"]
    lines = [f"memory: does not fit, {needs}; {-spare / 1e9:,.1f} GB are missing"]
    if not fixes:
        return [*lines, "no setting that was tried makes it fit: docs/planning.md lists them"]
    lines.append("it fits with any of:" if fixes[0].fits else "closest, still too large:")
    for fix in fixes:
        size_text = f"{fix.total / 1e9:,.1f} GB, {fix.cost}"
        lines.append(f"  {' '.join(fix.overrides)}  ({size_text})")
    return lines


def print_memory(plan: MemoryPlan, conditions: Conditions, console: Console | None = None) -> None:
    """Print the memory of all ranks by moment and kind, that of hosts, and of the KV cache."""
    console = console or get_stdout_console()
    for line in ("", "GB of a rank, moment by moment (docs/planning.md says what is counted):"):
        show_line(line, console)
    sizes = {
        heading: [sum(m.kinds.get(kind, 0) for kind in kinds) for m in plan.moments]
        for heading, kinds in COLUMNS.items()
    }
    sizes["all"] = [moment.total for moment in plan.moments]
    rows = [
        (moment.name + " *" * (moment is plan.worst), format_ranks(moment.ranks))
        for moment in plan.moments
    ]
    digits = 1 if plan.worst.total > 10e9 else 3
    print_sizes(("moment", "ranks"), rows, sizes, console, digits)
    worst = _format_kinds(plan.worst.kinds, digits)
    parts = _format_kinds(plan.host, digits)
    total = sum(plan.host.values()) / 1e9
    notes = [f"* the most: {worst}"]
    if parts:
        notes.append(f"host of a node: {total:,.{digits}f} GB ({parts})")
    if any(moment.kinds.get("MoE dispatch") for moment in plan.moments):
        notes.append(
            f"experts: the fullest rank has {conditions.imbalance:g} times its share of tokens"
        )
    if plan.cache is not None:
        notes += describe_cache(plan.cache)
    if plan.uncounted:
        notes.append(
            f"not counted: activations of {', '.join(plan.uncounted)}, no formulas of their engines"
        )
    for line in notes:
        show_line(line, console)


def describe_cache(cache: CachePlan) -> list[str]:
    """Return lines on the KV cache of a server: its size, what needs it, and whether it is waste.

    None for one of a size that is not known.
    """
    if not cache.num_tokens:
        return []
    line = (
        f"KV cache of a server: {cache.num_tokens:,} tokens, {cache.num_bytes:,} bytes a worker, "
        f"for {cache.num_sequences:,} sequences of {cache.sequence_tokens:,} tokens"
    )
    if cache.num_tokens < cache.num_needed:
        return [f"{line}, which wait for a place where they are longer than {cache.mean_tokens:,}"]
    if cache.is_set and (times := cache.num_tokens / cache.num_needed) > WASTEFUL:
        return [
            line,
            f"wasteful: rollout.kv_cache_bytes={cache.num_bytes} is {times:,.1f} times what these "
            "sequences need; allowed, but null takes as much as they need",
        ]
    return [line]


def _format_kinds(kinds: Mapping[str, int], digits: int) -> str:
    sizes = ((kind, size / 1e9) for kind, size in kinds.items() if size)
    return ", ".join(f"{size:,.{digits}f} {kind}" for kind, size in sizes)


def build_memory_json(
    plan: MemoryPlan, conditions: Conditions, device: MemoryLimit | None, fixes: Sequence[Fix]
) -> dict[str, Any]:
    """Return a plan as plain data; sizes are bytes."""
    moments = [
        {
            "name": moment.name,
            "role": moment.role,
            "ranks": list(moment.ranks),
            "kinds": dict(moment.kinds),
            "total": moment.total,
        }
        for moment in plan.moments
    ]
    report: dict[str, Any] = {
        "conditions": asdict(conditions),
        "moments": moments,
        "worst": plan.moments.index(plan.worst),
        "host": dict(plan.host),
        "cache_tokens": plan.cache.num_tokens if plan.cache else 0,
        "needed_cache_tokens": plan.cache.num_needed if plan.cache else 0,
        "uncounted_activations": list(plan.uncounted),
    }
    if device is not None:
        report["device"] = asdict(device)
        report["fits"] = plan.worst.total <= device.memory_bytes
        report["fixes"] = [asdict(fix) for fix in fixes]
    return report


def print_sizes(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    sizes: Mapping[str, Sequence[int]],
    console: Console,
    digits: int = 3,
) -> None:
    """Print a table of columns, then of those byte columns, in GB, that are not all zero.

    The first two columns are texts.
    """
    shown = {heading: column for heading, column in sizes.items() if any(column)}
    texts = [
        [f"{column[index] / 1e9:,.{digits}f}" if column[index] else "" for column in shown.values()]
        for index in range(len(rows))
    ]
    cells = [[*row, *numbers] for row, numbers in zip(rows, texts, strict=True)]
    print_rows([*headings, *shown], cells, console, num_texts=2)


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as ranges.

    >>> format_ranks([0, 1, 2, 6, 8, 9])
    '0-2, 6, 8-9'
    """
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ", ".join(format_range(first, last) for first, last in ranges)


def format_range(first: int, last: int) -> str:
    """Format ranks from the first to the last."""
    return str(first) if first == last else f"{first}-{last}"
