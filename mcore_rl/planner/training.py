"""Time of forward and backward passes and of an update on a layout: rooflines plus communication.

Methods have the formulas. Sources: sequence parallelism, which gathers and scatters around
attention and MLP, arXiv:2205.05198, section 4.2.2; the ring of keys and values, arXiv:2310.01889;
the bubble of a pipeline, (pp - 1) / vpp micro-batches of the slowest stage, arXiv:2104.04473,
section 2.2. A message of n bytes takes latency + n / rate, on NVLink if one domain has the group.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import EngineConfig, Layout
from mcore_rl.engine.base import load_backend
from mcore_rl.parallel.mesh import Chunk, split_into_chunks
from mcore_rl.planner.flops import LayerWork, Matrix, ModelWork
from mcore_rl.planner.hardware import Hardware, Link
from mcore_rl.planner.roles import get_optimizer_itemsize

# Of the rate of large products, by fused attention: FlashAttention-3 has about 470 of 989 TFLOP/s
# on an H100 over forward and backward pass of causal sequences of 4k (arXiv:2407.08608, figures 5
# and 6).
ATTENTION_SHARE = 0.6
# Of the rate of one isolated product, by products in the stream of a training step, where clocks
# follow the power that all units draw: one value for all models, chosen by looking at the runs of
# docs/planning_step.md.
SUSTAINED_SHARE = 0.7
BFLOAT16, FLOAT32 = 2, 4  # bytes


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens of an update, and of the sequences that they come in."""

    tokens: float  # of all data-parallel ranks, in an optimizer step
    sequence: float  # tokens of a sequence: sum of squares over sum
    imbalance: float = 1.0  # tokens of the fullest expert-parallel rank over the mean


@dataclass
class LayerTime:
    """Seconds of one decoder layer and micro-batch on a rank, forward, by part."""

    compute: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    communication: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    attention_s: float = 0.0  # of pairs of tokens
    frozen_s: float = 0.0  # of products whose weights have no gradients

    @property
    def forward_s(self) -> float:
        return sum(self.compute.values()) + self.attention_s + sum(self.communication.values())

    @property
    def backward_s(self) -> float:
        """Twice the products, 2.5 times the pairs (they are recomputed), communication again.

        Frozen products have the gradient of their input alone: once.
        """
        compute = 2.0 * sum(self.compute.values()) - self.frozen_s + 2.5 * self.attention_s
        return compute + sum(self.communication.values())

    def recompute_s(self, granularity: str, modules: Sequence[str]) -> float:
        """Return the seconds of activations that the backward pass computes again."""
        if granularity == "full":
            return self.forward_s
        if granularity != "selective":
            return 0.0
        seconds: float = 0.0
        for module in modules:
            if module == "core_attn":
                seconds += self.attention_s
            elif module == "moe":
                seconds += sum(
                    self.compute[part]
                    for part in ("router", "permute", "experts", "moe_act", "shared_experts")
                )
                seconds += self.communication["expert_parallel"]
            else:
                seconds += self.compute.get(module, 0.0)
        return seconds


@dataclass(frozen=True, slots=True)
class UpdateTime:
    """Seconds of an optimizer step, by cause, on the busiest rank."""

    compute_s: float  # forward and backward, without what follows
    recompute_s: float
    tensor_parallel_s: float
    expert_parallel_s: float
    context_parallel_s: float
    pipeline_s: float  # transfers between stages
    bubble_s: float
    data_parallel_s: float  # gradients and weights
    optimizer_s: float

    @property
    def total_s(self) -> float:
        return float(sum(getattr(self, name) for name in self.__dataclass_fields__))


def check_backend(engine: EngineConfig) -> None:
    """Raise ConfigError if the time of the passes of an engine's backend is not predicted."""
    if load_backend(engine).shard_format != "megatron":
        raise ConfigError(
            f"backend={engine.backend!r}: the time of its passes is not predicted; allowed: "
            "'megatron'"
        )


class TrainingModel:
    """Predicts an engine's passes over a model.

    Args:
        dtype: Of matrix products: bfloat16, float8 or float32.

    Raises:
        ConfigError: The engine's backend does not shard as Megatron does.
    """

    def __init__(
        self,
        work: ModelWork,
        engine: EngineConfig,
        hardware: Hardware,
        dtype: str = "bfloat16",
    ) -> None:
        check_backend(engine)
        self.work, self.engine, self.hardware, self.dtype = work, engine, hardware, dtype
        self.layout: Layout = engine.layout
        self.rate = hardware.get_flops(dtype) * SUSTAINED_SHARE
        self.itemsize = FLOAT32 if dtype == "float32" else BFLOAT16
        self.optimizer_itemsize = get_optimizer_itemsize(engine, self.itemsize)
        wide = hardware.get_flops(dtype if dtype == "float32" else "bfloat16")
        self.attention_rate = wide * ATTENTION_SHARE
        self.head_rate = wide * SUSTAINED_SHARE  # Megatron never has its product in float8
        self.lora = engine.lora
        self.has_mtp = bool(engine.mtp_loss_coef)
        self.overlaps_tp = bool(engine.megatron.get("tp_comm_overlap", False))
        num_mtp = len(work.mtp_layers) if self.has_mtp else 0
        chunks = split_into_chunks(self.layout, len(work.layers), num_mtp)
        self.stages = [
            [chunk for chunk in chunks if chunk.pp_rank == pp_rank]
            for pp_rank in range(self.layout.pp)
        ]
        self._layers: dict[tuple[int, float, float, float], LayerTime] = {}

    @cached_property
    def _tp_link(self) -> Link:
        return self.hardware.get_link(self.layout.tp)

    # A layer

    def predict_layer(
        self, work: LayerWork, tokens: float, sequence: float, imbalance: float
    ) -> LayerTime:
        """Predict a layer for a micro-batch of `tokens` on each context-parallel rank."""
        key = (id(work), tokens, sequence, imbalance)
        if key not in self._layers:
            self._layers[key] = self._predict_layer(work, tokens, sequence, imbalance)
        return self._layers[key]

    def _predict_layer(
        self, work: LayerWork, tokens: float, sequence: float, imbalance: float
    ) -> LayerTime:
        layout, hardware, hidden = self.layout, self.hardware, self.work.hidden_size
        time = LayerTime()
        for matrix in work.matrices:
            seconds = self._multiply(matrix, tokens)
            time.compute[matrix.part] += seconds
            if self.lora.rank:
                time.frozen_s += seconds
            if factors := matrix.build_factors(self.lora):
                time.compute["adapters"] += self._run_product(factors, tokens, self.rate)
        pairs = work.pair_flops * tokens * work.count_keys(sequence) + work.state_flops * tokens
        time.attention_s = pairs / layout.tp / self.attention_rate
        # Norms read and write the hidden states, residual sums read two and write one; rotary
        # embeddings read and write queries and keys; activations read gate and up and write.
        per_token = self.itemsize / layout.tp * tokens
        time.compute["layernorm"] += self._move(4 * hidden * per_token, 2)
        time.compute["elementwise"] += self._move(
            (6 * hidden + 2 * work.heads_elements) * per_token, 4
        )
        act = "moe_act" if work.is_moe else "mlp"
        time.compute[act] += self._move(work.act_elements * per_token, 1)
        if layout.tp > 1:
            # Sequence parallelism gathers and scatters around attention, and around the MLP.
            has_mlp = not work.is_moe or any(m.part == "shared_experts" for m in work.matrices)
            size = tokens * hidden * self.itemsize * (layout.tp - 1) / layout.tp
            seconds = (2 + 2 * has_mlp) * self._tp_link.predict_s(size)
            hidden_s = sum(time.compute[m.part] for m in work.matrices) if self.overlaps_tp else 0
            time.communication["tensor_parallel"] = max(0.0, seconds - hidden_s)
        if layout.cp > 1:
            size = (layout.cp - 1) * tokens * work.key_value_elements / layout.tp * self.itemsize
            link = hardware.get_link(layout.cp, layout.tp)
            seconds = link.predict_s(size, layout.cp - 1)
            time.communication["context_parallel"] = max(0.0, seconds - time.attention_s)
        if work.is_moe:
            self._add_experts(time, work, tokens / layout.tp, imbalance)
        return time

    def _multiply(self, matrix: Matrix, tokens: float) -> float:
        """Return the seconds of a layer's product, with the quantisation of its inputs."""
        local_tokens = tokens if matrix.is_sharded else tokens / self.layout.tp
        return self._run_product(matrix, tokens, self.rate) + self._cast(
            local_tokens * matrix.columns
        )

    def _run_product(self, matrix: Matrix, tokens: float, rate: float) -> float:
        """Return the seconds of a product: the slower of arithmetic and memory traffic."""
        local = matrix.numel / (self.layout.tp if matrix.is_sharded else 1)
        if not matrix.is_sharded:
            tokens /= self.layout.tp  # replicated matrices see their shard of the sequence
        traffic = self.itemsize * (local + tokens * (matrix.rows + matrix.columns))
        seconds = max(2 * local * tokens / rate, traffic / self.hardware.memory_rate)
        return max(seconds, self.hardware.kernel_latency_s)

    def _cast(self, elements: float) -> float:
        """Return the seconds to quantise an input: read it, write codes and their transpose."""
        return elements * (BFLOAT16 + 2) / self.hardware.memory_rate * (self.dtype == "float8")

    def _move(self, num_bytes: float, num_kernels: int) -> float:
        """Return the seconds of kernels that only move data."""
        seconds = num_bytes / self.hardware.memory_rate
        return max(seconds, num_kernels * self.hardware.kernel_latency_s)

    def _add_experts(
        self, time: LayerTime, work: LayerWork, tokens: float, imbalance: float
    ) -> None:
        """Add routed experts: `tokens` of a rank before dispatch, of its sequence shard."""
        layout, memory = self.layout, self.hardware.memory_rate
        routed = tokens * work.topk * imbalance * layout.etp
        local_experts = work.num_experts / layout.ep
        frozen = work.experts if self.lora.rank else ()
        factors = [f for matrix in work.experts if (f := matrix.build_factors(self.lora))]
        for matrix in (*work.experts, *factors):
            size = matrix.numel / layout.etp
            traffic = self.itemsize * (
                local_experts * size + routed * (matrix.rows + matrix.columns)
            )
            seconds = max(2 * size * routed / self.rate, traffic / memory)
            seconds = max(seconds, self.hardware.kernel_latency_s)
            time.compute["experts"] += seconds + self._cast(routed * matrix.columns)
            time.frozen_s += seconds * (matrix in frozen)
        # Permuting reads a token and writes its copies, twice around the exchange; and back.
        moved = 4 * (1 + work.topk * imbalance) * tokens * self.work.hidden_size * self.itemsize
        time.compute["permute"] += self._move(moved, 8)
        exchanges = 2 * self._exchange(work, tokens, imbalance)  # dispatch and combine
        if self.engine.moe.overlap:
            exchanges = max(0.0, exchanges - sum(time.compute.values()))
        time.communication["expert_parallel"] = exchanges

    def _exchange(self, work: LayerWork, tokens: float, imbalance: float) -> float:
        """Return the seconds of an all-to-all of the fullest expert-parallel rank.

        A share 1/nodes of the copies stays inside a node. The flex dispatcher sends a token once
        to each node that has experts of it.
        """
        ep, etp = self.layout.ep, self.layout.etp
        if ep * etp == 1:
            return 0.0
        hardware, row = self.hardware, self.work.hidden_size * self.itemsize
        local = max(1, min(ep, hardware.nvlink_domain // etp))
        nodes = ep / local
        copies = work.topk * imbalance
        remote = copies * (1 - 1 / nodes)
        if self.engine.moe.dispatcher == "flex":
            reached = nodes * (1 - (1 - 1 / nodes) ** work.topk)
            if work.group_topk:  # a group of experts spans one node or more
                reached = min(reached, work.group_topk * max(1.0, nodes / work.num_groups))
            remote = reached * (1 - 1 / nodes) * imbalance
        elif self.engine.moe.dispatcher == "allgather":
            copies, remote = float(ep), ep - local
        inside = hardware.get_link(local, etp).predict_s(
            tokens * copies * row * (local - 1) / local
        )
        outside = 0.0
        if nodes > 1:
            outside = hardware.get_link(ep, etp).predict_s(tokens * remote * row, nodes - 1)
        gathered = tokens * copies * row * (etp - 1)  # by the ranks that share experts
        seconds = max(inside, outside)
        return seconds + hardware.get_link(etp).predict_s(gathered) if etp > 1 else seconds

    # A stage and a pass

    def _sum_stage(
        self, stage: Sequence[Chunk], tokens: float, load: Load, *, trains: bool = True
    ) -> tuple[LayerTime, float, float, float]:
        """Return summed layers of a stage, and seconds forward, backward and of recompute.

        Prediction layers run where the model trains, each with the output layer.
        """
        total, recompute = LayerTime(), 0.0
        forward = backward = 0.0
        settings = self.engine.recompute
        for chunk in stage:
            num_mtp = chunk.num_mtp_layers if trains else 0
            works = [self.work.layers[index] for index in chunk.layers]
            for work in (*works, *self.work.mtp_layers[:num_mtp]):
                layer = self.predict_layer(work, tokens, load.sequence, load.imbalance)
                forward += layer.forward_s
                backward += layer.backward_s
                recompute += layer.recompute_s(settings.granularity, settings.modules)
                for name, seconds in layer.communication.items():
                    total.communication[name] += seconds
            if chunk.has_head:
                # Logits of a tile are float32: written, read by the softmax, read by the gradient.
                head = self._run_product(self.work.head, tokens, self.head_rate)
                logits = tokens * self.work.head.rows / self.layout.tp
                copies = 1 + num_mtp
                loss = self._move(3 * FLOAT32 * logits, 3)
                forward += copies * (head + loss)
                backward += copies * (head * (1 if self.lora.rank else 2) + 2 * loss)
        return total, forward, backward, recompute

    def count_micro_batches(self, load: Load) -> tuple[int, float]:
        """Return the micro-batches of a data-parallel rank, and the tokens of one on a cp rank."""
        layout = self.layout
        share = load.tokens / layout.dp / layout.cp
        count = max(1, math.ceil(share / self.engine.max_tokens_per_micro_batch))
        if layout.vpp > 1:
            count = -(-count // layout.pp) * layout.pp  # the interleaved schedule needs a multiple
        return count, share / count

    def predict_forward(self, load: Load) -> float:
        """Predict a pass without gradients, as of log-probs."""
        count, tokens = self.count_micro_batches(load)
        slowest = max(
            self._sum_stage(stage, tokens, load, trains=False)[1] for stage in self.stages
        )
        fill = (self.layout.pp - 1) / self.layout.vpp
        return slowest * (count + fill) + self._send(tokens) * count

    def _send(self, tokens: float) -> float:
        """Return the seconds of a transfer between stages; interleaved schedules overlap it."""
        layout = self.layout
        if layout.pp == 1 or layout.vpp > 1:
            return 0.0
        size = tokens / layout.tp * self.work.hidden_size * self.itemsize
        link = self.hardware.get_link(2, layout.tp * layout.cp * layout.dp)
        return link.predict_s(size)

    def predict_update(self, load: Load) -> UpdateTime:
        """Predict an optimizer step."""
        layout = self.layout
        count, tokens = self.count_micro_batches(load)
        stages = [self._sum_stage(stage, tokens, load) for stage in self.stages]
        total, forward, backward, recompute = max(stages, key=lambda s: s[1] + s[2] + s[3])
        micro_batch_s = forward + backward + recompute
        parts = total.communication
        exposed = {name: 2 * count * seconds for name, seconds in parts.items()}
        return UpdateTime(
            compute_s=count * (forward + backward) - sum(exposed.values()),
            recompute_s=count * recompute,
            tensor_parallel_s=exposed.get("tensor_parallel", 0.0),
            expert_parallel_s=exposed.get("expert_parallel", 0.0),
            context_parallel_s=exposed.get("context_parallel", 0.0),
            pipeline_s=2 * count * self._send(tokens),
            bubble_s=micro_batch_s * (layout.pp - 1) / layout.vpp,
            data_parallel_s=self._reduce(micro_batch_s * count),
            optimizer_s=self._step_optimizer(),
        )

    # Gradients and weights

    def count_training_flops(self, load: Load) -> float:
        """Return the model flops of an optimizer step, over all ranks."""
        return self.work.count_training_flops(
            load.tokens, load.sequence, self.lora, has_mtp=self.has_mtp
        )

    def _list_stage_layers(self, stage: Sequence[Chunk]) -> list[LayerWork]:
        works = [self.work.layers[index] for chunk in stage for index in chunk.layers]
        return works + [
            work for chunk in stage for work in self.work.mtp_layers[: chunk.num_mtp_layers]
        ]

    def count_local_parameters(self) -> tuple[float, float]:
        """Return the parameters of the fullest rank: outside of experts, and in experts."""
        layout, most = self.layout, (0.0, 0.0)
        for stage in self.stages:
            dense = expert = 0.0
            for work in self._list_stage_layers(stage):
                dense += (work.parameters - work.expert_parameters) / layout.tp
                expert += work.expert_parameters / (layout.ep * layout.etp)
            for chunk in stage:
                dense += self.work.head.numel / layout.tp * chunk.has_head
                dense += self.work.embedding_parameters / layout.tp * chunk.has_embedding
            most = max(most, (dense, expert), key=sum)
        return most

    def count_trained_parameters(self) -> tuple[float, float]:
        """Return those of them with gradients: all, or the factors of adapters."""
        if not self.lora.rank:
            return self.count_local_parameters()
        layout, most = self.layout, (0.0, 0.0)
        for stage in self.stages:
            dense = expert = 0.0
            for work in self._list_stage_layers(stage):
                dense_elements, expert_elements = work.count_adapter_elements(self.lora)
                dense += dense_elements / layout.tp
                expert += expert_elements * work.num_experts / (layout.ep * layout.etp)
            most = max(most, (dense, expert), key=sum)
        return most

    def count_optimizer_parameters(self) -> float:
        """Return the trained parameters whose optimizer state is on a rank."""
        layout, (dense, expert) = self.layout, self.count_trained_parameters()
        if self.engine.optimizer.distributed:
            dense /= layout.dp * layout.cp
            expert /= layout.world_size // (layout.pp * layout.ep * layout.etp)
        return dense + expert

    def _reduce(self, overlapped_s: float) -> float:
        """Return the exposed seconds to reduce gradients (float32) and to gather weights.

        A ring over devices of several nodes uses the network ports of all its devices in a node.
        """
        layout, hardware = self.layout, self.hardware
        dense, expert = self.count_trained_parameters()
        inner = layout.tp
        num_dense = layout.dp * layout.cp
        num_expert = layout.world_size // (layout.pp * layout.ep * layout.etp)
        seconds = 0.0
        for parameters, num, stride in (
            (dense, num_dense, inner),
            (expert, num_expert, layout.ep * layout.etp),
        ):
            if num == 1 or not parameters:
                continue
            link = hardware.get_link(num, stride)
            in_node = max(1, hardware.nvlink_domain // stride)
            if num * stride > hardware.nvlink_domain:
                most = hardware.nvlink_bandwidth * hardware.nvlink_share
                link = Link(min(most, link.rate * min(in_node, num)), link.latency_s)
            # The distributed optimizer gathers weights; else gradients are gathered.
            gathered = self.itemsize if self.engine.optimizer.distributed else FLOAT32
            num_bytes = parameters * (FLOAT32 + gathered) * (num - 1) / num
            seconds += link.predict_s(num_bytes, 2 * math.log2(num))
        if self.engine.optimizer.overlap:
            seconds = max(0.0, seconds - overlapped_s)
        return seconds

    def _step_optimizer(self) -> float:
        """Return the seconds of Adam: it reads gradient and state and writes state and weight;
        without a main weight it reads the weight.

        With its state on the host, gradients and weights cross the link, and the host's memory is
        taken to be as fast as that link: its cores serve all devices of the node.
        """
        parameters = self.count_optimizer_parameters()
        weights = self.itemsize * (1 if self.itemsize < FLOAT32 else 2)
        moved = parameters * (FLOAT32 + 2 * self.optimizer_itemsize + weights)
        if not self.engine.optimizer.cpu_offload:
            return moved / self.hardware.memory_rate
        host = self.hardware.host_bandwidth * self.hardware.host_share
        return (moved + parameters * (FLOAT32 + self.itemsize)) / host
