"""The routing of one batch: the one value that passes from the router to everything behind it.

`Routing` is a sparse T x E matrix of gates, held twice: by token (CSR; the slot arrays) and by expert
(CSC; the row arrays). Top-K, token rounding and any other rule produce it; experts, combine, metrics and
all-to-all read it.

Shape letters: T tokens, E experts, K experts per token, S slots (token order), R rows (expert order),
P pairs given by the caller. A name's suffix gives its axes: `gates_S`, `offsets_E1` ([E + 1]).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.kernels.routing_metadata import routing_metadata

# Checks that must read device memory (ids in range, pairs sorted) run only when asked for: they stall
# the GPU's queue. `TESSERA_DEBUG=1` turns them on for a whole process.
DEBUG = os.environ.get("TESSERA_DEBUG", "0") == "1"


@dataclass(frozen=True)
class Routing:
    """Gates of T tokens over E experts, by token and by expert.

    A slot is one (token, expert) place in token order; a row is the same pair in expert order. A slot whose
    `expert_S` is -1 holds no pair and has no row. Row arrays are allocated for S rows whatever the number of
    real rows is (a static shape: no read-back); rows from `offsets_E1[E]` on are unused and hold token 0, slot 0.
    """

    gates_S: Tensor  # fp32 [S], token order; carries the router's gradient
    expert_S: Tensor  # int32 [S]; -1 = slot without expert
    row_S: Tensor  # int32 [S] slot -> row; -1 = none
    token_R: Tensor  # int32 [R] row -> token; rows sorted by expert, stable by token
    slot_R: Tensor  # int32 [R] row -> slot
    offsets_E1: Tensor  # int32 [E + 1] first row of each expert; the last entry counts the real rows
    num_tokens: int
    slots_per_token: int | None  # K when every token has exactly K slots, else None (ragged)
    slot_offsets_T1: Tensor | None = None  # int32 [T + 1] first slot of each token, when ragged

    @property
    def num_experts(self) -> int:
        return self.offsets_E1.shape[0] - 1

    @property
    def counts_E(self) -> Tensor:
        """int32 [E]: rows of each expert."""
        return self.offsets_E1[1:] - self.offsets_E1[:-1]

    @classmethod
    def from_topk(
        cls, expert_TK: Tensor, gate_TK: Tensor, num_experts: int, backend: str = "auto"
    ) -> Routing:
        """Routing of a plain top-K choice: expert_TK int [T, K] (-1 = none), gate_TK float [T, K]."""
        tokens, k = expert_TK.shape
        expert_S = expert_TK.reshape(-1).to(torch.int32)
        meta = routing_metadata(expert_S, num_experts, slots_per_token=k, backend=backend)
        return cls(
            gates_S=gate_TK.reshape(-1),
            expert_S=expert_S,
            row_S=meta.row_S,
            token_R=meta.token_R,
            slot_R=meta.slot_R,
            offsets_E1=meta.offsets_E1,
            num_tokens=tokens,
            slots_per_token=k,
        )

    @classmethod
    def from_pairs(
        cls,
        token_P: Tensor,
        expert_P: Tensor,
        gate_P: Tensor,
        num_tokens: int,
        num_experts: int,
        backend: str = "auto",
    ) -> Routing:
        """Ragged routing from pairs sorted by token; an expert id outside [0, E) means no expert."""
        token_S = token_P.to(torch.int32)
        inside = (expert_P >= 0) & (expert_P < num_experts)
        expert_S = torch.where(inside, expert_P, -1).to(torch.int32)
        meta = routing_metadata(expert_S, num_experts, token_S=token_S, backend=backend)
        bounds_T1 = torch.arange(num_tokens + 1, dtype=torch.int32, device=token_S.device)
        return cls(
            gates_S=gate_P,
            expert_S=expert_S,
            row_S=meta.row_S,
            token_R=meta.token_R,
            slot_R=meta.slot_R,
            offsets_E1=meta.offsets_E1,
            num_tokens=num_tokens,
            slots_per_token=None,
            slot_offsets_T1=torch.searchsorted(token_S, bounds_T1).to(torch.int32),
        )
