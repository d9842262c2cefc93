"""Train a Mixture-of-Experts language model.

    python train.py CONFIG [section.key=value ...]
    torchrun --standalone --nproc-per-node=N train.py CONFIG [section.key=value ...]

CONFIG is a YAML file, for example configs/quickstart.yaml; every setting is explained in
docs/configuration.md. The same command again resumes from the last good checkpoint.

Exit codes: 0 done; 2 a mistake in the config or the data; 69 another process, a host or a device
was lost; 75 stopped on request (SIGTERM, Ctrl+C) with a checkpoint saved; 1 anything else.
"""

from __future__ import annotations

import os
import sys
import traceback
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

from moe.control import begin_step
from parallel import World, launched_hosts, launched_rank, launched_size, shutdown, start
from training import faults
from training.assemble import make_trainee, model_config, restore_random_states, snapshot
from training.bias_calibration import calibrate
from training.checkpoint.files import CheckpointError, Saver
from training.checkpoint.weights import tokenizer_folder
from training.config.build import Config, Plan, field_names, load_config, make_plan, write_resolved
from training.config.export_compat import acting
from training.config.load import ConfigError, read_words
from training.config.validate import check_routers
from training.data import build_data, load_tokenizer
from training.device import open_device, seed_all, setup_determinism
from training.evaluate import as_trained, on_schedule, sample_text, validate
from training.faults import RunFailed, StopRequest
from training.optim.schedule import learning_rate
from training.probe import make_probe
from training.report import status
from training.report.run_log import RunLog
from training.run import open_run, release, total_steps, withdraw
from training.run_state import Job
from training.step import Pace, StepResult, agree_on_step, train_step
from training.surgery.changes import change_experts

# ---- before the first step ---------------------------------------------------------------------


def prepare(config: Config, plan: Plan, world: World) -> Job:
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
    progress = run.progress()
    if run.checkpoint is not None:
        data.load_state_dict(progress.position)
    else:
        progress.position = data.state_dict()
    rows = progress.position["rows"]
    steps = total_steps(config, data.rows_per_epoch, step=progress.step, rows=rows)
    check_routers(config, steps)

    if world.main:  # only now: a refused start leaves the files of earlier ones alone
        write_resolved(config, run.folder / "config.yaml")
    folder = run.folder if world.main else None
    log = RunLog(folder, run.attempt, status.wandb_settings(config, run))

    trainee = make_trainee(config, architecture, plan, device, steps, run.checkpoint)
    if run.checkpoint is not None:
        restore_random_states(run.checkpoint, world, config.run.seed)
    begin_step(trainee.model, max(1, progress.step))
    if trainee.sparsity is not None:
        trainee.sparsity.begin(progress.step + 1)

    saver = Saver(
        run.checkpoints,
        world,
        keep_last=config.checkpoint.keep_last,
        background=config.checkpoint.async_save,
        last_step=progress.step if run.checkpoint is not None else None,
    )
    job = Job(
        config,
        plan,
        world,
        device,
        run,
        log,
        tokenizer,
        data,
        trainee,
        make_probe(trainee.model, data, world, device),
        saver,
        steps,
        progress,
        began=progress.step,
    )
    if run.checkpoint is None and config.router.calibrate_bias:
        calibrate(job)
    status.start(job)
    return job


# ---- the loop ----------------------------------------------------------------------------------


def train(job: Job, stop: StopRequest) -> int:
    """Train to the last step, or until a stop is asked for; the exit code."""
    config, world, log, progress = job.config, job.world, job.log, job.progress
    window: list[StepResult] = []  # steps since the last log line, their numbers on the device
    pace = Pace()
    stream = job.data.steps(
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=job.plan.micro_batch_size,
        rank=world.rank,
        world=world.size,
        steps=max(0, job.steps - progress.step),
        pin_memory=job.device.type == "cuda",
    )
    with closing(stream):
        for batches in stream:
            totals = agree_on_step(world, batches, bool(stop))
            if totals.stop:
                break
            progress.step += 1
            changes = begin_step(job.model, progress.step)
            job.router_changes += [(progress.step, change) for change in changes]
            if totals.targets:
                job.probe.offer(batches[0], job.device)
                result = train_step(
                    job.trainee.forward,
                    job.optimizer,
                    batches,
                    totals,
                    step=progress.step,
                    lr=learning_rate(config.optim, progress.step - 1, job.steps),
                    router=config.router,
                    world=world,
                    device=job.device,
                    keep=job.last_counts,
                    health=job.trainee.health,
                    graph=job.trainee.graph,
                    sparsity=job.trainee.sparsity,
                    worth=job.trainee.worth,
                )
                window.append(result)
            else:
                status.empty_step(job)
            if job.trainee.sparsity is not None:
                job.trainee.sparsity.begin(progress.step + 1)
            progress.tokens += totals.tokens
            progress.position = job.data.state_dict()

            due = status.due(config, progress.step, job.steps)
            if due.log:
                metrics = status.window(job, window, pace)
                for done in change_experts(job):
                    status.changed_experts(job, done)
                if due.evaluate:
                    with pace.pause():
                        metrics |= evaluate(job)
                log.metrics(metrics)
                window.clear()
            if due.save:
                with pace.pause():
                    save(job)
            status.saves(job)

    if window:  # a stop between two log lines
        log.metrics(status.window(job, window, pace))
    return finish(job, stopped=progress.step < job.steps)


def evaluate(job: Job) -> dict[str, float]:
    """Validation metrics, and a sample of text on the screen and in events.jsonl."""
    evaluation = job.config.eval

    def measure() -> dict[str, float]:
        sources = job.data.validation(
            micro_batch_size=job.plan.micro_batch_size,
            rank=job.world.rank,
            world=job.world.size,
            max_rows=evaluation.rows,
        )
        return validate(job.model, sources, world=job.world, device=job.device)

    metrics = measure()
    if on_schedule(job.model):  # what is exported has the K of the schedule's end
        with as_trained(job.model):
            metrics |= {f"{name}_current_k": value for name, value in measure().items()}
    text = None
    if evaluation.sample_prompt is not None:
        text = sample_text(
            job.model,
            job.tokenizer,
            evaluation.sample_prompt,
            evaluation.sample_tokens,
            world=job.world,
        )
    status.evaluated(job, metrics, text)
    return metrics


def save(job: Job) -> None:
    """A checkpoint of this moment; in the background if `checkpoint.async_save`."""
    progress = job.progress
    job.saver.save(
        snapshot(
            step=progress.step,
            tokens=progress.tokens,
            position=progress.position,
            trainee=job.trainee,
            folder=job.run.folder,
            attempt=job.run.attempt,
            inexact=acting(job.config, progress.step, job.steps),
        )
    )


def finish(job: Job, stopped: bool) -> int:
    """Save what is not yet saved, wait until it is on disk, and say where everything lies."""
    if job.saver.last_step != job.progress.step:
        save(job)
    job.saver.wait()
    status.saves(job, final=True)
    if not stopped:
        status.check_export(job)
    status.end(job, stopped)
    job.data.close()
    job.log.close()
    return faults.STOPPED if stopped else faults.DONE


# ---- the program -------------------------------------------------------------------------------


EXAMPLE = "python train.py configs/quickstart.yaml train.steps=50"


def main(arguments: Sequence[str]) -> int:
    """Train as the command line says; the exit code."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return faults.DONE
    if not arguments:
        if launched_rank() == 0:
            print(__doc__, file=sys.stderr)
        return faults.USER_ERROR
    world, timeout_s = World(), 0.0
    try:
        world = World(rank=launched_rank())  # until it is known
        path, overrides = read_words(arguments, field_names())
        if path is None:
            raise ConfigError(f"train.py needs a config file, for example: {EXAMPLE}")
        config = load_config(path, overrides)
        timeout_s = config.parallel.timeout_s
        plan = make_plan(config, launched_size(), hosts=launched_hosts())
        plan.offload.check_folder()
        world = start(plan.device, timeout_s, alone=plan.engine is not None)
        job = prepare(config, plan, world)
    except faults.USER_ERRORS as error:
        withdraw()
        return faults.tell(world.rank, error, faults.USER_ERROR)
    except Exception as error:
        withdraw()
        lost = faults.failed_collective(error, timeout_s)
        if lost is not None:
            return faults.tell(world.rank, RunFailed(lost), faults.LOST)
        if (told := faults.at_start(error)) is not None:
            return faults.tell(world.rank, told, faults.FAILED)
        traceback.print_exc()
        return faults.FAILED

    try:
        with StopRequest() as stop:
            code = train(job, stop)
        shutdown(world)
        return code
    except torch.OutOfMemoryError as error:
        return faults.tell(world.rank, status.out_of_memory(job, error), faults.FAILED)
    except faults.USER_ERRORS as error:  # a block that is read for the first time may be damaged
        return faults.tell(world.rank, RunFailed(error), faults.USER_ERROR)
    except Exception as error:
        lost = faults.failed_collective(error, timeout_s)
        if lost is not None:
            return faults.tell(world.rank, RunFailed(lost), faults.LOST)
        if isinstance(error, (RunFailed, CheckpointError)):
            return faults.tell(world.rank, error, faults.FAILED)
        traceback.print_exc()
        return faults.LOST if isinstance(error, torch.AcceleratorError) else faults.FAILED
    finally:
        # A save in the background may wait for a process that is gone.
        job.saver.wait(faults.PATIENCE_S if world.size > 1 else None)
        job.log.close()
        release()


if __name__ == "__main__":
    faults.leave(main(sys.argv[1:]))
