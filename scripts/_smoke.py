"""What scripts/smoke_gpu.sh runs: commands in chains, and what must come of each.

A chain's commands run one after the other, chains beside each other, all in a scratch folder that
looks like the checkout. A command stands here as the README or docs/parallel.md prints it, with
settings added at its end where one card cannot do the whole (tests/scripts/test_smoke.py compares).
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from scripts._command import make_parser
from training.config.build import git_commit
from training.config.load import user_path
from training.report.files import read_lines, read_metrics

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("train.py", "configs", "scripts", "moe", "models", "parallel", "training", "README.md")
STEP_S = 230.0
"""A command that takes longer has failed."""


class Failed(Exception):
    """A command did not do what it must; the message is one line."""


@dataclass(frozen=True)
class Lab:
    """The scratch folder in which commands run."""

    folder: Path

    def losses(self, run: str) -> dict[int, tuple[float, float]]:
        """(loss, gradient norm) at each logged step of a run."""
        lines = read_metrics(self.folder / "runs" / run)
        return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines if "loss" in line}


class Step:
    """One command. `{text}` and `{python_sources}` stand for files that this machine has.

    Args:
        checks: (function, arguments…) each; called with the lab and all that the command printed
            before its arguments, and raises `Failed`.
        code: exit code that it must have.
        stop: signal to send once this run has logged this step.
    """

    def __init__(
        self,
        command: str,
        *checks: tuple[Any, ...],
        code: int = 0,
        stop: tuple[signal.Signals, str, int] | None = None,
    ) -> None:
        self.command, self.checks, self.code, self.stop = command, checks, code, stop


class Chain:
    """Commands that need one another.

    Args:
        cuda: only with a GPU.
        package: only where this package is installed.
        gib: only on a GPU with so much memory.
    """

    def __init__(
        self,
        name: str,
        *steps: Step,
        cuda: bool = False,
        package: str | None = None,
        gib: float = 0,
    ) -> None:
        self.name, self.steps, self.cuda, self.package, self.gib = name, steps, cuda, package, gib


# ---- what must come of a command ---------------------------------------------------------------


def learns(lab: Lab, output: str, run: str) -> None:
    """The loss falls, and every logged step counted."""
    losses = [loss for loss, _ in lab.losses(run).values()]
    if len(losses) < 2 or not losses[-1] < losses[0] < 100:
        raise Failed(f"the loss of runs/{run} does not fall: {losses}")


def same_losses(lab: Lab, output: str, first: str, second: str) -> None:
    """The second run has the first's losses and gradient norms, bit for bit, at the first's steps.

    A run that was stopped has logged one step more.
    """
    one, other = lab.losses(first), lab.losses(second)
    differing = [step for step, values in one.items() if other.get(step) != values]
    if differing or not one:
        raise Failed(f"runs/{first} and runs/{second} differ from step {differing[:1]} on")


def near_losses(lab: Lab, output: str, first: str, second: str, tolerance: float) -> None:
    """Two runs' losses agree within a share of their size."""
    one, other = lab.losses(first), lab.losses(second)
    if not one or one.keys() != other.keys():
        raise Failed(f"runs/{first} and runs/{second} logged {sorted(one)}, {sorted(other)}")
    worst = max(abs(one[step][0] / other[step][0] - 1) for step in one)
    if not worst <= tolerance:
        raise Failed(f"losses of runs/{first} and runs/{second} differ by {worst:.1e}")


def begins_where(lab: Lab, output: str, run: str, before: str) -> None:
    """A run that continues another's weights starts near that one's last loss."""
    first, last = lab.losses(run), lab.losses(before)
    start, end = first[min(first)][0], last[max(last)][0]
    if not start < end + 0.3:
        raise Failed(f"runs/{run} starts at {start:.3f}; runs/{before} ended at {end:.3f}")


def stopped_between(lab: Lab, output: str, run: str) -> None:
    """The run was stopped before its end and resumed, so it has two attempts."""
    lines = read_lines(lab.folder / "runs" / run / "metrics.jsonl")
    attempts = {line["attempt"] for line in lines}
    if attempts != {0, 1}:
        raise Failed(f"runs/{run} has attempts {sorted(attempts)}, expected 0 and 1")


def says(lab: Lab, output: str, pattern: str) -> None:
    """The output has a match of this regular expression."""
    if re.search(pattern, output) is None:
        raise Failed(f"nothing in the output matches {pattern!r}")


def quiet(lab: Lab, output: str) -> None:
    """No library warns at the start of a healthy run."""
    found = [line for line in output.splitlines() if re.search(r"[Ww]arning\b", line)]
    if found:
        raise Failed(f"a warning: {found[0].strip()[:160]}")


def leaves(lab: Lab, output: str, path: str, size: int) -> None:
    """A file of at least so many bytes is there."""
    file = lab.folder / path
    if not file.is_file() or file.stat().st_size < size:
        raise Failed(f"{path} is missing or smaller than {size} bytes")


# ---- the commands ------------------------------------------------------------------------------

QUICKSTART = "python train.py configs/quickstart.yaml"
TORCHRUN_ONE = "torchrun --standalone --nproc-per-node=1 train.py configs/quickstart.yaml"
MEASURE = "python scripts/estimate.py --measure --gpu H200"
EVERY_5 = (
    "log.every_steps=5 optim.schedule.warmup_steps=5 eval.every_steps=null eval.sample=null "
    "log.plots=false"
)
SHORT = f"train.steps=60 checkpoint.every_steps=10 {EVERY_5}"
ENGINE = f"train.steps=20 {EVERY_5} optim.lr=1e-3"
GRAPH = f"{SHORT} router.balance.kind=lagged"
LATENT = (
    "'data.sources=[{{path: \"bundled:moby-dick\"}}]' data.tokenizer=bundled:moby-dick "
    "data.validation=null data.workers=2 data.seq_len=512 model.vocab_size=4096 "
    "model.num_hidden_layers=3 model.hidden_size=256 model.intermediate_size=512 "
    "model.moe_intermediate_size=128 train.steps=20 train.global_batch_size=16 optim.lr=1e-3"
)
REAL = (
    "train.steps=20 train.global_batch_size=32 optim.schedule.warmup_steps=10 log.every_steps=5 "
    "log.plots=false"
)
NARROW = "train.checkpointing=none optim.storage.weights=bfloat16 optim.storage.moments=bfloat16"
ON_CPU = "run.device=cpu train.compile=false"
FOUR = "parallel.nodes=2 parallel.expert=2"

CHAINS = (  # the longest first, as only so many run at a time
    Chain(
        "memory",  # exit code 1 if the peak is not the estimated one
        Step(f"{MEASURE} configs/tessera_1b_a200m.yaml train.global_batch_size=16"),
        Step(
            f"{MEASURE} configs/olmoe_1b_7b.yaml {NARROW} train.micro_batch_size=8 "
            "train.global_batch_size=8"
        ),
        Step(
            f"{MEASURE} configs/qwen3_30b_a3b.yaml {NARROW} train.micro_batch_size=4 "
            "train.global_batch_size=4 model.num_hidden_layers=8"
        ),
        cuda=True,
        gib=130,  # 80, beside the other chains
    ),
    Chain(
        "killed and stopped",
        Step(f"{QUICKSTART} {SHORT} run.name=whole", (learns, "whole")),
        Step(
            f"{QUICKSTART} {SHORT} run.name=killed",
            code=-signal.SIGKILL,
            stop=(signal.SIGKILL, "killed", 20),
        ),
        Step(f"{QUICKSTART} {SHORT} run.name=killed", (same_losses, "whole", "killed")),
        Step(
            f"{QUICKSTART} {SHORT} run.name=stopped",
            code=75,
            stop=(signal.SIGTERM, "stopped", 15),
        ),
        Step(
            f"{QUICKSTART} {SHORT} run.name=stopped",
            (stopped_between, "stopped"),
            (same_losses, "whole", "stopped"),
        ),
    ),
    Chain(
        "use it",
        Step(
            f"{QUICKSTART} train.steps=50 run.name=try",
            (learns, "try"),
            (quiet,),
            (says, "tokenizer"),
        ),
        Step(
            "python scripts/export_hf.py runs/try/checkpoints/latest out/ --check",
            (says, "passed|equal"),
        ),
        Step("python scripts/import_hf.py out/ continued/"),
        Step(
            f"{QUICKSTART} train.steps=10 run.name=on model.init_from=continued/ {EVERY_5}",
            (begins_where, "on", "try"),
        ),
        Step('python scripts/generate.py runs/try --prompt "Call me"', (says, ".{40}")),
        Step("python scripts/generate.py out/ --prompt One --prompt Two --temperature 0"),
        Step("python scripts/report.py runs/try", (leaves, "runs/try/report.html", 9999)),
        Step("python scripts/doctor.py runs/try"),
    ),
    Chain(
        "one billion parameters on real text",
        Step(
            "python scripts/prepare_data.py {python_sources} --format text --out store "
            "--train-tokenizer 32768",
            (leaves, "store/tokenizer/tokenizer.json", 99_999),
        ),
        Step(
            "python train.py configs/tessera_1b_a200m.yaml 'data.sources=[{path: store}]' "
            f"data.tokenizer=null run.name=real {REAL}",
            (learns, "real"),
            (quiet,),
            (says, "experts hopper|experts triton"),
        ),
        cuda=True,
    ),
    Chain(
        "one process of torchrun",
        Step(f"{QUICKSTART} {ENGINE} run.name=alone", (learns, "alone")),
        Step(
            f"{TORCHRUN_ONE} {ENGINE} run.name=fsdp2 parallel.engine=fsdp2",
            (near_losses, "fsdp2", "alone", 2e-2),
        ),
        Step(
            f"bash scripts/launch/one_host.sh configs/quickstart.yaml {ENGINE} run.name=host",
            (near_losses, "host", "alone", 2e-2),
        ),
        cuda=True,
    ),
    Chain(
        "deepspeed",  # its own chain: it may be missing
        Step(
            f"{TORCHRUN_ONE} {ENGINE} run.name=deepspeed parallel.engine=deepspeed",
            (learns, "deepspeed"),
        ),
        cuda=True,
        package="deepspeed",
    ),
    Chain(
        "CUDA graph",
        Step(f"{QUICKSTART} {GRAPH} run.name=launched", (learns, "launched")),
        Step(
            f"{QUICKSTART} {GRAPH} run.name=captured train.cuda_graph=true",
            (same_losses, "launched", "captured"),
        ),
        cuda=True,
    ),
    Chain(
        "dense model",
        Step(
            f"python train.py configs/dense_twin.yaml train.steps=20 run.name=dense {EVERY_5}",
            (learns, "dense"),
        ),
        Step("python scripts/export_hf.py runs/dense dense/ --check"),
    ),
    Chain(
        "latent attention",
        Step(
            f"python train.py configs/deepseek_v3_2b.yaml {LATENT} run.name=latent {EVERY_5}",
            (learns, "latent"),
            (quiet,),
        ),
        Step("python scripts/export_hf.py runs/latent latent/ --check"),
    ),
    Chain(
        "four processes",
        Step(
            "torchrun --standalone --nproc-per-node=4 train.py configs/quickstart.yaml "
            f"train.steps=50 {FOUR} run.name=four {ON_CPU} train.steps=10 {EVERY_5}",
            (learns, "four"),
        ),
        Step(f"python scripts/verify.py configs/quickstart.yaml --nproc 4 {FOUR} {ON_CPU}"),
    ),
    Chain(
        "two processes",
        Step(
            f"env GPUS=2 bash scripts/launch/one_host.sh configs/quickstart.yaml {FOUR} "
            f"run.device=cpu train.steps=50 run.name=two train.steps=10 {EVERY_5} "
            "train.compile=false",
            (learns, "two"),
        ),
    ),
    Chain(
        "own text",
        Step(
            f"{QUICKSTART} run.name=mine 'data.sources=[{{path: my_texts/}}]' "
            f"data.tokenizer=null train.steps=10 {EVERY_5}",
            (learns, "mine"),
            (says, "files? taken"),
        ),
    ),
    Chain(
        "estimate",
        Step(
            "python scripts/estimate.py configs/tessera_1b_a200m.yaml --gpus 1 --gpu-memory 80",
            (says, "fits"),
        ),
    ),
)


# ---- running them ------------------------------------------------------------------------------


def words(command: str, values: dict[str, str]) -> list[str]:
    """Arguments of a command as a shell would split it, with this machine's Python."""
    for name, value in values.items():
        command = command.replace("{" + name + "}", shlex.quote(value))
    first, *rest = shlex.split(command)
    if first == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", *rest]
    return [sys.executable if first == "python" else first, *rest]


def run_step(step: Step, lab: Lab, values: dict[str, str], log: Path) -> None:
    """Run one command to its end; its output goes to `log`."""
    environment = os.environ | {
        "PYTHON": sys.executable,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    with log.open("w") as file:
        process = subprocess.Popen(
            words(step.command, values),
            cwd=lab.folder,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        deadline, asked = time.monotonic() + STEP_S, step.stop is None
        while process.poll() is None:
            if time.monotonic() > deadline:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise Failed(f"took longer than {STEP_S:.0f} s")
            if not asked and max(lab.losses(step.stop[1]), default=0) >= step.stop[2]:
                process.send_signal(step.stop[0])
                asked = True
            time.sleep(0.02)
    output = log.read_text(errors="replace")
    if process.returncode != step.code:
        last = " / ".join(line.strip() for line in output.splitlines()[-3:])
        raise Failed(f"exit code {process.returncode} instead of {step.code}: {last[-400:]}")
    for check, *given in step.checks:
        check(lab, output, *given)


def run_chain(chain: Chain, lab: Lab, values: dict[str, str]) -> str | None:
    """Run a chain up to its first failure; what failed, if anything."""
    for number, step in enumerate(chain.steps, start=1):
        name = re.sub(r"\W+", "-", chain.name)
        begin = time.monotonic()
        problem = None
        try:
            run_step(step, lab, values, lab.folder / "logs" / f"{name}-{number}.log")
        except Failed as error:
            problem = str(error)
        mark = "ok    " if problem is None else "FAILED"
        print(f"{mark} {time.monotonic() - begin:5.1f} s  {chain.name}: {step.command}", flush=True)
        if problem is not None:
            print(f"       {problem}", flush=True)
            return f"{chain.name}, command {number}"
    return None


def possible(chain: Chain, cuda: bool) -> str | None:
    """Why this machine cannot run a chain; None if it can."""
    if chain.cuda and not cuda:
        return "needs a CUDA device"
    if chain.gib:
        if torch.cuda.get_device_properties(0).total_memory < chain.gib * 2**30:
            return f"needs a GPU with {chain.gib:g} GiB"
    if chain.package is not None and find_spec(chain.package) is None:
        return f"{chain.package} is not installed"
    return None


def python_sources() -> str:
    """A glob of English-like text that any machine with transformers has."""
    import transformers

    return str(Path(transformers.__file__).parent / "models" / "[a-d]*" / "*.py")


def make_lab(folder: Path) -> Lab:
    """A folder in which the README's commands can be typed as in the checkout."""
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    (folder / "logs").mkdir()
    shutil.copytree(ROOT / "docs", folder / "my_texts", ignore=shutil.ignore_patterns("img"))
    return Lab(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--list", action="store_true", help="print the commands and end")
    parser.add_argument("--only", default="", help="regular expression of chains to run")
    parser.add_argument("--keep", type=user_path, help="folder for runs and logs; must not exist")
    options = parser.parse_args(arguments)
    cuda = torch.cuda.is_available()
    chosen = [chain for chain in CHAINS if re.search(options.only, chain.name)]
    if not chosen:
        parser.error(f"--only={options.only!r} matches none of {[c.name for c in CHAINS]}")
    if options.list:
        for chain in chosen:
            print(f"# {chain.name}", *(step.command for step in chain.steps), sep="\n")
        return 0
    left_out = {chain.name: why for chain in chosen if (why := possible(chain, cuda)) is not None}
    running = [chain for chain in chosen if chain.name not in left_out]

    if options.keep is not None and options.keep.exists():
        parser.error(f"--keep={options.keep} exists")
    folder = options.keep or Path(tempfile.mkdtemp(prefix="smoke-"))
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    lab, values = make_lab(folder), {"python_sources": python_sources()}
    # On a GPU chains mostly wait for compilers and the device; a CPU is busy with one.
    workers = max(1, min(len(running), (os.cpu_count() or 1) // 2)) if cuda else 1
    with ThreadPoolExecutor(workers) as pool:
        done = pool.map(lambda chain: run_chain(chain, lab, values), running)
        problems = [problem for problem in done if problem is not None]
    for name, why in left_out.items():
        print(f"left out: {name} ({why})")
    if options.keep is None and not problems:
        shutil.rmtree(folder)
    elif problems:
        print(f"logs: {folder / 'logs'}")

    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("torch", "triton")
        if find_spec(name) is not None
    )
    card = torch.cuda.get_device_name() if cuda else "no GPU"
    told = f"FAILED ({'; '.join(problems)})" if problems else "passed"
    seconds = time.monotonic() - begin
    print(f"smoke_gpu: {told}, commit {git_commit()}, {card}, {versions}, {seconds:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
