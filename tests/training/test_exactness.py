"""What cannot be exported is refused by name, or ends in time; the end of a run is checked."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest

import train
from scripts import export_hf as script
from tests.training.tiny import DENSE
from training import assemble, probe
from training.checkpoint.weights import load_model
from training.config.build import ConfigError, load_config, make_plan
from training.config.export_compat import acting

GLM = ["model.family=glm4_moe", "model.first_k_dense_replace=0"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("router.bias.kind=sign", "kind=sign cannot be exported: qwen3_moe has no selection bias"),
        (
            "router.selection.kind=ema router.selection.decay=0.9",
            "router.selection.kind=ema cannot be exported: qwen3_moe has no selection by",
        ),
        (
            "router.score=sigmoid",
            "router.score=sigmoid cannot be exported: qwen3_moe has no other",
        ),
        ("router.score=sigmoid router.end_steps=2", "allowed only with router.exportable=false"),
        ("router.capacity.factor=1.25", "has no limit on the tokens of an expert. Give router.end"),
        (
            "router.selection.kind=ema router.selection.decay=0.9 router.end_steps=4",
            "must be less than half of the run's 8 steps",
        ),
    ],
)
def test_refusals(tiny_config, words, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(load_config(tiny_config, words.split()), cuda=False)


def test_what_a_family_has_needs_no_end(tiny_config):
    config = load_config(tiny_config, [*GLM, "router.bias.kind=sign"])
    assert acting(config, 8, 8) == []
    with pytest.raises(
        ConfigError, match=r"router\.selection\.kind=ema cannot be exported: glm4_moe has no"
    ):
        load_config(tiny_config, [*GLM, "router.selection.kind=ema", "router.selection.decay=0.5"])


def events(folder, kind):
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == kind]


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_ends_as_what_is_exported(tiny_config, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    knobs = [
        "router.selection.kind=ema",
        "router.selection.decay=0.5",
        "router.bias.kind=quantile",
        "router.capacity.factor=1.2",
    ]
    knobs += [
        "router.noise.kind=dropout",
        "router.noise.probability=0.1",
        "router.freeze_at=8",
    ]
    knobs += ["router.end_steps=2"]
    words = [*knobs, "run.name=ends", "train.steps=8", "checkpoint.every_steps=4"]
    assert train.main([str(tiny_config), *words]) == 0
    folder = tmp_path / "runs" / "ends"
    changes = events(folder, "router_change")
    assert [line["step"] for line in changes] == [5, 7, 7, 7, 8]
    losses = {line["step"]: line["loss"] for line in metrics(folder)}
    assert all(line["loss"] == losses[line["step"]] for line in changes)
    assert events(folder, "export_check")[-1]["exact"] is True
    early, last = folder / "checkpoints" / "step_00000004", folder / "checkpoints" / "latest"
    with pytest.raises(ValueError, match=r"selection bias .* and selection by averaged router"):
        load_model(early)
    assert script.main([str(last), str(tmp_path / "out"), "--check"]) == 0
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        script.main([str(early), str(tmp_path / "other")])
    assert ended.value.code == 2
    assert "router.end_steps" in capsys.readouterr().err


def test_the_bias_of_a_family_that_has_one_is_exported(tiny_config, monkeypatch, tmp_path):
    """glm4_moe by its defaults: quantile balancing, and transformers' logits with the bias."""
    monkeypatch.chdir(tmp_path)
    assert train.main([str(tiny_config), *GLM, "run.name=glm", "train.steps=4"]) == 0
    folder = tmp_path / "runs" / "glm"
    assert events(folder, "export_check")[-1]["exact"] is True
    assert load_model(folder).layers[0].moe.router.selection_bias.abs().max() > 0
    assert metrics(folder)[-1]["balance_loss"] > 0.9
    assert script.main([str(folder), str(tmp_path / "out"), "--check"]) == 0


def test_a_model_that_routes_otherwise_than_its_export_is_found(tiny_config, monkeypatch, tmp_path):
    """Without the switch at the end, the check must fail."""
    monkeypatch.chdir(tmp_path)
    real = assemble.router_options

    def forgetful(*arguments):
        found = real(*arguments)
        return found | {"router": found["router"].model_copy(update={"end_steps": None})}

    monkeypatch.setattr(assemble, "router_options", forgetful)
    words = ["router.bias.kind=sign", "router.bias.rate=0.5", "router.end_steps=1"]
    assert train.main([str(tiny_config), *words, "run.name=forgets", "train.steps=5"]) == 1
    assert events(tmp_path / "runs" / "forgets", "export_check")[-1]["exact"] is False


def test_runs_that_are_not_to_be_exported_say_so(tiny_config, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    words = [
        "router.selection.kind=ema",
        "router.selection.decay=0.5",
        "router.exportable=false",
        "run.name=never",
        "train.steps=4",
    ]
    assert train.main([str(tiny_config), *words]) == 0
    # which load the balance loss follows stands in the log
    told = capsys.readouterr().out
    assert "balance loss: weight 0.01, compared with the load of the whole step" in told
    folder = tmp_path / "runs" / "never"
    assert events(folder, "export_check")[-1]["exact"] is False
    with pytest.raises(ValueError, match=r"router\.selection"):
        load_model(folder)
    churn = [line["routing_churn"] for line in metrics(folder)]
    assert all(0 <= value <= 1 for value in churn)
    assert max(churn) > 0


def test_a_bias_that_acts_is_not_dropped_from_initial_weights(
    tiny_config, monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    words = [str(tiny_config), "train.steps=4", "eval.every_steps=null", "eval.rows=128"]
    bias = ["router.bias.kind=sign", "router.exportable=false"]
    assert train.main([*words, *bias, "run.name=biased"]) == 0
    words.append("model.init_from=runs/biased")
    assert train.main([*words, "run.name=without"]) == 2
    assert "was trained with selection bias (router.bias)" in capsys.readouterr().err
    assert train.main([*words, *bias, "run.name=with"]) == 0


@pytest.mark.parametrize(
    ("knobs", "lost"),
    [
        (["router.bias.kind=quantile"], r"selection bias (router.bias)"),
        (
            ["router.selection.kind=ema", "router.selection.decay=0.9"],
            "averaged router weights (router.selection)",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_run_does_not_go_on_without_what_its_model_computes_with(
    tiny_config, monkeypatch, tmp_path, capsys, knobs, lost
):
    monkeypatch.chdir(tmp_path)
    words = [str(tiny_config), "eval.every_steps=null", "eval.rows=128"]
    assert train.main([*words, *knobs, "router.exportable=false", "train.steps=4"]) == 0
    capsys.readouterr()
    assert train.main([*words, "train.steps=5"]) == 2
    assert lost in capsys.readouterr().err
    assert train.main([*words, *knobs, "router.end_steps=2", "train.steps=7"]) == 0
    assert train.main([*words, "train.steps=8"]) == 0


def test_statistics_that_the_model_does_not_compute_with_may_go(tiny_config, monkeypatch, tmp_path):
    """The mean outputs serve the gradient alone, the last load the loss; the bias stays."""
    monkeypatch.chdir(tmp_path)
    words = [str(tiny_config), "router.bias.kind=sign", "router.exportable=false"]
    words.append("router.balance.coef=0.01")
    more = ["router.gradient.kind=default", "router.balance.kind=lagged"]
    assert train.main([*words, *more, "train.steps=4"]) == 0
    assert train.main([*words, "train.steps=5"]) == 0


def test_resume_lands_on_the_same_state_bit_for_bit(tiny_config, monkeypatch, tmp_path):
    """Bias, averaged weights, last load and the probe's churn go on as if never stopped."""
    monkeypatch.chdir(tmp_path)
    knobs = [
        "router.selection.kind=ema",
        "router.selection.decay=0.5",
        "router.bias.kind=sign",
        "router.balance.kind=lagged",
    ]
    knobs += ["router.balance.coef=0.05", "router.end_steps=3", "checkpoint.every_steps=3"]
    words = [str(tiny_config), *knobs, "train.steps=9", "checkpoint.async_save=false"]
    assert train.main([*words, "run.name=whole"]) == 0
    real = train.train_step

    def stop_after_three(*arguments, **keywords):
        if arguments[0].step == 5:
            raise RuntimeError("a fault")
        return real(*arguments, **keywords)

    monkeypatch.setattr(train, "train_step", stop_after_three)
    assert train.main([*words, "run.name=parts"]) == 1
    monkeypatch.setattr(train, "train_step", real)
    assert train.main([*words, "run.name=parts"]) == 0

    def lines(name):
        table = {}
        for line in metrics(tmp_path / "runs" / name):
            table[line["step"]] = {
                key: value for key, value in line.items()
                if key not in ("attempt", "time", "tokens_per_second", "time_left_s", "mfu",
                               "max_memory_gib")
            }  # fmt: skip
        return table

    whole, parts = lines("whole"), lines("parts")
    assert whole.keys() == parts.keys()
    for step in whole:
        assert whole[step] == parts[step], step


def test_c6_a_dense_model_is_compared_and_a_start_with_nothing_to_do_says_it_was_not(run, tmp_path):
    words = ("run.name=dense", *DENSE)
    assert run(*words) == 0
    folder = tmp_path / "runs" / "dense"
    assert [line["exact"] for line in events(folder, "export_check")] == [True]
    words = ("run.name=bare", "data.validation=null", "eval.every_steps=null")
    assert run(*words) == 0
    assert run(*words) == 0  # at its last step already: no rows to compare
    compared, not_compared = events(tmp_path / "runs" / "bare", "export_check")
    assert compared["exact"] is True
    assert not_compared["exact"] is None and "was not compared" in not_compared["text"]


def test_c6_the_comparison_of_a_dense_model_can_fail(run, tmp_path, monkeypatch):
    real = probe.exported

    @contextmanager
    def other_head(model, selection_bias):
        with real(model, selection_bias):
            model.head.weight.data.mul_(2)
            yield

    monkeypatch.setattr(probe, "exported", other_head)
    words = ("run.name=dense", *DENSE)
    assert run(*words) == 1
    assert [e["exact"] for e in events(tmp_path / "runs" / "dense", "export_check")] == [False]
