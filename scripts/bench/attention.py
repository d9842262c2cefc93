#!/usr/bin/env python3
"""Attention over packed documents: speed and error of what PyTorch has, forward and backward.

    python scripts/bench/attention.py configs/olmoe_1b_7b.yaml
    python scripts/bench/attention.py configs/qwen3_30b_a3b.yaml --rows 8

Heads are those of the config, lengths those of real rows (documents of the bundled novel).

    ours    what `models.attention.packed_attention` takes without FlashAttention-4
    flash   PyTorch's variable-length flash attention
    flash4  FlashAttention-4, if installed
    flex    FlexAttention with a document mask, compiled; the mask is made once for all layers
    rows    the same rows without borders, by whichever kernel PyTorch takes: more work, no mask

TFLOP/s count 4 C operations for each pair of a query and a key that it sees, and 10 C backward.
Errors (norms, against float64 on the longest document and the shortest) are of the output and the
three gradients, the largest. Times are medians on a cold L2 cache, the host's where that is longer.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from models.attention import causal_attention, packed_attention
from models.attention.flash4 import flash4, installed
from models.documents import Documents
from scripts._command import bounded, command
from scripts.bench.harness import (
    Table,
    bench_parser,
    finish,
    header,
    median_ms,
    parse,
    relative_error,
)
from scripts.bench.train import TEXT, text_batches
from training.config.build import load_config, make_plan
from training.data import load_tokenizer

COLUMNS = (
    "method:6s | forward ms:8.3f | forward TFLOP/s:6.0f | backward ms:8.3f | "
    "backward TFLOP/s:6.0f | error:.1e"
)
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def backends(documents: Documents, rows: int, length: int, device: torch.device) -> dict:
    """Name → a function of q, k, v [T, heads, C] that makes an attention of [T, H, C]."""
    ends, lengths = documents.cu_seqlens_N1, documents.lengths_N

    def by_row(attention: Callable, *borders: Tensor) -> Attention:
        def run(*parts: Tensor) -> Tensor:
            parts = tuple(part.unflatten(0, (rows, length)) for part in parts)
            return attention(*parts, *borders).flatten(0, 1)

        return run

    found = {"ours": by_row(packed_attention, ends, lengths), "rows": by_row(causal_attention)}
    if device.type == "cuda":
        found["flash"] = lambda q, k, v: Flash.apply(q, k, v, ends, length)
        found["flex"] = flex(documents, rows, length, device)
        if installed():
            found["flash4"] = lambda q, k, v: flash4(q, k, v, ends, length)
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


def measure(
    row: dict,
    run: Attention,
    tensors: list[Tensor],
    grad: Tensor,
    pieces: list[slice],
    wanted: list[list[Tensor]],
    pairs: float,
    repeats: int,
) -> None:
    """Times, speeds and the largest error, over documents at `pieces` of which exact results are
    wanted."""
    q, k, v = tensors
    out = run(q, k, v)

    def backward():
        return torch.autograd.grad(out, tensors, grad, retain_graph=True)

    found = [out, *backward()]
    errors = [
        relative_error(a[piece], b)
        for piece, exact_ones in zip(pieces, wanted)
        for a, b in zip(found, exact_ones)
    ]
    if errors:
        row["error"] = max(errors)
    clock = {"fewest": repeats, "most": repeats, "device": q.device}
    with torch.no_grad():
        row["forward ms"] = median_ms(lambda: run(q, k, v), **clock)
    row["backward ms"] = median_ms(backward, **clock)
    flops = 4 * pairs * q.shape[1] * q.shape[2]
    row["forward TFLOP/s"] = flops / row["forward ms"] / 1e9
    row["backward TFLOP/s"] = 2.5 * flops / row["backward ms"] / 1e9


@command
def main(arguments: list[str] | None = None) -> int:
    parser = bench_parser(__doc__, "bench_attention", config=True)
    parser.add_argument("--rows", type=bounded(least=1), default=2)
    parser.add_argument("--repeats", type=bounded(least=1), default=10)
    args = parse(parser, arguments)
    rows = [f"train.{key}_batch_size={args.rows}" for key in ("global", "micro")]
    config = load_config(args.config, [*TEXT, *rows, *args.overrides])
    plan = make_plan(config)
    tokenizer = load_tokenizer(config.data, args.out / "tokenizer")
    batch = text_batches(config, plan, tokenizer, 1)[0][0]
    device = torch.device(plan.device)
    documents, length = batch.documents.to(device), config.data.seq_len
    model = config.model.config
    dtype = torch.bfloat16 if plan.dtype == "bfloat16" else torch.float32
    generator = torch.Generator(device).manual_seed(0)

    def draw(heads: int) -> Tensor:
        shape = (args.rows * length, heads, model.widest_head)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    tensors = [draw(count).requires_grad_() for count in (heads, kv_heads, kv_heads)]
    grad = draw(heads)
    lengths = documents.lengths
    header(
        f"{heads} heads, {kv_heads} of keys and values, width {model.widest_head}; {len(lengths)} "
        f"documents of {min(lengths)} to {max(lengths)} tokens in {args.rows} rows; {plan.dtype}"
    )
    ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    chosen = sorted({lengths.index(max(lengths)), lengths.index(min(lengths))})
    pieces = [slice(ends[n], ends[n + 1]) for n in chosen]
    wanted = [exact(*(part[p] for part in (*tensors, grad))) for p in pieces]
    pairs = sum(count * (count + 1) / 2 for count in lengths)
    whole = args.rows * length * (length + 1) / 2
    table = Table(args, "attention", COLUMNS, documents=lengths)
    for name, run in backends(documents, args.rows, length, device).items():
        others = ([], [], whole) if name == "rows" else (pieces, wanted, pairs)
        with table.row(method=name) as row:
            measure(row, run, tensors, grad, *others, args.repeats)
    return finish(args)


if __name__ == "__main__":
    sys.exit(main())
