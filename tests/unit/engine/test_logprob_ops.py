"""The compiled tile of the log-prob head: what float64 says of the same logits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl import _csrc
from mcore_rl.engine.megatron.logprob import VocabShard, token_scores
from mcore_rl.engine.megatron.logprob_ops import (
    LossGradients,
    Sums,
    add_tile,
    grad_tile_,
    reference_add_tile,
    reference_grad_tile_,
)

# Around lanes of 16 and chunks of 1024.
WIDTHS = [1, 2, 15, 16, 17, 1023, 1024, 1025, 3001]
CLOSE = {"atol": 2e-6, "rtol": 2e-6}


def logits_of(tokens: int, ids: int, dtype: torch.dtype, seed: int, std: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (std * torch.randn(tokens, ids, generator=generator)).to(dtype)


def targets_of(tokens: int, ids: int, seed: int) -> torch.Tensor:
    return torch.randint(0, ids, (tokens,), generator=torch.Generator().manual_seed(seed))


def exact(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """[2, tokens] log-probs and entropy in float64; differentiable."""
    log_p = torch.log_softmax(logits.double() / temperature, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return torch.stack([log_p.gather(1, targets[:, None]).squeeze(1), entropy])


def swept(
    logits: torch.Tensor, targets: torch.Tensor, width: int, temperature: float, threads: int = 1
) -> Sums:
    """The sums over all tiles of `width` ids."""
    sums = Sums.empty(len(logits), "cpu", with_entropy=True)
    for start in range(0, logits.shape[1], width):
        tile = logits[:, start : start + width]
        add_tile(tile, targets, start, sums, temperature=temperature, num_threads=threads)
    return sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=40)
@given(
    tokens=st.sampled_from([1, 3, 70]),
    ids=st.sampled_from(WIDTHS),
    width=st.sampled_from(WIDTHS),
    temperature=st.sampled_from([1.0, 0.5, 1.7]),
    threads=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_forward_and_backward_over_any_tiles(
    dtype: torch.dtype,
    tokens: int,
    ids: int,
    width: int,
    temperature: float,
    threads: int,
    seed: int,
) -> None:
    logits, targets = logits_of(tokens, ids, dtype, seed, 3.0), targets_of(tokens, ids, seed)
    width = max(width, ids // 40)
    before = logits.clone()
    sums = swept(logits, targets, width, temperature, threads)
    assert torch.equal(logits, before)
    wide = logits.double().requires_grad_()
    expected = exact(wide, targets, temperature)
    found = torch.stack([sums.log_probs(), sums.entropy()])
    scale = logits.float().abs().max() / temperature  # float32 has 24 bits of it
    torch.testing.assert_close(found.double(), expected.detach(), atol=2e-6 + 3e-7 * scale, rtol=0)

    of_loss = torch.randn(2, tokens, generator=torch.Generator().manual_seed(seed))
    expected.backward(of_loss.double())
    of = LossGradients(sums.top, sums.total, of_loss[0], sums.entropy(), of_loss[1])
    for start in range(0, ids, width):
        tile = logits[:, start : start + width]
        grad_tile_(tile, targets, start, of, temperature=temperature, num_threads=threads)
    close = CLOSE if dtype is torch.float32 else {"atol": 1e-5, "rtol": 2**-8}
    torch.testing.assert_close(logits.double(), wide.grad, **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_entropy_there_is_no_moment_and_the_rest_is_the_same(dtype: torch.dtype) -> None:
    logits, targets = logits_of(9, 2000, dtype, 0, 2.0), targets_of(9, 2000, 1)
    sums, whole = Sums.empty(9, "cpu", with_entropy=False), swept(logits, targets, 2000, 1.0)
    add_tile(logits, targets, 0, sums)
    torch.testing.assert_close(sums.log_probs(), whole.log_probs(), **CLOSE)
    with pytest.raises(ValueError, match="with_entropy=False"):
        sums.entropy()
    ones = torch.ones(9)
    wide = logits.double().requires_grad_()
    exact(wide, targets, 1.0)[0].sum().backward()
    grad_tile_(logits, targets, 0, LossGradients(sums.top, sums.total, ones))
    close = CLOSE if dtype is torch.float32 else {"atol": 1e-6, "rtol": 2**-8}
    torch.testing.assert_close(logits.double(), wide.grad, **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_torch_says_the_same(dtype: torch.dtype) -> None:
    logits, targets = logits_of(33, 777, dtype, 2, 4.0), targets_of(33, 900, 3)
    ours, plain = (Sums.empty(33, "cpu", with_entropy=True) for _ in range(2))
    for start in (0, 500):
        tile = logits[:, start : start + 500]
        add_tile(tile, targets, start + 100, ours, temperature=0.8)
        reference_add_tile(tile, targets, start + 100, plain, temperature=0.8)
    for name, a, b in zip(ours._fields, ours, plain, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-6, msg=lambda m, name=name: name + m)
    assert (targets < 100).any() and (targets >= 877).any()  # targets of no tile
    of = LossGradients(plain.top, plain.total, torch.ones(33), plain.entropy(), torch.ones(33))
    again = logits.clone()
    grad_tile_(logits, targets, 100, of, temperature=0.8)
    reference_grad_tile_(again, targets, 100, of, temperature=0.8)
    rtol = 1e-5 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(logits, again, atol=1e-6, rtol=rtol)


def test_it_can_stand_in_the_inner_loop_of_the_head() -> None:
    generator = torch.Generator().manual_seed(5)
    hidden, head = (torch.randn(n, 24, generator=generator) for n in (50, 333))
    targets, temperature = targets_of(50, 333, 6), 0.9
    scores = token_scores(
        hidden,
        head,
        targets,
        VocabShard(0, 333, None),
        temperature=temperature,
        chunk_bytes=8 * 50 * 64,
        with_entropy=True,
    )
    sums = Sums.empty(50, "cpu", with_entropy=True)
    for start in range(0, 333, 64):
        logits = hidden @ head[start : start + 64].t()
        add_tile(logits, targets, start, sums, temperature=temperature)
    torch.testing.assert_close(sums.log_probs(), scores.log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(sums.entropy(), scores.entropy, atol=1e-5, rtol=0)


def test_large_small_and_masked_logits() -> None:
    logits = torch.zeros(4, 100)
    logits[0] += 1e30  # all alike, and large
    logits[1, 7] = 1e4  # one takes all
    logits[2, ::2] = -torch.inf  # masked
    logits[3] = -1e30
    targets = torch.full((4,), 7)
    sums = swept(logits, targets, 13, 1.0)
    expected = [-math.log(100), 0.0, -math.log(50), -math.log(100)]
    assert sums.log_probs().tolist() == pytest.approx(expected, abs=1e-6)
    assert sums.entropy().tolist() == pytest.approx([-x for x in expected], abs=1e-6)
    ones = torch.ones(4)
    grad = logits.clone()
    grad_tile_(grad, targets, 0, LossGradients(sums.top, sums.total, ones, sums.entropy(), ones))
    assert grad.isfinite().all()
    assert (grad[2, ::2] == 0).all()
    torch.testing.assert_close(grad.sum(1), torch.zeros(4), atol=1e-5, rtol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_shows(bad: float) -> None:
    logits = torch.zeros(3, 40)
    logits[1, 33] = bad
    sums = swept(logits, torch.zeros(3, dtype=torch.int64), 40, 1.0)
    assert sums.log_probs().isnan().tolist() == [False, True, False]
    assert sums.entropy().isnan().tolist() == [False, True, False]


def test_every_float_that_a_probability_comes_from() -> None:
    x = torch.linspace(-88, 0, 20001).view(-1, 1)
    zeros, ones = torch.zeros(len(x)), torch.ones(len(x))
    p = x.clone()  # d log_prob / dz of another token's target is -p
    targets = torch.full((len(x),), 5)
    grad_tile_(p, targets, 0, LossGradients(zeros, ones, ones))
    expected = -x.double().exp()
    above = x >= -87
    assert ((p - expected).abs() / expected.abs())[above].max() < 2.5e-7
    assert (p[~above] == 0).all()


def fine(tokens: int = 4) -> tuple[torch.Tensor, torch.Tensor, Sums]:
    sums = Sums.empty(tokens, "cpu", with_entropy=True)
    return torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64), sums


def test_nothing_is_done_with_no_tokens_or_no_ids() -> None:
    logits, targets, sums = fine()
    add_tile(logits[:, :0], targets, 0, sums)
    assert not sums.total.any()
    add_tile(logits[:0], targets[:0], 0, Sums.empty(0, "cpu", with_entropy=False))


@pytest.mark.parametrize(
    ("logits", "targets", "tokens", "message"),
    [
        (torch.zeros(4, 8).double(), None, 4, "logits are .* allowed: .* float32 or bfloat16"),
        (torch.zeros(4), None, 4, "logits are"),
        (torch.zeros(8, 4).t(), None, 4, "logits have strides"),
        (torch.zeros(4, 8, device="meta"), None, 4, "logits are on meta"),
        (torch.zeros(1, 8).expand(4, 8), None, 4, "stride=0; allowed: at least the ids"),
        (None, torch.zeros(3, dtype=torch.int64), 4, r"targets is \[3\] .* allowed: \[4\]"),
        (None, torch.zeros(4, dtype=torch.int32), 4, "targets is .* allowed: .* torch.int64"),
        (None, torch.zeros(8, dtype=torch.int64)[::2], 4, "targets has stride 2; allowed: 1"),
        (None, None, 5, r"top is \[5\] torch.float32 on cpu; allowed: \[4\]"),
    ],
)
def test_arguments_that_do_not_fit(
    logits: torch.Tensor | None, targets: torch.Tensor | None, tokens: int, message: str
) -> None:
    good_logits, good_targets, sums = fine(tokens)
    logits = good_logits if logits is None else logits
    targets = good_targets if targets is None else targets
    with pytest.raises(ValueError, match=message):
        add_tile(logits, targets, 0, sums)


def test_the_sums_must_not_lie_in_the_logits() -> None:
    logits, targets, sums = fine()
    with pytest.raises(ValueError, match="lie in the memory of the logits"):
        add_tile(logits, targets, 0, sums._replace(chosen=logits[1, :4]))
    of = LossGradients(sums.top, logits[3, 4:], sums.chosen)
    with pytest.raises(ValueError, match="lie in the memory of the logits"):
        grad_tile_(logits, targets, 0, of)


def test_addresses_are_not_null() -> None:
    tile = _csrc.LogitTile(0, False, 2, 2, 2, 0, 0, 1.0)
    with pytest.raises(ValueError, match="logits=null; allowed: an address"):
        tile.forward(_csrc.Sums(4, 4, 4, 4), -1, 0, 1)
    tile = _csrc.LogitTile(8, True, 2, 2, 2, 8, 0, 1.0)
    for missing in range(5):
        addresses = [64 * (n != missing) for n in range(5)]
        with pytest.raises(ValueError, match=r"allowed: (an address|given where entropy is)"):
            tile.backward(_csrc.Gradients(*addresses), -1, 0, 1)
    with pytest.raises(ValueError, match="targets=9; allowed: a multiple of the item's size"):
        _csrc.LogitTile(8, True, 2, 2, 2, 9, 0, 1.0)


def test_entropy_and_its_gradient_come_together() -> None:
    logits, targets, sums = fine()
    with pytest.raises(ValueError, match="of_entropy=null; allowed: given where entropy is"):
        grad_tile_(logits, targets, 0, LossGradients(sums.top, sums.total, sums.top, sums.top))
    for temperature in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="scale="):
            add_tile(logits, targets, 0, sums, temperature=temperature)
    with pytest.raises(ValueError, match="num_threads=0"):
        add_tile(logits, targets, 0, sums, num_threads=0)
