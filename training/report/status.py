"""What a run says about itself, from its parts to events, metrics and lines on the screen."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from models.attention import packed_backend
from models.loss import loss_backend
from moe.control import routers_of
from moe.experts import picked_backend
from moe.kernels.common.backend import pick_backend
from training.checkpoint.files import NonFiniteWeights
from training.config.expert_checks import start_experts
from training.config.export_compat import acting
from training.device import max_memory_gib, peak_flops
from training.estimate.flops import counts_first, flops_per_token, matmul_weights, width_metrics
from training.faults import RunFailed, out_of_memory_message
from training.optim.master import group_table
from training.optim.schedule import warmup_steps
from training.report.run_log import early_until, human_bytes, human_count, human_time, progress_line
from training.step import Pace, StepResult, Window, read_window
from training.surgery.policy import calendar

if TYPE_CHECKING:
    from training.config.sections import Config
    from training.run import Run
    from training.run_state import Job
    from training.surgery.changes import Done


LOAD_LINES = 200
"""Lines of load.jsonl in a run: its size does not grow with the length of the run."""
PICTURE_SETS = 20
"""Times that pictures go to Weights & Biases."""
MOST_NOT_FINITE = 20
"""Steps in a row that are not finite, after which a run is given up."""
PLOT_EVERY_S = 60.0
"""Drawing takes seconds, during which the other processes wait."""


@dataclass(frozen=True)
class Due:
    """What is to be done after a step."""

    log: bool
    evaluate: bool
    save: bool


def due(config: Config, step: int, steps: int) -> Due:
    """Evaluation and checkpoints bring a log line with them: a validation belongs to a line of
    metrics, and no checkpoint may be newer than the record of the steps that were skipped before
    it. So do changes of experts, which are decided by numbers that a log line reads."""

    def every(interval: int | None) -> bool:
        return interval is not None and step % interval == 0

    last = step == steps
    evaluate = config.eval.every_steps is not None and (last or every(config.eval.every_steps))
    save = last or every(config.checkpoint.every_steps)
    log = step == 1 or evaluate or save or every(config.log.every_steps)
    log = log or calendar(config, steps).due(step)
    return Due(log, evaluate, save)


_SCOPES = {
    "global": "the whole step",
    "lagged": "the step before",
    "micro": "each process's micro-batch",
    "sequence": "each row",
}


# --- the start ----------------------------------------------------------------------------------


def wandb_settings(config: Config, run: Run) -> dict[str, Any] | None:
    """Arguments of `wandb.init`; every attempt is a run of its own in the group of the run
    folder."""
    if config.log.wandb == "off":
        return None
    return {
        "mode": config.log.wandb,
        "project": config.log.wandb_project,
        "dir": str(run.folder.absolute()),  # its service may have another working folder
        "group": run.folder.name,
        "name": f"{run.folder.name}-{run.attempt}",
        "config": config.to_dict(),
        # its summary of every metric would push what the run says at its end off the screen
        "settings": {"silent": True},
    }


def start(job: Job) -> None:
    """Where the run stands, what the model is, and which parameters learn how."""
    config, log, plan, run = job.config, job.log, job.plan, job.run
    for sentence in run.passed_over:
        log.event("checkpoint_passed_over", f"checkpoint {sentence}")
    if run.changed:
        log.event("settings_changed", f"settings changed since then: {'; '.join(run.changed)}")
    for line in job.data.describe():
        log.say(f"data: {line}")
    active, total = matmul_weights(job.model.config)
    processes = f"{plan.world_size} x {plan.device}" if plan.world_size > 1 else plan.device
    log.say(
        f"model: {human_count(total)} weights in matrix products, {human_count(active)} for each "
        f"token; {plan.dtype} on {processes}{', compiled' if plan.compile else ''}"
    )
    for line in what_runs(job):
        log.say(line)
    optim = config.optim
    if "bfloat16" in (optim.weights, optim.moments):
        log.say(
            f"AdamW: weights in {optim.weights}, moments in {optim.moments}, bfloat16 by "
            "stochastic rounding (routers: float32)"
        )
    if (taken := warmup_steps(optim.warmup_steps, job.steps)) != optim.warmup_steps:
        log.warn(
            f"warm-up takes {taken} of the {job.steps} steps, a tenth: "
            f"optim.warmup_steps={optim.warmup_steps} is not below their number"
        )
    if config.train.cuda_graph:
        log.say("steps are captured as CUDA graphs")
    if job.model.config.moe_layers and config.router.balance_coef:
        name = f"weight {config.router.balance_coef:g}"
        log.say(
            f"balance loss: {name}, compared with the load of "
            f"{_SCOPES[config.router.balance_scope]}"
        )
        if counts_first(config, plan.accumulation):
            log.say(
                f"  a step's {plan.accumulation} micro-batches per process are counted in a "
                "forward pass of their own first: a third more arithmetic; "
                "router.balance_scope=lagged is free"
            )
    if job.model.config.moe_layers and config.router.bias_update != "none":
        log.say(f"selection bias: updated after every step, rule {config.router.bias_update}")
    started = start_experts(config)
    if started is not None:
        slots = job.model.config.num_experts
        log.say(f"experts: {started} of {slots} slots in use at the start of the run")

    def placement(group: str) -> str:
        kind = {"experts": "expert", "router": "router"}.get(group.partition(" (")[0], "dense")
        return str(job.device) if plan.engine is None else plan.mesh.placed(kind)

    log.table("parameters", group_table(job.optimizer.groups, config.optim.lr, placement))
    step = job.progress.step
    text = f"attempt {run.attempt}: "
    text += f"resuming from {run.checkpoint}" if run.checkpoint else "starting"
    log.event(
        "start",
        f"{text}; {job.steps} steps of {human_count(plan.tokens_per_step)} tokens in {run.folder}",
        style="bold",
        step=step,
        steps=job.steps,
        world_size=plan.world_size,
        checkpoint=str(run.checkpoint) if run.checkpoint else None,
        unigram_entropy=job.data.unigram_entropy() if log.active else None,
    )


def what_runs(job: Job) -> Iterator[str]:
    """A line each: tokenizer, kernels, attention, engine, as chosen for this run."""
    tokenizer, plan = job.tokenizer, job.plan
    name = job.config.data.tokenizer or "of the data"
    yield f"tokenizer: {name}, {tokenizer.vocab_size:,} tokens, hash {tokenizer.hash[:12]}"
    dtype = getattr(torch, plan.dtype)
    loss = loss_backend(torch.empty(0, device=job.device, dtype=dtype))
    experts = _experts_kernels(job, dtype)
    yield f"kernels: {f'experts {experts}, ' if experts else ''}loss {loss}"
    by = packed_backend(job.device, dtype, job.model.config.head_dim)
    names = {"flash": "flash, of packed documents", "sdpa": "scaled_dot_product_attention"}
    yield f"attention: {names[by]}"
    if plan.engine is None:
        yield "engine: none, one process"
    else:
        yield f"engine: {plan.engine}; layout: {plan.mesh.describe()}"


def _experts_kernels(job: Job, dtype: torch.dtype) -> str | None:
    """What computes the experts of the first layer that has some; None for a dense model."""
    config, model = job.config, job.model.config
    if not model.moe_layers:
        return None
    layer = model.moe_config(model.moe_layers[0])
    one = torch.empty(1, device=job.device, dtype=dtype)
    if layer.expert_widths is not None:
        return pick_backend(config.model.kernels, one)
    tokens = job.plan.micro_batch_size * config.data.seq_len
    E, D, N = layer.num_experts, layer.hidden_size, layer.expert_size
    picked = picked_backend(
        config.model.kernels,
        one.expand(tokens, D),
        one.expand(E, 2 * N, D),
        one.expand(E, D, N),
        None,
        None,
        layer.activation,
        tokens * layer.num_experts_per_tok,
    )
    return f"products of sparse matrices ({picked})" if config.model.kernels == "spmm" else picked


# --- steps --------------------------------------------------------------------------------------


def window(job: Job, results: Sequence[StepResult], pace: Pace) -> dict[str, Any]:
    """Metrics of the last step, with the window's speed; tells of skipped steps and prints the
    line.

    Raises:
        RunFailed: a step was not finite and `optim.on_nonfinite` is stop, or so many in a row
            were not that the run is lost.
    """
    if not results:
        job.read = None
        _router_changes(job, {})
        return {"step": job.progress.step}
    extra = job.probe.churn()
    if job.trainee.sparsity is not None:
        extra |= job.trainee.sparsity.metrics()
    if job.config.log.activation_threshold is not None:
        extra |= job.probe.activations(job.config.log.activation_threshold)
    read = job.read = read_window(
        results, job.world, job.optimizer.guard.skipped, extra, job.trainee.health
    )
    metrics, skipped = read.metrics, read.skipped
    _router_changes(job, read.losses)
    _load(job, read)
    seconds, expected = pace.lap(len(results))
    speed = sum(result.tokens for result in results) / seconds
    lr, router_lr = job.optimizer.lrs(results[-1].lr)
    peak = peak_flops(job.device)
    k = routers[0].k if (routers := routers_of(job.model)) else None
    flops = flops_per_token(job.model.config, job.config.data.seq_len, k, read.counts_LE)
    metrics |= width_metrics(job.model.config, read.counts_LE) | {
        "lr": lr,
        "router_lr": router_lr,
        "tokens": job.progress.tokens,
        "tokens_per_second": speed,
        "mfu": speed * flops / (peak * job.world.size) if peak else None,
        "time_left_s": expected * (job.steps - job.progress.step),
        "max_memory_gib": max_memory_gib(job.device),
    }
    if k is not None:
        metrics["top_k"] = k
    for bad in skipped:
        job.log.event(
            "step_skipped",
            f"step {bad.step} was skipped ({bad.reason}): loss {bad.loss:.4g}, gradient norm "
            f"{bad.grad_norm:.4g}; weights and router are as before it",
            step=bad.step,
            reason=bad.reason,
            loss=bad.loss,
            grad_norm=bad.grad_norm,
            lr=bad.lr,
            sources=job.data.source_names,
            rows=bad.rows,
        )
    job.log.say(progress_line(metrics, job.steps))
    if skipped and skipped[0].reason == "not finite" and job.config.optim.on_nonfinite == "stop":
        job.log.metrics(metrics)
        raise RunFailed(
            f"loss or gradients of step {skipped[0].step} are not finite and "
            f"optim.on_nonfinite=stop; the batch's rows are in {job.run.folder / 'events.jsonl'}"
        )
    if (lost := _lost(job, read)) is not None:
        job.log.metrics(metrics)
        raise RunFailed(lost)
    return metrics


def _lost(job: Job, read: Window) -> str | None:
    """Why the run cannot come to anything, if it cannot: a step that is not finite changes no
    weight, so the next one starts from the same weights, and many in a row are for ever."""
    bad = {skipped.step for skipped in read.skipped if skipped.reason == "not finite"}
    for step in read.losses:
        job.not_finite = job.not_finite + 1 if step in bad else 0
    step = job.progress.step
    at_end = step == job.steps and job.not_finite > job.steps / 2
    if job.not_finite < MOST_NOT_FINITE and not at_end:
        return None
    causes = [f"optim.lr={job.config.optim.lr:g}"]
    if job.not_finite == step:  # not one step was applied
        causes.append(f"model.initializer_range={job.model.config.initializer_range:g}")
    return (
        f"all of the last {job.not_finite} steps up to step {step} were skipped, because their "
        f"loss or gradients are not finite: the model learns nothing. Lower {' or '.join(causes)}; "
        "the same command resumes from the last checkpoint if there is one, another run.name "
        "starts anew"
    )


def _router_changes(job: Job, losses: dict[int, float]) -> None:
    """What routing did differently from some step of the window on, with the loss at that step."""
    for step, change in job.router_changes:
        loss = losses.get(step)
        job.log.event("router_change", f"step {step}: {change}", step=step, loss=loss)
    job.router_changes.clear()


def _load(job: Job, read: Window) -> None:
    """Alarms, and a line of load.jsonl now and then."""
    if read.counts_LE is None:
        return
    step, counts_LE = job.progress.step, read.counts_LE.double()
    if read.health:
        dead_LE = read.health["health/dead"].view(counts_LE.shape)
        uneven_L, narrow_L = read.health["health/uneven"], read.health["health/narrow"]
        early = step < early_until(warmup_steps(job.config.optim.warmup_steps, job.steps))
        for alarm in job.alarms.new(uneven_L, narrow_L, dead_LE, early):
            text = f"step {step}: {alarm.pop('text')}"
            style = "dim" if early else "bold yellow"
            job.log.event("routing_alarm", text, style=style, step=step, **alarm)
    if job.load_at < 0 or step - job.load_at >= job.steps / LOAD_LINES or step == job.steps:
        job.load_at = step
        slots = counts_LE.shape[1]
        experts = [read.metrics.get(f"layers/{i}/experts", slots) for i in range(len(counts_LE))]
        mean_L1 = counts_LE.sum(dim=1, keepdim=True) / torch.tensor(experts).double()[:, None]
        load_LE = counts_LE / mean_L1.clamp(min=1e-9)
        rows = [[round(value, 3) for value in row] for row in load_LE.tolist()]
        job.log.load(step, rows)


_CHANGED = {
    "clone": ("expert_cloned", "slot {expert} gets a copy of expert {parent}"),
    "retire": ("expert_retired", "expert {expert} retires"),
    "revive": ("expert_revived", "expert {expert} becomes a copy of expert {parent}"),
}


def changed_experts(job: Job, done: Done) -> None:
    """Experts have come or gone, or would have in a dry run."""
    step = job.progress.step
    loss = job.read.losses.get(step) if job.read is not None else None
    for change in done.changes:
        name, text = _CHANGED[change.kind]
        text = text.format(expert=change.expert, parent=change.parent)
        told = f"step {step}: MoE layer {change.layer}: {text} ({change.reason})"
        if done.dry:
            name, told = "surgery_dry_run", f"{told}: not done, surgery.dry_run=true"
        job.log.event(
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


def empty_step(job: Job) -> None:
    """A step without any target on any process."""
    step = job.progress.step
    job.log.event("step_empty", f"step {step} has no targets at all and is left out", step=step)


def evaluated(job: Job, metrics: dict[str, float], sample: str | None) -> None:
    """The validation's numbers and the sample."""
    if "val_loss" in metrics:
        each = [
            f"{name} {metrics[f'val_loss/{name}']:.4f}"
            for name in job.data.validation_names
            if f"val_loss/{name}" in metrics
        ]
        job.log.say(
            f"validation at step {job.progress.step}: loss {metrics['val_loss']:.4f}, perplexity "
            f"{metrics['val_perplexity']:.4g}{'; loss of ' * bool(each)}{', '.join(each)}",
            "cyan",
        )
    if sample is not None:
        job.log.event("sample", step=job.progress.step, sample=sample)
        text = f"{job.config.eval.sample_prompt}{sample}".replace("\n", "⏎ ")
        job.log.say(f"sample: {text}", "dim")
    if job.config.log.plots and time.monotonic() - job.plotted_at > PLOT_EVERY_S:
        plots(job)


# --- checkpoints --------------------------------------------------------------------------------


def saves(job: Job, final: bool = False) -> None:
    """Tell of saves that have ended. One that failed is told and the run goes on, but for the last.

    Raises:
        RunFailed: weights are not finite, or the last save of the run failed.
    """
    for saved in job.saver.poll():
        if saved.error is None:
            job.log.event("checkpoint", step=saved.step, folder=saved.folder, seconds=saved.seconds)
            size = human_bytes(saved.bytes)
            job.log.say(f"saved {saved.folder} ({size} in {human_time(saved.seconds)})", "dim")
            continue
        # what ends the run is told by the error that does
        ends = isinstance(saved.error, NonFiniteWeights) or (
            final and saved.error is job.saver.last_error
        )
        job.log.event(
            "checkpoint_failed",
            str(saved.error),
            style="bold red",
            told=not ends,
            step=saved.step,
        )
        if isinstance(saved.error, NonFiniteWeights):
            raise RunFailed(f"{saved.error}. The same command resumes from the last one")
        if ends:
            told = f"the last checkpoint could not be saved: {saved.error}"
            raise RunFailed(told) from saved.error
    if final and job.saver.last_error is not None:
        raise RunFailed(
            f"the last checkpoint could not be saved (step {job.saver.last_step}), as told above; "
            "once the cause is gone, the same command makes it"
        ) from job.saver.last_error


# --- the end ------------------------------------------------------------------------------------


def plots(job: Job) -> None:
    """plots/*.png from metrics.jsonl; a failure to draw is told and no more."""
    if not job.log.active:
        return
    job.plotted_at = time.monotonic()
    try:
        from training.report.plots import PICTURES, draw

        drawn = {path.stem: path for path in draw(job.run.folder)}
        step = job.progress.step
        if step == job.steps or step - job.pictured_at >= job.steps / PICTURE_SETS:
            job.pictured_at = step
            job.log.pictures(step, {name: drawn[name] for name in PICTURES if name in drawn})
    except Exception as error:  # drawing is never worth a run
        job.log.warn(f"no plots: {type(error).__name__}: {error}")


def check_export(job: Job) -> None:
    """Whether the trained model computes what its exported folder will.

    Raises:
        RunFailed: it does not, and nothing in the config says so.
    """
    lacks = acting(job.config, job.progress.step, job.steps)
    if lacks:
        text = f"this run is not to be exported: {job.model.config.family} has no "
        job.log.event("export_check", text + ", no ".join(lacks), exact=False, lacks=lacks)
        return
    differs = job.probe.export_differs(job.model.config.has_selection_bias)
    if differs is None:
        text = "the model was not compared with its export: no step was trained and there is no "
        text += "validation text; scripts/export_hf.py --check compares"
        job.log.event("export_check", text, exact=None, lacks=[])
        return
    if differs:
        job.log.event("export_check", exact=False, lacks=[])
        raise RunFailed(
            f"the trained model routes otherwise than its {job.model.config.family} export would; "
            "the last checkpoint holds it, and this is a fault of the program"
        )
    job.log.event("export_check", exact=True, lacks=[])


def end(job: Job, stopped: bool) -> None:
    """Why the run ended, and where everything lies."""
    folder, step = job.run.folder, job.progress.step
    if job.config.log.plots:
        plots(job)
    job.log.finish_tracking()  # what it has to say must not stand below the last lines
    if stopped:
        text = f"stopped on request after step {step}; the same command resumes from there"
    elif job.began == step:
        text = (
            f"nothing to do: this run was finished already, with all its {step} steps; raise "
            f"{'train.steps' if job.config.train.steps else 'train.epochs'} to train on, or give "
            "another run.name to start anew"
        )
    else:
        text = f"done: {step} steps, {human_count(job.progress.tokens)} tokens"
    job.log.event("stopped" if stopped else "done", text, style="bold green", step=step)
    job.log.say(f"  checkpoint  {folder / 'checkpoints' / 'latest'}")
    job.log.say(f"  metrics     {folder / 'metrics.jsonl'}, events.jsonl, config.yaml")
    if job.config.log.plots:
        job.log.say(f"  plots       {folder / 'plots'}")
    if not stopped and not acting(job.config, step, job.steps):
        latest = folder / "checkpoints" / "latest"
        job.log.say(f"  next        python scripts/export_hf.py {latest} OUT_FOLDER")


def out_of_memory(job: Job, error: BaseException) -> RunFailed:
    """An error that says how routing was spread and what to lower."""
    train = job.config.train
    settings: list[tuple[str, object]] = [("train.micro_batch_size", train.micro_batch_size)]
    if train.checkpointing != "full":
        settings.append(("train.checkpointing=full", train.checkpointing))
    if job.config.model.save == "h":
        settings.append(("model.save=x", "h"))
    settings.append(("data.seq_len", job.config.data.seq_len))
    message = out_of_memory_message(
        error,
        rank=job.world.rank,
        step=job.progress.step,
        counts_LE=job.last_counts.counts_LE,
        settings=settings,
    )
    return RunFailed(message)
