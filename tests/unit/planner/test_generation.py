"""Times of generation by hand-worked cases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.planner.flops import count_work
from mcore_rl.planner.generation import SCHEDULER_S, Lengths, ServerModel, read_lengths
from mcore_rl.planner.hardware import load_hardware
from tests.published_runs import read_model

# No latency of kernels: times are traffic and flops.
H100 = replace(load_hardware("h100"), kernel_latency_s=1e-15, nvlink_latency_s=1e-15)


def build_server(name: str, dtype: str = "bfloat16", **fields: object) -> ServerModel:
    config = read_model({"model": name})
    rollout = RolloutConfig(kv_cache_bytes=1 << 40, **fields)  # type: ignore[arg-type]
    return ServerModel(count_work(config), config, rollout, H100, dtype)


DTYPES = pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("float32", 4)])


@DTYPES
def test_decode_of_one_sequence_reads_the_weights_once(dtype: str, itemsize: int) -> None:
    server = build_server("Qwen3-8B", dtype)
    seconds, _ = server.predict_pass(1, 1, 0)
    weights = server.work.parameters - server.work.embedding_parameters
    expected = itemsize * weights / H100.memory_rate + SCHEDULER_S
    assert seconds == pytest.approx(expected, rel=0.01)


def test_workers_divide_experts_and_the_tp_ranks_of_each_the_other_weights() -> None:
    server = build_server("Qwen3-30B-A3B", "float32", tp=2, dp=2, ep=True)
    experts = 48 * 128 * 3 * 2048 * 768
    expected = 4 * ((server.work.parameters - experts) / 2 + experts / 4)
    assert server.count_weight_bytes() == pytest.approx(expected, rel=1e-9)


@DTYPES
def test_decode_reads_the_cache_of_each_sequence(dtype: str, itemsize: int) -> None:
    server = build_server("Qwen3-8B", dtype)
    # 36 layers, keys and values of 8 heads of 128.
    per_token = 36 * 2 * 8 * 128 * itemsize
    short, long = (server.predict_pass(32, 1, context)[0] for context in (1000, 5000))
    assert long - short == pytest.approx(32 * 4000 * per_token / H100.memory_rate, rel=1e-6)


def test_decode_of_latent_attention_compares_latents() -> None:
    """128 heads, latents of 512 with 64 of positions: an H20 has too few flops for its memory."""
    server = build_server("DeepSeek-V3", tp=1)
    server.hardware = load_hardware("h20")
    server.attention_rate = server.hardware.get_flops("bfloat16")
    short, long = (server.predict_pass(32, 1, context)[0] for context in (1000, 5000))
    flops = 32 * 4000 * 61 * 2 * 128 * (512 + 64 + 512)
    assert long - short == pytest.approx(flops / (148e12 * 0.785), rel=1e-3)


def test_decode_reads_the_experts_that_tokens_choose() -> None:
    """Read 8 of 128 experts for one token, and all for many tokens."""
    server = build_server("Qwen3-30B-A3B", tp=1)
    expert_bytes = 2 * 48 * 128 * 3 * 2048 * 768
    single, many = (server.predict_pass(n, 1, 0)[0] for n in (1, 512))
    dense_bytes = 2 * (server.work.parameters - server.work.embedding_parameters) - expert_bytes
    assert single - SCHEDULER_S == pytest.approx(
        (dense_bytes + expert_bytes * 8 / 128) / H100.memory_rate, rel=0.02
    )
    assert many - single > 0.9 * expert_bytes * 120 / 128 / H100.memory_rate


def test_equal_responses_take_their_length_in_passes() -> None:
    server = build_server("Qwen3-8B")
    time = server.predict([100.0] * 8, prompt=10, group_size=8)
    assert time.decode_s == pytest.approx(100 * server.predict_pass(8, 1, 10 + 50)[0])
    assert time.tail_s == 0


def test_responses_beyond_the_slots_wait() -> None:
    server = build_server("Qwen3-8B", max_num_seqs=4)
    time = server.predict([100.0] * 8, prompt=10, group_size=8)
    assert time.most_running == 4
    assert time.decode_s == pytest.approx(2 * 100 * server.predict_pass(4, 1, 10 + 50)[0])


def test_one_long_response_is_the_tail() -> None:
    server = build_server("Qwen3-8B")
    time = server.predict([100.0] * 31 + [1100.0], prompt=10, group_size=8)
    assert time.tail_s == pytest.approx(1000 * server.predict_pass(1, 1, 10 + 100 + 500)[0])


def test_a_few_lengths_stand_for_many() -> None:
    """127 responses are no multiple of the lengths that are told apart."""
    server = build_server("Qwen3-8B", max_num_seqs=1)
    lengths = np.arange(1.0, 128.0)
    time = server.predict(lengths.tolist(), prompt=1000, group_size=127)
    passes = (time.decode_s + time.tail_s) / server.predict_pass(1, 1, 1000 + 32)[0]
    assert passes * 127 / 64 == pytest.approx(lengths.sum(), rel=0.02)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_token_of_a_prompt_has_logits(dtype: str) -> None:
    server = build_server("Qwen3-8B", dtype)
    seconds, _ = server.predict_pass(4, 2048, 1024)
    work = server.work
    flops = 2 * 8192 * (work.active_parameters - work.head.numel)
    pairs = 8192 * 1024 * sum(layer.pair_flops for layer in work.layers)
    expected = (flops + pairs) / H100.get_flops(dtype)
    assert seconds == pytest.approx(expected + SCHEDULER_S, rel=0.02)


def test_lengths_have_their_mean_after_the_cut() -> None:
    lengths = Lengths(3000, 4096, sigma=0.6)
    drawn = lengths.draw(2048)
    assert drawn.mean() == pytest.approx(3000, rel=1e-3)
    assert drawn.max() == 4096
    assert np.all(np.diff(drawn) >= 0)
    with pytest.raises(ConfigError, match=r"--response-tokens=5000.*allowed: up to 4096"):
        Lengths(5000, 4096)


def test_lengths_of_a_file_are_drawn_evenly(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("10\n20\n30\n9999\n")
    lengths = read_lengths(path, longest=100, prompt=5)
    assert lengths.draw(4).tolist() == [10, 20, 30, 100]
    assert lengths.mean == 40
    for text, message in (("10\nlong\n", "'long'; allowed"), ("10\n²", "'²'"), ("", "is empty")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_lengths(path, longest=100, prompt=5)


def test_prompts_are_read_in_passes_of_the_batched_tokens() -> None:
    """Eight prompts of 3,000 tokens, of which 4,096 are a pass: six passes of 4,000."""
    server = build_server("Qwen3-8B", max_num_batched_tokens=4096)
    expected = 6 * server.predict_pass(4000 / 3000, 3000, 1500)[0]
    assert server.predict_prefill(8 * 3000, 3000) == pytest.approx(expected)
    # Of two groups of four responses, and one of one, each has one prompt.
    time = server.predict([10.0] * 9, prompt=3000, group_size=4)
    assert time.prefill_s == pytest.approx(server.predict_prefill(3 * 3000, 3000))


def test_a_server_has_the_slots_of_its_limit_or_its_cache() -> None:
    """36 layers with keys and values of 8 heads of 128, half of them on each of two ranks."""
    server = build_server("Qwen3-8B", tp=2)
    server.rollout = replace(server.rollout, kv_cache_bytes=36 * 2 * 4 * 128 * 2 * 10_000)
    assert server.count_slots(1000) == 10
    server.rollout = replace(server.rollout, max_num_seqs=3, dp=2)
    assert server.count_slots(1000) == 2 * 3


def test_replicas_exchange_tokens_of_experts_and_back() -> None:
    """A rank of tp=2 sends the half of a replica's tokens, 4 copies, half to the other replica."""
    server = build_server("Qwen3-30B-A3B", tp=2, dp=2, ep=True)
    _, exchange = server.predict_pass(64, 1, 0)
    size = 32 / 2 * 4 * 2048 * 2 / 2
    link = H100.nvlink_bandwidth * H100.nvlink_share
    assert exchange == pytest.approx(48 * 2 * size / link)
    assert build_server("Qwen3-30B-A3B", tp=4, ep=True).predict_pass(64, 1, 0)[1] == 0


def test_tensor_parallel_ranks_sum_states_twice_a_layer() -> None:
    """A link a thousand times slower adds two all-reduces of 32 states for each of 36 layers."""
    server = build_server("Qwen3-8B", tp=2)
    fast_s, _ = server.predict_pass(32, 1, 0)
    server.hardware = replace(H100, nvlink_bandwidth=H100.nvlink_bandwidth / 1000)
    slow_s, _ = server.predict_pass(32, 1, 0)
    size = 2 * (32 * 4096 * 2) / 2  # of a ring of two: each half goes around twice
    more = 36 * 2 * size * 999 / (H100.nvlink_bandwidth * H100.nvlink_share)
    assert slow_s - fast_s == pytest.approx(more)
