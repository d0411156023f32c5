"""What the ranks run for test_packing.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ranks
import torch

from mcore_rl.config.schema import Layout
from mcore_rl.data.batch import Batch
from mcore_rl.engine.megatron import device
from mcore_rl.engine.megatron.engine import MegatronEngine
from mcore_rl.parallel.groups import initialize_groups
from mcore_rl.workers.policy_loss import supervised_loss

ONE_PACK = 10_000  # tokens: all samples of a test in one micro-batch
# (seed of a permutation or None, budget in tokens). The last budget is below many samples.
PACKINGS = ((None, ONE_PACK), (1, ONE_PACK), (2, 96), (3, 64), (4, 40), (None, 16))


def packings(path: Path, layout: Layout, batch: Batch) -> ranks.Result:
    """Loss, metrics and gradients of this rank for each packing of the same batch."""
    engine = ranks.started(ranks.engine_spec(path, layout))
    return {str(packing): _one_packing(engine, batch, *packing) for packing in PACKINGS}


def _one_packing(
    engine: MegatronEngine, batch: Batch, seed: int | None, budget: int
) -> dict[str, Any]:
    order = np.arange(len(batch)) if seed is None else _permutation(len(batch), seed)
    shuffled = batch.take(order.tolist())
    mine = shuffled.take(ranks.share_of(engine, shuffled))
    engine.spec.engine.max_tokens_per_micro_batch = budget
    engine.optimizer_zero_grad()
    results = engine.forward_backward_batch(mine, supervised_loss, forward_only=False)
    parameters = [p for chunk in engine.chunks for p in chunk.parameters()]
    return {
        "num_micro_batches": len(results),
        "metrics": engine._summed(results),
        "gradients": torch.cat([p.main_grad.flatten() for p in parameters]),
    }


def _permutation(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(size)


ATTENTION_SHAPES = {  # heads, groups, key dim, value dim
    "grouped_queries": (4, 2, 8, 8),
    "latent": (4, 4, 12, 8),
}


def attention(cp: int) -> ranks.Result:
    """Attention of this CP rank's tokens, and of the whole pack, with gradients; in float64."""
    device.install(1)
    from megatron.core import parallel_state

    initialize_groups(Layout(cp=cp), "gloo", seed=0)
    group = parallel_state.get_context_parallel_group()
    return {name: _attention(group, *shape) for name, shape in ATTENTION_SHAPES.items()}


def _attention(group: Any, heads: int, groups: int, dim: int, value_dim: int) -> dict[str, Any]:
    from mcore_rl.engine.megatron.packing import zigzag_rows

    cp, rank = group.size(), group.rank()
    # Padded as packs are. Some share a call of the kernel, and the long ones have their own.
    lengths = [2 * cp * chunks for chunks in (70, 1, 3, 3, 50, 2, 1)]
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(sum(lengths), *shape, generator=generator, dtype=torch.float64)

    whole = [random(heads, dim), random(groups, dim), random(groups, value_dim)]
    weights = random(heads * value_dim)
    rows = torch.from_numpy(zigzag_rows(lengths, cp, rank))
    mine = [x[rows].requires_grad_() for x in whole]
    whole = [x.requires_grad_() for x in whole]
    found = _attend(group, mine, lengths)
    (found * weights[rows]).sum().backward()
    wanted = _attend(None, whole, lengths)
    (wanted * weights).sum().backward()
    return {
        "found": [found.detach(), *(x.grad for x in mine)],
        "wanted": [wanted.detach()[rows], *(x.grad[rows] for x in whole)],
    }


def _attend(group: Any, qkv: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from mcore_rl.engine.megatron.attention import PackedAttention

    module = PackedAttention(
        TransformerConfig(
            num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0
        ),
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        softmax_scale=0.3,
        pg_collection=None if group is None else SimpleNamespace(cp=group),
    )
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return module(*qkv, packed_seq_params=PackedSeqParams("thd", starts, starts))
