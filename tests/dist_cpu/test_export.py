"""An export: each tensor as it was loaded, in few messages."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import ranks
import tiny_families
import tiny_models
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mcore_rl.config.schema import Layout
from mcore_rl.engine.megatron import weights
from tests.nightly import all_but

LAYOUTS = [
    Layout(tp=2),
    Layout(pp=2),
    Layout(dp=2, ep=2),
    Layout(tp=2, pp=2, vpp=2, ep=2),
    Layout(tp=2, etp=2, dp=2),
]
BUCKETS = [1, 64 << 10, weights.EXPORT_BUCKET_BYTES]


@ranks.spawn_on_ranks()
def export(path: Path, layout: Layout, bucket_bytes: int) -> ranks.Result:
    """Tensors, bytes of the buckets, and the messages of this rank by peer."""
    engine = ranks.start_engine(ranks.build_engine_spec(path, layout))
    messages: Counter[str] = Counter()
    transfer = dist.batch_isend_irecv

    def count(operations: list[dist.P2POp]) -> list[dist.Work]:
        messages.update(f"{operation.op.__name__} {operation.peer}" for operation in operations)
        return transfer(operations)

    with (
        mock.patch.object(weights, "EXPORT_BUCKET_BYTES", bucket_bytes),
        mock.patch.object(dist, "batch_isend_irecv", count),
    ):
        tensors = dict(engine.get_per_tensor_param())
        dtype = next(engine.chunks[0].parameters()).dtype
        buckets = [*weights.iter_export_buckets(engine.weights, engine.placement, dtype)]
    owners = [sorted({shard.owner for shard in bucket}) for bucket in buckets]
    return {"tensors": tensors, "messages": dict(messages), "owners": owners}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_families.served_config("qwen3_moe")
    config.num_hidden_layers = 4
    folder = tmp_path_factory.mktemp("export") / "model"
    return tiny_families.save_served(tiny_models.build_from(config), folder)


@pytest.mark.parametrize(
    ("layout", "bucket_bytes"),
    all_but(
        [
            (Layout(tp=2), 1),
            (Layout(dp=2, ep=2), 64 << 10),
            (Layout(tp=2, pp=2, vpp=2, ep=2), 64 << 10),
        ],
        [(layout, num_bytes) for layout in LAYOUTS for num_bytes in BUCKETS],
    ),
    ids=str,
)
def test_an_export_takes_one_message_for_each_owner_and_bucket(path, layout, bucket_bytes):
    first, *other_ranks = export(path, layout, bucket_bytes)
    assert all(not result["tensors"] for result in other_ranks)
    checkpoint = load_file(path / "model.safetensors")
    assert first["tensors"].keys() == checkpoint.keys()
    for name, tensor in checkpoint.items():
        torch.testing.assert_close(first["tensors"][name], tensor, rtol=0, atol=0, msg=name)
    owners = first["owners"]
    expected = Counter(f"irecv {rank}" for bucket in owners for rank in bucket if rank)
    assert first["messages"] == dict(expected)
    for rank, result in enumerate(other_ranks, 1):
        num = expected[f"irecv {rank}"]
        assert result["messages"] == ({"isend 0": num} if num else {})
    assert (len(owners) == 1) == (bucket_bytes == weights.EXPORT_BUCKET_BYTES)
