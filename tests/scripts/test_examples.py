"""Every example config, made small: train a little, export, and get the same logits in
transformers as in our evaluation mode."""

from pathlib import Path

import pytest
import torch
import yaml

import train
from tests.training.tiny import write_inputs
from training.weights import load_model

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def small(config: Path, folder: Path) -> list[str]:
    """Words that make a model and a run small, and leave family, routing and schedules alone."""
    given = yaml.safe_load(config.read_text())
    inner = "intermediate_size"
    own = given["model"]
    if own.get("family") in ("qwen3_moe", "glm4_moe"):
        inner = "moe_intermediate_size"
    return [
        "model.vocab_size=288",
        "model.hidden_size=16",
        "model.num_hidden_layers=2",
        "model.num_attention_heads=2",
        "model.num_key_value_heads=1",
        "model.head_dim=8",
        "model.eos_token_id=null",
        "model.pad_token_id=null",
        f"model.{inner}=8",
        "model.max_position_embeddings=32",
        f"data.sources=[{{path: {folder}/text.txt, format: lines, name: text}}]",
        f"data.tokenizer={folder}/tokenizer",
        "data.tokenizer_vocab_size=null",
        "data.seq_len=32",
        "data.workers=0",
        "data.validation_fraction=0",
        f"data.validation_sources=[{{path: {folder}/validation.txt, format: lines}}]",
        f"data.cache_dir={folder}/cache",
        "optim.warmup_steps=2",
        "train.steps=6",
        "train.global_batch_size=2",
        "train.micro_batch_size=2",
        "train.compile=false",
        "run.device=cpu",
        "checkpoint.every_steps=null",
        "checkpoint.keep_last=3",
        "eval.every_steps=6",
        "eval.batches=1",
        "eval.sample_prompt=null",
        "eval.sample_tokens=64",
        "log.plots=false",
        "log.every_steps=6",
    ]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_an_example_trains_exports_and_loads(config, inputs, script, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    assert train.main([str(config), *small(config, inputs), "run.name=example"]) == 0
    latest = tmp_path / "runs" / "example" / "checkpoints" / "latest"
    assert script("export_hf").main([str(latest), str(tmp_path / "hf")]) == 0

    ours = load_model(latest.resolve()).eval()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    tokens = torch.randint(0, 288, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = ours(tokens, logits=True).logits.float()
        torch.testing.assert_close(theirs(tokens).logits, logits, rtol=1e-4, atol=1e-5)
