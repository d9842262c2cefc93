#!/usr/bin/env python3
"""Turn a Hugging Face folder into a checkpoint to continue pretraining from.

    python scripts/import_hf.py HF_FOLDER out/
    python train.py my.yaml model.init_from=out/

Every tensor of the folder is used exactly once and every parameter is filled, or nothing is written
and all names are listed. Weights are kept in float32, as a run keeps its master weights; the
tokenizer comes along. An output matrix equal to the embedding bit for bit, as the export of a tied
model writes it, is tied again; a tied olmoe or glm4_moe is untied, which computes the same.
(`model.init_from` takes the Hugging Face folder itself, too.) Exit codes: 0 done, 2 a mistake or a
folder that this model cannot hold.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from models.config import ModelConfig
from models.errors import UserError
from models.hf import load_hf, says_tied
from models.hf.config import read_generation_config
from models.transformer import Decoder
from scripts._command import command, make_parser
from training.checkpoint.weights import save_weights, tokenizer_folder
from training.config.load import user_path
from training.data.tokenizer import read_tokenizer

# The rest of generation_config.json is how to sample, which a run of training does not keep.
KEPT_GENERATION = {
    "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "_from_model_config",
}  # fmt: skip


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("folder", type=user_path, help="Hugging Face folder (config.json and safetensors)")
    add("out", type=user_path, help="where to write; must not exist, or be an empty folder")
    add(
        "--ignore-key",
        action="append",
        default=[],
        help="a key of config.json that is not understood and does not change the model",
    )
    add(
        "--drop-mtp",
        action="store_true",
        help="leave out multi-token prediction layers (public GLM-4.x folders have one)",
    )
    return parser.parse_args(arguments)


def tie(model: Decoder) -> bool:
    """Tie an output matrix that equals the embedding bit for bit; whether that was done.

    Two matrices of a trained model are equal only if they were one. Families without tied
    embeddings keep both.
    """
    if model.head.weight is model.embed.weight:
        return False
    if not torch.equal(model.head.weight, model.embed.weight):
        return False
    try:
        config = ModelConfig.of_user(model.config.model_dump() | {"tie_word_embeddings": True})
    except UserError:
        return False
    model.config, model.head.weight = config, model.embed.weight
    return True


@command
def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    out: Path = options.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder")
    model = load_hf(
        options.folder, ignore_keys=tuple(options.ignore_key), drop_mtp=options.drop_mtp
    )
    untied = says_tied(options.folder) and not model.config.tie_word_embeddings
    tied = tie(model)
    folder = tokenizer_folder(options.folder)
    tokenizer = None if folder is None else read_tokenizer(folder)
    checkpoint = save_weights(model, out, tokenizer)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{checkpoint}: {model.config.family}, {count:,} parameters, "
        f"{'with' if tokenizer else 'without'} tokenizer"
    )
    left_out = sorted(read_generation_config(options.folder).keys() - KEPT_GENERATION)
    if left_out:
        print(f"left out of generation_config.json: {', '.join(left_out)}")
    if tied:
        print("lm_head equals the embedding bit for bit: tied again (tie_word_embeddings: true)")
    if untied:
        print(
            f"tie_word_embeddings is true there: untied, as other engines load a tied "
            f"{model.config.family} wrongly; lm_head starts as a copy of the embedding"
        )
    print(f"continue with: python train.py CONFIG run.name=NAME model.init_from={out}", end="")
    print(" data.tokenizer=null" if tokenizer else "")  # the weights' own, whatever CONFIG says
    return 0


if __name__ == "__main__":
    sys.exit(main())
