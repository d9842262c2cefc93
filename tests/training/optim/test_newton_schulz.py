"""The iteration against a float64 singular value decomposition."""

import pytest
import torch

from training.optim import newton_schulz
from training.optim.newton_schulz import COEFFICIENTS, STEPS, orthogonalised, update_scale


def expected(x: torch.Tensor) -> torch.Tensor:
    """The same polynomial on the singular values, float64."""
    u, s, vt = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / (1.01 * s.square().sum(-1, keepdim=True).sqrt()).clamp(min=1e-300)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        s = a * s + b * s**3 + c * s**5
    return (u * s.unsqueeze(-2)) @ vt


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 8, 8), (2, 7, 33), (5, 65, 16)])
def test_it_is_the_polynomial_of_the_singular_values(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    got, want = orthogonalised(x), expected(x)
    assert (got - want).norm() / want.norm() < 1e-4
    assert orthogonalised(x.double(), torch.float64).sub(want).norm() / want.norm() < 1e-12
    rough = orthogonalised(x, torch.bfloat16)
    assert rough.dtype == torch.bfloat16
    assert (rough.double() - want).norm() / want.norm() < 0.1


def test_singular_values_come_close_to_one():
    x = torch.randn(4, 48, 96, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalised(x))
    assert values.min() > 0.6 and values.max() < 1.3


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_scale_of_a_matrix_does_not_matter(scale):
    x = torch.randn(2, 6, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(
        orthogonalised(x * scale, torch.float64), orthogonalised(x, torch.float64)
    )


def test_zeros_stay_zeros_beside_others():
    x = torch.randn(3, 6, 9)
    x[1] = 0
    got = orthogonalised(x)
    assert not got[1].any() and got[0].any() and torch.isfinite(got).all()
    torch.testing.assert_close(got[2:], orthogonalised(x[2:]), rtol=0, atol=1e-6)


def test_parts_of_a_batch_give_the_whole(monkeypatch):
    x = torch.randn(7, 5, 12)
    whole = orthogonalised(x)
    monkeypatch.setattr(newton_schulz, "MOST_ELEMENTS", 120)
    torch.testing.assert_close(orthogonalised(x), whole, rtol=0, atol=1e-6)
    assert orthogonalised(x[:0]).shape == (0, 5, 12)


def test_other_ranks_of_tensors_are_refused():
    with pytest.raises(ValueError, match=r"takes \[B, M, N\], got \(3, 4\)"):
        orthogonalised(torch.zeros(3, 4))


def test_an_update_has_the_size_of_adamw():
    x = torch.randn(1, 64, 256, generator=torch.Generator().manual_seed(2))
    update = orthogonalised(x)[0] * update_scale(64, 256)
    assert 0.15 < update.square().mean().sqrt() < 0.25
