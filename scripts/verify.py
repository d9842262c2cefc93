#!/usr/bin/env python3
"""One process against a layout of several: the same losses, gradients, weights and routing?

    python scripts/verify.py configs/x.yaml --nproc 4 parallel.nodes=2 parallel.expert=2
    python scripts/verify.py configs/x.yaml --nproc 2 parallel.engine=deepspeed --all

Takes the config's architecture with small widths (every switch, the number of experts and K stay),
trains two steps on random tokens in one process and again on --nproc processes of this machine, in
float32, and compares. Settings of the layout are `parallel.*`; all others are the config's.

Exit code 0: equal within the tolerances; 1: a difference; 2: a mistake in the config.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn

from models.build import build_model, parameter_kinds
from models.config import ModelConfig
from moe.balance import attach_loss
from moe.metrics import RouterStats
from parallel.engine import AdamSettings, make_engine
from parallel.expert_parallel import ExpertParallelOptions
from parallel.flat_shard import FlatShard, assemble
from parallel.mesh import MeshPlan, build_mesh, plan_mesh
from parallel.processes import RankError, run_processes
from training.config import Config, ConfigError, ParallelConfig, load_config
from training.loop import router_losses
from training.optim import MasterAdamW, StepGuard, parameter_groups

STEPS, ROWS_PER_RANK, LENGTH = 2, 2, 32

# Relative to the largest element of the one-process tensor. Sums are in another order, which a
# model of some layers amplifies; a mistake (a missing rank, a factor) is above 0.01. Weights: Adam
# turns noise on a tiny gradient into a whole step, so not single elements are compared but the
# difference of all to their change.
TOLERANCES = {"loss": 1e-5, "norm": 1e-5, "gradient": 5e-5, "weights": 1e-3}

# ---- settings ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """The `parallel.*` settings that a layout is made of."""

    nodes: int | None = None
    expert: int | None = None
    expert_placement: str = "across_nodes"
    engine: str = "auto"
    offload: bool = False
    chunks: int | None = None
    schedule: str = "all"
    deduplicate: bool = True
    payload: str = "model"
    transport: str = "collective"

    def options(self) -> ExpertParallelOptions:
        return ExpertParallelOptions(
            self.chunks, self.schedule, self.deduplicate, self.payload, self.transport
        )

    def plan(self, world: int, model: ModelConfig) -> MeshPlan:
        experts = model.num_experts if model.moe_layers else None
        return plan_mesh(world, self.nodes, self.expert, self.expert_placement, experts)


def split_overrides(overrides: list[str]) -> tuple[Layout, list[str]]:
    """The layout, and the overrides that are the config's.

    Raises:
        ConfigError: an unknown `parallel.` key, or a value of another type.
    """
    known = {field.name: field.type for field in fields(Layout)}
    settings: dict[str, Any] = {}
    rest = []
    for override in overrides:
        key, _, text = override.partition("=")
        section, _, name = key.partition(".")
        if section != "parallel" or (name in ParallelConfig.model_fields and name not in known):
            rest.append(override)
            continue
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean parallel.{near[0]}?" if near else ""
            raise ConfigError(f"{key} is unknown; allowed: {', '.join(known)}{hint}")
        value = yaml.safe_load(text)
        wanted = {"int": int, "str": str, "bool": bool}[known[name].partition(" ")[0]]
        if type(value) is not wanted and not (value is None and "None" in known[name]):
            raise ConfigError(f"{key}={text} must be {wanted.__name__}")
        settings[name] = value
    return Layout(**settings), rest


def shrink(config: ModelConfig) -> ModelConfig:
    """The same architecture, narrow and shallow: dense first layers and two layers with experts."""
    layers = (
        config.moe_layers[:2][-1] + 1 if config.moe_layers else min(2, config.num_hidden_layers)
    )
    values = config.model_dump()
    small = {
        "vocab_size": 251,
        "hidden_size": 64,
        "intermediate_size": 48,
        "moe_intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4 if config.num_key_value_heads == config.num_attention_heads else 2,
        "head_dim": 16,
        "max_position_embeddings": max(LENGTH, 64),
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    values |= {key: value for key, value in small.items() if values.get(key) is not None}
    values |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if values.get("mlp_only_layers"):
        values["mlp_only_layers"] = [i for i in values["mlp_only_layers"] if i < layers]
    return ModelConfig(**values)


# ---- the steps ---------------------------------------------------------------------------------


def rows_of(step: int, world: int) -> dict[str, Tensor]:
    """All rows of a step: random tokens, rows of different length, one of padding alone."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows = world * ROWS_PER_RANK
    tokens_BL = torch.randint(3, 251, (rows, LENGTH), generator=generator)
    length_B = torch.randint(1, LENGTH + 1, (rows,), generator=generator)
    length_B[rows // 2] = 0
    valid_BL = torch.arange(LENGTH) < length_B[:, None]
    labels_BL = torch.cat([tokens_BL[:, 1:], tokens_BL[:, :1]], dim=1).masked_fill(~valid_BL, -100)
    return {"tokens_BL": tokens_BL, "labels_BL": labels_BL, "valid_BL": valid_BL}


def micro_loss(
    model: nn.Module,
    batch: dict[str, Tensor],
    total: int,
    config: Config,
    seen: RouterStats | None,
    alone: bool,
) -> tuple[Tensor, RouterStats | None]:
    """A micro-batch's part of the step's loss, and the router's statistics so far."""
    out = model(**batch)
    loss = out.loss_sum / total
    if out.router is None:
        return loss, None
    here = out.router.detach()
    seen = here if seen is None else seen.plus(here)
    load_LE = None
    if config.router.balance_scope == "global":
        load_LE = seen.counts_E.clone()
        if not alone:
            dist.all_reduce(load_LE)
    auxiliary, _ = router_losses(out.router, total, config.router, load_LE)
    return attach_loss(loss, auxiliary), seen


def groups_of(model: nn.Module, config: Config) -> list:
    optim = config.optim
    return parameter_groups(
        model,
        parameter_kinds(model),
        weight_decay=optim.weight_decay,
        router_weight_decay=optim.router_weight_decay,
        router_lr_multiplier=optim.router_lr_multiplier,
    )


def one_process(config: Config, small: ModelConfig, world: int, device: torch.device) -> dict:
    """The oracle: all rows in one process, by the trainer's own optimizer.

    With balance_scope=global a micro-batch holds one row of every rank of the layout, so that the
    load is known to the same extent in both; else one row.
    """
    model = build_model(small, kernels=config.model.kernels, device=device, seed=config.run.seed)
    start = {name: p.detach().float().cpu().flatten() for name, p in model.named_parameters()}
    optimizer = MasterAdamW(
        groups_of(model, config),
        betas=config.optim.betas,
        eps=config.optim.eps,
        clip_norm=config.optim.clip_norm,
    )
    found: dict[str, Any] = {"loss": [], "norm": [], "counts": [], "start": start}
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = rows_of(step, world)
        total, stats = int(rows["valid_BL"].sum()), None
        if config.router.balance_scope == "global":
            parts = [slice(i, None, ROWS_PER_RANK) for i in range(ROWS_PER_RANK)]
        else:
            parts = [slice(row, row + 1) for row in range(world * ROWS_PER_RANK)]
        for part in parts:
            batch = {name: value[part].to(device) for name, value in rows.items()}
            loss, stats = micro_loss(model, batch, total, config, stats, alone=True)
            loss.backward()
            optimizer.terms[0] += loss.detach()
        gradient = {
            name: piece.cpu().clone()
            for flat in optimizer.flats
            for name, piece in flat.pieces(flat.master.grad).items()
        }
        found.setdefault("gradient", gradient)
        # In float64: on a CPU torch's float32 norm of one long buffer is off by more than 1e-5.
        found["norm"].append(torch.cat(list(gradient.values())).double().norm().item())
        optimizer.step(config.optim.lr)
        found["loss"].append(float(optimizer.terms[0]))
        found["counts"].append(None if stats is None else stats.counts_E.cpu())
    found["weights"] = _named(optimizer.tensors(), "weights")
    return found


def as_layout(config: Config, small: ModelConfig, layout: Layout, device_type: str) -> dict:
    """The same on this process's part; shards are put together by the caller."""
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device(device_type, rank if device_type == "cuda" else None)
    mesh = build_mesh(layout.plan(world, small), device)
    model = build_model(small, kernels=config.model.kernels, device=device, seed=config.run.seed)
    tied = model.head.weight is model.embed.weight
    engine = make_engine(
        layout.engine,
        model,
        mesh,
        groups_of(model, config),
        list(model.layers) if tied else [model.embed, *model.layers, model.head],
        StepGuard(device),
        num_terms=1,
        settings=AdamSettings(config.optim.betas, config.optim.eps, config.optim.clip_norm),
        options=layout.options(),
        offload=layout.offload,
    )
    found: dict[str, Any] = {"loss": [], "norm": [], "counts": [], "engine": type(engine).__name__}
    for step in range(STEPS):
        engine.zero_grad()
        rows = rows_of(step, world)
        total, stats = int(rows["valid_BL"].sum()), None
        mine = range(rank * ROWS_PER_RANK, (rank + 1) * ROWS_PER_RANK)
        for row in mine:
            batch = {name: value[row : row + 1].to(device) for name, value in rows.items()}
            with engine.micro_batch(last=row == mine[-1]):
                loss, stats = micro_loss(engine.model, batch, total, config, stats, alone=False)
                engine.backward(loss)
            engine.terms[0] += loss.detach()
        if step == 0:
            found["gradient"] = _on_host(engine.gradients())
        outcome = engine.step(config.optim.lr)
        found["loss"].append(float(engine.terms[0]))
        found["norm"].append(float(outcome.grad_norm))
        counts = None
        if stats is not None:
            counts = stats.counts_E.clone()
            dist.all_reduce(counts)
        found["counts"].append(None if counts is None else counts.cpu())
    found["weights"] = _on_host(_named(engine.tensors(), "weights"))
    return found


def _named(tensors: dict[str, Any], kind: str) -> dict[str, Any]:
    return {
        name.partition("/")[2]: value
        for name, value in tensors.items()
        if name.startswith(f"{kind}/")
    }


def _on_host(shards: dict[str, FlatShard]) -> dict[str, FlatShard]:
    return {name: shard.with_local(shard.local.cpu().clone()) for name, shard in shards.items()}


# ---- the comparison ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    what: str
    one: str
    layout: str
    difference: float
    allowed: float

    @property
    def good(self) -> bool:
        return self.difference <= self.allowed  # NaN is not


def put_together(results: list[dict]) -> dict:
    """One result of all ranks'; numbers must be the same on all.

    Raises:
        ValueError: elements that no rank holds.
    """
    whole = dict(results[0])
    for kind in ("gradient", "weights"):
        whole[kind] = {
            name: assemble(result[kind][name] for result in results) for name in results[0][kind]
        }
    whole["alike"] = all(
        result["loss"] == whole["loss"] and result["norm"] == whole["norm"] for result in results
    )
    return whole


def compare(one: dict, layout: dict) -> list[Row]:
    """All comparisons, in the order of the table."""
    rows = []
    for step in range(STEPS):
        for kind in ("loss", "norm"):
            a, b = one[kind][step], layout[kind][step]
            rows.append(
                Row(f"{kind} {step + 1}", f"{a:.7g}", f"{b:.7g}", abs(b / a - 1), TOLERANCES[kind])
            )
        if one["counts"][step] is not None:
            a, b = one["counts"][step], layout["counts"][step]
            moved = (a - b).abs().sum().item() / 2
            rows.append(
                Row(f"routed tokens {step + 1}", str(int(a.sum())), str(int(b.sum())), moved, 0.0)
            )
    same = 0.0 if layout["alike"] else float("inf")
    rows.append(Row("all ranks alike", "", "", same, 0.0))
    for name, want in one["gradient"].items():
        error = (layout["gradient"][name] - want).abs().max() / want.abs().max().clamp(min=1e-30)
        rows.append(Row(f"gradient {name}", f"{want.norm():.5g}",
                        f"{layout['gradient'][name].norm():.5g}", error.item(),
                        TOLERANCES["gradient"]))  # fmt: skip
    for name, want in one["weights"].items():
        change = (want - one["start"][name]).norm()
        error = (layout["weights"][name] - want).norm() / change.clamp(min=1e-30)
        rows.append(Row(f"weights {name}", f"{want.norm():.5g}",
                        f"{layout['weights'][name].norm():.5g}", error.item(),
                        TOLERANCES["weights"]))  # fmt: skip
    return rows


def table(rows: list[Row], everything: bool) -> str:
    """As text; of the tensors only the worst of each kind, unless asked for all."""
    shown = []
    for kind in ("gradient ", "weights "):
        of_kind = [row for row in rows if row.what.startswith(kind)]
        bad = [row for row in of_kind if not row.good]
        worst = max(of_kind, key=lambda row: row.difference)
        shown += of_kind if everything else bad or [worst]
    kept = [row for row in rows if not row.what.startswith(("gradient ", "weights "))] + shown
    width = max(len(row.what) for row in kept)
    lines = [
        f"{'':{width}}  {'one process':>12}  {'layout':>12}  {'difference':>10}  {'allowed':>8}"
    ]
    lines += [
        f"{row.what:{width}}  {row.one:>12}  {row.layout:>12}  {row.difference:>10.1e}  "
        f"{row.allowed:>8.0e}  {'' if row.good else '<- differs'}".rstrip()
        for row in kept
    ]
    return "\n".join(lines)


# ---- the program -------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", help="YAML file; default: the quickstart's")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--nproc", type=int, required=True, help="processes of the layout")
    parser.add_argument("--all", action="store_true", help="show every tensor")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds until a hang is told")
    given = parser.parse_intermixed_args(arguments)
    if given.config is not None and "=" in given.config:
        given.config, given.overrides = None, [given.config, *given.overrides]
    try:
        layout, overrides = split_overrides(given.overrides)
        config = load_config(given.config, overrides)
        small = shrink(config.model.config)
        plan = layout.plan(given.nproc, small)
        layout.options()
        cuda = config.run.device != "cpu" and torch.cuda.is_available()
        if cuda and torch.cuda.device_count() < given.nproc:
            raise ConfigError(
                f"--nproc={given.nproc} needs as many CUDA devices, there are "
                f"{torch.cuda.device_count()}; or add run.device=cpu"
            )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    device_type = "cuda" if cuda else "cpu"
    print(f"{given.nproc} processes on {device_type}: {plan.describe()}")
    if config.router.rounding != "none":
        print(
            "token rounding is left out: it depends on which tokens a process has, and so on the "
            "layout"
        )
    if layout.payload == "float8":
        print("payload=float8 rounds dispatched rows: differences of some percent are its price")
    try:
        parts = run_processes(
            given.nproc, as_layout, config, small, layout, device_type,
            device_type=device_type, timeout_s=given.timeout,
        )  # fmt: skip
        whole = put_together(parts)
    except (RankError, ValueError) as error:
        print(f"the layout failed: {error}", file=sys.stderr)
        return 1
    one = one_process(config, small, given.nproc, torch.device(device_type))
    rows = compare(one, whole)
    print(f"engine: {whole['engine']}\n\n{table(rows, given.all)}\n")
    bad = [row for row in rows if not row.good]
    if bad:
        print(f"{len(bad)} of {len(rows)} comparisons differ")
        return 1
    print(f"all {len(rows)} comparisons are equal within their tolerances")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
