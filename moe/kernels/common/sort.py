"""Device code that the counting sorts of all tiers share."""

from __future__ import annotations

from moe.kernels.common.backend import tl, triton


@triton.jit
def popcount(x, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise(
            "popc.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        x = x + (x >> 8)
        return (x + (x >> 16)) & 0x3F


@triton.jit
def clear_tail(slot_R, token_R, first, R, part, parts, BLOCK: tl.constexpr):
    """Zero the rows from `first` on; part `part` of `parts`."""
    for at in range(first + part * BLOCK, R, parts * BLOCK):
        r = at + tl.arange(0, BLOCK)
        zero = tl.zeros((BLOCK,), dtype=tl.int32)
        tl.store(slot_R + r, zero, mask=r < R)
        tl.store(token_R + r, zero, mask=r < R)
