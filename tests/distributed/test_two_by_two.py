"""Two nodes of two GPUs on one host: what only this layout shows.

    python -m pytest -s tests/distributed/test_two_by_two.py

On four GPUs; with TESSERA_TWO_BY_TWO=cpu narrow models over gloo, which takes some minutes.

With -s every command is shown with the file that its output goes to, and the figures of the
measurements: tokens/s, efficiency, memory and the share of the exchange that is hidden.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.distributed.test_launched import children, curve, last_step
from training.report.files import read_lines

ROOT = Path(__file__).resolve().parents[2]
CPU = os.environ.get("TESSERA_TWO_BY_TWO") == "cpu"
STEPS, SAVED = 12, 4
HALVES = ["parallel.nodes=2", "parallel.expert=2"]

pytestmark = [
    *([] if CPU else [pytest.mark.gpu]),
    pytest.mark.skipif(not CPU and torch.cuda.device_count() < 4, reason="needs four GPUs"),
    pytest.mark.timeout(3600),
    pytest.mark.slow,
]


def start(log: Path, *words: str) -> subprocess.Popen:
    print(f"{time.strftime('%H:%M:%S')}  {' '.join(words)}\n          > {log}", flush=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.setdefault("OMP_NUM_THREADS", "1" if CPU else "4")
    environment.pop("TRITON_INTERPRET", None)  # set for tests of kernels
    with open(log, "w") as file:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def run(folder: Path, name: str, *words: str) -> str:
    """Output of a script that must end well."""
    log = folder / f"{name}.log"
    code = start(log, *words).wait()
    assert code == 0, log.read_text()[-3000:]
    return log.read_text()


def engine(folder: Path, name: str, nproc: int, *words: str) -> dict:
    """The slowest rank's figures of whole steps, with the largest peak."""
    out = folder / name
    small = ["--cpu", "--small"] if CPU else []
    run(folder, name, "scripts/bench/parallel.py", "engine", "--nproc", str(nproc),
        "--out", str(out), "--timeout", "3000", *small, *words)  # fmt: skip
    rows = json.loads((out / "engine.json").read_text())["rows"]
    slowest = max(rows, key=lambda row: row["step s"])
    return slowest | {"peak GiB": max(row["peak GiB"] or 0.0 for row in rows)}


@pytest.mark.parametrize("placement", ["across_nodes", "within_node"])
@pytest.mark.parametrize("kind", ["fsdp2", "deepspeed"])
def test_steps_of_both_engines_and_placements_are_exact(kind, placement, tmp_path):
    if kind == "deepspeed":
        pytest.importorskip("deepspeed")
    told = run(
        tmp_path, "verify", "scripts/verify.py", "configs/olmoe_1b_7b.yaml", "--nproc", "4",
        *HALVES, f"parallel.engine={kind}",
        f"parallel.expert_placement={placement}", *(["run.device=cpu"] if CPU else []),
    )  # fmt: skip
    print(told.strip().splitlines()[-1])


def test_scaling_of_olmoe_over_one_two_and_four(tmp_path):
    """Real and balanced routing; tokens per second of each GPU beside those of one alone."""
    steps = 3 if CPU else 60
    size = "data.seq_len=64" if CPU else "data.seq_len=4096"
    alone: dict[str, float] = {}
    for nproc in (1, 2, 4):
        split = [*HALVES, "parallel.exchange.kind=all_gather"] if nproc > 1 else []
        if split and not CPU:
            split.append("parallel.exchange.transport=pull")
        for routing in ("real", "balanced"):
            # On a CPU the exchange takes the cores of the products.
            measured = nproc > 1 and routing == "real" and not CPU
            row = engine(
                tmp_path, f"olmoe_{nproc}_{routing}", nproc, "configs/olmoe_1b_7b.yaml",
                "--repeats", str(steps), "--routing", routing, *(["--exposed"] if measured else []),
                size, *split, "train.micro_batch_size=2", "optim.lr=5e-5",
                f"train.global_batch_size={8 * nproc}",
            )  # fmt: skip
            each = row["tokens/s"] / nproc
            share = each / alone.setdefault(routing, each)
            hidden = f", hidden {row['hidden']:.0%}" if measured else ""
            losses = [float(loss) for loss in row["losses"].split()]
            print(
                f"{nproc} processes, {routing} routing: {row['tokens/s']:,.0f} tokens/s, "
                f"{share:.0%} of one alone, {row['peak GiB']:.1f} GiB{hidden}, loss {losses[-1]}"
            )
            assert len(losses) == steps + 2
            assert CPU or losses[-1] < losses[0]


def test_a_model_of_30b_fits_as_estimated(tmp_path):
    """Qwen3-30B-A3B, ZeRO-3 over all four."""
    config = "configs/qwen3_30b_a3b.yaml"
    words = ["parallel.nodes=1", "parallel.expert=1", "train.micro_batch_size=1",
             "train.global_batch_size=4", "train.checkpointing=full", "optim.lr=5e-5"]  # fmt: skip
    words.append("data.seq_len=64" if CPU else "data.seq_len=4096")
    told = run(tmp_path, "estimate", "scripts/estimate.py", config, "--gpus", "4", *words)
    expected = float(re.search(r"^  all +([\d.]+)$", told, re.M)[1])
    row = engine(tmp_path, "qwen3_30b", 4, config, "--repeats", "2" if CPU else "6", *words)
    print(
        f"{row['tokens/s']:,.0f} tokens/s, step {row['step s']:.2f} s, peak "
        f"{row['peak GiB']:.1f} GiB, estimated {expected:.1f}, losses {row['losses']}"
    )
    if not CPU:  # which has no memory of its own to count
        assert expected == pytest.approx(row["peak GiB"], rel=0.1)


def torchrun(folder: Path, name: str, nproc: int, *words: str) -> subprocess.Popen:
    settings = [
        "train.py", "configs/quickstart.yaml", f"run.name={name}", f"run.dir={folder / 'runs'}",
        f"train.steps={STEPS}", "optim.schedule.warmup_steps=2", f"checkpoint.every_steps={SAVED}",
        "checkpoint.keep.last=null", "eval.every_steps=null", "eval.sample=null",
        "log.every_steps=1", "train.global_batch_size=8", "train.micro_batch_size=1",
        "train.dtype=float32", "train.compile=false",
    ]  # fmt: skip
    settings += ["run.device=cpu", "model.hidden_size=64", "data.seq_len=64"] if CPU else []
    return start(
        folder / f"{name}.log", "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={nproc}", "--max-restarts=1", *settings, *words,
    )  # fmt: skip


def ended(process: subprocess.Popen, folder: Path, name: str) -> dict[int, tuple[float, float]]:
    """(loss, gradient norm) of each step."""
    assert process.wait(3000) == 0, (folder / f"{name}.log").read_text()[-3000:]
    return curve(folder / "runs" / name)


def test_a_killed_run_resumes_by_itself_and_with_half_the_processes(tmp_path):
    """One process of four is killed, and the run resumes from its checkpoint, bit for bit; then
    two processes resume from that checkpoint."""
    whole = ended(torchrun(tmp_path, "whole", 4, *HALVES), tmp_path, "whole")
    killed = tmp_path / "runs/killed"
    process = torchrun(tmp_path, "killed", 4, *HALVES)
    end = time.monotonic() + 1200
    while last_step(killed) < SAVED + 1:
        assert process.poll() is None, (tmp_path / "killed.log").read_text()[-3000:]
        assert time.monotonic() < end, f"step {SAVED + 1} was not reached"
        time.sleep(0.2)
    os.kill(children(process.pid)[-1], signal.SIGKILL)
    assert ended(process, tmp_path, "killed") == whole
    starts = [line for line in read_lines(killed / "events.jsonl") if line["event"] == "start"]
    assert len(starts) == 2
    part = f"checkpoints/step_{SAVED:08d}"
    shutil.copytree(killed / part, tmp_path / "runs/two" / part)
    two = ended(torchrun(tmp_path, "two", 2), tmp_path, "two")
    assert list(two) == list(range(SAVED + 1, STEPS + 1))
    for step, (loss, _) in two.items():
        assert loss == pytest.approx(whole[step][0], rel=1e-6 if CPU else 1e-5)
