#!/usr/bin/env python3
"""What expert parallelism costs, and how much of the exchange hides behind the experts.

    python scripts/bench/parallel.py layer --nproc 4                  CUDA: one rank per GPU
    python scripts/bench/parallel.py layer --nproc 4 --cpu
    python scripts/bench/parallel.py engine --nproc 4 configs/x.yaml parallel.expert=4
    python scripts/bench/parallel.py rank --ranks 1,8 configs/olmoe_1b_7b.yaml

layer: one MoE layer, forward and backward, in every mode of travelling. Beside the time of a mode:
that of the same layer when rows arrive at once ("free": the sizes and ids still travel), and that
of the exchanges alone. hidden = 1 - (time - free) / alone. Times on a GPU are the device's; where
no size is read back (all_gather) it is held until the host has queued the pass. With --traces
the profiler's timelines are kept, and the share of the time that rows move in which the GPU
computes as well is read out of them.

engine: whole steps of a config on packed rows of the bundled novel, by the trainer's own model,
engine and step: tokens per second, peak memory, losses (those of --nproc 1 with the same
train.global_batch_size are of the same rows). --exposed also times steps whose rows arrive at once,
and says what share of the exchange is hidden in the whole step. --routing balanced forces all
experts to the same load. --small takes the narrow model of scripts/verify.py.

rank: whole steps of one rank of each of --ranks on one GPU, without the others (fake_ranks.py):
what the host and the device of a rank do, links left out. All experts have the same load, or this
rank's --skew times as much, which all_gather with its fixed sizes leaves out. For each row: the
step, how long the host took to queue it, how long the device was busy, and their quotient, which
is 1 where the device never waits for the host; kernels, gaps between them, times that the host
waited for the device, peak memory. On a CPU the host's time alone. --ranks 1 is the same model
unsharded.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor

from moe import MoE, MoEConfig
from parallel.config import EXCHANGES
from parallel.exchange.transport import Pending, Split, Transport
from parallel.expert_parallel import (
    ParallelExperts,
    expert_parallel,
    make_transport,
)
from parallel.mesh import build_mesh, plan_mesh
from parallel.processes import run_processes
from parallel.world import joined
from scripts._command import bounded, command, listed
from scripts.bench.harness import (
    DEVICE,
    Table,
    bench_parser,
    covered,
    elapsed_ms,
    finish,
    hold,
    mark,
    wait,
)
from scripts.bench.ranks import narrow, show_ranks
from scripts.bench.train import TEXT, balance, one_step, text_batches
from training.assemble import make_train_state, model_config
from training.config.build import Config, Plan, load_config, make_plan
from training.config.load import expand_home
from training.data import Batch, load_tokenizer
from training.report.window import read_window

MODES = {
    "whole, pull": {"kind": "all_gather", "transport": "pull"},
    "whole": {"kind": "all_gather"},
    "1 chunk": {"chunks": 1},
    "2 chunks": {"chunks": 2},
    "4 chunks": {"chunks": 4},
    "pairwise": {"kind": "pairwise"},
    "2 chunks, float8": {"chunks": 2, "payload": "float8"},
    "1 chunk, pull": {"chunks": 1, "transport": "pull"},
    "2 chunks, pull": {"chunks": 2, "transport": "pull"},
    "4 chunks, pull": {"chunks": 4, "transport": "pull"},
}
LAYER = (
    "mode:26s | forward ms:.3f | backward ms:.3f | free forward ms:.3f | free backward ms:.3f | "
    "rows sent:.0f | alone ms:.3f | forward hidden:.2f | backward hidden:.2f | 3 passes ms:.3f | "
    "computing ms:.3f | moving ms:.3f | beside kernels:.2f"
)
ENGINE = (
    "engine:18s | building s:.1f | step s:.3f | tokens/s:,.0f | peak GiB:.1f | free step s:.3f | "
    "alone s:.3f | hidden:.2f | losses:s"
)


@dataclass(frozen=True)
class LayerShape:
    tokens: int
    hidden: int
    expert: int
    experts: int
    per_token: int
    shared: int
    dtype: str


# ---- transports for measuring --------------------------------------------------------------------


class Free:
    """A transport whose rows arrive at once; gates and ids (one-dimensional gradients, bytes)
    travel as they are."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rows, self.starts = 0, 0
        self.arrived: dict[tuple, Tensor] = {}

    def start(self, rows: Tensor, split: Split) -> Pending:
        if rows.dim() < 2 or (rows.dtype == torch.uint8 and rows.shape[1] <= 12):
            return self.inner.start(rows, split)
        self.rows += rows.shape[0]
        self.starts += 1
        # Random, as products of zeros draw less power and are faster than real ones.
        shape = (sum(split.receive), *rows.shape[1:])
        key = (shape, rows.dtype)
        if key not in self.arrived:
            noise = torch.randn(shape, device=rows.device)
            self.arrived[key] = (noise if rows.is_floating_point() else noise * 0).to(rows.dtype)
        # A tensor of its own each time: autograd would take one that it gave out before for the
        # output of both nodes, and leave out the first.
        return _Arrived(self.arrived[key].detach())


class _Arrived:
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def wait(self) -> Tensor:
        return self.rows


# ---- one layer -----------------------------------------------------------------------------------


def bench_layer(
    shape: LayerShape,
    nodes: int,
    device_type: str,
    repeats: int,
    modes: str | None = None,
    traces: str | None = None,
) -> list[dict[str, Any]]:
    """Rows of the table; the slowest rank's medians."""
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device(device_type, rank if device_type == "cuda" else None)
    dtype = getattr(torch, shape.dtype)
    mesh = build_mesh(plan_mesh(world, nodes, nodes, num_experts=shape.experts), device)
    config = MoEConfig(
        hidden_size=shape.hidden,
        expert_size=shape.expert,
        num_experts=shape.experts,
        num_experts_per_tok=shape.per_token,
        shared_expert_size=shape.shared,
    )
    torch.manual_seed(0)
    layer = MoE(config, device=device, dtype=dtype)
    torch.manual_seed(rank)
    x = torch.randn(shape.tokens, shape.hidden, device=device, dtype=dtype, requires_grad=True)
    table, started = [], time.perf_counter()
    for name, settings in MODES.items():
        if device_type == "cpu" and settings.get("transport") == "pull":
            continue
        if modes is not None and not re.search(modes, name):
            continue
        options = EXCHANGES[settings.get("kind", "all_to_all")](**settings)
        inner = make_transport(options, mesh)
        row: dict[str, Any] = {"mode": name}
        # Without a wait for sizes the host can be ahead of the device, as in a long step; then the
        # times are the device's own, whatever the host's speed.
        ahead = device_type == "cuda" and options.kind == "all_gather"
        kinds = {"": inner, "free ": Free(inner)}
        layers = {
            kind: expert_parallel(layer, mesh, options, transport)
            for kind, transport in kinds.items()
        }
        times: dict[str, list] = {kind: [] for kind in kinds}
        for _ in range(repeats + 2):
            for kind, parallel in layers.items():  # in turn, as clocks drift
                times[kind].append(_pass(parallel, x, device, ahead))
        for kind in kinds:
            row[f"{kind}forward ms"] = statistics.median(t[0] for t in times[kind][2:])
            row[f"{kind}backward ms"] = statistics.median(t[1] for t in times[kind][2:])
        sent = kinds["free "]
        row["rows sent"] = sent.rows / (repeats + 2) / 4  # out and back, twice
        row["alone ms"] = _alone(inner, x, int(row["rows sent"]), options, mesh, repeats, ahead)
        for key in [key for key in row if key.endswith("ms")]:
            slowest = torch.tensor(row[key], device=device, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            row[key] = slowest.item()
        for direction in ("forward", "backward"):
            exposed = row[f"{direction} ms"] - row[f"free {direction} ms"]
            row[f"{direction} hidden"] = 1 - exposed / row["alone ms"]
        if traces is not None:
            parallel = expert_parallel(layer, mesh, options, inner)
            path = Path(traces) / f"{name.replace(' ', '_').replace(',', '')}_{rank}.json"
            row |= _traced(parallel, x, device, path, ahead)
        table.append(row)
        if rank == 0:
            print(f"{time.perf_counter() - started:.0f} s", json.dumps(row), flush=True)
    return table


def _pass(layer: MoE, x: Tensor, device: torch.device, ahead: bool) -> tuple[float, float]:
    """Milliseconds of one forward and one backward, all ranks starting together.

    Args:
        ahead: hold the device back until the host has queued both.
    """
    dist.barrier()
    wait(device)
    if ahead:
        hold(HOLD)
    marks = [mark(device)]
    y, _ = layer(x)
    marks.append(mark(device))
    y.backward(torch.ones_like(y))
    marks.append(mark(device))
    wait(device)
    return elapsed_ms(*marks[:2]), elapsed_ms(*marks[1:])


HOLD = 120_000_000
"""Cycles, some 60 ms: longer than a host takes for a pass."""


def _traced(
    layer: MoE, x: Tensor, device: torch.device, path: Path, ahead: bool
) -> dict[str, float]:
    """Of three passes by the profiler, one behind the other as in a model: the milliseconds that
    they take, in which kernels ran, in which rows were moving, and the share of those in which
    a kernel was running as well."""
    with torch.profiler.profile() as profile:
        dist.barrier()
        if ahead:
            hold(4 * HOLD)
        for _ in range(3):
            y, _ = layer(x)
            y.backward(torch.ones_like(y))
        wait(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(path))
    moving, computing = [], []
    for event in json.loads(path.read_text())["traceEvents"]:
        kind, name = event.get("cat"), str(event.get("name")).lower()
        if kind not in ("kernel", "gpu_memcpy"):
            continue
        span = (event["ts"], event["ts"] + event["dur"])
        # The largest of a pass's copies are rows; gates, ids and counts are small.
        if (kind == "gpu_memcpy" or "sendrecv" in name) and event["dur"] > 20:
            moving.append(span)
        elif kind == "kernel" and "nccl" not in name and "spin" not in name:
            computing.append(span)
    if not moving or not computing:
        return {}
    start, stop = min(computing)[0], max(end for _, end in computing)
    total, busy = covered(moving), covered(computing)
    both = total + busy - covered(moving + computing)
    return {
        "3 passes ms": (stop - start) / 1e3,
        "computing ms": busy / 1e3,
        "moving ms": total / 1e3,
        "beside kernels": both / total,
    }


def _alone(inner, x: Tensor, rows: int, options, mesh, repeats: int, ahead: bool) -> float:
    """Milliseconds of one direction's exchanges of that many rows, out and back, nothing else."""
    size, rank = mesh.plan.expert, mesh.place("expert")
    same = torch.tensor(rows, device=x.device)
    dist.all_reduce(same, op=dist.ReduceOp.MAX)  # all ranks must agree on sizes
    rows = int(same)
    steps = size - 1 if options.kind == "pairwise" else options.chunks
    each = max(1, rows // max(1, steps * (size - 1)))
    times = []
    sent = x.detach().new_zeros(each * steps * size, x.shape[1])
    for _ in range(repeats + 1):
        dist.barrier()
        wait(x.device)
        if ahead:
            hold(HOLD // 4)
        start = mark(x.device)
        for back in (False, True):
            flights = []
            for step in range(steps):
                table = torch.full((size, size), each).fill_diagonal_(0)
                if options.kind == "pairwise":
                    table = torch.zeros(size, size, dtype=torch.int64)
                    for source in range(size):
                        table[source, (source + step + 1) % size] = each * steps
                split = Split(table.numpy(), rank)
                split = split.reversed() if back else split
                flights.append(inner.start(sent[: sum(split.send)], split))
            for flight in flights:
                flight.wait()
        stop = mark(x.device)
        wait(x.device)
        times.append(elapsed_ms(start, stop))
    return statistics.median(times[1:])


# ---- whole steps ---------------------------------------------------------------------------------


def bench_engine(
    config: Config, plan: Plan, steps: int, balanced: bool, exposed: bool, folder: str
) -> dict[str, Any]:
    """Seconds a step and peak memory of this rank, by the trainer's own model, engine and step."""
    world = joined()
    device = torch.device(plan.device, world.local_rank if plan.device == "cuda" else None)
    started = time.perf_counter()
    tokenizer = load_tokenizer(config.data, Path(folder) / f"tokenizer_{world.rank}")
    architecture, total = model_config(config, tokenizer), config.train.steps or 1000
    state = make_train_state(config, architecture, plan, world, device, steps=total)
    if balanced:
        balance(state.model)
    step = one_step(state, config.optim.lr)
    given = text_batches(config, plan, tokenizer, steps + 2, world)
    building = time.perf_counter() - started
    times: list[float] = []

    def train(number: int, batches: list[Batch]) -> tuple[float, float]:
        dist.barrier()
        wait(device)
        start = time.perf_counter()
        result = step(number, batches)
        wait(device)
        times.append(time.perf_counter() - start)
        metrics = read_window(state, [result]).metrics
        return metrics["loss"], metrics["grad_norm"]

    losses = []
    for number, batches in enumerate(given, 1):
        loss, norm = train(number, batches)
        losses.append(loss)
        if world.main:
            print(
                f"step {number}: {times[-1]:.3f} s, loss {loss:.5f}, grad_norm {norm:.5f}",
                flush=True,
            )
    seconds = statistics.median(times[2:])
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if plan.device == "cuda" else None
    row: dict[str, Any] = {
        "engine": type(state.optimizer).__name__,
        "building s": building,
        "step s": seconds,
        "tokens/s": plan.tokens_per_step / seconds,
        "peak GiB": memory,
    }
    if exposed:
        row |= _exposed(state, train, given, times, seconds, plan)
    return row | {"losses": " ".join(f"{loss:.5f}" for loss in losses)}


def _exposed(state, train, given, times: list[float], seconds: float, plan: Plan) -> dict:
    """What steps would take if rows arrived at once, what the exchanges take alone, and so the
    share that is hidden. The weights are of no use afterwards."""
    layers = [m for m in state.model.modules() if isinstance(m, ParallelExperts)]
    inner, mesh = layers[0].transport, layers[0].mesh
    free = Free(inner)
    for layer in layers:
        layer.transport = free
    times.clear()
    for number, batches in enumerate(given, 1):
        train(number, batches)
    # out and back make a pair; every exchange is of the same number of chunks
    chunks = layers[0].plan.num_steps
    pairs = free.starts / len(given) / 2 / chunks
    rows = round(free.rows / free.starts * chunks)
    width = state.model.config.hidden_size
    x = torch.zeros(1, width, device=mesh.device, dtype=getattr(torch, plan.dtype))
    options = layers[0].exchange
    ahead = mesh.device.type == "cuda" and options.kind == "all_gather"
    alone = pairs * _alone(inner, x, rows, options, mesh, 5, ahead) / 1e3
    numbers = torch.tensor([seconds, statistics.median(times[2:]), alone], device=mesh.device)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    step, without, alone = numbers.tolist()
    return {"free step s": without, "alone s": alone, "hidden": 1 - (step - without) / alone}


# ---- the program ---------------------------------------------------------------------------------


@command
def main(arguments: list[str] | None = None) -> int:
    parser = bench_parser(__doc__, "bench_parallel")
    add, at_least_1 = parser.add_argument, bounded(least=1)
    add("what", choices=("layer", "engine", "rank"))
    add("config", type=expand_home, nargs="?", help="engine, rank: YAML file")
    add("overrides", nargs="*", metavar="section.key=value", help="engine, rank: settings")
    add("--nproc", type=at_least_1, help="layer, engine: number of processes")
    add("--cpu", action="store_true")
    add("--repeats", type=at_least_1, default=10, help="passes or steps to time (default 10)")
    add("--timeout", type=float, default=600.0, help="seconds before a hang is reported")
    layer = parser.add_argument_group("layer")
    layer.add_argument("--nodes", type=int, help="virtual nodes = expert ranks (default: all)")
    layer.add_argument("--tokens", type=int, help="tokens per rank")
    add("--modes", help="layer, rank: only those whose name matches this expression")
    layer.add_argument("--traces", type=expand_home, help="folder for the profiler's timelines")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--routing", default="real", choices=("real", "balanced"))
    engine.add_argument("--exposed", action="store_true", help="the share that is hidden")
    add("--small", action="store_true", help="engine, rank: narrow model")
    rank = parser.add_argument_group("rank")
    counts = listed(at_least_1)
    rank.add_argument("--ranks", type=counts, default=[1, 2, 8, 64], help="default 1,2,8,64")
    rank.add_argument("--expert", type=counts, default=[2, 8], help="default 2,8")
    rank.add_argument(
        "--engines", type=lambda text: text.split(","), default=["fsdp2", "deepspeed"],
        help="default fsdp2,deepspeed",
    )  # fmt: skip
    rank.add_argument("--skew", type=counts, default=[1, 2], help="loads of this rank; default 1,2")
    rank.add_argument("--micro-batches", type=at_least_1, default=1, help="per step (default 1)")
    given = parser.parse_intermixed_args(arguments)
    given.command, given.failed, given.written = arguments or sys.argv[1:], 0, {}
    if given.what == "rank":
        return show_ranks(given)
    if given.nproc is None:
        parser.error(f"{given.what} needs --nproc, the number of processes")
    if given.modes is not None and not any(re.search(given.modes, name) for name in MODES):
        parser.error(f"--modes={given.modes!r} finds none of {', '.join(MODES)}")
    device_type = "cpu" if given.cpu else DEVICE.type
    options = {"device_type": device_type, "timeout_s": given.timeout}
    about: dict[str, Any] = {"nproc": given.nproc}
    if given.what == "engine":
        columns = ENGINE
        config = load_config(given.config, [*TEXT, "data.workers=0", *given.overrides])
        if given.small:
            config = narrow(config)
        plan = make_plan(config, given.nproc, cuda=device_type == "cuda")
        print(f"{given.nproc} processes on {plan.device}: {plan.mesh.describe()}; {plan.engine}")
        if given.exposed and plan.mesh.expert == 1:
            parser.error("--exposed: the experts of this layout are not split")
        with tempfile.TemporaryDirectory() as folder:
            rows = run_processes(
                given.nproc, bench_engine, config, plan, given.repeats,
                given.routing == "balanced", given.exposed, folder, **options,
            )  # fmt: skip
    else:
        columns = LAYER
        if device_type == "cuda":  # OLMoE's layer
            shape = LayerShape(given.tokens or 16384, 2048, 1024, 64, 8, 0, "bfloat16")
        else:
            shape = LayerShape(given.tokens or 1024, 128, 64, 16, 4, 256, "float32")
        about["shape"] = asdict(shape)
        print(f"{given.nproc} processes on {device_type}, {shape}")
        rows = run_processes(
            given.nproc, bench_layer, shape, given.nodes or given.nproc, device_type,
            given.repeats, given.modes, given.traces, **options,
        )[0]  # fmt: skip
    table = Table(given, given.what, columns, **about)
    for values in rows:
        with table.row(**values):
            pass
    return finish(given)


if __name__ == "__main__":
    sys.exit(main())
