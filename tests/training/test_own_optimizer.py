"""A run with an optimizer of one's own: named in the config, trained, saved and resumed."""

import json

import pytest

from tests.distributed.test_own_optimizer import Lion
from training.checkpoint.files import resolve
from training.checkpoint.tensors import stored_tensors
from training.config.build import ConfigError, load_config
from training.config.sections import OPTIMIZERS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def losses(folder) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_an_optimizer_of_ones_own_is_named_in_the_config(run, tmp_path, monkeypatch, tiny_config):
    with pytest.raises(ConfigError, match=r"optim.kind='lion' is unknown"):
        load_config(tiny_config, ["optim.kind=lion"])
    monkeypatch.setitem(OPTIMIZERS, "lion", Lion)
    words = ("optim.kind=lion", "optim.lr=0.001", "optim.schedule.kind=constant")
    words += ("optim.warmup_steps=0", "train.steps=20")
    assert run("run.name=whole", *words) == 0
    assert run("run.name=cut", *words, "checkpoint.every_steps=7", "train.steps=14") == 0
    assert run("run.name=cut", *words) == 0
    whole, cut = losses(tmp_path / "runs/whole"), losses(tmp_path / "runs/cut")
    assert whole[20] < whole[1]
    folder = resolve(tmp_path / "runs/cut")
    kinds = {name.partition("/")[0] for name in stored_tensors(folder)}
    assert "momentum" in kinds and "exp_avg" not in kinds
    assert cut == whole, "bit for bit"
