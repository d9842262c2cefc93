"""GPU operators of the MoE layer.

    common    Triton or its stand-in, launches, tuning, tiles, the reference: imports no other room
    grouped   products of the experts in Triton: rows sorted by expert, one weight matrix for each
    routing   router logits, top-K, token rounding, the sort of pairs by expert
    sparse    products of sparse matrices
    hopper    the grouped products and the top-K for compute capability 9.x; imports `common` alone
    tiers     which of reference, Triton and Hopper runs: decided here alone
    products  the grouped products as operators, whatever the tier

An operator reads from metal to API: plain torch reference (`*_ref`, any device and dtype) → Triton
kernel → launcher → custom op with its fake → autograd → public function with a `backend` argument.
Where it has kernels of several tiers, each tier is a file of its own and the public function lies
above them. Nothing here knows about modules, parameters or training.
"""
