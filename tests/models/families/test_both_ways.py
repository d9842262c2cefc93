"""Folders of the families both ways: what transformers writes is read and written back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from torch import Tensor

import train
from models.hf import export_hf, load_hf, tensor_files
from models.hf.check import check_export
from scripts import export_hf as export_script
from scripts import import_hf as import_script
from tests.models.tiny import (
    DENSE_FAMILIES,
    randomise_buffers_and_norms,
    tiny_config,
    transformers_model,
)
from tests.training.test_train import before_step
from tests.training.tiny import write_inputs
from training.checkpoint.files import resolve
from training.checkpoint.tensors import read_weights
from training.checkpoint.weights import load_model
from training.report.files import read_metrics

FAMILIES = (*DENSE_FAMILIES, "qwen2_moe", "flex_olmo")
STEPS, STOP = 12, 6
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def stored(folder: Path) -> dict[str, Tensor]:
    found = {}
    for name, file in tensor_files(folder).items():
        with safe_open(file, framework="pt") as opened:
            found[name] = opened.get_tensor(name)
    return found


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_folders_of_transformers_go_both_ways(family: str, tied: bool, tmp_path: Path) -> None:
    """bfloat16, in shards; 64 greedy tokens of both from either folder."""
    config = tiny_config(
        family, tie_word_embeddings=tied, max_position_embeddings=128, eos_token_id=95
    )
    theirs = transformers_model(config)
    randomise_buffers_and_norms(theirs)
    theirs.lm_head.weight.data[95] = 0  # no text ends early
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    ours = load_hf(tmp_path / "theirs")
    assert ours.config == config
    export_hf(ours, tmp_path / "ours", dtype="bfloat16", max_shard_size="20KB")
    for folder in ("theirs", "ours"):
        assert (tmp_path / folder / "model.safetensors.index.json").is_file()
        receipt = check_export(ours, tmp_path / folder)
        assert receipt.passed, receipt
        assert receipt.tokens == receipt.equal_tokens == 64
    before, after = stored(tmp_path / "theirs"), stored(tmp_path / "ours")
    if tied:
        assert torch.equal(after.pop("lm_head.weight"), after["model.embed_tokens.weight"])
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("families"), count=14)


def words(family: str) -> list[str]:
    """The tiny run with another family, by what the quickstart's family has and it has not."""
    found = [f"model.family={family}", "model.intermediate_size=24"]
    if family in DENSE_FAMILIES:
        found += [f"model.{key}=null" for key in ("num_experts", "num_experts_per_tok")]
    if family == "qwen2_moe":
        return [*found, "model.shared_expert_intermediate_size=8"]
    return [*found, "model.moe_intermediate_size=null"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_is_resumed_exported_imported_and_continued(
    family: str, config: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)

    def start(name: str, *more: str) -> int:
        return train.main([str(config), f"run.name={name}", f"train.steps={STEPS}", *more])

    def losses(name: str) -> list[float]:
        return [line["loss"] for line in read_metrics(Path("runs") / name)]

    own = words(family)
    assert start("whole", *own) == 0
    with monkeypatch.context() as patch:
        before_step(patch, STOP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        assert start("parts", *own) == train.faults.STOPPED
    assert start("parts", *own) == 0
    whole = losses("whole")
    assert losses("parts") == whole and len(whole) == STEPS, "bit for bit"
    assert whole[-1] < whole[0]
    assert load_model("runs/whole").config.family == family

    # transformers 5 reads text of a qwen2 by the rules of Qwen's tokenizer, whatever it came with
    foreign = family == "qwen2"
    assert export_script.main(["runs/parts", "out", "--check"]) == foreign
    told = capsys.readouterr().out
    assert ("check passed" in told) != foreign
    problems = [line for line in told.splitlines() if line.startswith("PROBLEM")]
    assert all("AutoTokenizer (Qwen2Tokenizer) reads" in line for line in problems)
    assert import_script.main(["out", "imported"]) == 0
    before, after = (read_weights(resolve(Path(name))) for name in ("runs/parts", "imported"))
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]), name
    values = yaml.safe_load(config.read_text()) | {"model": {"init_from": "imported"}}
    Path("more.yaml").write_text(yaml.safe_dump(values))
    more = ["data.tokenizer=null", "train.steps=2", "optim.schedule.warmup_steps=0"]
    assert train.main(["more.yaml", "run.name=more", *more]) == 0
    assert losses("more")[0] < whole[0]
