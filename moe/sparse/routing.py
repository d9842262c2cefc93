"""The routing matrix of a batch as CSR and CSC: its arrays, shared.

Shape letters: T tokens, E experts, S slots (token order), R rows (expert order).
"""

from __future__ import annotations

from moe.routing import Routing
from moe.sparse.formats import CSC, CSR
from moe.sparse.pattern import Pattern


def routing_csr(routing: Routing) -> CSR:
    """[T, E] by token, sharing gates and experts; its transpose is known, nothing is sorted.

    The gates' gradient is the router's. Slots without expert are unused entries, and the experts of
    a token are in the order of the router's choice, so `validate` may object where products do not;
    `.coo().csr()` is the matrix without either.
    """
    indptr_T1, expert_S, gates_S = routing.csr()
    shape = (routing.num_tokens, routing.num_experts)
    pattern = Pattern(indptr_T1, expert_S, shape, routing.slots_per_token, routing.num_experts)
    by_expert = Pattern(routing.offsets_E1, routing.token_R, shape[::-1])
    return CSR(pattern.with_flipped(by_expert, routing.slot_R), gates_S)


def routing_csc(routing: Routing) -> CSC:
    """[T, E] by expert, tokens ascending, sharing all arrays but the gates, which are gathered."""
    indptr_E1, token_R, gates_R = routing.csc()
    return CSC(Pattern(indptr_E1, token_R, (routing.num_experts, routing.num_tokens)), gates_R)
