"""Requests to stop, and messages about memory."""

import os
import signal
import types

import pytest
import torch

from parallel import World
from training import faults
from training.config.load import ConfigError
from training.faults import StopRequest, report_error
from training.out_of_memory import LastCounts, out_of_memory


@pytest.fixture
def exits(monkeypatch):
    """Codes that os._exit was called with, instead of ending the tests."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    return codes


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_asks_second_ends(exits, number):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop and stop.received == number.name and exits == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert exits == [128 + signal.SIGTERM]
    assert signal.getsignal(number) is before, "the handlers are as before"


def test_a_time_limit_asks_too(monkeypatch):
    clock = [50.0]
    monkeypatch.setattr(faults.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(faults, "STARTED", 40.0)
    with StopRequest(after_hours=0.01) as stop:
        assert not stop
        clock[0] = 75.9
        assert not stop
        clock[0] = 76.1
        assert stop


def test_under_torchrun_a_signal_that_is_passed_on_counts_once(exits, monkeypatch):
    """Ctrl+C reaches the processes from the terminal, and once more from their launcher."""
    clock = [100.0]
    monkeypatch.setattr(faults.time, "monotonic", lambda: clock[0])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with StopRequest() as stop:
        for after in (0.0, 0.1, 2.9):
            clock[0] = 100.0 + after
            os.kill(os.getpid(), signal.SIGINT)
        assert stop and exits == []
        clock[0] = 103.1
        os.kill(os.getpid(), signal.SIGINT)
        assert exits == [130]


def test_memory_message():
    config = types.SimpleNamespace(
        train=types.SimpleNamespace(micro_batch_size=8, checkpointing="full"),
        model=types.SimpleNamespace(save="h"),
        data=types.SimpleNamespace(seq_len=64),
    )

    def text(counts_LE, **where) -> str:
        last = LastCounts()
        last.counts_LE = counts_LE
        state = types.SimpleNamespace(
            config=config, train=types.SimpleNamespace(follower=lambda kind: last), **where
        )
        return str(out_of_memory(state, RuntimeError("out of it\nsecond line")))

    counts_LE = torch.tensor([[10, 10, 10, 10], [0, 37, 2, 1]], dtype=torch.int32)
    skewed = text(counts_LE, world=World(3), step=40)
    assert skewed.startswith("out of memory on process 3 at step 40: out of it.")
    assert "max 37 (MoE layer 1, expert 1), mean 10, max_violation 2.70" in skewed
    assert "router.balance.coef" in skewed and "\n" not in skewed
    lower = "train.micro_batch_size (now 8), model.save=x (now h), data.seq_len (now 64)"
    assert skewed.endswith(lower)
    even = text(counts_LE[:1], world=World(), step=1)
    assert "router.balance.coef" not in even
    early = text(None, world=World(), step=1)
    assert "Tokens per expert" not in early


def test_mistakes_are_told_in_one_line_by_the_first_process(capsys):
    assert report_error(0, ConfigError("wrong\n  key"), 2) == 2
    assert report_error(1, ConfigError("wrong\n  key"), 2) == 2
    assert report_error(1, ValueError("disk is\nfull"), 1) == 1
    assert capsys.readouterr().err == "error: wrong key\nerror on process 1: disk is full\n"
