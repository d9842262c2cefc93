"""The set-up's choices and the quickstart's course, with a Python that only writes down its calls.

What the calls do is tested where it is written (training, export, report); here it is which of them
are made, in which order, and what a person is told when one fails.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINUX_X86 = (platform.system(), platform.machine()) == ("Linux", "x86_64")

# Stands for `python3` and for the .venv's python. $STUB is a folder: calls are appended to `log`;
# files in it say what this Python has and does.
STUB = r"""#!/usr/bin/env bash
has() { [ -e "$STUB/$1" ]; }
case "$*" in
    *"sys.version_info < (3, 10)"*) has old && exit 1; exit 0 ;;
    --version) echo "Python 3.8.1"; exit 0 ;;
    "-c import pip") has broken && exit 1; exit 0 ;;
    "- "*) cat >/dev/null; case "$0" in
        *.venv*) has venv_torch || { has base_torch && has system_site; } ;;
        *) has base_torch ;;
    esac; exit ;;
    "-m venv"*) echo "$*" >>"$STUB/log"; has no_venv && exit 1
        case "$*" in *--system-site-packages*) touch "$STUB/system_site" ;; esac
        for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python"; exit ;;
    "-m pip index versions torch") cat "$STUB/index" 2>/dev/null; exit ;;
    "-m pip install"*) echo "$*" >>"$STUB/log"
        case "$*" in *" torch"*|*" my-torch"*)
            has no_network && exit 1
            touch "$STUB/venv_torch" ;;
        esac
        exit 0 ;;
    "-c from importlib.metadata"*) echo "torch==2.13.0+cpu"; exit ;;
    "-c "*) exec "$REAL" "$@" ;;
esac
echo "$*" >>"$STUB/log"
[ "$1" = train.py ] && exit "$(cat "$STUB/train_code" 2>/dev/null || echo 0)"
exit 0
"""


class Machine:
    """A copy of the scripts beside a stub Python, and what came of running them."""

    def __init__(self, folder: Path):
        self.project, self.stub, self.bin = folder / "project", folder / "stub", folder / "bin"
        for place in (self.project / "scripts", self.stub, self.bin):
            place.mkdir(parents=True)
        for name in ("quickstart.sh", "test.sh", "_setup.sh"):
            shutil.copy(ROOT / "scripts" / name, self.project / "scripts")
        shutil.copy(ROOT / "pyproject.toml", self.project)
        self.command("python3", STUB)

    def command(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    def has(self, *names: str, **contents: str) -> None:
        for name in names:
            (self.stub / name).touch()
        for name, text in contents.items():
            (self.stub / name).write_text(text)

    def run(self, script: str, *words: str, **environment: str) -> subprocess.CompletedProcess:
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("TESSERA", "PYTHON"))}
        path = f"{self.bin}:/usr/local/sbin:/usr/sbin:/usr/bin:/bin"
        given = {"PATH": path, "STUB": str(self.stub), "REAL": sys.executable, **environment}
        return subprocess.run(
            ["bash", str(self.project / "scripts" / script), *words],
            env=keep | given,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def calls(self) -> list[str]:
        log = self.stub / "log"
        return log.read_text().splitlines() if log.exists() else []

    def installs(self) -> list[str]:
        return [call for call in self.calls if call.startswith("-m pip install")]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


INDEX = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.14.0+cpu, 2.13.0+cpu, 2.13.0, 2.12.1+cpu\n"


def test_whole_course_on_a_fresh_machine_with_a_cpu_build_on_the_index(machine):
    machine.has(index=INDEX)
    done = machine.run("quickstart.sh", "train.steps=5", "run.name=try", "run.dir=elsewhere")
    assert done.returncode == 0, done.stderr
    venv, torch, project, *rest = machine.calls
    assert venv.startswith("-m venv ")
    assert "--system-site-packages" not in venv
    assert torch.endswith(" torch==2.13.0+cpu"), "the newest CPU build inside the range"
    assert f"-c {machine.project}/.venv/torch.pin -e {machine.project}[train]" in project
    assert (machine.project / ".venv/torch.pin").read_text() == "torch==2.13.0+cpu\n"
    run = "elsewhere/try"
    assert rest == [
        "train.py configs/quickstart.yaml train.steps=5 run.name=try run.dir=elsewhere",
        f"scripts/export_hf.py {run}/checkpoints/latest {run}/hf --overwrite --check",
        f"scripts/generate.py {run}/hf --prompt The whale --max-new-tokens 60 --temperature 0.8",
        f"scripts/report.py {run}",
    ]
    assert f"{run}/report.html" in done.stdout


def test_the_second_time_nothing_is_installed(machine):
    machine.has(index=INDEX)
    machine.run("quickstart.sh")
    first = len(machine.installs())
    assert first == 2
    assert machine.run("quickstart.sh").returncode == 0
    assert len(machine.installs()) == first
    # Another list of packages installs again, and keeps the PyTorch that is there.
    with open(machine.project / "pyproject.toml", "a") as file:
        file.write("# changed\n")
    machine.run("quickstart.sh")
    assert len(machine.installs()) == first + 1


def test_an_installed_torch_is_kept(machine):
    machine.has("base_torch", index=INDEX)
    done = machine.run("quickstart.sh")
    assert done.returncode == 0
    assert "keeping the PyTorch of" in done.stdout
    assert "--system-site-packages" in machine.calls[0]
    assert [call for call in machine.installs() if " torch" in call] == []


def test_with_a_driver_the_default_build_and_the_gpu_extra(machine):
    machine.has(index=INDEX)
    machine.command("nvidia-smi", "#!/bin/sh\nexit 0\n")
    assert machine.run("quickstart.sh").returncode == 0
    torch, project = machine.installs()
    assert torch.endswith(" torch>=2.10,<2.14")
    assert "--index-url" not in torch
    assert project.endswith("[gpu]")


def test_a_driver_that_does_not_work_is_none(machine):
    machine.has(index=INDEX)
    machine.command("nvidia-smi", "#!/bin/sh\nexit 9\n")
    machine.run("quickstart.sh")
    assert machine.installs()[0].endswith(" torch==2.13.0+cpu")


def test_without_a_cpu_build_on_the_index_pytorchs_own_is_asked(machine):
    machine.has(index="Available versions: 2.15.0, 2.13.0\n")
    assert machine.run("quickstart.sh").returncode == 0
    call = machine.installs()[0]
    assert "--index-url https://download.pytorch.org/whl/cpu torch>=2.10,<2.14" in call
    machine = Machine(machine.project.parent / "two")
    machine.has("no_network")
    done = machine.run("quickstart.sh")
    assert done.returncode == 1
    assert "TESSERA_TORCH='torch>=2.10,<2.14' bash" in done.stderr
    assert not any("train.py" in call for call in machine.calls)


def test_a_build_given_by_hand_wins(machine):
    machine.has(index=INDEX)
    machine.run("quickstart.sh", TESSERA_TORCH="my-torch==1")
    assert machine.installs()[0].endswith(" my-torch==1")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("old", "Python 3.10 or newer is needed; found Python 3.8.1"),
        ("no_venv", "apt-get install python3-venv"),
    ],
)
def test_what_is_missing_is_named(machine, state, message):
    machine.has(state)
    # Only the stub may be found: a newer Python of this machine would do otherwise.
    done = machine.run("quickstart.sh", PYTHON=str(machine.bin / "python3"))
    assert done.returncode == 1
    assert message in done.stderr
    assert not (machine.project / ".venv").exists()


def test_a_broken_environment_is_not_touched(machine):
    machine.has("broken")
    (machine.project / ".venv/bin").mkdir(parents=True)
    shutil.copy(machine.bin / "python3", machine.project / ".venv/bin/python")
    done = machine.run("quickstart.sh")
    assert done.returncode == 1
    assert "remove it: rm -r" in done.stderr
    assert machine.calls == []


@pytest.mark.parametrize(
    ("code", "expected", "message"),
    [("2", 1, "has a mistake"), ("75", 75, "resumes from there"), ("1", 1, "scripts/doctor.py")],
)
def test_training_that_does_not_end_well(machine, code, expected, message):
    machine.has(index=INDEX, train_code=code)
    done = machine.run("quickstart.sh", "train.steps=3")
    assert done.returncode == expected
    assert message in done.stdout + done.stderr
    assert not any("export_hf" in call for call in machine.calls)


def test_words_that_are_no_overrides_are_refused_before_anything(machine):
    done = machine.run("quickstart.sh", "steps")
    assert done.returncode == 1
    assert "'steps' is no override" in done.stderr
    assert machine.calls == []


def test_test_script_lints_tests_and_counts_failures(machine):
    machine.has(index=INDEX)
    done = machine.run("test.sh")
    assert done.returncode == 0, done.stderr
    own, other = machine.installs()[-2:]
    assert own.endswith("[dev,deepspeed,interop]" if LINUX_X86 else "[dev,deepspeed]")
    assert "--no-deps --target" in other and "transformers==4.57" in other
    rest = machine.calls[machine.calls.index(other) + 1 :]
    assert rest[:2] == ["-m ruff check .", "-m ruff format --check ."]
    assert rest[2].startswith("-m pytest tests ")
    assert done.stdout.endswith("all is well\n")
    machine.run("test.sh", "tests/moe", "-k", "top")
    assert machine.calls[-1] == "-m pytest tests/moe -k top"
