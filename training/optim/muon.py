"""Muon (Jordan et al., kellerjordan.github.io/posts/muon), for the matrices inside of layers.

    m = momentum m + (1 - momentum) g                       g = gradient / scale
    u = orthogonalised(momentum m + (1 - momentum) g)       of U S Vᵀ about U Vᵀ; Nesterov
    w = (1 - lr decay) w - lr 0.2 √max(rows, columns) u

The factor gives updates the size of AdamW's, so learning rate and weight decay carry over
(Moonlight, arXiv 2502.16982). Matrices are those of attention, dense networks, shared experts, and
of every expert by itself: gate, up and down projection, though gate and up rows lie in turns. All
else (embeddings, output matrix, routers, norms, biases) is AdamW's, with its settings.

An orthogonalised update has the same size however small the momentum is. So an expert that got no
token in a step, whose gradient is zero, is not moved along its old momentum, or it would drift at
full speed for as long as it is unused. Its momentum fades and its weights decay as always, and its
next gradient finds little of the old direction left.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from parallel.engines.matrices import batches, on_matrices
from parallel.engines.optimizer import Group, Piece, Scalars, store_all
from training.optim.adamw import AdamW
from training.optim.newton_schulz import orthogonalised, update_scale


class Muon(AdamW):
    """Muon for the matrices inside of layers, each expert's by itself; AdamW with `betas` and `eps`
    for the rest."""

    granularity = "matrices"

    kind: Literal["muon"] = "muon"
    """Which optimizer."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the averaged gradient of matrices."""

    @cached_property
    def _adamw(self) -> AdamW:
        return AdamW(**{key: getattr(self, key) for key in AdamW.model_fields if key != "kind"})

    def of(self, group: Group) -> AdamW:
        """Itself for matrices."""
        return self if group.matrices.keys() == group.parameters.keys() else self._adamw

    def states(self, group: Group) -> dict[str, torch.dtype]:
        """The averaged gradient."""
        return {"momentum": self.state_dtype(group)}

    def update(self, group: Group, pieces: Sequence[Piece], scalars: Scalars) -> None:
        """See `parallel.engines.optimizer.Optimizer`."""
        decay = 1 - scalars.lr * group.weight_decay
        for batch in batches(pieces):
            gradients = [piece.gradient for piece in batch]
            scaled = torch._foreach_div([g.float() for g in gradients], scalars.divisor)
            momenta = [piece.states["momentum"].float() for piece in batch]
            momenta = torch._foreach_lerp(momenta, scaled, 1 - self.momentum)
            ahead = torch._foreach_lerp(scaled, momenta, self.momentum)
            updates = on_matrices(batch, ahead, _sized, live=gradients)
            weights = torch._foreach_mul([piece.weight.float() for piece in batch], decay)
            torch._foreach_mul_(updates, scalars.lr)
            torch._foreach_sub_(weights, updates)
            store_all(batch, scalars, weights, momentum=momenta)


def _sized(x_BMN: Tensor) -> Tensor:
    """Orthogonalised, of AdamW's size; float32."""
    return orthogonalised(x_BMN).float() * update_scale(*x_BMN.shape[1:])
