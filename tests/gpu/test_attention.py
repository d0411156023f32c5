"""Attention without Transformer Engine on a GPU, against plain attention in float64 on the CPU."""

import pytest
import torch

from tests.unit.engine.test_attention import (
    LENGTHS,
    SHAPES,
    attention,
    packed,
    reference,
    tensors,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_outputs_and_gradients_equal_plain_attention(lengths, shape, dtype, tolerance):
    inputs = tensors(lengths, **shape)
    expected = reference(*inputs, lengths, scale=0.3)
    expected.sin().sum().backward()

    module = attention(softmax_scale=0.3, dim=shape.get("dim", 8))
    moved = [x.detach().to(DEVICE, dtype).requires_grad_() for x in inputs]
    starts = packed(lengths)
    starts.cu_seqlens_q = starts.cu_seqlens_q.to(DEVICE)
    actual = module(*moved, packed_seq_params=starts)
    actual.sin().sum().backward()
    assert actual.device == DEVICE and actual.dtype is dtype
    gradients = [(m.grad, x.grad) for m, x in zip(moved, inputs, strict=True)]
    for tensor, plain in [(actual, expected), *gradients]:
        torch.testing.assert_close(tensor.cpu().double(), plain, rtol=tolerance, atol=tolerance)
