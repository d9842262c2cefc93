"""Set-up shared by all tests.

The Triton interpreter must be chosen before Triton is imported, and Triton comes with the first
import of `moe`, so it is done at the head of this file. One thread: the tests' matrices are small,
and two pytest workers on a small machine would otherwise fight for the cores.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` on a machine without CUDA."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test starts from the same random state, so that it can be run alone or with others."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _nothing_compiled() -> None:
    """What other modules compiled does not count: Dynamo limits the variants of one function."""
    torch._dynamo.reset()
