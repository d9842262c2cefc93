"""`parallel.py rank`: steps of one rank of many on one device, without the others."""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from parallel.mesh import PLACEMENTS
from parallel.processes import RankError, run_processes
from scripts import verify
from scripts.bench.fake_ranks import one_of
from scripts.bench.harness import DEVICE, Table, finish, recorded, release, wait
from scripts.bench.train import TEXT, balance, draw_on_device, one_step, text_batches, waits
from training.assemble import make_train_state, model_config
from training.config.build import Config, ConfigError, load_config, make_plan
from training.data import load_tokenizer

RANK = (
    "rank:52s | step ms:.2f | queued ms:.2f | device ms:.2f | device/step:.2f | tokens/s:,.0f | "
    "kernels:d | gaps ms:.2f | waits:d | waited ms:.2f | peak GiB:.2f"
)
EXCHANGE_KINDS = {
    "2 chunks": ("kind=all_to_all", "chunks=2"),
    "1 chunk": ("kind=all_to_all", "chunks=1"),
    "1 chunk, bounded": ("kind=all_to_all", "chunks=1", "sizes=bounded"),
    "pairwise": ("kind=pairwise",),
    "all_gather": ("kind=all_gather",),
    "all_gather, equal tokens": ("kind=all_gather", "equal_tokens=true"),
}


FIXED = ("all_gather", "1 chunk, bounded")
"""Kinds whose sizes do not depend on the routing."""


@dataclass(frozen=True)
class Case:
    """A rank to measure."""

    name: str
    ranks: int
    nodes: int
    skew: int
    settings: tuple[str, ...]


def cases(ranks: list[int], degrees: list[int], engines: list[str], skews: list[int]) -> list[Case]:
    """Every rank to measure: nodes of 8 ranks, or two nodes of fewer where experts are split over
    nodes."""
    found = []
    for size in ranks:
        if size == 1:
            found.append(Case("one process", 1, 1, 1, ()))
            continue
        for engine, placement, degree in itertools.product(engines, PLACEMENTS, degrees):
            nodes = max(2 if placement == "across_nodes" else 1, size // 8)
            if size % nodes or (nodes if placement == "across_nodes" else size // nodes) % degree:
                continue
            if degree == 1 and placement != PLACEMENTS[0]:
                continue
            common = (
                f"parallel.engine={engine}", f"parallel.nodes={nodes}",
                f"parallel.expert={degree}", f"parallel.expert_placement={placement}",
            )  # fmt: skip
            name = f"{size} ranks, {engine}, "
            if degree == 1:
                found.append(Case(name + "not split", size, nodes, 1, common))
                continue
            for (kind, options), skew in itertools.product(EXCHANGE_KINDS.items(), skews):
                if kind.startswith(FIXED) and skew > 1:
                    continue
                label = f"{placement} over {degree}, {kind}" + (f", skew {skew}" * (skew > 1))
                settings = tuple(f"parallel.exchange.{option}" for option in options)
                found.append(Case(name + label, size, nodes, skew, common + settings))
    return found


def bench_rank(config: Config, case: Case, repeats: int, folder: str) -> dict:
    """A row of the table."""
    if dist.is_initialized():  # that of this process alone
        dist.destroy_process_group()
    device = torch.device(DEVICE.type, 0 if DEVICE.type == "cuda" else None)
    plan = make_plan(config, case.ranks, cuda=device.type == "cuda")
    with (
        one_of(case.ranks, case.nodes, device, case.skew) as world,
        mock.patch("training.assemble.initial_values", draw_on_device),
    ):
        tokenizer = load_tokenizer(config.data, Path(folder) / "tokenizer")
        architecture = model_config(config, tokenizer)
        state = make_train_state(
            config, architecture, plan, world, device, steps=config.train.steps or 1000
        )
        balance(state.model)
        release()
        # Gradients of a fake reduction are arbitrary numbers, which must not move the weights.
        step = one_step(state, lr=0.0)
        given = text_batches(config, plan, tokenizer, repeats + WARMUP, world)
        queued, seconds = [], []
        for number, batches in enumerate(given, 1):
            wait(device)
            began = time.perf_counter()
            step(number, batches)
            queued.append(time.perf_counter() - began)
            wait(device)
            seconds.append(time.perf_counter() - began)
        step_s = statistics.median(seconds[WARMUP:])
        row: dict[str, Any] = {
            "step ms": 1e3 * step_s,
            "queued ms": 1e3 * statistics.median(queued[WARMUP:]),
            "tokens/s": plan.tokens_per_step / case.ranks / step_s,
            "plan": plan.mesh.describe(),
            "compiled": plan.compile,
        }
        if device.type == "cuda":
            found = recorded(lambda: step(len(given) + 1, given[-1]))
            row |= {
                "device ms": found.busy_ms,
                "device/step": found.busy_ms / row["step ms"],
                "kernels": found.kernels,
                "gaps ms": found.gaps_ms,
                "waits": found.waits,
                "waited ms": found.waited_ms,
                "peak GiB": torch.cuda.max_memory_allocated(device) / 2**30,
                # last, as a step that is broken off leaves the engine in the middle of it
                "waits at": waits(lambda _: step(len(given) + 2, given[-1])),
            }
    return row


WARMUP = 3
"""Steps that compile and tune."""


def show_ranks(given: argparse.Namespace) -> int:
    """Measures every case in a process of its own; the exit code."""
    table = Table(given, "rank", RANK, micro_batches=given.micro_batches)
    wanted = cases(given.ranks, given.expert, given.engines, given.skew)
    wanted = [case for case in wanted if re.search(given.modes or "", case.name)]
    if not wanted:
        raise ConfigError(f"--modes={given.modes!r} finds none of these ranks and layouts")
    for case in wanted:
        settings = [*TEXT, "data.workers=0", *case.settings, *given.overrides]
        config = load_config(given.config, settings)
        if given.small:
            config = narrow(config)
        size = case.ranks * config.train.micro_batch_size * given.micro_batches
        train = config.train.model_copy(update={"global_batch_size": size})
        config = config.model_copy(update={"train": train})
        make_plan(config, case.ranks, cuda=DEVICE.type == "cuda")
        with table.row(rank=case.name) as row, tempfile.TemporaryDirectory() as folder:
            try:
                (found,) = run_processes(
                    1, bench_rank, config, case, given.repeats, folder,
                    device_type=DEVICE.type, timeout_s=given.timeout,
                )  # fmt: skip
            except RankError as error:
                if given.verbose:
                    print(error, file=sys.stderr)
                raise RuntimeError(str(error).strip().splitlines()[-1]) from None
            row |= found
    return finish(given)


def narrow(config: Config) -> Config:
    """The narrow model of scripts/verify.py, for the bundled text."""
    config = verify.shrunk(config)
    small = config.model.config.model_copy(update={"vocab_size": 4096})
    model = config.model.model_copy(update={"config": small})
    return config.model_copy(update={"model": model})
