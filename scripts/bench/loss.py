#!/usr/bin/env python3
"""Time of the output layer with its loss, forward and backward, for every backend and chunk size.

    python scripts/bench/loss.py --tokens 16384 --width 2048 --words 151936
    python scripts/bench/loss.py --small                 small sizes, also on a CPU

Reports the median of some runs, the rate of the three matrix products, the memory above inputs and
weights, and the relative error of the loss's gradients against float32 on the first 512 tokens.
liger takes part where liger-kernel is installed, on a GPU.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from models.loss import IGNORED, default_chunk, linear_cross_entropy
from scripts.bench.harness import (
    DEVICE,
    Table,
    bench_parser,
    finish,
    header,
    median_ms,
    parse,
    relative_error,
    release,
)

COLUMNS = "backend:9s | chunk:5s | ms:7.2f | TFLOP/s:4.0f | GiB:.2f | dx error:.1e | dw error:.1e"


def gradients(
    x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, backend: str, chunk: int | None
) -> tuple[Tensor, Tensor]:
    """Of the mean loss."""
    if backend == "liger":
        loss = liger(x_TD, weight_VD, labels_T)
    else:
        loss = linear_cross_entropy(x_TD, weight_VD, labels_T, chunk=chunk, backend=backend)
    return torch.autograd.grad(loss / len(labels_T), (x_TD, weight_VD))


def liger(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
    """Liger-Kernel's fused loss, the peer. It reads a number back to the host in every forward and
    backward pass, and rounds logits to the dtype of the products."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    loss, *_ = LigerFusedLinearCrossEntropyFunction.apply(
        x_TD,
        weight_VD,
        labels_T,
        None,  # bias
        None,  # class weights
        IGNORED,
        0.0,  # z-loss
        0.0,  # label smoothing
        "sum",
        None,  # softcap
        False,  # return the z-loss
        torch.float32,  # accumulate the weight's gradient in
    )
    return loss


def main(arguments: list[str] | None = None) -> int:
    parser = bench_parser(__doc__, "bench_loss", small=True)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--words", type=int, default=151936)
    parser.add_argument("--chunks", type=int, nargs="*", default=[256, 1024, 4096])
    args = parse(parser, arguments)
    if args.small:
        args.tokens, args.width, args.words, args.chunks = 64, 32, 500, [16]
    T, D, V = args.tokens, args.width, args.words
    x_TD = torch.randn(T, D, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    weight_VD = (torch.randn(V, D, device=DEVICE) * 0.02).bfloat16().requires_grad_()
    labels_T = torch.randint(V, (T,), device=DEVICE)
    default = default_chunk(T, D, V, DEVICE)
    header(f"T={T} D={D} V={V}, bf16, default chunk {default}")
    few = min(T, 512)
    wide = [t.detach()[:n].float().requires_grad_() for t, n in ((x_TD, few), (weight_VD, V))]
    want = gradients(*wide, labels_T[:few], "reference", default)
    del wide
    kinds: list[tuple[str, int | None]] = [("reference", default)]
    if DEVICE.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        kinds += [("triton", chunk) for chunk in (default, *args.chunks)]
    table = Table(args, "loss", COLUMNS)
    for backend, chunk in [*kinds, ("liger", None)]:
        step = partial(gradients, x_TD, weight_VD, labels_T, backend, chunk)
        with table.row(backend=backend, chunk=str(chunk)) as row:
            if backend == "liger" and (DEVICE.type == "cpu" or not find_spec("liger_kernel")):
                raise ImportError("needs CUDA and liger-kernel")
            got = gradients(x_TD[:few], weight_VD, labels_T[:few], backend, chunk)
            for name, one, exact in zip(("dx", "dw"), got, want):
                row[f"{name} error"] = relative_error(one, exact)
            del got
            step()
            release()
            before = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
            row["ms"] = median_ms(step, fewest=6, most=6, flush=False)
            row["TFLOP/s"] = 6 * T * D * V / row["ms"] / 1e9
            if DEVICE.type == "cuda":
                row["GiB"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return finish(args)


if __name__ == "__main__":
    sys.exit(main())
