#!/usr/bin/env python3
"""Speed of whole training steps on one device: tokens per second, MFU, memory, and where time goes.

    python scripts/bench/train.py configs/olmoe_1b_7b.yaml
    python scripts/bench/train.py configs/qwen3_30b_a3b.yaml --layers 8 --peer --profile
    python scripts/bench/train.py configs/quickstart.yaml train.global_batch_size=16 --steps 3

What is timed is the trainer's own step: forward, backward, clipping, the optimizer (with the
states that the config says: float32 master weights and moments by default), on packed rows of the
bundled novel (real text with document borders; ids above its tokenizer's vocabulary do not occur).
Weights are random, so routing is that of an untrained model; `balanced` beside it forces every
expert to the same load. The first steps (compilation, tuning) are left out; the figure is the
median step.

    MFU = tokens/s * FLOPs per token / peak of the card
    FLOPs per token = 6 * weights in products that a token meets + 6 * layers * heads * head_dim *
    (seq_len + 1)

--peer runs the same architecture in transformers in the same process: bfloat16 weights and moments
(rounded to the nearest), sdpa attention, grouped_mm experts, fused AdamW, the same rows without
document borders. --profile prints the device time of one step by kernel, and
whether the host waits anywhere in it. Results: a table, and JSON under --out.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.first_weights import FirstWeights
from moe.control import begin_step
from moe.layer import MoE
from moe.routing import Routing
from moe.scores import gates_at
from parallel import World
from scripts._command import bounded, command
from scripts.bench import peers
from scripts.bench.harness import (
    Table,
    bench_parser,
    covered,
    device_events,
    finish,
    header,
    parse,
    release,
    step_seconds,
)
from training.assemble import make_train_state, model_config
from training.config.build import Config, Plan, load_config, make_plan
from training.data import Batch, TextTokenizer, build_data, load_tokenizer
from training.device import peak_flops
from training.estimate.flops import flops_per_token
from training.step import StepResult, TrainState, agree_on_step, train_step

COLUMNS = "name:38s | tok/s:,.0f | step s:.4f | MFU:6.1% | memory GiB:.1f"
TEXT = (
    'data.sources=[{path: "bundled:moby-dick"}]',
    "data.tokenizer=bundled:moby-dick",
)

# ---- what benchmarks of whole models share -------------------------------------------------------


def text_batches(
    config: Config, plan: Plan, tokenizer: TextTokenizer, steps: int, world: World | None = None
) -> list[list[Batch]]:
    """This process's micro-batches of each of the first steps."""
    world = world or World()
    data = build_data(config.data, tokenizer, seed=config.run.seed)
    stream = data.steps(
        global_batch_size=config.train.global_batch_size, micro_batch_size=plan.micro_batch_size,
        rank=world.rank, world=world.size, steps=steps, pin_memory=plan.device == "cuda",
    )  # fmt: skip
    found = [list(batches) for batches in stream]
    stream.close()
    return found


def force_balance(layer: MoE, logits_TE, gating, routing):
    """A routing hook: every expert gets the same number of tokens, gates stay the router's own."""
    c = layer.config
    T, K = gating.expert_TK.shape
    pair_TK = torch.arange(T * K, device=logits_TE.device, dtype=torch.int32).view(T, K)
    expert_TK = pair_TK % c.num_experts
    gate_TK = gates_at(logits_TE, expert_TK, c.score, c.norm, c.route_scale)
    counts_E = torch.full_like(gating.counts_E, T * K // c.num_experts)
    gating = gating._replace(expert_TK=expert_TK, gate_TK=gate_TK, counts_E=counts_E)
    return gating, Routing.from_topk(expert_TK, gate_TK, c.num_experts, c.kernels)


def balance(model: nn.Module) -> None:
    """Forces the balance of all its layers; before the first step, which compiles them."""
    for module in model.modules():
        if isinstance(module, MoE):
            module.routing_hook = force_balance


def one_step(state: TrainState, lr: float) -> Callable[[int, list[Batch]], StepResult]:
    """The trainer's step as a function of its number, from 1, and its micro-batches."""
    begin_step(state.model, 1)
    state.learning_rate = lambda _: lr

    def step(number: int, batches: list[Batch]) -> StepResult:
        state.step = number
        return train_step(state, batches, agree_on_step(state.world, batches, False))

    return step


# ---- one device ----------------------------------------------------------------------------------


def draw_on_device(
    config: ModelConfig,
    name: str,
    kind: str,
    shape: Sequence[int],
    seed: int,
    experts: range | None,
    first: FirstWeights,
) -> Tensor:
    """Initial values of the right size, drawn on the device in no time: those of a run come from
    the CPU, reproducible for any layout, and take a minute for seven billion."""
    del seed, experts  # one process asks for whole tensors
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if kind in ("norm", "bias"):
        return torch.full(shape, float(kind == "norm"), device=device)
    return torch.empty(shape, device=device).normal_(0.0, first.std(config, name, kind))


def time_steps(row: dict, step: Callable[[int], object], args, config, plan: Plan, steps) -> None:
    row["seconds"] = seconds = step_seconds(step, args.steps, args.warmup)
    row["tokens_per_step"] = tokens = sum(batch.num_tokens for batch in steps[0])
    row["flops_per_token"] = flops_per_token(config.model.config, config.data.seq_len)
    row["step s"] = statistics.median(seconds)
    row["tok/s"] = tokens / row["step s"]
    if peak := peak_flops(torch.device(plan.device)):
        row["MFU"] = row["tok/s"] * row["flops_per_token"] / peak
    if plan.device == "cuda":
        row["memory GiB"] = torch.cuda.max_memory_allocated() / 2**30


def bench_ours(
    row: dict, args, config: Config, plan: Plan, tokenizer, steps, balanced: bool
) -> None:
    architecture, device = model_config(config, tokenizer), torch.device(plan.device)
    with mock.patch("training.assemble.initial_values", draw_on_device):
        total = config.train.steps or 1000
        state = make_train_state(config, architecture, plan, World(), device, steps=total)
    if balanced:
        balance(state.model)
    train = one_step(state, lr=1e-5)

    def step(number: int) -> None:
        train(number + 1, steps[number % len(steps)])

    time_steps(row, step, args, config, plan, steps)
    if args.profile and plan.device == "cuda" and not balanced:
        row["waits"] = waits(step)
        row["profile"] = profile(step)


def waits(step: Callable[[int], object]) -> str | None:
    """Where a step waits for the device, or None if it never does."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(0)
        found = None
    except RuntimeError as error:
        found = str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    print(f"  the host waits in a step: {found or 'never'}", flush=True)
    return found


def profile(step: Callable[[int], object]) -> dict:
    """Device time of one step by kernel, the largest first, and the time without any."""
    torch.cuda.synchronize()
    events = device_events(lambda: step(0))
    kernels: dict[str, list[float]] = {}  # name → milliseconds, calls
    for start, end, name in events:
        entry = kernels.setdefault(name[:200], [0.0, 0])
        entry[0] += (end - start) / 1e3
        entry[1] += 1
    busy = covered((start, end) for start, end, _ in events) / 1e3
    kernels = dict(sorted(kernels.items(), key=lambda item: -item[1][0]))
    idle = (max(end for _, end, _ in events) - events[0][0]) / 1e3 - busy
    print(f"  one step: {busy:.1f} ms of kernels, {idle:.1f} ms between them")
    for name, (ms, calls) in list(kernels.items())[:30]:
        short = name.removeprefix("void ").split("(")[0][:60]
        print(f"  {ms:8.2f} ms {ms / busy:6.1%} {calls:5d} x  {short}")
    return {"kernels": kernels, "busy_ms": busy, "idle_ms": idle}


def bench_peer(row: dict, args, config: Config, plan: Plan, tokenizer, steps) -> None:
    architecture = model_config(config, tokenizer).to_hf()
    rows, device = args.peer_rows, torch.device(plan.device)
    version, step = peers.transformers_step(architecture, steps, rows, device)
    row["name"] = f"transformers {version}, {rows} rows"
    time_steps(row, step, args, config, plan, steps)


@command
def main(arguments: list[str] | None = None) -> int:
    parser = bench_parser(__doc__, "bench_train", config=True)
    parser.add_argument("--layers", type=bounded(least=1), help="cut the model to so many layers")
    parser.add_argument("--steps", type=bounded(least=1), default=6, help="steps to time")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument(
        "--micro-batches", type=bounded(least=1), default=4, help="micro-batches per step"
    )
    parser.add_argument("--routing", default="both", choices=("both", "real", "balanced"))
    parser.add_argument("--peer", action="store_true", help="transformers in the same run")
    parser.add_argument("--peer-rows", type=int, help="rows of its micro-batches; default: as ours")
    parser.add_argument("--profile", action="store_true")
    args = parse(parser, arguments, gpu_only=("profile",))
    overrides = list(args.overrides)
    if args.layers:
        overrides.append(f"model.num_hidden_layers={args.layers}")
    config = load_config(args.config, [*TEXT, *overrides])
    if not any(word.startswith("train.global_batch_size=") for word in args.overrides):
        size = args.micro_batches * config.train.micro_batch_size
        config = load_config(args.config, [*TEXT, *overrides, f"train.global_batch_size={size}"])
    plan = make_plan(config)
    rows = args.peer_rows = min(args.peer_rows or plan.micro_batch_size, plan.micro_batch_size)
    tokenizer = load_tokenizer(config.data, args.out / "tokenizer")
    steps = text_batches(config, plan, tokenizer, 4)
    flops = flops_per_token(config.model.config, config.data.seq_len)
    peak = peak_flops(torch.device(plan.device))
    header(
        f"{args.config}, {config.model.config.num_hidden_layers} layers, {plan.accumulation} x "
        f"{plan.micro_batch_size} rows of {config.data.seq_len} tokens, {plan.dtype}, "
        f"{config.optim.kind}: weights {config.optim.weights}, states {config.optim.moments}"
        f"{', compiled' if plan.compile else ''}",
        f"{flops / 1e9:.3g} GFLOP a token, forward and backward",
        *([f"MFU = tokens/s x that / {peak / 1e12:.0f} TFLOP/s"] if peak else []),
    )
    table = Table(args, "train", COLUMNS)
    kinds = {"both": (False, True), "real": (False,), "balanced": (True,)}[args.routing]
    for balanced in kinds:
        gc.collect()
        release()
        with table.row(name="balanced routing" if balanced else "real routing") as row:
            bench_ours(row, args, config, plan, tokenizer, steps, balanced)
    if args.peer:
        gc.collect()
        release()
        with table.row(name="transformers", micro_batch_size=rows) as row:
            bench_peer(row, args, config, plan, tokenizer, steps)
    return finish(args)


if __name__ == "__main__":
    sys.exit(main())
