"""Validation loss and a sample of text; training continues as if nothing had happened.

Random states are put back, the model's mode too, and router statistics are outputs that are thrown
away, so a run with validation takes exactly the steps of one without.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from models.generate import Sampling, generate
from moe.control import routers_of
from parallel import World, broadcast_, sum_
from training.device import untouched_rng

if TYPE_CHECKING:
    from models.transformer import Decoder
    from training.data import Batch, TextTokenizer


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; modes and random states are put back."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), untouched_rng():
            yield
    finally:
        model.train(was_training)


def on_schedule(model: nn.Module) -> bool:
    """Whether training now uses other experts per token than evaluation does."""
    return any(rule.scheduled for router in routers_of(model) for rule in router.rules.values())


def validate(
    model: Decoder, sources: Mapping[str, Iterable[Batch]], *, world: World, device: torch.device
) -> dict[str, float]:
    """Mean loss per target and its perplexity, over everything and per source.

    Every process must bring equally many batches of each source (an empty batch where it has
    fewer), as the model may exchange tokens inside. One transfer at the end.

    Returns:
        val_loss, val_perplexity, and with several sources `val_loss/NAME`, `val_perplexity/NAME`. A
        source without any target is left out.
    """
    names = list(sources)
    sums = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
    with evaluation(model):
        for row, name in zip(sums, names):
            for batch in sources[name]:
                batch = batch.to(device, non_blocking=True)
                out = model(batch.tokens_BL, **batch.model_kwargs)
                row[0] += out.loss_sum
                row[1] += batch.num_targets
    table = dict(zip(names, sum_(world, sums).tolist()))
    metrics: dict[str, float] = {}

    def add(suffix: str, loss_sum: float, targets: float) -> None:
        if targets:
            metrics[f"val_loss{suffix}"] = loss_sum / targets
            metrics[f"val_perplexity{suffix}"] = perplexity(loss_sum / targets)

    add("", sum(row[0] for row in table.values()), sum(row[1] for row in table.values()))
    if len(names) > 1:
        for name, (loss_sum, targets) in table.items():
            add(f"/{name}", loss_sum, targets)
    return metrics


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf


def sample_text(
    model: Decoder, tokenizer: TextTokenizer, prompt: str, tokens: int, *, world: World
) -> str:
    """The model's continuation of a prompt, drawn with a fixed seed; without the prompt itself.
    It begins as documents do in training.

    All processes call it; the first one's draws count for all.
    """
    ids = tokenizer.prompt(prompt)
    sampling = Sampling(temperature=0.8, top_p=0.95)
    # Every new token has another length: compiled blocks would be compiled again and again.
    with evaluation(model), torch.compiler.set_stance("force_eager"):
        steps = generate(
            model, [ids], sampling, max_new_tokens=tokens, settle=partial(broadcast_, world)
        )
        return tokenizer.decode(token for (token,) in steps if token is not None)
