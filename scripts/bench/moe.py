#!/usr/bin/env python3
"""Speed of the MoE layer beside its peers on one GPU: forward and backward, router included.

    python scripts/bench/moe.py                              all six shapes, ours and torch
    python scripts/bench/moe.py --shapes 0,3                 two of them
    python scripts/bench/moe.py --tune --shapes 0            each kernel alone, each configuration
    python scripts/bench/moe.py --profile --shapes 0,1       every launch: its time, the gap before
    python scripts/bench/moe.py --rounding                   token rounding beside plain top-K
    python scripts/bench/moe.py --rounding --graph           and the same replayed as CUDA graphs
    python scripts/bench/moe.py --small                      one small shape, also on a CPU

What is timed: x → router logits → top-K and gates → sorting metadata → experts → output, and the
backward of all of it. Model FLOPs of gated experts: 6 R N D forward and 12 R N D backward with R
the (token, expert) pairs, no padding, no router. Medians over repeats with a flushed L2 cache;
forced-balance routing (every expert the same count) and the random routing of a fresh router stand
side by side. Beside each of our speeds: the relative error of the output and of the gradients of x,
w1, w2 and of the router's weight against float32, on one small shape. Below a shape: our speed over
each peer's and over cuBLAS products of equal groups, which are the bound.

A peer that cannot be imported (SonicMoE) is named as absent. Results: a table, JSON and a PNG under
--out.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F

from moe.experts import experts
from moe.kernels.common.row_tiles import tile_schedule
from moe.kernels.grouped.combine import combine
from moe.kernels.grouped.configs import candidates
from moe.kernels.grouped.down_backward import down_backward_triton, sum_parts
from moe.kernels.grouped.rows import rows_triton
from moe.kernels.grouped.up_forward import up_forward_triton
from moe.kernels.grouped.weight_gradient import weight_gradient_triton
from moe.kernels.tiers import hopper_missing
from moe.routing import Routing
from moe.rules.rounding import Rounding
from scripts._command import listed
from scripts.bench.harness import (
    DEVICE,
    Table,
    bench_parser,
    busy_clock,
    captured,
    chosen,
    device_events,
    finish,
    header,
    host_ms,
    median_ms,
    parse,
    plot,
    relative_error,
    release,
    wait,
)
from scripts.bench.peers import (
    BF16,
    PEERS,
    Route,
    cublas_bound,
    cublas_products,
    eager,
    operands,
)

SHAPES = {  # T, D, N, E, K
    "7B n=256": (24576, 1536, 256, 128, 8),
    "30B n=256": (32768, 4096, 256, 256, 16),
    "OLMoE": (32768, 2048, 1024, 64, 8),
    "Qwen3-30B-A3B": (32768, 2048, 768, 128, 8),
    "Mixtral": (16384, 4096, 14336, 8, 2),
    "DeepSeek-V3-like": (16384, 7168, 2048, 256, 8),
}
ROUNDING_SHAPES = {
    "rounding K=2": (16384, 1536, 1024, 128, 2),
    "rounding K=4": (16384, 4096, 1024, 256, 4),
}
SMALL = {"small": (512, 32, 16, 4, 2)}
FORMULA = "model FLOPs = 6 R N D forward, 12 R N D backward, R = (token, expert) pairs"
ERRORS = ("out", "dx", "drouter", "dw1", "dw2")
SPEEDS = (
    "forward ms:8.3f | forward TFLOP/s:5.0f | backward ms:8.3f | backward TFLOP/s:5.0f | "
    "both TFLOP/s:5.0f"
)
ALONE = " | graph forward ms:8.3f | graph backward ms:8.3f | graph both TFLOP/s:5.0f"
COLUMNS = {
    "layers": f"label:16s | name:19s | routing:8s | {SPEEDS} | kept MiB:6.0f | "
    + " | ".join(f"{key} error:.1e" for key in ERRORS),
    "rounding": f"label:12s | name:16s | {SPEEDS} | tile fill:.3f",
    "profile": "label:16s | host ms:.2f | eager ms:.2f | graph ms:.2f | launches:d | busy ms:.2f",
    "tune": "label:16s | kernel:7s | config:42s | ms:8.3f | TFLOP/s:6.0f | GB/s:6.0f | MHz:d | "
    "error:.1e | wrong:s",
}


# ---- layers --------------------------------------------------------------------------------------


def measure(
    row: dict,
    name: str,
    shape,
    route: Route,
    given: Routing | None = None,
    graph: bool = False,
) -> None:
    """Times and kept memory of one layer, into its row.

    Args:
        given: measure the experts alone, with this routing.
        graph: as a CUDA graph too, without the host's work.
    """
    T, D, N, _E, K = shape
    row["routing"] = "random" if route.forced is None else "balanced"
    layer = PEERS[name](shape, route)
    inputs = [t.requires_grad_() for t in operands(shape)]
    if given is not None:
        x, _router, w1, w2 = inputs
        gates = given.gates_S.detach().requires_grad_()
        given = Routing(**{**vars(given), "gates_S": gates})
        inputs = [x, gates, w1, w2]

        def layer(x, gates, w1, w2):
            return experts(x, w1, w2, given)

    pairs = T * K
    if name.startswith("tessera"):
        with torch.no_grad():  # a graph that is alive holds nodes of this stream: see `captured`
            routing = given or route.routing(inputs[0], inputs[1])
        pairs = int(routing.offsets_E1[-1])
        row["tile fill"] = pairs / (128 * max(1, int(((routing.counts_E + 127) // 128).sum())))
    on_gpu = DEVICE.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    out = layer(*inputs)
    wait()
    if on_gpu:
        kept = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
        row["kept MiB"] = kept / 2**20
    dout = torch.randn_like(out)
    del out

    def once():
        return layer(*inputs)

    def both():
        torch.autograd.grad(layer(*inputs), inputs, dout)

    with torch.no_grad():
        row["inference ms"] = median_ms(once)
    flops = 6 * pairs * N * D
    row |= speeds(flops, median_ms(once), median_ms(both))
    if graph:
        alone = speeds(flops, median_ms(captured(once)), median_ms(captured(both)))
        row |= {f"graph {key}": value for key, value in alone.items()}


def speeds(flops: float, forward: float, both: float) -> dict[str, float]:
    """Of milliseconds, with `flops` of the forward: a third of all."""
    times = {"forward": (forward, 1), "backward": (both - forward, 2), "both": (both, 3)}
    return {f"{part} ms": ms for part, (ms, _) in times.items()} | {
        f"{part} TFLOP/s": share * flops / ms / 1e9 for part, (ms, share) in times.items()
    }


def errors(name: str, shape, balanced: bool) -> dict[str, float]:
    """Relative errors against float32, at 1024 tokens and up to 32 experts of the same width."""
    _, D, N, E, K = shape
    small = (1024, min(D, 2048), min(N, 1024), min(E, 32), K)
    route = Route(small, balanced)
    inputs = [t.requires_grad_() for t in operands(small, seed=7)]
    layer = PEERS[name](small, route)
    out = layer(*inputs)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, dout)
    wide = [t.detach().float().requires_grad_() for t in inputs]
    exact = eager(small, route)
    x, router, w1, w2 = wide
    want = exact(x, router, w1, w2)
    want_grads = torch.autograd.grad(want, wide, dout.float())
    named = zip(ERRORS, (out, *grads), (want, *want_grads))
    return {f"{key} error": relative_error(got, exact) for key, got, exact in named}


def bench(args, table: Table, shapes: list) -> None:
    for label, shape in shapes:
        print(f"\n{label}: T, D, N, E, K = {shape}")
        for name, balanced in itertools.product(args.peers, args.routings):
            release()
            with table.row(label=label, shape=shape, name=name) as row:
                measure(row, name, shape, Route(shape, balanced), graph=args.graph)
                if name.startswith("tessera"):
                    row |= errors(name, shape, balanced)
        release()
        with table.row(label=label, shape=shape, name="cuBLAS bound", routing="balanced") as row:
            T, D, N, _, K = shape
            forward, backward = cublas_bound(shape)
            row |= speeds(6 * T * K * N * D, forward, forward + backward)
        print("\n".join(ratios(table.rows, label)), flush=True)


def ratios(rows: list[dict], label: str) -> list[str]:
    """Speed of "tessera" over each other row of the same routing (the bound has one), both ways."""
    speeds = {
        (r["name"], r["routing"]): r["both TFLOP/s"]
        for r in rows
        if r.get("label") == label and "both TFLOP/s" in r
    }
    lines = []
    for (name, routing), own in speeds.items():
        if name == "tessera":
            others = (
                f"{peer} {own / speed:.2f}"
                for (peer, how), speed in speeds.items()
                if peer != name and (how == routing or peer == "cuBLAS bound")
            )
            lines.append(f"  tessera {routing} over: " + ", ".join(others))
    return lines


def plot_speeds(path: Path, rows: list[dict]) -> None:
    panels: dict[str, dict[str, dict]] = {"forward TFLOP/s": {}, "backward TFLOP/s": {}}
    for row in rows:
        for title, series in panels.items():
            if title in row:
                name = f"{row['name']} {row['routing']}"
                series.setdefault(name, {})[row["label"]] = row[title]
    plot(path, {title: list(series.items()) for title, series in panels.items()}, same_scale=True)


def bench_rounding(args, table: Table, shapes: list) -> None:
    """Plain top-K against rounding to the nearest whole tile, by model FLOPs of their pairs."""
    for label, shape in shapes:
        print(f"\n{label}: T, D, N, E, K = {shape}; nearest, tile 128")
        x, router, *_ = operands(shape)
        found = {}
        for kind, scope in itertools.product(("top-K", "rounded"), ("layer", "experts")):
            # Unbounded below: the shapes are measured whatever the mean number of tiles is.
            config = Rounding(to="nearest", min_mean_tiles=0.0) if kind == "rounded" else None
            route = Route(shape, False, config)
            release()
            with table.row(
                label=label, shape=shape, name=f"{kind}, {scope}", kind=kind, scope=scope
            ) as row:
                with torch.no_grad():
                    given = route.routing(x, router) if scope == "experts" else None
                measure(row, "tessera", shape, route, given, args.graph)
                found[kind, scope] = row
        for scope, key in itertools.product(
            ("layer", "experts"), ("both TFLOP/s", "graph both TFLOP/s")[: 1 + args.graph]
        ):
            if {("rounded", scope), ("top-K", scope)} <= set(found):
                ratio = found["rounded", scope][key] / found["top-K", scope][key]
                print(f"  rounded / top-K, {scope}, {key}: {ratio:.3f}", flush=True)


# ---- launches ------------------------------------------------------------------------------------


def profile(args, table: Table, shapes: list) -> None:
    """Forward and backward of ours, launch by launch: microseconds, and gaps before them."""
    for label, shape in shapes:
        release()
        layer = PEERS["tessera"](shape, Route(shape, args.routings[0]))
        inputs = [t.requires_grad_() for t in operands(shape)]
        dout = torch.randn_like(inputs[0])

        def both(layer=layer, inputs=inputs, dout=dout):
            torch.autograd.grad(layer(*inputs), inputs, dout)

        with table.row(label=label, shape=shape) as row:
            row["eager ms"], row["graph ms"] = median_ms(both), median_ms(captured(both))
            row["host ms"] = host_ms(both, 10, finish=False)
            row["timeline"] = launches = timeline(both)
            row["launches"] = len(launches)
            row["busy ms"] = sum(launch["us"] for launch in launches) / 1000
        for launch in row.get("timeline", ()):
            gap = f"   after a gap of {launch['gap us']:.0f}" if launch["gap us"] > 2 else ""
            print(f"  {launch['us']:8.1f} us  {launch['name'][:60]}{gap}")


def timeline(run: Callable[[], object]) -> list[dict]:
    """What the device did in the last of three calls, in order."""
    events = device_events(run, repeats=3)
    launches, last = [], events[0][0]
    for start, end, name in events:
        launches.append({"name": name, "us": end - start, "gap us": max(start - last, 0)})
        last = max(last, end)
    return launches


# ---- configurations ------------------------------------------------------------------------------


def tune(args, table: Table, shapes: list) -> None:
    """Each grouped product alone with each of its configurations: time, speed, error; and cuBLAS
    on equal groups, without gather and epilogue.

    With --zeros all operands are zeros, which take a fraction of the power, so that the card need
    not lower its clock: what is faster then is bound by power, and what is not, by something else.
    """
    for label, shape in shapes:
        release()
        tune_shape(args, table, label, shape)


def tune_shape(args, table: Table, label: str, shape) -> None:
    T, D, N, _, K = shape
    R = T * K
    x, router, w1, w2 = operands(shape)
    with torch.no_grad():
        r = Route(shape, args.routings[0]).routing(x, router)
    h, a = (torch.randn(R, width, device=DEVICE, dtype=BF16) for width in (2 * N, N))
    dense = cublas_products(shape)
    if args.zeros:
        for t in (x, w1, w2, h, a, *itertools.chain(*dense.values())):
            t.zero_()
    offsets, token = r.offsets_E1, r.token_R
    gates = r.gates_S.detach()

    def by_slot(gradients):
        dh, da, dot = gradients
        dgates = torch.empty_like(gates)
        sum_parts(dot, r.row_S, dgates, offsets[-1:])
        return dh, da, dgates

    cases = {  # name: table of configurations, FLOPs / (R N D), launch
        "up": ("up", 4, lambda c, t: up_forward_triton(
            x, w1, None, token, "swiglu", True, t, c)),
        "down": ("rows", 2, lambda c, t: rows_triton(a, w2.mT, None, t, c)),
        "dH": ("down_backward", 2, lambda c, t: by_slot(down_backward_triton(
            x, w2, None, h, gates, token, r.slot_R, "swiglu", (True, True, True), t, c))),
        "dX": ("rows", 4, lambda c, t: rows_triton(h, w1, None, t, c)),
        "dW2": ("outer", 2, lambda c, t: weight_gradient_triton(
            x, a, token, None, offsets, None, c)),
        "dW1": ("outer", 4, lambda c, t: weight_gradient_triton(
            h, x, None, token, offsets, None, c)),
    }  # fmt: skip
    exact = exact_tiles(x, w1, w2, h, a, r)
    gluon = hopper_launches(x, w1, w2, h, a, r, by_slot)
    for name, (kernel, factor, run) in cases.items():
        if args.kernels and name not in args.kernels:
            continue
        about = {"label": label, "shape": shape, "kernel": name}
        flops = factor * R * N * D
        with table.row(**about, config="cuBLAS") as row:
            time_product(row, functools.partial(torch.bmm, *dense[name]), flops)
        trials = [("triton", c, run) for c in candidates(kernel, x.dtype)]
        if name in gluon:
            listed, gluon_run = gluon[name]
            trials += [("hopper", c, gluon_run) for c in listed]
        for tier, c, launch in trials:
            if args.tier not in (tier, "both"):
                continue
            with table.row(**about, config=f"{tier} {c}") as row:
                tiles = None if kernel == "outer" else tile_schedule(offsets, c.bm, R)
                made = launch(c, tiles)
                outs = made if isinstance(made, tuple) else (made,)
                if not args.zeros:
                    row["error"] = max(relative_error(got, want) for got, want in exact[name](outs))
                    row["wrong"] = "" if row["error"] < 1e-2 else "WRONG"
                del made, outs
                time_product(row, functools.partial(launch, c, tiles), flops)
    if not args.kernels or "combine" in args.kernels:
        y = torch.randn(R, D, device=DEVICE, dtype=BF16)
        for kind, gates in (("weighted", r.gates_S.detach()), ("plain", None)):
            launch = functools.partial(
                combine, y, gates, r.row_S, num_tokens=T, slots_per_token=K, backend="triton"
            )
            with table.row(label=label, shape=shape, kernel="combine", config=kind) as row:
                row["ms"] = median_ms(launch, seconds=0.2)
                row["GB/s"] = (R + T) * D * 2 / row["ms"] / 1e6


def time_product(row: dict, launch: Callable[[], object], flops: int) -> None:
    row["ms"] = median_ms(launch, seconds=0.2, most=20)
    row["TFLOP/s"], row["MHz"] = flops / row["ms"] / 1e9, busy_clock(launch, row["ms"])


def hopper_launches(
    x, w1, w2, h, a, r: Routing, by_slot: Callable
) -> dict[str, tuple[list, Callable]]:
    """Product → (configurations, launch) of the Hopper kernels; empty where they cannot run."""
    if torch.cuda.get_device_capability()[0] != 9 or hopper_missing() is not None:
        return {}
    from moe.kernels.hopper.configs import CONFIGS
    from moe.kernels.hopper.down_backward import down_backward_hopper
    from moe.kernels.hopper.outer import weight_gradient_hopper
    from moe.kernels.hopper.rows import rows_hopper, up_forward_hopper

    token, offsets, gates = r.token_R, r.offsets_E1, r.gates_S.detach()
    return {
        "up": (CONFIGS["up"], lambda c, t: up_forward_hopper(x, w1, token, True, t, c)),
        "down": (CONFIGS["rows"], lambda c, t: rows_hopper(
            a, w2, t, transposed=True, config=c)),
        "dH": (CONFIGS["down_backward"], lambda c, t: by_slot(down_backward_hopper(
            x, w2, h, gates, token, r.slot_R, t, c))),
        "dX": (CONFIGS["rows"], lambda c, t: rows_hopper(
            h, w1, t, transposed=False, config=c)),
        "dW2": (CONFIGS["outer_left"], lambda c, t: weight_gradient_hopper(
            x, a, token, None, offsets, c)),
        "dW1": (CONFIGS["outer_right"], lambda c, t: weight_gradient_hopper(
            h, x, None, token, offsets, c)),
    }  # fmt: skip


def exact_tiles(x, w1, w2, h, a, r: Routing) -> dict[str, Callable]:
    """For each product: outputs → (part of an output, its float32 value) for a few experts.

    The first, the largest and the last expert with rows: full products of all would not fit.
    """
    bounds = r.offsets_E1.tolist()
    counts = [end - start for start, end in itertools.pairwise(bounds)]
    used = [e for e, n in enumerate(counts) if n]
    picked = sorted({used[0], max(used, key=lambda e: counts[e]), used[-1]})
    token = r.token_R.long()
    gates = r.gates_S.detach()[r.slot_R.long()]

    def spans():
        for e in picked:
            yield e, slice(bounds[e], bounds[e + 1])

    def up(out):
        for e, s in spans():
            want = x[token[s]].float() @ w1[e].float().t()
            yield out[0][s], want
            yield out[1][s], F.silu(want[:, 0::2]) * want[:, 1::2]

    def d_h(out):
        dots = out[2]
        for e, s in spans():
            wide = h[s].float().requires_grad_()
            act = F.silu(wide[:, 0::2]) * wide[:, 1::2]
            da = x[token[s]].float() @ w2[e].float()
            (dh,) = torch.autograd.grad(act, wide, da * gates[s, None])
            yield out[0][s], dh
            yield out[1][s], act.detach() * gates[s, None]
            yield dots[r.slot_R[s].long()], (da * act.detach()).sum(1)

    return {
        "up": up,
        "down": lambda out: ((out[0][s], a[s].float() @ w2[e].float().t()) for e, s in spans()),
        "dH": d_h,
        "dX": lambda out: ((out[0][s], h[s].float() @ w1[e].float()) for e, s in spans()),
        "dW2": lambda out: (
            (out[0][e], x[token[s]].float().t() @ a[s].float()) for e, s in spans()
        ),
        "dW1": lambda out: (
            (out[0][e], h[s].float().t() @ x[token[s]].float()) for e, s in spans()
        ),
    }


# ---- the program ---------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    parser = bench_parser(__doc__, "bench_moe", small=True)
    add = parser.add_argument
    add("--shapes", type=chosen(SHAPES), default="all", help="0 to 5 separated by commas, or all")
    add(
        "--peers", type=listed(), default="tessera,grouped_mm",
        help=f"separated by commas: {', '.join(PEERS)}",
    )  # fmt: skip
    add("--routing", default="both", choices=("both", "random", "balanced"))
    add("--graph", action="store_true", help="also replay as CUDA graphs: the device's time alone")
    add("--profile", action="store_true", help="time every launch of ours")
    add("--rounding", action="store_true", help="token rounding against top-K")
    tuning = parser.add_argument_group("tuning")
    tuning.add_argument("--tune", action="store_true", help="time every kernel's configurations")
    tuning.add_argument(
        "--kernels", type=listed(), default=[], help="of up,down,dH,dX,dW1,dW2,combine"
    )
    tuning.add_argument("--tier", default="both", choices=("both", "triton", "hopper"))
    tuning.add_argument("--zeros", action="store_true", help="operands of zeros: no power limit")
    args = parse(parser, arguments, gpu_only=("tune", "profile", "graph"))
    for name in args.peers:
        if name not in PEERS:
            parser.error(f"--peers={name!r} is unknown; allowed: {', '.join(PEERS)}")
    args.routings = {"both": [False, True], "random": [False], "balanced": [True]}[args.routing]
    shapes = args.shapes
    if args.small or args.rounding:
        shapes = list((SMALL if args.small else ROUNDING_SHAPES).items())
    header(FORMULA)
    kinds = {"tune": tune, "profile": profile, "rounding": bench_rounding, "layers": bench}
    kind = next(kind for kind in kinds if kind == "layers" or getattr(args, kind))
    columns = COLUMNS[kind].replace(SPEEDS, SPEEDS + ALONE) if args.graph else COLUMNS[kind]
    table = Table(args, kind, columns, flops=FORMULA)
    kinds[kind](args, table, shapes)
    if kind in ("layers", "rounding"):
        plot_speeds(args.out / f"{kind}.png", table.rows)
    return finish(args)


if __name__ == "__main__":
    sys.exit(main())
