"""The cost of a reshard: the plan's bytes, the lower bound, and the bytes of gather-then-slice.

Needs a config.json and two layouts; no weights, no GPU, no process group.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import mcore_rl.models  # noqa: F401  (fills the registry of families)
from mcore_rl.config.allowed import QUANTIZATIONS
from mcore_rl.config.checks import (
    check_at_least,
    check_choice,
    check_divides,
    check_model_exists,
    check_positive,
)
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules_engine import validate_layout, validate_model_layout
from mcore_rl.config.schema import Layout
from mcore_rl.models.base import (
    HFConfig,
    get_family,
    get_model_sizes,
    pad_vocab_size,
    read_config,
    read_config_file,
)
from mcore_rl.observability.console import get_stdout_console
from mcore_rl.parallel.mesh import Mesh, split_into_chunks
from mcore_rl.reshard.layout import GenerationLayout, TrainingRanks
from mcore_rl.reshard.planner import Devices, Plan, Side, TransferRequirements, assign_hosts
from mcore_rl.weight_sync.spec import add_training_scales, build_generation_side

Traffic = NDArray[np.int64]
MODES = ("colocated", "disaggregated")
BUCKET_BYTES = 256 << 20  # of one of the two buckets of a rank


@dataclass(frozen=True, slots=True)
class Cluster:
    """Links between the devices; rates are those of one device in one direction."""

    gpus_per_node: int = 8
    nic_gbps: float = 400.0  # gigabits a second, to other nodes
    nvlink_gbps: float = 3600.0  # gigabits a second, inside a node
    nodes: int | None = None  # None: as many as the ranks need

    def __post_init__(self) -> None:
        check_at_least("--gpus-per-node", self.gpus_per_node, 1)
        check_positive("--nic-gbps", self.nic_gbps)
        check_positive("--nvlink-gbps", self.nvlink_gbps)


@dataclass(frozen=True, slots=True)
class RankReport:
    """Bytes of one generation rank."""

    rank: int
    received_bytes: int  # from other devices
    lower_bound_bytes: int  # |needed| - |needed AND held|
    local_bytes: int  # from its own device


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Fields ending in _bytes are sums over generation ranks unless they say otherwise."""

    mode: str
    train: Layout
    generate: GenerationLayout
    received_bytes: int
    lower_bound_bytes: int
    gather_then_slice_bytes: int  # every rank takes in every tensor that its device lacks
    same_gpu_bytes: int
    in_node_bytes: int
    across_nodes_bytes: int
    busiest_sender_rank: int  # training rank
    busiest_sender_bytes: int
    peak_buffer_bytes: int  # staging of the fullest rank: two buckets
    plan_s: float
    predicted_s: float  # by the busiest link
    gather_then_slice_predicted_s: float
    ranks: tuple[RankReport, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan_reshard(
    model: Path,
    mode: str,
    train: Layout,
    generate: GenerationLayout,
    cluster: Cluster,
    itemsize: int = 2,
    quantization: str | None = None,
) -> tuple[PlanReport, Traffic]:
    """Return the report, and the traffic [generation ranks, training ranks] in bytes.

    `model` is a Hugging Face folder or a config.json. `itemsize` is that of a weight as it is sent,
    except for codes and scales of `quantization` (rollout.quantization).

    Raises:
        ConfigError: A layout does not fit the model, or the ranks do not fit the cluster.
    """
    check_choice("--mode", mode, MODES)
    if quantization is not None:
        check_choice("--quantization", quantization, QUANTIZATIONS)
    config = _read_model_config(model)
    _check_layouts(config, train, generate)
    start = time.perf_counter()
    demand = _build_requirements(config, train, generate, itemsize, quantization)
    devices = _place_devices(mode, demand.compute_overlap(), cluster)
    plan = demand.plan(devices)
    plan_s = time.perf_counter() - start
    traffic = _count_traffic(plan)
    # A single generation rank needs the whole model, and overlaps with all that a device holds.
    whole_model = _build_requirements(config, train, GenerationLayout(), itemsize, quantization)
    gathered = int(whole_model.compute_needed()[0]) - _select_local(
        whole_model.compute_overlap()[0], devices
    )
    same_device, _ = _compare_devices(devices)
    bound = demand.compute_needed() - np.where(same_device, demand.compute_overlap(), 0).sum(axis=1)
    totals, sent = plan.compute_totals(), np.where(same_device, 0, traffic).sum(axis=0)
    report = PlanReport(
        mode=mode,
        train=train,
        generate=generate,
        received_bytes=sum(totals.received),
        lower_bound_bytes=int(bound.sum()),
        gather_then_slice_bytes=int(gathered.sum()),
        same_gpu_bytes=sum(totals.local),
        in_node_bytes=totals.in_node,
        across_nodes_bytes=sum(totals.received) - totals.in_node,
        busiest_sender_rank=int(sent.argmax()),
        busiest_sender_bytes=int(sent.max()),
        peak_buffer_bytes=2 * BUCKET_BYTES,
        plan_s=round(plan_s, 3),
        predicted_s=_predict_seconds(traffic, devices, cluster),
        gather_then_slice_predicted_s=_predict_gather_seconds(gathered, devices, cluster),
        ranks=tuple(
            RankReport(rank, totals.received[rank], int(bound[rank]), totals.local[rank])
            for rank in range(len(devices.generation))
        ),
    )
    return report, traffic


def _count_traffic(plan: Plan) -> Traffic:
    """Return bytes [generation ranks, training ranks], those inside a device included."""
    traffic = np.zeros((len(plan.devices.generation), len(plan.devices.training)), np.int64)
    for source, target, num_bytes in plan.list_transfers():
        traffic[target, source] += num_bytes
    return traffic


def _read_model_config(model: Path) -> HFConfig:
    check_model_exists("--model", model)
    config = read_config_file(model) if model.is_file() else read_config(model)
    # Blocks of fp8 are dequantised.
    return {name: value for name, value in config.items() if name != "quantization_config"}


def _check_layouts(config: HFConfig, train: Layout, generate: GenerationLayout) -> None:
    sizes = get_model_sizes(config)
    validate_layout("--train", train)
    validate_model_layout("--train", train, sizes)
    key = "--generate tp"
    check_divides(key, generate.tp, "attention heads", sizes.num_attention_heads)
    if generate.tp > sizes.num_query_groups and not sizes.is_mla:  # each head on several ranks
        check_divides("the model's key/value heads", sizes.num_query_groups, "ranks", generate.tp)
    for size in sizes.ffn_sizes:
        check_divides(key, generate.tp, "MLP columns", size)
    if generate.ep == 1 and sizes.num_experts:
        check_divides(key, generate.tp, "columns of an expert", sizes.expert_ffn_size)
    check_at_least("the model's layers", sizes.num_layers, generate.pp)
    if generate.ep > max(1, sizes.num_experts):
        raise ConfigError(
            f"--generate ep={generate.ep}: the model has {sizes.num_experts} experts; allowed: up "
            f"to {max(1, sizes.num_experts)}"
        )


def _build_requirements(
    config: HFConfig,
    train: Layout,
    generate: GenerationLayout,
    itemsize: int,
    quantization: str | None,
) -> TransferRequirements:
    family, sizes = get_family(config), get_model_sizes(config)
    chunks = split_into_chunks(train, sizes.num_layers)
    training = TrainingRanks(Mesh(train), chunks, sizes.num_experts)
    try:
        _, generation = build_generation_side(config, generate, quantization=quantization)
    except ConfigError as error:
        if quantization is None:
            raise
        raise ConfigError(
            f"--quantization={quantization!r}: {error}; allowed: not to give it"
        ) from None
    # Prediction layers are not served.
    rules = [
        w for w in family.weights(config, pad_vocab_size(config, train.tp)) if w.stage != "mtp"
    ]
    side: Side = training, rules
    if quantization is not None:
        side = add_training_scales(side)
    return TransferRequirements(side, generation, itemsize)


def _place_devices(mode: str, overlap: Traffic, cluster: Cluster) -> Devices:
    num_generation, num_training = overlap.shape
    if mode == "colocated":
        hosts = assign_hosts(overlap)
        devices = Devices.colocated(hosts, num_training, cluster.gpus_per_node)
        count = num_training
    else:
        devices = Devices.disaggregated(num_training, num_generation, cluster.gpus_per_node)
        count = num_training + num_generation
    if cluster.nodes is not None and count > cluster.nodes * cluster.gpus_per_node:
        raise ConfigError(
            f"--nodes={cluster.nodes} of {cluster.gpus_per_node} GPUs for {count} devices; "
            f"allowed: at least {-(-count // cluster.gpus_per_node)}"
        )
    return devices


def _select_local(held: Traffic, devices: Devices) -> Traffic:
    """Return for each generation rank the entry of `held` for its device's training rank, else 0.

    `held` is [training ranks] in bytes.
    """
    by_device = dict(zip(devices.training, held.tolist(), strict=True))
    return np.array([by_device.get(device, 0) for device in devices.generation], np.int64)


def _compare_devices(devices: Devices) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return whether two ranks share a device and a node: [generation ranks, training ranks]."""
    sources, targets = np.array(devices.training), np.array(devices.generation)[:, None]
    return sources == targets, sources // devices.per_node == targets // devices.per_node


def _predict_seconds(traffic: Traffic, devices: Devices, cluster: Cluster) -> float:
    """Return the time of the busiest link, each at its rate in both directions at once."""
    same_device, same_node = _compare_devices(devices)
    slowest = 0.0
    for part, gbps in (
        (np.where(same_node & ~same_device, traffic, 0), cluster.nvlink_gbps),
        (np.where(same_node, 0, traffic), cluster.nic_gbps),
    ):
        busiest = max(int(part.sum(axis=0).max()), int(part.sum(axis=1).max()))
        slowest = max(slowest, busiest * 8e-9 / gbps)
    return slowest


def _predict_gather_seconds(gathered: Traffic, devices: Devices, cluster: Cluster) -> float:
    """Return the time in which each rank receives the rest of the model over the slowest link."""
    num_nodes = len({devices.get_node(d) for d in (*devices.training, *devices.generation)})
    gbps = cluster.nic_gbps if num_nodes > 1 else cluster.nvlink_gbps
    return float(gathered.max()) * 8e-9 / gbps


def print_report(report: PlanReport, console: Console | None = None) -> None:
    """Print a report as a table."""
    console = console or get_stdout_console()
    table = Table(
        title=f"{report.mode}: {_format_axes(report.train)} -> {_format_axes(report.generate)}"
    )
    table.add_column("")
    table.add_column("planned", justify="right")
    table.add_column("gather-then-slice", justify="right")
    ratio = report.received_bytes / max(1, report.lower_bound_bytes)
    for name, planned, gathered in (
        ("received", _format_gb(report.received_bytes), _format_gb(report.gather_then_slice_bytes)),
        ("lower bound", _format_gb(report.lower_bound_bytes), ""),
        ("received / lower bound", f"{ratio:.3f}", ""),
        ("on the same GPU", _format_gb(report.same_gpu_bytes), ""),
        ("inside a node", _format_gb(report.in_node_bytes), ""),
        ("across nodes", _format_gb(report.across_nodes_bytes), ""),
        (
            f"busiest sender: {report.busiest_sender_rank}",
            _format_gb(report.busiest_sender_bytes),
            "",
        ),
        ("most a rank receives", _format_gb(max(rank.received_bytes for rank in report.ranks)), ""),
        ("buffers of a rank", _format_gb(report.peak_buffer_bytes), ""),
        (
            "predicted",
            f"{report.predicted_s:.3f} s",
            f"{report.gather_then_slice_predicted_s:.3f} s",
        ),
        ("the plan itself", f"{report.plan_s:.3f} s", ""),
    ):
        table.add_row(name, planned, gathered)
    console.print(table)


def _format_axes(layout: Layout | GenerationLayout) -> str:
    sizes = asdict(layout)
    return " ".join(f"{axis}={size}" for axis, size in sizes.items() if size not in (1, None))


def _format_gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.3f} GB"
