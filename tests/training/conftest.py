"""Inputs of tiny training runs, made once."""

from pathlib import Path

import pytest

import train
from tests.training.tiny import write_inputs

STEPS = 12


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.yaml of a tiny run; its text has few rows, so runs get into a third epoch."""
    return write_inputs(tmp_path_factory.mktemp("tiny"), count=14)


@pytest.fixture
def run(tiny_config, tmp_path, monkeypatch, capsys):
    """run(*overrides) → exit code; runs lie in tmp_path/runs."""
    monkeypatch.chdir(tmp_path)

    def start(*overrides: str) -> int:
        return train.main([str(tiny_config), f"train.steps={STEPS}", *overrides])

    return start
