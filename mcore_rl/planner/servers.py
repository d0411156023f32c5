"""Memory of a generation server's worker beside weights and KV cache: CUDA graphs and workspace.

Sources: CUDA graphs, vLLM pull request 11349 (0.21 GiB, 16 layers, 35 sizes); attention, the
default workspace of FlashInfer. On Blackwell vLLM captures graphs of up to 1,024 tokens; those are
not counted.
"""

from __future__ import annotations

from typing import Any

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.inference.kv_cache import DEFAULT_MAX_SEQS
from mcore_rl.inference.registry import DEFAULT_BATCHED_TOKENS
from mcore_rl.models.base import HFConfig, get_family, get_model_sizes

GRAPH_BYTES = 400_000  # of a layer in a CUDA graph of one batch size
ATTENTION_WORKSPACE_BYTES = 394 << 20
_MAX_GRAPH_SIZE = 512  # tokens of the largest graph by default (vllm/config/vllm.py:2356)
_FLOAT32 = 4


def list_graph_sizes(settings: RolloutConfig) -> list[int]:
    """Return the batch sizes in tokens that vLLM captures graphs of.

    As VllmConfig._set_cudagraph_sizes (vllm/config/vllm.py:2340), which needs a GPU's platform.
    """
    passed: dict[str, Any] = settings.engine
    compilation = passed.get("compilation_config") or {}
    if (
        passed.get("enforce_eager")
        or passed.get("optimization_level") == 0
        or str(compilation.get("cudagraph_mode", "")).upper() == "NONE"
    ):
        return []
    max_seqs = settings.max_num_seqs or DEFAULT_MAX_SEQS["cuda"]
    max_tokens = settings.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS
    if sizes := compilation.get("cudagraph_capture_sizes"):
        return sorted(size for size in set(sizes) if size <= max_tokens)
    query_tokens = 1 + settings.speculative.num_tokens
    largest = compilation.get("max_cudagraph_capture_size")
    decode_sizes: list[int] = []
    if largest is None:
        largest = min(2 * max_seqs * query_tokens, _MAX_GRAPH_SIZE)
        counts = [max_seqs]
        if query_tokens > 1:  # batches of sequences with as many drafts each
            most = min(max_seqs, _MAX_GRAPH_SIZE)
            counts = [*_list_steps(most), most]
        decode_sizes = [n * query_tokens for n in counts if n * query_tokens <= largest]
    largest = min(max_tokens, largest)
    sizes = _list_steps(largest)
    if passed.get("performance_mode") == "interactivity":
        sizes = [n for n in sizes if n > 4] + list(range(1, min(largest, 32) + 1))
    last = [max_tokens] if max_tokens <= largest else []
    return sorted({*sizes, *last, *(n for n in decode_sizes if n <= max_tokens)})


def _list_steps(most: int) -> list[int]:
    """Return 1, 2, 4, multiples of 8 below 256 and of 16 from there, up to `most`."""
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)]
    return [size for size in steps if size <= most]


def count_graph_bytes(settings: RolloutConfig, model: HFConfig) -> int:
    """Return the bytes of a worker's CUDA graphs: one for each batch size, in pieces by layer."""
    return GRAPH_BYTES * len(list_graph_sizes(settings)) * get_model_sizes(model).num_layers


def count_workspace_bytes(
    settings: RolloutConfig, model: HFConfig, itemsize: int, imbalance: float
) -> int:
    """Return the bytes of a forward pass of a worker: layers, logits, attention kernels.

    Args:
        imbalance: Tokens of the fullest rank's experts, over the mean.
    """
    fields = get_family(model).config_map(model)
    tokens = settings.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS
    sequences = settings.max_num_seqs or DEFAULT_MAX_SEQS["cuda"]
    columns = 3 * fields["ffn_hidden_size"] / settings.tp
    if fields.get("num_moe_experts"):
        chosen, ffn = fields["moe_router_topk"], fields["moe_ffn_hidden_size"]
        width = ffn if settings.ep else ffn / settings.tp
        received = 1.0 if not settings.ep else imbalance / settings.num_workers
        gathered = settings.dp if settings.ep else 1
        routed = chosen * received * gathered
        columns = max(columns, routed * (2 * fields["hidden_size"] + 3 * width))
    layer = tokens * (4 * fields["hidden_size"] + columns) * itemsize
    logits = sequences * int(model["vocab_size"]) * 2 * _FLOAT32
    return int(max(layer, logits)) + ATTENTION_WORKSPACE_BYTES
