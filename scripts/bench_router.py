"""Speed of the router: logits → experts, gates, statistics and sorting metadata, on one GPU.

    python scripts/bench_router.py                  all shapes; table, JSON and PNG under --out
    python scripts/bench_router.py --shapes 0,5     two of them
    python scripts/bench_router.py --tune           other plans of the gating kernel, timed
    python scripts/bench_router.py --rounding       token rounding beside plain top-K
    python scripts/bench_router.py --kernels        each kernel of the forward and backward alone
    python scripts/bench_router.py --kernels --rounding     the same of token rounding

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

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from moe.kernels import topk_gating as kernels
from moe.kernels.topk_gating import topk_gating, topk_gating_ref, topk_routing
from moe.rounding import RoundingConfig, round_tokens
from moe.routing import Routing
from training.config_load import user_path

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
L2_BYTES = 256 << 20  # more than any L2 cache of a card this runs on


def forward_bytes(T: int, E: int, K: int) -> int:
    return 4 * T * E + 20 * T * K + 4 * T


def backward_bytes(T: int, E: int, K: int) -> int:
    return 8 * T * E + 12 * T * K


# -------------------------------------------------------------------------------------- baselines


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


# ---------------------------------------------------------------------------------------- measure


def inputs(T: int, E: int, most: int = 64) -> list[Tensor]:
    """Different logits, together larger than the L2 cache (or `most` of them)."""
    count = max(2, min(most, -(-L2_BYTES // (4 * T * E))))
    return [torch.randn(T, E, device="cuda") for _ in range(count)]


def graph_us(run: Callable[[Tensor], object], batches: list[Tensor], repeats: int = 15) -> float:
    """Median microseconds of a call inside a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for z in batches[:3]:
            run(z)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for z in batches:
            run(z)
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(batches))
    return statistics.median(times[3:])


def eager_us(run: Callable[[Tensor], object], batches: list[Tensor], repeats: int = 7) -> float:
    """Median microseconds of a call issued from Python, one after the other."""
    loop = list(itertools.islice(itertools.cycle(batches), 100))
    times = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for z in loop:
            run(z)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e6 / len(loop))
    return statistics.median(times[2:])


def copy_gbs(nbytes: int) -> float:
    """GB/s of a copy that reads and writes `nbytes` together, over cold memory."""
    size = max(nbytes // 8, 1)
    sources = [torch.randn(size, device="cuda") for _ in range(max(2, min(64, L2_BYTES // nbytes)))]
    target = torch.empty(size, device="cuda")
    return 8 * size / graph_us(lambda z: target.copy_(z), sources) / 1e3


def errors(z: Tensor, k: int) -> tuple[int, float]:
    """Ids that differ from a float64 stable sort; largest error of a gate."""
    got = topk_gating(z, k)
    want = topk_gating_ref(z.double(), k)
    wrong = int((got.expert_TK != want.expert_TK).sum())
    return wrong, float((got.gate_TK - want.gate_TK).abs().max())


# ----------------------------------------------------------------------------------------- tables


def bench(shapes: list[tuple[int, int, int]]) -> list[dict]:
    rows = []
    print(
        "      T    E   K |  graph us  GB/s share | eager us | torch graph: dense  full  x dense"
        " x full | torch eager: dense  full  x dense x full | backward us GB/s share | ids  gates"
    )
    for T, E, K in shapes:
        z = inputs(T, E)
        nbytes, back = forward_bytes(T, E, K), backward_bytes(T, E, K)

        def route(z, K=K):
            return topk_routing(z, K)

        row = {"T": T, "E": E, "K": K, "bytes": nbytes, "backward_bytes": back}
        row["ids_wrong"], row["gate_error"] = errors(z[0], K)
        row["graph_us"] = graph_us(route, z)
        row["eager_us"] = eager_us(route, z)
        for name, run in (("dense", dense_gates), ("full", full_torch)):
            row[f"{name}_graph_us"] = graph_us(lambda z, run=run, K=K: run(z, K), z)
            row[f"{name}_eager_us"] = eager_us(lambda z, run=run, K=K: run(z, K), z)
        gating = topk_gating(z[0], K)
        d_gate, d_lse = torch.randn_like(gating.gate_TK), torch.randn_like(gating.lse_T)
        d_prob = torch.randn_like(gating.prob_sum_E)

        def backward(z, gating=gating, grads=(d_gate, d_lse, d_prob)):
            return kernels._topk_gating_backward_triton(
                z, gating.expert_TK, gating.gate_TK, gating.lse_T, *grads, z.shape[1],
                "softmax", "topk_sum", 1.0,
            )  # fmt: skip

        row["backward_us"] = graph_us(backward, z)
        row["copy_gbs"], row["backward_copy_gbs"] = copy_gbs(nbytes), copy_gbs(back)
        row["gbs"] = nbytes / row["graph_us"] / 1e3
        row["backward_gbs"] = back / row["backward_us"] / 1e3
        row["share"] = row["gbs"] / row["copy_gbs"]
        row["backward_share"] = row["backward_gbs"] / row["backward_copy_gbs"]
        ratio = {
            f"{name}_{clock}": row[f"{name}_{clock}_us"] / row[f"{clock}_us"]
            for name in ("dense", "full")
            for clock in ("graph", "eager")
        }
        row["ratio"] = ratio
        print(
            f"{T:7d} {E:4d} {K:3d} | {row['graph_us']:9.1f} {row['gbs']:5.0f} {row['share']:5.2f} |"
            f" {row['eager_us']:8.1f} |"
            f" {row['dense_graph_us']:18.1f} {row['full_graph_us']:5.1f}"
            f" {ratio['dense_graph']:8.2f} {ratio['full_graph']:6.2f} |"
            f" {row['dense_eager_us']:18.1f} {row['full_eager_us']:5.1f}"
            f" {ratio['dense_eager']:8.2f} {ratio['full_eager']:6.2f} |"
            f" {row['backward_us']:11.1f} {row['backward_gbs']:4.0f} {row['backward_share']:5.2f} |"
            f" {row['ids_wrong']:3d} {row['gate_error']:.0e}",
            flush=True,
        )
        rows.append(row)
    return rows


def tune(shapes: list[tuple[int, int, int]]) -> list[dict]:
    """Every plan of the Triton gating kernel, alone and with the metadata, and what auto takes."""
    rows = []
    print("      T    E   K  plan                      gating us   with metadata us")
    for T, E, K in shapes:
        z = inputs(T, E)
        plans = [None, {}, {"exact": 1}]
        if kernels._fast_sizes(E, K):
            plans += [{"sub": 1, "each": e, "lanes": n} for n in (4, 8, 16) for e in (2, 6)]
            plans += [{"sub": 1, "each": 4, "warps": w, "lanes": n} for n in (4, 8) for w in (1, 2)]
            plans += [{"sub": 2, "each": 2, "lanes": n} for n in (8, 16)]
        elif kernels._plan(T, E, K, 1, 1, True).blocks == 1:
            for warps, elements in ((16, 8), (16, 16), (16, 32), (8, 16), (8, 32)):
                plans += [{"warps": warps, "elements": elements, "words": w} for w in (32, 128)]
        else:
            plans += [{"last": 0}, *({"each": e} for e in (1, 2, 4, 8))]
            if T <= 2048:  # by a single program
                plans += [{"one": 1 << 20, "elements": e} for e in (8, 16, 32)]
        for plan in plans:
            kernels.forced_plan.clear()
            kernels.forced_plan.update(plan or {})
            ask = {"backend": "auto" if plan is None else "triton"}
            gating = graph_us(lambda z, K=K, ask=ask: topk_gating(z, K, **ask), z)
            both = graph_us(lambda z, K=K, ask=ask: topk_routing(z, K, **ask), z)
            name = "auto" if plan is None else str(plan) if plan else "as shipped"
            print(f"{T:7d} {E:4d} {K:3d}  {name:24s} {gating:10.1f} {both:18.1f}", flush=True)
            rows.append(
                {"T": T, "E": E, "K": K, "plan": plan, "gating_us": gating, "both_us": both}
            )
        kernels.forced_plan.clear()
    return rows


def bench_rounding(shapes: list[tuple[int, int, int]]) -> list[dict]:
    """Cost of rounding: logits → routing with it and without, forward and backward."""
    rows = []
    print(
        "      T    E   K  variant       plain us  rounded us   adds us  backward adds us   pairs"
    )
    for T, E, K in shapes:
        z = inputs(T, E)
        for variant in ("nearest", "up", "down", "balanced", "systematic", "score"):
            config = RoundingConfig(variant=variant, min_mean_tiles=0.0)

            def plain(z, K=K, E=E):
                gating = topk_gating(z, K)
                return gating, Routing.from_topk(gating.expert_TK, gating.gate_TK, E)

            def rounded(z, K=K, config=config):
                gating = topk_gating(z, K)
                return gating, round_tokens(z, gating, config)

            def differentiated(z, run):
                leaf = z.detach().requires_grad_()
                gating, routing = run(leaf)
                loss = routing.gates_S.sum() + gating.lse_T.sum() + gating.prob_sum_E.sum()
                return torch.autograd.grad(loss, leaf)

            a, b = graph_us(plain, z), graph_us(rounded, z)
            both_a = graph_us(lambda z: differentiated(z, plain), z)
            both_b = graph_us(lambda z: differentiated(z, rounded), z)
            pairs = int(rounded(z[0])[1].offsets_E1[-1])
            row = {
                "T": T, "E": E, "K": K, "variant": variant, "plain_us": a, "rounded_us": b,
                "adds_us": b - a, "backward_adds_us": both_b - both_a - (b - a), "pairs": pairs,
            }  # fmt: skip
            rows.append(row)
            print(
                f"{T:7d} {E:4d} {K:3d}  {variant:12s} {a:9.1f} {b:11.1f} {b - a:9.1f}"
                f" {row['backward_adds_us']:17.1f} {pairs:7d}",
                flush=True,
            )
    return rows


def bench_kernels(shapes: list[tuple[int, int, int]], rounding: bool) -> list[dict]:
    """Mean microseconds of each kernel, by the profiler, over cold inputs."""
    rows = []
    for T, E, K in shapes:
        z = [x.requires_grad_() for x in inputs(T, E)]

        def step(x, K=K):
            if rounding:
                gating = topk_gating(x, K)
                gates = round_tokens(x, gating, RoundingConfig(min_mean_tiles=0.0)).gates_S
            else:
                gating, _ = topk_routing(x, K)
                gates = gating.gate_TK
            loss = gates.sum() + gating.lse_T.sum() + gating.prob_sum_E.sum()
            torch.autograd.grad(loss, x)

        for x in z[:3]:
            step(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for x in z:
                step(x)
            torch.cuda.synchronize()
        for event in profile.key_averages():
            us = event.device_time_total / max(event.count, 1)
            name = event.key.split("(")[0][:60]
            if us and "at::" not in name and "Mem" not in name:
                print(f"{T:7d} {E:4d} {K:3d}  {name:32s} {us:8.1f} us", flush=True)
                rows.append({"T": T, "E": E, "K": K, "kernel": name, "us": us})
    return rows


def plot(rows: list[dict], path: Path) -> None:
    """Speed over the two baselines, and the share of the copy's bandwidth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [f"{r['T']}\n{r['E']}, {r['K']}" for r in rows]
    figure, (left, right) = plt.subplots(2, 1, figsize=(max(7, len(rows)), 7))
    for i, kind in enumerate(rows[0]["ratio"]):
        at = [x + 0.2 * (i - 1.5) for x in range(len(rows))]
        left.bar(at, [r["ratio"][kind] for r in rows], width=0.2, label=kind.replace("_", ", "))
    left.axhline(1.0, color="black", lw=0.8)
    left.set_ylabel("times faster than torch")
    left.legend(fontsize=8)
    right.bar(range(len(rows)), [r["share"] for r in rows], width=0.4, label="forward")
    at = [x + 0.4 for x in range(len(rows))]
    right.bar(at, [r["backward_share"] for r in rows], width=0.4, label="backward")
    right.set_ylabel("share of copy bandwidth")
    right.set_xlabel("tokens / experts, experts per token")
    right.legend(fontsize=8)
    for axis in (left, right):
        axis.set_xticks(range(len(rows)), names, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="all", help=f"numbers 0 to {len(SHAPES) - 1}, or all")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--rounding", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--out", type=user_path, default=Path("runs/bench_router"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_router needs a CUDA device")
    table = ROUNDING if args.rounding else SHAPES
    shapes = table if args.shapes == "all" else [table[int(i)] for i in args.shapes.split(",")]
    card = torch.cuda.get_device_name()
    peak = copy_gbs(1 << 30)
    print(f"{card}, torch {torch.__version__}, copy of 1 GiB: {peak:.0f} GB/s (read + written)")
    print("forward bytes 4TE + 20TK + 4T, backward bytes 8TE + 12TK, K experts of E, T tokens")
    kinds = {
        "tune": tune,
        "kernels": functools.partial(bench_kernels, rounding=args.rounding),
        "rounding": bench_rounding,
        "router": bench,
    }
    kind = next(name for name in kinds if name == "router" or getattr(args, name))
    rows = kinds[kind](shapes)
    args.out.mkdir(parents=True, exist_ok=True)
    result = {"card": card, "torch": torch.__version__, "copy_gbs": peak, "rows": rows}
    (args.out / f"{kind}.json").write_text(json.dumps(result, indent=1))
    if kind == "router":
        plot(rows, args.out / "router.png")
    print(f"written to {args.out}/{kind}.json")


if __name__ == "__main__":
    main()
