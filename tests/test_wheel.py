"""A built wheel holds the layer alone, and works without the rest of the repository."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COPIED = (
    "moe", "models", "parallel", "training", "scripts", "configs", "tests",
    "train.py", "pyproject.toml", "README.md", "LICENSE",
)  # fmt: skip

# Nothing of an installed checkout can be imported.
USE = """
import sys

class Refused:
    def find_spec(name, path=None, target=None):
        if name in ("models", "parallel", "training", "train", "scripts"):
            raise ImportError(name)

sys.meta_path.insert(0, Refused)
import torch
import moe
config = moe.MoEConfig(hidden_size=16, expert_size=8, num_experts=4, num_experts_per_tok=2)
layer = moe.MoE(config)
x = torch.randn(5, 16, requires_grad=True)
y, stats = layer(x)
(y.square().sum() + layer.loss(stats)).backward()
assert y.shape == x.shape and x.grad.abs().sum() > 0
assert all(parameter.grad is not None for parameter in layer.parameters())
print(moe.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: setuptools writes beside the sources."""
    pytest.importorskip("setuptools")
    source = tmp_path_factory.mktemp("source")
    for name in COPIED:
        place = ROOT / name
        if place.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(place, source / name, ignore=ignored)
        else:
            shutil.copy(place, source)
    out = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(source))
    (built,) = out.glob("*.whl")
    return built


def pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", *words, "--no-index", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wheel_holds_the_layer_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (file,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = archive.read(file).decode()
    code = {name for name in names if ".dist-info/" not in name}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "moe").rglob("*.py")}
    assert code == sources
    required = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra ==)", metadata, re.MULTILINE)
    assert sorted(required) == ["pydantic", "torch", "triton"]


def test_the_layer_of_a_wheel_trains_by_itself(wheel, tmp_path):
    target = tmp_path / "site"
    pip("install", "--no-deps", "--target", str(target), str(wheel))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", USE],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
        env=environment | {"PYTHONPATH": str(target)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(target)
