"""The doctor sees faults that are put before it, and ends in bounded time."""

import io
import shutil
import socket
import subprocess
import threading
import time

import pytest

from scripts import doctor as module
from tests.training.test_record import after, make_run


@pytest.fixture
def doctor():
    return module


def only(checks):
    (check,) = list(checks)
    return check


def test_this_machine_can_run_the_project(doctor):
    levels = {check.level for check in (*doctor.python_version(), *doctor.packages())}
    assert levels <= {"ok", "warning"}
    assert only(doctor.bundled_text()).level == "ok"


def test_requirements_are_those_of_the_project_file(doctor):
    names = doctor.requirements()
    assert any(text.startswith("torch>=") for text in names)
    assert any(text.startswith("triton>=") and "sys_platform" in text for text in names)
    assert any(text.startswith("transformers>=") for text in names), "train.py needs it"
    assert not any(text.startswith("pytest") for text in names), "that is another extra"


def test_missing_and_outdated_packages(doctor, monkeypatch):
    monkeypatch.setattr(
        doctor, "requirements", lambda: ["no-such-package>=1", "numpy>=99", "pydantic>=2"]
    )
    checks = {check.level: check for check in doctor.packages()}
    assert "no-such-package is not installed" in checks["problem"].seen
    assert checks["problem"].remedy == "pip install 'no-such-package>=1'"
    assert "is outside >=99" in checks["warning"].seen
    assert "pydantic 2" in checks["ok"].seen


def test_cpu_build_beside_a_driver(doctor, monkeypatch):
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(doctor, "_driver", lambda: "580.1")
    check = next(doctor.torch_and_gpus())
    assert check.level == "problem"
    assert "NVIDIA driver (580.1) is here" in check.seen
    monkeypatch.setattr(doctor, "_driver", lambda: None)
    assert next(doctor.torch_and_gpus()).level == "ok"


def test_cuda_build_without_a_device(doctor, monkeypatch):
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_driver", lambda: "400.0")
    check = next(doctor.torch_and_gpus())
    assert (check.level, "sees no device" in check.seen) == ("problem", True)
    assert "update the NVIDIA driver" in check.remedy


def test_full_disk_and_too_many_threads(doctor, monkeypatch):
    usage = type("Usage", (), {"free": 2**30})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: usage)
    monkeypatch.setenv("OMP_NUM_THREADS", "999")
    checks = list(doctor.machine())
    assert [check.level for check in checks].count("problem") == 2
    assert any("1 GiB free for runs" in check.seen for check in checks)
    assert any("OMP_NUM_THREADS=999 is more than the" in check.seen for check in checks)


def test_an_unreachable_hub_is_a_note_within_seconds(doctor, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    over = threading.Event()

    def hang(*arguments, **options):
        over.wait(30)
        raise OSError("too late")

    monkeypatch.setattr(socket, "create_connection", hang)
    begin = time.monotonic()
    check = only(doctor.hub())
    assert time.monotonic() - begin < 5
    assert check.level == "note"
    assert "no answer within 3 s" in check.seen
    over.set()
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example:8443/x")
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: io.BytesIO())
    assert only(doctor.hub()).seen == "hub.example answers"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert only(doctor.hub()).level == "ok"


def test_processes_that_cannot_talk(doctor, monkeypatch):
    monkeypatch.setattr(doctor, "meet", absent)
    check = only(doctor.communication())
    assert check.level == "warning"
    seen = "two processes cannot reach each other over gloo: "
    assert check.seen.startswith(seen) and check.seen.endswith("OSError: no route")


def absent() -> None:
    raise OSError("no route")


def test_two_processes_talk(doctor):
    assert only(doctor.communication()).level == "ok"


def test_a_check_that_fails_is_a_problem_and_not_the_end(doctor, monkeypatch, capsys):
    def broken():
        raise OSError("boom")

    def fine():
        yield doctor.Check("ok", "fine")

    monkeypatch.setattr(doctor, "CHECKS", (broken, fine))
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "PROBLEM checking broken failed: OSError: boom" in out
    assert "ok      fine" in out
    monkeypatch.setattr(doctor, "CHECKS", (fine,))
    assert doctor.main([]) == 0


def test_a_run_is_looked_at_first(doctor, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(doctor, "CHECKS", ())
    folder = make_run(tmp_path / "run", after(300, dead_experts=6.0, skipped_steps=90))
    assert doctor.main([str(folder)]) == 1, "skipped steps are a problem"
    out = capsys.readouterr().out
    assert "PROBLEM 90 of 1000 steps were skipped" in out
    assert "warning 6 experts get less than a tenth" in out
    assert "1 problems, 1 warnings" in out
    assert doctor.main([str(make_run(tmp_path / "fine"))]) == 0
    assert "nothing stands out up to step 1000" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        doctor.main([str(tmp_path / "nothing")])
    assert stop.value.code == 2


def flip(path):
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 4]))


def test_every_checkpoint_of_a_run_is_verified(doctor, monkeypatch, trained, tmp_path, capsys):
    monkeypatch.setattr(doctor, "CHECKS", ())
    run = tmp_path / "run"
    shutil.copytree(trained, run, symlinks=True)
    (run / "checkpoints/step_00000009.tmp").mkdir()
    assert doctor.main([str(run)]) == 0
    out = capsys.readouterr().out
    assert "ok      whole by every checksum: step_00000003, step_00000006" in out
    assert "note    step_00000009.tmp: a save is under way" in out
    flip(run / "checkpoints/step_00000003/__0_0.distcp")  # not the newest, nor of another size
    assert doctor.main([str(run)]) == 0
    out = capsys.readouterr().out
    assert "warning step_00000003: __0_0.distcp does not match its checksum" in out
    assert "ok      whole by every checksum: step_00000006" in out
    (run / "checkpoints/step_00000006/state.json").unlink()
    assert doctor.main([str(run)]) == 1
    out = capsys.readouterr().out
    assert "warning step_00000006: state.json is missing" in out
    assert "PROBLEM no checkpoint can be used" in out


def test_the_drivers_absence_is_no_error(doctor, monkeypatch):
    def missing(*arguments, **options):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    assert doctor._driver() is None
