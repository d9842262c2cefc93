"""Train a Mixture-of-Experts language model.

    python train.py CONFIG [section.key=value ...]
    torchrun --standalone --nproc-per-node=N train.py CONFIG [section.key=value ...]
    python train.py --help optim.schedule        what these settings are; --help alone: the sections
    python train.py --version

CONFIG is a YAML file, for example configs/quickstart.yaml; every setting is explained in
docs/configuration.md. The same command again resumes from the last good checkpoint.

Exit codes: 0 done; 2 a mistake in the config or the data; 69 another process, a host or a device
was lost; 75 stopped on request (SIGTERM, Ctrl+C) with a checkpoint saved; 1 anything else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import closing

# Read when torch starts its threads: a waiting thread sleeps. By default it spins, and two threads
# on two cores that other programs use as well are then many times slower than one.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    sys.exit("error: this Python has no PyTorch; type . .venv/bin/activate first (docs/install.md)")

from moe.control import scheduled_evaluation
from parallel import World, launched_hosts, launched_rank, launched_size, shutdown, start
from training import faults
from training.assemble import make_train_state, model_config
from training.bias_calibration import calibrate
from training.checkpoint.saver import Saver
from training.checkpoint.weights import tokenizer_folder
from training.config.build import (
    Config,
    Plan,
    field_names,
    load_config,
    make_plan,
    versions,
    write_resolved,
)
from training.config.describe import describe
from training.config.load import ConfigError, read_words
from training.config.sections import Keep
from training.config.validate import check_run
from training.data import build_data, load_tokenizer
from training.device import open_device, seed_all, setup_determinism
from training.due import due_after
from training.evaluate import on_schedule, sample_text, validate
from training.faults import StopRequest
from training.out_of_memory import out_of_memory
from training.probe import make_probe
from training.report.ending import check_export, report_checkpoints, report_end
from training.report.header import log_run_header
from training.report.log_step import (
    log_window,
    report_empty_step,
    report_evaluation,
    report_expert_changes,
)
from training.report.pace import Pace
from training.report.run_log import RunLog
from training.run import discard_new_run_folder, open_run, release, total_steps
from training.run_state import RunState
from training.snapshot import restore_random_states, snapshot
from training.step import agree_on_step, begin_step, end_step, prepare_evaluation, train_step
from training.surgery.changes import change_experts

# ---- before the first step ---------------------------------------------------------------------


def prepare(config: Config, plan: Plan, world: World) -> RunState:
    """Run folder, text, model, optimizer, and the state of the last checkpoint if there is one."""
    if config.run.deterministic:
        setup_determinism()
    device = open_device(plan.device, world.local_rank)
    seed_all(config.run.seed, world.rank)

    run = open_run(config, world)
    start = config.model.init_from
    tokenizer = load_tokenizer(
        config.data,
        run.folder / "tokenizer",
        init_from=None if start is None else tokenizer_folder(start),
        init_name=start,
    )
    architecture = model_config(config, tokenizer)
    data = build_data(config.data, tokenizer, seed=config.run.seed)
    if run.position is not None:
        data.load_state_dict(run.position)
    position = data.state_dict()
    steps = total_steps(config, data.rows_per_epoch, step=run.step, rows=position["rows"])
    check_run(config, steps)

    if world.main:  # only now: a refused start leaves the files of earlier ones alone
        write_resolved(config, run.folder / "config.yaml")
    folder = run.folder if world.main else None
    trackers = config.log.trackers
    log = RunLog(folder, run.attempt, run.step, trackers, config.to_dict() if trackers else None)

    train_state = make_train_state(
        config, architecture, plan, world, device, steps=steps, checkpoint=run.checkpoint
    )
    train_state.step, train_state.tokens = run.step, run.tokens
    if run.checkpoint is not None:
        restore_random_states(run.checkpoint, world, config.run.seed)
    prepare_evaluation(train_state)

    keep = config.checkpoint.keep or Keep()
    saver = Saver(
        run.checkpoints,
        world,
        keep_last=keep.last,
        keep_every=keep.every,
        background=config.checkpoint.async_save,
        last_step=run.step if run.checkpoint is not None else None,
    )
    state = RunState(
        config=config,
        plan=plan,
        run=run,
        log=log,
        tokenizer=tokenizer,
        data=data,
        train=train_state,
        probe=make_probe(train_state.model, data, world, device),
        saver=saver,
        steps=steps,
        position=position,
    )
    if run.checkpoint is None and config.router.bias is not None and config.router.bias.calibrate:
        calibrate(state)
    log_run_header(state)
    return state


# ---- the loop ----------------------------------------------------------------------------------


def train(state: RunState, stop: StopRequest) -> int:
    """Train to the last step, or until a stop is asked for; the exit code."""
    config, world = state.config, state.world
    state.pace = Pace()
    stream = state.data.steps(
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=state.plan.micro_batch_size,
        rank=world.rank,
        world=world.size,
        steps=max(0, state.steps - state.step),
        pin_memory=state.device.type == "cuda",
    )
    with closing(stream):
        for batches in stream:
            totals = agree_on_step(world, batches, bool(stop))
            if totals.stop:
                break
            changes = begin_step(state.train)
            state.router_changes += [(state.step, change) for change in changes]
            if totals.targets:
                state.probe.set_batch_if_missing(batches[0], state.device)
                state.results.append(train_step(state.train, batches, totals))
            else:
                report_empty_step(state)
            end_step(state.train, totals)
            state.position = state.data.state_dict()

            due = due_after(config, state.step, state.steps)
            if due.log:
                metrics = log_window(state)
                for done in change_experts(state):
                    report_expert_changes(state, done)
                if due.evaluate:
                    with state.pace.pause():
                        metrics |= evaluate(state)
                state.log.metrics(metrics)
            if due.save:
                with state.pace.pause():
                    state.saver.save(snapshot(state))
            report_checkpoints(state)

    if state.results:  # a stop between two log lines
        state.log.metrics(log_window(state))
    return finish(state, stopped=state.step < state.steps)


def evaluate(state: RunState) -> dict[str, float]:
    """Validation metrics, and a sample of text on the screen and in events.jsonl."""
    model, evaluation = state.model, state.config.eval

    def measure() -> dict[str, float]:
        sources = state.data.validation(
            micro_batch_size=state.plan.micro_batch_size,
            rank=state.world.rank,
            world=state.world.size,
            max_rows=evaluation.rows,
        )
        return validate(model, sources, world=state.world, device=state.device)

    metrics = measure()
    if on_schedule(model):  # what is exported has the K of the schedule's end
        with scheduled_evaluation(model):
            metrics |= {f"{name}_current_k": value for name, value in measure().items()}
    text, sample = None, evaluation.sample
    if sample is not None:
        text = sample_text(model, state.tokenizer, sample.prompt, sample.tokens, world=state.world)
    report_evaluation(state, metrics, text)
    return metrics


def finish(state: RunState, stopped: bool) -> int:
    """Save what is not yet saved, wait until it is on disk, and say where everything lies."""
    if state.saver.last_step != state.step:
        state.saver.save(snapshot(state))
    state.saver.wait()
    report_checkpoints(state, final=True)
    if not stopped:
        check_export(state)
    report_end(state, stopped)
    state.data.close()
    state.log.close()
    return faults.STOPPED if stopped else faults.DONE


# ---- the program -------------------------------------------------------------------------------


EXAMPLE = "python train.py configs/quickstart.yaml train.steps=50"


def explain(arguments: Sequence[str]) -> int:
    """Print the versions, this program's help, or that of the settings that are named."""
    if "--version" in arguments:
        print("\n".join(f"{name} {version}" for name, version in versions().items()))
        return faults.DONE
    places = [word for word in arguments if not word.startswith("-")]
    try:
        for place in places:
            print("\n".join(describe(place, field_names())))
    except ConfigError as error:
        return faults.report_error(0, error, faults.USER_ERROR)
    if not places:
        print(__doc__, *describe("", {}), sep="\n")
    return faults.DONE


def main(arguments: Sequence[str]) -> int:
    """Train as the command line says; the exit code."""
    if {"-h", "--help", "--version"} & set(arguments):
        return explain(arguments)
    if not arguments:
        if launched_rank() == 0:
            print(__doc__, file=sys.stderr)
        return faults.USER_ERROR
    world, timeout_s, state = World(), 0.0, None
    try:
        world = World(rank=launched_rank())  # until it is known
        path, overrides = read_words(arguments, field_names())
        if path is None:
            raise ConfigError(f"train.py needs a config file, for example: {EXAMPLE}")
        config = load_config(path, overrides)
        timeout_s = config.parallel.timeout_s
        plan = make_plan(config, launched_size(), hosts=launched_hosts())
        plan.offload.check_folder()
        world = start(plan.device, timeout_s, alone=plan.sharded)
        state = prepare(config, plan, world)
        with StopRequest(config.checkpoint.stop_after_hours) as stop:
            code = train(state, stop)
        shutdown(world)
        return code
    except Exception as error:
        if state is None:
            discard_new_run_folder()
        elif isinstance(error, torch.OutOfMemoryError):
            error = out_of_memory(state, error)
        return faults.report(error, world.rank, timeout_s, training=state is not None)
    finally:
        if state is not None:
            # A save in the background may wait for a process that is gone.
            state.saver.wait(faults.PATIENCE_S if world.size > 1 else None)
            state.log.close()
            release()


if __name__ == "__main__":
    faults.exit_process(main(sys.argv[1:]))
