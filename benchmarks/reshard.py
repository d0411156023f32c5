"""Weight exchange compared with alternatives, on ranks of this machine over gloo.

Two comparisons, of a model with random weights: into vLLM's layout, against gathering every tensor
whole on every rank and slicing it, one tensor at a time and in buckets; and between two layouts of
Megatron, against Megatron's own resharding. Candidates alternate, so that other load of the machine
affects all. Every rank checks that all of them give the same bits, and counts the bytes that arrive
at its sockets.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

import mcore_rl.models  # noqa: F401  (fills the registry of families)
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules_engine import validate_layout, validate_model_layout
from mcore_rl.config.schema import Layout
from mcore_rl.jobs.failure import RunFailed
from mcore_rl.jobs.ranks import ProcessFailed, run_on_ranks
from mcore_rl.models.base import (
    HFConfig,
    get_family,
    get_model_sizes,
    get_vllm_weights,
    pad_vocab_size,
)
from mcore_rl.observability.console import get_stdout_console
from mcore_rl.parallel.mesh import Mesh, split_into_chunks
from mcore_rl.reshard import ops
from mcore_rl.reshard.buckets import schedule
from mcore_rl.reshard.executor import Exchange, GroupTransport, LocalWeights
from mcore_rl.reshard.layout import GenerationLayout, GenerationRanks, Ranks, TrainingRanks
from mcore_rl.reshard.planner import Devices, Side, TransferRequirements, assign_hosts
from mcore_rl.reshard.rules import Block, Shard, Weight

DTYPE = torch.bfloat16
Parameters = dict[str, torch.Tensor]
_TIMEOUT_S = 300.0
Candidate = Callable[[], None]
_MIB = 1 << 20
_RECEIVED_AT, _TCP_INFO_BYTES = 128, 136  # tcpi_bytes_received in struct tcp_info, <linux/tcp.h>


@dataclass(frozen=True, slots=True)
class ReshardSettings:
    train: Layout
    generate: GenerationLayout
    target: Layout  # of Megatron, for the comparison with its own resharding
    num_layers: int = 6
    bucket_bytes: int = 8 * _MIB
    repetitions: int = 7
    timeout_s: float = 3600.0

    def build_config(self) -> dict[str, Any]:
        """Return the model: a mixture of experts, 57 MB a layer and 67 MB outside, in bfloat16."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 16384, "hidden_size": 1024,
            "num_hidden_layers": self.num_layers, "num_attention_heads": 16, "head_dim": 64,
            "num_key_value_heads": 4, "num_experts": 16, "num_experts_per_tok": 2,
            "moe_intermediate_size": 512, "intermediate_size": 2048, "rms_norm_eps": 1e-6,
            "rope_theta": 1e4, "hidden_act": "silu", "tie_word_embeddings": False,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip

    def check(self) -> None:
        """Raise ConfigError for layouts that do not fit the model or each other."""
        sizes = get_model_sizes(self.build_config())
        for name, layout in (("--train", self.train), ("--target", self.target)):
            validate_layout(name, layout)
            validate_model_layout(name, layout, sizes)
            if layout.vpp > 1:
                raise ConfigError(f"{name}: vpp={layout.vpp}; allowed: 1, as Megatron's has it")
        worlds = {
            "--train": self.train.world_size,
            "--generate": self.generate.world_size,
            "--target": self.target.world_size,
        }
        if len(set(worlds.values())) > 1:
            sizes_text = ", ".join(f"{name} has {size}" for name, size in worlds.items())
            raise ConfigError(f"{sizes_text} ranks; allowed: as many in all three")


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a candidate until its last rank ends, and its extra memory on the fullest rank."""

    median_s: float
    fastest_s: float
    peak_extra_bytes: int  # resident memory beyond that before the exchange
    network_bytes: int  # received in all in one run, counted at the sockets of every rank


@dataclass(frozen=True, slots=True)
class ReshardReport:
    settings: ReshardSettings
    model_bytes: int
    schedule_s: float  # plan and schedule of one rank, made once
    into_vllm: dict[str, Timing]
    planned_bytes: dict[str, int]  # what the exchange has to receive in all, by comparison
    times_faster_than_gather: float  # ratio of the medians, one tensor at a time
    times_faster_than_bucketed_gather: float
    into_megatron: dict[str, Timing]
    times_faster_than_megatron: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def bench_reshard(settings: ReshardSettings) -> ReshardReport:
    """Measure all candidates on ranks of this machine.

    Raises:
        ConfigError: The layouts do not fit.
        RunFailed: A rank ended early, or candidates left different bits.
    """
    settings.check()
    with tempfile.TemporaryDirectory() as folder:
        try:
            job, world_size = partial(_measure, settings), settings.train.world_size
            results = run_on_ranks(job, world_size, Path(folder), settings.timeout_s)
        except ProcessFailed as error:
            raise RunFailed(str(error)) from error
    first = results[0]
    cases = ("into_vllm", "into_megatron")
    into_vllm, into_megatron = (
        {name: _summarize([r[case][name] for r in results]) for name in first[case]}
        for case in cases
    )
    exchange_s = into_vllm["exchange"].median_s
    return ReshardReport(
        settings,
        model_bytes=first["model_bytes"],
        schedule_s=max(result["schedule_s"] for result in results),
        into_vllm=into_vllm,
        planned_bytes={case: sum(r["planned_bytes"][case] for r in results) for case in cases},
        times_faster_than_gather=into_vllm["gather"].median_s / exchange_s,
        times_faster_than_bucketed_gather=into_vllm["gather_bucketed"].median_s / exchange_s,
        into_megatron=into_megatron,
        times_faster_than_megatron=(
            into_megatron["megatron"].median_s / into_megatron["exchange"].median_s
        ),
    )


def _summarize(by_rank: list[dict[str, Any]]) -> Timing:
    seconds = [max(times) for times in zip(*(rank["seconds"] for rank in by_rank), strict=True)]
    return Timing(
        median_s=statistics.median(seconds),
        fastest_s=min(seconds),
        peak_extra_bytes=max(rank["peak_extra_bytes"] for rank in by_rank),
        network_bytes=sum(rank["network_bytes"] for rank in by_rank),
    )


class PlannedExchange:
    """Our exchange: plan and schedule are made once, buckets are placed as they arrive."""

    def __init__(self, training: Side, target: Side, is_placed: bool, bucket_bytes: int) -> None:
        """Plan; with `is_placed` generation ranks are placed where most bytes stay local."""
        start = time.perf_counter()
        device = dist.get_rank()
        demand = TransferRequirements(training, target, DTYPE.itemsize)
        world = training[0].world_size
        hosts = assign_hosts(demand.compute_overlap()) if is_placed else tuple(range(world))
        plan = demand.plan(Devices.colocated(hosts, world, world))
        # Two buckets' worth of memory in all: two halves on their way in, two on the way out.
        half = bucket_bytes // 2
        rounds = schedule(plan, device, half)
        self.schedule_s = time.perf_counter() - start
        self.rank = hosts.index(device)  # of this device, on the target side
        # By the plan; the bytes on the network are measured apart, and are a few more.
        self.received_bytes = plan.compute_totals().received[self.rank]
        group = dist.group.WORLD
        assert group is not None  # the default group has been made
        transport = GroupTransport(group, _TIMEOUT_S, torch.device("cpu"))
        self._exchange = Exchange(rounds, half, DTYPE, transport, _allocate)
        self._layouts: dict[int, ops.BoxLayout] = {}  # by bucket

    def run(self, weights: Parameters, parameters: Parameters) -> None:
        for bucket in self._exchange.run(LocalWeights(weights), _allocate):
            targets = dict.fromkeys(part.target for part in bucket.parts)
            tensors = [bucket.memory, *(parameters[target] for target in targets)]
            if bucket.index not in self._layouts:
                pairs = (
                    (box.data, ops.narrow_box(parameters[box.target], box.offset, box.data.shape))
                    for box in bucket
                )
                self._layouts[bucket.index] = ops.BoxLayout(pairs, tensors)
            self._layouts[bucket.index].run(tensors)


def _allocate(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


class GatherThenSlice:
    """Gathers every parameter on every rank, then slices it, as most systems do.

    As verl does from Megatron (utils/megatron_utils.py, per_tensor_generator): a shard goes from
    its pipeline stage to the others, shards of a parameter are gathered over tensor-parallel
    ranks, and experts over expert-parallel ranks. verl does it for one parameter at a time;
    `bucket_bytes` above 0 sends as many together as fit, in flat buffers: the stronger baseline.
    """

    def __init__(
        self,
        training: TrainingRanks,
        weights: Sequence[Weight],
        target: Side,
        rank: int,
        bucket_bytes: int = 0,
    ) -> None:
        """Prepare for `rank` on the target side; `bucket_bytes` bounds the shards of a rank."""
        self._ranks, self._device = training, dist.get_rank()
        self._coordinate = training.mesh.get_coordinate(self._device)
        self._groups = {axis: self._make_groups(axis) for axis in ("pp", "tp", "ep", "etp")}
        self._buckets = self._build_buckets(weights, bucket_bytes // DTYPE.itemsize)
        self._blocks: dict[str, list[tuple[Block, str]]] = {}  # by tensor
        for weight, shard in list_shards(*target, rank):
            for block in weight.rule.get_blocks(shard):
                place = block, target[0].get_local_name(weight)
                self._blocks.setdefault(block.tensor.name, []).append(place)

    def _make_groups(self, axis: str) -> dist.ProcessGroup:
        """Make all groups of an axis; return the group of this rank."""
        own_group: dist.ProcessGroup | None = None
        for ranks in self._ranks.mesh.get_groups(axis):
            group = dist.new_group(ranks)
            own_group = group if self._device in ranks else own_group
        assert own_group is not None  # every rank is in a group of every axis
        return own_group

    def _build_buckets(self, weights: Sequence[Weight], num_elements: int) -> list[list[_Unit]]:
        """Return buckets of units with one route: as many as `num_elements` hold, or one alone."""
        units: dict[tuple[str, int | None, int | None], list[Weight]] = {}
        for weight in weights:
            if self._ranks.get_holders(weight):
                expert = weight.expert
                place = None if expert is None else expert % self._ranks.experts_per_rank
                units.setdefault((weight.name, weight.layer, place), []).append(weight)
        buckets: list[list[_Unit]] = []
        open_buckets: dict[_Route, list[_Unit]] = {}
        for experts in units.values():
            unit = _Unit(tuple(experts), self._find_route(experts[0]))
            bucket = open_buckets.get(unit.route)
            if bucket is None or sum(u.numel for u in (*bucket, unit)) > num_elements:
                bucket = open_buckets[unit.route] = []
                buckets.append(bucket)
            bucket.append(unit)
        return buckets

    def _find_route(self, weight: Weight) -> _Route:
        chunk = self._ranks.find_chunk(weight)
        assert chunk is not None  # it has holders
        num_shards = len(self._ranks.get_holders(weight))
        return _Route(chunk.pp_rank, weight.axis, num_shards, weight.expert is not None)

    def run(self, local: Parameters, parameters: Parameters) -> None:
        for bucket in self._buckets:
            for unit, by_expert in zip(bucket, self._gather(bucket, local), strict=True):
                for weight, shards in zip(unit.weights, by_expert, strict=True):
                    self._place(weight, shards, parameters)

    def _place(self, weight: Weight, shards: list[torch.Tensor], parameters: Parameters) -> None:
        tensors = {t.name: torch.empty(t.shape, dtype=DTYPE) for t in weight.rule.tensors}
        for index, tensor in enumerate(shards):
            for block in weight.rule.get_blocks(Shard(index, len(shards))):
                tensors[block.tensor.name][block.box.slices] = tensor[block.local_slices]
        for name, tensor in tensors.items():
            for block, parameter in self._blocks.get(name, ()):
                parameters[parameter][block.local_slices] = tensor[block.box.slices]

    def _gather(self, bucket: list[_Unit], local: Parameters) -> Iterator[list[list[torch.Tensor]]]:
        """Yield all shards of each weight of each unit."""
        route, mesh = bucket[0].route, self._ranks.mesh
        if route.pp_rank != self._coordinate.pp_rank:
            local_shard = torch.empty(sum(unit.numel for unit in bucket), dtype=DTYPE)
        else:
            names = [
                self._ranks.get_local_name(unit.select_weight(self._coordinate.ep_rank))
                for unit in bucket
            ]
            flat = [local[name].view(-1) for name in names]
            local_shard = flat[0] if len(flat) == 1 else torch.cat(flat)
        if mesh.sizes["pp"] > 1:
            stages = mesh.get_group(self._device, "pp")
            dist.broadcast(local_shard, src=stages[route.pp_rank], group=self._groups["pp"])
        shards = [local_shard]
        if route.axis is not None and route.num_shards > 1:
            shards = _all_gather(local_shard, route.num_shards, self._groups[route.axis])
        by_expert = [shards]
        if route.is_expert and mesh.sizes["ep"] > 1:
            by_shard = [_all_gather(s, mesh.sizes["ep"], self._groups["ep"]) for s in shards]
            by_expert = [list(expert_shards) for expert_shards in zip(*by_shard, strict=True)]
        start = 0
        for unit in bucket:
            end = start + unit.numel
            yield [[s[start:end].view(unit.shape) for s in shards] for shards in by_expert]
            start = end


@dataclass(frozen=True, slots=True)
class _Route:
    """Route of shards to all ranks; shards with the same route can travel together."""

    pp_rank: int  # the stage that has them
    axis: str | None  # over which they are sharded
    num_shards: int
    is_expert: bool


@dataclass(frozen=True, slots=True)
class _Unit:
    """One parameter, or one expert of each expert-parallel rank."""

    weights: tuple[Weight, ...]
    route: _Route

    def select_weight(self, ep_rank: int) -> Weight:
        return self.weights[ep_rank] if self.route.is_expert else self.weights[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a shard."""
        return self.weights[0].rule.get_local_shape(Shard(0, self.route.num_shards))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def _all_gather(tensor: torch.Tensor, count: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    shards = [torch.empty_like(tensor) for _ in range(count)]
    dist.all_gather(shards, tensor, group=group)
    return shards


def list_shards(ranks: Ranks, weights: Sequence[Weight], rank: int) -> list[tuple[Weight, Shard]]:
    """Return the parameters of a rank, and the shard of each."""
    shards = []
    for weight in weights:
        holders = ranks.get_holders(weight)
        for index, members in enumerate(holders):
            if rank in members:
                shards.append((weight, Shard(index, len(holders))))
    return shards


def _make_zeros(side: Side, rank: int) -> Parameters:
    ranks, weights = side
    return {
        ranks.get_local_name(weight): torch.zeros(weight.rule.get_local_shape(shard), dtype=DTYPE)
        for weight, shard in list_shards(ranks, weights, rank)
    }


def _make_random(side: Side, rank: int) -> Parameters:
    """Return random parameters, equal on ranks with the same shard."""
    ranks, weights = side
    parameters = {}
    for number, (weight, shard) in enumerate(list_shards(ranks, weights, rank)):
        generator = torch.Generator().manual_seed(number * 1009 + shard.index)
        tensor = torch.empty(weight.rule.get_local_shape(shard), dtype=DTYPE)
        parameters[ranks.get_local_name(weight)] = tensor.uniform_(-1, 1, generator=generator)
    return parameters


def _build_training_side(
    config: HFConfig, layout: Layout
) -> tuple[TrainingRanks, tuple[Weight, ...]]:
    sizes = get_model_sizes(config)
    chunks = split_into_chunks(layout, sizes.num_layers)
    rules = get_family(config).weights(config, pad_vocab_size(config, layout.tp))
    return TrainingRanks(Mesh(layout), chunks, sizes.num_experts), rules


class _Comparison:
    """Comparison of candidates that write into the same parameters."""

    parameters: Parameters
    _first: Parameters | None = None

    def check(self, name: str) -> None:
        """Raise RunFailed unless a candidate has written the same bits as the first one."""
        if self._first is None:
            self._first = {key: tensor.clone() for key, tensor in self.parameters.items()}
        for key, tensor in self.parameters.items():
            if not torch.equal(tensor, self._first[key]):
                raise RunFailed(f"{name}: {key} differs from what the first candidate left")
            tensor.zero_()


class IntoVLLM(_Comparison):
    """Candidates of the exchange into vLLM's layout."""

    def __init__(self, settings: ReshardSettings) -> None:
        config = settings.build_config()
        training = _build_training_side(config, settings.train)
        sizes = get_model_sizes(config)
        served = GenerationRanks(settings.generate, sizes.num_layers, sizes.num_experts)
        target: Side = served, get_vllm_weights(config)
        self.exchange = PlannedExchange(training, target, True, settings.bucket_bytes)
        self.gather, self.gather_bucketed = (
            GatherThenSlice(*training, target, self.exchange.rank, bucket_bytes)
            for bucket_bytes in (0, settings.bucket_bytes)
        )
        self.weights = _make_random(training, dist.get_rank())
        self.parameters = _make_zeros(target, self.exchange.rank)
        tensors = [t for w in training[1] if not w.replica for t in w.rule.tensors]
        self.model_bytes = sum(torch.Size(t.shape).numel() for t in tensors) * DTYPE.itemsize

    def build_candidates(self) -> dict[str, Candidate]:
        return {
            "exchange": self._bind(self.exchange.run),
            "gather": self._bind(self.gather.run),
            "gather_bucketed": self._bind(self.gather_bucketed.run),
        }

    def _bind(self, run: Callable[[Parameters, Parameters], None]) -> Callable[[], None]:
        return lambda: run(self.weights, self.parameters)


class IntoMegatron(_Comparison):
    """Candidates of the exchange into another Megatron layout.

    It needs Megatron's modules, whose installation replaces "cuda" in this process.
    """

    def __init__(self, settings: ReshardSettings) -> None:
        from mcore_rl.engine.megatron import device

        device.install(num_threads=1, on_cpu=True)
        from mcore_rl.benchmarks.megatron_refit import MegatronRefit

        config, rank = settings.build_config(), dist.get_rank()
        layouts = settings.train, settings.target
        self.refit = MegatronRefit(config, *layouts, DTYPE, rank)
        self.weights, self.parameters = self.refit.get_parameters()
        sides = [_build_training_side(config, layout) for layout in layouts]
        self.exchange = PlannedExchange(sides[0], sides[1], False, settings.bucket_bytes)
        for name, tensor in _make_random(sides[0], rank).items():
            self.weights[name].copy_(tensor)
        for tensor in self.parameters.values():
            tensor.zero_()

    def build_candidates(self) -> dict[str, Candidate]:
        return {
            "exchange": lambda: self.exchange.run(self.weights, self.parameters),
            "megatron": self.refit.run,
        }


def _measure(settings: ReshardSettings) -> dict[str, Any]:
    """Measure both comparisons on one rank."""
    from mcore_rl.parallel.store import join_world

    torch.set_num_threads(1)
    join_world("gloo", timeout_s=1800.0)
    case = IntoVLLM(settings)
    planned = {"into_vllm": case.exchange.received_bytes}
    results = {
        "model_bytes": case.model_bytes,
        "schedule_s": case.exchange.schedule_s,
        "planned_bytes": planned,
        "into_vllm": _alternate(case.build_candidates(), settings.repetitions, case.check),
    }
    del case
    refit = IntoMegatron(settings)
    planned["into_megatron"] = refit.exchange.received_bytes
    results["into_megatron"] = _alternate(
        refit.build_candidates(), settings.repetitions, refit.check
    )
    return results


def _alternate(
    candidates: dict[str, Candidate], repetitions: int, check: Callable[[str], None]
) -> dict[str, Any]:
    """Run the candidates by turns. The first round is a warm-up, whose results are checked."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    peaks, received = dict.fromkeys(candidates, 0), dict.fromkeys(candidates, 0)
    for repetition in range(repetitions + 1):
        for name, run in candidates.items():
            dist.barrier()
            resident, received_before = _reset_peak_bytes(), read_received_bytes()
            start = time.perf_counter()
            run()
            elapsed = time.perf_counter() - start
            dist.barrier()  # all bytes of this run have arrived
            received[name] = read_received_bytes() - received_before
            if repetition == 0:
                check(name)
                continue
            seconds[name].append(elapsed)
            peaks[name] = max(peaks[name], _read_peak_bytes() - resident)
    return {
        name: {
            "seconds": seconds[name],
            "peak_extra_bytes": peaks[name],
            "network_bytes": received[name],
        }
        for name in candidates
    }


def read_received_bytes() -> int:
    """Return the bytes received so far by the open TCP sockets of this process (tcp_info)."""
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or no TCP socket
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(descriptor))) as copy:
                    info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                    total += struct.unpack_from("Q", info, _RECEIVED_AT)[0]
    return total


def _reset_peak_bytes() -> int:
    """Return the resident bytes, at which the peak begins again (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")
    return _read_status("VmRSS")


def _read_peak_bytes() -> int:
    return _read_status("VmHWM")


def _read_status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def print_report(report: ReshardReport) -> None:
    console = get_stdout_console()
    console.print(
        f"{report.model_bytes / 1e6:.0f} MB on {report.settings.train.world_size} ranks; "
        f"plan and schedule of a rank, once: {report.schedule_s:.2f} s"
    )
    one_by_one, bucketed = report.times_faster_than_gather, report.times_faster_than_bucketed_gather
    for title, timings in (
        (
            f"Into vLLM's layout: {one_by_one:.1f} times faster, {bucketed:.1f} than in buckets",
            report.into_vllm,
        ),
        (
            f"Into another of Megatron: {report.times_faster_than_megatron:.1f} times faster",
            report.into_megatron,
        ),
    ):
        table = Table(title=title)
        for column in ("", "median", "fastest", "network", "extra memory, fullest rank"):
            table.add_column(column, justify="right" if column else "left")
        for name, timing in timings.items():
            table.add_row(
                name,
                f"{timing.median_s * 1e3:.0f} ms",
                f"{timing.fastest_s * 1e3:.0f} ms",
                f"{timing.network_bytes / 1e6:.0f} MB",
                f"{timing.peak_extra_bytes / 1e6:.0f} MB",
            )
        console.print(table)
