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

from models.config import ModelConfig
from models.engines import notes
from models.errors import UserError
from models.hf import DTYPES, export_hf
from training.checkpoint.files import resolve
from training.checkpoint.weights import (
    CheckpointTensors,
    is_hf_folder,
    load_model,
    refuse_inexact,
    tokenizer_folder,
)
from training.config.load import expand_home, fail
from training.data.tokenizer import read_tokenizer
from training.faults import SCRIPT_ERRORS

GGUF_NOTE = (
    "for llama.cpp convert it with scripts/to_gguf.py: its own converter refuses new tokenizers"
)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkpoint", type=expand_home, help="a checkpoint, or a run folder for its newest"
    )
    parser.add_argument("folder", type=expand_home, help="where to; must not hold a model yet")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")
    parser.add_argument("--max-shard-size", default="5GB", help="default: %(default)s")
    parser.add_argument(
        "--keep-tied", action="store_true", help="leave a tied output matrix out, see docs"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="remove the model files of an earlier export"
    )
    parser.add_argument("--check", action="store_true", help="compare with transformers")
    parser.add_argument(
        "--tolerance", type=float, default=1e-5, help="of --check; default: %(default)s"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        if is_hf_folder(options.checkpoint):
            raise UserError(f"{options.checkpoint} is a Hugging Face folder already")
        checkpoint = resolve(options.checkpoint)
        refuse_inexact(checkpoint)
        config = ModelConfig.from_hf(checkpoint / "model")
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
    except SCRIPT_ERRORS as error:
        fail(error)
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
    from models.hf_check import check_export, round_weights

    model = load_model(checkpoint)
    round_weights(model, options.dtype)
    receipt = check_export(model, options.folder, tokenizer=tokenizer, tolerance=options.tolerance)
    print(receipt)
    return 0 if receipt.passed else 1


if __name__ == "__main__":
    sys.exit(main())
