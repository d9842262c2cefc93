#!/usr/bin/env python3
"""Score a model: perplexity by source of text, and tasks of EleutherAI's lm-eval.

    python scripts/evaluate.py runs/try                                  # the run's validation text
    python scripts/evaluate.py runs/try --text novel=a.txt --text code=src/
    python scripts/evaluate.py runs/try --tasks arc_easy,hellaswag --limit 200
    python scripts/evaluate.py out/ --tasks my_task --task-folder my_tasks/

The model is a checkpoint, a run folder or a Hugging Face folder. Scores of a run are also kept in
its scores.jsonl, and its report shows them. Tasks need the package lm_eval, which scores an export
with transformers, as anyone else would. Exit codes: 0 done, 2 a mistake.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from models.errors import UserError
from models.hf import export_hf
from models.hf.config import config_from_hf
from parallel import World
from scripts._command import bounded, command, listed, make_parser
from training.checkpoint.files import read_state, resolve
from training.checkpoint.weights import (
    CheckpointTensors,
    is_hf_folder,
    load_model,
    refuse_inexact,
    tokenizer_folder,
)
from training.config.build import load_config
from training.config.load import expand_home
from training.data import build_data
from training.data.config import DataConfig, SourceConfig, ValidationSources
from training.data.tokenizer import TextTokenizer, read_tokenizer
from training.evaluate import validate
from training.report.files import SCORES
from training.report.record import with_errors

ROWS = 8
"""Rows of one forward pass."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("model", type=expand_home, help="checkpoint, run folder or Hugging Face folder")
    add("--text", action="append", metavar="[NAME=]PATH", help="text to score; may be repeated")
    add("--seq-len", type=bounded(least=2), help="tokens a row (default: the run's, or 1024)")
    add("--tasks", type=listed(), default=[], help="of lm-eval, separated by commas")
    add("--task-folder", type=expand_home, help="folder with task files of your own")
    add(
        "--few-shot", type=bounded(least=0), help="examples before a question (default: the task's)"
    )
    add("--limit", type=bounded(least=1), help="questions of a task (default: all)")
    add("--batch-size", type=bounded(least=1), default=8, help="of tasks; default: %(default)s")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return parser.parse_args(arguments)


# --- perplexity -----------------------------------------------------------------------------------


def own_texts(words: list[str], seq_len: int) -> DataConfig:
    """Text that is only validated on, under the names that it was given."""
    sources = []
    for word in words:
        name, equals, path = word.partition("=")
        sources.append(
            SourceConfig(path=path, name=name) if equals else SourceConfig(path=expand_home(word))
        )
    return DataConfig(
        sources=sources, validation=ValidationSources(sources=sources), seq_len=seq_len
    )


def perplexities(
    options: argparse.Namespace, tokenizer: TextTokenizer, device: torch.device
) -> dict[str, float]:
    """Loss in nats per token and perplexity, over everything and by source; all rows count."""
    data, seed = None, 0
    if not is_hf_folder(options.model):
        config = load_config(resolve(options.model) / "config.yaml")
        data, seed = config.data, config.run.seed
    if options.text:
        data = own_texts(options.text, options.seq_len or (data.seq_len if data else 1024))
    elif data is None or data.validation is None:
        raise UserError(f"{options.model} has no validation text of its own; give --text PATH")
    elif options.seq_len:
        data = data.model_copy(update={"seq_len": options.seq_len})
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_model(options.model, device=device, dtype=dtype)
    batches = build_data(data, tokenizer, seed=seed).validation(micro_batch_size=ROWS)
    return validate(model, batches, world=World(), device=device)


# --- tasks ----------------------------------------------------------------------------------------


def as_hf_folder(model: str, tokenizer: TextTokenizer, out: Path) -> Path:
    """The model as a Hugging Face folder: itself, or an export."""
    if is_hf_folder(model):
        return Path(model)
    checkpoint = resolve(model)
    refuse_inexact(checkpoint)
    config = config_from_hf(checkpoint / "model")
    return export_hf(CheckpointTensors(checkpoint), out, config=config, tokenizer=tokenizer).folder


def task_scores(options: argparse.Namespace, folder: Path, device: torch.device) -> dict[str, Any]:
    """Metrics of each task and their standard errors, as lm-eval names them.

    Raises:
        UserError: lm_eval is not installed, or has no such task.
    """
    if find_spec("lm_eval") is None:
        raise UserError("--tasks needs the package lm_eval: pip install 'lm_eval[hf]'")
    import lm_eval
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path=options.task_folder)
    unknown = [task for task in options.tasks if not tasks.match_tasks([task])]
    if unknown:
        where = f" or in {options.task_folder}" if options.task_folder else ""
        raise UserError(
            f"--tasks={unknown[0]} is no task of lm-eval{where}; lm-eval ls tasks lists"
        )
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={
            "pretrained": str(folder),
            "dtype": "bfloat16" if device.type == "cuda" else "float32",
        },
        tasks=options.tasks,
        num_fewshot=options.few_shot,
        limit=options.limit,
        batch_size=options.batch_size,
        device=str(device),
        task_manager=tasks,
        log_samples=False,
    )
    return dict(metrics_of(found["results"]))


def metrics_of(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """TASK/METRIC (and TASK/METRIC_stderr) of lm-eval's results; its filter, if it is not none."""
    for task, values in results.items():
        for key, value in values.items():
            metric, _, kept = key.partition(",")
            if isinstance(value, int | float) and metric not in ("alias", "sample_len"):
                yield (
                    f"{task}/{metric}" + ("" if kept in ("", "none") else f"/{kept}"),
                    float(value),
                )


# --- what is told ---------------------------------------------------------------------------------


def tell(scores: Mapping[str, float]) -> None:
    """A line for each score, with its standard error if it has one."""
    width = max(map(len, scores), default=0)
    for name, value, error in with_errors(scores):
        print(f"  {name:{width}}  {value:.4f}" + (f" ± {error:.4f}" if error else ""))


def run_of(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint lies in; None: it is on its own."""
    run = checkpoint.parent.parent
    return (
        run if checkpoint.parent.name == "checkpoints" and (run / "config.yaml").is_file() else None
    )


@command
def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    place = tokenizer_folder(options.model)
    if place is None:
        raise UserError(f"{options.model} has no tokenizer")
    tokenizer = read_tokenizer(place)
    scores: dict[str, float] = {}
    if options.text or not options.tasks:
        scores |= perplexities(options, tokenizer, device)
    if options.tasks:
        with tempfile.TemporaryDirectory() as side:
            folder = as_hf_folder(options.model, tokenizer, Path(side) / "model")
            scores |= task_scores(options, folder, device)
    tell(scores)
    if not is_hf_folder(options.model):
        checkpoint = resolve(options.model)
        run = run_of(checkpoint)
        if run is not None:
            line = {"time": time.time(), "step": read_state(checkpoint)["step"], "scores": scores}
            line["settings"] = {"limit": options.limit, "few_shot": options.few_shot}
            with open(run / SCORES, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(f"kept in {run / SCORES}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
