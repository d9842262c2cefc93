"""scripts/smoke_gpu.sh: it runs what the README says, and its checks can fail."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from training import device
from training.config.build import load_config, make_plan

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def smoke(script):
    return script("_smoke")


@pytest.fixture
def lab(smoke, tmp_path):
    return smoke.make_lab(tmp_path)


def commands(page: str, heading: str) -> list[str]:
    """Commands of a page's section: lines of code blocks, and code in tables."""
    section = (ROOT / page).read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(r"^(?:python|torchrun|bash) .*$", section, re.MULTILINE)
    return found + re.findall(r"`((?:GPUS=\d+ )?(?:python|torchrun|bash) [^`]*)`", section)


NEEDS_MORE = (
    "scripts/launch/hosts.sh",
    "scripts/launch/slurm.sh",
    "sbatch",
    "torchrun --nnodes=1:4",
)


@pytest.mark.parametrize(
    ("page", "heading"), [("README.md", "Use it"), ("docs/parallel.md", "Starting it")]
)
def test_a1_smoke_runs_every_command_of_the_page(smoke, page, heading):
    steps = [step for chain in smoke.CHAINS for step in chain.steps]
    run = [step.command.removeprefix("env ") for step in steps]
    told = [command for command in commands(page, heading) if not command.startswith(NEEDS_MORE)]
    assert told
    for command in told:
        start = command.split(" CONFIG")[0]  # of a command that takes any config
        assert any(other.startswith(start) for other in run), f"smoke does not run: {command}"


def test_every_check_of_losses_can_fail(smoke, lab):
    def write(run: str, losses: list[float]) -> None:
        folder = lab.folder / "runs" / run
        folder.mkdir(parents=True, exist_ok=True)
        lines = [
            json.dumps({"step": step, "loss": loss, "grad_norm": 1.0, "attempt": 0})
            for step, loss in enumerate(losses, start=1)
        ]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")

    write("one", [5.0, 4.0])
    write("same", [5.0, 4.0])
    write("near", [5.0, 4.0000001])
    write("up", [4.0, 5.0])
    for check, *given in (
        (smoke.learns, "one"),
        (smoke.same_losses, "one", "same"),
        (smoke.near_losses, "one", "near", 1e-6),
        (smoke.begins_where, "one", "up"),
        (smoke.says, "other"),
    ):
        check(lab, "another", *given)
    for check, *given in (
        (smoke.learns, "up"),
        (smoke.learns, "missing"),
        (smoke.same_losses, "one", "near"),
        (smoke.same_losses, "missing", "missing"),
        (smoke.near_losses, "one", "up", 1e-2),
        (smoke.begins_where, "one", "same"),
        (smoke.stopped_between, "stopped"),
        (smoke.stopped_between, "one"),
        (smoke.leaves, "runs/one/metrics.jsonl", 10_000),
        (smoke.says, "word"),
    ):
        with pytest.raises((smoke.Failed, OSError)):
            check(lab, "another", *given)
    with pytest.raises(smoke.Failed, match="UserWarning"):
        smoke.quiet(lab, "x.py:1: UserWarning: told by a library")
    smoke.quiet(lab, "step 1 loss 2.0")


def test_a_step_fails_by_its_exit_code_its_check_and_is_told_with_its_last_lines(smoke, lab):
    def run(command, *checks, **settings):
        step = smoke.Step(command, *checks, **settings)
        smoke.run_step(step, lab, {}, lab.folder / "logs" / "x.log")

    run("python -c 'print(1)'", (smoke.says, "1"))
    run("python -c 'raise SystemExit(75)'", code=75)
    with pytest.raises(smoke.Failed, match="exit code 3 instead of 0: last words"):
        run("""python -c 'print("last words"); raise SystemExit(3)'""")
    with pytest.raises(smoke.Failed, match="nothing in the output"):
        run("python -c 'print(2)'", (smoke.says, "1"))
    writer = (
        "import json, time; from pathlib import Path; f = Path('runs/late'); f.mkdir(parents=True);"
        "(f / 'metrics.jsonl').write_text(json.dumps("
        "dict(step=7, loss=1., grad_norm=1., attempt=0)) + chr(10)); time.sleep(60)"
    )
    run(
        command=f'python -c "{writer}"',
        code=-signal.SIGKILL,
        stop=(signal.SIGKILL, "late", 7),
    )


def test_what_a_machine_cannot_run_is_named(smoke, monkeypatch):
    left_out = [chain.name for chain in smoke.CHAINS if smoke.possible(chain, cuda=False)]
    assert "CUDA graph" in left_out and "use it" not in left_out
    (memory,) = [chain for chain in smoke.CHAINS if chain.name == "memory"]
    for gib, why in ((80, "needs a GPU with 130 GiB"), (139.8, None)):
        card = SimpleNamespace(total_memory=gib * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index, card=card: card)
        assert smoke.possible(memory, cuda=True) == why


def test_a5_smoke_compares_measured_peaks_of_three_configs(smoke, script):
    """Each command is one that --measure takes, and its exit code counts."""
    (memory,) = [chain for chain in smoke.CHAINS if chain.name == "memory"]
    estimate, names = script("estimate"), []
    for step in memory.steps:
        options = estimate.parse(smoke.words(step.command, {})[2:])
        config = load_config(options.config, options.overrides)
        plan = make_plan(config, cuda=True)
        assert options.measure and plan.accumulation == 1 and plan.compile and step.code == 0
        names.append(Path(options.config).stem)
    assert names == ["tessera_1b_a200m", "olmoe_1b_7b", "qwen3_30b_a3b"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what is left out without a GPU")
def test_the_last_line_names_commit_and_versions():
    done = subprocess.run(
        ["bash", ROOT / "scripts/smoke_gpu.sh", "--only", "estimate|graph"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "HOME": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    *_, left_out, last = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert left_out == "left out: CUDA graph (needs a CUDA device)"
    assert re.match(r"smoke_gpu: passed, commit \w+(\+changes)?, no GPU, torch 2\.", last)


def test_a1_cuda_is_initialised_before_its_memory_statistics_are_reset(monkeypatch):
    """As PyTorch 2.11 behaves in a fresh process: statistics cannot be reset before CUDA is up."""
    done = []

    def reset(where):
        if "init" not in done:
            raise RuntimeError("Invalid device argument")
        done.append("reset")

    monkeypatch.setattr(torch.cuda, "set_device", lambda where: done.append("device"))
    monkeypatch.setattr(torch.cuda, "init", lambda: done.append("init"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    assert device.open_device("cuda", 1) == torch.device("cuda", 1)
    assert done == ["device", "init", "reset"]
    assert device.open_device("cpu", 1) == torch.device("cpu")


@pytest.mark.gpu
def test_a1_the_first_command_runs_in_a_fresh_process_on_the_card(tmp_path):
    done = subprocess.run(
        [
            sys.executable, ROOT / "train.py", "configs/quickstart.yaml", "train.steps=2",
            "train.compile=false", f"run.dir={tmp_path}", "eval.every_steps=null",
            "eval.sample=null", "log.plots=false",
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
