"""Products in float32 on a CPU: by oneDNN, equal to torch's, and only where they suit it."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from mcore_rl.engine.megatron import device
from mcore_rl.engine.megatron.products import multiply

device.install(1, on_cpu=True)
from megatron.core.tensor_parallel import layers  # noqa: E402

ONEDNN = "mkldnn::_linear_pointwise"


def count_onednn_products(function):
    with profile(activities=[ProfilerActivity.CPU]) as record:
        function()
    return sum(event.count for event in record.key_averages() if event.key == ONEDNN)


def make_factors(shape, columns, *, transposed="", dtype=torch.float32):
    torch.manual_seed(0)
    a, b = torch.randn(*shape, dtype=dtype), torch.randn(shape[-1], columns, dtype=dtype)
    if "a" in transposed:
        a = a.t().contiguous().t()
    if "b" in transposed:
        b = b.t().contiguous().t()
    return a, b


@pytest.mark.parametrize("transposed", ["", "a", "b", "ab"])
def test_multiply_is_by_onednn_and_exact_to_float32_in_every_memory_order(transposed):
    a, b = make_factors((512, 512), 256, transposed=transposed)
    assert count_onednn_products(lambda: multiply(a, b)) == 1
    expected = a.double() @ b.double()
    assert (multiply(a, b) - expected).abs().max() < 2e-6 * expected.abs().max()


@pytest.mark.parametrize(
    ("shape", "columns", "dtype"),
    [
        ((512, 512), 255, torch.float32),  # a new shape costs more than it saves
        ((0, 512), 256, torch.float32),
        ((512, 512), 256, torch.float64),
        ((512, 512), 256, torch.bfloat16),
    ],
)
def test_multiply_is_torchs_where_onednn_does_not_suit(shape, columns, dtype):
    a, b = make_factors(shape, columns, dtype=dtype)
    assert count_onednn_products(lambda: multiply(a, b)) == 0
    assert torch.equal(multiply(a, b), a @ b)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_megatrons_linears_multiply_by_onednn_forward_and_backward(is_frozen):
    a, b = make_factors((512, 1, 512), 256)
    x, weight = a.requires_grad_(), b.t().contiguous().requires_grad_(not is_frozen)

    def run():
        if is_frozen:
            output = layers.LinearWithFrozenWeight.apply(x, weight, None, False, None)
        else:
            function = layers.LinearWithGradAccumulationAndAsyncCommunication
            output = function.apply(x, weight, None, False, False, False, None, 0, None)
        output.square().sum().backward()

    assert count_onednn_products(run) == (2 if is_frozen else 3)
    reference, copy = a.detach().clone().requires_grad_(), weight.detach().clone()
    (reference @ copy.requires_grad_().t()).square().sum().backward()
    torch.testing.assert_close(x.grad, reference.grad, rtol=1e-4, atol=1e-2)
    if not is_frozen:
        torch.testing.assert_close(weight.grad, copy.grad, rtol=1e-4, atol=1e-1)
