#!/usr/bin/env python3
"""Attention over packed documents: speed and error of what PyTorch has, forward and backward.

    python scripts/bench_attention.py configs/olmoe_1b_7b.yaml
    python scripts/bench_attention.py configs/qwen3_30b_a3b.yaml --rows 8

Heads are those of the config, lengths those of real rows (documents of the bundled novel).

    ours    what `models.attention.packed_attention` takes on this device
    flash   PyTorch's variable-length flash attention
    flex    FlexAttention with a document mask, compiled; the mask is made once for all layers
    rows    the same rows without borders, by whichever kernel PyTorch takes: more work, no mask

TFLOP/s count 4 C operations for each pair of a query and a key that it sees, and 10 C backward.
Errors (norms, against float64 on the longest document and the shortest) are of the output and the
three gradients, the largest. Times are medians of device time with the host's own where that is
longer.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from bench_train import TEXT, batches_of
from torch import Tensor

from models.attention import causal_attention, packed_attention
from models.documents import Documents
from training.config import ConfigError, load_config, make_plan
from training.config_load import expand_home, user_path

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def backends(documents: Documents, rows: int, length: int, device: torch.device) -> dict:
    """Name → a function of q, k, v [T, heads, C] that makes an attention of [T, H, C]."""

    def by_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = (part.unflatten(0, (rows, length)) for part in (q, k, v))
        return causal_attention(*parts).flatten(0, 1)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = (part.unflatten(0, (rows, length)) for part in (q, k, v))
        ends, lengths = documents.cu_seqlens_N1, documents.lengths_N
        return packed_attention(*parts, ends, lengths).flatten(0, 1)

    found = {"ours": ours, "rows": by_row}
    if device.type == "cuda":
        ends = documents.cu_seqlens_N1
        found["flash"] = lambda q, k, v: Flash.apply(q, k, v, ends, length)
        found["flex"] = flex(documents, rows, length, device)
    return found


class Flash(torch.autograd.Function):
    """`aten::_flash_attention_forward` and its backward."""

    @staticmethod
    def forward(ctx, q, k, v, ends, longest):
        out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, ends, ends, longest, longest, 0.0, True, False
        )
        ctx.save_for_backward(q, k, v, out, lse, state, unused, ends)
        ctx.longest = longest
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse, state, unused, ends = ctx.saved_tensors
        most = ctx.longest
        return *torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, ends, ends, most, most, 0.0, True, state, unused
        ), None, None  # fmt: skip


def flex(documents: Documents, rows: int, length: int, device: torch.device) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    numbers = torch.arange(len(documents.lengths)).repeat_interleave(documents.lengths_N)
    document_BL = numbers.to(device).view(rows, length)

    def seen(b, h, query, key):
        return (query >= key) & (document_BL[b, query] == document_BL[b, key])

    compiled = torch.compile(flex_attention)
    mask = create_block_mask(seen, rows, None, length, length, device=str(device))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.unflatten(0, (rows, length)).transpose(1, 2) for part in (q, k, v))
        out = compiled(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2).flatten(0, 1)

    return run


def exact(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Output and gradients of one document [L, heads, C] in float64."""
    q, k, v = (part.detach().double().requires_grad_() for part in (q, k, v))
    share = q.shape[1] // k.shape[1]
    keys, values = (part.repeat_interleave(share, 1) for part in (k, v))
    scores = torch.einsum("qhc,khc->hqk", q, keys) / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
    out = torch.einsum("hqk,khc->qhc", scores.masked_fill(later, -torch.inf).softmax(-1), values)
    return [out, *torch.autograd.grad(out, (q, k, v), grad.double())]


def median_ms(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    seconds = []
    for number in range(repeats + 3):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number >= 3:
            seconds.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seconds)


def measure(name: str, run: Attention, tensors, grad, pieces, wanted, pairs: float, repeats: int):
    q, k, v = tensors
    out = run(q, k, v)

    def backward():
        return torch.autograd.grad(out, tensors, grad, retain_graph=True)

    found = [out, *backward()]
    errors = [
        ((a[piece].double() - b).norm() / b.norm()).item()
        for piece, exact_ones in zip(pieces, wanted)
        for a, b in zip(found, exact_ones)
    ]
    with torch.no_grad():
        forward_ms = median_ms(lambda: run(q, k, v), q.device, repeats)
    backward_ms = median_ms(backward, q.device, repeats)
    flops = 4 * pairs * q.shape[1] * q.shape[2]
    rates = flops / forward_ms / 1e9, 2.5 * flops / backward_ms / 1e9
    print(
        f"{name:6s} forward {forward_ms:8.3f} ms {rates[0]:6.0f} TFLOP/s   backward "
        f"{backward_ms:8.3f} ms {rates[1]:6.0f} TFLOP/s"
        + (f"   error {max(errors):.1e}" if errors else ""),
        flush=True,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=expand_home)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=user_path, default=Path("runs/bench_attention"))
    args = parser.parse_intermixed_args(arguments)
    rows = [f"train.{key}_batch_size={args.rows}" for key in ("global", "micro")]
    try:
        config = load_config(args.config, [*TEXT, *rows, *args.overrides])
        plan = make_plan(config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    batch = batches_of(config, plan, args.out)[1][0][0]
    device = torch.device(plan.device)
    documents, length = batch.documents.to(device), config.data.seq_len
    model = config.model.config
    dtype = torch.bfloat16 if plan.dtype == "bfloat16" else torch.float32
    generator = torch.Generator(device).manual_seed(0)

    def draw(heads: int) -> Tensor:
        shape = (args.rows * length, heads, model.head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    tensors = [draw(count).requires_grad_() for count in (heads, kv_heads, kv_heads)]
    grad = draw(heads)
    lengths = documents.lengths
    print(
        f"{heads} heads, {kv_heads} of keys and values, width {model.head_dim}; {len(lengths)} "
        f"documents of {min(lengths)} to {max(lengths)} tokens in {args.rows} rows; {plan.dtype}, "
        f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu'}, "
        f"torch {torch.__version__}"
    )
    ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    chosen = {lengths.index(max(lengths)), lengths.index(min(lengths))}
    pieces = [slice(ends[n], ends[n + 1]) for n in sorted(chosen)]
    wanted = [exact(*(part[p] for part in (*tensors, grad))) for p in pieces]
    pairs = sum(count * (count + 1) / 2 for count in lengths)
    whole = args.rows * length * (length + 1) / 2
    for name, run in backends(documents, args.rows, length, device).items():
        others = ([], [], whole) if name == "rows" else (pieces, wanted, pairs)
        try:
            measure(name, run, tensors, grad, *others, args.repeats)
        except (RuntimeError, ValueError) as error:
            print(f"{name:6s} cannot: {str(error).splitlines()[0][:150]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
