"""The experts' kernels compiled for sm_90 on any x86-64 Linux machine, no GPU needed.

Every configuration must reach Hopper's matrix instructions (HGMMA in the machine code) without a
spilled register and within the shared memory of a program. Compiling happens in a process of its
own, since this one may run Triton's interpreter; the launchers run there as they are, with the
launch itself replaced by a compilation.

By default the first configuration of two kernels is compiled; all with TESSERA_COMPILE_ALL=1
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.moe.kernels.compile_sm90 import (
    EVERYTHING,
    SHARED_LIMIT,
    compile_only,
    needs_tools,
    report,
    rows_of,
)

SHARED_TWO = 113 * 1024  # of each where two share a multiprocessor, 1 KiB of each reserved
RAGGED = ("ragged up", "ragged down", "ragged dX", "ragged dH", "ragged dW1", "ragged dW2")
CLAMPED = ("clamped up", "clamped dH")  # with a bias, as gpt-oss has them
BESIDE = ("_gate_gradient_kernel", "_bias_dot_kernel")
KERNELS = ("up", "down", "dX", "dH", "dW1", "dW2", *RAGGED, *CLAMPED)


# ---------------------------------------------------------------------------- in a process of its
# own


def _compile(names: list[str], everything: bool) -> None:
    """Prints one line of JSON for each kernel and configuration."""
    import torch
    import triton

    from moe.kernels.common import tiles
    from moe.kernels.common.row_tiles import tile_schedule_ref
    from moe.kernels.grouped import configs, ragged
    from moe.kernels.grouped.down_backward import down_backward_triton
    from moe.kernels.grouped.rows import rows_triton
    from moe.kernels.grouped.up_forward import up_forward_triton
    from moe.kernels.grouped.weight_gradient import weight_gradient_triton

    made: dict[str, object] = {}
    compile_only(made.__setitem__)
    tiles.capability = lambda device: (9, 0)
    tiles.num_sms = lambda device: 132

    T, D, N, E, R = 512, 1536, 256, 4, 1024
    x, w1, w2, h, a = (
        torch.empty(shape, dtype=torch.bfloat16)
        for shape in ((T, D), (E, 2 * N, D), (E, D, N), (R, 2 * N), (R, N))
    )
    b1, b2 = (torch.empty(E, width, dtype=torch.bfloat16) for width in (2 * N, D))
    sizes = (N, N // 2, N // 4, N)
    p1, p2 = (torch.empty(sum(sizes) * k, D, dtype=torch.bfloat16) for k in (2, 1))
    offsets = torch.arange(0, R + 1, R // E, dtype=torch.int32)
    index, gates = torch.zeros(R, dtype=torch.int32), torch.zeros(R)
    launches = {
        "up": ("up", lambda t, c: up_forward_triton(
            x, w1, None, index, "swiglu", True, t, c)),
        "down": ("rows", lambda t, c: rows_triton(a, w2.mT, None, t, c)),
        "dX": ("rows", lambda t, c: rows_triton(h, w1, None, t, c)),
        "dH": ("down_backward", lambda t, c: down_backward_triton(
            x, w2, None, h, gates, index, index, "swiglu", (True, True, True), t, c)),
        "dW1": ("outer", lambda t, c: weight_gradient_triton(
            h, x, None, index, offsets, None, c)),
        "dW2": ("outer", lambda t, c: weight_gradient_triton(
            x, a, index, None, offsets, None, c)),
        "clamped up": ("up", lambda t, c: up_forward_triton(
            x, w1, b1, index, "clamped_swiglu", True, t, c)),
        "clamped dH": ("down_backward", lambda t, c: down_backward_triton(
            x, w2, b2, h, gates, index, index, "clamped_swiglu", (True, True, True), t, c)),
        "ragged up": ("up", lambda t, c: ragged.up_triton(
            x, p1, index, offsets, sizes, "swiglu", True, c)),
        "ragged down": ("rows", lambda t, c: ragged.rows_triton(a, p2, offsets, sizes, 1, c)),
        "ragged dX": ("rows", lambda t, c: ragged.rows_triton(h, p1, offsets, sizes, 2, c)),
        "ragged dH": ("down_backward", lambda t, c: ragged.down_backward_triton(
            x, p2, h, gates, index, index, index, offsets, sizes, "swiglu", c)),
        "ragged dW1": ("outer", lambda t, c: ragged.outer_triton(
            h, x, index, offsets, sizes, 2, c)),
        "ragged dW2": ("outer", lambda t, c: ragged.outer_triton(
            a, x, index, offsets, sizes, 1, c)),
    }  # fmt: skip
    for name in names:
        kernel, launch = launches[name]
        listed = configs.candidates(kernel, torch.bfloat16)
        for config in listed if everything else listed[:1]:
            made.clear()
            launch(tile_schedule_ref(offsets, config.bm, R), config)
            main = next(k for f, k in made.items() if f not in BESIDE)
            row = {"kernel": name, "config": str(config), "ctas": config.ctas} | report(main)
            print(json.dumps(row | {"triton": triton.__version__}), flush=True)


# -------------------------------------------------------------------------------------------- test


@needs_tools
@pytest.mark.timeout(1800)
def test_kernels_compile_for_hopper(tmp_path: Path):
    names = KERNELS if EVERYTHING else ("down", "dW2", "ragged dH", "clamped dH")
    rows = rows_of(__file__, tmp_path, ",".join(names), str(int(EVERYTHING)))
    assert {row["kernel"] for row in rows} == set(names)
    for row in rows:
        limit = SHARED_LIMIT if row["ctas"] == 1 else SHARED_TWO
        assert row["spilled bytes"] == 0, row
        assert row["HGMMA"] > 0, row
        assert not row["serialised"], row
        assert row["shared"] <= limit, row
        assert row["TMA loads"] > 0, row
        assert row["TMA stores"] > 0, row
        if not row["kernel"].endswith(("down", "dX")):
            assert row["async copies"] > 0, f"the gather is not asynchronous: {row}"


if __name__ == "__main__":
    _compile(sys.argv[1].split(","), sys.argv[2] == "1")
