"""The router's Hopper kernels compiled for sm_90a on any x86-64 Linux machine: no spills."""

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

# E, K and what is asked of the gating
SHAPES = {"Qwen3-30B-A3B": (128, 8, {})}
MORE_SHAPES = {
    "OLMoE": (64, 8, {"norm": "none"}),
    "6 of 200": (200, 6, {}),
    "GLM-4.5-Air": (128, 8, {"score": "sigmoid", "bias": True, "valid": True}),
    "4 of 256": (256, 4, {"norm": "softmax_topk"}),
}


def _compile(everything: bool) -> None:
    """Prints one line of JSON for each kernel of each shape."""
    from moe.kernels.tiers import hopper_missing

    reason = hopper_missing()
    if reason is not None:
        print(json.dumps({"missing": reason}), flush=True)
        return
    import torch

    from moe.kernels.hopper import gating

    shape = ""

    def made(name, kernel):
        print(json.dumps({"kernel": name, "shape": shape} | report(kernel)), flush=True)

    compile_only(made)
    compile_only(made, gluon=True)
    for name, (E, k, ask) in {**SHAPES, **(MORE_SHAPES if everything else {})}.items():
        shape, T = name, 8192
        bias = torch.zeros(E) if ask.get("bias") else None
        valid = torch.ones(T, dtype=torch.bool) if ask.get("valid") else None
        form = (ask.get("score", "softmax"), ask.get("norm", "topk_sum"), 1.0)
        gating._launch(torch.zeros(T, E), k, *form, bias, valid, True)


@needs_tools
@pytest.mark.timeout(900)
def test_gating_compiles_for_hopper(tmp_path: Path):
    rows = rows_of(__file__, tmp_path, str(int(EVERYTHING)))
    if "missing" in rows[0]:
        pytest.skip(rows[0]["missing"])
    assert {row["kernel"] for row in rows} == {"_gate", "_sum", "_place"}
    for row in rows:
        assert row["spilled bytes"] == 0, row
        if row["kernel"] != "_gate":  # what the kernel before writes is not there earlier
            assert row["waits"] and row["memory before the wait"] == 0, row
        if row["kernel"] == "_gate" and row["shape"] == "Qwen3-30B-A3B":
            assert row["registers"] <= 128, row  # four programs a multiprocessor


if __name__ == "__main__":
    _compile(sys.argv[1] == "1")
