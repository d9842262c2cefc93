"""Text from a model: greedy or sampled, token by token with a cache.

    sampling = Sampling(temperature=0.8, top_p=0.9, seed=1)
    for new in generate(model, prompts, sampling, max_new_tokens=64):
        ...  # one token per prompt, or None where a prompt has ended

Shape letters: B prompts, L prompt length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.errors import UserError
from models.transformer import Decoder


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The defaults are greedy."""

    temperature: float = 0.0
    """0: the most likely token. Otherwise logits are divided by it."""
    top_k: int | None = None
    """Keep the k most likely tokens."""
    top_p: float | None = None
    """Keep the most likely tokens whose probabilities first reach p (arXiv 1904.09751)."""
    seed: int = 0
    """Of the draws; the same seed gives the same text on the same kind of device."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature={self.temperature} must be 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k={self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must be above 0 and at most 1")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise UserError("top_k and top_p do nothing at temperature=0; give a temperature")


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling | None = None,
    *,
    max_new_tokens: int,
    eos_token_ids: Sequence[int] | None = None,
    settle: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[list[int | None]]:
    """Continue every prompt; yields one list per step, a token or None (ended) for each prompt.

    Args:
        prompts: token ids, of any lengths of at least 1.
        eos_token_ids: tokens that end a prompt (the token itself is yielded); default: the
            model's. An empty list never ends early.
        max_new_tokens: at most so many for each.
        settle: called with the next tokens [B]; returns those that count. Processes that share a
            model agree there, as their last bits may differ and all must make the same steps.

    Routing is plain top-K and every token is routed alone, so a prompt's text does not depend on
    the others beside it, up to rounding. The model is put into evaluation mode for the time being.
    ValueError for an empty prompt or ids outside the vocabulary.
    """
    sampling = sampling or Sampling()
    stop = set(model.config.eos_token_ids if eos_token_ids is None else eos_token_ids)
    vocab = model.config.vocab_size
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise UserError("generate: every prompt needs at least one token")
    if any(not 0 <= token < vocab for prompt in prompts for token in prompt):
        raise UserError(f"generate: prompt tokens must be in [0, {vocab})")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens} must be at least 1")
    return _generate(model, prompts, sampling, max_new_tokens, stop, settle)


def _generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    max_new_tokens: int,
    stop: set[int],
    settle: Callable[[Tensor], Tensor] | None,
) -> Iterator[list[int | None]]:
    weight = model.norm.weight
    device = weight.device
    lengths = [len(prompt) for prompt in prompts]
    tokens_BL = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
    valid_BL = torch.zeros_like(tokens_BL, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        tokens_BL[row, : len(prompt)] = torch.tensor(prompt)
        valid_BL[row, : len(prompt)] = True
    tokens_BL, valid_BL = tokens_BL.to(device), valid_BL.to(device)

    dtype = model.compute_dtype or weight.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    capacity = max(lengths) + max_new_tokens
    cache = model.new_cache(len(prompts), capacity, device, dtype)
    generator = torch.Generator(device).manual_seed(sampling.seed)
    ended = [False] * len(prompts)
    training = model.training
    model.eval()
    try:
        for step in range(max_new_tokens):
            with torch.no_grad():
                valid = valid_BL if step == 0 else None
                out = model(tokens_BL, valid_BL=valid, cache=cache, logits="last")
                next_B = choose(out.logits, sampling, generator)
            if settle is not None:
                next_B = settle(next_B)
            chosen = next_B.tolist()
            yield [None if done else token for done, token in zip(ended, chosen, strict=True)]
            ended = [done or token in stop for done, token in zip(ended, chosen, strict=True)]
            if all(ended):
                return
            tokens_BL = next_B[:, None]
    finally:
        model.train(training)


def choose(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Next token of each row, int64 [B]."""
    logits_BV = logits_BV.float()
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_k is not None:
        least_B1 = logits_BV.topk(min(sampling.top_k, logits_BV.shape[-1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    if sampling.top_p is not None:
        sorted_BV, order_BV = logits_BV.sort(descending=True, stable=True)
        p_BV = sorted_BV.softmax(-1)
        # Out is what stands behind tokens that already reach p: the most likely always stays.
        out_BV = p_BV.cumsum(-1) - p_BV >= sampling.top_p
        out_BV = out_BV.scatter(1, order_BV, out_BV)
        logits_BV = logits_BV.masked_fill(out_BV, -torch.inf)
    return torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)[:, 0]
