#!/usr/bin/env python3
"""Says what is wrong with this machine, or with a run, and what to do about it.

    python scripts/doctor.py                       # Python, PyTorch, Triton, GPUs, disk, network
    python scripts/doctor.py runs/quickstart       # those, how the run is doing, and whether
                                                   # each of its checkpoints is whole

Nothing is changed. Only the checkpoints, which are read in full, can take long. Exit code 0: no
problem (warnings and notes are none), 1: at least one problem, 2: no such run.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

GIB = 2**30


@dataclass(frozen=True)
class Check:
    """One thing looked at."""

    level: Literal["ok", "note", "warning", "problem"]
    seen: str
    remedy: str = ""


def python_version() -> Iterator[Check]:
    version = platform.python_version()
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    needed = re.search(r'requires-python = ">=(\d+)\.(\d+)"', text)
    if sys.version_info[:2] < tuple(map(int, needed.groups())):
        yield Check("problem", f"Python {version}", f"{'.'.join(needed.groups())} is the oldest")
    else:
        yield Check("ok", f"Python {version}, {platform.system()} {platform.machine()}")


def requirements() -> list[str]:
    """What the layer and the training stack require, of pyproject.toml; by pattern, as Python 3.10
    reads no TOML."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    blocks = re.findall(r"^(?:dependencies|train) = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    return re.findall(r'^\s*"([^"]+)",?$', "".join(blocks), re.MULTILINE)


def packages() -> Iterator[Check]:
    try:
        from packaging.requirements import Requirement
    except ImportError:
        yield Check("problem", "the package 'packaging' is missing", "pip install -e '.[train]'")
        return
    good = []
    for text in requirements():
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        try:
            version = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            yield Check("problem", f"{wanted.name} is not installed", f"pip install '{wanted}'")
            continue
        if not wanted.specifier.contains(version.split("+")[0], prereleases=True):
            yield Check(
                "warning",
                f"{wanted.name} {version} is outside {wanted.specifier}, which is what is tested",
                f"pip install '{wanted}'",
            )
        else:
            good.append(f"{wanted.name} {version}")
    yield Check("ok", ", ".join(good))


def torch_and_gpus() -> Iterator[Check]:
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        yield Check("problem", f"PyTorch does not import: {error}", "bash scripts/quickstart.sh")
        return
    driver = _driver()
    if torch.version.cuda is None:
        if driver:
            yield Check(
                "problem",
                f"an NVIDIA driver ({driver}) is here; PyTorch {torch.__version__} is a CPU build",
                "pip install --force-reinstall 'torch>=2.10,<2.14' (the default build has CUDA)",
            )
        else:
            yield Check("ok", f"PyTorch {torch.__version__}, CPU build; no NVIDIA driver here")
    elif not torch.cuda.is_available():
        yield Check(
            "problem" if driver else "note",
            f"PyTorch {torch.__version__} for CUDA {torch.version.cuda} sees no device",
            "update the NVIDIA driver to one that supports this CUDA version"
            if driver
            else "without a GPU everything runs on the CPU",
        )
    else:
        for index in range(torch.cuda.device_count()):
            yield from _gpu(torch, index)
    yield _triton(torch)


def _driver() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=15)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None if done.returncode == 0 else None


def _gpu(torch, index: int) -> Iterator[Check]:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    text = (
        f"GPU {index}: {properties.name}, {total / GIB:.0f} GiB, {free / GIB:.0f} GiB free, "
        f"compute capability {properties.major}.{properties.minor}"
    )
    if properties.major < 8:
        yield Check("warning", text, "bfloat16 needs capability 8.0: set train.dtype=float32")
    elif free < 0.8 * total:
        yield Check("warning", text, "another process holds memory: nvidia-smi shows which")
    else:
        yield Check("ok", text)


def _triton(torch) -> Check:
    try:
        triton = importlib.import_module("triton")
    except Exception as error:
        if torch.cuda.is_available():
            return Check("problem", f"Triton does not import: {error}", "pip install 'triton>=3.6'")
        return Check("note", "Triton is not installed", "only GPUs need it; the CPU path does not")
    if not torch.cuda.is_available():
        return Check("ok", f"Triton {triton.__version__} (used on GPUs and, interpreted, in tests)")
    return _kernel_check(torch, triton)


def _kernel_check(torch, triton) -> Check:
    """Run the expert layer on the GPU in both implementations."""
    from moe import MoE, MoEConfig

    sizes = {"hidden_size": 64, "expert_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
    outputs = []
    try:
        for kernels in ("auto", "reference"):
            torch.manual_seed(0)
            options = {"device": "cuda", "dtype": torch.bfloat16}
            layer = MoE(MoEConfig(**sizes, kernels=kernels), **options)
            outputs.append(layer(torch.randn(256, 64, **options))[0].float())
        difference = (outputs[0] - outputs[1]).abs().max() / outputs[1].abs().max()
    except Exception as error:
        return Check(
            "problem",
            f"the expert layer fails on this GPU: {type(error).__name__}: {error}",
            "model.kernels=reference runs without Triton, slower; please report the message",
        )
    if not difference < 0.05:
        return Check(
            "problem",
            f"Triton {triton.__version__} computes the expert layer wrongly on this GPU: relative "
            f"difference {difference:.2g}",
            "model.kernels=reference; please report GPU, driver and versions",
        )
    return Check("ok", f"Triton {triton.__version__}: the expert layer is right on this GPU")


def communication() -> Iterator[Check]:
    """Whether processes can talk to each other, tried with two on this machine."""
    import torch.distributed as dist

    from parallel.processes import RankError, run_processes

    if not dist.is_available():
        yield Check("note", "torch.distributed is not in this build", "one process is possible")
        return
    try:
        run_processes(2, meet, device_type="cpu", timeout_s=60)
    except RankError as error:
        yield Check(
            "warning",
            f"two processes cannot reach each other over gloo: {str(error).splitlines()[-1]}",
            "one process works; for more, name the network card: GLOO_SOCKET_IFNAME=lo (or eth0)",
        )
        return
    nccl = " and nccl" if dist.is_nccl_available() else ""
    yield Check("ok", f"backends gloo{nccl}; two processes can talk over gloo")


def meet() -> None:
    """What each of two processes does."""
    import torch
    import torch.distributed as dist

    found = torch.ones(1)
    dist.all_reduce(found)
    assert found.item() == 2, found


def machine() -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    yield Check("ok", f"{cores} CPU cores, {memory:.0f} GiB of memory")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > cores:
        yield Check(
            "warning",
            f"OMP_NUM_THREADS={threads} is more than the {cores} cores; threads wait in turn",
            f"export OMP_NUM_THREADS={cores}",
        )
    for what, place in (("runs", Path("runs")), ("data cache", Path.home() / ".cache")):
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free / GIB
        text = f"{free:.0f} GiB free for {what} ({place.resolve()})"
        if free < 2:
            yield Check("problem", text, "make room, or set run.dir and data.cache_dir elsewhere")
        else:
            yield Check("ok", text)
        if not os.access(place, os.W_OK):
            yield Check("problem", f"{place.resolve()} cannot be written", "set run.dir elsewhere")


def hub() -> Iterator[Check]:
    """Whether the Hugging Face hub answers, within three seconds whatever the network does."""
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        yield Check("ok", "HF_HUB_OFFLINE is set: no hub is asked")
        return
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    host = re.sub(r"^https?://", "", endpoint).split("/")[0].split(":")[0]
    result: list[str] = []

    def ask() -> None:
        try:
            socket.create_connection((host, 443), timeout=2.5).close()
            result.append("")
        except OSError as error:
            result.append(str(error))

    # Name look-ups take no timeout, so they are left behind in a thread.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(3.0)
    if result == [""]:
        yield Check("ok", f"{host} answers")
    else:
        reason = result[0] if result else "no answer within 3 s"
        yield Check(
            "note",
            f"{host} cannot be reached ({reason})",
            "bundled and local data need no hub; set HF_HUB_OFFLINE=1 so that nothing waits for it",
        )


def bundled_text() -> Iterator[Check]:
    from training.config.build import ConfigError, default_config_path, load_config

    try:
        load_config()
    except ConfigError as error:
        yield Check("problem", f"the default config does not load: {error}", "git checkout configs")
        return
    yield Check("ok", f"default config {default_config_path().name} loads")


CHECKS: tuple[Callable[[], Iterator[Check]], ...] = (
    python_version,
    packages,
    torch_and_gpus,
    communication,
    machine,
    bundled_text,
    hub,
)


def environment() -> Iterator[Check]:
    """All checks of this machine; one that fails itself is a problem and not the end."""
    for check in CHECKS:
        try:
            yield from check()
        except Exception as error:
            name = check.__name__.replace("_", " ")
            yield Check(
                "problem", f"checking {name} failed: {type(error).__name__}: {error}", "see above"
            )


def checkpoints(folder: Path) -> Iterator[Check]:
    """Whether each checkpoint of a run is whole, by the checksums of all its files."""
    from training.checkpoint.files import candidates, damage

    good = []
    bad: list[Check] = []
    for path in candidates(folder / "checkpoints"):
        if path.suffix == ".tmp":
            yield Check("note", f"{path.name}: a save is under way, or the next one removes it")
        elif (reason := damage(path)) is None:
            good.append(path.name)
        else:
            bad.append(
                Check("warning", f"{path.name}: {reason}", "copy it anew if you have it elsewhere")
            )
    yield from bad
    if good:
        yield Check("ok", f"whole by every checksum: {', '.join(reversed(good))}")
    elif bad:
        yield Check(
            "problem",
            "no checkpoint can be used",
            "put a good copy there, or start anew under another run.name",
        )


def run_checks(folder: Path) -> tuple[Path, Iterable[Check]]:
    """A run's folder, and how it is doing.

    Raises:
        UserError: no such run.
    """
    from training.report.findings import findings
    from training.report.record import read_run

    record = read_run(folder)
    found = [Check(finding.level, finding.seen, finding.remedy) for finding in findings(record)]
    if not found:
        step, loss = record.last["step"], record.last["loss"]
        found.append(Check("ok", f"nothing stands out up to step {step}, loss {loss:.3f}"))
    return record.folder, itertools.chain(found, checkpoints(record.folder))


MARK = {"ok": "ok      ", "note": "note    ", "warning": "warning ", "problem": "PROBLEM "}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="?", help="run folder, or a checkpoint in it")
    options = parser.parse_args(arguments)
    parts: list[tuple[str, Iterable[Check]]] = [("this machine", environment())]
    if options.run is not None:
        from scripts._command import told

        with told():
            folder, checks = run_checks(Path(options.run).expanduser())
        parts.insert(0, (f"run {folder}", checks))
    counts = dict.fromkeys(MARK, 0)
    for title, checks in parts:
        print(title)
        for check in checks:
            counts[check.level] += 1
            print(f"  {MARK[check.level]}{check.seen}", flush=True)
            if check.remedy:
                print(f"            → {check.remedy}")
    print(f"{counts['problem']} problems, {counts['warning']} warnings, {counts['note']} notes")
    return 1 if counts["problem"] else 0


if __name__ == "__main__":
    sys.exit(main())
