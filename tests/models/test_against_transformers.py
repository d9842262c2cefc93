"""Our models against transformers' own: same numbers, same gradients, same training.

In float64, so that a difference is a different formula and not rounding.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from models.transformer import Decoder
from moe.balance import balance_loss
from tests.models.tiny import (
    CASES,
    FAMILIES,
    in_their_names,
    next_tokens,
    same_model_in_both,
    tiny_config,
    tokens,
    transformers_in_float64,
)


def pair(case: str, dtype: torch.dtype, **changes) -> tuple[Decoder, torch.nn.Module]:
    """Our model and transformers' with the same weights, put there by our table of names."""
    return same_model_in_both(tiny_config(case, **changes), dtype)


def assert_same_gradients(ours: Decoder, theirs: torch.nn.Module, tolerance: float) -> None:
    mine = in_their_names(ours, {name: p.grad for name, p in ours.named_parameters()})
    compared = 0
    for name, parameter in theirs.named_parameters():
        difference = (parameter.grad - mine[name]).norm() / parameter.grad.norm()
        assert difference <= tolerance, f"{name}: {difference:.1e}"
        assert parameter.grad.norm() > 0, name
        compared += 1
    assert compared == len(list(theirs.parameters())) > 20


@pytest.mark.parametrize("case", CASES)
def test_loss_logits_and_every_gradient(case: str) -> None:
    ours, theirs = pair(case, torch.float64)
    tokens_BL = tokens(ours.config, 2, 24)
    labels_BL = next_tokens(tokens_BL)
    labels_BL[0, 5:9] = -100
    with transformers_in_float64():
        logits_BLV = theirs(input_ids=tokens_BL).logits
    # transformers' own loss rounds the logits to float32
    loss = F.cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten(), reduction="sum")
    loss.backward()
    out = ours(tokens_BL, labels_BL=labels_BL, logits=True)
    out.loss_sum.backward()
    torch.testing.assert_close(out.loss_sum, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(out.logits, logits_BLV, rtol=1e-10, atol=1e-10)
    assert_same_gradients(ours, theirs, 1e-9)


def test_loss_is_the_one_that_transformers_reports() -> None:
    ours, theirs = pair("qwen3_moe", torch.float32)
    tokens_BL = tokens(ours.config, 3, 20)
    mean = theirs(input_ids=tokens_BL, labels=tokens_BL).loss
    total = ours(tokens_BL, labels_BL=next_tokens(tokens_BL)).loss_sum
    torch.testing.assert_close(total / (3 * 19), mean, rtol=1e-5, atol=0)


def test_positions_given_are_used() -> None:
    ours, theirs = pair("glm4_moe", torch.float64)
    tokens_BL = tokens(ours.config, 2, 12)
    positions_BL = torch.stack([torch.arange(12) * 2, torch.arange(12) + 30])
    with transformers_in_float64(), torch.no_grad():
        expected = theirs(input_ids=tokens_BL, position_ids=positions_BL).logits
        moved = ours(tokens_BL, positions_BL=positions_BL, logits=True).logits
        plain = ours(tokens_BL, logits=True).logits
    torch.testing.assert_close(moved, expected, rtol=1e-9, atol=1e-9)
    assert (plain - expected).abs().max() > 1e-3


@pytest.mark.parametrize("case", ["qwen3_moe", "olmoe", "mixtral"])
def test_their_auxiliary_loss_from_our_statistics(case: str) -> None:
    """Theirs takes all layers' tokens together and counts slots, not slots / K: balanced = K.

    One of the rows has padding at its end, which must not count. They sum in float32.
    """
    ours, theirs = pair(case, torch.float64)
    tokens_BL = tokens(ours.config, 2, 16)
    valid_BL = torch.ones(2, 16, dtype=torch.bool)
    valid_BL[1, 10:] = False
    with transformers_in_float64():
        expected = theirs(
            input_ids=tokens_BL, attention_mask=valid_BL.long(), output_router_logits=True
        ).aux_loss
    expected.backward()

    stats = ours(tokens_BL, valid_BL=valid_BL).router
    rows = stats.tokens.sum()
    fraction_E = stats.counts_E.sum(0) / rows
    aux = ours.config.num_experts * (fraction_E * stats.prob_sum_E.sum(0) / rows).sum()
    aux.backward()
    torch.testing.assert_close(aux.float(), expected.float(), rtol=1e-5, atol=0)
    assert 1.9 < aux < 4
    mine = in_their_names(ours, {name: p.grad for name, p in ours.named_parameters()})
    routers = [name for name, _ in theirs.named_parameters() if name.endswith("mlp.gate.weight")]
    assert len(routers) == len(ours.config.moe_layers)
    for name in routers:
        grad = theirs.get_parameter(name).grad
        assert grad.norm() > 1e-4
        torch.testing.assert_close(mine[name], grad, rtol=1e-4, atol=1e-5 * grad.abs().max())


@pytest.mark.parametrize("case", ["qwen3_moe", "olmoe_norm", "mixtral"])
def test_our_balance_loss_from_their_router_logits(case: str) -> None:
    """Ours is per layer, 1.0 = balanced: experts · Σ share of slots · mean probability."""
    ours, theirs = pair(case, torch.float64)
    config = ours.config
    tokens_BL = tokens(config, 2, 16)
    with transformers_in_float64():
        logits = theirs(input_ids=tokens_BL, output_router_logits=True).router_logits
    assert len(logits) == len(config.moe_layers)
    expected = []
    for logits_TE in logits:
        probability_TE = logits_TE.softmax(-1)
        chosen_TK = probability_TE.topk(config.num_experts_per_tok).indices
        share_E = torch.bincount(chosen_TK.flatten(), minlength=config.num_experts).double()
        share_E /= share_E.sum()
        expected.append(config.num_experts * (share_E * probability_TE.mean(0)).sum())
    expected = torch.stack(expected)
    expected.sum().backward()

    per_layer = balance_loss(ours(tokens_BL).router)
    per_layer.sum().backward()
    torch.testing.assert_close(per_layer, expected, rtol=1e-9, atol=0)
    mine = in_their_names(ours, {name: p.grad for name, p in ours.named_parameters()})
    for name, parameter in theirs.named_parameters():
        if parameter.grad is not None and parameter.grad.norm() > 0:
            difference = (mine[name] - parameter.grad).norm() / parameter.grad.norm()
            assert difference < 1e-9, name


@pytest.mark.parametrize("case", FAMILIES)
def test_fifty_steps_of_training(case: str) -> None:
    """The same AdamW on both, in float32: losses stay together."""
    ours, theirs = pair(case, torch.float32, initializer_range=0.1, num_hidden_layers=2)
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizers = [torch.optim.AdamW(model.parameters(), **settings) for model in (ours, theirs)]
    losses = []
    for step in range(50):
        # sequences that count upwards, so that there is something to learn
        start_B1 = torch.randint(3, 90, (4, 1), generator=torch.Generator().manual_seed(step))
        tokens_BL = 3 + (start_B1 + torch.arange(16)) % 90
        loss = ours(tokens_BL, labels_BL=next_tokens(tokens_BL)).loss_sum / (4 * 15)
        reference = theirs(input_ids=tokens_BL, labels=tokens_BL).loss
        for optimizer, value in zip(optimizers, (loss, reference), strict=True):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        losses.append((loss.item(), reference.item()))
    worst = max(abs(a - b) / b for a, b in losses)
    assert worst <= 1e-5, losses
    assert losses[-1][0] < 0.8 * losses[0][0], losses
