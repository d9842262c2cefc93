"""The benchmark of routers on a CPU."""

from __future__ import annotations

import json

import pytest
import torch

from moe.kernels.routing.topk_gating import topk_gating
from moe.routing import Routing
from scripts.bench import router as bench


def test_a_small_run_beside_torch(tmp_path):
    assert bench.main(["--small", "--out", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "router.json").read_text())["rows"]
    assert row["ids wrong"] == 0 and row["gate error"] < 1e-6
    assert row["bytes"] == 4 * 512 * 16 + 20 * 512 * 2 + 4 * 512
    assert row["GB/s"] == pytest.approx(row["bytes"] / row["graph us"] / 1e3)
    assert row["ratio"]["full eager"] == pytest.approx(row["full eager us"] / row["eager us"])


def test_the_baseline_routes_as_the_kernels_do():
    z = torch.randn(33, 8)
    gate, index, lse, prob, ends, slot, row, token = bench.full_torch(z, 2)
    gating = topk_gating(z, 2)
    routing = Routing.from_topk(gating.expert_TK, gating.gate_TK, 8)
    torch.testing.assert_close(gate, gating.gate_TK)
    assert torch.equal(index, gating.expert_TK.long())
    torch.testing.assert_close(lse, gating.lse_T)
    torch.testing.assert_close(prob, gating.prob_sum_E)
    assert torch.equal(ends, routing.offsets_E1[1:].long())
    assert torch.equal(slot, routing.slot_R.long())
    assert torch.equal(row, routing.row_S.long())
    assert torch.equal(token, routing.token_R.long())


def test_kernels_are_summed_by_name(monkeypatch, tmp_path):
    events = [(0, 4, "gate(int)"), (5, 7, "gate(long)"), (8, 9, "at::fill"), (9, 10, "Memset")]
    monkeypatch.setattr(bench, "device_events", lambda run: run() and events)
    args = bench.bench_parser("", "x").parse_args(["--out", str(tmp_path)])
    args.command, args.failed, args.written = [], 0, {}
    table = bench.Table(args, "kernels", bench.COLUMNS["kernels"])
    bench.bench_kernels(table, [(8, 4, 2)], rounding=False)
    assert table.rows == [{"T": 8, "E": 4, "K": 2, "kernel": "gate", "us": 3}]
