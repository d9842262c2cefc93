#!/usr/bin/env python3
"""Write a checkpoint as a Hugging Face folder, which transformers, vLLM and llama.cpp load.

    python scripts/export_hf.py runs/try/checkpoints/latest out/ --check
    python scripts/export_hf.py runs/try out/ --dtype bfloat16  # newest good checkpoint of a run

The checkpoint holds all that is needed: weights, model config, tokenizer. --check loads the folder
with transformers and compares logits and greedy text; the receipt is printed. Exit codes: 0 done,
1 the check found a difference, 2 a mistake (the folder is in use, no such checkpoint ...).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models.engines import notes
from models.errors import UserError
from models.hf import DTYPES, export_hf
from models.hf.check import check_export, round_weights
from models.hf.config import config_from_hf
from scripts._command import command, make_parser
from training.checkpoint.files import resolve
from training.checkpoint.weights import (
    CheckpointTensors,
    is_hf_folder,
    load_model,
    refuse_inexact,
    tokenizer_folder,
)
from training.config.load import expand_home
from training.data.tokenizer import read_tokenizer

GGUF_NOTE = (
    "for llama.cpp convert it with scripts/to_gguf.py: its own converter refuses new tokenizers"
)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add(
        "checkpoint", type=expand_home, help="a checkpoint, or a run folder (its newest checkpoint)"
    )
    add("folder", type=expand_home, help="where to write; must not hold a model yet")
    add("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")
    add("--max-shard-size", default="5GB", help="default: %(default)s")
    add(
        "--keep-tied",
        action="store_true",
        help="leave out a tied output matrix (docs/huggingface.md)",
    )
    add("--overwrite", action="store_true", help="replace the model files of an earlier export")
    add("--check", action="store_true", help="compare logits and greedy text with transformers")
    add(
        "--tolerance",
        type=float,
        default=1e-5,
        help="largest difference of logits that --check allows; default: %(default)s",
    )
    return parser.parse_args(arguments)


@command
def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if is_hf_folder(options.checkpoint):
        raise UserError(f"{options.checkpoint} is a Hugging Face folder already")
    checkpoint = resolve(options.checkpoint)
    refuse_inexact(checkpoint)
    config = config_from_hf(checkpoint / "model")
    folder = tokenizer_folder(checkpoint)
    tokenizer = None if folder is None else read_tokenizer(folder)
    exported = export_hf(
        CheckpointTensors(checkpoint),
        options.folder,
        config=config,
        dtype=options.dtype,
        max_shard_size=options.max_shard_size,
        tokenizer=tokenizer,
        keep_tied=options.keep_tied,
        overwrite=options.overwrite,
        progress=lambda done, all_: print(f"{done / 1e9:.2f} of {all_ / 1e9:.2f} GB"),
    )
    print(
        f"{exported.folder}: {config.family}, {exported.tensors} tensors in "
        f"{len(exported.files)} file(s), {exported.bytes / 1e6:,.1f} MB {options.dtype}, "
        f"{'with' if tokenizer else 'without'} tokenizer"
    )
    if tokenizer is not None:
        print(tokenizer.describe())
        print(f"note: {GGUF_NOTE}")
    for note in notes(config):
        print(f"note: {note}")
    if not options.check:
        return 0
    model = load_model(checkpoint)
    round_weights(model, options.dtype)
    receipt = check_export(model, options.folder, tokenizer=tokenizer, tolerance=options.tolerance)
    print(receipt)
    return 0 if receipt.passed else 1


if __name__ == "__main__":
    sys.exit(main())
