"""Whole runs of train.py, in this process: what they leave, how they end, how they go on.

Every comparison of an interrupted with an uninterrupted run is of bits. (Runs that are killed, and
runs of several processes, are in tests/distributed.)
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

import train
from models.transformer import Decoder
from tests.training.conftest import STEPS
from training import health
from training.checkpoint.files import MANIFEST, damage, read_state
from training.checkpoint.tensors import read_weights
from training.optim.schedule import learning_rate
from training.report import log_step
from training.report.files import read_lines, read_metrics

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def whole(tiny_config, tmp_path_factory) -> Path:
    """Folder of a run that was never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert train.main([str(tiny_config), f"train.steps={STEPS}", "run.name=whole"]) == 0
    finally:
        os.chdir(before)
    return folder / "runs" / "whole"


def by_step(folder: Path, *keys: str) -> dict[int, tuple]:
    keys = keys or ("loss", "grad_norm", "lr", "tokens", "balance_loss", "max_violation")
    return {line["step"]: tuple(line[key] for key in keys) for line in read_metrics(folder)}


def events(folder: Path, kind: str) -> list[dict]:
    return [line for line in read_lines(folder / "events.jsonl") if line["event"] == kind]


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    return read_weights((folder / "checkpoints" / "latest").resolve())


def assert_same_run(folder: Path, whole: Path) -> None:
    assert by_step(folder) == by_step(whole)
    ours, theirs = final_weights(folder), final_weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def before_step(monkeypatch, number: int, action) -> None:
    """Call `action` in training step `number`, before its forward pass."""
    step = train.train_step

    def wrapped(*arguments, **keywords):
        if arguments[0].step == number:
            action(arguments[0].model, arguments[0].optimizer)
        return step(*arguments, **keywords)

    monkeypatch.setattr(train, "train_step", wrapped)


def break_loss(monkeypatch, steps: set[int], value: float) -> None:
    """Multiply the loss of these steps by `value`."""
    step, forward = train.train_step, Decoder.forward
    now = [0]

    def wrapped(*arguments, **keywords):
        now[0] = arguments[0].step
        result = step(*arguments, **keywords)
        now[0] = 0
        return result

    def broken(self, *arguments, **keywords):
        out = forward(self, *arguments, **keywords)
        if now[0] in steps and out.loss_sum is not None:
            out.loss_sum = out.loss_sum * value
        return out

    monkeypatch.setattr(train, "train_step", wrapped)
    monkeypatch.setattr(Decoder, "forward", broken)


# --- what a run leaves --------------------------------------------------------------------------


def test_run_folder_and_metric_names(whole):
    lines = read_metrics(whole)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    names = set(lines[-1])
    assert {
        *("step", "attempt", "loss", "lr", "router_lr", "grad_norm", "tokens", "top_k"),
        *("tokens_per_second", "time_left_s", "max_memory_gib", "balance_loss", "z_loss"),
        *("max_violation", "dead_experts", "router_entropy", "tile_waste", "skipped_steps"),
        *("layers/0/max_violation", "layers/1/balance_loss", "val_loss", "val_perplexity"),
    } <= names
    assert [line["step"] for line in lines if "val_loss" in line] == [4, 8, 12]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5, "it learns"
    assert lines[-1]["val_loss"] < lines[3]["val_loss"]
    assert 0.9 < lines[-1]["balance_loss"] < 1.5, "1 means balanced"
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == [
        *("latest", "step_00000006", "step_00000009", "step_00000012"),
    ]
    latest = (whole / "checkpoints" / "latest").resolve()
    assert latest.name == "step_00000012" and damage(latest) is None
    assert read_state(latest)["tokens"] == lines[-1]["tokens"]
    for name in ("config.yaml", "model/config.json", "tokenizer/tokenizer.json", MANIFEST):
        assert (latest / name).is_file(), name
    assert json.loads((latest / "model/config.json").read_text())["eos_token_id"] is not None
    (start,) = events(whole, "start")
    assert start["attempt"] == 0 and start["checkpoint"] is None
    assert [event["step"] for event in events(whole, "checkpoint")] == [3, 6, 9, 12]


def test_the_same_command_gives_the_same_bits(run, whole, tmp_path):
    assert run("run.name=again") == 0
    assert_same_run(tmp_path / "runs" / "again", whole)


def test_evaluation_and_saving_change_nothing(run, whole, tmp_path):
    """Without validation, without checkpoints but the last, and with saves that block."""
    assert run("run.name=plain", "eval.every_steps=null", "eval.rows=128") == 0
    keys = ("loss", "grad_norm", "lr", "tokens")
    plain = tmp_path / "runs" / "plain"
    assert by_step(plain, *keys) == by_step(whole, *keys)
    settings = ("checkpoint.async_save=false", "checkpoint.every_steps=1", "checkpoint.keep.last=1")
    sample = ("eval.sample.prompt=the whale", "eval.sample.tokens=5", "eval.every_steps=1")
    assert run("run.name=busy", *settings, *sample) == 0
    busy = tmp_path / "runs" / "busy"
    assert by_step(busy, *keys) == by_step(whole, *keys)
    assert [event["step"] for event in events(busy, "sample")] == list(range(1, STEPS + 1))
    assert all(isinstance(event["sample"], str) for event in events(busy, "sample"))


def test_plots_are_drawn_and_cannot_fail_the_run(run, tmp_path, monkeypatch, capsys):
    arguments = ("train.steps=2", "optim.schedule.warmup_steps=0", "eval.every_steps=null")
    arguments += ("eval.rows=128", "log.plots=true")
    assert run("run.name=drawn", *arguments) == 0
    assert (tmp_path / "runs/drawn/plots/loss.png").read_bytes()[1:4] == b"PNG"
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run("run.name=undrawn", *arguments) == 0
    assert "no plots" in capsys.readouterr().out


# --- stopping and going on ----------------------------------------------------------------------


@pytest.mark.parametrize("stop_at", [1, 5, 9, STEPS])
def test_sigterm_finishes_the_step_saves_and_resumes_exactly(
    run, whole, tmp_path, monkeypatch, stop_at
):
    with monkeypatch.context() as patch:
        before_step(patch, stop_at, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        code = run("run.name=stopped", "log.every_steps=5")
    folder = tmp_path / "runs" / "stopped"
    if stop_at == STEPS:
        assert code == 0, "it was the last step anyway"
    else:
        assert code == 75
        latest = (folder / "checkpoints" / "latest").resolve()
        assert read_state(latest)["step"] == stop_at, "the step under way is finished and saved"
        assert by_step(folder)[stop_at] == by_step(whole)[stop_at], "and logged"
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert run("run.name=stopped") == 0
        assert [event["attempt"] for event in events(folder, "start")] == [0, 1]
        expected = {step: row for step, row in by_step(whole).items() if step > stop_at}
        assert {s: row for s, row in by_step(folder).items() if s > stop_at} == expected
    ours, theirs = final_weights(folder), final_weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert run("run.name=stopped") == 0, "once more: nothing to do, and no harm"
    assert by_step(folder)[STEPS] == by_step(whole)[STEPS]


@pytest.mark.parametrize(
    "settings",
    [
        ("data.packing=false",),
        ("data.workers=2",),
        ("train.dtype=bfloat16", "optim.router.lr_multiplier=0.1"),
        ("train.checkpointing=full", "router.balance.kind=global", "train.micro_batch_size=1"),
        ("optim.spike_factor=3", "optim.schedule.kind=cosine"),
        ("router.top_k.kind=geometric", "router.top_k.start=4", "router.top_k.soft=true"),
        ("router.gradient.kind=default",),
        ("model.moe_expert_widths=[2,4,8,8]", "router.balance.load=flops"),
        (
            "router.selection.kind=sample",
            "router.selection.temperature=1",
            "router.selection.until=9",
        ),
    ],
    ids=lambda settings: settings[0],
)
def test_resume_is_exact_with(run, tmp_path, monkeypatch, settings):
    """Stopped in the middle of an epoch; the whole run gets into another one."""
    assert run("run.name=a", *settings) == 0
    for stop_at in (2, 7):
        with monkeypatch.context() as patch:
            before_step(patch, stop_at, lambda *_: os.kill(os.getpid(), signal.SIGINT))
            assert run("run.name=b", *settings) == 75
    assert run("run.name=b", *settings) == 0
    assert_same_run(tmp_path / "runs/b", tmp_path / "runs/a")
    state = read_state((tmp_path / "runs/a/checkpoints/latest").resolve())
    assert max(source["epoch"] for source in state["data"]["sources"].values()) >= 1
    if "router_lr_multiplier" in settings[-1]:
        for lr, router_lr in by_step(tmp_path / "runs/b", "lr", "router_lr").values():
            assert router_lr == pytest.approx(0.1 * lr)


def test_the_number_of_experts_falls_and_is_told(run, tmp_path):
    assert run("run.name=a", "router.top_k.kind=linear", "router.top_k.start=4") == 0
    lines = read_metrics(tmp_path / "runs/a")
    assert [line["top_k"] for line in lines] == [4, 4, 3, 3, 3, 2, 2, 2, 2, 2, 2, 2]
    # 4 → 2 over 6 steps: 4, 3.67, 3.33, 3, 2.67, 2.33, 2; validation at 4 is of K=2 and of K=3
    at_four = next(line for line in lines if line["step"] == 4)
    assert at_four["val_loss_current_k"] != at_four["val_loss"]
    assert not any("val_loss_current_k" in line for line in lines if line["step"] > 6)
    texts = [event["text"] for event in events(tmp_path / "runs/a", "router_change")]
    assert [text.split(":")[0] for text in texts] == ["step 3", "step 6"]
    assert "each token uses 3 experts from now on, no longer 4" in texts[0]


def test_lasting_faults_of_routing_are_told_once_and_resume_exactly(run, tmp_path, monkeypatch):
    monkeypatch.setattr(health, "ALARM_VIOLATION", -1.0)  # every load is uneven
    monkeypatch.setattr(health, "ALARM_STEPS", 5)
    monkeypatch.setattr(log_step, "LOAD_LINES", 4)
    assert run("run.name=a") == 0
    folder = tmp_path / "runs/a"
    told = events(folder, "routing_alarm")
    assert [(line["fault"], line["layers"], line["step"]) for line in told] == [
        ("max_violation", [0, 1], 5)
    ]
    with monkeypatch.context() as patch:
        patch.setattr(health, "EARLY_STEPS", 7)
        assert run("run.name=late") == 0
    told = events(tmp_path / "runs/late", "routing_alarm")
    steps = [(line["step"], line["early"]) for line in told]
    assert steps == [(5, True), (7, False)]
    loads = read_metrics(folder, "load.jsonl")
    assert [line["step"] for line in loads] == [1, 4, 7, 10, 12]
    for line in loads:
        assert [len(row) for row in line["load"]] == [4, 4]
        assert all(sum(row) == pytest.approx(4, abs=0.01) for row in line["load"])
    worst = max(max(row) for row in loads[-1]["load"]) - 1
    assert by_step(folder, "max_violation")[12][0] == pytest.approx(worst, abs=2e-3)

    with monkeypatch.context() as patch:
        before_step(patch, 4, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        assert run("run.name=b") == 75
    assert not events(tmp_path / "runs/b", "routing_alarm")
    assert run("run.name=b") == 0  # the counters went on from the checkpoint
    assert [line["step"] for line in events(tmp_path / "runs/b", "routing_alarm")] == [5]


def test_a_calibrated_start_changes_the_bias_and_not_the_data(run, tmp_path, monkeypatch):
    glm = ("model.family=glm4_moe", "model.first_k_dense_replace=0", "train.steps=4")
    seen = {}

    def look(name):
        def action(model, _):
            seen[name] = torch.stack([layer.moe.router.selection_bias for layer in model.layers])

        return action

    for name, words in (("a", ()), ("b", ("router.bias={kind: quantile, calibrate: true}",))):
        with monkeypatch.context() as patch:
            before_step(patch, 1, look(name))
            assert run(f"run.name={name}", *glm, *words) == 0
    assert not seen["a"].any()
    assert seen["b"].abs().sum(1).min() > 0
    ours, plain = tmp_path / "runs/b", tmp_path / "runs/a"
    assert by_step(ours, "tokens") == by_step(plain, "tokens")
    assert by_step(ours, "max_violation")[1] < by_step(plain, "max_violation")[1]
    assert len(events(ours, "bias_calibrated")) == 1


def test_learning_rates_are_a_function_of_the_step_also_after_stops(run, tmp_path, monkeypatch):
    from training.config.build import load_config

    settings = ("optim.schedule.kind=cosine", "optim.schedule.warmup_steps=6")
    for stop_at in range(1, STEPS, 2):
        with monkeypatch.context() as patch:
            before_step(patch, stop_at, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
            assert run("run.name=often", *settings) == 75
    assert run("run.name=often", *settings) == 0
    config = load_config(tmp_path / "runs/often/config.yaml")
    expected = {s: (learning_rate(config.optim, s - 1, STEPS),) for s in range(1, STEPS + 1)}
    assert by_step(tmp_path / "runs/often", "lr") == expected


def test_attempts_stay_apart(run, tmp_path, monkeypatch):
    """Crash after step 8, last checkpoint at 6: steps 7 and 8 are there twice, each named."""

    def crash(*_):
        raise RuntimeError("pulled the plug")

    with monkeypatch.context() as patch:
        before_step(patch, 9, crash)
        assert run("run.name=twice") == 1
    assert run("run.name=twice") == 0
    folder = tmp_path / "runs/twice"
    lines = [(line["attempt"], line["step"]) for line in read_lines(folder / "metrics.jsonl")]
    assert lines == [(0, s) for s in range(1, 9)] + [(1, s) for s in range(7, STEPS + 1)]
    kept = [(line["attempt"], line["step"]) for line in read_metrics(folder)]
    assert kept == [(0, s) for s in range(1, 7)] + [(1, s) for s in range(7, STEPS + 1)]


def test_damaged_checkpoints_are_named_and_passed_over(run, whole, tmp_path, capsys):
    folder = tmp_path / "runs" / "damaged"
    shutil.copytree(whole, folder, symlinks=True)
    newest = folder / "checkpoints" / "step_00000012"
    data = next(newest.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-100])
    (folder / "checkpoints" / "step_00000009" / MANIFEST).unlink()
    assert run("run.name=damaged") == 0
    told = [event["text"] for event in events(folder, "checkpoint_passed_over")]
    assert len(told) == 2 and "step_00000012" in told[0] and data.name in told[0]
    assert "step_00000009" in told[1] and MANIFEST in told[1]
    assert "resuming from" in capsys.readouterr().out
    assert_same_run(folder, whole)
    assert damage(newest) is None, "replaced by a whole one"


def test_settings_that_may_and_may_not_change(run, whole, tmp_path, capsys):
    folder = tmp_path / "runs" / "changed"
    shutil.copytree(whole, folder, symlinks=True)
    before = (folder / "config.yaml").read_text()
    assert run("run.name=changed", "model.hidden_size=32", "run.seed=7") == 2
    error = capsys.readouterr().err
    assert "run.seed: 0 → 7; model.hidden_size: 16 → 32" in error and error.count("\n") == 1
    assert run("run.name=changed", "optim.kind=muon") == 2
    assert "optim.kind: 'adamw' → 'muon'" in capsys.readouterr().err
    assert run("run.name=changed", "data.packing=false") == 2
    assert "data.packing=False, but the checkpoint was made with True" in capsys.readouterr().err
    assert run("run.name=changed", "run.resume=never") == 2
    assert "run.resume='never'" in capsys.readouterr().err
    assert (folder / "config.yaml").read_text() == before, "a refused start leaves everything"
    longer = ("train.steps=14", "optim.lr=0.001", "log.every_steps=2", "train.micro_batch_size=4")
    assert run("run.name=changed", *longer) == 0
    (event,) = events(folder, "settings_changed")
    assert "optim.lr: 0.01 → 0.001" in event["text"] and "train.steps: 12 → 14" in event["text"]
    assert [line["step"] for line in read_metrics(folder)][-1] == 14


def test_one_process_at_a_time(run, tmp_path, capsys, monkeypatch):
    import fcntl

    monkeypatch.setattr("training.run.LOCK_WAIT_S", 0.3)
    (tmp_path / "runs/taken").mkdir(parents=True)
    with open(tmp_path / "runs/taken/.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert run("run.name=taken") == 2
    assert "another process is training in runs/taken" in capsys.readouterr().err


def test_the_readers_of_a_killed_run_are_waited_for(run, tmp_path):
    import fcntl

    (tmp_path / "runs/freed").mkdir(parents=True)
    held = open(tmp_path / "runs/freed/.lock", "w")  # noqa: SIM115
    fcntl.flock(held, fcntl.LOCK_EX)
    timer = threading.Timer(1.0, held.close)
    timer.start()
    assert run("run.name=freed") == 0
    timer.join()


# --- bad steps ----------------------------------------------------------------------------------


def test_a_step_that_is_not_finite_is_skipped_and_told(run, tmp_path, monkeypatch, capsys):
    break_loss(monkeypatch, {5}, float("nan"))
    assert run("run.name=nan", "log.every_steps=4") == 0
    folder = tmp_path / "runs/nan"
    (event,) = events(folder, "step_skipped")
    assert event["step"] == 5 and event["reason"] == "not finite" and event["loss"] == "nan"
    assert len(event["rows"]) == 4 and all(len(row) == 3 for row in event["rows"])
    assert event["sources"] == ["text"]
    assert read_metrics(folder)[-1]["skipped_steps"] == 1
    assert "step 5 was skipped (not finite)" in capsys.readouterr().out
    assert all(torch.isfinite(w).all() for w in final_weights(folder).values())
    lr = by_step(folder, "lr")
    assert lr[12][0] < lr[8][0], "the schedule went on"


def test_a_skipped_step_leaves_weights_and_moments_alone(run, tmp_path, monkeypatch):
    """Checkpoints right before and right after a skipped step hold the same tensors."""
    break_loss(monkeypatch, {6}, float("inf"))
    settings = ("checkpoint.every_steps=1", "checkpoint.keep.last=null", "train.steps=7")
    assert run("run.name=inf", *settings) == 0
    from training.checkpoint.tensors import load_tensors, stored_tensors

    root = tmp_path / "runs/inf/checkpoints"
    states = []
    for step in (5, 6, 7):
        folder = root / f"step_0000000{step}"
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in stored_tensors(folder).items()
        }
        load_tensors(folder, tensors)
        states.append(tensors)
    assert states[1].pop("guard/skipped") == 1
    for name, tensor in states[1].items():
        assert torch.equal(tensor, states[0][name]), name
    assert states[2]["updates"] == 6
    assert not torch.equal(states[2]["weights/embed.weight"], states[1]["weights/embed.weight"])


def test_the_end_of_the_time_saves_and_stops(run, tmp_path, capsys):
    words = ("run.name=lent", "train.steps=2", "checkpoint.every_steps=null")
    assert run(*words, "checkpoint.stop_after_hours=1e-9") == 75
    assert "stopped on request after step 0" in capsys.readouterr().out
    assert run(*words, "checkpoint.stop_after_hours=9") == 0
    assert [line["step"] for line in read_metrics(tmp_path / "runs/lent")] == [1, 2]


def test_stop_policy(run, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        break_loss(patch, {5}, float("nan"))
        assert run("run.name=stop", "optim.on_nonfinite=stop", "log.every_steps=4") == 1
    folder = tmp_path / "runs/stop"
    error = capsys.readouterr().err
    assert "step 5 are not finite" in error and error.count("\n") == 1
    assert [event["step"] for event in events(folder, "step_skipped")] == [5, 6]
    latest = (folder / "checkpoints/latest").resolve()
    assert latest.name == "step_00000003", "no checkpoint beyond the bad batch"
    assert run("run.name=stop", "optim.on_nonfinite=stop") == 0, "with the fault gone it goes on"


def test_weights_that_are_not_finite_are_never_saved(run, tmp_path, monkeypatch, capsys):
    def poison(_, optimizer):
        optimizer.flats[0].master.data[3] = float("nan")

    with monkeypatch.context() as patch:
        before_step(patch, 8, poison)
        assert run("run.name=poison", "checkpoint.keep.last=1") == 1
    assert "not finite at step 9" in capsys.readouterr().err
    latest = (tmp_path / "runs/poison/checkpoints/latest").resolve()
    assert latest.name == "step_00000006" and damage(latest) is None
    assert run("run.name=poison", "checkpoint.keep.last=1") == 0


def test_a_step_without_any_target_is_left_out(run, whole, tmp_path, monkeypatch, capsys):
    import dataclasses

    agree = train.agree_on_step
    calls = [0]

    def without(*arguments):
        calls[0] += 1
        totals = agree(*arguments)
        return dataclasses.replace(totals, targets=0) if calls[0] == 4 else totals

    monkeypatch.setattr(train, "agree_on_step", without)
    assert run("run.name=empty") == 0
    folder = tmp_path / "runs/empty"
    assert [event["step"] for event in events(folder, "step_empty")] == [4]
    assert "step 4 has no targets at all" in capsys.readouterr().out
    lines = {line["step"]: line for line in read_metrics(folder)}
    assert lines[3]["loss"] == by_step(whole, "loss")[3][0]
    assert lines[12]["loss"] != by_step(whole, "loss")[12][0]
    assert "loss" not in lines[4] and "val_loss" in lines[4], "the validation of step 4 took place"


def test_out_of_memory_says_how_routing_is_spread(run, monkeypatch, capsys):
    def one_expert(model, _):
        for layer in model.layers:
            layer.moe.router.weight.data.zero_()  # of equal logits the first expert wins

    def broken(self, *arguments, **keywords):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")

    before_step(monkeypatch, 2, one_expert)
    before_step(monkeypatch, 3, lambda *_: monkeypatch.setattr(Decoder, "forward", broken))
    one = ("model.num_experts_per_tok=1", "model.norm_topk_prob=false")
    assert run("run.name=memory", *one) == 1
    error = capsys.readouterr().err
    for part in (
        "out of memory on process 0 at step 3: CUDA out of memory. Tried to allocate 3.00 GiB.",
        "Tokens per expert of the last micro-batch: max 64 (MoE layer 0, expert 0), mean 16",
        "max_violation 3.00; routing is skewed, so a larger router.balance.coef",
        "train.micro_batch_size (now 2)",
        "train.checkpointing=full",
        "data.seq_len",
    ):
        assert part in error, (part, error)
    assert error.count("\n") == 1


# --- checkpoints that cannot be written ---------------------------------------------------------


def test_a_failed_save_is_told_and_the_run_goes_on(run, tmp_path, monkeypatch, capsys):
    import training.checkpoint.saver

    save = training.checkpoint.saver.dcp.save
    calls = [0]

    def full_once(*arguments, **keywords):
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(28, "No space left on device")
        save(*arguments, **keywords)

    monkeypatch.setattr(training.checkpoint.saver.dcp, "save", full_once)
    assert run("run.name=full") == 0
    folder = tmp_path / "runs/full"
    (event,) = events(folder, "checkpoint_failed")
    assert event["step"] == 6 and "no space to write checkpoint step_00000006" in event["text"]
    assert [event["step"] for event in events(folder, "checkpoint")] == [3, 9, 12]


@pytest.mark.parametrize("background", ["true", "false"])  # false: it has failed before the end
def test_e16_a_run_that_cannot_save_its_end_fails(run, tmp_path, capsys, background):
    folder = tmp_path / "runs/blocked"
    folder.mkdir(parents=True)
    (tmp_path / "runs/blocked/checkpoints").write_text("in the way")
    assert run("run.name=blocked", f"checkpoint.async_save={background}") == 1
    printed = capsys.readouterr()
    assert "the last checkpoint could not be saved" in printed.err
    assert printed.err.count("\n") == 1
    why = "checkpoint step_00000012 could not be written"
    assert (printed.out + printed.err).count(why) == 1, "told once"
    assert "earlier checkpoints" not in printed.err, "there are none"
    assert any(why in event["text"] for event in events(folder, "checkpoint_failed"))
    assert len(read_metrics(tmp_path / "runs/blocked")) == STEPS, "but it trained to the end"


# --- the command line ---------------------------------------------------------------------------


def test_exit_codes_of_mistakes(run, tiny_config, tmp_path, capsys, monkeypatch):
    for arguments, message in (
        (["no_such.yaml"], "no_such.yaml does not exist"),
        (["--steps", "4"], "--steps is no option"),
        ([str(tiny_config), "optim.lrr=1"], "did you mean optim.lr"),
        ([str(tiny_config), "model.vocab_size=100"], "model.vocab_size=100 is too small"),
        ([str(tiny_config), "data.sources.0.path=nowhere.txt"], "nowhere.txt"),
    ):
        assert train.main(arguments) == 2, arguments
        captured = capsys.readouterr()
        assert message in captured.err and captured.err.count("\n") == 1, captured.err
        assert "Traceback" not in captured.err
    assert train.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "Exit codes" in out and "\noptim       kinds adamw, muon\n" in out
    assert train.main(["--help", "optim.lrr"]) == 2
    assert capsys.readouterr().err == (
        "error: there is no setting optim.lrr; did you mean optim.lr?\n"
    )
    assert train.main(["--version"]) == 0
    assert f"\ntorch {torch.__version__}\n" in capsys.readouterr().out
    monkeypatch.setattr(train, "train_step", lambda *_, **__: 1 / 0)
    assert run("run.name=bug") == 1
    assert "ZeroDivisionError" in capsys.readouterr().err, "a bug shows its traceback"


def test_epochs(run, tmp_path, capsys):
    arguments = ("train.steps=null", "train.epochs=1.5", "optim.schedule.warmup_steps=1")
    assert run("run.name=epochs", *arguments) == 0
    state = read_state((tmp_path / "runs/epochs/checkpoints/latest").resolve())
    (source,) = state["data"]["sources"].values()
    assert source["epoch"] == 1, "in the second epoch"
    assert run("run.name=short", *arguments, "optim.schedule.warmup_steps=1000") == 0
    assert "optim.schedule.warmup_steps=1000 is not below their number" in capsys.readouterr().out
