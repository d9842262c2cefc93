"""What a run says of itself at its start: where it stands, what the model is, what computes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from models.attention import packed_backend
from moe.kernels.common.backend import pick_backend
from moe.kernels.tiers import pick_for_activation, pick_products
from parallel.engines.optimizer import Kind
from training.estimate.flops import counts_first, matmul_weights
from training.optim.groups import group_table
from training.optim.schedule import warmup_steps
from training.report.units import human_count
from training.surgery.checks import start_experts

if TYPE_CHECKING:
    from training.run_state import RunState


def log_run_header(state: RunState) -> None:
    """Where the run stands, what the model is, and which parameters learn how."""
    config, log, plan, run = state.config, state.log, state.plan, state.run
    for sentence in run.passed_over:
        log.event("checkpoint_passed_over", f"checkpoint {sentence}")
    if run.changed:
        log.event("settings_changed", f"settings changed since then: {'; '.join(run.changed)}")
    if changes := config.model.continued_otherwise():
        log.event(
            "model_changed",
            f"the weights of {config.model.init_from} continue with {'; '.join(changes)}",
        )
    for line in state.data.describe():
        log.say(f"data: {line}")
    active, total = matmul_weights(state.model.config)
    processes = f"{plan.world_size} x {plan.device}" if plan.world_size > 1 else plan.device
    log.say(
        f"model: {human_count(total)} weights in matrix products, {human_count(active)} for each "
        f"token; {plan.dtype} on {processes}{', compiled' if plan.compile else ''}"
    )
    for line in what_runs(state):
        log.say(line)
    optim = config.optim
    if "bfloat16" in (optim.weights, optim.moments):
        log.say(
            f"{optim.kind}: weights in {optim.weights}, moments in {optim.moments}, bfloat16 by "
            "stochastic rounding (routers: float32)"
        )
    wanted = optim.schedule.warmup_steps
    if (taken := warmup_steps(wanted, state.steps)) != wanted:
        log.warn(
            f"warm-up takes {taken} of the {state.steps} steps, a tenth: "
            f"optim.schedule.warmup_steps={wanted} is not below their number"
        )
    if config.train.cuda_graph:
        log.say("steps are captured as CUDA graphs")
    balance, bias = config.router.balance, config.router.bias
    if balance is not None:
        log.say(
            f"balance loss: weight {balance.coef:g}, compared with the load of {balance.compares}"
        )
        if counts_first(config, plan.accumulation):
            log.say(
                f"  a step's {plan.accumulation} micro-batches per process are counted in a "
                "forward pass of their own first: a third more arithmetic; "
                "router.balance.kind=lagged is free"
            )
    if bias is not None:
        log.say(f"selection bias: updated after every step, rule {bias.kind}")
    started = start_experts(config)
    if started is not None:
        slots = state.model.config.num_experts
        log.say(f"experts: {started} of {slots} slots in use at the start of the run")

    def placement(kind: Kind) -> str:
        return plan.mesh.placed(kind) if plan.sharded else str(state.device)

    log.table("parameters", group_table(state.train.optimizer.groups, config.optim, placement))
    step = state.step
    text = f"attempt {run.attempt}: "
    text += f"resuming from {run.checkpoint}" if run.checkpoint else "starting"
    log.event(
        "start",
        f"{text}; {state.steps} steps of {human_count(plan.tokens_per_step)} tokens in "
        f"{run.folder}",
        style="bold",
        step=step,
        steps=state.steps,
        world_size=plan.world_size,
        checkpoint=str(run.checkpoint) if run.checkpoint else None,
        unigram_entropy=state.data.unigram_entropy() if log.active else None,
    )


def what_runs(state: RunState) -> Iterator[str]:
    """A line each: tokenizer, kernels, attention, engine, as chosen for this run."""
    tokenizer, plan = state.tokenizer, state.plan
    name = getattr(state.config.data.tokenizer, "path", "of the data")
    yield f"tokenizer: {name}, {tokenizer.vocab_size:,} tokens, hash {tokenizer.hash[:12]}"
    dtype = getattr(torch, plan.dtype)
    loss = pick_backend("auto", torch.empty(0, device=state.device, dtype=dtype))
    experts = _experts_kernels(state, dtype)
    yield f"kernels: {f'experts {experts}, ' if experts else ''}loss {loss}"
    choices = {getattr(m, "choice", "pytorch") for m in state.model.modules()}
    choice = "flash4" if "flash4" in choices else "pytorch"
    by = packed_backend(state.device, dtype, state.model.config.widest_head, choice)
    names = {
        "flash4": "FlashAttention-4",
        "flash": "flash, of packed documents",
        "sdpa": "scaled_dot_product_attention",
    }
    yield f"attention: {names[by]}"
    if plan.sharded:
        yield f"engine: {plan.engine}; layout: {plan.mesh.describe()}"
    else:
        yield "engine: none, one process"


def _experts_kernels(state: RunState, dtype: torch.dtype) -> str | None:
    """What computes the experts of the first layer that has some; None for a dense model."""
    config, model = state.config, state.model.config
    if not model.moe_layers:
        return None
    layer = model.moe_config(model.moe_layers[0])
    one = torch.empty(1, device=state.device, dtype=dtype)
    if layer.expert_widths is not None:
        return pick_for_activation(config.model.kernels, one, layer.activation)
    tokens = state.plan.micro_batch_size * config.data.seq_len
    E, D, N = layer.num_experts, layer.hidden_size, layer.expert_size
    picked = pick_products(
        config.model.kernels,
        one.expand(tokens, D),
        one.expand(E, D, N),
        layer.activation,
        tokens * layer.num_experts_per_tok,
    )
    return f"products of sparse matrices ({picked})" if config.model.kernels == "spmm" else picked
