#!/usr/bin/env python3
"""Where sparse products pay: SpMM beside cuSPARSE and cuBLAS, dispatch and combine beside a copy,
and experts of different widths.

    python scripts/bench/spmm.py                         everything; table, JSON and PNG under --out
    python scripts/bench/spmm.py --part spmm --shapes 4096,4096,1024 --densities 10,1 --blocks 1,64
    python scripts/bench/spmm.py --part moe
    python scripts/bench/spmm.py --part widths
    python scripts/bench/spmm.py --small                 small sizes, also on a CPU

`spmm`: A [M, K] times X [K, N] for densities from 50 % to 0.5 %, unstructured (block 1) and in
blocks, rows of even length or of a power law. Beside ours: `cusparse` (torch.sparse CSR), `bsr`
(torch.sparse BSR) and `dense` (cuBLAS on the same matrix with its zeros). TFLOP/s are those of the
stored entries, 2 · entries · N; `dense-eq.` counts 2MKN. The crossover is the density at which ours
takes as long as dense, between the two densities measured around it.

`moe`: T tokens of width d to K experts. dispatch y = D x copies each token K times, combine y = C x
sums K weighted rows, `dispatch_back` sums without weights, `gate_grad` is an SDDMM. GB/s count each
number once, (R + T) · d with R = TK rows; `share` is that over the bandwidth of a plain copy of as
many bytes, timed beside it. index_select, index_add and cuSPARSE are the baselines.

`widths`: experts of different widths beside experts of one. `mixed`: widths spread evenly around N;
`one width`: all N, `spmm` by sparse products; `padded`: all as wide as the widest, which is what
the mixed experts cost without ragged products. TFLOP/s count the widths that tokens met, 18 · D ·
sum of widths over all pairs; so `padded`, which computes more, is credited with what the mixed
experts need.

Median times of single calls on a cold L2 cache. Errors are relative, by norm, against float32.
"""

from __future__ import annotations

import itertools
import math
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from moe.experts import experts
from moe.kernels.grouped.ragged import Widths
from moe.mixed_experts import mixed_experts
from moe.routing import Routing
from moe.sparse import BCSR, CSR, Pattern, gather, sddmm, spmm
from scripts._command import listed
from scripts.bench.harness import (
    DEVICE,
    Table,
    bench_parser,
    finish,
    header,
    median_ms,
    parse,
    plot,
    relative_error,
    tuples,
)

SHAPES = [(4096, K, N) for K in (1024, 4096) for N in (512, 1024, 4096)]  # M, K, N
DENSITIES = [50, 20, 10, 5, 2, 1, 0.5]  # percent
BLOCKS = [1, 16, 32, 64, 128]
MOE = list(itertools.product((4096, 16384, 65536), (1024, 4096, 7168), (1, 2, 8)))  # T, d, K
EXPERTS = 64
WIDTHS = [  # T, D, N, E, K
    (16384, 2048, 1024, 64, 8), (16384, 2048, 768, 128, 8), (16384, 1536, 256, 128, 8),
]  # fmt: skip
TILE = 64  # widths are multiples of this
SMALL = {
    "shapes": [(256, 256, 64)], "blocks": [1, 16], "moe": [(256, 64, 1), (256, 64, 2)],
    "widths": [(64, 32, 16, 4, 2)], "tile": 4,
}  # fmt: skip
LAYER = "T:6d | D:5d | N:5d | E:4d | K:2d"


def measure(args, run: Callable[[], object]) -> float:
    """Milliseconds; the queue is full while Python issues the call."""
    return median_ms(run, args.seconds, fewest=5, most=50, held=500_000)


def fill(row: dict, args, run: Callable[[], Tensor], want: Tensor) -> None:
    row["error"] = relative_error(run(), want)
    row["ms"] = measure(args, run)


def some_routing(T: int, E: int, K: int) -> Routing:
    expert_TK = torch.rand(T, E, device=DEVICE).argsort(1)[:, :K].to(torch.int32)
    return Routing.from_topk(expert_TK, torch.rand(T, K, device=DEVICE), E)


def step_of(run: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> Callable[[], None]:
    """Forward and backward."""

    def both() -> None:
        run().sum().backward()
        for leaf in leaves:
            leaf.grad = None

    return both


# ---- spmm ----------------------------------------------------------------------------------------


def keep_entries(M: int, K: int, density: float, skew: str) -> Tensor:
    """bool [M, K]; `power` gives rows a length falling as rank^-0.7, in random order."""
    share_M = torch.full((M,), density, device=DEVICE)
    if skew == "power":
        share_M = torch.arange(1, M + 1, device=DEVICE).float() ** -0.7
        low, high = 0.0, float(M)
        for _ in range(60):  # the factor that gives the density, no row being longer than K
            middle = (low + high) / 2
            if (share_M * middle).clamp(max=1).mean() < density:
                low = middle
            else:
                high = middle
        share_M = (share_M * high).clamp(max=1)[torch.randperm(M, device=DEVICE)]
    return torch.rand(M, K, device=DEVICE) < share_M[:, None]


def bench_spmm(args) -> list[dict]:
    table = Table(
        args,
        "spmm",
        "M:6d | K:5d | N:5d | block:5d | skew:7s | density:7.1f | method:8s | ms:8.3f | "
        "TFLOP/s:8.2f | dense-eq.:8.1f | error:.0e",
    )
    for (M, K, N), block, skew in itertools.product(args.shapes, args.blocks, args.skews):
        x = torch.randn(K, N, device=DEVICE).to(args.dtype)
        for percent in args.densities:
            keep = keep_entries(-(-M // block), -(-K // block), percent / 100, skew)
            mask = keep.repeat_interleave(block, 0).repeat_interleave(block, 1)[:M, :K]
            w = (torch.randn(M, K, device=DEVICE) * mask).to(args.dtype)
            want = w.float() @ x.float()
            ours = CSR.from_dense(w, mask) if block == 1 else BCSR.from_dense(w, block, keep)
            entries = ours.values.numel()
            runs = {"ours": partial(spmm, ours, x)}
            if block == 1 or M % block == K % block == 0:
                runs["cusparse" if block == 1 else "bsr"] = partial(torch.mm, ours.torch(), x)
            runs["dense"] = partial(torch.mm, w, x)
            for method, run in runs.items():
                with table.row(
                    M=M, K=K, N=N, block=block, skew=skew, density=percent, entries=entries,
                    method=method,
                ) as row:  # fmt: skip
                    fill(row, args, run, want)
                    row["TFLOP/s"] = 2 * entries * N / row["ms"] / 1e9
                    row["dense-eq."] = 2 * M * K * N / row["ms"] / 1e9
    summary(args, table.rows)
    return table.rows


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


NAMES = {"cusparse": "cuSPARSE", "bsr": "cuSPARSE's block format", "dense": "dense cuBLAS"}


def speed_ups(times: dict[float, dict[str, float]], peer: str) -> dict[float, float]:
    """Density → how many times faster than the peer."""
    return {d: m[peer] / m["ours"] for d, m in sorted(times.items()) if {peer, "ours"} <= set(m)}


def summary(args, rows: list[dict]) -> None:
    """Speed-ups and the crossover of each case."""
    table = Table(
        args, "summary",
        "M:6d | K:5d | N:5d | block:5d | skew:7s | over:8s | times faster at:40s | crossover %:.2g",
    )  # fmt: skip
    for case, times in by_case(rows).items():
        about = dict(zip(("M", "K", "N", "block", "skew"), case))
        for peer in NAMES:
            found = speed_ups(times, peer)
            if not found:
                continue
            text = " ".join(f"{d:g}%:{speed:.2f}" for d, speed in found.items())
            with table.row(**about, over=peer) as row:
                row["times faster"], row["times faster at"] = found, text
                if peer == "dense":
                    row["crossover %"] = crossover(times)


# ---- dispatch and combine ------------------------------------------------------------------------


Run = Callable[[], Tensor]


def moe_runs(
    T: int, d: int, K: int, dtype: torch.dtype
) -> tuple[dict[tuple[str, str], Run], dict[str, Tensor]]:
    """((operation, method) -> call, operation -> float32 result) of one shape."""
    routing = some_routing(T, EXPERTS, K)
    R, token_R = T * K, routing.token_R.long()
    x_Td, y_Rd = (torch.randn(n, d, device=DEVICE).to(dtype) for n in (T, R))
    bounds_R1 = torch.arange(R + 1, dtype=torch.int32, device=DEVICE)
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
    table = Table(
        args, "moe",
        "T:6d | d:5d | K:2d | operation:13s | method:12s | ms:8.3f | GB/s:7.0f | share:6.2f | "
        "error:.0e",
    )  # fmt: skip
    for T, d, K in args.moe:
        runs, want = moe_runs(T, d, K, args.dtype)
        nbytes = (T * K + T) * d * args.dtype.itemsize
        source = torch.empty(nbytes // 2, dtype=torch.uint8, device=DEVICE)
        target = torch.empty_like(source)
        copy = nbytes / measure(args, partial(target.copy_, source)) / 1e6
        del source, target
        for (operation, method), run in runs.items():
            with table.row(T=T, d=d, K=K, operation=operation, method=method) as row:
                fill(row, args, run, want[operation])
                row["GB/s"], row["copy GB/s"] = nbytes / row["ms"] / 1e6, copy
                row["share"] = row["GB/s"] / copy
    return table.rows


# ---- layers --------------------------------------------------------------------------------------


def spread(N: int, E: int, tile: int) -> tuple[int, ...]:
    """Widths from N/2 to 3N/2 in multiples of `tile`, mean N, in shuffled order."""
    steps = max(1, N // 2 // tile)
    offsets = [tile * (i % (2 * steps + 1) - steps) for i in range(E)]
    offsets = [o - round(sum(offsets) / E / tile) * tile for o in offsets]
    order = torch.randperm(E, generator=torch.Generator().manual_seed(0)).tolist()
    return tuple(N + offsets[i] for i in order)


def bench_widths(args) -> list[dict]:
    table = Table(
        args, "widths",
        f"{LAYER} | width:9s | method:20s | ms:9.3f | forward + backward ms:9.3f | TFLOP/s:8.1f | "
        "error:.0e",
    )  # fmt: skip
    for T, D, N, E, K in args.widths:
        sizes = spread(N, E, args.tile)
        widths, M, routing = Widths(sizes), max(sizes), some_routing(T, E, K)
        pairs = sum(n * size for n, size in zip(routing.counts_E.tolist(), sizes))
        x = torch.randn(T, D, device=DEVICE).to(args.dtype).requires_grad_()
        for name, width in (("mixed", 0), ("one width", N), ("padded", M)):
            backends = ["auto"] if not width else args.backends + ["spmm"] * (width == N)
            for backend in backends:
                shapes = ((E, 2 * width, D), (E, D, width))
                if not width:
                    shapes = ((2 * widths.total, D), (widths.total, D))
                w1, w2 = (
                    torch.randn(shape, device=DEVICE)
                    .mul_(fan_in**-0.5)
                    .to(args.dtype)
                    .requires_grad_()
                    for shape, fan_in in zip(shapes, (D, width or N))
                )

                def run(
                    x=x, w1=w1, w2=w2, backend=backend, mixed=not width, routing=routing,
                    widths=widths,
                ) -> Tensor:  # fmt: skip
                    if mixed:
                        return mixed_experts(x, w1, w2, routing, widths, backend=backend)
                    return experts(x, w1, w2, routing, backend=backend)

                with table.row(
                    T=T, D=D, N=N, E=E, K=K, widths=sizes,
                    width=str(width) if width else f"{min(sizes)}-{M}",
                    method=f"{name}, {backend}" if width else name,
                ) as row:  # fmt: skip
                    with torch.no_grad():
                        wide = [t.float() for t in (x, w1, w2)]
                        fill(row, args, run, run(*wide, backend="reference"))
                    both = measure(args, step_of(run, (x, w1, w2)))
                    met = T * K * N if width == N else pairs
                    row["forward + backward ms"] = both
                    row["TFLOP/s"] = 18 * D * met / both / 1e9
    return table.rows


# ---- the program ---------------------------------------------------------------------------------


PARTS = {"spmm": bench_spmm, "moe": bench_moe, "widths": bench_widths}


def draw(path: Path, spmm_rows: list[dict], moe_rows: list[dict]) -> None:
    """Speed-up over density, a line for each shape; and shares of the copy bandwidth."""
    lines = []
    for peer, (case, times) in itertools.product(NAMES, by_case(spmm_rows).items()):
        if found := speed_ups(times, peer):
            blocks = "single entries" if case[3] == 1 else f"blocks of {case[3]}"
            lines.append((f"over {NAMES[peer]}, {blocks}", found))
    shares: dict[str, dict[str, float]] = {}
    for row in moe_rows:
        if row["method"] == "ours" and "share" in row:
            name = f"{row['T'] // 1024}k {row['d']} {row['K']}"
            shares.setdefault(row["operation"], {})[name] = row["share"]
    panels = {
        "SpMM: times faster over density in %, a line for each shape": lines,
        "share of copy bandwidth: tokens, width, experts per token": list(shares.items()),
    }
    plot(path, {title: series for title, series in panels.items() if series}, baseline=1.0)


def main(arguments: list[str] | None = None) -> int:
    parser = bench_parser(__doc__, "bench_spmm", small=True)
    add = parser.add_argument
    add("--part", choices=("all", *PARTS), default="all")
    add("--shapes", type=tuples("M,K,N"), default=SHAPES, help="of spmm: M,K,N;M,K,N…")
    add("--densities", type=listed(float), default=DENSITIES, help="of spmm, in percent")
    add("--blocks", type=listed(int), default=BLOCKS, help="of spmm; 1: unstructured")
    add("--skews", type=listed(), default="uniform,power", help="of spmm: lengths of rows")
    add("--seconds", type=float, default=0.05, help="spent on each measurement")
    args = parse(parser, arguments)
    args.dtype, args.backends, args.tile = torch.bfloat16, ["triton", "auto"], TILE
    args.moe, args.widths = MOE, WIDTHS
    if args.small:
        for name, value in SMALL.items():  # what was given stays
            if getattr(args, name) is (parser.get_default(name) or getattr(args, name)):
                setattr(args, name, value)
    if DEVICE.type == "cpu":  # torch.sparse has no other type on every CPU
        args.dtype, args.backends = torch.float32, ["reference"]
    warnings.filterwarnings("ignore", "Sparse .* tensor support is in beta")
    header(str(args.dtype).removeprefix("torch."))
    rows = {name: bench(args) for name, bench in PARTS.items() if args.part in ("all", name)}
    if {"spmm", "moe"} & set(rows):
        draw(args.out / "spmm.png", rows.get("spmm", []), rows.get("moe", []))
    return finish(args)


if __name__ == "__main__":
    sys.exit(main())
