#!/usr/bin/env python3
"""Run every row of the table of engines (models/engines.py) in the engines that are installed.

    pip install 'tessera-moe[interop]'                           # llama.cpp and mistral.rs
    python scripts/check_engines.py
    python scripts/check_engines.py --engine vLLM=A/bin/python --engine transformers=B/bin/python

For each row a small model with random weights is exported, and its greedy text is compared with
transformers' of this environment: tokens and log-probabilities, or the text where an engine tells
no tokens. Each engine runs in a process of its own, in another environment where one is named.
Exit codes: 0 every verdict is as the table says, 1 one is not, 2 a mistake.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import string
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from models.build import build_model
from models.config import ModelConfig
from models.engines import ENGINES, Feature, rows
from models.errors import UserError
from models.families import FAMILIES
from models.first_weights import FirstWeights
from models.hf import export_hf
from scripts._command import bounded, command, make_parser
from scripts.to_gguf import convert
from training.config.load import expand_home
from training.data.tokenizer import train_tokenizer

NEW_TOKENS = 32
PROMPT = "the white whale"
LARGEST = 1e-2
"""Difference of a log-probability in fp32; llama.cpp's own products differ by up to 3e-3."""
FEWEST = 12
"""Tokens that a verdict needs."""
MODULES = {"transformers": "transformers", "vLLM": "vllm", "llama.cpp": "xllamacpp"}
MODULES |= {"mistral.rs": "mistralrs"}
BASE: dict[str, Any] = {
    "vocab_size": 288, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 64, "num_experts": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 128, "initializer_range": 0.1,
}  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """What one engine made of one folder."""

    kind: str
    """yes, wrong or no, as `models.engines.Verdict.kind`."""
    version: str = ""
    detail: str = ""


def small_config(family: str, feature: Feature) -> ModelConfig:
    """A small model of the family with the feature."""
    usual = FAMILIES[family].engine_rows[0].example
    base = {key: value for key, value in BASE.items() if key in FAMILIES[family].model_fields}
    return ModelConfig(**{"family": family, **base, **usual, **feature.example})


def write_folder(family: str, feature: Feature, folder: Path, seed: int) -> ModelConfig:
    """A small random model with the feature, and a tokenizer."""
    tokenizer = train_tokenizer(["the white whale and the old ship at sea"], 288)
    config = small_config(family, feature)
    model = build_model(config, seed=seed, first=FirstWeights(embedding=0.2))
    generator = torch.Generator().manual_seed(seed)
    printable = set(string.ascii_letters + string.digits + string.punctuation + "Ġ")
    vocabulary = tokenizer.backend.get_vocab()
    with torch.no_grad():
        named = [*model.named_parameters(), *model.named_buffers()]
        for name, tensor in named:
            if name.endswith(("norm.weight", "bias")):  # away from 1 and 0, which hide mistakes
                tensor.add_(0.5 * torch.rand(tensor.shape, generator=generator) - 0.25)
        # Logits of 0 for tokens that are no plain text: greedy text then tells the tokens.
        plain = {id_ for token, id_ in vocabulary.items() if set(token) <= printable}
        plain -= {id_ for token, id_ in vocabulary.items() if token.startswith("<")}
        others = [row for row in range(config.vocab_size) if row not in plain]
        model.head.weight.mul_(4)  # clear winners
        model.head.weight[others] = 0
    export_hf(model, folder / "model", tokenizer=tokenizer)
    return config


def run_engine(engine: str, python: str, folder: Path, timeout: int) -> dict[str, Any]:
    """The runner's answer, or {"error": its last words}."""
    model = folder
    if engine == "llama.cpp":
        model = folder.with_suffix(".gguf")
        try:
            convert(folder, model)
        except UserError as error:
            return {"error": str(error)[:120]}
    runner = Path(__file__).resolve().parent / "_engines.py"
    words = [python, str(runner), engine, str(model), str(NEW_TOKENS), PROMPT]
    environment = dict(os.environ)
    if python != sys.executable:
        environment.pop("PYTHONPATH", None)  # packages of this environment
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=timeout, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {timeout} s"}
    if done.returncode == 0:
        return json.loads(done.stdout.strip().splitlines()[-1])
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "error:" in line]
    return {"error": (telling or lines or [f"exit code {done.returncode}"])[-1][:120]}


def clear_tokens(reference: dict[str, Any]) -> int:
    """How many tokens there are before the first near tie."""
    margins = reference["margins"]
    return next((i for i, margin in enumerate(margins) if margin <= LARGEST), len(margins))


def compare(reference: dict[str, Any], found: dict[str, Any]) -> Seen:
    """Verdict on what an engine answered, up to the first token that rounding could change."""
    if "error" in found:
        return Seen("no", detail=found["error"])
    count, expected = clear_tokens(reference), reference["tokens"]
    if "tokens" not in found:
        text = found["text"].strip()
        equal = text.startswith("".join(reference["words"][:count]).strip())
        detail = f"{'the same' if equal else 'another'} text of {count} tokens"
        return Seen("yes" if equal else "wrong", found["version"], detail)
    pairs = list(zip(expected, found["tokens"]))[:count]
    equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    logprobs = zip(reference["logprobs"][:equal], found["logprobs"][:equal])
    worst = max((abs(a - b) for a, b in logprobs), default=float("nan"))
    same = equal == count and worst <= LARGEST
    detail = f"{equal} of {count} tokens, log-probabilities differ by {worst:.0e}"
    return Seen("yes" if same else "wrong", found["version"], detail)


def check(
    family: str, feature: Feature, engines: dict[str, str], timeout: int = 300
) -> dict[str, Seen]:
    """What each engine (name: Python) makes of a feature's model."""
    with tempfile.TemporaryDirectory() as place:
        for seed in range(1, 11):
            write_folder(family, feature, Path(place) / str(seed), seed)
            folder = Path(place) / str(seed) / "model"
            reference = run_engine("transformers", sys.executable, folder, timeout)
            if "error" in reference:
                raise RuntimeError(f"transformers does not load it: {reference['error']}")
            if clear_tokens(reference) >= FEWEST:
                break
        else:
            raise RuntimeError(f"ten models end in near ties before token {FEWEST}")
        return {
            engine: compare(reference, run_engine(engine, python, folder, timeout))
            for engine, python in engines.items()
        }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add(
        "--engine",
        action="append",
        metavar="NAME[=PYTHON]",
        help=f"{', '.join(MODULES)}; default: those of this environment",
    )
    add("--only", default="", help="only rows whose family and setting contain this text")
    add("--timeout", type=bounded(least=1), default=300, help="seconds per run; default: 300")
    return parser.parse_args(arguments)


def installed() -> list[str]:
    """Engines of this environment, apart from transformers."""
    return [name for name in ENGINES if importlib.util.find_spec(MODULES[name]) is not None]


@command
def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    engines: dict[str, str] = {}
    for given in options.engine or installed():
        name, _, python = given.partition("=")
        if name not in MODULES:
            raise UserError(f"--engine {name} is unknown; allowed: {', '.join(MODULES)}")
        program = shutil.which(expand_home(python or sys.executable))
        if program is None:
            raise UserError(f"--engine {given}: there is no program {python}")
        engines[name] = program
    if not engines:
        raise UserError("no engine is installed: pip install 'tessera-moe[interop]'")
    differ, versions = 0, {}
    named = {f"{row[0]} {row[1].name}".strip(): row for row in rows()}
    chosen = {name: row for name, row in named.items() if options.only in name}
    if not chosen:
        raise UserError(f"--only {options.only!r}: no row of the table holds that")
    for name, (family, feature) in chosen.items():
        for engine, seen in check(family, feature, engines, options.timeout).items():
            expected = feature.verdict(engine).kind  # of transformers: yes
            mark = "" if seen.kind == expected else f"   <-- the table says {expected}"
            differ += bool(mark)
            versions[engine] = seen.version or versions.get(engine, "")
            print(f"{name:50} {engine:12} {seen.kind:6} {seen.detail}{mark}", flush=True)
    print(", ".join(f"{engine} {version}" for engine, version in versions.items()))
    print("every verdict is as the table says" if not differ else f"{differ} verdicts differ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
