"""The launchers: what starts again, which code comes back, and what is on the screen.

Most cases launch a small program in place of train.py, which ends as it is told; those that need a
run train one. Slurm is a stand-in that signals as the manual of `sbatch --signal` says.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from tests import processes
from tests.training.tiny import write_inputs
from training.report.files import read_lines

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts/launch"

# Ends as the word for its start and rank says: an exit code, or minus a signal's number.
# Lines are written in one piece: those of two processes must not get mixed.
PROGRAM = """
import os, signal, sys, time
start, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
os.write(1, f"start {start} rank {rank}\\n".encode())
code = int(sys.argv[1 + start].split(",")[rank])
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
# Needs a while to save after it was asked to stop.
SAVES = """
import os, signal, sys, time
def save(number, frame):
    time.sleep(2)
    os.write(1, b"saved\\n")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
os.write(1, b"ready\\n")
time.sleep(60)
"""


def load():
    spec = importlib.util.spec_from_file_location("launch", SCRIPTS / "launch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def launch(monkeypatch):
    """The launcher, whose handlers and silence end with the test."""
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield load()
    logging.disable(logging.NOTSET)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("words", "code", "starts"),
    [
        (["2,2"], 2, 1),  # a mistake in the config
        (["1,69"], 1, 1),  # a run that failed on one process, and what the other saw of it
        (["75,75"], 75, 1),  # stopped on request
        (["0,-9", "0,0"], 0, 2),  # killed, also when a save failed because of it
        (["1,-9", "0,0"], 0, 2),
        (["69,69", "69,69", "69,69"], 69, 3),  # lost again and again
        (["0,-11", "0,-11", "2,2"], 2, 3),
        (["-9,69", "-9,69", "-9,69"], 137, 3),
    ],
)
def test_d3_starts_again_only_where_it_helps_and_ends_with_the_code_of_the_run(
    launch, tmp_path, capfd, words, code, starts
):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    given = ["--processes", "2", "--restarts", "2", "--script", str(program), "--", *words]
    assert launch.main(given) == code
    out, err = capfd.readouterr()
    assert len(re.findall(r"^start \d+ rank 0$", out, re.MULTILINE)) == starts
    assert "Traceback" not in err and len(err.splitlines()) <= starts, err


# Trains forever with fewer than three processes; asked to stop, all of them save and end.
GROWS = """
import os, pathlib, signal, sys, time
asked = pathlib.Path(__file__).with_name("asked")
signal.signal(signal.SIGTERM, lambda *_: asked.touch())
world = int(os.environ["WORLD_SIZE"])
os.write(1, f"rank {os.environ['RANK']} of {world}\\n".encode())
while world < 3:
    if asked.exists():
        sys.exit(75)
    time.sleep(0.01)
"""


def test_a_host_that_comes_has_the_others_save_and_start_with_it(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(GROWS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def host(number: int) -> processes.Group:
        given = (port, str(program), [], number == 0, "1:3")
        return processes.start(other_host, *given, folder=tmp_path / str(number))

    def printed(groups: list[processes.Group], words: str, count: int) -> None:
        end = time.monotonic() + 120
        while sum(group.output().count(words) for group in groups) < count:
            assert time.monotonic() < end, "\n".join(group.output() for group in groups)
            time.sleep(0.05)

    groups = [host(0), host(1)]
    printed(groups, " of 2", 2)
    groups.append(host(2))
    for group in groups:
        assert group.wait(120) == [0], "\n".join(group.output() for group in groups)
    told = "".join(group.output() for group in groups)
    assert sorted(re.findall(r"rank (\d) of 3", told)) == ["0", "1", "2"]
    assert "another host has come; saving, and starting again with it" in told
    assert "error" not in told and "Traceback" not in told


@pytest.mark.parametrize("number", ["0", "3:2", "two"])
def test_a_number_of_hosts_that_is_none_is_refused(launch, number, capfd):
    with pytest.raises(SystemExit) as stop:
        launch.main(["--processes", "1", "--hosts", number, "--", "x.yaml"])
    assert stop.value.code == 2
    assert "--hosts" in capfd.readouterr().err


def other_host(port: int, program: str, words: list[str], first: bool, hosts: str = "2") -> None:
    """A launcher of one of two hosts, which are both this one."""
    module = load()
    module.is_first = lambda *where: first
    given = ["--processes=1", f"--hosts={hosts}", f"--first=127.0.0.1:{port}", "--id=two"]
    given += ["--restarts=1", "--late-s=5"]
    os._exit(module.main([*given, f"--script={program}", "--", *words]))


@pytest.mark.parametrize(("words", "codes"), [(["69,-9", "0,0"], [0, 0]), (["69,1"], [1, 69])])
def test_d3_hosts_start_again_together_or_not_at_all(tmp_path, words, codes):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    groups = [
        processes.start(other_host, port, str(program), words, first, folder=tmp_path / str(first))
        for first in (True, False)
    ]
    ended = [group.wait(60)[0] for group in groups]
    assert sorted(ended) == codes, [group.output() for group in groups]
    assert all("Traceback" not in group.output() for group in groups)


def test_d2_processes_save_for_as_long_as_they_need(launch, tmp_path, monkeypatch, capfd):
    """No clock of the agent runs while they do: it has not begun to end them."""
    program = tmp_path / "program.py"
    program.write_text(SAVES)
    ended = []
    close = SubprocessContext._close

    def watch(context, *arguments, **named):
        ended.append([h.proc.poll() for h in context.subprocess_handlers.values()])
        close(context, *arguments, **named)

    monkeypatch.setattr(SubprocessContext, "_close", watch)
    subprocess.Popen(["sh", "-c", f"sleep 1.5; kill -TERM {os.getpid()}"])
    assert launch.main(["--processes", "2", "--script", str(program)]) == 75
    assert capfd.readouterr().out.split().count("saved") == 2
    assert ended[0] == [75, 75], "the agent came before the processes had saved"


# --- the scripts -------------------------------------------------------------------------------


def environment(**more: str) -> dict[str, str]:
    quiet = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GPUS": "2"}
    return os.environ | quiet | more


def settings(folder: Path, *more: str) -> list[str]:
    config = write_inputs(folder / "inputs", count=14)
    return [str(config), f"run.dir={folder}/runs", "run.name=one", "train.micro_batch_size=1",
            "eval.every_steps=null", "eval.rows=128", *more]  # fmt: skip


def wait_for_line(run: Path, process: subprocess.Popen) -> None:
    end = time.monotonic() + 240
    while not any(read_lines(run / "metrics.jsonl")):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.1)


def test_d4_a_mistake_in_the_config_is_one_line(tmp_path):
    words = ["bash", str(SCRIPTS / "one_host.sh"), *settings(tmp_path, "train.stps=3")]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1, done.stdout + done.stderr
    assert done.stderr.startswith("error: unknown key train.stps=3")


def test_d4_a_busy_port_is_one_line(tmp_path):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        more = {"HOSTS": "2", "FIRST": "127.0.0.1", "PORT": str(busy.getsockname()[1])}
        words = ["bash", str(SCRIPTS / "hosts.sh"), *settings(tmp_path)]
        done = subprocess.run(
            words, env=environment(**more), capture_output=True, text=True, timeout=240
        )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert f"127.0.0.1:{more['PORT']}: Address already in use; give" in done.stderr


@pytest.mark.parametrize("first", ["nowhere:29x", "29500", "here:70000"])
def test_d4_a_place_that_is_none_is_one_line(launch, first, capfd):
    assert launch.main(["--processes", "1", "--hosts", "2", "--first", first, "--", "x.yaml"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: hosts cannot meet at {first}: it must be ADDRESS:PORT")


def test_d4_ctrl_c_saves_without_a_traceback(tmp_path):
    words = ["bash", str(SCRIPTS / "one_host.sh"), *settings(tmp_path, "train.steps=100000")]
    process = subprocess.Popen(
        words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    wait_for_line(tmp_path / "runs/one", process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 75, out
    assert "stopped on request" in out and "Traceback" not in out and "SIGINT" not in out


# --- Slurm --------------------------------------------------------------------------------------

# srun starts the tasks as a step of their own, ends with the highest code, and answers SIGTERM by
# killing them. A step that Slurm itself signals with SIGTERM loses its exit code.
SRUN = """#!{python}
import os, signal, subprocess, sys
words = [w for w in sys.argv[1:] if not w.startswith("--kill-on-bad-exit")]
step = subprocess.Popen(words, start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: os.killpg(step.pid, signal.SIGKILL))
open("step", "w").write(str(step.pid))
code = step.wait()
sys.exit(143 if os.path.exists("signalled") else code if code >= 0 else 128 - code)
"""
SCONTROL = """#!/bin/sh
case "$1" in
show) echo localhost ;;
requeue) echo "$2" >>requeued ;;
esac
"""


def descendants(pid: int) -> list[int]:
    found = [pid]
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            found += descendants(int(child))
    return found


class Slurm:
    """sbatch on this host, as far as signals go."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.folder = folder
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            path = folder / name
            path.write_text(text.format(python=sys.executable) if name == "srun" else text)
            path.chmod(0o755)
        self.script = SCRIPTS / "slurm.sh"
        for place in ("scripts", "train.py"):  # submitted from the repository
            (folder / place).symlink_to(ROOT / place)
        more = {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1",
            "SLURM_GPUS_ON_NODE": "2", "TMPDIR": str(folder),
        }  # fmt: skip
        self.job = subprocess.Popen(
            ["bash", str(self.script), *words], cwd=folder, env=environment(**more), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def near_the_time_limit(self) -> None:
        """The signal of `--signal=[B:]SIGNAL@SECONDS`: with B: to the batch shell alone, without it
        to all processes of the steps and not to the batch shell."""
        (option,) = re.findall(r"^#SBATCH --signal=(\S+)$", self.script.read_text(), re.MULTILINE)
        batch, name, seconds = re.fullmatch(r"(B:)?([A-Z0-9]+)(?:@(\d+))?", option).groups()
        number = signal.Signals[f"SIG{name}"]
        assert int(seconds or 60) >= 120, "time to save"
        if batch:
            os.kill(self.job.pid, number)
            return
        if number == signal.SIGTERM:
            (self.folder / "signalled").touch()
        for pid in descendants(int((self.folder / "step").read_text())):
            os.kill(pid, number)

    def end(self) -> tuple[int, str]:
        out, _ = self.job.communicate(timeout=240)
        return self.job.returncode, out


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_d1_a_slurm_job_saves_and_is_requeued_before_its_time_limit(tmp_path):
    slurm = Slurm(tmp_path, settings(tmp_path, "train.steps=100000"))
    wait_for_line(tmp_path / "runs/one", slurm.job)
    slurm.near_the_time_limit()
    code, out = slurm.end()
    assert code == 75 and "stopped on request" in out, out
    assert (tmp_path / "requeued").read_text() == "7\n"
    assert (tmp_path / "runs/one/checkpoints/latest").exists()
    assert not list(tmp_path.glob("*.pid"))


@pytest.mark.parametrize("words", [["train.stps=1"], ["train.steps=4"]])
def test_d1_a_slurm_job_that_ends_by_itself_is_not_requeued(tmp_path, words):
    slurm = Slurm(tmp_path, settings(tmp_path, *words))
    code, out = slurm.end()
    assert code == (0 if words == ["train.steps=4"] else 2), out
    assert not (tmp_path / "requeued").exists()
