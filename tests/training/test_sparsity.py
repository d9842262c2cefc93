"""Masks of the experts' weights in training: exact shares, what is hidden, resume, exports."""

from __future__ import annotations

import os
import shutil
import signal

import pytest
import torch

import train
from models.build import build_model, parameter_kinds
from models.config import ModelConfig
from moe.sparse.dynamic import MaskSchedule
from parallel import World
from parallel.engines.local import LocalEngine
from tests.engines import local_engine
from tests.training.test_loop import batch_of, router, rows, state_of
from tests.training.tiny import MODEL
from training.checkpoint.tensors import stored_tensors
from training.checkpoint.weights import load_model
from training.config.build import ConfigError, load_config, make_plan
from training.config.export_compat import acting
from training.config.validate import check_run
from training.optim.groups import parameter_groups
from training.optim.muon import Muon
from training.report.files import read_lines
from training.sparsity import Sparsity
from training.step import agree_on_step, end_step, train_step

W1 = "layers.0.moe.w1"
SOFT = ["train.sparsity.density=0.25", "train.sparsity.every=2", "train.sparsity.until=6"]
HARD = [*SOFT, "train.sparsity.kind=regrow"]


def make(dtype=torch.float32, muon=False, **schedule):
    config = ModelConfig(**MODEL, initializer_range=0.3)
    model = build_model(config, seed=1, dtype=dtype, router=router(balance=0.1))
    groups = parameter_groups(model, parameter_kinds(model), weight_decay=0.1, by_matrix=muon)
    optimizer = local_engine(groups, clip_norm=1.0)
    if muon:
        optimizer = LocalEngine(model, groups, Muon(), num_terms=3)
    good = {"density": 0.25, "every": 3, "start": 2, "end": 2, "until": 8}
    return model, optimizer, Sparsity(model, optimizer, MaskSchedule(**{**good, **schedule}))


def step_once(model, optimizer, sparsity, step):
    batches = [batch_of(*rows())]
    state = state_of(model, optimizer, step=step, followers=[sparsity])
    totals = agree_on_step(World(), batches, False)
    result = train_step(state, batches, totals)
    end_step(state, totals)
    return result


def run(steps, **schedule):
    """(weights, moments, mask) of one matrix after each step."""
    model, optimizer, sparsity = make(**schedule)
    sparsity.prepare_step(1)
    state = optimizer.states(W1)[0]
    seen = []
    for step in range(1, steps + 1):
        step_once(model, optimizer, sparsity, step)
        held = optimizer.tensors()
        seen.append(
            {
                "weights": held[f"weights/{W1}"].view_as(sparsity.weights[W1]).clone(),
                "moments": held[f"{state}/{W1}"].view_as(sparsity.weights[W1]).clone(),
                "mask": sparsity.masks[W1].entries(sparsity.weights[W1]).clone(),
                "computed": model.layers[0].moe.weights()[0].detach().clone(),
                "density": sparsity.metrics()["weight_density"].item(),
            }
        )
    return seen


@pytest.mark.parametrize("method", ["straight_through", "regrow"])
@pytest.mark.parametrize("block", [1, 4])
def test_every_matrix_keeps_an_exact_share(method, block):
    seen = run(9, method=method, block=block)
    assert seen[0]["density"] == 1.0
    for step in (2, 5, 8, 9):
        kept_E = seen[step - 1]["mask"].sum((1, 2))
        assert (kept_E == round(0.25 * seen[0]["mask"][0].numel())).all(), step
        assert seen[step - 1]["density"] == pytest.approx(0.25)
    assert not torch.equal(seen[1]["mask"], seen[7]["mask"]), "masks follow the weights"


def test_straight_through_learns_behind_the_mask_until_it_ends():
    seen = run(10)
    at = {step: seen[step - 1] for step in range(1, 11)}
    hidden = ~at[3]["mask"]
    assert at[3]["weights"][hidden].all(), "hidden weights are not lost"
    moved = at[4]["weights"][hidden] != at[3]["weights"][hidden]
    assert moved.float().mean() > 0.9
    for step in range(3, 11):  # what is computed with is the mask's part, all along
        want = torch.where(at[step]["mask"], at[step]["weights"], 0.0)
        assert torch.equal(at[step]["computed"], want), step
    for step in range(8, 11):  # the last mask was made after step 8
        assert not at[step]["weights"][~at[step]["mask"]].any()
        assert not at[step]["moments"][~at[step]["mask"]].any()
        assert torch.equal(at[step]["mask"], at[8]["mask"])
    assert not torch.equal(at[9]["weights"], at[8]["weights"])


@pytest.mark.parametrize("muon", [False, True])
def test_regrowth_hides_for_good_and_starts_anew(muon):
    """Muon moves all weights of a matrix, also those without gradient."""
    seen = run(9, method="regrow", regrow=0.5, muon=muon)
    for step in range(2, 10):
        now = seen[step - 1]
        assert not now["weights"][~now["mask"]].any()
        assert not now["moments"][~now["mask"]].any()
        assert torch.equal(now["computed"], now["weights"])
    new = seen[4]["mask"] & ~seen[3]["mask"]
    assert new.any()
    assert not seen[4]["weights"][new].any()
    assert seen[5]["weights"][new].any()


def test_the_norm_leaves_hidden_gradients_out():
    norms = {}
    for hide in (False, True):
        model, optimizer, sparsity = make(method="regrow", start=1, end=1, density=0.1)
        sparsity.prepare_step(1)
        step_once(model, optimizer, sparsity, 1)
        if not hide:
            sparsity.hard = lambda step: False
        outcome = step_once(model, optimizer, sparsity, 2)
        experts = next(i for i, g in enumerate(optimizer.groups) if g.name == "experts")
        norms[hide] = optimizer.group_norms[experts].item()
        assert outcome is not None
    assert norms[True] < 0.9 * norms[False]


def test_a_skipped_step_changes_no_mask():
    model, optimizer, sparsity = make(method="regrow")
    sparsity.prepare_step(1)
    for step in range(1, 5):
        step_once(model, optimizer, sparsity, step)
    before = {name: mask.keep.clone() for name, mask in sparsity.masks.items()}
    model.layers[0].moe.w1.register_hook(lambda gradient: gradient * float("nan"))
    step_once(model, optimizer, sparsity, 5)  # a mask is due
    assert int(optimizer.guard.skipped) == 1
    assert all(torch.equal(before[name], mask.keep) for name, mask in sparsity.masks.items())


@pytest.mark.parametrize("method", ["regrow", "straight_through"])
def test_the_last_mask_is_made_though_its_step_is_skipped(method):
    model, optimizer, sparsity = make(method=method, start=2, end=2, until=2)
    sparsity.prepare_step(1)
    step_once(model, optimizer, sparsity, 1)
    model.layers[0].moe.w1.register_hook(lambda gradient: gradient * float("nan"))
    step_once(model, optimizer, sparsity, 2)  # the only mask
    assert int(optimizer.guard.skipped) == 1
    weight = optimizer.tensors()[f"weights/{W1}"].view(sparsity.weights[W1].shape)
    kept = sparsity.masks[W1].entries(weight)
    assert kept.float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert torch.equal(weight != 0, kept)


def test_masks_that_would_never_come_are_refused(tiny_config, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main([str(tiny_config), "run.name=a"]) == 0
    capsys.readouterr()
    more = ["train.steps=12", "train.sparsity.density=0.25", "train.sparsity.every=2"]
    arguments = [str(tiny_config), "run.name=a", *more]
    assert train.main([*arguments, "train.sparsity.until=6"]) == 2
    assert "give a train.sparsity.until above 8" in capsys.readouterr().err
    assert train.main([*arguments, "train.sparsity.until=10"]) == 0


def test_bfloat16_weights_follow_their_masters():
    model, optimizer, sparsity = make(torch.bfloat16, start=1, end=1, until=2)
    sparsity.prepare_step(1)
    for step in range(1, 5):
        step_once(model, optimizer, sparsity, step)
    hidden = ~sparsity.masks[W1].entries(sparsity.weights[W1])
    assert not model.layers[0].moe.w1[hidden].any()
    assert model.layers[0].moe.w1[~hidden].all()


# ------------------------------------------------------------------------------------------- runs


@pytest.fixture
def start(tiny_config, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda *words: train.main([str(tiny_config), *words])


@pytest.mark.parametrize("words", [SOFT, HARD, [*SOFT, "train.sparsity.block=4"]], ids=str)
def test_runs_resume_exactly_and_export_what_they_train(start, tmp_path, monkeypatch, words):
    assert start("run.name=a", *words) == 0
    with monkeypatch.context() as patch:
        real = train.train_step

        def stopped(*arguments, **options):
            if arguments[0].step == 4:
                os.kill(os.getpid(), signal.SIGINT)
            return real(*arguments, **options)

        patch.setattr(train, "train_step", stopped)
        assert start("run.name=b", *words) == 75
    middle = (tmp_path / "runs/b/checkpoints/latest").resolve()
    assert f"masks/{W1}" in stored_tensors(middle)
    if words[-1] == "train.sparsity.kind=regrow":
        load_model(middle)
    else:
        with pytest.raises(ValueError, match=r"masks of weights that go on learning"):
            load_model(middle)
    assert start("run.name=b", *words) == 0
    losses = [
        {
            line["step"]: line["loss"]
            for line in read_lines(tmp_path / "runs" / name / "metrics.jsonl")
        }
        for name in "ab"
    ]
    assert losses[0] == losses[1]
    *_, last = read_lines(tmp_path / "runs/a/metrics.jsonl")
    assert last["weight_density"] == pytest.approx(0.25)

    latest = tmp_path / "runs/a/checkpoints/latest"
    weight = load_model(latest.resolve()).layers[0].moe.w1
    assert (weight == 0).float().mean().item() == pytest.approx(0.75, abs=0.01)
    events = read_lines(tmp_path / "runs/a/events.jsonl")
    assert [line["exact"] for line in events if line["event"] == "export_check"] == [True]


def test_masks_end_before_they_are_left_out(start, tmp_path, capsys):
    words = ["run.name=a", "checkpoint.keep.last=null"]
    assert start(*words, *SOFT) == 0
    assert start(*words, "train.steps=9") == 0, "hidden weights are zero"
    checkpoints = tmp_path / "runs/a/checkpoints"
    for step in (6, 8, 9):  # back to step 3, when they learn
        shutil.rmtree(checkpoints / f"step_{step:08d}")
    capsys.readouterr()
    assert start(*words) == 2
    assert "masks of weights that go on learning" in capsys.readouterr().err
    assert start(*words, *SOFT) == 0


def test_activation_density_is_measured_on_the_probe(start, tmp_path):
    assert start("run.name=a", "log.activation_threshold=1e-3") == 0
    assert start("run.name=b") == 0
    lines, plain = (list(read_lines(tmp_path / f"runs/{n}/metrics.jsonl")) for n in "ab")
    found = [lines[-1][f"activation_density_{rows}"] for rows in (1, 8, 32, 128)]
    assert found == sorted(found)
    assert 0 < found[0] < found[-1] <= 1
    assert [line["loss"] for line in lines] == [line["loss"] for line in plain]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.sparsity.block=4"], "train.sparsity.density is missing"),
        ([*SOFT, "train.sparsity.regrow=0.5"], "regrow=0.5 is no key of kind straight_"),
        ([*SOFT, "train.sparsity.until=8"], "must follow one another"),
        ([*SOFT, "train.sparsity.end=7"], "train.sparsity.end=7"),
        ([*SOFT, "train.sparsity.block=64"], "train.sparsity.block=64 is wider"),
        (
            [*SOFT, "experts.policy.kind=revive", "experts.policy.after=2"],
            "copies an expert without its mask",
        ),
        ([*SOFT, "experts.policy.kind=replace"], "train.sparsity does not go with"),
        ([*SOFT, "model.moe_expert_widths=[2,4,8,8]"], "takes all experts for equally wide"),
    ],
)
def test_what_does_not_go_together_is_refused(tiny_config, words, expected):
    with pytest.raises(ConfigError) as caught:
        check_run(load_config(tiny_config, words), 8)
    assert expected in str(caught.value)


def test_several_processes_are_refused(tiny_config):
    with pytest.raises(ConfigError, match=r"train\.sparsity works in one process"):
        make_plan(load_config(tiny_config, SOFT), 2, cuda=False)


def test_a_checkpoint_says_what_an_export_would_lack(tiny_config):
    soft, hard = load_config(tiny_config, SOFT), load_config(tiny_config, HARD)
    assert [bool(acting(soft, step, 8)) for step in range(9)] == [False, *[True] * 5, *[False] * 3]
    assert not any(acting(hard, step, 8) for step in range(9))
