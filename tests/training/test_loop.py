"""A training step: what is divided by what, and what a log step reads.

Every check compares whole gradients with those of the same rows in one forward pass, or with plain
autograd.
"""

from __future__ import annotations

import dataclasses
import math
import types

import pytest
import torch

from models.build import build_model, parameter_kinds
from models.config import ModelConfig
from models.transformer import Decoder
from moe.balance import balance_loss, z_loss
from moe.config import RouterConfig
from parallel import World
from tests.engines import local_engine
from tests.training.tiny import MODEL
from training.data.batch import Batch, make_batch
from training.evaluate import perplexity
from training.optim.groups import parameter_groups
from training.out_of_memory import LastCounts
from training.report.pace import Pace
from training.report.window import read_window
from training.step import (
    StepResult,
    StepTotals,
    TrainState,
    agree_on_step,
    begin_step,
    train_step,
)

CPU = torch.device("cpu")
ROWS, LENGTH = 8, 12


def router(balance: float = 0.0, z: float = 0.0, scope: str = "micro", load: str = "tokens"):
    given = {"kind": scope, "coef": balance, "load": load} if balance else None
    return RouterConfig(balance=given, bias=None, z_coef=z)


def build(dtype: torch.dtype = torch.float32, setting: RouterConfig | None = None):
    config = ModelConfig(**MODEL, initializer_range=0.3)
    model = build_model(config, dtype=dtype, seed=1, router=setting or router())
    groups = parameter_groups(model, parameter_kinds(model), weight_decay=0.1)
    return model, local_engine(groups, clip_norm=None)


def rows(count: int = ROWS, ignored: tuple[int, ...] = (), lengths: tuple[int, ...] = ()):
    """(tokens, labels) of rows; those in `ignored` have no label at all."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, MODEL["vocab_size"], (count, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for row in range(count):
        labels[row, : row % 5] = -100  # unequal numbers of targets
    for row in ignored:
        labels[row] = -100
    return tokens[:, :-1], labels


def batch_of(
    tokens: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor | None = None
) -> Batch:
    template = make_batch([None] * len(tokens), ((-1, 0, 0),) * len(tokens), LENGTH, 0)
    valid = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
    return dataclasses.replace(
        template,
        tokens_BL=tokens,
        labels_BL=labels,
        valid_BL=valid,
        positions_BL=torch.arange(LENGTH).repeat(len(tokens), 1),
        num_targets=int((labels != -100).sum()),
        num_tokens=int(valid.sum()),
        rows=tuple((0, 0, row) for row in range(len(tokens))),
    )


def state_of(model, optimizer, *, step=1, lr=0.01, **more) -> TrainState:
    """At work on step `step`, in one process on the CPU unless told otherwise."""
    given = {"world": World(), "device": CPU} | more
    return TrainState(
        model=model,
        forward=model,
        optimizer=optimizer,
        learning_rate=lambda _: lr,
        step=step,
        **given,
    )


def take_step(model, optimizer, batches, **more) -> StepResult:
    state = state_of(model, optimizer, **more)
    return train_step(state, batches, agree_on_step(state.world, batches, False))


def step(sizes: list[int], setting=None, data=None, dtype=torch.float32, **keywords):
    """Gradient and result of one step over the rows, cut into micro-batches of these sizes."""
    model, optimizer = build(dtype, setting)
    tokens, labels = data or rows()
    parts = zip(tokens.split(sizes), labels.split(sizes))
    batches = [batch_of(t, y) for t, y in parts]
    result = take_step(model, optimizer, batches, **keywords)
    return optimizer.gradient[:-3].clone(), result, model, optimizer


# --- normalisation ------------------------------------------------------------------------------


def test_loss_is_the_mean_over_targets_not_the_mean_of_means():
    """One target with loss 4 and three with loss 0, in two micro-batches: 1, not 2."""

    class Fixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, tokens_BL, *, labels_BL, **_):
            value = 4.0 if (labels_BL != -100).sum() == 1 else 0.0
            return types.SimpleNamespace(loss_sum=(self.weight * value).sum(), router=None)

    from parallel.engines.optimizer import Group

    model = Fixed()
    optimizer = local_engine([Group("decayed", {"weight": model.weight}, 1.0, 0.0)])
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    labels = torch.full_like(tokens, -100)
    labels[0, 0] = 1
    labels[1, :3] = 1
    batches = [batch_of(tokens[:1], labels[:1]), batch_of(tokens[1:], labels[1:])]
    totals = agree_on_step(World(), batches, False)
    assert totals == StepTotals(targets=4, tokens=2 * LENGTH, stop=False)
    result = take_step(model, optimizer, batches, lr=0.0)
    assert result.numbers[0] == 1.0
    assert optimizer.gradient[0] == 1.0


@pytest.mark.parametrize("sizes", [[4, 4], [1] * 8, [5, 2, 1]])
def test_gradients_do_not_depend_on_micro_batches(sizes):
    setting = router(balance=0.0, z=0.01)
    whole, one, _, _ = step([8], setting)
    split, many, _, _ = step(sizes, setting)
    torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-6)
    # All but the balance value, which by its definition compares loads inside each micro-batch.
    same = [0, 2, 3, 4, 5]
    torch.testing.assert_close(many.numbers[same], one.numbers[same], rtol=1e-5, atol=1e-6)


def test_gradient_equals_plain_autograd():
    model, optimizer = build()
    tokens, labels = rows()
    out = model(tokens, labels_BL=labels)
    targets = (labels != -100).sum()
    layers = out.router.tokens.shape[0]
    loss = out.loss_sum / targets
    loss = loss + 0.02 / layers * balance_loss(out.router).sum()
    loss = loss + 0.003 / layers * z_loss(out.router).sum()
    optimizer.zero_grad()
    loss.backward()
    expected = optimizer.gradient[:-3].clone()
    got, result, _, _ = step([8], router(balance=0.02, z=0.003))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)
    values = (out.loss_sum / targets, balance_loss(out.router).mean(), z_loss(out.router).mean())
    torch.testing.assert_close(result.numbers[:3], torch.stack(values).detach(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("sizes", [[8], [4, 4], [1] * 8])
def test_rows_without_targets_add_nothing(sizes):
    """Labels of two rows ignored, which makes whole micro-batches without any target."""
    data = rows(ignored=(2, 3))
    got, result, _, _ = step(sizes, data=data)
    kept = [0, 1, 4, 5, 6, 7]
    expected, alone, _, _ = step([6], data=(data[0][kept], data[1][kept]))
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    assert result.numbers[0].item() == pytest.approx(alone.numbers[0].item(), rel=1e-6)


def test_padding_does_not_reach_the_router_losses():
    """Two rows that are all padding: loss, losses of the router and gradients are as without
    them."""
    tokens, labels = rows()
    labels[6:] = -100
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[6:] = False
    setting = router(balance=0.05, z=0.01)

    def run(batches):
        model, optimizer = build(setting=setting)
        result = take_step(model, optimizer, batches, lr=0.0)
        return optimizer.gradient[:-3].clone(), result

    padded = batch_of(tokens, labels, valid)
    got, with_pads = run([padded])
    expected, without = run([batch_of(tokens[:6], labels[:6])])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(with_pads.numbers, without.numbers, rtol=1e-5, atol=1e-6)
    apart, _ = run([batch_of(tokens[:6], labels[:6]), batch_of(tokens[6:], labels[6:], valid[6:])])
    assert torch.isfinite(apart).all(), "a micro-batch of padding alone"


def test_balance_scopes():
    """micro: mean of the micro-batches' losses. global: all are compared with the whole load."""
    data = rows()
    model, _ = build()
    halves = [model(t, labels_BL=y).router for t, y in zip(data[0].split(4), data[1].split(4))]
    micro = torch.stack([balance_loss(stats).mean() for stats in halves]).mean()
    load_LE = halves[0].counts_E + halves[1].counts_E
    whole = torch.stack([balance_loss(stats, load_LE).mean() for stats in halves]).mean()
    _, result, _, _ = step([4, 4], router(balance=0.1))
    assert result.numbers[1].item() == pytest.approx(micro.item(), rel=1e-5)
    _, result, _, _ = step([4, 4], router(balance=0.1, scope="global"))
    assert result.numbers[1].item() == pytest.approx(whole.item(), rel=1e-5)
    one, _, _, _ = step([8], router(balance=0.1))
    same, _, _, _ = step([8], router(balance=0.1, scope="global"))
    assert torch.equal(one, same), "with one micro-batch both are the same"


@pytest.mark.parametrize("sizes", [[4, 4], [2, 2, 2, 2], [1, 3, 4]])
def test_the_global_balance_loss_does_not_depend_on_accumulation(sizes):
    """Router gradient and logged value: NVIDIA-NeMo/Automodel#3359, huggingface/trl#6083."""
    whole, result, _, _ = step([8], router(balance=1.0, z=0.1, scope="global"))
    parts, split, _, _ = step(sizes, router(balance=1.0, z=0.1, scope="global"))
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(split.numbers[1:3], result.numbers[1:3], rtol=1e-6, atol=0)


def test_without_a_balance_loss_no_load_is_counted_but_its_value_is_told(monkeypatch):
    passes = []
    real = Decoder.forward
    monkeypatch.setattr(
        Decoder, "forward", lambda self, *a, **k: passes.append(1) or real(self, *a, **k)
    )
    _, watched, _, _ = step([1, 3, 4], router(scope="global"))
    assert len(passes) == 3, "a pass for each micro-batch and none to count loads"
    _, used, _, _ = step([1, 3, 4], router(balance=1.0, scope="global"))
    assert len(passes) == 9
    torch.testing.assert_close(watched.numbers[1:3], used.numbers[1:3], rtol=1e-6, atol=0)


@pytest.mark.parametrize(("balance", "passes"), [(0.0, 2), (0.1, 4)])
def test_micro_batches_are_counted_first_only_for_a_loss_that_needs_it(
    balance, passes, monkeypatch
):
    calls = []
    real = Decoder.forward

    def counted(self, *arguments, **keywords):
        calls.append(torch.is_grad_enabled())
        return real(self, *arguments, **keywords)

    monkeypatch.setattr(Decoder, "forward", counted)
    step([4, 4], router(balance=balance, scope="global"))
    assert calls == [False] * (passes - 2) + [True] * 2


def test_the_auxiliary_loss_does_not_change_the_reported_loss():
    _, plain, _, _ = step([4, 4])
    _, with_losses, _, _ = step([4, 4], router(balance=1.0, z=1.0))
    assert plain.numbers[0] == with_losses.numbers[0]
    assert plain.numbers[3] < with_losses.numbers[3], "but it does change the gradient"


def test_bfloat16_model_runs_and_routers_stay_float32():
    gradient, _, model, _ = step([4, 4], router(balance=0.1), dtype=torch.bfloat16)
    assert gradient.dtype == torch.float32 and torch.isfinite(gradient).all()
    exact, _, _, _ = step([4, 4], router(balance=0.1))
    cosine = torch.nn.functional.cosine_similarity(gradient, exact, dim=0)
    assert cosine > 0.98, cosine
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert all((d == torch.float32) == ("router" in name) for name, d in dtypes.items()), dtypes
    assert all(p.grad is None for p in model.parameters() if p.dtype == torch.bfloat16)


def test_statistics_are_sums_over_micro_batches_and_the_last_counts_are_kept():
    keep = LastCounts()
    _, result, _, _ = step([4, 4], followers=[keep])
    assert result.stats.tokens.tolist() == [ROWS * LENGTH] * 2
    assert int(result.stats.counts_E.sum()) == 2 * ROWS * LENGTH * MODEL["num_experts_per_tok"]
    assert int(keep.counts_LE.sum()) == ROWS * LENGTH * MODEL["num_experts_per_tok"]
    assert not result.stats.prob_sum_E.requires_grad, "no graph outlives the step"


# --- log steps ----------------------------------------------------------------------------------


def test_read_window_gives_the_last_step_and_names_skipped_ones():
    model, optimizer = build(setting=router(0.1, 0.1))
    tokens, labels = rows()
    state = state_of(model, optimizer, step=0)
    state.learning_rate = lambda step: 0.01 * step
    window = []
    for number in (1, 2, 3):
        batches = [batch_of(tokens, labels)]
        totals = agree_on_step(World(), batches, False)
        if number == 2:
            model.forward = _nan_after(model.forward)
        begin_step(state)
        window.append(train_step(state, batches, totals))
        if number == 2:
            del model.forward  # the class's own again
    read = read_window(state, window)
    metrics, skipped = read.metrics, read.skipped
    assert metrics["step"] == 3 and metrics["skipped_steps"] == 1
    assert math.isfinite(metrics["loss"]) and metrics["balance_loss"] > 0.9
    assert {"max_violation", "dead_experts", "router_entropy", "layers/1/max_violation"} <= set(
        metrics
    )
    (bad,) = skipped
    assert (bad.step, bad.reason, bad.lr) == (2, "not finite", 0.02)
    assert bad.rows == [[0, 0, row] for row in range(ROWS)]
    assert math.isnan(bad.loss)


def _nan_after(forward):
    def broken(*arguments, **keywords):
        out = forward(*arguments, **keywords)
        out.loss_sum = out.loss_sum * float("nan")
        return out

    return broken


def test_pace_leaves_out_pauses_and_the_first_lap(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("training.report.pace.time.perf_counter", lambda: clock[0])
    pace = Pace(started=0.0)

    def work(seconds: float) -> None:
        clock[0] += seconds

    work(30.0)  # compilation
    assert pace.lap(1) == (30.0, 30.0)
    work(4.0)
    with pace.pause():
        work(100.0)
    assert pace.lap(2) == (4.0, 2.0)
    work(8.0)
    assert pace.lap(2) == (8.0, 3.0)


def test_perplexity():
    assert perplexity(math.log(8)) == pytest.approx(8)
    assert perplexity(1000.0) == math.inf
