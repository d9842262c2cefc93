"""The fused update: equal to AdamW in float64, and right in the mean where it stores bfloat16."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from moe.kernels.common.backend import INTERPRET
from parallel.engines.optimizer import Group, Piece, Scalars
from parallel.engines.rounding import buffer_seed, random_words, stochastic_bfloat16
from tests.moe.kernels.compile_sm90 import compile_only, needs_tools, report, rows_of
from training.optim import adamw as module
from training.optim.adamw import Rates, adamw, adamw_ref, adamw_triton, rates_numbers

BF16 = torch.bfloat16
BETAS = (0.8, 0.9)
needs_interpreter = pytest.mark.skipif(not INTERPRET, reason="needs Triton's interpreter")


def rates(step=1, lr=0.01, weight_decay=0.1, divisor=1.0, keep=1.0, seed=7, eps=1e-8) -> Rates:
    values = (torch.tensor(float(value)) for value in (lr, step, divisor, keep))
    lr, step, divisor, keep = values
    numbers = rates_numbers(lr, weight_decay, BETAS, step, divisor, keep)
    return Rates(numbers, BETAS, eps, seed)


def states(size: int, weights=torch.float32, moments=torch.float32) -> list[torch.Tensor]:
    """Weights, moments, gradient."""
    m, v = torch.randn(size) * 0.1, torch.rand(size) * 0.01
    return [torch.randn(size).to(weights), m.to(moments), v.to(moments), torch.randn(size)]


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_interpreter)])
def test_equals_torch_adamw_in_float64(backend):
    """Five updates with decay and a clipped gradient, over more than one block."""
    size = 5000
    w, m, v, g = states(size)
    m, v = torch.zeros(size), torch.zeros(size)
    exact = w.double().requires_grad_()
    oracle = torch.optim.AdamW([exact], lr=0.01, betas=BETAS, eps=1e-8, weight_decay=0.1)
    copy = torch.empty(size, dtype=BF16)
    for step in range(1, 6):
        g = torch.randn(size)
        adamw(w, copy, m, v, g, rates(step, divisor=2.5), backend)
        exact.grad = g.double() / 2.5
        oracle.step()
    torch.testing.assert_close(w, exact.detach().float(), rtol=2e-6, atol=2e-7)
    kept = oracle.state[exact]
    torch.testing.assert_close(m, kept["exp_avg"].float(), rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(v, kept["exp_avg_sq"].float(), rtol=2e-6, atol=1e-7)
    assert torch.equal(copy, w.bfloat16()), "nearest, ties to even"


@needs_interpreter
@pytest.mark.parametrize(("weights", "moments"), [(BF16, BF16), (BF16, torch.float32),
                                                  (torch.float32, BF16)])  # fmt: skip
def test_kernel_rounds_with_the_bits_of_the_reference(weights, moments):
    ours = states(3000, weights, moments)
    ours[3] = ours[3].bfloat16() if moments == BF16 else ours[3]
    theirs = [tensor.clone() for tensor in ours]
    first = (1 << 32) - 1000  # places on both sides of 2^32
    copy = torch.empty(3000, dtype=BF16) if weights == torch.float32 else None
    adamw_triton(ours[0], copy, *ours[1:], rates(3, divisor=1.5), first, block=256)
    adamw_ref(theirs[0], None, *theirs[1:], rates(3, divisor=1.5), first)
    for a, b in zip(ours, theirs):
        if a.dtype == BF16:  # a float32 sum that differs in its last bit may round differently
            assert (a != b).float().mean() < 1e-3
        torch.testing.assert_close(a.float(), b.float(), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_interpreter)])
def test_pieces_give_the_bits_of_the_whole(backend):
    whole = states(700, BF16, BF16)
    parts = [tensor.clone() for tensor in whole]
    adamw(whole[0], None, *whole[1:], rates(), backend)
    for start, end in ((0, 192), (192, 256), (256, 700)):
        piece = [tensor[start:end] for tensor in parts]
        adamw(piece[0], None, *piece[1:], rates(), backend, first=start)
    for a, b in zip(whole, parts):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_interpreter)])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_step_that_is_not_kept_changes_no_bit(backend, dtype):
    w, m, v, _ = before = states(300, dtype, dtype)
    w, m, v = (tensor.clone() for tensor in (w, m, v))
    adamw(w, None, m, v, torch.full((300,), torch.nan), rates(keep=0.0), backend)
    assert all(torch.equal(a, b) for a, b in zip((w, m, v), before))


@pytest.mark.parametrize("keep", [1.0, 0.0])
def test_large_buffers_in_host_memory_follow_the_reference(monkeypatch, keep):
    """By PyTorch's fused kernel: four updates, clipped, the third of them perhaps skipped."""
    monkeypatch.setattr(module, "LARGE", 1 << 10)
    rule, group = module.AdamW(betas=list(BETAS)), Group("all", {}, 1.0, 0.1)
    w, m, v, _ = states(3000)
    whole = Piece(w, w, {"exp_avg": m, "exp_avg_sq": v})
    parts = [flat.clone() for flat in (w, m, v)]
    count = torch.zeros(())
    for step in range(4):
        kept = torch.tensor(keep if step == 2 else 1.0)
        count += kept
        gradient = torch.randn(3000) if kept else torch.full((3000,), torch.nan)
        scalars = Scalars(torch.tensor(0.01), count, torch.tensor(2.5), kept)
        small = [
            Piece(a, g, {"exp_avg": b, "exp_avg_sq": c})
            for a, b, c, g in zip(*(flat.split(1000) for flat in (*parts, gradient.clone())))
        ]
        whole.gradient = gradient
        before = w.clone()
        rule.update(group, [whole], scalars)
        rule.update(group, small, scalars)
        assert torch.equal(before, w) == (not kept)
    for a, b in zip((w, m, v), parts):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)
    assert count == 3 + keep


def test_rounding_is_right_in_the_mean_and_has_the_least_variance():
    """x between two neighbours a < b goes to b with probability (x - a) / (b - a)."""
    count = 1 << 18
    step = torch.tensor(5.0)
    word_P, other_P = random_words(3, step, 0, count)
    for value in (1.0 + 2**-9, -0.3, 1.7e-5, 3e-39, 255.9):
        x_P = torch.full((count,), value)
        for bits_P in (word_P & 0xFFFF, word_P >> 16, other_P & 0xFFFF):
            y_P = stochastic_bfloat16(x_P, bits_P).double()
            low, high = y_P.min().item(), y_P.max().item()
            x = x_P[0].item()
            assert low <= x <= high and abs(high - low) <= 2**-7 * abs(x) + 2**-133
            spread = (high - low) / 2 / count**0.5
            assert abs(y_P.mean().item() - x) < 5 * spread
    whole = torch.tensor([1.0, -2.5, 0.0, torch.inf, -torch.inf])
    assert torch.equal(stochastic_bfloat16(whole, word_P[:5] & 0xFFFF).float(), whole)
    assert stochastic_bfloat16(torch.tensor([torch.nan]), word_P[:1] & 0xFFFF).isnan()


def test_random_bits_are_uniform_and_independent():
    """Of neighbours, steps, buffers, and of the three numbers that one element rounds with."""
    count = 1 << 16

    def unit(seed, step, first=0):
        one, two = random_words(seed, torch.tensor(float(step)), first, count)
        parts = (one & 0xFFFF, one >> 16, two & 0xFFFF)
        return [(part.double() + 0.5) / 65536 - 0.5 for part in parts]

    draws = unit(1, 1) + unit(1, 2) + unit(2, 1) + unit(1, 1, first=1) + unit(1, 1, first=1 << 32)
    table = torch.stack(draws)
    assert table.mean(1).abs().max() < 5 * (1 / 12 / count) ** 0.5
    assert (table.square().mean(1) * 12 - 1).abs().max() < 0.02
    matrix = torch.corrcoef(table)
    matrix.fill_diagonal_(0.0)
    # those of first = 1 are those of first = 0, moved by one
    assert matrix.abs().max() < 5 / count**0.5
    assert torch.equal(unit(1, 1)[0][1:], unit(1, 1, first=1)[0][:-1])
    assert buffer_seed(1, 0) != buffer_seed(1, 1) != buffer_seed(2, 0)


def test_small_steps_arrive_in_the_mean():
    """Steps of 2e-4 on bfloat16 weights of 1: nearest rounding would leave all of them at 1."""
    size, steps, lr = 4096, 200, 2e-4
    w, m, v = (torch.full((size,), value).to(BF16) for value in (1.0, 0.0, 0.0))
    exact = torch.ones(1, dtype=torch.float64, requires_grad=True)
    oracle = torch.optim.AdamW([exact], lr=lr, betas=BETAS, eps=1e-12, weight_decay=0.0)
    for step in range(1, steps + 1):
        adamw(w, None, m, v, torch.ones(size), rates(step, lr, 0.0, eps=1e-12))
        exact.grad = torch.ones_like(exact)
        oracle.step()
    moved, expected = 1 - w.double(), 1 - exact.item()
    assert expected == pytest.approx(steps * lr)
    # each step has a variance of at most distance · step
    deviation = (2**-8 * lr * steps) ** 0.5
    assert moved.std() < 1.5 * deviation
    assert abs(moved.mean().item() / expected - 1) < 5 * deviation / size**0.5 / expected + 2e-3


def test_large_buffers_take_further_bits_of_the_place():
    one, _ = random_words(1, torch.tensor(1.0), 5, 4)
    far, _ = random_words(1, torch.tensor(1.0), (1 << 32) + 5, 4)
    assert not torch.equal(one, far)


def test_wrong_buffers_are_refused():
    w, m, v, g = states(8)
    with pytest.raises(ValueError, match=r"flat buffers of one length, got \[8\], \[7\]"):
        adamw(w, None, m[:7], v, g, rates())
    with pytest.raises(ValueError, match="must be alike"):
        adamw(w, None, m.bfloat16(), v, g, rates())


# --- compiled for Hopper ------------------------------------------------------------------------


def _compile() -> None:
    import contextlib

    import training.optim.adamw as module

    module.on_device = lambda tensor: contextlib.nullcontext()
    compile_only(lambda name, kernel: print(json.dumps(report(kernel)), flush=True))
    forms = ((torch.float32,) * 3, (torch.float32, BF16, BF16), (BF16,) * 3)
    for weights, moments, gradients in forms:
        w, m, v, g = states(1 << 14, weights, moments)
        copy = torch.empty(1 << 14, dtype=BF16) if weights == torch.float32 else None
        first = 0 if gradients == torch.float32 else 1 << 33
        adamw_triton(w, copy, m, v, g.to(gradients), rates(), first)


@needs_tools
def test_compiles_for_hopper_without_spills(tmp_path):
    rows = rows_of(__file__, tmp_path)
    assert len(rows) == 3
    for row in rows:
        assert row["spilled bytes"] == 0 and row["registers"] <= 80, row


if __name__ == "__main__":
    sys.exit(_compile())
