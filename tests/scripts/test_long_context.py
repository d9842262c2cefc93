"""The config and the commands of docs/long_context.md, made small."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.training.tiny import documents

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/long_context.md").read_text(encoding="utf-8")
SMALL = "train.steps=2 train.global_batch_size=2 run.device=cpu log.plots=false"


def test_the_page_runs_as_written(script, trained, tmp_path):
    (config,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    commands = "".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)).splitlines()
    assert [re.search(r"(\w+)\.py", c).group(1) for c in commands] == [
        "train", "export_hf", "estimate"
    ]  # fmt: skip
    # a row of 16384 tokens is not for a test; everything else is as the page has it
    (tmp_path / "long.yaml").write_text(config.replace("16384", "128"), encoding="utf-8")
    assert script("export_hf").main([str(trained), str(tmp_path / "short")]) == 0
    (tmp_path / "long_texts").mkdir()
    text = " ".join(documents(400, seed=3))
    (tmp_path / "long_texts" / "book.txt").write_text(text, encoding="utf-8")
    for name in ("scripts", "train.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    told = []
    for command in commands:
        words = [sys.executable, *shlex.split(command)[1:]]
        words += SMALL.split() if "train.py" in words else []
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        told.append(done.stdout)
    assert re.search(r"continue with max_position_embeddings: \d+ → 128; rope_scaling", told[0])
    assert "check passed" in told[1]
    resolved = yaml.safe_load((tmp_path / "runs/long/config.yaml").read_text())
    assert resolved["model"]["rope_scaling"]["rope_type"] == "yarn"


@pytest.mark.parametrize("kind", ["yarn", "llama3", "linear", "dynamic"])
def test_every_kind_of_the_table_is_one(kind):
    from models.rope import SCALINGS

    assert f"rope_type: {kind}" in PAGE and kind in SCALINGS
    assert len(SCALINGS) == 4
