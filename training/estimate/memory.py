"""How much memory a run needs: what its optimizer or engine keeps, and the worst moment of a replay
of one micro-batch (`training.estimate.replay`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from models.build import build_model, parameter_kinds
from parallel.engines.local import ALIGN
from parallel.engines.optimizer import Group
from training.assemble import DTYPES, router_options
from training.estimate.counts import held, parameter_counts
from training.estimate.replay import replay
from training.optim.groups import parameter_groups

if TYPE_CHECKING:
    from models.transformer import Decoder
    from training.config.plan import Plan
    from training.config.sections import Config

# Bytes of a position in `training.data.Batch`: tokens, labels, positions, and whether it is valid.
BATCH = 8 + 8 + 8 + 1


def activation_bytes(config: Config, plan: Plan) -> int:
    """Peak of what comes and goes in a step: the batch, activations of one micro-batch, and
    gradients beside the buffers of the optimizer or the engine."""
    model = config.model.config
    peak = replay(
        model,
        rows=plan.micro_batch_size,
        seq_len=config.data.seq_len,
        dtype=DTYPES[plan.dtype],
        options={
            "save": config.model.save,
            "kernels": config.model.kernels,
            # Where epochs make the length, any that no schedule is too long for does.
            **router_options(config, model, config.train.steps or 1_000_000),
        },
        checkpointing=config.train.checkpointing,
        gpu=plan.device == "cuda",
        compiled=plan.compile,
        keep_gradients=_one_micro_batch(plan),
    )
    return peak + BATCH * plan.rows_per_rank * config.data.seq_len


def _one_micro_batch(plan: Plan) -> bool:
    """Whether gradients in bfloat16 are read by the update where autograd puts them."""
    return not plan.sharded and plan.accumulation == 1


@dataclass(frozen=True)
class Memory:
    """Bytes of one process, by what they hold."""

    weights: int
    """In the dtype of the products; of several processes, those of the blocks that are gathered at
    a time."""
    gradients: int
    """Buffers that are there all the time."""
    masters: int
    """float32 weights that are kept beside those."""
    moments: int
    """The optimizer's states."""
    activations: int
    """At the worst moment of a step, with the gradients that exist then beside the buffers."""
    context: int
    """CUDA's own, and communication buffers with several processes."""
    host: int = 0
    """What is offloaded to host memory, beside all that."""
    disk: int = 0
    """What is offloaded to files."""

    @property
    def states(self) -> int:
        """What is there between steps, whatever the micro-batch."""
        return self.weights + self.gradients + self.masters + self.moments

    @property
    def total(self) -> int:
        return self.states + self.activations + self.context


CONTEXT = 600 * 2**20
COMMUNICATION = 400 * 2**20


def process_memory(config: Config, plan: Plan) -> Memory:
    """Memory of one process (the largest one): what the optimizer or the engine keeps, and the
    replayed activations."""
    context = 0
    if plan.device == "cuda":
        context = CONTEXT + (COMMUNICATION if plan.world_size > 1 else 0)
    kept = _sharded(config, plan) if plan.sharded else _whole(config, plan)
    activations = activation_bytes(config, plan)
    if plan.sharded:
        activations += _foreign_bytes(config, plan)
    return Memory(**kept, activations=activations, context=context)


def _foreign_bytes(config: Config, plan: Plan) -> int:
    """Of exchanges with fixed sizes: pre-activations of the experts for every pair that there is
    room for beyond a process's own, in the layers that keep theirs for backward; and the rows."""
    model, width = config.model.config, DTYPES[plan.dtype].itemsize
    tokens, others = plan.micro_batch_size * config.data.seq_len, plan.mesh.expert - 1
    k, experts = model.num_experts_per_tok, model.num_experts // plan.mesh.expert
    if plan.exchange.kind == "all_gather":  # as if all K experts of each token were here
        rows, pairs = others * tokens, others * tokens * k
    elif getattr(plan.exchange, "sizes", "exact") == "bounded":
        held = tokens * min(k, experts)
        if config.router.capacity is not None:
            limit = math.ceil(config.router.capacity.factor * tokens * k / model.num_experts)
            held = min(held, experts * limit)
        rows, pairs = others * min(tokens, held), max(0, (others + 1) * held - tokens * k)
    else:
        return 0
    layers = 1 if config.train.checkpointing == "full" else len(model.moe_layers)
    columns = 2 * model.expert_size
    kept = {"h": columns * width, "fp8_h": columns, "x": 0}[config.model.save]
    return layers * (pairs * kept + rows * model.hidden_size * width)


def _whole(config: Config, plan: Plan) -> dict[str, int]:
    """One process: parallel/engines/local.py's flat buffers."""
    found = dict.fromkeys(("weights", "gradients", "masters", "moments"), 0)
    model = build_model(config.model.config, dtype=DTYPES[plan.dtype], device="meta")
    for group in _groups(model, config):
        narrow = group.dtype != torch.float32
        size = sum(-(-p.numel() // ALIGN) * ALIGN for p in group.parameters.values())
        found["weights"] += group.dtype.itemsize * size
        found["gradients"] += 0 if narrow and _one_micro_batch(plan) else 4 * size
        found["masters"] += 4 * size if narrow and config.optim.weights == "float32" else 0
        found["moments"] += _state_bytes(config, group) * size
    return found


def _groups(model: Decoder, config: Config) -> list[Group]:
    by_matrix = config.optim.granularity == "matrices"
    return parameter_groups(model, parameter_kinds(model), weight_decay=0.0, by_matrix=by_matrix)


def _state_bytes(config: Config, group: Group) -> int:
    """Of the optimizer's states of one weight."""
    return sum(dtype.itemsize for dtype in config.optim.of(group).states(group).values())


def checkpoint_bytes(config: Config, dtype: str) -> int:
    """Weights and the optimizer's states, as a checkpoint holds them."""
    model, found = build_model(config.model.config, dtype=DTYPES[dtype], device="meta"), 0
    for group in _groups(model, config):
        narrow = group.dtype != torch.float32
        weight = DTYPES[config.optim.weights].itemsize if narrow else 4
        found += group.count * (weight + _state_bytes(config, group))
    return found


def _sharded(config: Config, plan: Plan) -> dict[str, int]:
    """Several: shards of float32 weights, gradients and moments, and what is whole for a while.

    While a block computes, its weights and those of the next one are gathered; its gradient is
    whole once in the dtype of the products and once in float32 for the reduction. What is offloaded
    is on the device for moments only.
    """
    model, mesh = build_model(config.model.config, device="meta"), plan.mesh
    kinds = parameter_kinds(model)
    kept = held(parameter_counts(config.model.config), mesh)
    groups = _groups(model, config)
    states = sum(_state_bytes(config, g) * held({g.kind: g.count}, mesh) for g in groups)
    blocks: dict[str, int] = {}  # elements of a block as this process computes with them
    for name, parameter in model.named_parameters():
        if kinds[name] == "router":
            continue
        block = ".".join(name.split(".")[:2])
        count = parameter.numel() // (mesh.expert if kinds[name] == "expert" else 1)
        blocks[block] = blocks.get(block, 0) + count
    width, largest = DTYPES[plan.dtype].itemsize, max(blocks.values())
    offload, deepspeed = plan.offload, plan.engine == "deepspeed"
    places = {"none": 0, "cpu": 0, "nvme": 0}
    # DeepSpeed keeps weights for the products beside the float32 ones, which FSDP2 casts anew.
    places[offload.weights] += width * kept if deepspeed else 0
    shards = places["none"]
    places[offload.state] += 4 * kept + states
    on_device = offload.state == "none"
    if not on_device:
        # DeepSpeed: as they are added up, and as the update reads them.
        places["cpu"] += (8 if deepspeed else 4) * kept
    return {
        "weights": shards + 2 * width * largest,
        "gradients": 4 * kept * on_device + (width + 4) * largest,
        "masters": 4 * kept * on_device,
        "moments": states * on_device,
        "host": places["cpu"],
        "disk": places["nvme"],
    }
