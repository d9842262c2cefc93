#!/usr/bin/env python3
"""Time of the output layer with its loss, forward and backward, for every backend and chunk size.

    python scripts/bench_loss.py --tokens 16384 --width 2048 --words 151936

Needs CUDA. Reports the median of six runs, the rate of the three matrix products, and the memory
above inputs and weights. liger takes part when liger-kernel is installed.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from models.loss import default_chunk, linear_cross_entropy


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--words", type=int, default=151936)
    parser.add_argument("--chunks", type=int, nargs="*", default=[256, 1024, 4096])
    return parser.parse_args(arguments)


def milliseconds(function, repeats: int = 6) -> float:
    for _ in range(2):
        function()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if not torch.cuda.is_available():
        print("error: bench_loss.py needs CUDA", file=sys.stderr)
        return 2
    T, D, V = options.tokens, options.width, options.words
    x_TD = torch.randn(T, D, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight_VD = (torch.randn(V, D, device="cuda") * 0.02).bfloat16().requires_grad_()
    labels_T = torch.randint(V, (T,), device="cuda")
    default = default_chunk(T, D, V, x_TD.device)
    print(f"{torch.cuda.get_device_name()}, T={T} D={D} V={V}, bf16, default chunk {default}")

    kinds = [("reference", default), ("triton", default)]
    kinds += [("triton", chunk) for chunk in options.chunks]
    if find_spec("liger_kernel"):
        kinds.append(("liger", None))
    for backend, chunk in kinds:

        def step(backend=backend, chunk=chunk) -> None:
            x_TD.grad = weight_VD.grad = None
            loss = linear_cross_entropy(x_TD, weight_VD, labels_T, chunk=chunk, backend=backend)
            (loss / T).backward()

        step()
        x_TD.grad = weight_VD.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        time = milliseconds(step)
        more = (torch.cuda.max_memory_allocated() - before) / 2**30
        rate = 6 * T * D * V / time / 1e9
        print(
            f"{backend:9} chunk {chunk!s:>5}: {time:7.2f} ms, {rate:4.0f} TFLOP/s, {more:.2f} GiB"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
