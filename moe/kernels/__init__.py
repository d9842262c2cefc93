"""GPU operators of the MoE layer.

    common   Triton or its stand-in, launches, tuning, tiles: imports no other room
    grouped  products of the experts: one weight matrix per expert, rows sorted by expert
    routing  router logits, top-K, token rounding, the sort of pairs by expert
    sparse   products of sparse matrices
    hopper   the same products and the top-K for compute capability 9.x

Each file of an operator reads from metal to API: plain torch reference (`*_ref`, any device and
dtype) → Triton kernel → launcher → custom op with its fake → autograd → public function with a
`backend` argument. Nothing here knows about modules, parameters or training; import what you need
from the file of the operator.
"""
