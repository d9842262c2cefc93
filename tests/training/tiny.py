"""A run so small that a test can afford many: a text, a tokenizer and a config in one folder."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import yaml

from training.data.tokenizer import train_tokenizer

MODEL = {
    "family": "qwen3_moe",
    "vocab_size": 288,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "max_position_embeddings": 32,
}
# Overrides that make it a dense model.
DENSE = (
    "model.family=qwen3",
    "model.intermediate_size=16",
    "model.num_experts=null",
    "model.num_experts_per_tok=null",
    "model.moe_intermediate_size=null",
)
WORDS = tuple("the a whale ship sea captain sailor white old deep cold wind rope saw lost".split())  # noqa: SIM905


def documents(count: int, seed: int = 0) -> list[str]:
    """Texts of 5 to 60 words."""
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) for _ in range(draw.randint(5, 60))) for _ in range(count)]


def write_inputs(folder: Path, count: int = 60) -> Path:
    """Text, tokenizer and config.yaml in `folder`; the config's path. Runs go to the working
    folder."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = documents(count)
    (folder / "text.txt").write_text("\n".join(texts))
    (folder / "validation.txt").write_text("\n".join(documents(12, seed=1)))
    train_tokenizer(texts, 288).save(folder / "tokenizer")
    config: dict[str, Any] = {
        "run": {"device": "cpu"},
        "model": MODEL,
        "data": {
            "sources": [{"path": str(folder / "text.txt"), "format": "lines", "name": "text"}],
            "validation": {
                "kind": "sources",
                "sources": [
                    {"path": str(folder / "validation.txt"), "format": "lines", "name": "held-out"}
                ],
            },
            "tokenizer": str(folder / "tokenizer"),
            "seq_len": 32,
            "cache_dir": str(folder / "cache"),
            "tokenize_workers": 1,
        },
        "optim": {"lr": 0.01, "schedule": {"warmup_steps": 3}},
        "train": {"steps": 8, "global_batch_size": 4, "micro_batch_size": 2},
        "checkpoint": {"every_steps": 3},
        "eval": {"every_steps": 4, "rows": 4},
        "log": {"every_steps": 1, "plots": False},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
