"""Rules of somebody's own, entered into the tables from this file: they train, are saved, resume,
and are exported or refused by what they say of an export."""

import os
import signal
from collections.abc import Sequence
from typing import ClassVar, Literal

import pytest
import torch
from torch import Tensor

import train
from moe.config import BALANCES, BIASES, NOISES, SELECTIONS
from moe.rules.base import RouterView, Rule, RuleSettings
from moe.rules.bias import BiasRule, BiasSettings, moved
from moe.types import Form, RouterStats
from scripts import export_hf
from tests.training.test_train import before_step
from training.checkpoint.tensors import read_weights
from training.config.build import load_config
from training.config.load import ConfigError
from training.report.files import read_metrics


class Spread(RuleSettings):
    """A balance loss: the largest share of the mean probabilities, over 1 / E."""

    kind: Literal["spread"] = "spread"
    coef: float = 0.05

    def build(self, form: Form, device=None) -> Rule:
        return _Spread(self, form, device)


class _Spread(Rule):
    @classmethod
    def losses(cls, rules: Sequence[Rule], stats: RouterStats, load_LE: Tensor | None) -> Tensor:
        share_LE = stats.prob_sum_E / stats.prob_sum_E.sum(dim=1, keepdim=True).clamp(min=1e-9)
        return share_LE.amax(dim=1) * stats.counts_E.shape[1]


class Push(BiasSettings):
    """A bias that moves in proportion to the load."""

    kind: Literal["push"] = "push"
    rate: float = 0.01

    def build(self, form: Form, device=None) -> Rule:
        return _Push(self, form, device)


class _Push(BiasRule):
    @classmethod
    def next_bias(cls, rules: Sequence[Rule], bias_LE: Tensor, stats: RouterStats) -> Tensor:
        share_LE = stats.counts_E.double() / stats.counts_E.sum(dim=1, keepdim=True).clamp(min=1)
        return moved(bias_LE, -rules[0].settings.rate * share_LE, stats)


class Shift(RuleSettings):
    """A selection that turns away from the experts of the last steps; evaluation does too."""

    export: ClassVar[str] = "never"
    lacks: ClassVar[str] = "memory of the last steps"
    kind: Literal["shift"] = "shift"

    def build(self, form: Form, device=None) -> Rule:
        return _Shift(self, form, device)


class _Shift(Rule):
    def __init__(self, settings: Shift, form: Form, device=None) -> None:
        super().__init__(settings, form, device)
        self.add_state("recent_E", (form.experts,), device)

    def selection(
        self, router: RouterView, x_TD: Tensor, select_TE: Tensor, valid_T: Tensor | None
    ) -> Tensor:
        return select_TE - self.recent_E

    def after_step(
        self, router: RouterView, stats: RouterStats, step: int, applied: Tensor | None
    ) -> None:
        share_E = stats.counts_E / stats.counts_E.sum().clamp(min=1)
        self.recent_E.mul_(0.5).add_(share_E)


class Blur(RuleSettings):
    """Noise on the router's input that is gone in evaluation."""

    kind: Literal["blur"] = "blur"

    def build(self, form: Form, device=None) -> Rule:
        return _Blur(self, form, device)


class _Blur(Rule):
    draws = True

    def input(self, x_TD: Tensor) -> Tensor:
        return x_TD.float() + 0.1 * torch.randn_like(x_TD.float()) if self.training else x_TD


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(BALANCES, "spread", Spread)
    monkeypatch.setitem(BIASES, "push", Push)
    monkeypatch.setitem(SELECTIONS, "shift", Shift)
    monkeypatch.setitem(NOISES, "blur", Blur)


ALL = [
    "router.balance.kind=spread", "router.bias.kind=push", "router.selection.kind=shift",
    "router.noise.kind=blur", "router.exportable=false",
]  # fmt: skip


def test_they_train_are_saved_and_resume(tiny_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [str(tiny_config), *ALL, "checkpoint.every_steps=3", "checkpoint.async_save=false"]
    assert train.main([*words, "train.steps=6", "run.name=whole"]) == 0
    lines = read_metrics(tmp_path / "runs" / "whole")
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[0]["balance_loss"] > 1.0, "the largest share of the probabilities"
    kept = read_weights((tmp_path / "runs/whole/checkpoints/latest").resolve())
    bias_E = kept["layers.0.moe.router.selection_bias"]
    recent_E = kept["layers.0.moe.router.rules.selection.recent_E"]
    assert bias_E.abs().max() > 0 and abs(bias_E.sum().item()) < 1e-6
    assert recent_E.sum() == pytest.approx(2 * (1 - 0.5**6), rel=1e-4)

    plain = [word for word in words if word not in ALL]
    assert train.main([*plain, "train.steps=6", "run.name=plain"]) == 0
    assert lines[-1]["loss"] != read_metrics(tmp_path / "runs" / "plain")[-1]["loss"]

    with monkeypatch.context() as patch:
        before_step(patch, 4, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        assert train.main([*words, "train.steps=6", "run.name=parts"]) == 75
    assert train.main([*words, "train.steps=6", "run.name=parts"]) == 0
    again = read_metrics(tmp_path / "runs" / "parts")
    assert [line["loss"] for line in again][-3:] == [line["loss"] for line in lines][-3:]


def test_what_they_say_of_an_export_counts(tiny_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for word, told in (
        ("router.selection.kind=shift", "qwen3_moe has no memory of the last steps; allowed only"),
        ("router.bias.kind=push", "qwen3_moe has no selection bias. Give router.end_steps"),
    ):
        with pytest.raises(ConfigError, match=told):
            load_config(tiny_config, [word])
    words = ["router.balance.kind=spread", "router.noise.kind=blur", "router.bias.kind=push"]
    words += ["router.end_steps=2", "train.steps=6", "run.name=out"]
    assert train.main([str(tiny_config), *words]) == 0
    assert export_hf.main(["runs/out", "out", "--check"]) == 0


def test_a_mistake_in_them_is_told_as_of_any_other(tiny_config):
    with pytest.raises(ConfigError, match=r"router\.bias\.kind='pusch'.*push"):
        load_config(tiny_config, ["router.bias.kind=pusch"])
    with pytest.raises(ConfigError, match=r"router\.bias\.rat"):
        load_config(tiny_config, ["router.bias.kind=push", "router.bias.rat=1"])
