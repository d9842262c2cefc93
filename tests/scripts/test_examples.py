"""Every example config and every arm of the sweeps, made small: train a little, export, and get the
same logits in transformers as in our evaluation mode; or be refused, by the name of the setting."""

from pathlib import Path

import pytest
import torch
import yaml

import train
from tests.training.tiny import write_inputs
from training.checkpoint.weights import load_model

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


HEADS = {
    "deepseek_v3": (
        "model.q_lora_rank=8", "model.kv_lora_rank=8", "model.qk_nope_head_dim=8",
        "model.qk_rope_head_dim=4", "model.v_head_dim=8",
    ),
}  # fmt: skip
"""Of families whose heads have other fields."""


def small(config: Path, folder: Path) -> list[str]:
    """Words that make a model and a run small, and leave family, routing and schedules alone."""
    given = yaml.safe_load(config.read_text())
    inner = "intermediate_size"
    own = given["model"]
    if own.get("family") in ("qwen3_moe", "glm4_moe"):
        inner = "moe_intermediate_size"
    more = []
    if "experts" in given:  # the same changes, in fewer steps
        more = [
            "experts.policy.every=2",
            "experts.policy.cooldown=1",
            "experts.policy.min_experts=4",
        ]
        for number in range(len(given["experts"]["events"])):
            more.append(f"experts.events.{number}.step={2 * number + 1}")
    widths = own.get("moe_expert_widths")
    most = widths and max(widths)
    return [
        *more,
        *([] if widths is None else [f"model.moe_expert_widths={[8 * w // most for w in widths]}"]),
        "model.vocab_size=288",
        "model.hidden_size=16",
        "model.num_hidden_layers=2",
        "model.num_attention_heads=2",
        *HEADS.get(own["family"], ("model.num_key_value_heads=1", "model.head_dim=8")),
        "model.eos_token_id=null",
        "model.pad_token_id=null",
        f"model.{inner}=8",
        *(["model.first_k_dense_replace=0"] if "first_k_dense_replace" in own else []),
        "model.max_position_embeddings=32",
        f"data.sources=[{{path: {folder}/text.txt, format: lines, name: text}}]",
        f"data.tokenizer={folder}/tokenizer",
        "data.seq_len=32",
        "data.workers=0",
        "data.validation={kind: sources, sources: "
        f"[{{path: {folder}/validation.txt, format: lines}}]}}",
        f"data.cache_dir={folder}/cache",
        "optim.schedule.warmup_steps=2",
        "train.epochs=null",
        "train.steps=6",
        "train.global_batch_size=2",
        "train.micro_batch_size=2",
        "train.compile=false",
        "run.device=cpu",
        "checkpoint.every_steps=null",
        "checkpoint.keep.last=3",
        "eval.every_steps=6",
        "eval.rows=8",
        "eval.sample=null",
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
    monkeypatch.chdir(tmp_path)
    assert train.main([str(config), *small(config, inputs), "run.name=example"]) == 0
    latest = tmp_path / "runs" / "example" / "checkpoints" / "latest"
    assert script("export_hf").main([str(latest), str(tmp_path / "hf")]) == 0
    compare(latest.resolve(), tmp_path / "hf")


def compare(checkpoint: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    ours = load_model(checkpoint).eval()
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.randint(0, 288, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = ours(tokens, logits=True).logits.float()
        torch.testing.assert_close(theirs(tokens).logits, logits, rtol=1e-4, atol=1e-5)


def arms() -> dict[str, tuple[Path, tuple[str, ...]]]:
    """Name → base config and words; the first of those that set the same keys."""
    found = {}
    for path in sorted((ROOT / "configs" / "ablations").glob("*.yaml")):
        sweep = yaml.safe_load(path.read_text())
        for arm, own in sweep["arms"].items():
            words = (*sweep.get("settings", ()), *own)
            keys = frozenset(word.partition("=")[0] for word in words)
            found.setdefault((path.parent / sweep["base"], keys), (f"{path.stem}: {arm}", words))
    return {name: (base, words) for (base, _), (name, words) in found.items()}


ARMS = arms()


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_trains_and_is_exported_or_refused(arm, inputs, script, tmp_path, capsys):
    """In evaluation mode, whatever the arm does while training."""
    base, words = ARMS[arm]
    # rounding in micro-batches of 64 tokens: the same mean tiles for each of the 32 experts
    tiles = [
        f"router.rounding.tile={int(word.partition('=')[2]) * 64 // 8192}"
        for word in words
        if word.startswith("router.rounding.tile")
    ]
    early = {}  # what happens at certain steps happens within three
    if any(word.startswith("router.selection.until") for word in words):
        early["router.selection.until"] = 2
    if any(word.startswith("train.sparsity") for word in words):
        early = {"train.sparsity.start": 1, "train.sparsity.every": 1, "train.sparsity.end": 1}
        early |= {"train.sparsity.until": 2, "train.sparsity.block": 4}
    given_steps = [f"{key}={step}" for key, step in early.items()]
    steps = 20 if "router.top_k.kind=geometric" in words else 3
    here = [f"run.dir={tmp_path}", "run.name=arm", f"train.steps={steps}", "eval.every_steps=null"]
    given = [*small(base, inputs), *words, *tiles, *given_steps, *here, "eval.rows=128"]
    assert train.main([str(base), *given]) == 0
    latest, target = tmp_path / "arm" / "checkpoints" / "latest", tmp_path / "hf"
    capsys.readouterr()
    if "router.exportable=false" not in words:
        assert script("export_hf").main([str(latest), str(target)]) == 0
        compare(latest.resolve(), target)
        return
    with pytest.raises(SystemExit) as ended:
        script("export_hf").main([str(latest), str(target)])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    keys = [word.partition("=")[0] for word in words if word != "router.exportable=false"]
    options = {key.removesuffix(".kind") for key in keys}
    assert any(f"({option})" in told for option in options), told
    assert not target.exists()
