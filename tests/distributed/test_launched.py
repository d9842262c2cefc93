"""Under the launchers: a process that is killed, and a host that is cut off from the other.

The second host is a network namespace of this machine with an address of its own; making one needs
privileges, without which that test is skipped.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests import processes
from tests.training.tiny import write_inputs
from training.report.files import read_lines, read_metrics

ROOT = Path(__file__).resolve().parents[2]
# So many kills in one run; more of them by hand.
KILLS = int(os.environ.get("TESSERA_KILLS", "1"))
STEPS = 8 + 2 * (KILLS - 1)
NEW_NETWORK = 0x40000000  # CLONE_NEWNET


def launcher(namespace: str | None, variables: dict[str, str], arguments: list[str]) -> None:
    """What the launch scripts run, in a network namespace if one is given."""
    if namespace is not None:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{namespace}") as file:
            if libc.setns(file.fileno(), NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.environ.update({"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables)
    spec = importlib.util.spec_from_file_location("launch", ROOT / "scripts/launch/launch.py")
    launch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(launch)
    os._exit(launch.main(arguments))


def settings(config: Path, name: str) -> list[str]:
    return [
        str(config), f"run.name={name}", f"train.steps={STEPS}",
        "train.micro_batch_size=1", "checkpoint.every_steps=2", "eval.every_steps=null",
        "eval.rows=128", "parallel.timeout_s=10",
    ]  # fmt: skip


def last_step(run: Path) -> int:
    return max((line["step"] for line in read_lines(run / "metrics.jsonl")), default=0)


def wait_for_step(groups: list[processes.Group], run: Path, step: int) -> None:
    """Until a run has logged a step."""
    end = time.monotonic() + 150
    while last_step(run) < step:
        printed = "\n".join(group.output() for group in groups)
        assert time.monotonic() < end, f"step {step} was not reached:\n{printed}"
        assert any(p.is_alive() for group in groups for p in group.processes), printed
        time.sleep(0.1)


def children(pid: int) -> list[int]:
    return [
        int(child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text().split()
    ]


def curve(run: Path) -> dict[int, tuple[float, float]]:
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in read_metrics(run)}


@pytest.mark.timeout(600)
def test_d3_a_killed_process_takes_the_run_down_and_the_launcher_brings_it_back(tmp_path):
    config = write_inputs(tmp_path / "inputs", count=14)
    whole = processes.start_training(settings(config, "whole"), world=2, folder=tmp_path)
    assert whole.wait(200) == [0, 0], whole.output()
    draw = random.Random(KILLS)
    run = tmp_path / "runs/killed"
    group = processes.start(
        launcher, None, {},
        ["--processes=2", f"--restarts={KILLS}", "--", *settings(config, "killed")],
        folder=tmp_path,
    )  # fmt: skip
    for kill in range(KILLS):
        wait_for_step([group], run, min(last_step(run) + draw.randint(1, 4), STEPS - 2))
        workers = children(group.processes[0].pid)
        assert len(workers) == 2, workers
        os.kill(draw.choice(workers), signal.SIGKILL)
        killed = time.monotonic()
        while set(workers) & set(children(group.processes[0].pid)):
            assert time.monotonic() - killed < 60, group.output()
            time.sleep(0.1)
        print(f"kill {kill + 1}: all ended after {time.monotonic() - killed:.1f} s")
    assert group.wait(200) == [0], group.output()
    assert group.output().count("was killed by SIGKILL; starting") == KILLS
    assert "Traceback" not in group.output()
    assert "over processes 0, 1 failed: " in group.output(), "what the other process saw"
    assert curve(run) == curve(tmp_path / "runs/whole")
    starts = [event for event in read_lines(run / "events.jsonl") if event["event"] == "start"]
    assert len(starts) == KILLS + 1


# --- two hosts ----------------------------------------------------------------------------------


def ip(words: str, allow: bool = False) -> bool:
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True)
    assert allow or done.returncode == 0, f"ip {words}: {done.stderr}"
    return done.returncode == 0


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces with a cable between them: 10.77.0.1 and 10.77.0.2."""
    names = [f"tessera{os.getpid()}{side}" for side in "ab"]
    try:
        made = ip(f"netns add {names[0]}", allow=True)
    except FileNotFoundError:
        pytest.skip("there is no `ip` command")
    if not made:
        pytest.skip("making network namespaces is not permitted here")
    try:
        ip(f"netns add {names[1]}")
        if not ip(
            f"link add eth0 netns {names[0]} type veth peer name eth0 netns {names[1]}", True
        ):
            pytest.skip("making virtual network cards is not permitted here")
        for number, name in enumerate(names, 1):
            ip(f"-n {name} addr add 10.77.0.{number}/24 dev eth0")
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} link set eth0 up")
        yield names
    finally:
        for name in names:
            ip(f"netns del {name}", allow=True)


@pytest.mark.timeout(600)
def test_two_hosts_train_and_go_on_after_one_was_cut_off(tmp_path, hosts):
    config = write_inputs(tmp_path / "inputs", count=14)
    run = tmp_path / "runs/two"

    def start() -> list[processes.Group]:
        port = 29500 + random.randrange(1000)
        return [
            processes.start(
                launcher, name, {"GLOO_SOCKET_IFNAME": "eth0"},
                ["--processes=1", "--hosts=2", f"--first=10.77.0.1:{port}", "--id=two",
                 "--restarts=0", "--", *settings(config, "two")],
                folder=tmp_path / f"host{rank}",
            )
            for rank, name in enumerate(hosts)
        ]  # fmt: skip

    for rank in range(2):  # one file system for both
        (tmp_path / f"host{rank}").mkdir()
        (tmp_path / f"host{rank}/runs").symlink_to(tmp_path / "runs")
    (tmp_path / "runs").mkdir()
    groups = start()
    wait_for_step(groups, run, 4)
    ip(f"-n {hosts[1]} link set eth0 down")
    cut = time.monotonic()
    assert groups[0].wait(60) != [0]
    print(f"host 0 ended {time.monotonic() - cut:.1f} s after the cut")
    told = groups[0].output()
    assert f"error: process 0 on host {socket.gethostname()}: " in told, told
    assert "over processes 0, 1 failed" in told and "parallel.timeout_s=10" in told
    reached = last_step(run)
    while "error on process 1: process 1 on host" not in groups[1].output():
        assert time.monotonic() - cut < 60, groups[1].output()
        time.sleep(0.1)
    # Its launcher would look for the other one's store for minutes: that host is reset.
    workers = children(groups[1].processes[0].pid)
    groups[1].signal(signal.SIGKILL)
    groups[1].wait(10)
    for worker in workers:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    ip(f"-n {hosts[1]} link set eth0 up")
    groups = start()
    for group in groups:
        assert group.wait(150) == [0], "\n".join(g.output() for g in groups)
    assert reached < STEPS and list(curve(run)) == list(range(1, STEPS + 1))
    starts = [event for event in read_lines(run / "events.jsonl") if event["event"] == "start"]
    assert len(starts) == 2 and starts[1]["step"] >= 2
    assert "2 node(s) × 1 local" in groups[0].output()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_host_is_lost_the_other_goes_on_and_it_comes_back(tmp_path, hosts):
    config = write_inputs(tmp_path / "inputs", count=40)
    words = [word for word in settings(config, "two") if not word.startswith("train.steps")]
    words += ["train.steps=16", "checkpoint.async_save=false"]
    whole = [word.replace("run.name=two", "run.name=whole") for word in words]
    group = processes.start_training(whole, world=2, folder=tmp_path)
    assert group.wait(200) == [0, 0], group.output()
    run = tmp_path / "runs/two"
    port = 29500 + random.randrange(1000)

    def start(rank: int) -> processes.Group:
        folder = tmp_path / f"host{rank}"
        folder.mkdir(exist_ok=True)
        if not (folder / "runs").exists():
            (folder / "runs").symlink_to(tmp_path / "runs")  # one file system for both
        return processes.start(
            launcher, hosts[rank], {"GLOO_SOCKET_IFNAME": "eth0"},
            ["--processes=1", "--hosts=1:2", f"--first=10.77.0.1:{port}", "--id=two",
             "--late-s=5", "--", *words],
            folder=folder,
        )  # fmt: skip

    groups = [start(0), start(1)]
    wait_for_step(groups, run, 3)
    ip(f"-n {hosts[1]} link set eth0 down")
    cut = time.monotonic()
    workers = children(groups[1].processes[0].pid)
    groups[1].signal(signal.SIGKILL)  # that host is off
    groups[1].wait(10)
    for worker in workers:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    # It goes on alone, and is held there until the other one has come.
    while len(starts(run)) < 2:
        assert time.monotonic() - cut < 120, groups[0].output()
        time.sleep(0.01)
    resumed = time.monotonic() - cut
    assert resumed < 120
    print(f"resumed on one host {resumed:.0f} s after the cut")
    alone = starts(run)[1]["step"]
    while last_step(run) <= alone + 1:
        time.sleep(0.005)
    (worker,) = children(groups[0].processes[0].pid)
    os.kill(worker, signal.SIGSTOP)
    ip(f"-n {hosts[1]} link set eth0 up")
    groups[1] = start(1)
    while "another host has come" not in groups[0].output():
        assert time.monotonic() - cut < 300, "\n".join(g.output() for g in groups)
        time.sleep(0.05)
    os.kill(worker, signal.SIGCONT)
    for group in groups:
        assert group.wait(200) == [0], "\n".join(g.output() for g in groups)
    assert [start["world_size"] for start in starts(run)] == [2, 1, 2]
    assert alone < starts(run)[2]["step"] < 16, "trained by one host, and by both again"
    got, want = curve(run), curve(tmp_path / "runs/whole")
    assert list(got) == list(want) == list(range(1, 17))
    for step in want:
        assert got[step] == pytest.approx(want[step], rel=1e-6), step


def starts(run: Path) -> list[dict]:
    return [event for event in read_lines(run / "events.jsonl") if event["event"] == "start"]
