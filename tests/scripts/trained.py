"""One tiny training run that the tests of export, import and generation share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.training.tiny import write_inputs


def train(config: Path, *overrides: str) -> int:
    """`python train.py CONFIG ...` in this process; its exit code."""
    from train import main

    return main([str(config), *overrides])


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder of six steps; its checkpoints are of steps 3 and 6."""
    place = tmp_path_factory.mktemp("trained")
    config = write_inputs(place)
    here = Path.cwd()
    os.chdir(place)
    try:
        assert train(config, "run.name=try", "train.steps=6") == 0
    finally:
        os.chdir(here)
    return place / "runs" / "try"
