"""Time to generate the responses of a step: a roofline of each forward pass while a batch drains.

Each layer has two all-reduces: a ring inside a domain, and 2 log2(domains) hops between domains.
Data-parallel attention exchanges tokens twice. Decoding compares the latents of latent attention
(arXiv:2405.04434).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from mcore_rl.config.checks import check_at_least, check_between
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.inference.kv_cache import (
    CPU_BYTES,
    DEFAULT_MAX_SEQS,
    GPU_SHARE,
    count_token_bytes,
)
from mcore_rl.inference.registry import DEFAULT_BATCHED_TOKENS
from mcore_rl.models.base import HFConfig
from mcore_rl.planner.flops import LayerWork, Matrix, ModelWork
from mcore_rl.planner.hardware import Hardware
from mcore_rl.planner.roles import ITEMSIZES

# Of a server's scheduler for each forward pass, which the next pass waits for. An assumption.
SCHEDULER_S = 2e-3
# Kernels of a layer that are no product: two norms, rotary embedding, cache write, attention,
# activation; of a router: softmax, top k, sorting of tokens, sum.
_SMALL_KERNELS, _ROUTER_KERNELS = 6, 4
_MOST_SIGMA = 5.0  # lengths a factor of 148 apart within one standard deviation
_MOST_GROUPS = 64  # of responses of equal length, that a simulation tells apart


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of responses: a log-normal distribution cut off at `longest`, or a list of them.

    Attributes:
        mean: Of the responses after the cut.
        sigma: Of the logarithm of the length.
    """

    mean: float
    longest: int
    sigma: float = 0.6
    prompt: float = 256.0  # tokens of a prompt
    values: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_at_least("--response-tokens", self.mean, 1)
        check_at_least("--prompt-tokens", self.prompt, 1)
        check_between("--length-sigma", self.sigma, 0, _MOST_SIGMA)
        if not self.values and self.mean > self.longest:
            raise ConfigError(
                f"--response-tokens={self.mean:g}: rollout.max_response_tokens={self.longest}; "
                f"allowed: up to {self.longest}"
            )

    def draw(self, count: int) -> NDArray[np.float64]:
        """Return `count` lengths at evenly spaced probabilities, in ascending order."""
        if self.values:
            ordered = np.sort(np.array(self.values, np.float64))
            positions = ((np.arange(count) + 0.5) / count * len(ordered)).astype(int)
            return np.asarray(np.minimum(ordered[positions], self.longest))
        normal = NormalDist()
        scores = np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
        low, high = 0.0, math.log(max(self.longest, 2)) + 8
        for _ in range(60):  # the median whose mean after the cut is `mean`
            middle = (low + high) / 2
            lengths = np.minimum(np.exp(middle + self.sigma * scores), self.longest)
            low, high = (middle, high) if lengths.mean() < self.mean else (low, middle)
        return np.asarray(np.clip(np.exp(low + self.sigma * scores), 1.0, self.longest))

    @property
    def sequence(self) -> float:
        """Tokens of a sequence as attention sees them: sum of squares over the sum."""
        totals = self.draw(256) + self.prompt
        return float((totals**2).sum() / totals.sum())


def read_lengths(path: Path, longest: int, prompt: float) -> Lengths:
    """Read lengths of responses, one whole number a line.

    Raises:
        ConfigError: The file cannot be read, or a line is no number above 0.
    """
    try:
        lines = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--lengths={str(path)!r} cannot be read: {error}") from error
    if not lines:
        raise ConfigError(f"--lengths={str(path)!r} is empty; allowed: a length a line")
    bad = next((line for line in lines if not line.isdecimal() or int(line) < 1), None)
    if bad is not None:
        raise ConfigError(
            f"--lengths={str(path)!r}: {bad!r}; allowed: whole numbers above 0, one a line"
        )
    values = tuple(int(line) for line in lines)
    mean = sum(min(value, longest) for value in values) / len(values)
    return Lengths(mean, longest, prompt=prompt, values=values)


@dataclass(frozen=True, slots=True)
class GenerationTime:
    """Seconds of the slowest server for all responses of a step."""

    prefill_s: float
    decode_s: float  # without what follows
    expert_parallel_s: float
    tail_s: float  # with less than a tenth of the most responses at once
    steady_tokens_per_s: float  # of a server whose slots are full
    most_running: int

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s + self.expert_parallel_s + self.tail_s


class ServerModel:
    """Predicts forward passes of one generation server."""

    def __init__(
        self,
        work: ModelWork,
        config: HFConfig,
        rollout: RolloutConfig,
        hardware: Hardware,
        dtype: str,
    ) -> None:
        """Prepare the rates and sizes of a server.

        Args:
            dtype: model.dtype, of activations, of the cache, and of weights that are not quantised.
        """
        self.work, self.rollout, self.hardware = work, rollout, hardware
        is_float8 = rollout.quantization is not None
        self.state_itemsize = ITEMSIZES[dtype]
        self.itemsize = 1 if is_float8 else self.state_itemsize
        self.rate = hardware.get_flops("float8" if is_float8 else dtype)
        self.attention_rate = hardware.get_flops(dtype)
        self.tp, self.num_workers = rollout.tp, rollout.num_workers
        self.kv_bytes = count_token_bytes(config, rollout, dtype)
        self.layers = Counter(work.layers)
        self._num_caching = sum(1 for layer in work.layers if layer.pair_flops)

    def count_weight_bytes(self) -> float:
        """Return the bytes of the weights on one worker."""
        expert = sum(layer.expert_parameters for layer in self.work.layers)
        dense = self.work.parameters - expert
        return self.itemsize * (dense / self.tp + expert / self.num_workers)

    def count_cache_room(self) -> float:
        """Return the bytes that the KV cache of a worker may have where settings do not say."""
        if self.hardware.device == "cpu":
            return CPU_BYTES
        free = GPU_SHARE * self.hardware.memory_bytes - self.hardware.reserved_bytes
        return free - self.count_weight_bytes()

    def count_slots(self, sequence: float) -> int:
        """Return the responses that a server generates at once: its limit, or its cache's."""
        most = self.rollout.max_num_seqs or DEFAULT_MAX_SEQS[self.hardware.device]
        cache = self.rollout.kv_cache_bytes or self.count_cache_room()
        cached = cache / max(1, self.kv_bytes * sequence)
        return max(1, min(most, int(cached)) * self.rollout.dp)

    def predict_pass(self, sequences: float, tokens: float, context: float) -> tuple[float, float]:
        """Return the seconds of a pass, and of them those of expert-parallel communication.

        Args:
            sequences: Of all data-parallel ranks, each with `tokens` new ones.
            context: Keys that a query attends to.
        """
        hardware, per_rank = self.hardware, sequences * tokens / self.rollout.dp
        total = exchange = 0.0
        reduce_s = hardware.predict_all_reduce(
            per_rank * self.work.hidden_size * self.state_itemsize, self.tp
        )
        for layer, count in self.layers.items():
            seconds = sum(self._multiply(matrix, per_rank) for matrix in layer.matrices)
            seconds += self._attend(layer, sequences / self.rollout.dp, tokens, context)
            seconds += _SMALL_KERNELS * hardware.kernel_latency_s + 2 * reduce_s
            if layer.is_moe:
                seconds += self._run_experts(layer, sequences * tokens)
                sent = self._exchange(layer, per_rank)
                exchange += count * sent
                seconds += sent
            total += count * seconds
        # Of a prompt, the last token alone has logits.
        head = self._multiply(self.work.head, sequences / self.rollout.dp)
        return total + head + SCHEDULER_S, exchange

    def _multiply(self, matrix: Matrix, tokens: float) -> float:
        local = matrix.numel / (self.tp if matrix.is_sharded else 1)
        states = tokens * (matrix.rows + matrix.columns)
        traffic = local * self.itemsize + states * self.state_itemsize
        seconds = max(2 * local * tokens / self.rate, traffic / self.hardware.memory_rate)
        return max(seconds, self.hardware.kernel_latency_s)

    def _attend(self, layer: LayerWork, sequences: float, tokens: float, context: float) -> float:
        """Return the seconds to read the cache of each sequence and to compare its pairs."""
        if not layer.pair_flops:
            return 0.0
        keys = min(context, layer.window) if layer.window else context
        cache = sequences * keys * self.kv_bytes / self._num_caching
        pair_flops = layer.decode_pair_flops if tokens == 1 else 0.0
        pairs = sequences * tokens * keys * (pair_flops or layer.pair_flops) / self.tp
        return max(cache / self.hardware.memory_rate, pairs / self.attention_rate)

    def _run_experts(self, layer: LayerWork, tokens: float) -> float:
        """Return the seconds of experts: those that no token chose are not read.

        Of E experts, tokens that choose k each at random reach E (1 - (1 - k / E) ^ tokens).
        """
        reached = 1 - (1 - layer.topk / layer.num_experts) ** tokens
        seconds = _ROUTER_KERNELS * self.hardware.kernel_latency_s
        for matrix in layer.experts:
            size = matrix.numel / self.num_workers  # experts, or columns of all, over workers
            traffic = layer.num_experts * reached * size * self.itemsize
            states = tokens * layer.topk * (matrix.rows + matrix.columns) / self.num_workers
            traffic += states * self.state_itemsize
            flops = 2 * tokens * layer.topk * size
            seconds += max(flops / self.rate, traffic / self.hardware.memory_rate)
        return seconds

    def _exchange(self, layer: LayerWork, tokens: float) -> float:
        """Return the seconds to bring tokens to experts of other data-parallel ranks, and back.

        Within a data-parallel rank, all tp ranks have the tokens: the all-reduce is all.
        """
        dp = self.rollout.dp
        if dp == 1:
            return 0.0
        link = self.hardware.get_link(self.num_workers)
        copies = min(layer.topk, self.num_workers)
        row = self.work.hidden_size * self.state_itemsize
        size = tokens / self.tp * copies * row * (dp - 1) / dp
        return 2 * link.predict_s(size)

    def predict(self, lengths: Sequence[float], prompt: float, group_size: int) -> GenerationTime:
        """Predict the generation of responses that a server starts together.

        A response that ends makes room for the next; the order of lengths is mixed. The prompts of
        a group share their cache.

        Args:
            lengths: Tokens of each response.
        """
        order = _mix(np.asarray(lengths, np.float64))
        slots = self.count_slots(prompt + float(order.mean()))
        weight = max(1.0, len(order) / _MOST_GROUPS)  # responses that one stands for
        if weight > 1:
            middles = ((np.arange(_MOST_GROUPS) + 0.5) * weight).astype(int)
            order = _mix(np.sort(order)[middles])
        waiting = deque(order.tolist())
        at_once = max(1, min(len(order), int(slots / weight)))
        left = [waiting.popleft() for _ in range(at_once)]
        done = [0.0] * at_once
        decode = experts = tail = 0.0
        most_running = at_once * weight
        best = 0.0
        while left:
            step = min(left)
            running = len(left) * weight
            context = prompt + sum(done) / len(done) + step / 2
            seconds, exchange = self.predict_pass(running, 1, context)
            best = max(best, running / seconds)
            if running < most_running / 10:
                tail += step * seconds
            else:
                decode += step * (seconds - exchange)
                experts += step * exchange
            pairs = [(a - step, d + step) for a, d in zip(left, done, strict=True) if a > step]
            left, done = [a for a, _ in pairs], [d for _, d in pairs]
            while waiting and len(left) < at_once:
                left.append(waiting.popleft())
                done.append(0.0)
        tokens = prompt * math.ceil(len(lengths) / group_size)
        return GenerationTime(
            prefill_s=self.predict_prefill(tokens, prompt),
            decode_s=decode,
            expert_parallel_s=experts,
            tail_s=tail,
            steady_tokens_per_s=best,
            most_running=round(most_running),
        )

    def predict_prefill(self, num_tokens: float, prompt: float) -> float:
        """Return the seconds of the prompts, in passes of max_num_batched_tokens."""
        most = self.rollout.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS
        passes = math.ceil(num_tokens / most)
        tokens = num_tokens / passes / prompt
        return passes * self.predict_pass(tokens, prompt, prompt / 2)[0]


def _mix(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values in an order without trend, the same each time."""
    return np.random.default_rng(0).permutation(np.sort(values))
