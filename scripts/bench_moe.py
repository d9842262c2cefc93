"""Speed of the MoE layer beside its peers on one GPU: forward and backward, router included.

    python scripts/bench_moe.py                              all six shapes, ours and torch
    python scripts/bench_moe.py --shapes 0,3 --seconds 200   two of them, in bounded time
    python scripts/bench_moe.py --tune --shapes 0            each kernel alone, each configuration
    python scripts/bench_moe.py --profile --shapes 0,1       every launch: its time, the gap before
    python scripts/bench_moe.py --rounding                   token rounding beside plain top-K
    python scripts/bench_moe.py --rounding --graph           and the same replayed as CUDA graphs

What is timed: x → router logits → top-K and gates → sorting metadata → experts → output, and the
backward of all of it (`--experts-only`: routing given). Model FLOPs of gated experts: 6 R N D
forward and 12 R N D backward with R the (token, expert) pairs, no padding, no router. Medians over
repeats with a flushed L2 cache; forced-balance routing (every expert the same count) and the random
routing of a fresh router stand side by side. Beside each speed: the relative error of the output
and of the gradients of x, w1, w2 and of the logits against float32, on one small shape.

Peers are measured where they can be imported (SonicMoE, ScatterMoE, Liger-Kernel) and named as
absent where not. Results: a table, JSON and a PNG under --out.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from moe.experts import experts
from moe.kernels import _tiles, hopper
from moe.kernels._rows import rows_triton
from moe.kernels.combine import combine
from moe.kernels.down_backward import down_backward_triton
from moe.kernels.routing_metadata import tile_schedule
from moe.kernels.up_forward import up_forward_triton
from moe.kernels.weight_gradient import weight_gradient_triton
from moe.rounding import RoundingConfig
from moe.routing import Routing
from scripts._moe_layers import (
    BF16,
    GATE_ROWS_FIRST,
    PEERS,
    Route,
    busy_clock,
    captured,
    cublas_bound,
    cublas_products,
    eager,
    exact_tiles,
    median_ms,
    operands,
    relative_error,
)
from training.config_load import user_path

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
FORMULA = "model FLOPs = 6 R N D forward, 12 R N D backward, R = (token, expert) pairs"


# --------------------------------------------------------------------------------------------- rows


def measure(
    name: str, shape, route: Route, given: Routing | None = None, graph: bool = False
) -> dict:
    """Times and kept memory of one layer; graph: as a CUDA graph too, without the host's work."""
    T, D, N, _E, K = shape
    row = {
        "name": name,
        "shape": shape,
        "routing": "random" if route.forced is None else "balanced",
    }
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
        row["mean tile fill"] = pairs / (128 * max(1, int(((routing.counts_E + 127) // 128).sum())))
    before = torch.cuda.memory_allocated()
    out = layer(*inputs)
    torch.cuda.synchronize()
    row["kept MiB"] = (
        torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
    ) / 2**20
    dout = torch.randn_like(out)
    del out

    def once():
        return layer(*inputs)

    def both():
        torch.autograd.grad(layer(*inputs), inputs, dout)

    with torch.no_grad():
        row["inference ms"] = median_ms(once)
    forward, total = median_ms(once), median_ms(both)
    flops = 6 * pairs * N * D
    row |= speeds(flops, forward, total)
    if graph:
        alone = speeds(flops, median_ms(captured(once)), median_ms(captured(both)))
        row |= {f"graph {key}": value for key, value in alone.items()}
    return row


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
    exact = eager(small, route, halves=name in GATE_ROWS_FIRST)
    x, router, w1, w2 = wide
    want = exact(x, router, w1, w2)
    want_grads = torch.autograd.grad(want, wide, dout.float())
    named = zip(("out", "dx", "drouter", "dw1", "dw2"), (out, *grads), (want, *want_grads))
    return {key: relative_error(got, exact) for key, got, exact in named}


def bench(args, shapes: dict) -> list[dict]:
    rows: list[dict] = []
    for label, shape in shapes.items():
        print(f"\n{label}: T, D, N, E, K = {shape}", flush=True)
        for name in args.peers:
            for balanced in args.routings:
                if time.perf_counter() > args.deadline:
                    print("out of time: the rest is left out")
                    return rows
                torch.cuda.empty_cache()
                row = {"name": name, "shape": shape, "label": label}
                try:
                    row |= measure(name, shape, Route(shape, balanced), graph=args.graph)
                    if args.errors == "all" or (
                        args.errors == "own" and name.startswith("tessera")
                    ):
                        row |= {"errors": errors(name, shape, balanced)}
                except ImportError as error:
                    row["absent"] = str(error)
                except Exception as error:
                    row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                    if args.verbose:
                        traceback.print_exc()
                rows.append(row)
                print(line(row), flush=True)
        if args.bound and time.perf_counter() < args.deadline:
            torch.cuda.empty_cache()
            T, D, N, _, K = shape
            with contextlib.suppress(torch.OutOfMemoryError):
                forward, backward = cublas_bound(shape)
                row = {"name": "cuBLAS bound", "shape": shape, "label": label,
                       "routing": "balanced"}  # fmt: skip
                row |= speeds(6 * T * K * N * D, forward, forward + backward)
                rows.append(row)
                print(line(row), flush=True)
        for text in ratios(rows, label):
            print(text, flush=True)
        write(args, "layers", rows)  # of a long run something is left when it is cut short
    return rows


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


def line(row: dict) -> str:
    head = f"  {row['name']:20s} {row.get('routing', ''):9s}"
    if "absent" in row:
        return f"{head} absent: {row['absent']}"
    if "failed" in row:
        return f"{head} FAILED: {row['failed']}"
    text = (
        f"{head} fwd {row['forward ms']:8.3f} ms {row['forward TFLOP/s']:5.0f}   "
        f"bwd {row['backward ms']:8.3f} ms {row['backward TFLOP/s']:5.0f}   "
        f"both {row['both TFLOP/s']:5.0f} TFLOP/s"
    )
    if "graph both ms" in row:
        forward, backward = row["graph forward ms"], row["graph backward ms"]
        text += f"   as a graph fwd {forward:8.3f} ms bwd {backward:8.3f} ms"
        text += f" both {row['graph both TFLOP/s']:5.0f}"
    if "kept MiB" in row:
        text += f"   kept {row['kept MiB']:6.0f} MiB"
    if "errors" in row:
        text += "   " + " ".join(f"{k} {v:.1e}" for k, v in row["errors"].items())
    return text


def bench_rounding(args) -> list[dict]:
    """Plain top-K against rounding to the nearest whole tile, by model FLOPs of their pairs."""
    rows = []
    for label, shape in ROUNDING_SHAPES.items():
        print(f"\n{label}: T, D, N, E, K = {shape}; nearest, tile 128", flush=True)
        x, router, *_ = operands(shape)
        found = {}
        for kind in ("top-K", "rounded"):
            # Unbounded below: the shapes are measured whatever the mean number of tiles is.
            config = RoundingConfig(tile=128, min_mean_tiles=0.0) if kind == "rounded" else None
            route = Route(shape, False, config)
            with torch.no_grad():
                given = route.routing(x, router)
            for scope in ("layer", "experts"):
                if time.perf_counter() > args.deadline:
                    return rows
                torch.cuda.empty_cache()
                row = {"label": label, "kind": kind, "scope": scope}
                routing = given if scope == "experts" else None
                row |= measure("tessera", shape, route, routing, args.graph)
                row["name"] = f"{kind}, {scope}"
                found[kind, scope] = row
                rows.append(row)
                print(line(row) + f"   tile fill {row['mean tile fill']:.3f}", flush=True)
        for scope in ("layer", "experts"):
            rounded, plain = found["rounded", scope], found["top-K", scope]
            for key in ("both TFLOP/s", "graph both TFLOP/s")[: 1 + args.graph]:
                ratio = rounded[key] / plain[key]
                print(f"  rounded / top-K, {scope}, {key}: {ratio:.3f}", flush=True)
    return rows


# ------------------------------------------------------------------------------------------ profile


def profile(args, shapes: dict) -> list[dict]:
    """Forward and backward of ours, launch by launch: microseconds, and gaps before them."""
    rows: list[dict] = []
    for label, shape in shapes.items():
        print(f"\n{label}: T, D, N, E, K = {shape}", flush=True)
        torch.cuda.empty_cache()
        layer = PEERS["tessera"](shape, Route(shape, args.routings[0]))
        inputs = [t.requires_grad_() for t in operands(shape)]
        dout = torch.randn_like(inputs[0])

        def both(layer=layer, inputs=inputs, dout=dout):
            torch.autograd.grad(layer(*inputs), inputs, dout)

        eager_ms, graph_ms = median_ms(both), median_ms(captured(both))
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            both()
        host_ms = (time.perf_counter() - began) * 100
        torch.cuda.synchronize()
        launches = timeline(both)
        busy = sum(launch["us"] for launch in launches)
        print(
            f"  host {host_ms:.2f} ms a call, device {eager_ms:.2f} ms, as a CUDA graph "
            f"{graph_ms:.2f} ms; {len(launches)} launches, busy {busy / 1000:.2f} ms"
        )
        for launch in launches:
            gap = f"   after a gap of {launch['gap us']:.0f}" if launch["gap us"] > 2 else ""
            print(f"  {launch['us']:8.1f} us  {launch['name'][:60]}{gap}")
        rows.append({"label": label, "shape": shape, "host ms": host_ms, "eager ms": eager_ms,
                     "graph ms": graph_ms, "launches": launches})  # fmt: skip
        write(args, "profile", rows)
    return rows


def timeline(run: Callable[[], object], repeats: int = 3) -> list[dict]:
    """What the device did in the last of a few calls, in order."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    events = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and "Synchronize" not in event.name
    )
    events = events[len(events) * (repeats - 1) // repeats :]
    launches, last = [], events[0][0]
    for start, end, name in events:
        launches.append({"name": name, "us": end - start, "gap us": max(start - last, 0)})
        last = max(last, end)
    return launches


# --------------------------------------------------------------------------------------------- tune


def tune(args, shapes: dict) -> list[dict]:
    """Each grouped product alone with each of its configurations: time, speed, error; and cuBLAS
    on equal groups, without gather and epilogue.

    With --zeros all operands are zeros, which take a fraction of the power, so that the card need
    not lower its clock: what is faster then is bound by power, and what is not, by something else.
    """
    rows: list[dict] = []
    for label, shape in shapes.items():
        print(f"\n{label}: T, D, N, E, K = {shape}", flush=True)
        torch.cuda.empty_cache()
        tune_shape(args, label, shape, rows)
    return rows


def tune_shape(args, label: str, shape, rows: list[dict]) -> None:
    T, D, N, _, K = shape
    R = T * K
    x, router, w1, w2 = operands(shape)
    with torch.no_grad():
        r = Route(shape, args.routings[0]).routing(x, router)
    h, a = (torch.randn(R, width, device="cuda", dtype=BF16) for width in (2 * N, N))
    dense = cublas_products(shape)
    if args.zeros:
        for t in (x, w1, w2, h, a, *itertools.chain(*dense.values())):
            t.zero_()
    offsets, token = r.offsets_E1, r.token_R
    slots = (r.gates_S.detach(), token, r.slot_R, r.row_S, offsets)
    flags = ("swiglu", True, True, True)
    cases = {  # name: table of configurations, FLOPs / (R N D), launch
        "up": ("up", 4, lambda c, t: up_forward_triton(
            x, w1, None, token, offsets, "swiglu", True, t, c)),
        "down": ("rows", 2, lambda c, t: rows_triton(a, w2.mT, None, None, t, c)),
        "dH": ("down_backward", 2, lambda c, t: down_backward_triton(
            x, w2, None, h, *slots, *flags, t, c)),
        "dX": ("rows", 4, lambda c, t: rows_triton(h, w1, None, None, t, c)),
        "dW2": ("outer", 2, lambda c, t: weight_gradient_triton(
            x, a, token, None, offsets, None, c)),
        "dW1": ("outer", 4, lambda c, t: weight_gradient_triton(
            h, x, None, token, offsets, None, c)),
    }  # fmt: skip
    exact = exact_tiles(x, w1, w2, h, a, r)
    gluon = hopper_launches(x, w1, w2, h, a, slots)
    for name, (kernel, factor, run) in cases.items():
        if args.kernels and name not in args.kernels:
            continue
        row = {"label": label, "shape": shape, "kernel": name, "config": "cuBLAS"}
        rows.append(row)
        time_product(row, functools.partial(torch.bmm, *dense[name]), factor * R * N * D)
        listed = [("triton", c, run) for c in _tiles.trials(kernel)]
        if name in gluon:
            table, gluon_run = gluon[name]
            listed += [("hopper", c, gluon_run) for c in table]
        listed = [trial for trial in listed if args.tier in (trial[0], "both")]
        for tier, c, run in listed:
            if time.perf_counter() > args.deadline:
                print("out of time: the rest is left out")
                return
            tiles = None
            if kernel != "outer":
                tiles = _tiles.RowTiles(*tile_schedule(offsets, c.bm, R), c.bm)
            row = {"label": label, "shape": shape, "kernel": name, "config": f"{tier} {c}"}
            rows.append(row)
            try:
                made = run(c, tiles)
                outs = made if isinstance(made, tuple) else (made,)
                if not args.zeros:
                    row["error"] = max(relative_error(got, want) for got, want in exact[name](outs))
                del made, outs
                time_product(row, functools.partial(run, c, tiles), factor * R * N * D)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
                print(f"  {name:5s} {tier} {c!s:35s} FAILED {row['failed']}", flush=True)
    if not args.kernels or "combine" in args.kernels:
        y = torch.randn(R, D, device="cuda", dtype=BF16)
        for kind, gates in (("weighted", r.gates_S.detach()), ("plain", None)):
            launch = functools.partial(
                combine, y, gates, r.row_S, num_tokens=T, slots_per_token=K, backend="triton"
            )
            ms = median_ms(launch, seconds=0.2)
            print(f"  combine {kind:9s} {ms:8.3f} ms {(R + T) * D * 2 / ms / 1e6:6.0f} GB/s")
            rows.append({"label": label, "kernel": f"combine {kind}", "ms": ms})


def time_product(row: dict, launch: Callable[[], object], flops: int) -> None:
    """Adds time, speed and clock to a row of `tune`, and prints it."""
    row["ms"] = ms = median_ms(launch, seconds=0.2, most=20)
    row["TFLOP/s"], row["MHz"] = flops / ms / 1e9, busy_clock(launch, ms)
    error = f"   error {row['error']:.1e}" if "error" in row else ""
    wrong = "" if row.get("error", 0) < 1e-2 else "   WRONG"
    print(
        f"  {row['kernel']:5s} {row['config']:42s} {ms:8.3f} ms {row['TFLOP/s']:6.0f} TFLOP/s "
        f"at {row['MHz']} MHz{error}{wrong}",
        flush=True,
    )


def hopper_launches(x, w1, w2, h, a, slots) -> dict[str, tuple[list, Callable]]:
    """Product → (configurations, launch) of the Hopper kernels; empty where they cannot run."""
    if torch.cuda.get_device_capability()[0] != 9 or hopper.missing() is not None:
        return {}
    from moe.kernels.hopper._configs import CONFIGS
    from moe.kernels.hopper.down_backward import down_backward_hopper
    from moe.kernels.hopper.outer import weight_gradient_hopper
    from moe.kernels.hopper.rows import rows_hopper, up_forward_hopper

    token, offsets = slots[1], slots[-1]
    return {
        "up": (CONFIGS["up"], lambda c, t: up_forward_hopper(x, w1, token, True, t, c)),
        "down": (CONFIGS["rows"], lambda c, t: rows_hopper(
            a, w2, None, t, transposed=True, config=c)),
        "dH": (CONFIGS["down_backward"], lambda c, t: down_backward_hopper(
            x, w2, h, *slots, True, t, c)),
        "dX": (CONFIGS["rows"], lambda c, t: rows_hopper(
            h, w1, None, t, transposed=False, config=c)),
        "dW2": (CONFIGS["outer_left"], lambda c, t: weight_gradient_hopper(
            x, a, token, None, offsets, c)),
        "dW1": (CONFIGS["outer_right"], lambda c, t: weight_gradient_hopper(
            h, x, None, token, offsets, c)),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------- report


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [r for r in rows if "both TFLOP/s" in r and r.get("label")]
    labels = list(dict.fromkeys(r["label"] for r in shown))
    names = [(r["name"], r.get("routing", "")) for r in shown]
    # what was measured at some of the shapes alone would leave gaps: it is in the table
    series = [s for s in dict.fromkeys(names) if names.count(s) == max(map(names.count, names))]
    if not labels:
        return
    figure, axes = plt.subplots(1, 2, figsize=(15, 4.8), sharey=True, layout="constrained")
    for axis, key in zip(axes, ("forward TFLOP/s", "backward TFLOP/s")):
        width = 0.85 / len(series)
        for i, (name, routing) in enumerate(series):
            found = [
                next((r[key] for r in shown if (r["label"], r["name"], r.get("routing", ""))
                      == (label, name, routing)), 0.0)
                for label in labels
            ]  # fmt: skip
            places = [j + (i - len(series) / 2 + 0.5) * width for j in range(len(labels))]
            axis.bar(places, found, width, label=f"{name} {routing}".strip())
        axis.set_xticks(range(len(labels)), labels, rotation=20, ha="right")
        axis.set_title(key)
        axis.grid(axis="y", alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=9, ncols=4, loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=110)


def write(args, kind: str, rows: list[dict]) -> None:
    result = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "flops": FORMULA}
    result["rows"] = rows
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{kind}.json").write_text(json.dumps(result, indent=1))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="all", help="numbers 0 to 5, or all")
    parser.add_argument(
        "--peers",
        default="tessera,grouped_mm",
        help=f"names separated by commas, or all; of {', '.join(PEERS)}",
    )
    parser.add_argument("--routing", default="both", choices=("both", "random", "balanced"))
    parser.add_argument("--tune", action="store_true", help="time every kernel's configurations")
    parser.add_argument("--kernels", default="", help="with --tune: up,down,dH,dX,dW1,dW2,combine")
    parser.add_argument(
        "--tier", default="both", choices=("both", "triton", "hopper"), help="with --tune: whose"
    )
    parser.add_argument(
        "--zeros", action="store_true", help="with --tune: operands of zeros, no limit of power"
    )
    parser.add_argument("--profile", action="store_true", help="time every launch of ours")
    parser.add_argument("--rounding", action="store_true", help="token rounding against top-K")
    parser.add_argument("--graph", action="store_true", help="the device's time alone too")
    parser.add_argument(
        "--errors",
        default="all",
        choices=("all", "own", "none"),
        help="whose errors are measured: a small shape more, which peers tune for again",
    )
    parser.add_argument("--no-bound", dest="bound", action="store_false")
    parser.add_argument("--seconds", type=float, default=300, help="stop starting rows after this")
    parser.add_argument("--out", type=user_path, default=Path("runs/bench_moe"))
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    args.deadline = time.perf_counter() + args.seconds
    args.peers = list(PEERS) if args.peers == "all" else args.peers.split(",")
    for name in args.peers:
        if name not in PEERS:
            parser.error(f"--peers={name!r} is unknown; allowed: {', '.join(PEERS)}")
    args.routings = {"both": [False, True], "random": [False], "balanced": [True]}[args.routing]
    args.kernels = [k for k in args.kernels.split(",") if k]
    return args


def main() -> None:
    args = arguments()
    if not torch.cuda.is_available():
        raise SystemExit("bench_moe needs a CUDA device")
    names = list(SHAPES)
    picked = names if args.shapes == "all" else [names[int(i)] for i in args.shapes.split(",")]
    shapes = {name: SHAPES[name] for name in picked}
    card = torch.cuda.get_device_name()
    print(f"{card}, torch {torch.__version__}; {FORMULA}", flush=True)
    if args.tune:
        rows = tune(args, shapes)
    elif args.profile:
        rows = profile(args, shapes)
    elif args.rounding:
        rows = bench_rounding(args)
    else:
        rows = bench(args, shapes)
    kinds = {"tune": args.tune, "profile": args.profile, "rounding": args.rounding, "layers": True}
    kind = next(name for name, asked in kinds.items() if asked)
    write(args, kind, rows)
    if kind in ("rounding", "layers"):
        plot(rows, args.out / f"{kind}.png")
    print(f"\nwritten to {args.out}/{kind}.json")


if __name__ == "__main__":
    main()
