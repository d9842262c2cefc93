"""Where sparse products pay: SpMM beside cuSPARSE and cuBLAS, dispatch and combine beside a copy.

    python scripts/bench_spmm.py                         everything; table, JSON and PNG under --out
    python scripts/bench_spmm.py --part spmm --shapes 4096,4096,1024 --densities 10,1 --blocks 1,64
    python scripts/bench_spmm.py --part moe
    python scripts/bench_spmm.py --small                 small sizes, for a CPU

`spmm`: A [M, K] times X [K, N] for densities from 50 % to 0.5 %, unstructured (block 1) and in
blocks, rows of even length or of a power law. Beside ours: `cusparse` (torch.sparse CSR), `bsr`
(torch.sparse BSR) and `dense` (cuBLAS on the same matrix with its zeros). TFLOP/s are those of the
stored entries, 2 · entries · N; `dense-equivalent` counts 2MKN. The crossover is the density at
which ours takes as long as dense, between the two densities measured around it.

`moe`: T tokens of width d to K experts. dispatch y = D x copies each token K times, combine y = C x
sums K weighted rows, `dispatch_back` sums without weights, `gate_grad` is an SDDMM. GB/s count each
number once, (R + T) · d with R = TK rows; `share` is that over the bandwidth of a plain copy of as
many bytes, timed beside it. index_select, index_add and cuSPARSE are the baselines.

`layer`: experts of an MoE layer as sparse products (`kernels: spmm`) beside the grouped products,
forward and forward + backward, with the difference of their outputs.

Median times of single calls on a cold L2 cache. Errors are relative, by norm, against float32.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from moe.experts import experts
from moe.routing import Routing
from moe.sparse import BCSR, CSR, Pattern, gather, sddmm, spmm
from training.config_load import user_path

SHAPES = [(4096, K, N) for K in (1024, 4096) for N in (512, 1024, 4096)]  # M, K, N
DENSITIES = (50, 20, 10, 5, 2, 1, 0.5)  # percent
BLOCKS = (1, 16, 32, 64, 128)
MOE = list(itertools.product((4096, 16384, 65536), (1024, 4096, 7168), (1, 2, 8)))  # T, d, K
EXPERTS = 64
LAYERS = [(16384, 2048, 1024, 64, 8), (16384, 2048, 768, 128, 8)]  # T, D, N, E, K

# ---------------------------------------------------------------------------------------- measure


def milliseconds(run: Callable[[], object], device: str, seconds: float) -> float:
    """Median of single calls; on a GPU with a cold L2 cache."""
    run()
    if device == "cpu":
        times, began = [], time.perf_counter()
        while len(times) < 3 or time.perf_counter() - began < seconds:
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1000)
        return statistics.median(times)
    flush = torch.empty(1 << 28, dtype=torch.uint8, device=device)  # larger than any L2
    marks, began = [], time.perf_counter()
    while len(marks) < 5 or (time.perf_counter() - began < seconds and len(marks) < 50):
        torch.cuda._sleep(500_000)  # so that the queue is full while Python issues the call
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        marks.append((start, end))
        if len(marks) % 10 == 0:
            end.synchronize()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in marks[2:])


def error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want).norm() / want.norm().clamp_min(1e-30))


def attempt(
    row: dict, run: Callable[[], Tensor], want: Tensor, device: str, seconds: float
) -> dict:
    """Adds time and error to a row, or why the method cannot do it."""
    try:
        row["error"] = error(run(), want)
        row["ms"] = milliseconds(run, device, seconds)
    except (RuntimeError, ValueError, NotImplementedError) as failure:
        row["failed"] = str(failure).splitlines()[0][:200]


# ------------------------------------------------------------------------------------------- spmm


def keep_entries(M: int, K: int, density: float, skew: str, device: str) -> Tensor:
    """bool [M, K]; `power` gives rows a length falling as rank^-0.7, in random order."""
    share_M = torch.full((M,), density, device=device)
    if skew == "power":
        share_M = torch.arange(1, M + 1, device=device).float() ** -0.7
        low, high = 0.0, float(M)
        for _ in range(60):  # the factor that gives the density, no row being longer than K
            middle = (low + high) / 2
            if (share_M * middle).clamp(max=1).mean() < density:
                low = middle
            else:
                high = middle
        share_M = (share_M * high).clamp(max=1)[torch.randperm(M, device=device)]
    return torch.rand(M, K, device=device) < share_M[:, None]


def bench_spmm(args) -> list[dict]:
    device, dtype, rows = args.device, getattr(torch, args.dtype), []
    print(
        "      M     K     N  block skew     density  method      ms   TFLOP/s  dense-eq.   error"
    )
    for (M, K, N), block, skew in itertools.product(args.shapes, args.blocks, args.skews):
        x = torch.randn(K, N, device=device).to(dtype)
        for percent in args.densities:
            keep = keep_entries(-(-M // block), -(-K // block), percent / 100, skew, device)
            mask = keep.repeat_interleave(block, 0).repeat_interleave(block, 1)[:M, :K]
            w = (torch.randn(M, K, device=device) * mask).to(dtype)
            want = w.float() @ x.float()
            ours = CSR.from_dense(w, mask) if block == 1 else BCSR.from_dense(w, block, keep)
            entries = ours.values.numel()
            runs = {"ours": partial(spmm, ours, x)}
            if block == 1 or M % block == K % block == 0:
                runs["cusparse" if block == 1 else "bsr"] = partial(torch.mm, ours.torch(), x)
            runs["dense"] = partial(torch.mm, w, x)
            for method, run in runs.items():
                row = {
                    "part": "spmm", "M": M, "K": K, "N": N, "block": block, "skew": skew,
                    "density": percent, "entries": entries, "method": method,
                }  # fmt: skip
                attempt(row, run, want, device, args.seconds)
                if "ms" in row:
                    row["tflops"] = 2 * entries * N / row["ms"] / 1e9
                    row["dense_tflops"] = 2 * M * K * N / row["ms"] / 1e9
                rows.append(row)
                print(
                    f"{M:7d} {K:5d} {N:5d} {block:6d} {skew:8s} {percent:6.1f} %  {method:9s}"
                    + (
                        f"{row['ms']:8.3f} {row['tflops']:8.2f} {row['dense_tflops']:8.1f}"
                        f"   {row['error']:.0e}"
                        if "ms" in row
                        else f"  {row['failed']}"
                    ),
                    flush=True,
                )
    return rows


def by_case(rows: list[dict]) -> dict[tuple, dict[float, dict[str, float]]]:
    """(M, K, N, block, skew) -> density -> method -> milliseconds."""
    cases: dict[tuple, dict[float, dict[str, float]]] = {}
    for row in rows:
        if "ms" in row:
            case = tuple(row[name] for name in ("M", "K", "N", "block", "skew"))
            cases.setdefault(case, {}).setdefault(row["density"], {})[row["method"]] = row["ms"]
    return cases


def crossover(times: dict[float, dict[str, float]]) -> float | None:
    """Percent at which ours takes as long as dense; None where one is faster at all of them."""
    ratio = {d: math.log(m["ours"] / m["dense"]) for d, m in times.items() if "ours" in m}
    ordered = sorted(ratio)
    for low, high in itertools.pairwise(ordered):
        if ratio[low] <= 0 < ratio[high]:
            part = -ratio[low] / (ratio[high] - ratio[low])
            return math.exp(math.log(low) + part * (math.log(high) - math.log(low)))
    return None


def summary(rows: list[dict]) -> list[dict]:
    """Speed-ups and the crossover of each case."""
    print("\n      M     K     N  block skew     ours faster than ... at each density; crossover")
    found = []
    for case, times in by_case(rows).items():
        M, K, N, block, skew = case
        row = {"M": M, "K": K, "N": N, "block": block, "skew": skew}
        for peer in ("cusparse", "bsr", "dense"):
            speed = {
                d: m[peer] / m["ours"] for d, m in sorted(times.items()) if {peer, "ours"} <= set(m)
            }
            if speed:
                row[f"over_{peer}"] = speed
                text = " ".join(f"{d:g}%:{s:.2f}" for d, s in speed.items())
                print(f"{M:7d} {K:5d} {N:5d} {block:6d} {skew:8s} {peer:8s} {text}")
        row["crossover"] = crossover(times)
        won = [d for d, m in sorted(times.items()) if m["ours"] < m["dense"]]
        text = f"{row['crossover']:.2g} %" if row["crossover"] else "none in this range"
        print(
            f"{'':38s} dense wins from: {text}"
            + ("" if won else "; dense is faster at every density measured")
        )
        found.append(row)
    return found


# -------------------------------------------------------------------------------------------- moe


Run = Callable[[], Tensor]


def moe_runs(
    T: int, d: int, K: int, dtype: torch.dtype, device: str
) -> tuple[dict[tuple[str, str], Run], dict[str, Tensor]]:
    """((operation, method) -> call, operation -> float32 result) of one shape."""
    expert_TK = torch.rand(T, EXPERTS, device=device).argsort(1)[:, :K].to(torch.int32)
    routing = Routing.from_topk(expert_TK, torch.rand(T, K, device=device), EXPERTS)
    R, token_R = T * K, routing.token_R.long()
    x_Td, y_Rd = (torch.randn(n, d, device=device).to(dtype) for n in (T, R))
    bounds_R1 = torch.arange(R + 1, dtype=torch.int32, device=device)
    by_row = Pattern(bounds_R1, routing.token_R, (R, T), 1)
    by_token = Pattern(routing.csr()[0], routing.row_S, (T, R), K)
    dispatch = by_row.with_flipped(by_token, routing.slot_R)
    combine = CSR(by_token.with_flipped(by_row, routing.slot_R), routing.gates_S)
    ones_R = y_Rd.new_ones(R)
    torch_dispatch = CSR(by_row, ones_R).torch()
    torch_combine = CSR(by_token, routing.gates_S.to(dtype)).torch()
    torch_back = CSR(by_token, ones_R).torch()
    gate_R1 = routing.gates_R.to(dtype)[:, None]

    def index_add(rows_Rd: Tensor) -> Tensor:
        return rows_Rd.new_zeros(T, d).index_add_(0, token_R, rows_Rd)

    gate_grad_R = (x_Td.float()[token_R] * y_Rd.float()).sum(1)
    runs = {
        ("dispatch", "ours"): lambda: gather(dispatch, x_Td),
        ("dispatch", "ours by rows"): lambda: gather(by_row, x_Td),
        ("dispatch", "index_select"): lambda: x_Td.index_select(0, token_R),
        ("dispatch", "cusparse"): lambda: torch_dispatch @ x_Td,
        ("combine", "ours"): lambda: spmm(combine, y_Rd),
        ("combine", "index_add"): lambda: index_add(y_Rd * gate_R1),
        ("combine", "cusparse"): lambda: torch_combine @ y_Rd,
        ("dispatch_back", "ours"): lambda: gather(by_token, y_Rd),
        ("dispatch_back", "index_add"): lambda: index_add(y_Rd),
        ("dispatch_back", "cusparse"): lambda: torch_back @ y_Rd,
        ("gate_grad", "ours"): lambda: sddmm(combine.pattern, x_Td, y_Rd),
    }
    want = {
        "dispatch": x_Td.float()[token_R],
        "combine": index_add(y_Rd.float() * routing.gates_R[:, None]),
        "dispatch_back": index_add(y_Rd.float()),
        "gate_grad": torch.empty_like(gate_grad_R).index_copy_(
            0, routing.slot_R.long(), gate_grad_R
        ),
    }
    return runs, want


def bench_moe(args) -> list[dict]:
    device, dtype, rows = args.device, getattr(torch, args.dtype), []
    print("      T     d  K  operation      method          ms    GB/s  share   error")
    for T, d, K in args.moe:
        runs, want = moe_runs(T, d, K, dtype, device)
        nbytes = (T * K + T) * d * dtype.itemsize
        source = torch.empty(nbytes // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy = nbytes / milliseconds(partial(target.copy_, source), device, args.seconds) / 1e6
        del source, target
        for (operation, method), run in runs.items():
            if args.methods and method not in args.methods:
                continue
            row = {"part": "moe", "T": T, "d": d, "K": K, "operation": operation, "method": method}
            attempt(row, run, want[operation], device, args.seconds)
            if "ms" in row:
                row["gbs"] = nbytes / row["ms"] / 1e6
                row["copy_gbs"], row["share"] = copy, row["gbs"] / copy
            rows.append(row)
            print(
                f"{T:7d} {d:5d} {K:2d}  {operation:13s}  {method:12s}"
                + (
                    f"{row['ms']:8.3f} {row['gbs']:7.0f} {row['share']:6.2f}   {row['error']:.0e}"
                    if "ms" in row
                    else f"  {row['failed']}"
                ),
                flush=True,
            )
    return rows


# ------------------------------------------------------------------------------------------ layer


def bench_layer(args) -> list[dict]:
    device, dtype, rows = args.device, getattr(torch, args.dtype), []
    print("      T     D     N    E  K  method   forward ms  forward + backward ms  difference")
    for T, D, N, E, K in args.layers:
        expert_TK = torch.rand(T, E, device=device).argsort(1)[:, :K].to(torch.int32)
        routing = Routing.from_topk(expert_TK, torch.rand(T, K, device=device), E)
        sizes = ((T, D), (E, 2 * N, D), (E, D, N))
        leaves = [torch.randn(s, device=device).mul_(s[-1] ** -0.5).to(dtype) for s in sizes]
        leaves = [t.requires_grad_() for t in leaves]

        def both(backend: str, leaves=leaves, routing=routing) -> None:
            experts(*leaves, routing, backend=backend).sum().backward()
            for leaf in leaves:
                leaf.grad = None

        want = experts(*leaves, routing, backend="auto").detach().float()
        for name, backend in (("spmm", "spmm"), ("grouped", "auto")):
            row = {"part": "layer", "T": T, "D": D, "N": N, "E": E, "K": K, "method": name}
            with torch.no_grad():
                attempt(
                    row, partial(experts, *leaves, routing, backend=backend), want, device,
                    args.seconds,
                )  # fmt: skip
            row["both_ms"] = milliseconds(partial(both, backend), device, args.seconds)
            rows.append(row)
            print(
                f"{T:7d} {D:5d} {N:5d} {E:4d} {K:2d}  {name:8s} {row['ms']:9.3f} "
                f"{row['both_ms']:16.3f}          {row['error']:.0e}",
                flush=True,
            )
    return rows


# ------------------------------------------------------------------------------------------- plot


def plot(spmm_rows: list[dict], moe_rows: list[dict], path: Path) -> None:
    """Speed-up over density, a line for each shape, coloured by what it is compared with and
    dashed by the side of the blocks; and shares of the copy bandwidth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.6), layout="constrained")
    peers = {
        "cusparse": ("cuSPARSE", "C0"),
        "bsr": ("cuSPARSE's block format", "C2"),
        "dense": ("dense cuBLAS", "C1"),
    }
    cases = by_case(spmm_rows)
    blocks = sorted({case[3] for case in cases})
    styles = dict(zip(blocks, ("-", "--", "-.", ":") * len(blocks)))
    named = {}
    for peer, (name, color) in peers.items():
        for case, times in cases.items():
            points = [(d, m[peer] / m["ours"]) for d, m in sorted(times.items()) if peer in m]
            if points:
                (line,) = left.plot(
                    *zip(*points), styles[case[3]], color=color, marker=".", lw=1, alpha=0.8
                )
                one = "single entries" if case[3] == 1 else f"blocks of {case[3]}"
                named.setdefault(f"over {name}, {one}", line)
    left.axhline(1.0, color="black", lw=0.8)
    left.set(xscale="log", yscale="log", xlabel="density, %", ylabel="times faster")
    left.set_title("SpMM, a line for each shape", fontsize=10, loc="left")
    if named:
        left.legend(
            named.values(), named.keys(), fontsize=8, ncols=2, loc="upper center",
            bbox_to_anchor=(0.5, -0.13), frameon=False,
        )  # fmt: skip
    ours = [r for r in moe_rows if r["method"] == "ours" and "share" in r]
    for operation in dict.fromkeys(r["operation"] for r in ours):
        some = [r for r in ours if r["operation"] == operation]
        names = [f"{r['T'] // 1024}k {r['d']} {r['K']}" for r in some]
        right.plot(names, [r["share"] for r in some], marker="o", ls="", label=operation)
    right.axhline(0.8, color="black", lw=0.8)
    right.set(ylabel="share of copy bandwidth", xlabel="tokens, width, experts per token")
    right.tick_params(axis="x", rotation=90, labelsize=7)
    right.set_title("products of the routing matrix", fontsize=10, loc="left")
    if ours:
        right.legend(
            fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.3), frameon=False
        )
    figure.savefig(path, dpi=110)


def numbers(text: str, kind=float) -> list:
    return [kind(part) for part in text.split(",")]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("all", "spmm", "moe", "layer"), default="all")
    parser.add_argument("--shapes", help="M,K,N;M,K,N… of spmm")
    parser.add_argument("--densities", help="percents")
    parser.add_argument("--blocks", help="sizes; 1 = unstructured")
    parser.add_argument("--skews", default="uniform,power")
    parser.add_argument("--moe", help="T,d,K;T,d,K…")
    parser.add_argument("--methods", default="", help="of moe; default: all")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--seconds", type=float, default=0.05, help="spent on each measurement")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=user_path, default=Path("runs/bench_spmm"))
    args = parser.parse_args(arguments)
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cpu" and not args.small:
        raise SystemExit("bench_spmm needs a CUDA device, or --small on a CPU")
    if args.small and args.device == "cpu":
        args.dtype = "float32"  # torch.sparse has no other on every CPU
    shapes, blocks, densities, moe = SHAPES, BLOCKS, DENSITIES, MOE
    if args.small:
        shapes, blocks, moe = [(256, 256, 64)], (1, 16), [(256, 64, 1), (256, 64, 2)]
    args.densities = numbers(args.densities) if args.densities else densities
    args.blocks = numbers(args.blocks, int) if args.blocks else blocks
    args.skews = args.skews.split(",")
    args.layers = [(64, 32, 16, 4, 2)] if args.small else LAYERS
    args.methods = args.methods.split(",") if args.methods else []
    args.shapes = [numbers(s, int) for s in args.shapes.split(";")] if args.shapes else shapes
    args.moe = [numbers(s, int) for s in args.moe.split(";")] if args.moe else moe
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", "Sparse .* tensor support is in beta")
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {args.dtype}")
    result: dict = {"device": name, "torch": torch.__version__, "dtype": args.dtype}
    result["spmm"] = bench_spmm(args) if args.part in ("all", "spmm") else []
    result["summary"] = summary(result["spmm"]) if result["spmm"] else []
    result["moe"] = bench_moe(args) if args.part in ("all", "moe") else []
    result["layer"] = bench_layer(args) if args.part in ("all", "layer") else []
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "spmm.json").write_text(json.dumps(result, indent=1))
    plot(result["spmm"], result["moe"], args.out / "spmm.png")
    print(f"written to {args.out}/spmm.json and spmm.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
