"""Experts of different widths beside experts of one width, forward and backward.

    python scripts/bench_widths.py                       table and JSON under --out, on a GPU
    python scripts/bench_widths.py --small               small sizes, for a CPU

T tokens of width D to K of E experts. `mixed`: widths spread evenly around N; `one width`: all N;
`padded`: all as wide as the widest, which is what the mixed experts cost without ragged products.
TFLOP/s count the widths that tokens met, 18 · D · sum of widths over all pairs; so `padded`, which
computes more, is credited with what the mixed experts need. Median times on a cold L2 cache; the
error is that of the output against float32, relative, by norm.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_spmm import error, milliseconds

from moe.experts import experts
from moe.kernels.ragged import Widths
from moe.mixed_experts import mixed_experts
from moe.routing import Routing
from training.config_load import user_path

SHAPES = [(16384, 2048, 1024, 64, 8), (16384, 2048, 768, 128, 8), (16384, 1536, 256, 128, 8)]


def spread(N: int, E: int, tile: int) -> tuple[int, ...]:
    """Widths from N/2 to 3N/2 in multiples of `tile`, mean N, in shuffled order."""
    steps = max(1, N // 2 // tile)
    offsets = [tile * (i % (2 * steps + 1) - steps) for i in range(E)]
    offsets = [o - round(sum(offsets) / E / tile) * tile for o in offsets]
    order = torch.randperm(E, generator=torch.Generator().manual_seed(0)).tolist()
    return tuple(N + offsets[i] for i in order)


def bench(T: int, D: int, N: int, E: int, K: int, args: argparse.Namespace) -> list[dict]:
    device, dtype = args.device, getattr(torch, args.dtype)
    sizes = spread(N, E, args.tile)
    widths, M = Widths(sizes), max(sizes)
    expert_TK = torch.rand(T, E, device=device).argsort(1)[:, :K].to(torch.int32)
    routing = Routing.from_topk(expert_TK, torch.rand(T, K, device=device), E)

    def weight(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, device=device).mul_(scale).to(dtype).requires_grad_()

    x = weight(T, D, scale=1.0)
    rows: list[dict] = []
    counts = routing.counts_E.tolist()
    pairs = sum(count * size for count, size in zip(counts, sizes))
    cases = [("mixed", None)] + [
        (f"{name}, {backend}", (size, backend))
        for name, size in (("one width", N), ("padded", M))
        for backend in args.backends
    ]
    for name, one in cases:
        if one is None:
            w1 = weight(2 * widths.total, D, scale=D**-0.5)
            w2 = weight(widths.total, D, scale=N**-0.5)
            run = partial(mixed_experts, x, w1, w2, routing, widths)
            wide = [t.detach().float() for t in (x, w1, w2)]
            want = mixed_experts(*wide, routing, widths, backend="reference")
        else:
            size, backend = one
            w1, w2 = weight(E, 2 * size, D, scale=D**-0.5), weight(E, D, size, scale=size**-0.5)
            run = partial(experts, x, w1, w2, routing, backend=backend)
            wide = [t.detach().float() for t in (x, w1, w2)]
            want = experts(*wide, routing, backend="reference")
        leaves = (x, w1, w2)

        def both(run=run, leaves=leaves) -> None:
            run().sum().backward()
            for leaf in leaves:
                leaf.grad = None

        row = {"T": T, "D": D, "N": N, "E": E, "K": K, "widths": sizes, "method": name}
        with torch.no_grad():
            row["error"] = error(run(), want)
            row["forward_ms"] = milliseconds(run, device, args.seconds)
        row["both_ms"] = milliseconds(both, device, args.seconds)
        met = pairs if one is None or one[0] == M else T * K * N
        row["tflops"] = 18 * D * met / row["both_ms"] / 1e9
        rows.append(row)
        print(
            f"{T:7d} {D:5d} {min(sizes) if one is None else one[0]:5d} {M if one is None else '':5}"
            f" {E:4d} {K:2d}  {name:20s} {row['forward_ms']:8.3f} {row['both_ms']:9.3f} "
            f"{row['tflops']:8.1f}   {row['error']:.0e}",
            flush=True,
        )
        del run, w1, w2, want, wide, leaves, both
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--tile", type=int, default=64, help="widths are multiples of this")
    parser.add_argument("--backends", default="triton,auto", help="of the experts of one width")
    parser.add_argument("--shapes", help="T,D,N,E,K;T,D,N,E,K…")
    parser.add_argument("--seconds", type=float, default=0.05, help="spent on each measurement")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=user_path, default=Path("runs/bench_widths"))
    args = parser.parse_args(arguments)
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cpu" and not args.small:
        raise SystemExit("bench_widths needs a CUDA device, or --small on a CPU")
    args.backends = args.backends.split(",")
    shapes = SHAPES
    if args.small:
        shapes, args.tile = [(64, 32, 16, 4, 2)], 4
    if args.small and args.device == "cpu":
        args.dtype, args.backends = "float32", ["reference"]
    if args.shapes:
        shapes = [tuple(map(int, shape.split(","))) for shape in args.shapes.split(";")]
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {args.dtype}")
    print(
        "      T     D   width(s)     E  K  method                forward  with bwd  TFLOP/s  error"
    )
    rows = [row for shape in shapes for row in bench(*shape, args)]
    args.out.mkdir(parents=True, exist_ok=True)
    result = {"device": name, "torch": torch.__version__, "dtype": args.dtype, "rows": rows}
    (args.out / "widths.json").write_text(json.dumps(result, indent=1))
    print(f"written to {args.out}/widths.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
