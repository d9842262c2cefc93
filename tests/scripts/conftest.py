"""Loading scripts as modules, so that tests can call their parts."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts.trained import trained  # noqa: F401 (a fixture)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def script():
    """`script("report")` is scripts/report.py as a module."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / f"scripts/{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load
