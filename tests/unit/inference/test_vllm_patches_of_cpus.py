"""vLLM's compiled CPU operators return what its plain-torch forms return."""

from __future__ import annotations

import pytest
import torch
from vllm import ir
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform

if not current_platform.is_cpu():
    pytest.skip("patches for the CPU", allow_module_level=True)

from mcore_rl.inference.vllm.patches import cpu

cpu.use_compiled_ops()

EPS = 1e-6
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}


def _run_norm(name: str, *args: torch.Tensor):
    """Return the result, that of plain torch, and whether our operator was chosen."""
    op = getattr(ir.ops, name)
    with op.set_priority(cpu.PRIORITY["ir_op_priority"][name] + ["native"]):
        chosen = op.dispatch(*args, EPS).provider != "native"
        return op._inner_call(*args, EPS), op.impls["native"].impl_fn(*args, EPS), chosen


def _check(result, expected, dtype):
    torch.testing.assert_close(result, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_sampling_parameters_are_repeated_for_the_drafted_tokens_of_each_request():
    temperatures, numbers = torch.tensor([0.6, 0.0, 1.4, 0.2]), torch.tensor([2, 3, 3, 5])
    repeated = cpu.repeat_by_counts(temperatures, numbers, 5, 0, 1)
    torch.testing.assert_close(repeated, torch.tensor([0.6, 0.6, 1.0, 0.2, 0.2]))
    top_k = cpu.repeat_by_counts(torch.tensor([7, 0, 5, 131]), numbers, 5)
    assert top_k.tolist() == [7, 7, 0, 131, 131]


def test_the_operator_of_vllm_that_is_replaced_still_loses_its_output():
    """If this fails, cpu.repeat_sampling_parameters can go."""
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    output = torch.full((2,), -9.0)
    _expand_kernel_impl(output, torch.tensor([0.6]), torch.tensor([2]), 0, 1)
    assert output.tolist() == [-9.0, -9.0]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [16, 32, 128, 144])
def test_norms_are_those_of_plain_torch(size, dtype):
    make = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(37, size, generator=make).to(dtype) for _ in range(2))
    weight = torch.randn(size, generator=make).to(dtype)
    result, expected, chosen = _run_norm("rms_norm", x, weight)
    assert chosen
    _check(result, expected, dtype)
    result, expected, chosen = _run_norm("fused_add_rms_norm", x, residual, weight)
    assert chosen
    for actual, reference in zip(result, expected, strict=True):
        _check(actual, reference, dtype)


def test_norm_of_heads_cut_out_of_a_wider_row():
    wide = torch.randn(37, 256)
    heads = wide[:, 64:192].view(37, 4, 32)  # as queries stand in the output of one product
    result, expected, chosen = _run_norm("rms_norm", heads, torch.randn(32))
    assert chosen and not heads.is_contiguous()
    _check(result, expected, torch.float32)


@pytest.mark.parametrize(("size", "dtype"), [(33, torch.float32), (32, torch.bfloat16)])
def test_norms_that_the_compiled_ones_cannot_do_are_left_to_torch(size, dtype):
    x, weight = torch.randn(5, size).to(dtype), torch.randn(size)
    for name, inputs in (("rms_norm", [x]), ("fused_add_rms_norm", [x, x])):
        result, expected, chosen = _run_norm(name, *inputs, weight)
        assert not chosen
        torch.testing.assert_close(result, expected)


def test_a_sum_of_rows_that_do_not_stand_end_to_end_is_left_to_torch():
    wide = torch.randn(5, 64)
    result, expected, chosen = _run_norm(
        "fused_add_rms_norm", wide[:, :32], wide[:, 32:], torch.randn(32)
    )
    assert not chosen
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("head", "rotated"), [(32, 32), (64, 32), (64, 16), (8, 8)])
def test_rotation_is_that_of_plain_torch(head, rotated, neox):
    with set_current_vllm_config(
        VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"]))
    ):
        rotary = RotaryEmbedding(head, rotated, 512, 10000.0, neox, torch.float32)
    assert rotary._forward_method.__func__ is cpu.rotate
    positions = torch.randint(512, (37,))
    wide = torch.randn(37, 7 * head)
    query, key = wide[:, : 4 * head], wide[:, 4 * head : 6 * head]
    expected = rotary.forward_native(positions, query.clone(), key.clone())
    threed = rotary(positions, query.clone().view(37, 4, head), key.clone().view(37, 2, head))
    alone, nothing = rotary(positions, query.clone())
    result = rotary(positions, query, key)  # in place, in rows that hold more than it
    for actual, reference, actual_3d in zip(result, expected, threed, strict=True):
        _check(actual, reference, torch.float32)
        _check(actual_3d.flatten(1), reference, torch.float32)
    _check(alone, expected[0], torch.float32)
    assert nothing is None
