#!/usr/bin/env python3
"""Do routers of amplitudes do anything that softmax does not? A test small enough for a CPU.

    python scripts/null_amplitudes.py                 # 8 seeds, some minutes on one core
    python scripts/null_amplitudes.py --seeds 2 --steps 50

A layer learns a target that needs routing: tokens come in as many clusters as the teacher has
experts, each with a linear map of its own. Arms differ in the router alone, and start from the same
experts and see the same tokens for a seed; all draw their experts at a temperature that falls to
plain top-K at three quarters, but for the first. `softmax, twice the rows` gives softmax as many
router weights as amplitudes have (the logit is the sum of two rows), so arms have equal parameters
and FLOPs. Reported: error of plain top-K on new tokens as a share of the target's variance, mean ±
standard error over seeds, and the difference from softmax in pairs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from moe import MoE, MoEConfig, RouterControl, auxiliary_loss, begin_step

D, E, K, TOKENS = 16, 16, 2, 256


class TwoRows(nn.Module):
    """A router weight [E, D] as the sum of two, each with a gradient of its own."""

    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.layer = layer
        self.other = nn.Parameter(torch.randn_like(layer.router.weight) * layer.config.init_std)

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        weight = self.layer.router.weight
        both = {"router.weight": weight + self.other}
        return torch.func.functional_call(self.layer, both, (x,))


def arm(name: str, steps: int) -> nn.Module:
    drawn = name != "softmax, top-K"
    layer = MoE(
        MoEConfig(
            hidden_size=D,
            expert_size=16,
            num_experts=E,
            num_experts_per_tok=K,
            init_std=0.2,
            amplitude="amplitudes" in name,
            sample_temperature=1.0 if drawn else 0.0,
            control=RouterControl(sample_until=max(1, steps * 3 // 4) if drawn else None),
            kernels="reference",
        )
    )
    return TwoRows(layer) if "twice" in name else layer


ARMS = ("softmax, drawn", "softmax, top-K", "softmax, twice the rows, drawn", "amplitudes, drawn")


def task(seed: int) -> tuple[Tensor, Tensor]:
    """Centres of the clusters and the map of each."""
    generator = torch.Generator().manual_seed(1000 + seed)
    centres_ED = torch.randn(E, D, generator=generator) * 1.5
    return centres_ED, torch.randn(E, D, D, generator=generator) / D**0.5


def batch(centres_ED: Tensor, maps: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    e = torch.randint(0, E, (count,), generator=generator)
    x = centres_ED[e] + torch.randn(count, D, generator=generator)
    return x, torch.einsum("td,tdo->to", x, maps[e])


def run(name: str, seed: int, steps: int) -> float:
    """Error of plain top-K after training, as a share of the target's variance."""
    torch.manual_seed(seed)
    model = arm(name, steps)
    centres, maps = task(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        begin_step(model, step)
        x, target = batch(centres, maps, TOKENS, seed * 100_000 + step)
        y, stats = model(x)
        loss = (y - target).square().mean()
        loss = loss + auxiliary_loss(stats, step_tokens=TOKENS, balance_coef=0.01)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    x, target = batch(centres, maps, 8192, 7)
    with torch.no_grad():
        return float((model(x)[0] - target).square().mean() / target.var())


def spread(values: list[float]) -> str:
    """Mean ± standard error, which one value does not have."""
    mean, count = f"{statistics.mean(values):+.4f}", len(values)
    return mean + (f" ± {statistics.stdev(values) / count**0.5:.4f}" if count > 1 else "")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args(arguments)
    found: dict[str, list[float]] = {name: [] for name in ARMS}
    for seed in range(args.seeds):
        for name in ARMS:
            found[name].append(run(name, seed, args.steps))
        print(
            f"seed {seed}: " + ", ".join(f"{n} {v[-1]:.4f}" for n, v in found.items()), flush=True
        )
    print("| arm | error | difference in pairs |\n|---|---|---|")
    for name, values in found.items():
        pairs = [a - b for a, b in zip(values, found[ARMS[0]])]
        difference = "" if name == ARMS[0] else spread(pairs)
        print(f"| {name} | {spread(values).lstrip('+')} | {difference} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
