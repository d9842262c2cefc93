"""The commands of docs/corpus_to_score.md, one after the other, as written, on a small text."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.tiny import documents

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/corpus_to_score.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]
# What makes a training run small; everything else is as the page and its config have it.
SMALL = (
    "train.epochs=null train.global_batch_size=2 train.micro_batch_size=2 "
    "model.hidden_size=32 model.num_hidden_layers=2 model.num_experts=4 model.head_dim=16 "
    "model.num_experts_per_tok=2 model.moe_intermediate_size=16 data.seq_len=64 eval.rows=4 "
    "data.validation.fraction=0.2 log.plots=false run.device=cpu"
)
MANY = re.compile("^torchrun --standalone --nproc-per-node=8 ")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("week")
    for name in ("configs", "scripts", "train.py"):
        (place / name).symlink_to(ROOT / name)
    (place / "my_texts").mkdir()
    for number in range(3):
        text = "\n".join(documents(60, seed=number))
        (place / "my_texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    return place


def test_the_page_has_the_whole_way():
    scripts = {re.search(r"(\w+)\.py", command).group(1) for command in COMMANDS}
    assert scripts == {
        "prepare_data", "train", "estimate", "doctor", "report", "export_hf", "evaluate", "generate"
    }  # fmt: skip


@pytest.mark.parametrize("number", range(len(COMMANDS)), ids=[c[:60] for c in COMMANDS])
def test_a_command_of_the_page(place, number):
    command = COMMANDS[number]
    steps = 4
    if MANY.match(command):  # more processes resume the run that one has begun
        command, steps = MANY.sub("torchrun --standalone --nproc-per-node=2 ", command), 6
    words = shlex.split(command)
    if "train.py" in words and "--help" not in words:
        words += [*SMALL.split(), f"train.steps={steps}"]
    if "estimate.py" in words[1]:
        words += ["data.tokenizer=bundled:moby-dick", "data.sources=[{path: 'bundled:moby-dick'}]"]
    words[:1] = {
        "python": [sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    }[words[0]]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "HOME": str(place),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        words, cwd=place, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
