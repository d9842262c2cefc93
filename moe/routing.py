"""The routing of one batch: the one value that passes from the router to everything behind it.

`Routing` is a sparse T x E matrix of gates, held twice: by token (CSR; the slot arrays) and by
expert (CSC; the row arrays). Top-K, token rounding and any other rule produce it; experts, combine,
metrics and all-to-all read it. `CompactRouting` is the same matrix for a wire or a file.

Shape letters: T tokens, E experts, K experts per token, S slots (token order), R rows (expert
order), P pairs given by the caller. A name's suffix gives its axes: `offsets_E1` is [E + 1].
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.kernels.routing.routing_metadata import RoutingMetadata, routing_metadata

# Checks that must read device memory (ids in range, pairs sorted) run only when asked for: they
# stall the GPU's queue. TESSERA_DEBUG=1 turns them on, `Routing.validate` runs them once.
DEBUG = os.environ.get("TESSERA_DEBUG", "0") == "1"


@dataclass(frozen=True)
class Routing:
    """Gates of T tokens over E experts, by token and by expert.

    A slot is one (token, expert) place in token order; a row is the same pair in expert order. A
    slot whose `expert_S` is -1 holds no pair and has no row. Row arrays have a static length, at
    least the number of real rows (so nothing is read back to allocate them); rows from
    `offsets_E1[E]` on are unused and hold token 0, slot 0.
    """

    gates_S: Tensor  # fp32 [S], token order; carries the router's gradient
    expert_S: Tensor  # int32 [S]; -1 = slot without expert
    row_S: Tensor  # int32 [S] slot -> row; -1 = none
    token_R: Tensor  # int32 [R] row -> token; rows sorted by expert, stable by token
    slot_R: Tensor  # int32 [R] row -> slot
    offsets_E1: (
        Tensor  # int32 [E + 1] first row of each expert; the last entry counts the real rows
    )
    num_tokens: int
    slots_per_token: int | None  # K when every token has exactly K slots, else None (ragged)
    slot_offsets_T1: Tensor | None = None  # int32 [T + 1] first slot of each token, when ragged
    most_per_expert: int | None = None  # rows that no expert exceeds, where a rule limits them

    @classmethod
    def from_topk(
        cls,
        expert_TK: Tensor,
        gate_TK: Tensor,
        num_experts: int,
        backend: str = "auto",
        meta: RoutingMetadata | None = None,
    ) -> Routing:
        """Routing of a choice of K experts per token.

        Args:
            expert_TK: int32 or int64 [T, K]; -1 = no expert.
            gate_TK: float [T, K]; its gradient is that of `gates_S`.
            num_experts: E.
            backend: who sorts, see `moe.kernels.routing.routing_metadata`.
            meta: what the sort would give, where it is known already (`topk_routing`).

        Raises:
            ValueError: shapes that differ; under TESSERA_DEBUG=1 also ids outside [-1, E).
        """
        if expert_TK.dim() != 2 or expert_TK.shape != gate_TK.shape:
            raise ValueError(
                f"expert_TK and gate_TK must share one shape [T, K], got {tuple(expert_TK.shape)} "
                f"and {tuple(gate_TK.shape)}"
            )
        tokens, k = expert_TK.shape
        expert_S = expert_TK.reshape(-1).to(torch.int32)
        if DEBUG:
            _check_ids(expert_S, num_experts)
        if meta is None:
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
        """Ragged routing: any number of experts per token, none included.

        Args:
            token_P: int [P], ascending; pairs after the last token's (token id T) are padding.
            expert_P: int [P]; an id outside [0, E) means that the pair is unused.
            gate_P: float [P]; its gradient is that of `gates_S`.
            num_tokens: T.
            num_experts: E.
            backend: who sorts, see `moe.kernels.routing.routing_metadata`.

        Raises:
            ValueError: lengths differ; under TESSERA_DEBUG=1 also tokens out of order or range.
        """
        if not token_P.dim() == expert_P.dim() == gate_P.dim() == 1 or not (
            token_P.shape == expert_P.shape == gate_P.shape
        ):
            raise ValueError(
                "token_P, expert_P and gate_P must share one shape [P], got "
                f"{tuple(token_P.shape)}, {tuple(expert_P.shape)} and {tuple(gate_P.shape)}"
            )
        token_S = token_P.to(torch.int32).contiguous()
        some_S = (expert_P >= 0) & (expert_P < num_experts)
        expert_S = torch.where(some_S, expert_P, -1).to(torch.int32)
        if DEBUG:
            _check_tokens(token_S, some_S, num_tokens)
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

    # -------------------------------------------------------------------------------------- views

    @property
    def num_experts(self) -> int:
        return self.offsets_E1.shape[0] - 1

    @property
    def counts_E(self) -> Tensor:
        """int32 [E]: rows of each expert."""
        return self.offsets_E1.diff()

    @property
    def token_S(self) -> Tensor:
        """int32 [S]: token of each slot; T for padding slots behind the last token."""
        slot_S = torch.arange(self.expert_S.shape[0], device=self.expert_S.device)
        if self.slots_per_token is not None:
            return (slot_S // self.slots_per_token).to(torch.int32)
        ends_T = self.slot_offsets_T1[1:].contiguous()
        return torch.searchsorted(ends_T, slot_S.to(torch.int32), right=True).to(torch.int32)

    @property
    def gates_R(self) -> Tensor:
        """[R]: gate of each row, 0 on unused rows; differentiable with respect to `gates_S`."""
        row_R = torch.arange(self.slot_R.shape[0], device=self.slot_R.device)
        return torch.where(row_R < self.offsets_E1[-1], self.gates_S[self.slot_R.long()], 0.0)

    def csr(self) -> tuple[Tensor, Tensor, Tensor]:
        """By token: (indptr int32 [T + 1], expert int32 [S], gate [S]); expert -1 = unused."""
        indptr_T1 = self.slot_offsets_T1
        if indptr_T1 is None:
            steps_T1 = torch.arange(self.num_tokens + 1, device=self.expert_S.device)
            indptr_T1 = (steps_T1 * self.slots_per_token).to(torch.int32)
        return indptr_T1, self.expert_S, self.gates_S

    def csc(self) -> tuple[Tensor, Tensor, Tensor]:
        """By expert: (indptr int32 [E + 1], token int32 [R], gate [R]); indptr[E] are used."""
        return self.offsets_E1, self.token_R, self.gates_R

    def dense(self) -> Tensor:
        """The matrix itself, [T, E] in the gates' dtype; differentiable. For tests and plots."""
        cells = self.num_tokens * self.num_experts
        cell_S = self.token_S.long() * self.num_experts + self.expert_S.long()
        cell_S = torch.where(self.expert_S >= 0, cell_S, cells)
        flat = self.gates_S.new_zeros(cells + 1).index_add(0, cell_S, self.gates_S)
        return flat[:cells].view(self.num_tokens, self.num_experts)

    # -------------------------------------------------------------------------------------- checks

    def validate(self) -> Routing:
        """Check every invariant, reading device memory; returns self.

        Raises:
            ValueError: what does not hold, with the values found.
        """
        _check_ids(self.expert_S, self.num_experts)
        slots, rows = self.expert_S.shape[0], self.slot_R.shape[0]
        if not self.gates_S.shape == self.row_S.shape == self.expert_S.shape:
            raise ValueError(
                f"slot arrays differ in length: gates_S {self.gates_S.shape[0]}, row_S "
                f"{self.row_S.shape[0]}, expert_S {slots}"
            )
        if self.slots_per_token is not None and slots != self.num_tokens * self.slots_per_token:
            raise ValueError(
                f"expert_S has {slots} slots, {self.num_tokens} tokens of {self.slots_per_token} "
                f"slots need {self.num_tokens * self.slots_per_token}"
            )
        token_S, expert_S = self.token_S.long().cpu(), self.expert_S.long().cpu()
        some_S = expert_S >= 0
        if self.gates_S.detach().cpu()[some_S].isnan().any():
            raise ValueError("gates_S holds NaN on a slot that has an expert")
        _check_tokens(token_S, some_S, self.num_tokens)
        pair_P = token_S[some_S] * self.num_experts + expert_S[some_S]
        twice = pair_P.unique(return_counts=True)
        if (twice[1] > 1).any():
            pair = int(twice[0][twice[1] > 1][0])
            raise ValueError(
                f"token {pair // self.num_experts} holds expert {pair % self.num_experts} twice"
            )
        counts = torch.bincount(expert_S[some_S], minlength=self.num_experts)
        if not torch.equal(self.counts_E.long().cpu(), counts):
            raise ValueError(
                f"offsets_E1 gives counts {self.counts_E.tolist()}, expert_S {counts.tolist()}"
            )
        real = int(counts.sum())
        if rows < real:
            raise ValueError(f"{rows} rows are allocated for {real} pairs")
        order = torch.argsort(expert_S[some_S], stable=True)
        slot_R = torch.nonzero(some_S).flatten()[order]
        row_S = torch.full((slots,), -1).index_put((slot_R,), torch.arange(real))
        for name, found, right in (
            ("slot_R", self.slot_R[:real], slot_R),
            ("token_R", self.token_R[:real], token_S[slot_R]),
            ("row_S", self.row_S, row_S),
        ):
            wrong = torch.nonzero(found.long().cpu() != right).flatten()
            if wrong.numel():
                at = int(wrong[0])
                raise ValueError(f"{name}[{at}] is {int(found[at])}, should be {int(right[at])}")
        return self

    # -------------------------------------------------------------------------------------- compact

    def compact(self, gate_dtype: torch.dtype = torch.bfloat16) -> CompactRouting:
        """The same matrix in few bytes, without gradient: see `CompactRouting`."""
        none_S = self.expert_S < 0
        gates_S = self.gates_S.detach().masked_fill(none_S, float("nan"))
        return CompactRouting(
            expert_S=self.expert_S.clamp(min=0).to(id_dtype(self.num_experts)),
            gates_S=gates_S.to(gate_dtype),
            num_experts=self.num_experts,
            num_tokens=self.num_tokens,
            slots_per_token=self.slots_per_token,
            slot_offsets_T1=self.slot_offsets_T1,
        )


@dataclass(frozen=True)
class CompactRouting:
    """A routing for a wire or a file: ids in one or two bytes, gates in bf16, no row arrays.

    A slot without expert has a NaN gate, so that all 256 codes of a byte stay free for 256 experts;
    a router never gives a NaN gate. The order of tokens and of a token's slots is kept.
    """

    expert_S: Tensor  # uint8 up to 256 experts, uint16 up to 65536, else int32
    gates_S: Tensor  # bf16 by default; NaN = slot without expert
    num_experts: int
    num_tokens: int
    slots_per_token: int | None
    slot_offsets_T1: Tensor | None = None

    def ids_S(self) -> Tensor:
        """int32 [S]: expert of each slot, -1 = none."""
        return torch.where(self.gates_S.isnan(), -1, self.expert_S.to(torch.int32))

    def expand(
        self,
        gates_S: Tensor | None = None,
        device: torch.device | None = None,
        backend: str = "auto",
    ) -> Routing:
        """The full routing, on `device` if given; `gates_S` [S] replaces the stored gates."""
        expert_S = self.ids_S().to(device)
        if gates_S is None:
            gates_S = torch.where(self.gates_S.isnan(), 0.0, self.gates_S.float()).to(device)
        if self.slots_per_token is not None:
            shape = (self.num_tokens, self.slots_per_token)
            return Routing.from_topk(
                expert_S.view(shape), gates_S.view(shape), self.num_experts, backend
            )
        slot_S = torch.arange(expert_S.shape[0], dtype=torch.int32, device=expert_S.device)
        ends_T = self.slot_offsets_T1[1:].to(expert_S.device)
        token_S = torch.searchsorted(ends_T, slot_S, right=True)
        return Routing.from_pairs(
            token_S, expert_S, gates_S, self.num_tokens, self.num_experts, backend
        )

    def to(self, device: torch.device | str) -> CompactRouting:
        offsets = self.slot_offsets_T1
        return CompactRouting(
            self.expert_S.to(device),
            self.gates_S.to(device),
            self.num_experts,
            self.num_tokens,
            self.slots_per_token,
            None if offsets is None else offsets.to(device),
        )


def id_dtype(num_experts: int) -> torch.dtype:
    """Smallest integer dtype that numbers `num_experts` experts."""
    if num_experts <= 256:
        return torch.uint8
    return torch.uint16 if num_experts <= 65536 else torch.int32


def _check_ids(expert_S: Tensor, num_experts: int) -> None:
    wrong = expert_S[(expert_S < -1) | (expert_S >= num_experts)]
    if wrong.numel():
        raise ValueError(
            f"expert ids {wrong.unique()[:8].tolist()} are out of range; allowed: -1 (no expert) "
            f"and 0 to {num_experts - 1}"
        )


def _check_tokens(token_S: Tensor, some_S: Tensor, num_tokens: int) -> None:
    used = token_S[some_S]
    wrong = used[(used < 0) | (used >= num_tokens)]
    if wrong.numel():
        raise ValueError(
            f"token ids {wrong.unique()[:8].tolist()} are out of range; "
            f"allowed: 0 to {num_tokens - 1}"
        )
    falls = torch.nonzero(token_S[1:] < token_S[:-1]).flatten()
    if falls.numel():
        at = int(falls[0])
        raise ValueError(
            f"pairs must be sorted by token: token {int(token_S[at])} at {at} is followed by "
            f"{int(token_S[at + 1])}"
        )
