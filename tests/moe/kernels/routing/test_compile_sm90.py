"""The router's kernels compiled for sm_90 on any x86-64 Linux machine, no GPU needed: no spills.

A spilled register costs more than anything these kernels do. Compiling happens in a process of its
own, since this one may run Triton's interpreter; the launchers run there as they are, with the
launch itself replaced by a compilation. By default one shape of each kernel is compiled, with
TESSERA_COMPILE_ALL=1 the shapes of known models and every form of the gates.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.moe.kernels.compile_sm90 import (
    EVERYTHING,
    compile_only,
    needs_tools,
    report,
    rows_of,
)

# name: T, E, K and what is asked of `topk_gating`
GATING = {
    "tiny": (256, 8, 2, {}),
    "small": (2048, 8, 2, {}),
    "small, many pairs": (2048, 8, 4, {}),
    "6 of 128": (65536, 128, 6, {}),  # not a power of two: the sorted lists are padded
}
MORE_GATING = {
    "Mixtral": (65536, 8, 2, {}),
    "Qwen3-30B-A3B": (65536, 128, 8, {}),
    "OLMoE": (32768, 64, 8, {"norm": "none"}),
    "256 experts of 16": (32768, 256, 16, {}),
    "GLM-4.5-Air": (16384, 128, 8, {"score": "sigmoid", "bias": True}),
    "DeepSeek-V3": (
        16384, 256, 8, {"score": "sigmoid", "bias": True, "groups": 8, "groups_kept": 4},
    ),
    "Qwen3-Next": (16384, 512, 10, {}),
    "Kimi-K3": (16384, 896, 16, {"score": "sigmoid", "bias": True}),
    "2048 experts": (4096, 2048, 8, {"valid": True}),
    "4096 experts": (4096, 4096, 8, {"score": "sqrtsoftplus"}),
    "small and odd": (1365, 3, 3, {"valid": True, "norm": "none"}),
    "odd": (7777, 60, 4, {"valid": True, "norm": "softmax_topk", "score": "sigmoid"}),
    "64 of 384": (4096, 384, 64, {}),
}  # fmt: skip
ROUNDING = {"K=2": (16384, 128, 2, {}), "more tokens": (32768, 64, 2, {})}
MORE_ROUNDING = {
    "K=4": (16384, 256, 4, {"variant": "balanced", "renorm": "tr", "score": "sigmoid"}),
    "many tokens": (65536, 128, 8, {"variant": "score", "protect_top1": True, "cap": 2048}),
    "many experts": (4096, 4096, 8, {"variant": "balanced", "norm": "none"}),
}


# ------------------------------------------------------------------------- in a process of its own


def _compile(everything: bool) -> None:
    """Print one line of JSON for each kernel of each shape."""
    import torch
    import triton

    from moe.kernels.common import row_tiles
    from moe.kernels.routing import gating_kernels, routing_metadata, token_rounding

    shape = "slots"

    def made(name, kernel):
        row = {"kernel": name, "shape": shape} | report(kernel)
        print(json.dumps(row | {"triton": triton.__version__}), flush=True)

    compile_only(made)
    token_rounding._overlap = lambda device: {"PDL": True, "launch_pdl": True}
    for name, (T, E, k, ask) in {**GATING, **(MORE_GATING if everything else {})}.items():
        shape, ask = name, dict(ask)
        logits = torch.zeros(T, E)
        bias = torch.zeros(E) if ask.pop("bias", False) else None
        valid = torch.ones(T, dtype=torch.bool) if ask.pop("valid", False) else None
        form = (ask.pop("score", "softmax"), ask.pop("norm", "topk_sum"), 1.0)
        limit = (ask.pop("groups", 1), ask.pop("groups_kept", 1), 2)
        out = gating_kernels.topk_gating_triton(logits, k, *form, bias, *limit, valid, True)
        grads = (torch.zeros(T, k), torch.zeros(T), torch.zeros(E))
        gating_kernels.topk_gating_backward_triton(logits, *out[:3], *grads, E, *form)
        gating_kernels.topk_gating_backward_triton(None, *out[:3], grads[0], None, None, E, *form)
    for name, (T, E, k, ask) in {**ROUNDING, **(MORE_ROUNDING if everything else {})}.items():
        shape = name
        call = {
            "slots": T * k + E * 128, "score": "softmax", "norm": "topk_sum", "scale": 1.0,
            "variant": "nearest", "tile": 128, "min_tiles": 1, "cap": 0, "protect_top1": False,
            "renorm": "tc", **ask,
        }  # fmt: skip
        logits = torch.zeros(T, E)
        ids, gate = torch.zeros(T, k, dtype=torch.int32), torch.zeros(T, k)
        lse, counts = torch.zeros(T), torch.zeros(E, dtype=torch.int32)
        out = token_rounding._token_rounding_triton(
            logits, ids, gate, lse, counts, None, *call.values()
        )
        form = (call["score"], call["norm"], call["scale"], call["renorm"])
        token_rounding._token_rounding_backward_triton(
            logits, ids, lse, out[8], out[2], out[0], *form
        )
    shape = "slots"
    ids = torch.zeros(70000, dtype=torch.int32)
    routing_metadata._routing_metadata_triton(ids, 128, None, ids, 70000)
    routing_metadata._routing_metadata_triton(ids[:999], 8, 1, None, 999)
    routing_metadata._slots_of_rows_triton(ids, torch.zeros(129, dtype=torch.int32), 8)
    row_tiles._tile_schedule_triton(torch.zeros(129, dtype=torch.int32), 128, 70000)


# --------------------------------------------------------------------------------------------- test


@needs_tools
@pytest.mark.timeout(1800)
def test_kernels_compile_for_hopper(tmp_path: Path):
    rows = rows_of(__file__, tmp_path, str(int(EVERYTHING)))
    assert {row["kernel"] for row in rows} == {
        "_gating_kernel", "_backward_kernel", "_gates_backward_kernel", "_finish_kernel",
        "_place_kernel", "_count_kernel", "_tiles_kernel", "_extremes_kernel",
        "_change_kernel", "_fill_kernel", "_rounding_backward_kernel", "_slots_kernel",
        *(("_targets_kernel",) if EVERYTHING else ()),
    }  # fmt: skip
    for row in rows:
        assert row["spilled bytes"] == 0, row
        if row["kernel"] in ("_extremes_kernel", "_change_kernel", "_fill_kernel"):
            assert row["waits"] and row["memory before the wait"] == 0, row


if __name__ == "__main__":
    _compile(sys.argv[1] == "1")
