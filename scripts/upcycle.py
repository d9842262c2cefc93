#!/usr/bin/env python3
"""Make a Mixture-of-Experts model from a dense one: a llama becomes a mixtral, a qwen2 a qwen2_moe,
a qwen3 a qwen3_moe, an olmo2 a flex_olmo.

    python scripts/upcycle.py Qwen3-0.6B/ out/ --experts 8 --top-k 2
    python scripts/upcycle.py Qwen3-0.6B/ out/ --experts 32 --top-k 8 --granularity 4
    python scripts/upcycle.py Qwen3-0.6B/ out/ --experts 8 --top-k 2 --drop 0.5    # Drop-Upcycling
    python train.py my.yaml model.init_from=out/

The dense model is a Hugging Face folder, or a checkpoint or run of this repository.
Every expert starts as a copy of its layer's dense network, or as one of `granularity` shards of it,
and gates sum to 1, so the new model computes what the dense one did (in a qwen2_moe the shared
expert is a copy too, and gives half of it). The receipt (printed, and
out/upcycle.json) holds the loss of the dense model and of the new one on the same text, before and
after what changes the function on purpose (--drop, --noise). Exit codes: 0 done; 2 a mistake or a
folder that cannot be upcycled; 1 the losses differ although they should not (nothing is written).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from models.errors import UserError
from models.hf import DTYPES, export_hf
from models.transformer import Decoder
from models.upcycle import mean_loss, upcycle
from moe.upcycle import add_noise, drop_columns
from scripts._command import bounded, command, make_parser
from training.checkpoint.weights import load_model, tokenizer_folder
from training.config.load import expand_home, user_path
from training.data.tokenizer import TextTokenizer, read_tokenizer

TEXT = Path(__file__).resolve().parent.parent / "training/data/bundled/moby-dick/moby-dick.jsonl"
TOLERANCE = 1e-6


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser, share = make_parser(__doc__), bounded(float, least=0, most=1)
    add = parser.add_argument
    add("folder", type=expand_home, help="dense Hugging Face folder, checkpoint or run")
    add("out", type=expand_home, help="where to write; must not hold a model yet")
    add("--experts", type=int, required=True, help="experts per layer")
    add("--top-k", type=int, required=True, help="experts per token")
    add(
        "--granularity",
        type=int,
        default=1,
        help="experts that one copy of the dense network is split into",
    )
    add("--sparse-step", type=int, default=1, help="one layer in so many becomes MoE")
    add("--drop", type=share, default=0.0, help="share of columns drawn anew")
    add("--noise", type=share, default=0.0, help="relative noise on the copies")
    add("--seed", type=int, default=0, help="random seed of routers, --drop and --noise")
    add("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")
    add("--text", type=user_path, default=TEXT, help="text for the losses of the receipt")
    add("--tokens", type=bounded(least=2), default=2048, help="tokens of it; default: %(default)s")
    return parser.parse_args(arguments)


def receipt_tokens(
    model: Decoder, tokenizer: TextTokenizer | None, text: Path, count: int
) -> tuple[Tensor, str]:
    """(tokens [B, L], where they come from); random ones for a folder without tokenizer."""
    length = min(256, model.config.max_position_embeddings, count)
    rows = max(1, count // length)
    if tokenizer is None:
        draw = torch.Generator().manual_seed(0)
        tokens = torch.randint(model.config.vocab_size, (rows, length), generator=draw)
        return tokens, "random tokens"
    try:
        content = text.read_text(encoding="utf-8")[: 40 * count]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {text}: {error}") from None
    if text.suffix == ".jsonl":
        lines = content.splitlines()
        whole = lines[:-1] if len(lines) > 1 else lines
        content = "\n".join(json.loads(line)["text"] for line in whole)
    ids = tokenizer.prompt(content)
    if len(ids) < length:
        raise UserError(f"--text {text} has {len(ids)} tokens, at least {length} are needed")
    rows = min(rows, len(ids) // length)
    return torch.tensor(ids[: rows * length]).view(rows, length), text.name


@command
def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    dense = load_model(options.folder).eval()
    folder = tokenizer_folder(options.folder)
    tokenizer = None if folder is None else read_tokenizer(folder)
    tokens, source = receipt_tokens(dense, tokenizer, options.text, options.tokens)
    model, exact = upcycle(
        dense,
        num_experts=options.experts,
        num_experts_per_tok=options.top_k,
        granularity=options.granularity,
        sparse_step=options.sparse_step,
        seed=options.seed,
    )
    before, after = mean_loss(dense, tokens), mean_loss(model.eval(), tokens)
    receipt = {
        "from": str(options.folder), "experts": options.experts, "top_k": options.top_k,
        "granularity": options.granularity, "sparse_step": options.sparse_step,
        "drop": options.drop, "noise": options.noise, "seed": options.seed,
        "measured_on": source, "tokens": tokens.numel(),
        "parameters_before": sum(p.numel() for p in dense.parameters()),
        "parameters_after": sum(p.numel() for p in model.parameters()),
        "loss_before": before, "loss_after": after, "tolerance": TOLERANCE,
    }  # fmt: skip
    print(f"dense:    {receipt['parameters_before']:,} parameters, loss {before:.7f} on {source}")
    print(
        f"upcycled: {receipt['parameters_after']:,} parameters, loss {after:.7f}, "
        f"difference {abs(after - before):.1e} (allowed {TOLERANCE:.0e})"
    )
    if exact and not abs(after - before) <= TOLERANCE:
        print("the function is not preserved; nothing was written", file=sys.stderr)
        return 1
    if options.drop or options.noise:
        generator = torch.Generator().manual_seed(options.seed)
        for layer in model.config.moe_layers:
            drop_columns(model.layers[layer].moe, options.drop, generator)
            add_noise(model.layers[layer].moe, options.noise, generator)
        receipt["loss_changed"] = mean_loss(model, tokens)
        print(f"changed:  loss {receipt['loss_changed']:.7f} after --drop and --noise")
    exported = export_hf(model, options.out, dtype=options.dtype, tokenizer=tokenizer)
    (exported.folder / "upcycle.json").write_text(json.dumps(receipt, indent=2) + "\n")
    print(f"{exported.folder}: {model.config.family}, {exported.bytes / 1e6:,.1f} MB")
    print(f"continue with: python train.py CONFIG model.init_from={exported.folder}", end="")
    print(" data.tokenizer=null" if tokenizer else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
