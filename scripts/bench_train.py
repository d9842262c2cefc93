#!/usr/bin/env python3
"""Speed of whole training steps on one device: tokens per second, MFU, memory, and where time goes.

    python scripts/bench_train.py configs/olmoe_1b_7b.yaml
    python scripts/bench_train.py configs/qwen3_30b_a3b.yaml --layers 8 --peer --profile
    python scripts/bench_train.py configs/quickstart.yaml train.global_batch_size=16 --steps 3

What is timed is the trainer's own step: forward, backward, clipping, AdamW (with the states that
the config says: float32 master weights and moments by default), on packed rows of the bundled novel
(real text with document borders; ids above its tokenizer's vocabulary do not occur). Weights are
random, so routing is that of an untrained model; `balanced` beside it forces every expert to the
same load. The first steps (compilation, tuning) are left out; the figure is the median step.

    MFU = tokens/s * FLOPs per token / peak of the card
    FLOPs per token = 6 * weights in products that a token meets + 6 * layers * heads * head_dim *
    (seq_len + 1)

--peer and --peer-compiled run the same architecture in transformers in the same process: bfloat16
weights and moments (rounded to the nearest), sdpa attention, grouped_mm experts, fused AdamW, the
same rows without document borders. --profile prints the device time of one step by kernel, and
whether the host waits anywhere in it. Results: a table, and JSON under --out.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import nn

from models.build import parameter_kinds
from models.first_weights import DEFAULT, FirstWeights
from moe.control import begin_step
from moe.layer import MoE
from moe.router import gates_at
from moe.routing import Routing
from parallel import World
from training.assemble import make_trainee, model_config
from training.config import Config, ConfigError, Plan, load_config, make_plan
from training.config_load import expand_home, user_path
from training.data import Batch, build_data, load_tokenizer
from training.device import peak_flops
from training.flops import flops_per_token
from training.logging import human_count
from training.loop import agree_on_step, train_step

TEXT = (
    'data.sources=[{path: "bundled:moby-dick"}]',
    "data.tokenizer=bundled:moby-dick",
    "data.tokenizer_vocab_size=null",
)


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


def batches_of(config: Config, plan: Plan, folder: Path) -> tuple[object, list[list[Batch]]]:
    """The tokenizer, and the micro-batches of a few steps."""
    tokenizer = load_tokenizer(config.data, folder / "tokenizer")
    data = build_data(config.data, tokenizer, seed=config.run.seed)
    stream = data.steps(
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=plan.micro_batch_size,
        rank=0,
        world=1,
        steps=4,
        pin_memory=plan.device == "cuda",
    )
    steps = [list(batches) for batches in stream]
    stream.close()
    return tokenizer, steps


def draw_on_device(model: nn.Module, seed: int, first: FirstWeights = DEFAULT) -> None:
    """Initial weights of the right size, drawn on the model's device in a second: those of a run
    come from the CPU, reproducible for any layout, and take a minute for seven billion."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for name, kind in parameter_kinds(model).items():
        weight = model.get_parameter(name).data
        if kind == "norm":
            weight.fill_(1.0)
        elif kind == "bias":
            weight.zero_()
        else:
            std = first.std(model.config, name, kind)
            for piece in weight:
                piece.normal_(0.0, std, generator=generator)


def timed(step, count: int, warmup: int, device: torch.device) -> list[float]:
    """Seconds of each step after the first ones."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    seconds = []
    for number in range(warmup + count):
        wait()
        began = time.perf_counter()
        step(number)
        wait()
        if number >= warmup:
            seconds.append(time.perf_counter() - began)
        elif number == 0:
            print(f"first step: {time.perf_counter() - began:.1f} s", flush=True)
    return seconds


def result(name: str, seconds: list[float], tokens: int, config, device) -> dict:
    peak = peak_flops(device)
    speed = tokens / statistics.median(seconds)
    flops = flops_per_token(config.model.config, config.data.seq_len)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    row = {
        "name": name, "tokens_per_second": speed, "tokens_per_step": tokens,
        "seconds": seconds, "mfu": speed * flops / peak if peak else None, "memory_gib": memory,
        "flops_per_token": flops,
    }  # fmt: skip
    text = f"{name:38s} {human_count(speed):>6s} tok/s   step {statistics.median(seconds):.4f} s"
    if peak:
        text += f"   MFU {row['mfu']:.1%}   memory {memory:.1f} GiB"
    print(text, flush=True)
    return row


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def bench_ours(args, config: Config, plan: Plan, tokenizer, steps, balanced: bool) -> dict:
    device = torch.device(plan.device)
    release(device)
    architecture = model_config(config, tokenizer)
    with mock.patch("training.assemble.init_weights", draw_on_device):
        trainee = make_trainee(config, architecture, plan, device, steps=config.train.steps or 1000)
    begin_step(trainee.model, 1)
    if balanced:  # blocks are compiled at their first call
        for module in trainee.model.modules():
            if isinstance(module, MoE):
                module.routing_hook = force_balance
    world = World()

    def step(number: int) -> None:
        batches = steps[number % len(steps)]
        train_step(
            trainee.forward, trainee.optimizer, batches, agree_on_step(world, batches, False),
            step=number + 1, lr=1e-5, router=config.router, world=world, device=device,
            graph=trainee.graph,
        )  # fmt: skip

    tokens = sum(batch.num_tokens for batch in steps[0])
    seconds = timed(step, args.steps, args.warmup, device)
    row = result(
        "balanced routing" if balanced else "real routing", seconds, tokens, config, device
    )
    if args.profile and device.type == "cuda" and not balanced:
        row["waits"] = waits(step)
        row["profile"] = profile(step)
    return row


def waits(step) -> str | None:
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


def profile(step) -> dict:
    """Device time of one step by kernel, the largest first, and the time without any."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        step(0)
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}  # name → milliseconds, calls
    spans = []
    for event in trace.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        entry = kernels.setdefault(event.name[:200], [0.0, 0])
        entry[0] += event.time_range.elapsed_us() / 1e3
        entry[1] += 1
        spans.append((event.time_range.start, event.time_range.end))
    busy, end = 0.0, 0.0
    for start, stop in sorted(spans):
        busy += max(stop - max(start, end), 0.0) / 1e3
        end = max(end, stop)
    first = min(start for start, _ in spans)
    kernels = dict(sorted(kernels.items(), key=lambda item: -item[1][0]))
    idle = (end - first) / 1e3 - busy
    print(f"  one step: {busy:.1f} ms of kernels, {idle:.1f} ms between them")
    for name, (ms, calls) in list(kernels.items())[:30]:
        short = name.removeprefix("void ").split("(")[0][:60]
        print(f"  {ms:8.2f} ms {ms / busy:6.1%} {calls:5d} x  {short}")
    return {"kernels": kernels, "busy_ms": busy, "idle_ms": idle}


def bench_peer(args, config: Config, plan: Plan, tokenizer, steps, compiled: bool) -> dict:
    """The same architecture and rows in transformers."""
    import transformers

    device = torch.device(plan.device)
    release(device)
    given = model_config(config, tokenizer).to_hf()
    hf = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            hf, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("grouped_mm")
    model.train()
    if compiled:
        model.compile()
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=fused)
    rows = [
        [part for batch in batches for part in batch.tokens_BL.to(device).split(args.peer_rows)]
        for batches in steps
    ]

    def step(number: int) -> None:
        for tokens_BL in rows[number % len(rows)]:
            loss = model(input_ids=tokens_BL, labels=tokens_BL, use_cache=False).loss
            (loss / len(rows[0])).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    tokens = sum(batch.num_tokens for batch in steps[0])
    seconds = timed(step, args.steps, args.warmup, device)
    name = f"transformers {transformers.__version__}{' compiled' if compiled else ''}"
    row = result(f"{name}, {args.peer_rows} rows", seconds, tokens, config, device)
    return row | {"micro_batch_size": args.peer_rows}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=expand_home)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--layers", type=int, help="cut the model to so many layers")
    parser.add_argument("--steps", type=int, default=6, help="steps that count")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--micro-batches", type=int, default=4, help="of one step")
    parser.add_argument("--routing", default="both", choices=("both", "real", "balanced"))
    parser.add_argument("--peer", action="store_true", help="transformers in the same run")
    parser.add_argument("--peer-compiled", action="store_true", help="and with torch.compile")
    parser.add_argument("--peer-rows", type=int, help="of its micro-batches; default: as ours")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=user_path, default=Path("runs/bench_train"))
    args = parser.parse_intermixed_args(arguments)
    overrides = [*TEXT, *args.overrides]
    if args.layers:
        overrides.append(f"model.num_hidden_layers={args.layers}")
    try:
        config = load_config(args.config, overrides)
        if not any(word.startswith("train.global_batch_size=") for word in args.overrides):
            size = args.micro_batches * config.train.micro_batch_size
            overrides.append(f"train.global_batch_size={size}")
            config = load_config(args.config, overrides)
        plan = make_plan(config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    args.peer_rows = min(args.peer_rows or plan.micro_batch_size, plan.micro_batch_size)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer, steps = batches_of(config, plan, args.out)
    card = torch.cuda.get_device_name() if plan.device == "cuda" else "cpu"
    print(
        f"{args.config}, {config.model.config.num_hidden_layers} layers, {plan.accumulation} x "
        f"{plan.micro_batch_size} rows of {config.data.seq_len} tokens, {plan.dtype}, AdamW's "
        f"weights {config.optim.weights}, moments {config.optim.moments}"
        f"{', compiled' if plan.compile else ''}; {card}, torch {torch.__version__}",
        flush=True,
    )
    flops, peak = flops_per_token(config.model.config, config.data.seq_len), None
    if plan.device == "cuda":
        peak = peak_flops(torch.device(plan.device))
    known = "" if peak is None else f"; MFU = tokens/s x that / {peak / 1e12:.0f} TFLOP/s"
    print(f"{flops / 1e9:.2f} GFLOP a token, forward and backward{known}", flush=True)
    kinds = {"both": (False, True), "real": (False,), "balanced": (True,)}[args.routing]
    found = {"card": card, "torch": torch.__version__, "command": overrides, "rows": []}

    def keep(row: dict) -> None:  # at once: what follows may run out of memory or time
        found["rows"].append(row)
        (args.out / "train.json").write_text(json.dumps(found))

    for balanced in kinds:
        keep(bench_ours(args, config, plan, tokenizer, steps, balanced))
    for wanted, compiled in ((args.peer, False), (args.peer_compiled, True)):
        if wanted:
            keep(bench_peer(args, config, plan, tokenizer, steps, compiled))
    print(f"written to {args.out}/train.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
