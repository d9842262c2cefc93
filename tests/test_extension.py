"""The ideas of docs/extending.md: each trains, resumes with the same bits, and is exported or
refused by name, and no file of the packages knows it."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from torch import Tensor

import train
from models.hf import load_hf
from moe.kernels.common.activations import ACTIVATIONS
from scripts import export_hf
from tests import ideas
from tests.training.test_train import before_step
from tests.training.tiny import write_inputs
from training.checkpoint.files import resolve
from training.checkpoint.tensors import load_tensors, read_weights, stored_tensors
from training.checkpoint.weights import load_model
from training.config.build import ConfigError, load_config
from training.report.files import read_metrics

STEPS, STOP = 20, 10
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _balances(folder: Path) -> None:
    values = [line["balance_loss"] for line in read_metrics(folder)]
    assert min(values) > 1.0, "the largest share is above the mean"


def _bias_moved(folder: Path) -> None:
    bias_E = read_weights(resolve(folder))["layers.0.moe.router.selection_bias"]
    assert bias_E.abs().max() > 0 and abs(bias_E.sum().item()) < 1e-6


def _loads_remembered(folder: Path) -> None:
    recent_E = read_weights(resolve(folder))["layers.1.moe.router.rules.selection.recent_E"]
    assert recent_E.sum() == pytest.approx(2 * (1 - 0.5**STOP), rel=1e-4)


def _has_noise(folder: Path) -> None:
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert written["router"]["noise"] == {"kind": "blur", "size": 0.1}


def _has_the_activation(folder: Path) -> None:
    name = load_model(folder).layers[1].moe.config.activation
    x = torch.linspace(-5, 5, 101, dtype=torch.float64, requires_grad=True)
    value, slope = ACTIVATIONS[name].with_slope(x)
    torch.testing.assert_close(value, F.mish(x))
    torch.testing.assert_close(slope, torch.autograd.grad(F.mish(x).sum(), x)[0])


def _has_the_limit(folder: Path) -> None:
    assert load_model(folder).layers[1].attn.clip == 0.5


def _has_momentum_alone(folder: Path) -> None:
    stored = stored_tensors(resolve(folder))
    kinds = {name.partition("/")[0] for name in stored}
    assert "momentum" in kinds and "exp_avg" not in kinds
    name = "momentum/layers.0.moe.router.weight"
    momentum = torch.zeros(stored[name].size)
    load_tensors(resolve(folder), {name: momentum})
    assert momentum.abs().max() > 0


@dataclass(frozen=True)
class Idea:
    words: tuple[str, ...]
    """Overrides of the config, the first of which names it."""
    acted: Callable[[Path], None]
    """Whether a run that was stopped at step `STOP` shows that it acts."""
    unknown: str
    """What is told where no table has it."""
    export: str = "exact"
    """What an export makes of it: exact in transformers, exact here (no transformers knows the
    family), or refused."""
    without: tuple[str, ...] = ()
    """Overrides of the run that it is compared with."""


IDEAS = {
    "A balance loss": Idea(
        ("router.balance.kind=spread",),
        _balances,
        "router.balance.kind='spread' is unknown",
        without=("router.balance=null",),
    ),
    "A selection bias": Idea(
        ("router.bias.kind=push", "router.end_steps=4"),
        _bias_moved,
        "router.bias.kind='push' is unknown",
        without=("router.balance=null",),
    ),
    "A selection": Idea(
        ("router.selection.kind=shift", "router.exportable=false"),
        _loads_remembered,
        "router.selection.kind='shift' is unknown",
        export="refused",
    ),
    "Noise": Idea(("router.noise.kind=blur",), _has_noise, "router.noise.kind='blur' is unknown"),
    "An activation": Idea(
        ("model.hidden_act=mish",), _has_the_activation, "hidden_act='mish' is not supported"
    ),
    "A family": Idea(
        ("model.family=toy", "model.qkv_limit=0.5"),
        _has_the_limit,
        "family='toy' must be one of",
        export="here",
    ),
    "An optimizer": Idea(
        ("optim.kind=lion", "optim.lr=0.001"),
        _has_momentum_alone,
        "optim.kind='lion' is unknown",
        without=("optim.lr=0.001",),
    ),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("extension"), count=14)


@pytest.fixture(autouse=True)
def _no_traces(monkeypatch, tmp_path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with ideas.tables_restored():
        yield


def start(config: Path, name: str, *words: str) -> int:
    return train.main([str(config), f"run.name={name}", f"train.steps={STEPS}", *words])


def losses(name: str) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_metrics(Path("runs") / name)}


def weights(name: str) -> dict[str, Tensor]:
    return read_weights(resolve(Path("runs") / name))


def refused(capsys, told: str, *arguments: str) -> None:
    """An export that ends with one line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        export_hf.main([*arguments])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_the_page_has_these_ideas_and_the_file_that_they_go_into() -> None:
    assert list(ideas.blocks()) == ["The file", *IDEAS]


@pytest.mark.parametrize("heading", IDEAS)
def test_it_is_short_and_known_from_its_file_alone(heading, config, tmp_path) -> None:
    idea = IDEAS[heading]
    words = [*idea.words, f"train.steps={STEPS}"]
    with pytest.raises(ConfigError) as caught:
        load_config(config, words)
    assert idea.unknown in str(caught.value)
    module = ideas.load(heading, tmp_path)
    assert len(inspect.getsource(module).splitlines()) < 40
    load_config(config, words)


@pytest.mark.parametrize("heading", IDEAS)
def test_it_trains_resumes_and_is_exported(heading, config, tmp_path, monkeypatch, capsys) -> None:
    idea = IDEAS[heading]
    assert start(config, "without", *idea.without) == 0
    ideas.load(heading, tmp_path)
    assert start(config, "whole", *idea.words) == 0
    with monkeypatch.context() as patch:
        before_step(patch, STOP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        assert start(config, "parts", *idea.words) == train.faults.STOPPED
    assert list(losses("parts")) == list(range(1, STOP + 1))
    idea.acted(Path("runs/parts"))
    assert start(config, "parts", *idea.words) == 0

    whole, parts = losses("whole"), losses("parts")
    assert list(whole) == list(range(1, STEPS + 1)) and whole[STEPS] < whole[1]
    assert parts == whole, "bit for bit"
    kept = weights("parts")
    for name, tensor in weights("whole").items():
        assert torch.equal(tensor, kept[name]), name
    without = losses("without")
    assert sum(without[step] != whole[step] for step in whole) > STEPS // 2

    if idea.export == "exact":
        assert export_hf.main(["runs/parts", "out", "--check"]) == 0
    elif idea.export == "refused":
        told = "was trained with memory of the last steps (router.selection)"
        refused(capsys, told, "runs/parts", "out")
    else:
        assert export_hf.main(["runs/parts", "out"]) == 0
        back = load_hf(tmp_path / "out")
        trained = load_model(tmp_path / "runs/parts")
        stored = load_file(tmp_path / "out/model.safetensors")
        assert {"transformer.wte.weight", "transformer.h.1.ffn.3.down.weight"} <= stored.keys()
        up = trained.layers[1].moe.w1[2, 1::2]
        assert torch.equal(stored["transformer.h.1.ffn.2.up.weight"], up)
        assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "toy"
        assert back.config == trained.config
        for name, parameter in trained.named_parameters():
            assert torch.equal(parameter, back.get_parameter(name)), name


def test_a_rule_without_words_for_an_export_must_end_or_give_it_up(config, tmp_path) -> None:
    for heading, word, told in (
        ("A selection", "router.selection.kind=shift", "no memory of the last steps; allowed only"),
        ("A selection bias", "router.bias.kind=push", "no selection bias. Give router.end_steps"),
    ):
        ideas.load(heading, tmp_path)
        with pytest.raises(ConfigError, match=f"qwen3_moe has {told}"):
            load_config(config, [word])


def test_a_mistake_in_its_settings_is_told_as_of_any_other(config, tmp_path) -> None:
    ideas.load("A selection bias", tmp_path)
    for word, told in (("kind=pusch", r"router\.bias\.kind='pusch'.*push"), ("rat=1", "rate")):
        with pytest.raises(ConfigError, match=told):
            load_config(config, ["router.bias.kind=push", f"router.bias.{word}"])


def test_all_of_them_in_one_file_that_is_started_in_place_of_train(config, tmp_path) -> None:
    frame = ideas.blocks()["The file"]
    place = "# one or more of the blocks below\n"
    assert frame.count(place) == 1
    code = frame.replace(place, "\n".join(ideas.blocks()[heading] for heading in IDEAS))
    (tmp_path / "my_ideas.py").write_text(code, encoding="utf-8")
    words = [word for idea in IDEAS.values() for word in idea.words if "end_steps" not in word]
    environment = os.environ | {"PYTHONPATH": str(ideas.PAGE.parents[1])}
    done = subprocess.run(
        [sys.executable, "my_ideas.py", str(config), "run.name=all", "train.steps=6", *words],
        capture_output=True, text=True, check=False, env=environment, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = losses("all")
    assert list(found) == list(range(1, 7)) and found[6] < found[1]
    written = yaml.safe_load((tmp_path / "runs/all/config.yaml").read_text())
    kinds = [written["router"][key]["kind"] for key in ("balance", "bias", "selection", "noise")]
    assert [*kinds, written["optim"]["kind"]] == ["spread", "push", "shift", "blur", "lion"]
    assert (written["model"]["family"], written["model"]["hidden_act"]) == ("toy", "mish")
