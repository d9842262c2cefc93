"""The fused output layer and cross-entropy: same numbers, less memory, every corner."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from models.cross_entropy import cross_entropy_ref, cross_entropy_triton
from models.loss import default_chunk, linear_cross_entropy
from moe.kernels.common.backend import INTERPRET


def inputs(tokens: int, width: int, words: int, dtype=torch.float64):
    x_TD = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight_VD = torch.randn(words, width, dtype=dtype, requires_grad=True)
    labels_T = torch.randint(0, words, (tokens,))
    labels_T[::4] = -100
    return x_TD, weight_VD, labels_T


def plain(x_TD, weight_VD, labels_T):
    return F.cross_entropy(x_TD @ weight_VD.t(), labels_T, reduction="sum")


@pytest.mark.parametrize("chunk", [1, 7, 64, 77, 500, None])
@pytest.mark.parametrize(("tokens", "words"), [(77, 33), (1, 5), (200, 1)])
def test_equals_cross_entropy(tokens: int, words: int, chunk: int | None) -> None:
    x_TD, weight_VD, labels_T = inputs(tokens, 16, words)
    labels_T[-1] = 0
    loss = linear_cross_entropy(x_TD, weight_VD, labels_T, chunk=chunk)
    expected = plain(x_TD, weight_VD, labels_T)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    # scaled as the trainer does, by a tensor
    mine = torch.autograd.grad(loss / torch.tensor(3.0), (x_TD, weight_VD))
    theirs = torch.autograd.grad(expected / 3, (x_TD, weight_VD))
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_backward_twice_through_a_kept_graph() -> None:
    x_TD, weight_VD, labels_T = inputs(20, 8, 11)
    loss = linear_cross_entropy(x_TD, weight_VD, labels_T, chunk=6) * 0.5
    first = torch.autograd.grad(loss, (x_TD, weight_VD), retain_graph=True)
    second = torch.autograd.grad(loss, (x_TD, weight_VD))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_no_valid_label_gives_zero_and_zero_gradients() -> None:
    x_TD, weight_VD, labels_T = inputs(10, 8, 11)
    with torch.no_grad():
        x_TD[3] = torch.nan  # what padding holds must not matter
    loss = linear_cross_entropy(x_TD, weight_VD, torch.full_like(labels_T, -100), chunk=4)
    assert loss == 0
    loss.backward()
    assert torch.equal(x_TD.grad, torch.zeros_like(x_TD))
    finite = weight_VD.grad[:, :0]
    assert finite.isfinite().all()


def test_no_tokens() -> None:
    x_TD, weight_VD, labels_T = inputs(0, 8, 11)
    loss = linear_cross_entropy(x_TD, weight_VD, labels_T)
    loss.backward()
    assert loss == 0 and x_TD.grad.shape == (0, 8) and weight_VD.grad.count_nonzero() == 0


@pytest.mark.parametrize("frozen", ["x", "weight", "both"])
def test_frozen_inputs(frozen: str) -> None:
    x_TD, weight_VD, labels_T = inputs(30, 8, 11)
    expected = plain(x_TD, weight_VD, labels_T)
    full = torch.autograd.grad(expected, (x_TD, weight_VD))
    x_TD.requires_grad_(frozen == "weight")
    weight_VD.requires_grad_(frozen == "x")
    loss = linear_cross_entropy(x_TD, weight_VD, labels_T, chunk=9)
    torch.testing.assert_close(loss, expected)
    assert loss.requires_grad == (frozen != "both")
    if frozen != "both":
        loss.backward()
    for tensor, gradient in zip((x_TD, weight_VD), full, strict=True):
        if tensor.requires_grad:
            torch.testing.assert_close(tensor.grad, gradient)
        else:
            assert tensor.grad is None


def test_evaluation_makes_no_gradients(monkeypatch) -> None:
    x_TD, weight_VD, labels_T = inputs(30, 8, 11)
    asked = []

    def watched(logits_PV, labels_P, grad_dtype, backend):
        asked.append(grad_dtype)
        return cross_entropy_ref(logits_PV, labels_P, grad_dtype)

    monkeypatch.setattr("models.loss.cross_entropy", watched)
    with torch.no_grad():
        quiet = linear_cross_entropy(x_TD, weight_VD, labels_T)
    loss = linear_cross_entropy(x_TD, weight_VD, labels_T)
    assert asked == [None, torch.float64]
    assert torch.equal(quiet, loss.detach()) and not quiet.requires_grad


def test_never_holds_all_logits() -> None:
    """Largest tensor made, and bytes kept for backward, both far below T·V."""
    tokens, width, words = 1024, 16, 512
    x_TD, weight_VD, labels_T = inputs(tokens, width, words, torch.float32)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for part in torch.utils._pytree.tree_leaves(out):
                if isinstance(part, torch.Tensor):
                    largest = max(largest, part.numel())
            return out

    kept = 0

    def pack(tensor):
        nonlocal kept
        kept += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), Watch():
        loss = linear_cross_entropy(x_TD, weight_VD, labels_T)
    loss.backward()
    assert (
        largest == default_chunk(tokens, width, words, x_TD.device) * words == tokens * words // 8
    )
    assert kept == x_TD.numel() + weight_VD.numel()
    torch.testing.assert_close(loss, plain(x_TD, weight_VD, labels_T))


def test_weight_gradient_accumulates_in_fp32() -> None:
    """bf16 sums over chunks would stop growing (1/256 of a value is lost)."""
    tokens = 4096
    x_TD = torch.ones(tokens, 1, dtype=torch.bfloat16, requires_grad=True)
    weight_VD = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    labels_T = torch.zeros(tokens, dtype=torch.int64)
    loss = linear_cross_entropy(x_TD, weight_VD, labels_T, chunk=8)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, torch.tensor(tokens * 0.6931472), rtol=1e-6, atol=0)
    loss.backward()
    assert weight_VD.grad.dtype == torch.bfloat16
    assert weight_VD.grad[:, 0].tolist() == [-tokens / 2, tokens / 2]


def test_autocast_rounds_inputs_only() -> None:
    """fp32 weights under bf16 autocast: products of bf16 values, gradients in fp32."""
    x_TD, weight_VD, labels_T = inputs(64, 16, 33, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x_TD, weight_VD, labels_T, chunk=16)
    loss.backward()
    assert loss.dtype == x_TD.grad.dtype == weight_VD.grad.dtype == torch.float32
    rounded = [t.detach().bfloat16().double().requires_grad_() for t in (x_TD, weight_VD)]
    expected = plain(*rounded, labels_T)
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-2, atol=0)
    for mine, theirs in zip((x_TD, weight_VD), rounded, strict=True):
        error = (mine.grad.double() - theirs.grad).norm() / theirs.grad.norm()
        assert error < 2e-2


def test_split_over_micro_batches_changes_nothing() -> None:
    """Sums, not means: one token of loss 4 beside three of loss 0 is 1.0, not 2.0."""
    x_TD, weight_VD, labels_T = inputs(40, 8, 11)
    targets = int((labels_T != -100).sum())
    whole = linear_cross_entropy(x_TD, weight_VD, labels_T) / targets
    parts = [
        linear_cross_entropy(x_TD[piece], weight_VD, labels_T[piece]) / targets
        for piece in (slice(0, 3), slice(3, 4), slice(4, 40))
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=0)
    ours = torch.autograd.grad(sum(parts), (x_TD, weight_VD))
    torch.testing.assert_close(ours, torch.autograd.grad(whole, (x_TD, weight_VD)))


def test_wrong_shapes_are_refused() -> None:
    x_TD, weight_VD, labels_T = inputs(10, 8, 11)
    with pytest.raises(ValueError, match=r"expects \[T, D\]"):
        linear_cross_entropy(x_TD[None], weight_VD, labels_T)
    with pytest.raises(ValueError, match=r"\(9,\)"):
        linear_cross_entropy(x_TD, weight_VD, labels_T[:9])


def test_an_unknown_backend_is_refused() -> None:
    x_TD, weight_VD, labels_T = inputs(10, 8, 11)
    with pytest.raises(ValueError, match="'fast' is unknown"):
        linear_cross_entropy(x_TD, weight_VD, labels_T, backend="fast")


@pytest.mark.skipif(not INTERPRET, reason="needs Triton's interpreter")
@pytest.mark.parametrize("grad_dtype", [torch.float32, None])
@pytest.mark.parametrize("words", [1, 77, 4096, 5000])
def test_kernel_in_the_interpreter(words: int, grad_dtype: torch.dtype | None) -> None:
    logits_PV = torch.randn(5, words) * 4
    logits_PV[1, : words // 2] = -torch.inf
    labels_P = torch.randint(words // 2, words, (5,))
    labels_P[2] = -100
    losses_P, grad_PV = cross_entropy_triton(logits_PV, labels_P, grad_dtype)
    expected, grad = cross_entropy_ref(logits_PV.double(), labels_P, grad_dtype)
    torch.testing.assert_close(losses_P, expected.float(), rtol=1e-5, atol=1e-5)
    assert losses_P[2] == 0
    if grad_dtype is None:
        assert grad_PV is None
    else:
        torch.testing.assert_close(grad_PV, grad, rtol=1e-5, atol=1e-6)
        assert (grad_PV[2] == 0).all()


@pytest.mark.parametrize(
    ("shape", "cpu", "gpu"),
    [
        ((16384, 2048, 151936), 256, 2048),
        ((16384, 2048, 50304), 512, 4096),
        ((64, 8, 100), 64, 64),
        ((4096, 128, 512), 1024, 4096),
    ],
)
def test_default_chunk(shape: tuple[int, int, int], cpu: int, gpu: int) -> None:
    assert default_chunk(*shape, torch.device("cpu")) == cpu
    assert default_chunk(*shape, torch.device("cuda")) == gpu
