"""The choice of kernel configurations: once per shape class and for all processes."""

import fcntl
import hashlib
import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch

from moe.kernels.common import tuning as _tuning

CPU = torch.device("cpu")
SECONDS = {"slow": 3.0, "fast": 1.0, "middle": 2.0}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    monkeypatch.delenv("TESSERA_TUNE", raising=False)
    _tuning.forget()
    yield
    _tuning.forget()


class Bench:
    """Stands for kernel and clock: knows each configuration's time and what was run."""

    def __init__(self, fail=()):
        self.ran = []
        self.fail = fail

    def run(self, config):
        self.ran.append(config)
        if config in self.fail:
            raise RuntimeError(f"{config} needs too much shared memory")

    def measure(self, launch):
        launch()
        return SECONDS[self.ran[-1]]

    def best(self, configs, key=(1,), kernel="k"):
        return _tuning.best(kernel, key, configs, self.run, device=CPU, measure=self.measure)


def test_takes_the_fastest_and_remembers():
    bench = Bench()
    assert bench.best(["slow", "fast", "middle"]) == "fast"
    assert bench.ran == ["slow", "fast", "middle"]
    assert bench.best(["slow", "fast", "middle"]) == "fast"
    assert len(bench.ran) == 3


def test_processes_of_one_run_do_not_wait_for_each_other_and_agree(monkeypatch):
    """One that holds the lock may be waiting for rows of the one that waits for the lock."""
    monkeypatch.setattr(_tuning, "_in_a_group", lambda: True)
    bench, path = Bench(), _tuning.cache_file(CPU)
    measure = bench.measure

    def meanwhile(launch):
        with open(path.with_suffix(".lock"), "w") as lock:  # free: another one measures as well
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if len(bench.ran) == 2:  # and is done first
            listed = hashlib.sha256(b"'slow'\n'fast'\n'middle'").hexdigest()[:12]
            path.write_text(json.dumps({f"k|1|{listed}": 2}))
        return measure(launch)

    path.parent.mkdir(parents=True, exist_ok=True)
    bench.measure = meanwhile
    assert bench.best(["slow", "fast", "middle"]) == "middle"
    assert bench.ran == ["slow", "fast", "middle"]


def test_second_start_measures_nothing():
    Bench().best(["slow", "fast"])
    _tuning.forget()  # a new process
    again = Bench()
    assert again.best(["slow", "fast"]) == "fast"
    assert again.ran == []


def test_other_shape_kernel_or_list_is_tuned_again():
    bench = Bench()
    bench.best(["slow", "fast"])
    bench.best(["slow", "fast"], key=(2,))
    bench.best(["slow", "fast"], kernel="other")
    assert bench.best(["middle", "fast", "slow"]) == "fast"
    assert len(bench.ran) == 9


def test_one_configuration_is_not_run():
    bench = Bench()
    assert bench.best(["slow"]) == "slow"
    assert bench.ran == []


def test_failing_configuration_is_left_out():
    assert Bench(fail=("fast",)).best(["slow", "fast", "middle"]) == "middle"


def test_all_failing_raises_the_first_error():
    with pytest.raises(RuntimeError, match="slow needs too much"):
        Bench(fail=("slow", "fast")).best(["slow", "fast"])


def test_empty_list_is_refused():
    with pytest.raises(ValueError, match="'k' is empty"):
        Bench().best([])


def test_switched_off_takes_the_file_or_the_first(monkeypatch):
    monkeypatch.setenv("TESSERA_TUNE", "0")
    bench = Bench()
    assert bench.best(["slow", "fast"]) == "slow"
    monkeypatch.delenv("TESSERA_TUNE")
    assert bench.best(["slow", "fast"]) == "fast"  # the default was not remembered
    _tuning.forget()
    monkeypatch.setenv("TESSERA_TUNE", "0")
    assert bench.best(["slow", "fast"]) == "fast"
    assert bench.ran == ["slow", "fast"]


def test_without_cuda_nothing_is_measured():
    ran = []
    config = _tuning.best("k", (1,), ["slow", "fast"], ran.append, device=CPU)
    assert config == "slow" and ran == []


def test_not_measured_while_compiling(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    bench = Bench()
    assert bench.best(["slow", "fast"]) == "slow" and bench.ran == []


def test_not_measured_while_capturing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(_tuning, "INTERPRET", False)
    assert not _tuning._may_measure(torch.device("cuda"), None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert _tuning._may_measure(torch.device("cuda"), None)


@pytest.mark.parametrize("content", ["{", "[]", '{"k|1|x": "fast"}'])
def test_broken_file_is_replaced(content):
    path = _tuning.cache_file(CPU)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    if content == "{":
        with pytest.warns(UserWarning, match="not readable"):
            assert Bench().best(["slow", "fast"]) == "fast"
    else:
        assert Bench().best(["slow", "fast"]) == "fast"
    assert 1 in json.loads(path.read_text()).values()


def test_entry_out_of_range_is_tuned_again():
    Bench().best(["slow", "fast"])
    path = _tuning.cache_file(CPU)
    path.write_text(json.dumps(dict.fromkeys(json.loads(path.read_text()), 7)))
    _tuning.forget()
    assert Bench().best(["slow", "fast"]) == "fast"


def test_folder_that_cannot_be_made(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("TESSERA_CACHE", str(blocked / "below"))
    with pytest.warns(UserWarning, match="tuning file"):
        assert Bench().best(["slow", "fast"]) == "fast"


def _worker(folder: str, log: str, times: dict[str, float]) -> None:
    os.environ["TESSERA_CACHE"] = folder

    def run(config):
        with open(log, "a") as file:
            file.write(f"run {config}\n")
        time.sleep(0.05)
        run.last = config

    def measure(launch):
        launch()
        return times[run.last]

    choice = _tuning.best("k", (1,), ["a", "b"], run, device=CPU, measure=measure)
    with open(log, "a") as file:
        file.write(f"chose {choice}\n")


def test_processes_agree_and_only_one_measures(tmp_path):
    # Each process would choose otherwise, if it measured.
    log = tmp_path / "log"
    start = multiprocessing.get_context("fork")
    times = [{"a": 1.0, "b": 2.0}, {"a": 2.0, "b": 1.0}, {"a": 1.0, "b": 2.0}]
    workers = [start.Process(target=_worker, args=(str(tmp_path), str(log), t)) for t in times]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    lines = log.read_text().split("\n")
    assert sum(line.startswith("run") for line in lines) == 2
    chosen = {line for line in lines if line.startswith("chose")}
    assert len(chosen) == 1


def test_names(monkeypatch):
    monkeypatch.delenv("TESSERA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert _tuning.cache_folder() == Path("/somewhere/tessera")
    assert _tuning.cache_file(CPU).name.startswith("tuning-cpu-triton")
    assert [_tuning.size_class(n) for n in (0, 1, 2, 3, 4096, 4097)] == [1, 1, 2, 4, 4096, 8192]
