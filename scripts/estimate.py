#!/usr/bin/env python3
"""What a config needs: parameters, memory of each process, FLOPs, hours; and whether it fits.

    python scripts/estimate.py configs/tessera_1b_a200m.yaml --gpus 1 --gpu-memory 80
    python scripts/estimate.py configs/olmoe_1b_7b.yaml --gpus 8 --gpu-memory 141 model.save=x

No weights are made and no GPU is needed. Activations come from a replay of one micro-batch through
the real code (training/estimate/memory.py). Hours come from the rates of a step's parts on one
H200, scaled to --gpu (training/estimate/speed.py), communication not counted; or, with --mfu, from
a share of its peak. Exit code 0: it fits, 1: it does not, 2: a mistake in the config.

    python scripts/estimate.py configs/tessera_1b_a200m.yaml --measure train.global_batch_size=16

--measure trains a few steps of that config on this machine's GPU (on the bundled novel; one
process) and compares: exit code 1 if the measured peak is more than 8 % from the estimated one.

    python scripts/estimate.py configs/olmoe_1b_7b.yaml --layouts 16,64,256 --expert 1,2,4,8

--layouts compares how experts can be split over so many GPUs: the cost of a step from bytes over
links and FLOPs (training/estimate/cost.py; docs/scaling.md). --device-ms and --host-ms, measured by
scripts/bench/parallel.py rank, take the place of FLOPs over a speed.

    python scripts/estimate.py configs/olmoe_1b_7b.yaml --gpus 1024 --hosts 128 --host-mtbf 20000 \
        --save-seconds 5 --write-seconds 90 --restart-seconds 300

--host-mtbf, the mean hours between two failures of a host, asks how often to save, and what share
of the time failures take (training/estimate/failures.py); with --layouts for every number of GPUs.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from models.config import ModelConfig
from parallel import World
from scripts._command import bounded, command, listed, make_parser
from training.assemble import make_train_state, model_config
from training.config.build import Config, ConfigError, Plan, load_config, make_plan
from training.data import load_tokenizer
from training.device import PEAK_FLOPS, peak_flops
from training.estimate.cost import Machine, layouts, step_cost
from training.estimate.counts import active_parameters, parameter_counts
from training.estimate.failures import Failures
from training.estimate.flops import counts_first, flops_per_token
from training.estimate.memory import Memory, checkpoint_bytes, process_memory
from training.estimate.speed import basis, step_seconds
from training.report.units import human_count, human_time

GIB = 2**30
# Part of a GPU's memory that the allocator can be expected to use before fragmentation bites.
USABLE = 0.95
# How far the peak of a run may be from the estimated one.
TOLERANCE = 0.08
# Steps of --measure that are not timed: they compile and tune.
WARMUP = 2


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, config=True)
    add, at_least_1 = parser.add_argument, bounded(least=1)
    positive = bounded(float, above=0)
    add("--gpus", type=at_least_1, default=1, help="GPUs, one process for each (default 1)")
    add("--hosts", type=at_least_1, default=1, help="number of hosts (default 1)")
    add("--gpu-memory", type=positive, help="GiB per GPU; omit to skip the fit check")
    add("--gpu", type=card, default="H100", help="GPU model, for its speed (default H100)")
    add("--mfu", type=bounded(float, above=0, most=1), help="assume this share of the GPU's peak")
    add(
        "--document", type=bounded(float, least=1), metavar="TOKENS",
        help="length of the document that the average token is in (default: rows are one document)",
    )  # fmt: skip
    measure = parser.add_argument_group("measuring on this machine's GPU")
    measure.add_argument("--measure", action="store_true", help="train a few steps and compare")
    measure.add_argument("--steps", type=at_least_1, default=3, help="steps to time (default 3)")
    compare = parser.add_argument_group("comparing layouts of experts")
    compare.add_argument(
        "--layouts", type=listed(at_least_1), metavar="GPUS", help="numbers of GPUs: 16,64,256"
    )
    compare.add_argument(
        "--expert", type=listed(at_least_1), help="degrees of expert parallelism (default: all)"
    )
    compare.add_argument("--gpus-per-node", type=at_least_1, default=8, help="default 8")
    compare.add_argument(
        "--micro-batches", type=at_least_1, default=1, help="micro-batches per step (default 1)"
    )
    compare.add_argument(
        "--tflops", type=positive, default=400, help="TFLOP/s of a GPU in a step (default 400)"
    )
    compare.add_argument(
        "--intra-node-gbps",
        type=positive,
        default=270,
        help="GB/s per GPU between the GPUs of a node (default 270)",
    )
    compare.add_argument(
        "--inter-node-gbps",
        type=positive,
        default=40,
        help="GB/s per GPU between nodes (default 40)",
    )
    compare.add_argument(
        "--device-ms", type=positive,
        help="measured: time that the GPU computes for a step of one micro-batch",
    )  # fmt: skip
    compare.add_argument(
        "--host-ms", type=positive, default=0.0, help="measured: time to queue that step"
    )
    lost = parser.add_argument_group("failures")
    lost.add_argument(
        "--host-mtbf", type=positive, metavar="HOURS", help="mean hours between failures of a host"
    )
    seconds = bounded(float, least=0)
    told = "measured: time for which a save stops the training"
    lost.add_argument("--save-seconds", type=seconds, help=told)
    told = "measured: time until a checkpoint written in the background is complete"
    lost.add_argument("--write-seconds", type=seconds, help=told)
    told = "measured: time from a failure to the first new step"
    lost.add_argument("--restart-seconds", type=seconds, help=told)
    lost.add_argument("--step-seconds", type=positive, help="of a step (default: estimated)")
    options = parser.parse_intermixed_args(arguments)
    if options.host_mtbf and None in (options.save_seconds, options.restart_seconds):
        parser.error("--host-mtbf needs --save-seconds and --restart-seconds, both measured")
    if options.measure and options.gpus != 1:
        parser.error(f"--measure is of one process; --gpus={options.gpus} must be 1")
    return options


def card(name: str) -> str:
    """The name of a GPU in the table of peak speeds."""
    known = [part for part, _ in PEAK_FLOPS]
    exact = [part for part in known if part.lower() == name.lower()]
    near = [part for part in known if part.lower() in name.lower()]
    if not exact + near:
        told = ", ".join(known)
        raise argparse.ArgumentTypeError(
            f"{name!r} is not in the table of peak speeds; known: {told}"
        )
    return (exact + near)[0]


# ---- parameters, memory, work --------------------------------------------------------------------


def padding(model: ModelConfig) -> int:
    """Zeros that an exported folder has beside the parameters: experts are padded to the widest."""
    widths = [model.expert_widths(layer) or () for layer in model.moe_layers]
    missing = sum(model.expert_size - width for layer in widths for width in layer)
    return 3 * model.hidden_size * missing


def gib(value: float) -> str:
    return f"{value / GIB:.2f}" if value >= GIB / 2 else f"{value / GIB:.2g}"


def show(title: str, rows: list[tuple[str, str, str]]) -> None:
    print(title)
    for name, value, remark in rows:
        print(f"  {name:<26}{value:>12}  {remark}".rstrip())


def show_parameters(config: Config, counts: dict[str, int]) -> None:
    total, active = sum(counts.values()), active_parameters(config.model.config, counts)
    rows = [(kind, human_count(counts[kind]), "") for kind in sorted(counts, key=counts.get)[::-1]]
    rows += [
        ("all", human_count(total), f"{total:,}"),
        ("active per token", human_count(active), "K experts; embedding included"),
    ]
    show("parameters", rows)


def show_memory(config: Config, plan: Plan, memory: Memory) -> None:
    one = not plan.sharded and plan.accumulation == 1 and plan.dtype == "bfloat16"
    sums = "float32; others pass with the activations" if one else "float32"
    compiled = "blocks compiled" if plan.compile else "blocks not compiled"
    rows = [
        ("weights", memory.weights, "of two blocks at a time" if plan.sharded else ""),
        ("gradients", memory.gradients, sums),
        ("master weights", memory.masters, "float32, where weights are not"),
        ("optimizer states", memory.moments, f"{config.optim.moments}, of {config.optim.kind}"),
        ("activations", memory.activations, f"peak, by replay; {compiled}"),
        ("context", memory.context, "CUDA, communication; a fixed guess"),
        ("all", memory.total, ""),
    ]
    if memory.host:
        rows.append(("in host memory", memory.host, "offloaded; per process, not per host"))
    if memory.disk:
        rows.append(("in files", memory.disk, "offloaded; per process, not per host"))
    show(
        f"memory of each process, GiB ({plan.dtype}, micro-batch {plan.micro_batch_size} x "
        f"{config.data.seq_len}, checkpointing {config.train.checkpointing})",
        [(name, gib(size), remark) for name, size, remark in rows],
    )


def show_work(options: argparse.Namespace, config: Config, plan: Plan, total: int) -> None:
    flops = flops_per_token(config.model.config, config.data.seq_len)
    what = "forward and backward"
    if counts_first(config, plan.accumulation):
        flops *= 4 / 3
        what += "; and the counting pass of the global balance loss"
    step = human_count(plan.tokens_per_step)
    rows = [
        ("FLOPs per token", f"{flops / 1e9:.2f} G", what),
        ("tokens per step", step, f"accumulation {plan.accumulation}"),
    ]
    tokens, kind = 10**9, "time for 1B tokens"
    if config.train.steps is not None:
        tokens, kind = config.train.steps * plan.tokens_per_step, "time"
        rows.append(("tokens in the run", human_count(tokens), f"{config.train.steps:,} steps"))
    title = "work"
    if plan.device == "cuda":
        title = f"work, on {options.gpus} x {options.gpu}, whatever this machine has"
        seconds, remark, parts = step_time(options, config, plan)
        if seconds is None:
            rows.append((kind, "?", remark))
        else:
            speed = plan.tokens_per_step / seconds
            hours = f"{options.gpus * tokens / speed / 3600:,.1f} GPU h"
            rows += [
                ("step", f"{seconds * 1e3:,.0f} ms", parts),
                ("tokens per second", human_count(speed), remark),
                (kind, human_time(tokens / speed), hours),
            ]
    else:
        rows.append((kind, "?", "no peak is known of a CPU; the run's log lines tell"))
    weights, moments = config.optim.weights, config.optim.moments
    kept = checkpoint_bytes(config, plan.dtype)
    exported = 2 * (total + padding(config.model.config))
    rows += [
        ("checkpoint on disk", gib(kept), f"GiB: {weights} weights, {moments} states"),
        ("Hugging Face folder", gib(exported), "GiB in bfloat16"),
    ]
    show(title, rows)


def failures_of(options: argparse.Namespace, hosts: int) -> Failures:
    return Failures(
        options.host_mtbf * 3600 / hosts,
        # of nothing the best interval would be none
        max(options.save_seconds, 1e-3),
        options.restart_seconds,
        options.write_seconds or 0.0,
    )


def show_failures(options: argparse.Namespace, config: Config, plan: Plan) -> None:
    """What failures cost with the best interval between checkpoints, and with the config's."""
    failures = failures_of(options, options.hosts)
    step = options.step_seconds
    if step is None and plan.device == "cuda":
        step = step_time(options, config, plan)[0]
    if step is None:
        raise ConfigError("--host-mtbf needs --step-seconds: this step's time is not estimated")
    steps = max(1, round(failures.best() / step))
    simulated = failures.simulate(steps * step, MONTH)
    given = config.checkpoint.every_steps
    now = f"{failures.lost(given * step):.1%}" if given else "?"
    rows = [
        ("failures", f"{MONTH / failures.between:,.1f}", f"a month, of {options.hosts} hosts"),
        ("best interval", human_time(failures.best()),
         f"of work between saves; Young's formula: {human_time(failures.young())}"),
        ("time lost with it", f"{failures.lost(steps * step):.1%}",
         f"checkpoint.every_steps={steps}; {simulated:.1%} in a simulated month"),
        ("time lost as given", now, f"checkpoint.every_steps={'null' if given is None else given}"),
    ]  # fmt: skip
    show(f"failures, with steps of {step:.3g} s", rows)


MONTH = 30 * 24 * 3600.0


def step_time(
    options: argparse.Namespace, config: Config, plan: Plan
) -> tuple[float | None, str, str]:
    """Seconds of a step on the GPUs of the plan, what they rest on, and the largest parts."""
    speed = options.gpus * dict(PEAK_FLOPS)[options.gpu]
    of = f"of {speed / options.gpus / 1e12:.0f} TFLOP/s"
    work = plan.tokens_per_step * flops_per_token(config.model.config, config.data.seq_len)
    if options.mfu is not None:
        passes = 4 / 3 if counts_first(config, plan.accumulation) else 1
        return passes * work / (speed * options.mfu), f"assuming {options.mfu:.0%} {of}", ""
    found = step_seconds(config, plan, options.gpu, options.document)
    if found is None:
        return None, "rates are known of bfloat16 with Triton or Hopper kernels: give --mfu", ""
    seconds = sum(found.values())
    remark = f"{basis(options.gpu)}; MFU {work / (seconds * speed):.0%} {of}"
    if options.gpus > 1:
        remark += "; communication not counted"
    if plan.offload.state != "none":
        remark += "; offloading not counted"
    largest = sorted(found, key=found.get)[:-5:-1]
    shares = [f"{name} {found[name] / seconds:.0%}" for name in largest]
    return seconds, remark, ", ".join(share for share in shares if not share.endswith(" 0%"))


# ---- does it fit? --------------------------------------------------------------------------------


def verdict(options: argparse.Namespace, config: Config, plan: Plan, memory: Memory) -> int:
    """Say whether it fits and, if not, what would; the exit code."""
    if options.gpu_memory is None:
        print("fits? give --gpu-memory GIB for a verdict")
        return 0
    limit = USABLE * options.gpu_memory * GIB
    of = f"{USABLE:.0%} of {options.gpu_memory:g} GiB"
    if memory.total <= limit:
        print(f"fits: {memory.total / GIB:.1f} GiB, within {of}")
        return 0
    print(f"does not fit: {memory.total / GIB:.1f} GiB, more than {of}")
    if memory.states + memory.context > limit:
        guess = memory.context > limit
        print(
            f"  weights and optimizer take {gib(memory.states)} GiB of each process, and the "
            f"context (a fixed guess) {gib(memory.context)} GiB: "
            + ("no setting changes the guess" if guess else more_processes(config, plan, limit))
        )
        gpus = max(2, options.gpus)  # one process has an engine only if it names one
        for words in OFFLOADED:
            need = changed_memory(options, words, plan, gpus)
            if need is not None and need.total <= limit:
                on = " ".join(words) + f" on {gpus} GPUs" * (gpus > options.gpus)
                print(
                    f"  fits with {on}: {need.total / GIB:.1f} GiB, and "
                    f"{need.host / GIB:.0f} GiB of host memory for each process"
                )
                break
        return 1
    for words in remedies(config):
        need = changed_memory(options, words, plan, options.gpus)
        if need is not None and need.total <= limit:
            print(f"  fits with {' '.join(words)}: {need.total / GIB:.1f} GiB")
            return 1
    print("  nor with train.checkpointing=full and one row a micro-batch: lower data.seq_len")
    return 1


OFFLOADED = (
    ["parallel.offload.kind=cpu"],
    ["parallel.offload.kind=cpu", "parallel.offload.weights=true"],
)


def remedies(config: Config) -> Iterator[list[str]]:
    """Settings that need less memory, the cheapest first."""
    yield ["train.checkpointing=selective"]
    yield ["train.checkpointing=selective", "model.save=x"]
    yield ["train.checkpointing=full"]
    micro = config.train.micro_batch_size
    while micro > 1:
        micro //= 2
        if config.train.global_batch_size % micro == 0:
            yield ["train.checkpointing=full", f"train.micro_batch_size={micro}"]


def changed_memory(
    options: argparse.Namespace, words: list[str], plan: Plan, gpus: int
) -> Memory | None:
    """What the config would need with other settings; None if it refuses them."""
    try:
        config = load_config(options.config, [*options.overrides, *words])
        changed = make_plan(config, gpus, cuda=plan.device == "cuda", hosts=options.hosts)
    except ConfigError:
        return None
    return process_memory(config, changed)


def more_processes(config: Config, plan: Plan, limit: float) -> str:
    """How many GPUs of one node would hold the states, if any number does."""
    for count in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        if count <= plan.world_size:
            continue
        try:
            memory = process_memory(config, make_plan(config, count, cuda=plan.device == "cuda"))
        except ConfigError:
            continue
        if memory.states + memory.context <= limit:
            return f"{count} GPUs that share one node's weights hold them"
    return "no number of GPUs in one node helps, a smaller model does"


# ---- against this machine's GPU ------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Bytes on one GPU by PyTorch's allocator, and speed."""

    states: int
    """Allocated before the first step: weights, masters, moments, gradient buffers."""
    peak: int
    steady: int
    """The peak without the first steps, which compile and tune."""
    reserved: int
    """What the allocator took from the device."""
    context: int
    """What the device has in use beyond that, if nothing else on it grew meanwhile."""
    tokens_per_second: float
    document: float
    """Tokens of the document that the average token is in."""


def measure(config: Config, plan: Plan, count: int) -> Measured:
    """Train `WARMUP + count` steps on this machine's GPU, on packed rows of the bundled novel."""
    from scripts.bench.harness import step_seconds as timed
    from scripts.bench.train import draw_on_device, one_step, text_batches

    device = torch.device("cuda")
    free, size = torch.cuda.mem_get_info()
    others = size - free - torch.cuda.memory_reserved()  # other processes, and what is there now
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(config.data, Path(folder) / "tokenizer")
        batches = text_batches(config, plan, tokenizer, 4)
    lengths = [n for rows in batches for batch in rows for n in batch.documents.lengths]
    with mock.patch("training.assemble.initial_values", draw_on_device):
        architecture, total = model_config(config, tokenizer), config.train.steps or 1000
        state = make_train_state(config, architecture, plan, World(), device, steps=total)
    train = one_step(state, lr=1e-5)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    states = torch.cuda.memory_allocated()
    peaks = []

    def step(number: int) -> None:
        if number == WARMUP:
            peaks.append(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        train(number + 1, batches[number % len(batches)])

    seconds = timed(step, count, WARMUP)
    peaks.append(torch.cuda.max_memory_allocated())
    reserved = torch.cuda.memory_reserved()
    free, size = torch.cuda.mem_get_info()
    return Measured(
        states=states,
        peak=max(peaks),
        steady=peaks[-1],
        reserved=reserved,
        context=size - free - reserved - max(others, 0),
        tokens_per_second=plan.tokens_per_step / statistics.median(seconds),
        document=sum(n * n for n in lengths) / sum(lengths),
    )


def compare(options: argparse.Namespace, config: Config, plan: Plan, memory: Memory) -> int:
    """Train a few steps here and put what they took beside the estimate; the exit code."""
    found = measure(config, plan, options.steps)
    estimated = memory.total - memory.context
    ratio = found.peak / estimated
    near = abs(ratio - 1) <= TOLERANCE
    peak = peak_flops(torch.device("cuda"))
    flops = flops_per_token(config.model.config, config.data.seq_len)
    mfu = f"MFU {found.tokens_per_second * flops / peak:.1%}" if peak else "no peak is known"
    options.document = found.document
    seconds, _, _ = step_time(options, config, plan)
    if seconds is not None:
        mfu += f"; estimated {human_count(plan.tokens_per_step / seconds)} on {options.gpu}, "
        mfu += f"documents of {found.document:,.0f} tokens"
    show(
        f"measured, GiB (torch {torch.__version__}, {torch.cuda.get_device_name()}, "
        f"{'compiled' if plan.compile else 'not compiled'})",
        [
            ("between steps", gib(found.states), f"estimated {gib(memory.states)}"),
            ("peak", gib(found.peak), f"estimated {gib(estimated)}"),
            ("peak after two steps", gib(found.steady), ""),
            ("held by the allocator", gib(found.reserved), ""),
            ("context", gib(found.context), f"estimated {gib(memory.context)}; on an idle card"),
            ("tokens per second", human_count(found.tokens_per_second), mfu),
        ],
    )
    word = "within" if near else "NOT within"
    print(f"measured / estimated peak: {ratio:.3f}, {word} {TOLERANCE:.0%}")
    return 0 if near else 1


def lost_at_best(options: argparse.Namespace, gpus: int) -> float:
    """Share of the time that failures take with the best interval between checkpoints."""
    failures = failures_of(options, max(1, gpus // options.gpus_per_node))
    return failures.lost(failures.best())


# ---- layouts of experts --------------------------------------------------------------------------


def show_layouts(options: argparse.Namespace, config: Config) -> int:
    """A table of what a step costs in each layout; the exit code."""
    model, seq_len = config.model.config, config.data.seq_len
    experts = model.num_experts if model.moe_layers else None
    tokens = config.train.micro_batch_size * seq_len
    machine = Machine(
        options.tflops * 1e12,
        options.intra_node_gbps * 1e9,
        options.inter_node_gbps * 1e9,
        options.device_ms and options.device_ms / 1e3,
        options.host_ms / 1e3,
    )
    plans = [
        plan
        for gpus in options.layouts
        for plan in layouts(gpus, options.gpus_per_node, experts)
        if options.expert is None or plan.expert in options.expert
    ]
    if not plans:
        raise ConfigError(
            f"--expert={','.join(map(str, options.expert))}: no layout of "
            f"{', '.join(map(str, options.layouts))} GPUs splits {experts or 'no'} experts so"
        )
    speed = f"{options.tflops:g} TFLOP/s"
    if options.device_ms:
        speed = f"{options.device_ms:g} ms of the GPU and {options.host_ms:g} ms of the host each"
    print(
        f"{options.micro_batches} micro-batch(es) of {tokens} tokens per GPU, {speed}, "
        f"{options.intra_node_gbps:g} GB/s in a node of {options.gpus_per_node}, "
        f"{options.inter_node_gbps:g} GB/s between nodes"
    )
    print(
        "| GPUs | experts | split over | copies | compute | in node | between | of it tokens "
        "| all hidden | none hidden |"
        + (" lost to failures |" if options.host_mtbf else "")
        + "\n|---|---|---|---|---|---|---|---|---|---|"
        + ("---|" if options.host_mtbf else "")
    )
    counts = parameter_counts(model)
    for plan in plans:
        cost = step_cost(model, plan, machine, tokens, seq_len, options.micro_batches, counts)
        print(
            f"| {plan.world} | {plan.placement if plan.expert > 1 else 'not split'} "
            f"| {plan.expert} | {plan.expert_replica} "
            f"| {1e3 * cost.compute:.0f} ms | {1e3 * cost.intra_node:.0f} "
            f"| {1e3 * cost.inter_node:.0f} | {1e3 * cost.tokens:.0f} "
            f"| {cost.compute / cost.best:.0%} | {cost.compute / cost.worst:.0%} |"
            + (f" {lost_at_best(options, plan.world):.1%} |" if options.host_mtbf else "")
        )
    return 0


@command
def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.measure:
        from scripts.bench.train import TEXT

        options.overrides = [*TEXT, *options.overrides]
    config = load_config(options.config, options.overrides)
    if options.layouts:
        return show_layouts(options, config)
    # The figures are those of a GPU run, wherever they are computed.
    cuda = config.run.device != "cpu"
    plan = make_plan(config, options.gpus, cuda=cuda, hosts=options.hosts)
    if options.measure and not (plan.device == "cuda" and torch.cuda.is_available()):
        raise ConfigError("--measure needs a GPU on this machine, and run.device not cpu")
    print(plan.mesh.describe() if plan.sharded else "one process")
    counts, memory = parameter_counts(config.model.config), process_memory(config, plan)
    show_parameters(config, counts)
    show_memory(config, plan, memory)
    show_work(options, config, plan, sum(counts.values()))
    if options.host_mtbf:
        show_failures(options, config, plan)
    finish = compare if options.measure else verdict
    return finish(options, config, plan, memory)


if __name__ == "__main__":
    sys.exit(main())
