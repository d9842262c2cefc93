#!/usr/bin/env python3
"""Speed of the router: logits → experts, gates, statistics and sorting metadata, on one GPU.

    python scripts/bench/router.py                  all shapes; table, and JSON under --out
    python scripts/bench/router.py --shapes 0,5     two of them
    python scripts/bench/router.py --kernels        each kernel of the forward and backward alone
    python scripts/bench/router.py --kernels --rounding     the same of token rounding
    python scripts/bench/router.py --small          one small shape, also on a CPU

Two clocks. `graph`: a CUDA graph of several calls on different inputs, longer together than the L2
cache, divided by their number: what the GPU needs. `eager`: calls in a row without a graph, which
for small batches is what Python needs. Medians over repeats.

Bytes, each counted once: forward 4TE (logits) + 8TK (ids, gates) + 4T (logsumexp) + 12TK (slot →
row, row → slot, row → token); backward 8TE (logits in, gradient out) + 12TK (ids, gates, gradient).
"share" is bytes / time over the bandwidth of a plain copy of the same number of bytes, measured
beside it in the same way. FLOPs are not counted: the router is bound by memory or by launches.

Baselines, in plain torch: `softmax+topk+scatter` (gates in a dense T x E matrix, no metadata) and
`full` (renormalised gates, logsumexp, probability sums, counts, stable argsort and its inverse).
Errors: ids that differ from a float64 stable sort, and the largest error of a gate.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from moe.kernels.common.gating import topk_gating_ref
from moe.kernels.routing.gating_kernels import topk_gating_backward_triton
from moe.kernels.routing.topk_gating import topk_gating, topk_routing
from moe.rules.rounding import Rounding, round_tokens
from scripts.bench.harness import (
    DEVICE,
    Table,
    bench_parser,
    chosen,
    cycled_us,
    device_events,
    finish,
    header,
    host_ms,
    parse,
)

SHAPES = [  # T, E, K
    *((T, 8, 2) for T in (256, 512, 1024, 2048)),
    (65536, 8, 2),
    (4096, 128, 8),
    (16384, 128, 8),
    (65536, 128, 8),
    (32768, 64, 8),
    (65536, 256, 8),
    (32768, 256, 16),
    (16384, 512, 10),
    (8192, 2048, 8),
]
ROUNDING = [(16384, 128, 2), (16384, 256, 4), (65536, 128, 8)]
SMALL = [(512, 16, 2)]
L2_BYTES = 256 << 20  # more than any L2 cache of a card this runs on
SHAPE = "T:6d | E:4d | K:3d | "
COLUMNS = {
    "router": SHAPE + "graph us:7.1f | GB/s:5.0f | share:5.2f | eager us:7.1f | "
    "dense graph us:7.1f | full graph us:7.1f | dense eager us:7.1f | full eager us:7.1f | "
    "backward us:7.1f | backward GB/s:5.0f | backward share:5.2f | ids wrong:3d | gate error:.0e",
    "kernels": SHAPE + "kernel:60s | us:8.1f",
}


def forward_bytes(T: int, E: int, K: int) -> int:
    return 4 * T * E + 20 * T * K + 4 * T


def backward_bytes(T: int, E: int, K: int) -> int:
    return 8 * T * E + 12 * T * K


# ---- baselines -----------------------------------------------------------------------------------


def dense_gates(z: Tensor, k: int) -> Tensor:
    """softmax + topk + scatter."""
    value, index = torch.topk(torch.softmax(z, 1), k, dim=1)
    return torch.zeros_like(z).scatter_(1, index, value)


def full_torch(z: Tensor, k: int) -> tuple[Tensor, ...]:
    """Everything that `topk_routing` returns, in plain torch without a host sync."""
    p = torch.softmax(z, 1)
    value, index = torch.topk(p, k, dim=1)
    gate = value / value.sum(1, keepdim=True)
    flat = index.view(-1)
    slot = torch.argsort(flat, stable=True)
    row = torch.empty_like(slot)
    row[slot] = torch.arange(slot.numel(), device=z.device)
    counts = torch.zeros(z.shape[1], dtype=torch.int64, device=z.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    return gate, index, torch.logsumexp(z, 1), p.sum(0), counts.cumsum(0), slot, row, slot // k


# ---- measure -------------------------------------------------------------------------------------


def inputs(T: int, E: int, most: int = 64) -> list[Tensor]:
    """Different logits, together larger than the L2 cache (or `most` of them)."""
    count = max(2, min(most, -(-L2_BYTES // (4 * T * E)))) if DEVICE.type == "cuda" else 2
    return [torch.randn(T, E, device=DEVICE) for _ in range(count)]


def eager_us(run, batches: list[Tensor], repeats: int = 7) -> float:
    """Median microseconds of a call issued from Python, one after the other."""
    following = itertools.cycle(batches)
    times = [host_ms(lambda: run(next(following)), 100, finish=True) for _ in range(repeats + 2)]
    return 1e3 * statistics.median(times[2:])


def copy_gbs(nbytes: int) -> float:
    """GB/s of a copy that reads and writes `nbytes` together, over cold memory."""
    size = max(nbytes // 8, 1)
    count = max(2, min(64, L2_BYTES // nbytes)) if DEVICE.type == "cuda" else 2
    sources = [torch.randn(size, device=DEVICE) for _ in range(count)]
    target = torch.empty(size, device=DEVICE)
    return 8 * size / cycled_us(target.copy_, sources) / 1e3


def errors(z: Tensor, k: int) -> tuple[int, float]:
    """Ids that differ from a float64 stable sort; largest error of a gate."""
    got = topk_gating(z, k)
    want = topk_gating_ref(z.double(), k)
    wrong = int((got.expert_TK != want.expert_TK).sum())
    return wrong, float((got.gate_TK - want.gate_TK).abs().max())


# ---- tables --------------------------------------------------------------------------------------


def bench(table: Table, shapes: list[tuple[int, int, int]]) -> None:
    for T, E, K in shapes:
        with table.row(T=T, E=E, K=K) as row:
            fill(row, T, E, K)


def fill(row: dict, T: int, E: int, K: int) -> None:
    z = inputs(T, E)
    row["ids wrong"], row["gate error"] = errors(z[0], K)
    runs = {"": topk_routing, "dense ": dense_gates, "full ": full_torch}
    for name, function in runs.items():
        run = functools.partial(lambda z, function: function(z, K), function=function)
        row[f"{name}graph us"], row[f"{name}eager us"] = cycled_us(run, z), eager_us(run, z)
    gating = topk_gating(z[0], K)
    saved = (gating.expert_TK, gating.gate_TK, gating.lse_T)
    grads = [torch.randn_like(t) for t in (gating.gate_TK, gating.lse_T, gating.prob_sum_E)]
    if DEVICE.type == "cuda":
        row["backward us"] = cycled_us(
            lambda z: topk_gating_backward_triton(z, *saved, *grads, E, "softmax", "topk_sum", 1.0),
            z,
        )
    for name, time, nbytes in (
        ("", "graph us", forward_bytes(T, E, K)),
        ("backward ", "backward us", backward_bytes(T, E, K)),
    ):
        if time in row:
            row[f"{name}bytes"], row[f"{name}copy GB/s"] = nbytes, copy_gbs(nbytes)
            row[f"{name}GB/s"] = nbytes / row[time] / 1e3
            row[f"{name}share"] = row[f"{name}GB/s"] / row[f"{name}copy GB/s"]
    row["ratio"] = {
        f"{name}{clock}": row[f"{name}{clock} us"] / row[f"{clock} us"]
        for name in ("dense ", "full ")
        for clock in ("graph", "eager")
    }


def bench_kernels(table: Table, shapes: list[tuple[int, int, int]], rounding: bool) -> None:
    """Mean microseconds of each kernel, by the profiler, over cold inputs."""
    for T, E, K in shapes:
        z = [x.requires_grad_() for x in inputs(T, E)]

        def step(x, K=K):
            if rounding:
                gating = topk_gating(x, K)
                gates = round_tokens(x, gating, Rounding(to="nearest", min_mean_tiles=0.0)).gates_S
            else:
                gating, _ = topk_routing(x, K)
                gates = gating.gate_TK
            loss = gates.sum() + gating.lse_T.sum() + gating.prob_sum_E.sum()
            torch.autograd.grad(loss, x)

        for x in z[:3]:
            step(x)
        times: dict[str, list[float]] = {}
        for start, end, name in device_events(lambda z=z, step=step: [step(x) for x in z]):
            if "at::" not in name and "Mem" not in name:
                times.setdefault(name.split("(")[0][:60], []).append(end - start)
        for name, found in times.items():
            with table.row(T=T, E=E, K=K, kernel=name) as row:
                row["us"] = statistics.mean(found)


def main(arguments: list[str] | None = None) -> int:
    parser = bench_parser(__doc__, "bench_router", small=True)
    parser.add_argument(
        "--shapes", type=chosen(SHAPES), default="all", help=f"0 to {len(SHAPES) - 1}, or all"
    )
    parser.add_argument("--kernels", action="store_true", help="time every kernel")
    parser.add_argument("--rounding", action="store_true", help="--kernels: of token rounding")
    args = parse(parser, arguments, gpu_only=("kernels",))
    if args.rounding and not args.kernels:
        parser.error("--rounding needs --kernels")
    shapes = SMALL if args.small else ROUNDING if args.rounding else args.shapes
    peak = copy_gbs(1 << 30) if DEVICE.type == "cuda" else copy_gbs(1 << 20)
    header(
        f"a large copy takes {peak:.0f} GB/s (read + written)",
        "forward bytes 4TE + 20TK + 4T, backward bytes 8TE + 12TK, K experts of E, T tokens",
    )
    kind = "kernels" if args.kernels else "router"
    table = Table(args, kind, COLUMNS[kind], copy_gbs=peak)
    if args.kernels:
        bench_kernels(table, shapes, args.rounding)
    else:
        bench(table, shapes)
    return finish(args)


if __name__ == "__main__":
    sys.exit(main())
