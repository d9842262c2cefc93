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
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from training.config.build import Config, ConfigError, Plan, fail, load_config, make_plan
from training.config.load import expand_home

GIB = 2**30
# Part of a GPU's memory that the allocator can be expected to use before fragmentation bites.
USABLE = 0.95
# How far the peak of a run may be from the estimated one.
TOLERANCE = 0.08


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "config", type=expand_home, help="config file, for example configs/quickstart.yaml"
    )
    parser.add_argument("overrides", nargs="*", help="section.key=value, as for train.py")
    parser.add_argument("--gpus", type=int, default=1, help="processes, one for each GPU")
    parser.add_argument("--hosts", type=int, default=1, help="that the GPUs are in (default 1)")
    parser.add_argument("--gpu-memory", type=float, help="GiB of one GPU; nothing: no verdict")
    parser.add_argument("--gpu", default="H100", help="model, for its speed (default H100)")
    parser.add_argument("--mfu", type=float, help="share of the peak, instead of measured rates")
    parser.add_argument(
        "--document", type=float, metavar="TOKENS",
        help="length of the document that the average token is in (default: rows are one document)",
    )  # fmt: skip
    parser.add_argument("--measure", action="store_true", help="train here, and compare")
    parser.add_argument("--steps", type=int, default=3, help="that --measure times, after two")
    parser.add_argument(
        "--breakdown", type=Path, metavar="FOLDER", help="--measure: what the peak consists of"
    )
    options = parser.parse_intermixed_args(arguments)
    if options.measure and options.gpus != 1:
        parser.error(f"--measure is of one process; --gpus={options.gpus} must be 1")
    if options.breakdown is not None and not options.measure:
        parser.error("--breakdown needs --measure")
    if options.steps < 1:
        parser.error(f"--steps={options.steps} must be at least 1")
    for key, value in (("gpus", options.gpus), ("hosts", options.hosts)):
        if value < 1:
            parser.error(f"--{key}={value} must be at least 1")
    if options.gpu_memory is not None and options.gpu_memory <= 0:
        parser.error(f"--gpu-memory={options.gpu_memory:g} must be above 0")
    if options.document is not None and options.document < 1:
        parser.error(f"--document={options.document:g} must be at least 1")
    if options.mfu is not None and not 0 < options.mfu <= 1:
        parser.error(f"--mfu={options.mfu} must be above 0 and at most 1")
    return options


def parameter_counts(config: Config) -> dict[str, int]:
    """Parameters by kind, of the model as it is built (on the meta device)."""
    from models.build import build_model, parameter_kinds

    model = build_model(config.model.config, device="meta")
    kinds = parameter_kinds(model)
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        counts[kinds[name]] = counts.get(kinds[name], 0) + parameter.numel()
    return counts


def active_parameters(config: Config, counts: dict[str, int]) -> int:
    """Parameters that one token meets, the embedding table included, as model cards count."""
    model = config.model.config
    experts = counts.get("expert", 0)
    unused = experts * (model.num_experts - model.num_experts_per_tok) // model.num_experts
    return sum(counts.values()) - unused


OFFLOADED = ["parallel.offload=cpu", "parallel.offload_weights=cpu"]


def padding(config: Config) -> int:
    """Zeros that an exported folder has beside the parameters: experts are padded to the widest."""
    model = config.model.config
    widths = [model.expert_widths(layer) or () for layer in model.moe_layers]
    missing = sum(model.expert_size - width for layer in widths for width in layer)
    return 3 * model.hidden_size * missing


def remedies(config: Config, overrides: list[str], path: str) -> Iterator[tuple[str, Config]]:
    """Changes that need less memory, the cheapest first, each as (what to type, its config)."""
    train = config.train
    tried = [
        ["train.checkpointing=selective"],
        ["train.checkpointing=selective", "model.save=x"],
        ["train.checkpointing=full"],
    ]
    micro = train.micro_batch_size
    while micro > 1:
        micro //= 2
        if train.global_batch_size % micro == 0:
            tried.append(["train.checkpointing=full", f"train.micro_batch_size={micro}"])
    for words in tried:
        try:
            changed = load_config(path, [*overrides, *words])
        except ConfigError:
            continue
        if changed != config:
            yield " ".join(words), changed


def show(title: str, rows: list[tuple[str, str, str]]) -> None:
    print(title)
    for name, value, remark in rows:
        print(f"  {name:<26}{value:>12}  {remark}".rstrip())


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.measure:
        from scripts.bench.train import TEXT

        options.overrides = [*TEXT, *options.overrides]
    try:
        config = load_config(options.config, options.overrides)
        # The figures are those of a GPU run, wherever they are computed.
        cuda = config.run.device != "cpu"
        plan = make_plan(config, options.gpus, cuda=cuda, hosts=options.hosts)
        if options.measure and not (plan.device == "cuda" and torch.cuda.is_available()):
            raise ConfigError("--measure needs a GPU on this machine, and run.device not cpu")
        print(plan.mesh.describe() if plan.engine else "one process")
    except ConfigError as error:
        fail(error)

    from training.estimate.flops import counts_first, flops_per_token
    from training.estimate.memory import DTYPES, process_memory
    from training.report.run_log import human_count, human_time

    counts = parameter_counts(config)
    total = sum(counts.values())
    rows = [(kind, human_count(counts[kind]), "") for kind in sorted(counts, key=counts.get)[::-1]]
    rows += [
        ("all", human_count(total), f"{total:,}"),
        ("for one token", human_count(active_parameters(config, counts)), "K experts, embedding"),
    ]
    show("parameters", rows)

    memory = process_memory(config, plan)
    one = plan.engine is None and plan.accumulation == 1 and plan.dtype == "bfloat16"
    sums = "float32; others pass with the activations" if one else "float32"
    blocks = "blocks compiled" if plan.compile else "blocks not compiled"
    outside = [
        ("in host memory", memory.host, "offloaded; of each process, not of each host"),
        ("in files", memory.disk, "offloaded to parallel.offload_path, likewise"),
    ]
    show(
        f"memory of each process, GiB ({plan.dtype}, micro-batch {plan.micro_batch_size} x "
        f"{config.data.seq_len}, checkpointing {config.train.checkpointing})",
        [
            ("weights", _gib(memory.weights), "of two blocks at a time" if plan.engine else ""),
            ("gradients", _gib(memory.gradients), sums),
            ("master weights", _gib(memory.masters), "float32, where weights are not"),
            ("AdamW moments", _gib(memory.moments), f"{config.optim.moments}, two"),
            ("activations", _gib(memory.activations), "at their worst, by replay; " + blocks),
            ("context", _gib(memory.context), "CUDA, communication; a fixed guess"),
            ("all", _gib(memory.total), ""),
            *((name, _gib(size), remark) for name, size, remark in outside if size),
        ],
    )

    flops = flops_per_token(config.model.config, config.data.seq_len)
    what = "forward and backward"
    if counts_first(config, plan.accumulation):
        flops *= 4 / 3
        what += "; and the counting pass of router.balance_scope=global"
    rows = [
        ("FLOPs for one token", f"{flops / 1e9:.2f} G", what),
        (
            "tokens in a step",
            human_count(plan.tokens_per_step),
            f"accumulation {plan.accumulation}",
        ),
    ]
    tokens, kind = 10**9, "time for 1B tokens"
    if config.train.steps is not None:
        tokens, kind = config.train.steps * plan.tokens_per_step, "time"
        rows.append(("tokens in the run", human_count(tokens), f"{config.train.steps:,} steps"))
    card, title = _card(options.gpu), "work"
    if plan.device == "cuda":
        title = f"work, on {options.gpus} x {options.gpu}, whatever this machine has"
        seconds, remark, parts = step_time(options, config, plan, card)
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
    kept = DTYPES[weights].itemsize + 2 * DTYPES[moments].itemsize
    rows += [
        ("checkpoint on disk", _gib(kept * total), f"GiB: {weights} weights, {moments} moments"),
        ("Hugging Face folder", _gib(2 * (total + padding(config))), "GiB in bfloat16"),
    ]
    show(title, rows)
    if options.measure:
        return compare(options, config, plan, memory)
    return verdict(options, config, plan, memory)


def step_time(
    options: argparse.Namespace, config: Config, plan: Plan, card: str
) -> tuple[float | None, str, str]:
    """Seconds of a step on the GPUs of the plan, what they rest on, and the largest parts."""
    from training.device import PEAK_FLOPS
    from training.estimate.flops import counts_first, flops_per_token
    from training.estimate.speed import basis, step_seconds

    speed = options.gpus * dict(PEAK_FLOPS)[card]
    of = f"of {speed / options.gpus / 1e12:.0f} TFLOP/s"
    work = plan.tokens_per_step * flops_per_token(config.model.config, config.data.seq_len)
    if options.mfu is not None:
        passes = 4 / 3 if counts_first(config, plan.accumulation) else 1
        return passes * work / (speed * options.mfu), f"assuming {options.mfu:.0%} {of}", ""
    found = step_seconds(config, plan, card, options.document)
    if found is None:
        return None, "rates are known of bfloat16 with Triton or Hopper kernels: give --mfu", ""
    seconds = sum(found.values())
    remark = f"{basis(card)}; MFU {work / (seconds * speed):.0%} {of}"
    if options.gpus > 1:
        remark += "; communication not counted"
    if plan.offload.state != "none":
        remark += "; offloading not counted"
    largest = sorted(found, key=found.get)[:-5:-1]
    shares = [f"{name} {found[name] / seconds:.0%}" for name in largest]
    return seconds, remark, ", ".join(share for share in shares if not share.endswith(" 0%"))


def compare(options: argparse.Namespace, config: Config, plan: Plan, memory) -> int:
    """Train a few steps here and put what they took beside the estimate; the exit code."""
    from scripts._measure_memory import measure
    from training.device import peak_flops
    from training.estimate.flops import flops_per_token
    from training.report.run_log import human_count

    found = measure(config, plan, options.steps, options.breakdown)
    estimated = memory.total - memory.context
    ratio = found.peak / estimated
    near = abs(ratio - 1) <= TOLERANCE
    peak = peak_flops(torch.device("cuda"))
    flops = flops_per_token(config.model.config, config.data.seq_len)
    mfu = f"MFU {found.tokens_per_second * flops / peak:.1%}" if peak else "no peak is known"
    options.document = found.document
    seconds, _, _ = step_time(options, config, plan, _card(options.gpu))
    if seconds is not None:
        mfu += f"; estimated {human_count(plan.tokens_per_step / seconds)} on {options.gpu}, "
        mfu += f"documents of {found.document:,.0f} tokens"
    show(
        f"measured, GiB (torch {torch.__version__}, {torch.cuda.get_device_name()}, "
        f"{'compiled' if plan.compile else 'not compiled'})",
        [
            ("between steps", _gib(found.states), f"estimated {_gib(memory.states)}"),
            ("peak", _gib(found.peak), f"estimated {_gib(estimated)}"),
            ("peak after two steps", _gib(found.steady), ""),
            ("held by the allocator", _gib(found.reserved), ""),
            ("context", _gib(found.context), f"estimated {_gib(memory.context)}; on an idle card"),
            ("tokens per second", human_count(found.tokens_per_second), mfu),
        ],
    )
    word = "within" if near else "NOT within"
    print(f"measured / estimated peak: {ratio:.3f}, {word} {TOLERANCE:.0%}")
    return 0 if near else 1


def verdict(options: argparse.Namespace, config: Config, plan: Plan, memory) -> int:
    """Say whether it fits and, if not, what would; the exit code."""
    from training.estimate.memory import process_memory

    cuda = plan.device == "cuda"
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
            f"  weights and optimizer take {_gib(memory.states)} GiB of each process, and the "
            f"context (a fixed guess) {_gib(memory.context)} GiB: "
            + ("no setting changes the guess" if guess else _more_processes(config, plan, limit))
        )
        gpus = max(2, options.gpus)  # one process has an engine only if it names one
        for words in (["parallel.offload=cpu"], OFFLOADED):
            try:
                moved = load_config(options.config, [*options.overrides, *words])
                moved_plan = make_plan(moved, gpus, cuda=cuda, hosts=options.hosts)
            except ConfigError:
                continue
            need = process_memory(moved, moved_plan)
            if need.total <= limit:
                on = " ".join(words) + f" on {gpus} GPUs" * (gpus > options.gpus)
                print(
                    f"  fits with {on}: {need.total / GIB:.1f} GiB, and "
                    f"{need.host / GIB:.0f} GiB of host memory for each process"
                )
                break
        return 1
    for words, changed in remedies(config, options.overrides, options.config):
        try:
            changed_plan = make_plan(changed, options.gpus, cuda=cuda, hosts=options.hosts)
        except ConfigError:
            continue
        need = process_memory(changed, changed_plan).total
        if need <= limit:
            print(f"  fits with {words}: {need / GIB:.1f} GiB")
            return 1
    print("  nor with train.checkpointing=full and one row a micro-batch: lower data.seq_len")
    return 1


def _more_processes(config: Config, plan: Plan, limit: float) -> str:
    """How many GPUs of one node would hold the states, if any number does."""
    from training.estimate.memory import process_memory

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


def _gib(value: float) -> str:
    return f"{value / GIB:.2f}" if value >= GIB / 2 else f"{value / GIB:.2g}"


def _card(name: str) -> str:
    """The name of a GPU in the table of peak speeds."""
    from training.device import PEAK_FLOPS

    known = [part for part, _ in PEAK_FLOPS]
    exact = [part for part in known if part.lower() == name.lower()]
    near = [part for part in known if part.lower() in name.lower()]
    for part in exact + near:
        return part
    told = ", ".join(known)
    fail(ConfigError(f"--gpu={name!r} is not in the table of peak speeds; known: {told}"))


if __name__ == "__main__":
    sys.exit(main())
