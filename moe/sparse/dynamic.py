"""Dynamic sparsification: weight masks that change while training.

    mask = DynamicMask(w, MaskSchedule(density=0.1, every=100, block=16))
    y = x @ mask(w).T               masked weights; gradients straight through, or only to the kept
    mask.update(step, w)            between optimizer steps: recompute it when it is due
    a = mask.sparse(w)              CSR or BCSR of the kept weights, for `moe.sparse.spmm`

Masks keep an exact number of entries (or blocks) of each matrix, ties by the lowest index. The
schedule of densities is that of M. Zhu and S. Gupta (arXiv 1710.01878), regrowth that of RigL
(U. Evci et al., arXiv 1911.11134), the straight-through estimator that of Y. Bengio et al.
(arXiv 1308.3432).

Shape letters: M rows, K columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe.sparse.formats import BCSR, CSR

METHODS = ("straight_through", "regrow")


@dataclass(frozen=True)
class MaskSchedule:
    """When a mask is recomputed, how dense it is, and how.

    Raises:
        ValueError: values out of range, by name.
    """

    density: float
    """Share of entries (or blocks) that are kept from `end` on."""
    every: int = 100
    """Steps between two masks; the last one is made at `until` in any case."""
    start: int = 0
    """First step with a mask; until then all is kept."""
    end: int = 0
    """Step at which `density` is reached, on a cubic path from 1; at or before `start`: at once."""
    block: int = 1
    """Side of the blocks that are kept or dropped as a whole."""
    method: str = "straight_through"
    """straight_through: the largest weights, every weight keeps learning. regrow: the smallest kept
    weights make place for the dropped ones with the largest gradients."""
    regrow: float = 0.3
    """Share of the kept that is exchanged at the first mask, falling to 0 at `until` (cosine)."""
    until: int = 10_000
    """Step after which masks no longer change."""

    def __post_init__(self) -> None:
        for name, low, high in (("density", 0, 1), ("regrow", 0, 1)):
            value = getattr(self, name)
            if not low < value <= high:
                raise ValueError(f"{name}={value} must be above {low} and at most {high}")
        for name in ("every", "block"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} is unknown; allowed: {', '.join(METHODS)}")

    def density_at(self, step: int) -> float:
        """Share that is kept at a step."""
        if step < self.start:
            return 1.0
        if step >= self.end:
            return self.density
        left = 1 - (step - self.start) / (self.end - self.start)
        return self.density + (1 - self.density) * left**3

    def regrow_at(self, step: int) -> float:
        """Share of the kept that is exchanged at a step."""
        part = min(1.0, max(0, step - self.start) / max(1, self.until - self.start))
        return self.regrow * (1 + math.cos(math.pi * part)) / 2

    @property
    def last(self) -> int:
        """Step of the last mask."""
        return max(self.until, self.end)

    def due(self, step: int) -> bool:
        """Whether the mask is recomputed at this step."""
        since = step - self.start
        return since >= 0 and step <= self.last and (since % self.every == 0 or step == self.last)


def block_sums(x: Tensor, block: int) -> Tensor:
    """Sums of |x| over square blocks of the last two axes, in float32 or wider."""
    x = x.detach().abs().to(torch.promote_types(x.dtype, torch.float32))
    if block == 1:
        return x
    M, K = x.shape[-2:]
    x = nn.functional.pad(x, (0, -K % block, 0, -M % block))
    return x.unflatten(-1, (-1, block)).unflatten(-3, (-1, block)).sum((-1, -3))


_SORTED = 1 << 26  # numbers that are sorted at once, as indices take eight bytes each


def keep_largest(score: Tensor, count: int) -> Tensor:
    """bool like score [..., M, K]: the `count` largest of each matrix, ties by the lowest index."""
    if score.dim() > 2 and score.shape[0] > 1 and score.numel() > _SORTED:
        return torch.stack([keep_largest(one, count) for one in score])
    flat = score.flatten(-2)
    order = flat.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(flat, dtype=torch.bool).scatter_(-1, order, True).view(score.shape)


class _Masked(torch.autograd.Function):
    """w where kept, 0 elsewhere; the gradient reaches all of w, or only what is kept."""

    @staticmethod
    def forward(ctx, w, keep, straight_through):
        ctx.save_for_backward(None if straight_through else keep)
        return torch.where(keep, w, 0.0)

    @staticmethod
    def backward(ctx, grad):
        (keep,) = ctx.saved_tensors
        return (grad if keep is None else torch.where(keep, grad, 0.0)), None, None


class DynamicMask(nn.Module):
    """The mask of one weight [..., M, K], each matrix of a stack on its own.

    Attributes:
        keep: bool [..., block rows, block columns], a buffer: saved and restored with the model.
    """

    def __init__(self, weight: Tensor, schedule: MaskSchedule) -> None:
        super().__init__()
        if weight.dim() < 2:
            raise ValueError(f"weight must be a matrix or a stack, got {tuple(weight.shape)}")
        self.schedule = schedule
        keep = torch.ones_like(block_sums(weight, schedule.block), dtype=torch.bool)
        self.register_buffer("keep", keep)

    def entries(self, weight: Tensor) -> Tensor:
        """bool of the weight's shape."""
        b = self.schedule.block
        if b == 1:
            return self.keep
        keep = self.keep.repeat_interleave(b, -2).repeat_interleave(b, -1)
        return keep[..., : weight.shape[-2], : weight.shape[-1]]

    def forward(self, weight: Tensor) -> Tensor:
        straight_through = self.schedule.method == "straight_through"
        return _Masked.apply(weight, self.entries(weight), straight_through)

    @torch.no_grad()
    def update(self, step: int, weight: Tensor, gradient: Tensor | None = None) -> Tensor | None:
        """Recompute the mask if it is due; nothing is read back.

        Args:
            step: optimizer steps done.
            weight: the dense weight; with "regrow", what comes into the mask starts at 0 there.
            gradient: dense, of `mask(weight)` (its `.grad` after `retain_grad()`); "regrow" needs
                it, since the weight's own gradient is 0 outside the mask.

        Returns:
            bool of the weight's shape, what has come into the mask (moments of an optimizer should
            start anew there); None when the mask was not due.

        Raises:
            ValueError: "regrow" without a gradient.
        """
        if not self.schedule.due(step):
            return None
        before = self.entries(weight).clone()  # without blocks it is the buffer itself
        self.choose(step, weight, gradient)
        new = self.entries(weight) & ~before
        if self.schedule.method == "regrow":
            weight.masked_fill_(new, 0.0)
        return new

    @torch.no_grad()
    def choose(self, step: int, weight: Tensor, gradient: Tensor | None = None) -> None:
        """Make the mask of this step, due or not; the weight is left alone. As `update`."""
        s, count = self.schedule, self.kept_at(step)
        size = block_sums(weight, s.block)
        if s.method == "straight_through":
            self.keep.copy_(keep_largest(size, count))
            return
        if gradient is None:
            raise ValueError("method='regrow' needs the gradient of the masked weight")
        stay = count - round(s.regrow_at(step) * count)
        # Kept ones first, by size; what stays is then out of the running for a place by gradient.
        stays = keep_largest(torch.where(self.keep, size, -1.0), stay) & self.keep
        grown = block_sums(gradient, s.block).masked_fill(stays, float("inf"))
        self.keep.copy_(keep_largest(grown, count))

    def kept_at(self, step: int) -> int:
        """Entries (or blocks) of one matrix that a mask made at this step keeps."""
        return max(1, round(self.schedule.density_at(step) * math.prod(self.keep.shape[-2:])))

    def sparse(self, weight: Tensor) -> CSR | BCSR:
        """The kept entries of one matrix, differentiable in the weight; reads memory back."""
        if weight.dim() != 2:
            raise ValueError(f"weight must be one matrix, got shape {tuple(weight.shape)}")
        if self.schedule.block == 1:
            return CSR.from_dense(weight, self.keep)
        return BCSR.from_dense(weight, self.schedule.block, self.keep)
