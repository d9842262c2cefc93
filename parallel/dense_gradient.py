"""The dense router gradient (`moe.router_gradient`) where the experts live on several ranks.

In backward every rank of the expert group needs <dy_t, E_e(x_t)> of its own tokens with the experts
of all ranks. One rank after the other sends its x and dy to all, each computes the products with
its own experts, and one all-to-all brings them back. That is as many rows on their way as ranks
have tokens, and no chunk of it hides behind another: the mode costs what it costs in one process,
all experts on all tokens, plus this.

Shape letters: T tokens of this rank, D model width, E experts in all, N ranks of the group, S
tokens of all ranks, C experts of this rank.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moe.router_gradient import expert_dots
from parallel.exchange.transport import Collective, Split


class DotsOverRanks:
    """`dots` of `moe.router_gradient.dense_gradient`; all ranks of the group call it alike."""

    def __init__(
        self, group: dist.ProcessGroup, rank: int, tokens_N: np.ndarray, activation: str
    ) -> None:
        """
        Args:
            rank: this rank's number in the group.
            tokens_N: every rank's number of tokens.
        """
        self.group, self.rank, self.tokens_N = group, rank, tokens_N
        self.activation = activation

    def __call__(
        self, dy_TD: Tensor, x_TD: Tensor, w1_CHD: Tensor, w2_CDN: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """<dy_t, E_e(x_t)> [T, E] of this rank's tokens, in `dtype`.

        Args:
            w1_CHD, w2_CDN: this rank's experts.
        """
        own = torch.cat([x_TD.to(dy_TD.dtype), dy_TD], dim=1)
        parts = []
        for source, tokens in enumerate(self.tokens_N.tolist()):
            if tokens == 0:
                continue
            rows = own if source == self.rank else own.new_empty(tokens, own.shape[1])
            dist.broadcast(rows, group=self.group, group_src=source)
            x, dy = rows.chunk(2, dim=1)
            parts.append(expert_dots(dy, x, w1_CHD, w2_CDN, self.activation, dtype))
        if not parts:
            return dy_TD.new_zeros(0, len(self.tokens_N) * w1_CHD.shape[0], dtype=dtype)
        dots_SC = torch.cat(parts)
        ranks = len(self.tokens_N)
        split = Split(np.tile(self.tokens_N, (ranks, 1)), self.rank)
        back = Collective(self.group).start(dots_SC, split).wait()
        back_NTC = back.view(ranks, dy_TD.shape[0], -1 if dy_TD.shape[0] else w1_CHD.shape[0])
        return back_NTC.transpose(0, 1).flatten(1)
