"""What a log step says: metrics, events, and lines on the screen."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from moe.control import routers_of
from training.device import max_memory_gib, peak_flops
from training.estimate.flops import flops_per_token, width_metrics
from training.faults import RunFailed
from training.health import early_until
from training.optim.schedule import warmup_steps
from training.report.plots import PICTURES, draw
from training.report.run_log import progress_line
from training.report.window import Window, read_window

if TYPE_CHECKING:
    from training.run_state import RunState
    from training.step import StepResult
    from training.surgery.changes import Done

LOAD_LINES = 200
"""Lines of load.jsonl in a run: its size does not grow with the length of the run."""
PICTURE_SETS = 20
"""Times that pictures go to trackers."""
MAX_NOT_FINITE = 20
"""Steps in a row that are not finite, after which a run is given up."""
PLOT_EVERY_S = 60.0
"""Drawing takes seconds, during which the other processes wait."""


def log_window(state: RunState) -> dict[str, Any]:
    """Read the steps since the last log line, report what happened in them, and print the line.

    Returns:
        Metrics of the last step, with the speed since the last log line.

    Raises:
        RunFailed: a step was not finite and `optim.on_nonfinite` is stop, or so many in a row
            were not that the run is lost.
    """
    results, state.results = state.results, []
    if not results:
        state.last_window = None
        _report_router_changes(state, {})
        return {"step": state.step}
    extra = state.probe.churn()
    if state.config.log.activation_threshold is not None:
        extra |= state.probe.activations(state.config.log.activation_threshold)
    window = state.last_window = read_window(state.train, results, extra)
    _report_router_changes(state, window.losses)
    _report_alarms(state, window)
    _log_load(state, window)
    metrics = window.metrics | _progress(state, window, results)
    _report_skipped(state, window)
    state.log.say(progress_line(metrics, state.steps))
    lost = _nonfinite_stop(state, window) or _lost(state, window)
    if lost is not None:
        state.log.metrics(metrics)
        raise RunFailed(lost)
    return metrics


def _progress(state: RunState, window: Window, results: Sequence[StepResult]) -> dict[str, Any]:
    """Metrics of the run beside those of its last step: rates, speed, time left, memory."""
    seconds, expected = state.pace.lap(len(results))
    speed = sum(result.tokens for result in results) / seconds
    lr, router_lr = state.train.optimizer.lrs(results[-1].lr)
    peak = peak_flops(state.device)
    routers = routers_of(state.model)
    k = routers[0].training_k if routers else None
    model = state.model.config
    flops = flops_per_token(model, state.config.data.seq_len, k, window.counts_LE)
    metrics = width_metrics(model, window.counts_LE) | {
        "lr": lr,
        "router_lr": router_lr,
        "tokens": state.train.tokens,
        "tokens_per_second": speed,
        "mfu": speed * flops / (peak * state.world.size) if peak else None,
        "time_left_s": expected * (state.steps - state.step),
        "max_memory_gib": max_memory_gib(state.device),
    }
    return metrics if k is None else metrics | {"top_k": k}


def _report_skipped(state: RunState, window: Window) -> None:
    for skipped in window.skipped:
        state.log.event(
            "step_skipped",
            f"step {skipped.step} was skipped ({skipped.reason}): loss {skipped.loss:.4g}, "
            f"gradient norm {skipped.grad_norm:.4g}; weights and router are as before it",
            sources=state.data.source_names,
            **vars(skipped),
        )


def _nonfinite_stop(state: RunState, window: Window) -> str | None:
    """Why the run ends where its first step that is not finite is to end it."""
    first = next(iter(window.skipped), None)
    if state.config.optim.on_nonfinite != "stop" or first is None or first.reason != "not finite":
        return None
    return (
        f"loss or gradients of step {first.step} are not finite and optim.on_nonfinite=stop; the "
        f"batch's rows are in {state.run.folder / 'events.jsonl'}"
    )


def _lost(state: RunState, window: Window) -> str | None:
    """Why the run cannot come to anything, if it cannot: a step that is not finite changes no
    weight, so the next one starts from the same weights, and many in a row are forever."""
    bad = {skipped.step for skipped in window.skipped if skipped.reason == "not finite"}
    for step in window.losses:
        state.not_finite = state.not_finite + 1 if step in bad else 0
    step = state.step
    at_end = step == state.steps and state.not_finite > state.steps / 2
    if state.not_finite < MAX_NOT_FINITE and not at_end:
        return None
    causes = [f"optim.lr={state.config.optim.lr:g}"]
    if state.not_finite == step:  # not one step was applied
        causes.append(f"model.initializer_range={state.model.config.initializer_range:g}")
    return (
        f"all of the last {state.not_finite} steps up to step {step} were skipped, because their "
        f"loss or gradients are not finite: the model learns nothing. Lower {' or '.join(causes)}; "
        "the same command resumes from the last checkpoint if there is one, another run.name "
        "starts anew"
    )


def _report_router_changes(state: RunState, losses: dict[int, float]) -> None:
    """What routing did differently from some step of the window on, with the loss at that step."""
    for step, change in state.router_changes:
        loss = losses.get(step)
        state.log.event("router_change", f"step {step}: {change}", step=step, loss=loss)
    state.router_changes.clear()


def _report_alarms(state: RunState, window: Window) -> None:
    """Lasting faults of the routing, once each."""
    if window.health is None:
        return
    early = state.step < early_until(
        warmup_steps(state.config.optim.schedule.warmup_steps, state.steps)
    )
    for alarm in state.alarms.new(window.health, early):
        text = f"step {state.step}: {alarm.pop('text')}"
        style = "dim" if early else "bold yellow"
        state.log.event("routing_alarm", text, style=style, step=state.step, **alarm)


def _log_load(state: RunState, window: Window) -> None:
    """A line of load.jsonl now and then, at the end too."""
    step = state.step
    wanted = state.load_at is None or step - state.load_at >= state.steps / LOAD_LINES
    if window.counts_LE is None or not (wanted or step == state.steps):
        return
    state.load_at = step
    counts_LE = window.counts_LE.double()
    slots = counts_LE.shape[1]
    experts = [window.metrics.get(f"layers/{i}/experts", slots) for i in range(len(counts_LE))]
    mean_L1 = counts_LE.sum(dim=1, keepdim=True) / torch.tensor(experts).double()[:, None]
    load_LE = counts_LE / mean_L1.clamp(min=1e-9)
    state.log.load(step, [[round(value, 3) for value in row] for row in load_LE.tolist()])


_CHANGED = {
    "clone": ("expert_cloned", "slot {expert} gets a copy of expert {parent}"),
    "retire": ("expert_retired", "expert {expert} retires"),
    "revive": ("expert_revived", "expert {expert} becomes a copy of expert {parent}"),
}


def report_expert_changes(state: RunState, done: Done) -> None:
    """Experts have come or gone, or would have in a dry run."""
    step = state.step
    loss = state.last_window.losses.get(step) if state.last_window is not None else None
    for change in done.changes:
        name, text = _CHANGED[change.kind]
        text = text.format(expert=change.expert, parent=change.parent)
        told = f"step {step}: MoE layer {change.layer}: {text} ({change.reason})"
        if done.dry:
            name, told = "surgery_dry_run", f"{told}: not done, experts.policy.dry_run=true"
        state.log.event(
            name,
            told,
            step=step,
            loss=loss,
            change=change.kind,
            layer=change.layer,
            expert=change.expert,
            parent=change.parent,
            reason=change.reason,
            experts=done.experts[change.layer] if done.experts is not None else None,
            probe_loss=list(done.probe_loss) if done.probe_loss is not None else None,
            seconds=done.seconds,
        )


def report_empty_step(state: RunState) -> None:
    """A step without any target on any process."""
    step = state.step
    state.log.event("step_empty", f"step {step} has no targets at all and is left out", step=step)


def report_evaluation(state: RunState, metrics: dict[str, float], sample: str | None) -> None:
    """The validation's numbers and the sample."""
    if "val_loss" in metrics:
        each = [
            f"{name} {metrics[f'val_loss/{name}']:.4f}"
            for name in state.data.validation_names
            if f"val_loss/{name}" in metrics
        ]
        state.log.say(
            f"validation at step {state.step}: loss {metrics['val_loss']:.4f}, perplexity "
            f"{metrics['val_perplexity']:.4g}{'; loss of ' * bool(each)}{', '.join(each)}",
            "cyan",
        )
    if sample is not None:
        state.log.event("sample", step=state.step, sample=sample)
        text = f"{state.config.eval.sample.prompt}{sample}".replace("\n", "⏎ ")
        state.log.say(f"sample: {text}", "dim")
    if state.config.log.plots and time.monotonic() - state.plotted_at > PLOT_EVERY_S:
        draw_plots(state)


def draw_plots(state: RunState) -> None:
    """plots/*.png from metrics.jsonl; a failure to draw is told and no more."""
    if not state.log.active:
        return
    state.plotted_at = time.monotonic()
    try:
        drawn = {path.stem: path for path in draw(state.run.folder)}
        step = state.step
        if step == state.steps or step - state.pictured_at >= state.steps / PICTURE_SETS:
            state.pictured_at = step
            state.log.pictures(step, {name: drawn[name] for name in PICTURES if name in drawn})
    except Exception as error:  # drawing is never worth a run
        state.log.warn(f"no plots: {type(error).__name__}: {error}")
