"""Inputs of tiny training runs, made once."""

from pathlib import Path

import pytest

from tests.training.tiny import write_inputs


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.yaml of a tiny run; its text has few rows, so runs get into a third epoch."""
    return write_inputs(tmp_path_factory.mktemp("tiny"), count=14)
