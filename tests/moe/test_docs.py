"""The how-to pages of the layer and of the sparse matrices run as they stand."""

import re
from pathlib import Path

import pytest
import torch

import moe
import moe.sparse
from moe import config

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "least", "printed"),
    [
        ("moe.md", 8, "makes every gate the constant 1"),
        ("sparse.md", 6, "8 0.3"),
        ("surgery.md", 1, "[0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0]"),
    ],
)
def test_blocks_of_the_page_run_in_order(page, least, printed, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)
    assert len(blocks) >= least
    names: dict = {}
    for number, block in enumerate(blocks):
        try:
            exec(compile(block, f"{page}, block {number}", "exec"), names)
        except Exception as error:
            raise AssertionError(f"block {number} of {page} fails:\n{block}") from error
    assert printed in capsys.readouterr().out


def test_c15_the_layer_of_the_readme_trains_with_balance():
    text = (DOCS.parent / "README.md").read_text()
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "MoEConfig" in b]
    names: dict = {}
    exec(compile(block, "README.md", "exec"), names)
    layer, x = names["layer"], names["x"]
    found = layer.router.weight.grad.clone()
    y, stats = layer(x)
    (task,) = torch.autograd.grad(y.square().mean(), layer.router.weight, retain_graph=True)
    aux = 0.01 * moe.balance_loss(stats) + 0.001 * moe.z_loss(stats)
    (balance,) = torch.autograd.grad(aux, layer.router.weight)
    assert balance.norm() > 0
    torch.testing.assert_close(found, task + balance)


def test_c15_the_loss_of_stacked_statistics_is_that_of_all_layers():
    torch.manual_seed(0)
    router = moe.RouterConfig(balance={"coef": 0.5}, z_coef=0.25)
    layer = moe.MoE(moe.MoEConfig(8, 4, 4, 2, init_std=0.5, router=router))
    valid = torch.arange(20).view(2, 10) < 13
    stats = [layer(torch.randn(2, 10, 8), valid)[1] for _ in range(2)]
    both = moe.RouterStats.stack(stats)
    total, _ = moe.router_losses([layer.router] * 2, both, both.tokens[0])
    assert total.shape == ()
    torch.testing.assert_close(2 * total, sum(layer.loss(s) for s in stats))
    want = sum(0.5 * moe.balance_loss(s) + 0.25 * moe.z_loss(s) for s in stats)
    torch.testing.assert_close(2 * total, want)
    _, empty = layer(torch.randn(0, 8))
    assert layer.loss(empty).isfinite()


@pytest.mark.parametrize(
    ("pages", "package"), [(("moe.md", "routing.md"), moe), (("sparse.md",), moe.sparse)]
)
def test_every_public_name_is_explained(pages, package):
    text = "".join((DOCS / page).read_text() for page in pages)
    missing = [name for name in package.__all__ if name not in text]
    assert missing == []


def test_every_rule_has_its_line_in_the_table():
    """The line stands beside the rule, in moe/rules; docs/routing.md repeats it."""
    options = {
        "balance": config.BALANCES,
        "bias": config.BIASES,
        "rounding": {"": config.Rounding},
        "top_k": config.TOP_KS,
        "selection": config.SELECTIONS,
        "score": config.PROBABILITIES,
        "noise": config.NOISES,
        "capacity": {"": config.Capacity},
        "gradient": config.GRADIENTS,
    }
    lines = []
    for option, table in options.items():
        for kind, rule in table.items():
            name = f"{option}: {kind}" if kind else option
            touch, cost, runs = rule.line
            lines.append(f"| `{name}` | {touch} | {cost} | {rule.export} | {runs} |")
    page = (DOCS / "routing.md").read_text(encoding="utf-8")
    assert "\n".join(lines) in page
