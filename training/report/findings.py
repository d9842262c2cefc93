"""What is wrong with a run, in words: rule by rule, with the numbers seen and what to do."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from training.health import early_until
from training.optim.schedule import warmup_steps
from training.report.record import Record
from training.report.units import human_count, human_time

Level = Literal["problem", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """Something about a run that a person should know."""

    level: Level
    seen: str
    """What was measured, with numbers."""
    remedy: str
    """What to do."""


def findings(record: Record, now: float | None = None) -> list[Finding]:
    """What is worth knowing about a run, worst first; an empty list means all looks well.

    Args:
        now: Unix time, to tell a run that stopped from one that is at work; default the clock.
    """
    if not record.series("loss").steps:
        return [
            Finding(
                "problem",
                f"{record.folder} has no logged step yet",
                "wait for the first one (log.every_steps), or look at the error the run ended with",
            )
        ]
    found: list[Finding] = []
    for rule in _RULES:
        found += rule(record)
    found += _stopped(record, time.time() if now is None else now)
    order = {"problem": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda finding: order[finding.level])


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


def _nonfinite(record: Record) -> Iterator[Finding]:
    loss = record.series("loss")
    bad = [step for step, value in zip(loss.steps, loss.values) if not math.isfinite(value)]
    if bad:
        yield Finding(
            "problem",
            f"the loss was not a number at {len(bad)} logged steps, first at step {bad[0]}",
            "lower optim.lr or lengthen optim.schedule.warmup_steps; events.jsonl names the "
            "batch's rows",
        )


def _skipped(record: Record) -> Iterator[Finding]:
    skipped = record.series("skipped_steps")
    if not skipped.steps or skipped.values[-1] == 0:
        return
    count, steps = int(skipped.values[-1]), skipped.steps[-1]
    share = count / steps
    yield Finding(
        "problem" if share > 0.01 else "note",
        f"{count} of {steps} steps were skipped ({share:.1%})",
        "a few are harmless; many mean a learning rate that is too high or rows that should not be "
        "there: events.jsonl has reason, gradient norm and rows of each",
    )


def _spikes(record: Record) -> Iterator[Finding]:
    loss = record.series("loss")
    spikes = []
    for i in range(20, len(loss)):
        before = [value for value in loss.values[i - 20 : i] if math.isfinite(value)]
        if len(before) < 10 or not math.isfinite(loss.values[i]):
            continue
        middle = _median(before)
        spread = _median([abs(value - middle) for value in before])
        # Six times the usual distance from the median, and visible: both, as a smooth curve has
        # hardly any spread.
        if loss.values[i] > middle + max(6 * spread, 0.1 * middle):
            spikes.append(loss.steps[i])
    if spikes:
        yield Finding(
            "warning" if len(spikes) > 2 else "note",
            f"the loss jumped at {len(spikes)} logged steps: {', '.join(map(str, spikes[:5]))}"
            + (" …" if len(spikes) > 5 else ""),
            "optim.spike_factor=5 skips such steps; a lower optim.lr or a larger batch avoids them",
        )


def _learning(record: Record) -> Iterator[Finding]:
    loss = record.series("loss")
    values = loss.finite
    if len(values) < 10:
        return
    fifth = max(len(values) // 5, 2)
    last, before = _median(values[-fifth:]), _median(values[-2 * fifth : -fifth])
    best = min(_median(values[i : i + fifth]) for i in range(len(values) - fifth + 1))
    first = values[0]
    if last > 0.97 * first:
        yield Finding(
            "problem",
            f"the loss has hardly moved: {first:.3f} at step {loss.steps[0]}, {last:.3f} now",
            "check that optim.lr is not tiny and that the text is text; train on one small file "
            "over and over (data.sources): that loss must fall",
        )
    elif last > best * 1.05:
        yield Finding(
            "problem",
            f"the loss is rising: its median was {best:.3f} at best and is {last:.3f} now",
            "lower optim.lr, lengthen optim.schedule.warmup_steps, or go back to an earlier "
            "checkpoint",
        )
    elif before - last < 0.001 * before and _lr_is_high(record):
        yield Finding(
            "note",
            f"the loss has been flat for the last fifth of the logged steps ({before:.3f} → "
            f"{last:.3f}) while the learning rate is still high",
            "let the learning rate decay (fewer train.steps, or a larger optim.decay_fraction), or "
            "take a larger model",
        )


def _lr_is_high(record: Record) -> bool:
    lr = record.series("lr").values
    return bool(lr) and lr[-1] > 0.5 * max(lr)


def _overfitting(record: Record) -> Iterator[Finding]:
    val, loss = record.series("val_loss"), record.series("loss")
    if len(val) < 3 or not loss.finite:
        return
    best = min(range(len(val)), key=lambda i: val.values[i])
    since = [v for s, v in zip(loss.steps, loss.values) if s > val.steps[best]]
    if val.values[-1] > 1.02 * val.values[best] and since and min(since) < val.values[best]:
        yield Finding(
            "warning",
            f"validation loss was best at step {val.steps[best]} ({val.values[best]:.3f}) and has "
            f"risen to {val.values[-1]:.3f} since, while the training loss went on falling",
            "the model learns the text by heart: more text, fewer train.steps, or a smaller model",
        )


def _uneven(record: Record, seen: str, remedy: str) -> Finding:
    """A finding about the load: a note at first, while routers are still finding their balance."""
    wanted = record.setting("optim.schedule.warmup_steps") or 0
    early = early_until(warmup_steps(wanted, record.steps) if record.steps else wanted)
    if record.last["step"] >= early:
        return Finding("warning", seen, remedy)
    calm = f"early, before step {early}, this often heals by itself; if it lasts, "
    return Finding("note", seen, calm + remedy)


def _dead_experts(record: Record) -> Iterator[Finding]:
    dead = record.series("dead_experts").tail(0.2)
    if not dead.steps or _median(dead.values) < 1:
        return
    layers = {n: _median(s.tail(0.2).values) for n, s in record.layers("dead_experts").items()}
    worst = sorted((n for n, count in layers.items() if count >= 1), key=lambda n: -layers[n])
    where = ", ".join(f"MoE layer {n}: {layers[n]:.0f}" for n in worst[:4])
    coef, steps = record.setting("router.balance.coef"), record.steps or 0
    revive = (
        f"; experts.policy={{kind: revive, after: {min(200, steps // 4)}}} makes copies of busy "
        "ones of them (docs/surgery.md)"
    )
    yield _uneven(
        record,
        f"{_median(dead.values):.0f} experts get less than a tenth of the mean load"
        + (f" ({where}{' …' if len(worst) > 4 else ''})" if where else ""),
        f"raise router.balance.coef (now {coef}), lower optim.router.lr_multiplier, or use fewer "
        "experts" + revive * (steps >= 200),
    )


def _max_violation(record: Record) -> Iterator[Finding]:
    violation = record.series("max_violation").tail(0.2)
    if not violation.steps or _median(violation.values) <= 2:
        return
    layers = {n: _median(s.tail(0.2).values) for n, s in record.layers("max_violation").items()}
    worst = max(layers, key=lambda n: layers[n]) if layers else None
    yield _uneven(
        record,
        f"max_violation is {_median(violation.values):.1f} (load of the fullest expert over the "
        "mean load, minus 1)" + (f", worst in MoE layer {worst}" if worst is not None else ""),
        f"raise router.balance.coef (now {record.setting('router.balance.coef')}), "
        "or see docs/routing.md for a selection bias; memory and time follow the fullest expert",
    )


def _router_collapse(record: Record) -> Iterator[Finding]:
    entropy = record.series("router_entropy").tail(0.2)
    k = record.setting("model.num_experts_per_tok")
    if not entropy.steps or not k or k < 2:
        return
    if _median(entropy.values) < 0.05 * math.log(k):
        yield Finding(
            "warning",
            f"gates are nearly one-hot: entropy {_median(entropy.values):.3f} of at most "
            f"{math.log(k):.2f} nats, so {k} experts are paid for and one is used",
            "raise router.z_coef, lower optim.router.lr_multiplier, or lower num_experts_per_tok",
        )


def _throughput(record: Record) -> Iterator[Finding]:
    speed = record.series("tokens_per_second")
    values = speed.finite[1:]  # the first lap holds compilation and warm-up
    if len(values) >= 10:
        early, late = _median(values[: len(values) // 2]), _median(values[-len(values) // 5 :])
        low = sorted(values)[len(values) // 10]
        if late < 0.7 * early:
            yield Finding(
                "warning",
                f"the run has slowed down from {human_count(early)} to {human_count(late)} tokens "
                "per second",
                "see whether something else uses the machine; compare max_violation over time",
            )
        elif low < 0.5 * _median(values):
            yield Finding(
                "note",
                f"speed is uneven: a tenth of the logged steps ran below {human_count(low)} tokens "
                f"per second, half above {human_count(_median(values))}",
                "reading the data may hold the steps up: data.workers=2 or more; or a busy machine",
            )
    mfu = record.series("mfu").finite[1:]
    if mfu and _median(mfu) < 0.1:
        yield Finding(
            "note",
            f"the GPU does {_median(mfu):.1%} of its peak",
            "larger train.micro_batch_size (train.checkpointing=selective if memory is short), "
            "train.compile=true; small models cannot fill a GPU",
        )


def _clipping(record: Record) -> Iterator[Finding]:
    clip = record.setting("optim.clip_norm")
    norms = record.series("grad_norm").tail(0.5).finite
    if clip and len(norms) >= 10:
        share = sum(norm > clip for norm in norms) / len(norms)
        if share > 0.9:
            yield Finding(
                "note",
                f"{share:.0%} of the steps of the second half were clipped to "
                f"optim.clip_norm={clip} (median norm {_median(norms):.2f})",
                "that only rescales AdamW's steps a little; if the loss is uneasy, lower optim.lr",
            )


_RULES: tuple[Callable[[Record], Iterator[Finding]], ...] = (
    _nonfinite,
    _skipped,
    _spikes,
    _learning,
    _overfitting,
    _dead_experts,
    _max_violation,
    _router_collapse,
    _throughput,
    _clipping,
)


def _stopped(record: Record, now: float) -> Iterator[Finding]:
    steps, last = record.steps, record.last
    written = max((line.get("time", 0.0) for line in (*record.lines, *record.events)), default=0.0)
    silent = now - written
    # Ten times the usual distance between lines, and at least two minutes.
    times = [line["time"] for line in record.lines if "time" in line and "loss" in line]
    usual = _median([b - a for a, b in itertools.pairwise(times)]) if len(times) > 1 else 60.0
    if steps is not None and last["step"] < steps and silent > max(120.0, 10 * usual):
        saved = sorted(p.name for p in (record.folder / "checkpoints").glob("step_*"))
        where = f"its newest checkpoint is {saved[-1]}" if saved else "it has no checkpoint"
        yield Finding(
            "problem" if not saved else "warning",
            f"the run stopped at step {last['step']} of {steps}, {human_time(silent)} ago; {where}",
            "give the same command again: it resumes from the newest good checkpoint",
        )
