"""What to say when the device's memory runs out: how routing was spread, and what to lower.

Shape letters: L MoE layers, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from training.faults import RunFailed
from training.follower import Follower

if TYPE_CHECKING:
    from moe.types import RouterStats
    from training.config.sections import Config
    from training.run_state import RunState


class LastCounts(Follower):
    """Tokens per expert of the last micro-batch that this process finished; int [L, E]."""

    counts_LE: Tensor | None = None

    @staticmethod
    def make(
        config: Config, model: nn.Module, optimizer: object, device: torch.device, steps: int
    ) -> LastCounts:
        return LastCounts()

    def after_forward(self, stats: RouterStats) -> None:
        self.counts_LE = stats.counts_E


def out_of_memory(state: RunState, error: BaseException) -> RunFailed:
    """The error in one line, with what can be lowered, most effective first."""
    config = state.config
    lower: list[tuple[str, object]] = [("train.micro_batch_size", config.train.micro_batch_size)]
    if config.train.checkpointing != "full":
        lower.append(("train.checkpointing=full", config.train.checkpointing))
    if config.model.save == "h":
        lower.append(("model.save=x", "h"))
    lower.append(("data.seq_len", config.data.seq_len))
    last = state.train.follower(LastCounts)
    spread = "" if last is None or last.counts_LE is None else routing_spread(last.counts_LE)
    return RunFailed(
        f"out of memory on process {state.world.rank} at step {state.step}: "
        f"{str(error).splitlines()[0]}{spread}. To need less memory, lower or change: "
        + ", ".join(f"{name} (now {value})" for name, value in lower)
    )


def routing_spread(counts_LE: Tensor) -> str:
    """The load of the fullest expert, as the end of a sentence."""
    counts_LE = counts_LE.float().cpu()
    mean, worst = counts_LE.mean().item(), counts_LE.max().item()
    layer, expert = divmod(int(counts_LE.argmax()), counts_LE.shape[1])
    violation = worst / mean - 1 if mean else 0.0
    skewed = "; routing is skewed, so a larger router.balance.coef lowers the peak too"
    return (
        f". Tokens per expert of the last micro-batch: max {worst:.0f} (MoE layer {layer}, "
        f"expert {expert}), mean {mean:.0f}, max_violation {violation:.2f}"
        f"{skewed if violation > 1 else ''}"
    )
