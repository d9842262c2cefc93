#!/usr/bin/env python3
"""Two nodes of two GPUs on one host: everything that only this layout shows, in one command.

    python scripts/two_by_two.py runs/2x2                          a host of four GPUs
    python scripts/two_by_two.py runs/2x2 --cpu                    narrow models over gloo
    python scripts/two_by_two.py runs/2x2 --only verify kill

verify   scripts/verify.py for both engines and both placements
scaling  OLMoE-1B-7B on 1, 2 and 4 GPUs: tokens/s, efficiency, memory, hidden share; real and
         balanced routing
large    Qwen3-30B-A3B, ZeRO-3 over all four: tokens/s, memory, and the estimate's error
kill     one process of four is killed and the run goes on by itself; then its last checkpoint is
         gone on from by two processes

The output of every command lies in the folder, and summary.md is what to read. A part that fails
does not keep the others from running. Exit code 1 if one did.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training.config_load import user_path
from training.logging import read_lines, read_metrics

ROOT = Path(__file__).resolve().parent.parent
STEPS, SAVED = 12, 4


class Failed(RuntimeError):
    """A part did not do what it should; the message says what."""


class Parts:
    """The four parts; each returns lines of Markdown."""

    def __init__(self, folder: Path, cpu: bool, steps: int) -> None:
        self.folder, self.cpu, self.steps = folder, cpu, steps
        self.number = 0

    # ---- commands --------------------------------------------------------------------------------

    def start(self, name: str, words: list[str]) -> tuple[subprocess.Popen, Path]:
        log = self.folder / f"{self.number:02d}_{name}.log"
        self.number += 1
        print(f"{time.strftime('%H:%M:%S')}  {' '.join(words)}\n          > {log}", flush=True)
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        environment.setdefault("OMP_NUM_THREADS", "1" if self.cpu else "4")
        file = open(log, "w")  # noqa: SIM115 (the child's)
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
            env=environment,
        )  # fmt: skip
        file.close()
        return process, log

    def run(self, name: str, *words: str) -> str:
        """Output of a script that must end well."""
        process, log = self.start(name, [f"scripts/{words[0]}", *words[1:]])
        if process.wait():
            tail = log.read_text().strip().splitlines()[-1:]
            raise Failed(f"{' '.join(words)}: exit code {process.returncode}: {' '.join(tail)}")
        return log.read_text()

    def engine(self, name: str, nproc: int, *words: str) -> dict:
        """The slowest rank's figures of scripts/bench_parallel.py engine."""
        path = self.folder / f"{name}.json"
        small = ["--cpu", "--small"] if self.cpu else []
        self.run(name, "bench_parallel.py", "engine", "--nproc", str(nproc), "--json", str(path),
                 *small, *words)  # fmt: skip
        rows = json.loads(path.read_text())["rows"]
        slowest = max(rows, key=lambda row: row["step s"])
        return slowest | {"peak GiB": max(row["peak GiB"] or 0.0 for row in rows)}

    # ---- the parts -------------------------------------------------------------------------------

    def verify(self) -> list[str]:
        lines, bad = ["| engine | placement | |", "|---|---|---|"], []
        for engine in ("fsdp2", "deepspeed"):
            for placement in ("across_nodes", "within_node"):
                words = [f"parallel.engine={engine}", f"parallel.expert_placement={placement}"]
                device = ["run.device=cpu"] if self.cpu else []
                try:
                    told = self.run(
                        f"verify_{engine}_{placement}", "verify.py", "configs/olmoe_1b_7b.yaml",
                        "--nproc", "4", "parallel.nodes=2", "parallel.expert=2", *words, *device,
                    ).strip().splitlines()[-1]  # fmt: skip
                except Failed as error:
                    told = str(error)
                    bad.append(told)
                lines.append(f"| {engine} | {placement} | {told} |")
        if bad:
            raise Failed("\n".join([*lines, "", *bad]))
        return lines

    def scaling(self) -> list[str]:
        lines = [
            "| GPUs | routing | tokens/s | for each GPU | efficiency | GiB | hidden | last loss |",
            "|---|---|---|---|---|---|---|---|",
        ]
        size = ["data.seq_len=64"] if self.cpu else ["data.seq_len=4096"]
        pull = [] if self.cpu else ["parallel.transport=pull"]
        alone: dict[str, float] = {}
        for nproc in (1, 2, 4):
            over_two = ["parallel.nodes=2", "parallel.expert=2", "parallel.schedule=whole", *pull]
            split = over_two if nproc > 1 else []
            for routing in ("real", "balanced"):
                # On a CPU the exchange takes the cores of the products.
                measure = nproc > 1 and routing == "real" and not self.cpu
                exposed = ["--exposed"] if measure else []
                row = self.engine(
                    f"olmoe_{nproc}_{routing}", nproc, "configs/olmoe_1b_7b.yaml",
                    "--repeats", str(self.steps), "--routing", routing, "--timeout", "3000",
                    *exposed, *size, *split, "train.micro_batch_size=2", "optim.lr=5e-5",
                    f"train.global_batch_size={8 * nproc}",
                )  # fmt: skip
                each = row["tokens/s"] / nproc
                alone.setdefault(routing, each)
                hidden = f"{row['hidden']:.0%}" if "hidden" in row else ""
                lines.append(
                    f"| {nproc} | {routing} | {row['tokens/s']:,.0f} | {each:,.0f} | "
                    f"{each / alone[routing]:.0%} | {row['peak GiB']:.1f} | {hidden} | "
                    f"{row['losses'].split()[-1]} |"
                )
        return lines

    def large(self) -> list[str]:
        config = "configs/qwen3_30b_a3b.yaml"
        words = ["parallel.nodes=1", "train.micro_batch_size=1", "train.global_batch_size=4",
                 "train.checkpointing=full", "optim.lr=5e-5"]  # fmt: skip
        words.append("data.seq_len=64" if self.cpu else "data.seq_len=4096")
        told = self.run("estimate_30b", "estimate.py", config, "--gpus", "4", *words)
        expected = float(re.search(r"^  all +([\d.]+)$", told, re.M)[1])
        row = self.engine("qwen3_30b", 4, config, "--repeats", "6", "--timeout", "3000", *words)
        found = row["peak GiB"]
        error = f"{expected / found - 1:+.1%}" if found else "no device memory on a CPU"
        return [
            f"{row['tokens/s']:,.0f} tokens/s, step {row['step s']:.2f} s, peak {found:.1f} GiB "
            f"(estimated {expected:.1f}: {error}), losses {row['losses']}"
        ]

    def kill(self) -> list[str]:
        fixed = [
            "train.py", "configs/quickstart.yaml", f"train.steps={STEPS}", "optim.warmup_steps=2",
            f"checkpoint.every_steps={SAVED}", "checkpoint.keep_last=null", "eval.every_steps=null",
            "eval.sample_prompt=null",
            f"run.dir={self.folder / 'runs'}", "log.every_steps=1", "train.global_batch_size=8",
            "train.micro_batch_size=1", "train.dtype=float32", "train.compile=false",
        ]  # fmt: skip
        fixed += ["run.device=cpu", "model.hidden_size=64", "data.seq_len=64"] if self.cpu else []

        def torchrun(name: str, nproc: int, *words: str) -> subprocess.Popen:
            runner = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}",
                      "--max-restarts=1"]  # fmt: skip
            return self.start(f"kill_{name}", [*runner, *fixed, f"run.name={name}", *words])[0]

        def ended(process: subprocess.Popen, name: str) -> dict[int, tuple[float, float]]:
            if process.wait(3000):
                raise Failed(f"run {name}: exit code {process.returncode}")
            found = read_metrics(self.folder / "runs" / name)
            return {line["step"]: (line["loss"], line["grad_norm"]) for line in found}

        whole = ended(torchrun("whole", 4, "parallel.nodes=2", "parallel.expert=2"), "whole")
        process = torchrun("killed", 4, "parallel.nodes=2", "parallel.expert=2")
        metrics = self.folder / "runs/killed/metrics.jsonl"
        end = time.monotonic() + 1200
        while max((line["step"] for line in read_lines(metrics)), default=0) < SAVED + 1:
            if process.poll() is not None or time.monotonic() > end:
                raise Failed(f"the run to be killed did not come to step {SAVED + 1}")
            time.sleep(0.2)
        victim = _children(process.pid)[-1]
        os.kill(victim, signal.SIGKILL)
        killed = ended(process, "killed")
        starts = sum(
            line["event"] == "start"
            for line in read_lines(self.folder / "runs/killed/events.jsonl")
        )
        if starts != 2:
            raise Failed(f"the killed run started {starts} times instead of twice")
        part = f"checkpoints/step_{SAVED:08d}"
        shutil.copytree(
            self.folder / "runs/killed" / part, self.folder / "runs/two" / part,
        )  # fmt: skip
        two = ended(torchrun("two", 2), "two")
        worst = max(abs(two[step][0] / whole[step][0] - 1) for step in two)
        lines = [
            f"killed at step {SAVED + 1} or later, gone on from step {SAVED} by itself: losses and "
            f"norms of all {len(whole)} steps "
            + ("equal, bit for bit" if killed == whole else "DIFFER"),
            f"gone on from step {SAVED} by two processes: losses equal to {worst:.1e}",
        ]
        allowed = 1e-6 if self.cpu else 1e-5
        if killed != whole or worst > allowed or list(two) != list(range(SAVED + 1, STEPS + 1)):
            raise Failed("; ".join(lines))
        return lines


def _children(pid: int) -> list[int]:
    return [
        int(child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text().split()
    ]


PARTS = ("verify", "scaling", "large", "kill")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=user_path, help="a new folder for logs and summary.md")
    parser.add_argument("--cpu", action="store_true", help="narrow models over gloo")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--steps", type=int, help="of scaling; 60, and 3 on a CPU")
    given = parser.parse_args(arguments)
    if given.folder.exists() and any(given.folder.iterdir()):
        print(f"error: {given.folder} is not empty", file=sys.stderr)
        return 2
    if not given.cpu:
        import torch

        if torch.cuda.device_count() < 4:
            print(
                f"error: four GPUs are needed, there are {torch.cuda.device_count()}; allowed "
                "here: --cpu", file=sys.stderr,
            )  # fmt: skip
            return 2
    given.folder.mkdir(parents=True, exist_ok=True)
    parts = Parts(given.folder.resolve(), given.cpu, given.steps or (3 if given.cpu else 60))
    summary, failed = [], []
    for name in given.only:
        began = time.monotonic()
        try:
            lines = getattr(parts, name)()
        except Failed as error:
            lines = ["failed:", "", str(error)]
            failed.append(name)
        lines = [f"## {name}", "", *lines, "", f"({time.monotonic() - began:.0f} s)", ""]
        print("\n".join(lines), flush=True)
        summary += lines
        (given.folder / "summary.md").write_text("\n".join(summary))
    print(f"{given.folder}/summary.md" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
