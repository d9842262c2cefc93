"""The Hopper kernels compiled for sm_90a on any x86-64 Linux machine, no GPU needed.

Every configuration that tuning may choose must keep its accumulator in registers (no spilled byte),
reach wgmma (HGMMA in the machine code) without ptxas serialising it (warning C7514), load by TMA
(UTMALDG) and, where it gathers, by cp.async (LDGSTS), and fit the shared memory of a program.

Compiling happens in a process of its own, since this one may run Triton's interpreter; the
launchers run there as they are, with the launch itself replaced by a compilation. By default three
products are compiled, with their first configuration; all with TESSERA_COMPILE_ALL=1.
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

KERNELS = (
    "up", "down", "dX", "dH", "dW1", "dW2",
    "up uneven", "dH uneven", "dW1 uneven", "dW2 uneven", "up permuted", "dH permuted",
)  # fmt: skip
"""Products; uneven: widths that are no multiple of a tile's, which the gathers mask; permuted: rows
in expert order, which nothing gathers."""


# -------------------------------------------------------------------------- in a process of its own


def _launches(D: int, N: int, gather: bool = True) -> dict:
    """Product → (table of configurations, launch with a configuration)."""
    import torch

    from moe.kernels.common.row_tiles import tile_schedule_ref
    from moe.kernels.hopper.down_backward import down_backward_hopper
    from moe.kernels.hopper.outer import weight_gradient_hopper
    from moe.kernels.hopper.rows import rows_hopper, up_forward_hopper

    T, E, R = 512, 4, 1024
    offsets = torch.arange(0, R + 1, R // E, dtype=torch.int32)
    index, gates = torch.zeros(R, dtype=torch.int32), torch.zeros(R)
    tiles = tile_schedule_ref(offsets, 128, R)
    x, w1, w2, h, a = (
        torch.empty(shape, dtype=torch.bfloat16)
        for shape in ((T if gather else R, D), (E, 2 * N, D), (E, D, N), (R, 2 * N), (R, N))
    )
    token = index if gather else None
    return {
        "up": ("up", lambda c: up_forward_hopper(x, w1, token, True, tiles, c)),
        "down": ("rows", lambda c: rows_hopper(a, w2, tiles, transposed=True, config=c)),
        "dX": ("rows", lambda c: rows_hopper(h, w1, tiles, transposed=False, config=c)),
        "dH": ("down_backward", lambda c: down_backward_hopper(
            x, w2, h, gates, token, index, tiles, c)),
        "dW1": ("outer_right", lambda c: weight_gradient_hopper(h, x, None, index, offsets, c)),
        "dW2": ("outer_left", lambda c: weight_gradient_hopper(x, a, index, None, offsets, c)),
    }  # fmt: skip


def _compile(names: list[str], everything: bool) -> None:
    """Prints one line of JSON for each product and configuration."""
    from moe.kernels.tiers import hopper_missing

    reason = hopper_missing()
    if reason is not None:
        print(json.dumps({"missing": reason}), flush=True)
        return
    from moe.kernels.hopper import configs

    made: list = []
    compile_only(lambda name, kernel: made.append(kernel), gluon=True)
    configs.num_sms = lambda device: 132

    for name in names:
        product, _, kind = name.partition(" ")
        widths = (264, 72) if kind == "uneven" else (1536, 256)
        table, launch = _launches(*widths, gather=kind != "permuted")[product]
        for config in configs.CONFIGS[table] if everything else configs.CONFIGS[table][:1]:
            made.clear()
            launch(config)
            print(json.dumps({"kernel": name, "config": str(config)} | report(made[0])))


# --------------------------------------------------------------------------------------------- test


@needs_tools
@pytest.mark.timeout(1800)
def test_kernels_compile_for_hopper(tmp_path: Path):
    names = KERNELS if EVERYTHING else ("down", "up uneven", "dW2")
    rows = rows_of(__file__, tmp_path, ",".join(names), str(int(EVERYTHING)))
    if "missing" in rows[0]:
        pytest.skip(rows[0]["missing"])
    assert {row["kernel"] for row in rows} == set(names)
    for row in rows:
        assert row["spilled bytes"] == 0, row
        assert not row["serialised"], row
        assert row["shared"] <= SHARED_LIMIT, row
        assert row["HGMMA"] > 0, row
        assert row["TMA loads"] > 0, row
        if not row["kernel"].startswith("dH"):  # whose epilogue stores from registers
            assert row["TMA stores"] > 0, row
        assert row["register moves"] > 0, f"the roles share registers evenly: {row}"
        if not row["kernel"].startswith(("down", "dX", "up permuted")):  # dH copies H, too
            assert row["async copies"] > 0, f"the gather is not asynchronous: {row}"


if __name__ == "__main__":
    _compile(sys.argv[1].split(","), sys.argv[2] == "1")
