#!/usr/bin/env python3
"""Turn a Hugging Face folder into a checkpoint to continue pretraining from.

    python scripts/import_hf.py HF_FOLDER out/
    python train.py my.yaml model.init_from=out/

Every tensor of the folder is used exactly once and every parameter is filled, or nothing is written
and all names are listed. Weights are kept in float32, as a run keeps its master weights; the
tokenizer comes along. (`model.init_from` takes the Hugging Face folder itself, too.) Exit codes: 0
done, 2 a mistake or a folder that this model cannot hold.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models.hf import load_hf
from training.checkpoint import CheckpointError
from training.config_load import fail
from training.weights import save_weights, tokenizer_folder


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="Hugging Face folder (config.json and safetensors)")
    parser.add_argument("out", help="where to; must not exist or be empty")
    parser.add_argument(
        "--ignore-key",
        action="append",
        default=[],
        help="a key of config.json that is not understood and does not change the model",
    )
    parser.add_argument(
        "--drop-mtp",
        action="store_true",
        help="leave out multi-token prediction layers (public GLM-4.x folders have one)",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    out = Path(options.out)
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"{out} exists and is not an empty folder")
        model = load_hf(
            options.folder, ignore_keys=tuple(options.ignore_key), drop_mtp=options.drop_mtp
        )
        tokenizer = tokenizer_folder(options.folder)
        checkpoint = save_weights(model, out, tokenizer)
    except (ValueError, CheckpointError) as error:
        fail(error)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{checkpoint}: {model.config.family}, {count:,} parameters, "
        f"{'with' if tokenizer else 'without'} tokenizer"
    )
    print("continue with: python train.py CONFIG " + f"model.init_from={out}", end="")
    print(f" data.tokenizer={checkpoint / 'tokenizer'}" if tokenizer else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
