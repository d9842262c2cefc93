"""How long a training step takes: a sum over its parts, each at the rate measured on one H200.

A part is arithmetic, at the rate of its kernel, or bytes that it reads and writes, at a bandwidth.
Rates are those of docs/performance.md and LOG.md (OLMoE-1B-7B and eight layers of Qwen3-30B-A3B,
bfloat16, torch 2.11). On another card arithmetic is scaled by its peak and bytes by its memory's
bandwidth: an extrapolation. Not counted: communication and offloading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.build import build_model, parameter_kinds
from training.assemble import DTYPES
from training.device import PEAK_FLOPS
from training.estimate.counts import attention_costs, held, parameter_counts
from training.estimate.flops import counts_first, mean_widths
from training.optim.groups import parameter_groups
from training.optim.newton_schulz import flops

if TYPE_CHECKING:
    from models.config import ModelConfig
    from training.config.plan import Plan
    from training.config.sections import Config

MEASURED_ON = "H200"

# Bytes per second of a card's memory, by the names of PEAK_FLOPS; NVIDIA's data sheets.
BANDWIDTH = {
    "H200": 4.8e12,
    "H100 NVL": 3.9e12,
    "H100 PCIe": 2.0e12,
    "H100": 3.35e12,
    "H800": 3.35e12,
    "H20": 4.0e12,
    "GB200": 8.0e12,
    "B200": 8.0e12,
    "A100": 2.0e12,
    "A800": 2.0e12,
    "L40S": 0.864e12,
    "A10G": 0.6e12,
    "A10": 0.6e12,
    "RTX 4090": 1.01e12,
    "RTX 3090": 0.936e12,
}
HOPPER = ("H200", "H100 NVL", "H100 PCIe", "H100", "H800", "H20")


@dataclass(frozen=True)
class Experts:
    """FLOP/s of the products of experts, whole tiles counted."""

    rows: float
    """Up, down, gradient of x."""
    weights: float
    h: float
    """Gradient of the pre-activations, with the gates'."""


EXPERTS = {"hopper": Experts(710e12, 600e12, 575e12), "triton": Experts(555e12, 430e12, 380e12)}
DENSE = 690e12  # projections, output matrix
ATTENTION = (230e12, 200e12)  # variable-length flash, forward and backward
ORTHOGONALISED = 0.5 * DENSE  # not measured: batches of small square products
MEMORY = 3.4e12  # bytes/s of AdamW and of what is pointwise
GATHER = 4.3e12  # of the combine and of the gradient's norm
CROSS_ENTROPY = 2.5e12
TILE = 128  # rows; half a tile of each expert is empty on average
HOST = 6e-3  # seconds to launch a block's kernels, forward and backward (configs/quickstart.yaml)
REST = 1.07  # small kernels and the gaps between all: 5 % (OLMoE) to 10 % (Qwen3) of the above

# Bytes per value that pointwise operations move, forward and backward, in bfloat16: of a norm, of a
# rotation, of residual additions. Not compiled, each operation reads and writes, many in float32.
FUSED = {"norm": (4, 8), "rotation": (0, 4), "residual": (12, 20)}
EAGER = {"norm": (20, 32), "rotation": (44, 58), "residual": (16, 24)}


def basis(card: str) -> str:
    """What a speed on this card rests on."""
    rates = f"rates measured on one {MEASURED_ON}"
    return rates if card == MEASURED_ON else f"extrapolated from {MEASURED_ON}"


def step_seconds(
    config: Config, plan: Plan, card: str, document: float | None = None
) -> dict[str, float] | None:
    """Seconds of each part of a step on one card; None where no rates are known: other dtypes than
    bfloat16, experts without kernels.

    Args:
        card: a name of `PEAK_FLOPS`.
        document: tokens of the document in which the mean token stands; None: as long as a row.
            Attention does as much arithmetic as documents are long.
    """
    kernels = config.model.kernels
    if kernels == "auto":
        kernels = "hopper" if card in HOPPER else "triton"
    if plan.dtype != "bfloat16" or kernels not in EXPERTS:
        return None
    peaks = dict(PEAK_FLOPS)
    faster, wider = peaks[card] / peaks[MEASURED_ON], BANDWIDTH[card] / BANDWIDTH[MEASURED_ON]
    tokens = plan.micro_batch_size * config.data.seq_len
    length = min(document or config.data.seq_len, config.data.seq_len)
    forward, backward, head = _blocks(config, plan, tokens, length, EXPERTS[kernels])
    again = 1 if counts_first(config, plan.accumulation) else 0
    if config.train.checkpointing == "full":
        again += 1
    parts = {
        name: plan.accumulation * ((1 + again) * forward[name] + backward[name]) for name in forward
    }
    if config.train.checkpointing == "selective":
        parts["norms and rotations"] += plan.accumulation * forward["norms and rotations"]
    parts["output matrix and loss"] = plan.accumulation * head
    parts |= _update(config, plan)
    if config.optim.granularity == "matrices":
        parts["orthogonalisation"] = _orthogonalisation(config, plan)
    scale = {"norms and rotations": wider, "combine": wider, "AdamW": wider, "gradients": wider}
    parts = {name: REST * value / scale.get(name, faster) for name, value in parts.items()}
    launches = HOST * plan.accumulation * config.model.config.num_hidden_layers
    if not config.train.cuda_graph:  # beside the device's work
        parts["waiting for the host"] = max(launches - sum(parts.values()), 0.0)
    return parts


def _blocks(
    config: Config, plan: Plan, tokens: int, length: float, experts: Experts
) -> tuple[dict[str, float], dict[str, float], float]:
    """Seconds of all blocks of one micro-batch by part, forward and backward; and of the head, both
    together."""
    model: ModelConfig = config.model.config
    d = model.hidden_size
    moved = FUSED if plan.compile else EAGER
    parts = ("attention", "dense products", "experts", "combine", "norms and rotations")
    forward, backward = dict.fromkeys(parts, 0.0), dict.fromkeys(parts, 0.0)
    wide = iter(mean_widths(model))
    for layer, attention in enumerate(attention_costs(model)):
        values = {"norm": 2 * d + attention.normed, "rotation": attention.moved, "residual": d}
        pairs = tokens * (length + 1) / 2
        forward["attention"] += 2 * pairs * (attention.scores + attention.values) / ATTENTION[0]
        products = 3 * attention.scores + 2 * attention.values  # one of them is forward's, again
        backward["attention"] += 2 * pairs * products / ATTENTION[1]
        for kind, count in values.items():
            for side, size in zip((forward, backward), moved[kind]):
                side["norms and rotations"] += tokens * count * size / MEMORY
        dense = attention.weights
        moe = model.moe_config(layer)
        if moe is None:
            dense += 3 * d * model.intermediate_size
        else:
            dense += d * (moe.num_experts + 3 * moe.shared_expert_size + moe.shared_expert_gate)
            width, rows = next(wide), tokens * model.num_experts_per_tok
            product = 2 * d * width * (rows + moe.num_experts * TILE / 2)
            again = product * 2 if config.model.save == "x" else 0  # up, once more
            forward["experts"] += 3 * product / experts.rows
            written = 2 * 3 * d * width * moe.num_experts
            backward["experts"] += (
                (2 * product + again) / experts.rows
                + 6 * d * width * (rows + moe.num_experts * TILE / 4) / experts.weights
                + product / experts.h
                + written / MEMORY
            )
            for side in (forward, backward):
                side["combine"] += 2 * d * (rows + tokens) / GATHER
        forward["dense products"] += 2 * tokens * dense / DENSE
        backward["dense products"] += 4 * tokens * dense / DENSE
    words = tokens * model.vocab_size
    return forward, backward, 6 * d * words / DENSE + 6 * words / CROSS_ENTROPY


def _update(config: Config, plan: Plan) -> dict[str, float]:
    """Seconds of what a step does with each weight: gradients of micro-batches added up, the norm
    of their sum, AdamW."""
    counts = parameter_counts(config.model.config)
    count = held(counts, plan.mesh) if plan.engine else sum(counts.values())
    master, moment = DTYPES[config.optim.weights].itemsize, DTYPES[config.optim.moments].itemsize
    one = not plan.sharded and plan.accumulation == 1
    gradient = 2 if one else 4
    added = 0 if one else 10 * plan.accumulation - 4  # the first one is only written
    copy = 2 if master == 4 else 0
    return {
        "gradients": count * (added / MEMORY + gradient / GATHER),
        "AdamW": count * (gradient + 2 * master + copy + 4 * moment) / MEMORY,
    }


def _orthogonalisation(config: Config, plan: Plan) -> float:
    """Seconds of Muon's iterations. Experts are computed where they are, dense matrices are shared
    among the ranks of a node."""
    model = build_model(config.model.config, device="meta")
    work: dict[str, int] = {}
    kinds = parameter_kinds(model)
    for group in parameter_groups(model, kinds, weight_decay=0.0, by_matrix=True):
        for name, (rows, columns, turns) in group.matrices.items():
            each = [turns * flops(size // turns, columns) for size in rows]
            work[kinds[name]] = work.get(kinds[name], 0) + sum(each)
    mine = held(work, plan.mesh) if plan.engine else sum(work.values())
    return mine / ORTHOGONALISED
