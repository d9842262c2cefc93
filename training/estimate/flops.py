"""FLOPs of one token of training, for the model-FLOPs utilisation (MFU) of the progress line.

Counted is what the model needs, not what the machine does: no recomputation by activation
checkpointing, no padding of tiles, no optimizer. A multiply-add is 2 FLOPs, and the backward pass
costs twice the forward pass, hence

    FLOPs per token = 6 * (weights in matrix products that one token meets) + attention
    attention       = 3 * layers * heads * (key width + value width) * (seq_len + 1)

The weights a token meets: attention projections, router, K experts and the shared ones, dense MLPs,
the output matrix; the embedding is a look-up and counts nothing. Experts of different widths count
with their mean, weighted by the tokens they had where these are known. Attention: a query meets
(seq_len + 1) / 2 keys on average under the causal mask, in two products (scores and values). With
packed documents it meets fewer; they are counted as one full row, so MFU is then slightly too high.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from models.config import ModelConfig
from training.estimate.counts import attention_costs
from training.optim.schedule import top_k_schedule

if TYPE_CHECKING:
    from torch import Tensor

    from training.config.sections import Config


def matmul_weights(
    config: ModelConfig, top_k: int | None = None, counts_LE: Tensor | None = None
) -> tuple[int, int]:
    """Weights in matrix products: those that one token meets, and all of them.

    Args:
        top_k: experts per token; default: the config's.
        counts_LE: tokens of each expert of each MoE layer, on the host; None: equally many.
    """
    wide = iter(mean_widths(config, counts_LE))
    d = config.hidden_size
    active = total = d * config.vocab_size
    for layer, attention in enumerate(attention_costs(config)):
        moe = config.moe_config(layer)
        active += attention.weights
        total += attention.weights
        if moe is None:
            active += 3 * d * config.intermediate_size
            total += 3 * d * config.intermediate_size
            continue
        sizes = moe.expert_widths or (moe.expert_size,) * moe.num_experts
        always = d * (moe.num_experts + 3 * moe.shared_expert_size + moe.shared_expert_gate)
        active += always + round((top_k or moe.num_experts_per_tok) * 3 * d * next(wide))
        total += always + 3 * d * sum(sizes)
    return active, total


def mean_widths(config: ModelConfig, counts_LE: Tensor | None = None) -> list[float]:
    """Mean width of the experts that tokens met in each MoE layer; `counts_LE` as above."""
    means = []
    for place, layer in enumerate(config.moe_layers):
        sizes = config.expert_widths(layer) or (config.expert_size,) * config.num_experts
        counts = [1.0] * len(sizes) if counts_LE is None else counts_LE[place].tolist()
        total = sum(counts) or 1.0
        means.append(sum(count * size for count, size in zip(counts, sizes)) / total)
    return means


def width_metrics(config: ModelConfig, counts_LE: Tensor | None) -> dict[str, float]:
    """Of experts of different widths, for the log; nothing where all are the same.

    active_width: mean width that tokens met, as a part of the mean of all experts', over layers.
    flop_violation: most arithmetic of one expert over the mean, minus 1, of the worst layer.
    """
    if not config.mixed_widths or counts_LE is None:
        return {}
    equal = sum(mean_widths(config))
    worst = 0.0
    for counts_E, layer in zip(counts_LE, config.moe_layers):
        work = [c * size for c, size in zip(counts_E.tolist(), config.expert_widths(layer))]
        worst = max(worst, max(work) * len(work) / max(sum(work), 1.0) - 1)
    return {"active_width": sum(mean_widths(config, counts_LE)) / equal, "flop_violation": worst}


def flops_per_token(
    config: ModelConfig, seq_len: int, top_k: int | None = None, counts_LE: Tensor | None = None
) -> float:
    """FLOPs of forward and backward pass for one token of a row of `seq_len`; `top_k` and
    `counts_LE` as above."""
    active, _ = matmul_weights(config, top_k, counts_LE)
    pair = sum(cost.scores + cost.values for cost in attention_costs(config))
    return 6.0 * active + 3.0 * pair * (seq_len + 1)


def counts_first(config: Config, accumulation: int) -> bool:
    """Whether a step's micro-batches go through the model once more beforehand, to be counted for
    the balance loss: a third more arithmetic, which the counts of FLOPs here leave out."""
    balance = config.router.balance
    return balance is not None and balance.kind == "global" and accumulation > 1


def run_flops(config: Config, steps: int) -> float:
    """Model FLOPs of `steps` full steps of a run, each with the experts per token that it has."""
    schedule = top_k_schedule(config, steps)
    tokens = config.train.global_batch_size * config.data.seq_len
    per_token: dict[int | None, float] = {}
    total = 0.0
    for step in range(1, steps + 1):
        k = schedule.k(step) if schedule is not None else None
        if k not in per_token:
            per_token[k] = flops_per_token(config.model.config, config.data.seq_len, k)
        total += tokens * per_token[k]
    return total
