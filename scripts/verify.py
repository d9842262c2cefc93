#!/usr/bin/env python3
"""One process against a layout of several: the same losses, gradients, weights and routing?

    python scripts/verify.py configs/x.yaml --nproc 4 parallel.nodes=2 parallel.expert=2
    python scripts/verify.py configs/x.yaml --nproc 2 parallel.engine=deepspeed --all

The model is the config's at reduced widths and depth (hidden size 64, at most two layers with
experts; every switch, the number of experts and K stay). It trains two steps on random tokens in
one process and again on --nproc processes of this machine, in float32, with the trainer's own
model, engine and step. Micro-batches are short and unequal; one of them has no token at all.

Exit code 0: equal within the tolerances; 1: a difference; 2: a mistake in the config.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from pydantic import ValidationError
from torch import Tensor

from models.config import ModelConfig
from parallel import World
from parallel.flat_shard import FlatShard, assemble, local_of, with_local
from parallel.processes import RankError, run_processes
from parallel.world import joined
from scripts._command import bounded, command, make_parser
from training.assemble import make_train_state
from training.config.build import Config, ConfigError, Plan, field_names, load_config, make_plan
from training.config.messages import first_line
from training.config.validate import refuse_sharded
from training.data.batch import Batch, make_batch
from training.data.order import Row
from training.report.window import read_window
from training.step import agree_on_step, begin_step, train_step

STEPS, LENGTH = 2, 32
VOCABULARY = 251

# Loss and norms relative to themselves, in the first step and after the first update. Gradients:
# the norm of the difference, relative to that of the one-process tensor; sums are in another order,
# while a mistake (a missing rank, a factor) is above 0.01. Weights: Adam turns noise on a tiny
# gradient into a whole step, so the difference of all elements is compared to their change.
# float8, on any device: gradients of all experts together differed by 0.17 at most (38 runs of five
# configs, each with another run.seed), and by 0.39 at least where rows came 1.25 times too large.
TOLERANCES = {
    "cpu": {"number 1": 1e-6, "number 2": 1e-5, "gradient": 1e-6, "weights": 1e-3, "routed": 0},
    "cuda": {"number 1": 1e-5, "number 2": 1e-4, "gradient": 1e-5, "weights": 1e-2, "routed": 0},
    "float8": {
        "loss 1": 0.01, "loss 2": 0.02, "number 1": 0.2, "number 2": 0.4,
        "gradient": 0.3, "weights": 0.5, "routed": 0.08,
    },
}  # fmt: skip

# ---- the model -----------------------------------------------------------------------------------


def shrunk(config: Config) -> Config:
    """The config with its architecture at small widths and without what depends on the layout."""
    model = config.model.model_copy(
        update={"config": shrink(config.model.config), "init_from": None}
    )
    # Token rounding depends on which tokens a process has.
    router, off = config.router, {"rounding": None, "noise": None}
    if router.selection is not None and router.selection.kind == "sample":
        off["selection"] = None
    router = router.model_copy(update=off)
    return config.model_copy(update={"model": model, "router": router})


def shrink(config: ModelConfig) -> ModelConfig:
    """The same architecture, narrow and shallow: dense first layers and two layers with experts."""
    layers = (
        config.moe_layers[:2][-1] + 1 if config.moe_layers else min(2, config.num_hidden_layers)
    )
    values = config.model_dump()
    small = {
        "vocab_size": VOCABULARY, "max_position_embeddings": max(LENGTH, 64),
        "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 40,
        "num_hidden_layers": layers, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 4 if config.num_key_value_heads == config.num_attention_heads else 2,
        "initializer_range": 0.1,
    }  # fmt: skip
    small |= config.small
    values |= {key: value for key, value in small.items() if values.get(key) is not None}
    values |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if values.get("mlp_only_layers"):
        values["mlp_only_layers"] = [i for i in values["mlp_only_layers"] if i < layers]
    try:
        return ModelConfig(**values)
    except ValidationError as error:
        raise ConfigError(f"at small widths: {first_line(error, field_names())}") from None


# ---- the steps ---------------------------------------------------------------------------------


def rows_of(step: int, count: int) -> list[Row | None]:
    """All rows of a step: random tokens, one or two documents each, of different length; one row is
    of padding alone."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows: list[Row | None] = []
    for row in range(count):
        first, second = torch.randint(1, LENGTH // 2, (2,), generator=generator).tolist()
        lengths = [first, second] if row % 2 else [first]
        tokens = torch.randint(3, VOCABULARY, (sum(lengths),), generator=generator).numpy()
        labels = tokens.copy()
        labels[:-1] = tokens[1:]
        labels[[first - 1, -1]] = -100  # the last token of a document has no next one
        rows.append(Row(tokens, labels, lengths))
    rows[count // 2] = None
    return rows


def batch_of(rows: list[Row | None]) -> Batch:
    return make_batch(rows, [(0, 0, 0)] * len(rows), LENGTH, pad_id=0)


def run_steps(
    config: Config, plan: Plan, world: World, device: torch.device, batches: list[list[Batch]]
) -> dict[str, Any]:
    """Train one step for each list of micro-batches; what this process saw and holds."""
    total = config.train.steps or 1000
    state = make_train_state(config, config.model.config, plan, world, device, steps=total)
    state.learning_rate = lambda _: config.optim.lr
    optimizer = state.optimizer
    found: dict[str, Any] = {
        "numbers": [],
        "counts": [],
        "engine": type(optimizer).__name__,
        "start": _on_host(_named(optimizer.tensors(), "weights")),
    }
    update = optimizer.update

    def watched() -> Any:
        found.setdefault("gradient", _on_host(optimizer.gradients()))
        return update()

    optimizer.update = watched
    for micro_batches in batches:
        begin_step(state)
        result = train_step(state, micro_batches, agree_on_step(world, micro_batches, stop=False))
        metrics = read_window(state, [result]).metrics
        compared = ("loss", "balance_loss", "z_loss", "grad_norm", *result.groups)
        found["numbers"].append({name: metrics[name] for name in compared if name in metrics})
        stats = result.stats
        found["counts"].append(None if stats is None else stats.counts_E.cpu())
    found["weights"] = _on_host(_named(optimizer.tensors(), "weights"))
    return found


def one_process(config: Config, plan: Plan, world: int, micro_batches: int) -> dict:
    """The oracle: all rows in one process, one after the other."""
    batches = [
        [batch_of([row]) for row in rows_of(step, world * micro_batches)] for step in range(STEPS)
    ]
    return run_steps(_one(config), plan, World(), torch.device(plan.device), batches)


def as_layout(config: Config, plan: Plan, micro_batches: int) -> dict:
    """The same on this process's part; shards are put together by the caller."""
    world = joined()
    device = torch.device(plan.device, world.local_rank if plan.device == "cuda" else None)
    first = world.rank * micro_batches
    batches = [
        [
            batch_of([row])
            for row in rows_of(step, world.size * micro_batches)[first:][:micro_batches]
        ]
        for step in range(STEPS)
    ]
    return run_steps(config, plan, world, device, batches)


def _named(tensors: dict[str, Any], kind: str) -> dict[str, Any]:
    return {
        name.partition("/")[2]: value
        for name, value in tensors.items()
        if name.startswith(f"{kind}/")
    }


def _on_host(tensors: dict[str, Tensor | FlatShard]) -> dict[str, Tensor | FlatShard]:
    return {n: with_local(value, local_of(value).cpu().clone()) for n, value in tensors.items()}


# ---- the comparison ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
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
    for kind in ("start", "gradient", "weights"):
        whole[kind] = {
            name: assemble(result[kind][name] for result in results) for name in results[0][kind]
        }
    whole["alike"] = all(result["numbers"] == whole["numbers"] for result in results)
    return whole


def together(found: dict) -> dict:
    """The same with all experts as one tensor, and all else as another."""
    whole = dict(found)
    for kind in ("start", "gradient", "weights"):
        parts: dict[str, list[Tensor]] = {"experts": [], "others": []}
        for name, value in sorted(found[kind].items()):
            parts["experts" if ".moe.w" in name else "others"].append(value.flatten())
        whole[kind] = {name: torch.cat(values) for name, values in parts.items() if values}
    return whole


def compare(one: dict, layout: dict, kind: str = "cpu") -> list[Line]:
    """All comparisons, in the order of the table; `kind`: key of TOLERANCES."""
    if kind == "float8":  # a token that took another expert is much of a small tensor's gradient
        one, layout = together(one), together(layout)
    rows, allowed = [], TOLERANCES[kind]
    for step in range(STEPS):
        for name, a in one["numbers"][step].items():
            b, what = layout["numbers"][step][name], f"{name} {step + 1}"
            most = allowed.get(what, allowed[f"number {step + 1}"])
            rows.append(Line(what, f"{a:.7g}", f"{b:.7g}", abs(b - a) / max(abs(a), 1e-30), most))
        if one["counts"][step] is not None:
            a, b = one["counts"][step], layout["counts"][step]
            moved, routed = (a - b).abs().sum().item() / 2, int(a.sum())
            told = (f"routed tokens {step + 1}", str(routed), str(int(b.sum())))
            rows.append(Line(*told, moved, allowed["routed"] * routed))
    rows.append(Line("all ranks alike", "", "", 0.0 if layout["alike"] else float("inf"), 0.0))
    for kind in ("gradient", "weights"):
        for name, want in one[kind].items():
            got, start = layout[kind][name], one["start"][name]
            scale = want.norm() if kind == "gradient" else (want - start).norm()
            error = ((got - want).norm() / scale.clamp(min=1e-30)).item()
            told = (f"{kind} {name}", f"{want.norm():.5g}", f"{got.norm():.5g}")
            rows.append(Line(*told, error, allowed[kind]))
    for name, want in one["start"].items():
        if not torch.equal(layout["start"][name], want):
            rows.append(Line(f"first weights {name}", "", "", float("inf"), 0.0))
    return rows


def table(rows: list[Line], everything: bool) -> str:
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


def plans(config: Config, nproc: int) -> tuple[Config, Plan, Plan]:
    """The config at small widths, and its plan for `nproc` processes and for one, in float32.

    Raises:
        ValueError: a layout that cannot be, too few CUDA devices, or no folder to offload to.
    """
    cuda = config.run.device != "cpu" and torch.cuda.is_available()
    if cuda and torch.cuda.device_count() < nproc:
        raise ConfigError(
            f"--nproc={nproc} needs as many CUDA devices, there are "
            f"{torch.cuda.device_count()}; or add run.device=cpu"
        )
    batch = {"global_batch_size": nproc, "micro_batch_size": 1}  # rows are our own
    config = config.model_copy(update={"train": config.train.model_copy(update=batch)})
    refuse_sharded(config, f"{nproc} processes")
    small = shrunk(config)
    plan, alone = (
        dataclasses.replace(
            make_plan(c, world, cuda=cuda), dtype="float32", compile=False, whole_blocks=False
        )
        for c, world in ((small, nproc), (_one(small), 1))
    )
    plan.offload.check_folder()
    return small, plan, alone


def _one(config: Config) -> Config:
    """The config for one process, which has no layout."""
    return config.model_copy(update={"parallel": type(config.parallel)()})


# ---- the program -------------------------------------------------------------------------------


@command
def main(arguments: list[str] | None = None) -> int:
    parser = make_parser(__doc__, config=True)
    add, at_least_1 = parser.add_argument, bounded(least=1)
    add("--nproc", type=bounded(least=2), required=True, help="number of processes of the layout")
    add("--micro-batches", type=at_least_1, default=2, help="per process and step (default 2)")
    add("--all", action="store_true", help="show every tensor")
    add(
        "--timeout", type=bounded(float, least=1), default=900.0,
        help="seconds before a hang is reported (default 900)",
    )  # fmt: skip
    given = parser.parse_intermixed_args(arguments)
    config = load_config(given.config, given.overrides)
    small, plan, alone = plans(config, given.nproc)
    print(f"{given.nproc} processes on {plan.device}: {plan.mesh.describe()}; {plan.engine}")
    model = small.model.config
    experts = "no experts"
    if model.moe_layers:
        experts = f"{model.num_experts} experts, {model.num_experts_per_tok} per token"
    print(
        f"reduced model: hidden size {model.hidden_size}, {model.num_hidden_layers} layers, "
        f"{experts}; float32"
    )
    if config.router.rounding is not None:
        print("token rounding is left out: it depends on which tokens a process has")
    if plan.exchange.payload == "float8":
        print("payload=float8 rounds the rows that travel, and has wide tolerances of its own")
    try:
        parts = run_processes(
            given.nproc, as_layout, small, plan, given.micro_batches,
            device_type=plan.device, timeout_s=given.timeout,
        )  # fmt: skip
    except RankError as error:
        print(f"the layout failed: {error}", file=sys.stderr)
        return 1
    whole = put_together(parts)
    one = one_process(small, alone, given.nproc, given.micro_batches)
    rows = compare(one, whole, "float8" if plan.exchange.payload == "float8" else plan.device)
    print(f"\n{table(rows, given.all)}\n")
    bad = [row for row in rows if not row.good]
    if bad:
        print(f"{len(bad)} of {len(rows)} comparisons differ")
        return 1
    print(f"all {len(rows)} comparisons are equal within their tolerances")
    return 0


if __name__ == "__main__":
    sys.exit(main())
