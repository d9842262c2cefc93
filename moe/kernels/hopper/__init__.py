"""Kernels for Hopper (compute capability 9.x) in Triton's Gluon dialect: the `hopper` tier.

The six grouped products of the experts, warp-specialised: see `device` for how; and the router of
large batches. Combine and the small kernels are those of the Triton tier. `moe.kernels.tiers` says
when they run. Of the other rooms this one imports `common` alone.

    rows           up-projection with SwiGLU, down-projection, gradient of the gathered X
    down_backward  dH, A' and the parts of dS
    outer          gradients of both weights
    gating         the router's top-K
    placing        the sort behind it, in plain Triton
    selftest       small problems that each must compute right before it runs
"""

from __future__ import annotations

from moe.kernels.common.backend import HAVE_TRITON, INTERPRET
from moe.kernels.hopper.selftest import checked

__all__ = [
    "LACKING",
    "ROWS",
    "checked",
    "down_backward_hopper",
    "gating_hopper",
    "rows_hopper",
    "up_forward_hopper",
    "weight_gradient_hopper",
]

ROWS = 128
"""Rows of every row tile."""

LACKING: str | None = None
"""What the installed Gluon lacks of what the kernels use, or None."""

if HAVE_TRITON and not INTERPRET:  # the interpreter cannot run Gluon
    try:
        from moe.kernels.hopper.down_backward import down_backward_hopper
        from moe.kernels.hopper.gating import gating_hopper
        from moe.kernels.hopper.outer import weight_gradient_hopper
        from moe.kernels.hopper.rows import rows_hopper, up_forward_hopper
    except (ImportError, AttributeError) as error:
        LACKING = str(error)
