"""The sparse kernels compiled for sm_90 on any x86-64 Linux machine: no spilled register.

Block products of 16-bit types must reach Hopper's matrix instructions. Compiling happens in a
process of its own, as for the experts' kernels. By default one configuration of each kernel is
compiled; all with TESSERA_COMPILE_ALL=1.
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

KERNELS = ("spmm", "spmm split", "spread", "sddmm", "dsd", "dsd transposed", "sdd")


def _compile(everything: bool) -> None:
    """Prints one line of JSON for each kernel and configuration."""
    import contextlib

    import torch
    import triton

    from moe.kernels.routing import spread
    from moe.kernels.sparse import block_products, sddmm, spmm

    made: dict[str, object] = {}
    compile_only(made.__setitem__)
    for module in (spmm, spread, sddmm, block_products):
        module.on_device = lambda tensor: contextlib.nullcontext()

    def show(name, config, dtype):
        for function, kernel in made.items():
            row = {"kernel": name, "function": function, "config": str(config)}
            row |= {"dtype": str(dtype), "triton": triton.__version__} | report(kernel)
            print(json.dumps(row), flush=True)
        made.clear()

    Z, M, N = 4096, 64, 1024
    indptr = torch.arange(0, Z + 1, Z // M, dtype=torch.int32)
    index = torch.zeros(Z, dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float32) if everything else (torch.bfloat16,):
        x, values = torch.empty(M, N, dtype=dtype), torch.empty(Z, dtype=dtype)
        split = spmm.split_rows(indptr, Z, 32)
        for means in (1, 8) if everything else (8,):
            for c in spmm.configs(dtype, means, N)[: None if everything else 1]:
                spmm.spmm_triton(indptr, index, None, values, x, None, row_length=64, config=c)
                show("spmm", c, dtype)
                spmm.spmm_triton(
                    indptr, index, index, values, x, x, beta=1.0, split=split, config=c
                )
                show("spmm split", c, dtype)
        for c in spread.configs(dtype, N)[: None if everything else 1]:
            spread.spread_triton(indptr, index, index, values, x, index, config=c)
            show("spread", c, dtype)
        for c in sddmm.configs(dtype, N)[: None if everything else 1]:
            sddmm.sddmm_triton(index, index, x, x, 1.0, dtype, c)
            show("sddmm", c, dtype)
        for size in (16, 128) if everything else (128,):
            blocks = torch.empty(Z, size, size, dtype=dtype)
            dense = torch.empty(1, 64 * size, N, dtype=dtype)
            for c in block_products.configs(dtype, size, None, size)[: None if everything else 1]:
                for transposed in (False, True):
                    block_products.dsd_triton(
                        indptr, index, index, blocks, transposed, dense, dense, dense, 1.0, 1.0, c
                    )
                    show("dsd transposed" if transposed else "dsd", c, dtype)
            for c in block_products.configs(dtype, size, size, None)[: None if everything else 1]:
                block_products.sdd_triton(indptr, index, dense[0], dense.mT, size, size, 1.0, c)
                show("sdd", c, dtype)


@needs_tools
@pytest.mark.timeout(1800)
def test_kernels_compile_for_hopper(tmp_path: Path):
    rows = rows_of(__file__, tmp_path, str(int(EVERYTHING)))
    assert {row["kernel"] for row in rows} == set(KERNELS)
    for row in rows:
        assert row["spilled bytes"] == 0, row
        assert row["shared"] <= SHARED_LIMIT, row
        if row["function"] in ("_dsd_kernel", "_sdd_kernel") and "float32" not in row["dtype"]:
            assert row["HGMMA"] > 0 or "bm=16" in row["config"], row  # wgmma has 64 rows


if __name__ == "__main__":
    _compile(sys.argv[1] == "1")
