"""What a run says of its checkpoints, and at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.checkpoint.files import NonFiniteWeights
from training.config.export_compat import acting
from training.faults import RunFailed
from training.report.log_step import draw_plots
from training.report.units import human_bytes, human_count, human_time

if TYPE_CHECKING:
    from training.run_state import RunState


def report_checkpoints(state: RunState, final: bool = False) -> None:
    """Report saves that have ended. After a failed one training continues, but for the last.

    Raises:
        RunFailed: weights are not finite, or the last save of the run failed.
    """
    for saved in state.saver.poll():
        if saved.error is None:
            state.log.event(
                "checkpoint", step=saved.step, folder=saved.folder, seconds=saved.seconds
            )
            size = human_bytes(saved.bytes)
            state.log.say(f"saved {saved.folder} ({size} in {human_time(saved.seconds)})", "dim")
            continue
        # what ends the run is told by the error that does
        ends = isinstance(saved.error, NonFiniteWeights) or (
            final and saved.error is state.saver.last_error
        )
        state.log.event(
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
    if final and state.saver.last_error is not None:
        raise RunFailed(
            f"the last checkpoint could not be saved (step {state.saver.last_step}), as told "
            "above; once the cause is gone, the same command makes it"
        ) from state.saver.last_error


def check_export(state: RunState) -> None:
    """Whether the trained model computes what its exported folder will.

    Raises:
        RunFailed: it does not, and nothing in the config says so.
    """
    lacks = acting(state.config, state.step, state.steps)
    if lacks:
        text = f"this run is not to be exported: {state.model.config.family} has no "
        state.log.event("export_check", text + ", no ".join(lacks), exact=False, lacks=lacks)
        return
    differs = state.probe.export_differs(state.model.config.has_selection_bias)
    if differs is None:
        text = "the model was not compared with its export: no step was trained and there is no "
        text += "validation text; scripts/export_hf.py --check compares"
        state.log.event("export_check", text, exact=None, lacks=[])
        return
    if differs:
        state.log.event("export_check", exact=False, lacks=[])
        raise RunFailed(
            f"the trained model routes otherwise than its {state.model.config.family} export "
            "would; the last checkpoint holds it, and this is a fault of the program"
        )
    state.log.event("export_check", exact=True, lacks=[])


def report_end(state: RunState, stopped: bool) -> None:
    """Why the run ended, and where everything lies."""
    folder, step = state.run.folder, state.step
    if state.config.log.plots:
        draw_plots(state)
    state.log.finish_tracking()  # what it has to say must not stand below the last lines
    if stopped:
        text = f"stopped on request after step {step}; the same command resumes from there"
    elif state.run.step == step:
        text = (
            f"nothing to do: this run was finished already, with all its {step} steps; raise "
            f"{'train.steps' if state.config.train.steps else 'train.epochs'} to train on, or give "
            "another run.name to start anew"
        )
    else:
        text = f"done: {step} steps, {human_count(state.train.tokens)} tokens"
    state.log.event("stopped" if stopped else "done", text, style="bold green", step=step)
    state.log.say(f"  checkpoint  {folder / 'checkpoints' / 'latest'}")
    state.log.say(f"  metrics     {folder / 'metrics.jsonl'}, events.jsonl, config.yaml")
    if state.config.log.plots:
        state.log.say(f"  plots       {folder / 'plots'}")
    if not stopped and not acting(state.config, step, state.steps):
        latest = folder / "checkpoints" / "latest"
        state.log.say(f"  next        python scripts/export_hf.py {latest} OUT_FOLDER")
