"""Training with experts of different widths: balance in arithmetic, and what is refused."""

from __future__ import annotations

import pytest
import torch

from models.build import build_model, parameter_kinds
from models.config import ModelConfig
from moe.balance import balance_loss, flop_weights
from moe.control import router_losses, routers_of
from moe.types import RouterStats
from tests.engines import local_engine
from tests.moe.test_metrics import stats_of
from tests.training.test_loop import CPU, batch_of, router, rows, take_step
from tests.training.tiny import MODEL
from training.assemble import router_options
from training.config.build import ConfigError, load_config, make_plan
from training.estimate.flops import width_metrics
from training.optim.groups import parameter_groups

WIDTHS = [2, 4, 8, 8]
WORDS = ["model.moe_expert_widths=[2,4,8,8]", "router.balance.load=flops"]


def test_equal_widths_balance_as_one_width():
    stats = stats_of([6, 4, 2], [4.0, 6.0, 2.0])
    work_E = flop_weights(((5, 5, 5),), CPU)[0]
    assert torch.equal(work_E, torch.ones(3))
    assert torch.equal(balance_loss(stats, stats.counts_E * work_E), balance_loss(stats))


def test_equal_arithmetic_scores_one_and_wide_experts_weigh_more():
    widths = torch.tensor([1.0, 2.0, 4.0])
    work_E = flop_weights(((1, 2, 4),), CPU)[0]
    even = stats_of([40, 20, 10], [23.0, 23.0, 24.0])
    assert balance_loss(even, even.counts_E * work_E).item() == pytest.approx(1.0)
    # by hand: E · sum of (f n / sum of f n) · P
    stats = stats_of([10, 20, 30], [30.0, 20.0, 10.0])
    load = torch.tensor([10.0, 20.0, 30.0]) * widths
    want = 3 * (load / load.sum() * torch.tensor([30.0, 20.0, 10.0]) / 60).sum()
    tokens = stats.tokens.item()
    got = balance_loss(stats, stats.counts_E * work_E).item()
    assert got == pytest.approx(want.item() * 60 / tokens)


def train(load: str, steps: int = 60) -> dict[str, float]:
    config = ModelConfig(**MODEL, moe_expert_widths=WIDTHS)
    model = build_model(config, seed=1, router=router(balance=1.0, load=load))
    groups = parameter_groups(model, parameter_kinds(model), weight_decay=0.0)
    optimizer = local_engine(groups, clip_norm=1.0)
    batches = [batch_of(*rows())]
    for step in range(1, steps + 1):
        result = take_step(model, optimizer, batches, step=step)
    return width_metrics(config, result.stats.counts_E)


def test_narrow_experts_get_more_tokens_where_arithmetic_is_balanced():
    by_tokens, by_work = train("tokens"), train("flops")
    assert by_work["flop_violation"] < 0.6 * by_tokens["flop_violation"]
    assert by_work["active_width"] < by_tokens["active_width"]


def test_the_micro_batch_s_own_load_is_weighed_too():
    config = ModelConfig(**MODEL, moe_expert_widths=WIDTHS)
    routers = routers_of(build_model(config, router=router(balance=1.0, load="flops")))
    stats = RouterStats.stack([stats_of([4, 4, 4, 4], [8.0, 4, 2, 2])] * 2)
    own, _ = router_losses(routers, stats, 16)
    told, _ = router_losses(routers, stats, 16, stats.counts_E)
    assert torch.equal(own, told)
    work_LE = torch.tensor([[2.0, 4, 8, 8]] * 2) / 5.5
    torch.testing.assert_close(own, balance_loss(stats, stats.counts_E * work_LE).mean())


def test_biases_aim_at_equal_arithmetic(tiny_config):
    glm = ["model.family=glm4_moe", "model.first_k_dense_replace=0", *WORDS]
    for words, targets in ((glm, (1 / 2, 1 / 4, 1 / 8, 1 / 8)), (glm[:-1], None)):
        config = load_config(tiny_config, words)
        model = config.model.config
        options = router_options(config, model, 8)
        forms = [model.moe_config(layer, **options).form for layer in model.moe_layers]
        assert [form.shares for form in forms] == [targets] * 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["router.balance.load=flops"],
            "router.balance.load='flops' needs model.moe_expert_widths",
        ),
        ([*WORDS, "router.balance.kind=sequence"], "router.balance.load='flops' is no key of kind"),
        ([*WORDS, "model.kernels=spmm"], "kernels='spmm' computes experts of one width only"),
        ([*WORDS, "experts.policy.kind=revive"], "experts.policy.kind='revive' takes all experts"),
        (["model.moe_expert_widths=[2,4,6,6]"], "must be the widest of moe_expert_widths, 6"),
    ],
)
def test_what_does_not_go_together_is_refused(tiny_config, words, expected):
    with pytest.raises(ConfigError) as caught:
        make_plan(load_config(tiny_config, words), cuda=False)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_processes_are_refused(tiny_config):
    config = load_config(tiny_config, WORDS)
    make_plan(config, 1, cuda=False)
    with pytest.raises(ConfigError, match=r"model\.moe_expert_widths works in one process only"):
        make_plan(config, 2, cuda=False)
