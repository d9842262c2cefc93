#!/usr/bin/env python3
"""Continue a text with a model.

    python scripts/generate.py runs/try --prompt "Call me"
    python scripts/generate.py out/ --prompt "One" --prompt "Two" --temperature 0

The first argument is a checkpoint, a run folder or a Hugging Face folder. One prompt is printed as
it comes; several run as one batch and are printed when all have ended. Exit codes: 0 done, 2 a
mistake.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from models.errors import UserError
from models.generate import Sampling, generate
from scripts._command import bounded, command, make_parser
from training.checkpoint.weights import load_model, tokenizer_folder
from training.config.load import expand_home
from training.data.tokenizer import TextTokenizer, read_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("model", type=expand_home, help="checkpoint, run folder or Hugging Face folder")
    add("--prompt", action="append", help="text to continue; may be repeated")
    add("--max-new-tokens", type=bounded(least=1), default=128, help="default: %(default)s")
    add("--temperature", type=float, default=0.8, help="0: greedy; default: %(default)s")
    add("--top-k", type=int, help="sample from the k most likely tokens")
    add("--top-p", type=float, help="sample from the most likely tokens up to this probability")
    add("--seed", type=int, default=0, help="random seed; default: %(default)s")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--dtype", choices=DTYPES, help="default: bfloat16 on CUDA, float32 on the CPU")
    add("--tokenizer", type=expand_home, help="tokenizer folder, if the model's folder has none")
    return parser.parse_args(arguments)


@command
def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device=cuda, but PyTorch sees no CUDA device; allowed here: cpu")
    dtype = DTYPES[options.dtype or ("bfloat16" if device == "cuda" else "float32")]
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    folder = options.tokenizer or tokenizer_folder(options.model)
    if folder is None:
        raise UserError(f"{options.model} has no tokenizer; give --tokenizer FOLDER")
    tokenizer = read_tokenizer(folder)
    texts = options.prompt or [""]
    prompts = [tokenizer.prompt(text) for text in texts]
    model = load_model(options.model, device=device, dtype=dtype)
    ends = model.config.eos_token_ids or (tokenizer.eos_id,)
    last = max(map(len, prompts)) + options.max_new_tokens
    limit = model.config.max_position_embeddings
    if last > limit:
        print(
            f"note: --max-new-tokens={options.max_new_tokens} may reach position {last}; the model "
            f"is made for {limit} (max_position_embeddings), text beyond that gets worse",
            file=sys.stderr,
        )
    steps = generate(
        model, prompts, sampling, max_new_tokens=options.max_new_tokens, eos_token_ids=ends
    )
    if len(prompts) == 1:
        print(texts[0], end="", flush=True)
        for piece in stream(tokenizer, (step[0] for step in steps)):
            print(piece, end="", flush=True)
        print()
        return 0
    rows = zip(*steps, strict=True)
    for text, row in zip(texts, rows, strict=True):
        print(text + tokenizer.decode(token for token in row if token is not None), end="\n\n")
    return 0


def stream(tokenizer: TextTokenizer, tokens):
    """Pieces of text as tokens come; a character whose bytes are not all there yet waits."""
    ids: list[int] = []
    shown = ""
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text
    rest = tokenizer.decode(ids)[len(shown) :]
    if rest:
        yield rest


if __name__ == "__main__":
    sys.exit(main())
