"""scripts/verify.py: finds layouts equal, and sees every kind of difference."""

import re

import pytest
import torch

from models.config import ModelConfig
from parallel.exchange.all_to_all import Float8
from parallel.flat_shard import FlatShard
from scripts import verify
from tests.models.tiny import CASES, DENSE_FAMILIES, tiny_config
from training.config.build import ConfigError, load_config


def test_a_layout_is_equal_to_one_process(capsys):
    arguments = ["configs/quickstart.yaml", "--nproc", "2", "parallel.nodes=2",
                 "parallel.expert=2", "run.device=cpu",
                 "router.balance.kind=global", "--timeout", "200"]  # fmt: skip
    assert verify.main(arguments) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert "experts split over 2 (across_nodes)" in out
    assert "; fsdp2" in out
    assert "reduced model: hidden size 64, 2 layers, 16 experts, 2 per token; float32" in out
    for compared in (
        "gradient",
        "weights",
        "routed tokens 2",
        "balance_loss 1",
        "grad_norm/router",
    ):
        assert compared in out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.expret=2"], "did you mean parallel.expert?"),
        (["parallel.nodes=3"], r"parallel\.nodes=3 does not divide the 4 processes"),
        (["parallel.nodes=two"], r"parallel\.nodes='two'"),
        (["parallel.exchange.kind=ring"], r"parallel\.exchange\.kind='ring'"),
        (["model.hidden_sise=3"], "hidden_sise"),
        (["--nproc", "0"], "--nproc: 0 must be at least 2"),
        (["--nproc", "1"], "--nproc: 1 must be at least 2"),
        (["--micro-batches", "0"], "--micro-batches: 0 must be at least 1"),
        (["--timeout", "0"], "--timeout: 0"),
    ],
)
def test_mistakes_end_with_2_and_one_line(capsys, overrides, message):
    with pytest.raises(SystemExit) as stop:
        verify.main(["configs/quickstart.yaml", "--nproc", "4", *overrides])
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert re.search(message, told), told


@pytest.mark.parametrize("case", CASES)
def test_the_small_model_keeps_the_architecture(case):
    dense = CASES[case]["family"] in DENSE_FAMILIES
    config = tiny_config(case, num_hidden_layers=6, **({} if dense else {"num_experts": 8}))
    small = verify.shrink(config)
    kept = (
        "family",
        "num_experts",
        "num_experts_per_tok",
        "norm_topk_prob",
        "attention_bias",
        "tie_word_embeddings",
        "n_group",
        "n_shared_experts",
        "rope_scaling",
        "clip_qkv",
    )
    for name in kept:
        assert getattr(small, name, None) == getattr(config, name, None), name
    assert len(small.moe_layers) in ((0,) if dense else (1, 2))
    assert [small.is_moe_layer(i) for i in range(small.num_hidden_layers)] == [
        config.is_moe_layer(i) for i in range(small.num_hidden_layers)
    ]


def test_published_architectures_get_small():
    small = verify.shrink(
        ModelConfig(family="glm4_moe", head_dim=128, eos_token_id=[151329, 151336])
    )
    assert (small.num_experts, small.hidden_size, small.num_hidden_layers) == (128, 64, 3)


def _one() -> dict:
    torch.manual_seed(0)
    start = {name: torch.randn(12) for name in ("a", "b")}
    return {
        "numbers": [{"loss": 2.0, "grad_norm": 1.0}, {"loss": 1.9, "grad_norm": 1.1}],
        "counts": [torch.tensor([[3, 5]]), torch.tensor([[4, 4]])],
        "start": start,
        "gradient": {name: torch.randn(12) for name in start},
        "weights": {name: value + 0.01 * torch.randn(12) for name, value in start.items()},
    }


def _layout() -> list[dict]:
    """Two ranks that each hold half of everything."""
    one, ranks = _one(), []
    for start in (0, 6):
        rank = {"numbers": [dict(n) for n in one["numbers"]], "counts": list(one["counts"])}
        for kind in ("start", "gradient", "weights"):
            rank[kind] = {
                name: FlatShard(value[start : start + 6].clone(), start, 12)
                for name, value in one[kind].items()
            }
        ranks.append(rank)
    return ranks


def _differing(ranks: list[dict]) -> list[str]:
    rows = verify.compare(_one(), verify.put_together(ranks))
    return [row.what for row in rows if not row.good]


def test_equal_results_compare_equal():
    assert _differing(_layout()) == []


def test_every_difference_is_seen():
    ranks = _layout()
    ranks[1]["gradient"]["b"].local[3] *= 1.01
    assert _differing(ranks) == ["gradient b"]
    ranks = _layout()
    ranks[0]["weights"]["a"].local.add_(0.001)
    assert _differing(ranks) == ["weights a"]
    ranks = _layout()
    for rank in ranks:
        rank["numbers"][1]["grad_norm"] *= 1.0001
        rank["counts"][0] = torch.tensor([[4, 4]])
    assert _differing(ranks) == ["routed tokens 1", "grad_norm 2"]
    ranks = _layout()
    ranks[1]["numbers"][0]["loss"] = float("nan")
    assert _differing(ranks) == ["all ranks alike"]
    ranks[0]["numbers"][0]["loss"] = float("nan")
    assert _differing(ranks) == ["loss 1", "all ranks alike"]
    ranks = _layout()
    ranks[0]["gradient"]["a"].local.fill_(float("nan"))
    assert _differing(ranks) == ["gradient a"]
    ranks = _layout()
    ranks[1]["start"]["a"].local[0] += 1e-6
    assert _differing(ranks) == ["first weights a"]


def test_float8_has_tolerances_that_a_broken_one_exceeds(capsys, monkeypatch):
    arguments = ["configs/quickstart.yaml", "--nproc", "2", "parallel.nodes=2",
                 "parallel.expert=2", "run.device=cpu",
                 "parallel.exchange.payload=float8", "--timeout", "200"]  # fmt: skip
    assert verify.main(arguments) == 0, capsys.readouterr().out
    assert re.search("gradient (experts|others)", capsys.readouterr().out)
    monkeypatch.setattr(verify, "as_layout", _as_layout_with_large_rows)
    assert verify.main(arguments) == 1
    assert re.search("gradient experts .*<- differs", capsys.readouterr().out)


def _as_layout_with_large_rows(*arguments):
    decode = Float8.decode
    Float8.decode = lambda self, wire: 1.25 * decode(self, wire)
    return verify.as_layout(*arguments)


def test_what_one_process_alone_can_do_is_told(capsys):
    with pytest.raises(SystemExit) as stop:
        verify.main(["configs/mixed_widths.yaml", "--nproc", "2", "parallel.nodes=2"])
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "works in one process only" in told
    with pytest.raises(ConfigError, match="at small widths: moe_intermediate_size=32 must"):
        verify.shrink(load_config("configs/mixed_widths.yaml").model.config)


def test_a_lost_shard_is_told():
    ranks = _layout()
    del ranks[1]
    with pytest.raises(ValueError, match="no shard holds elements 6 to 12 of 12"):
        verify.put_together(ranks)


def test_the_table_shows_what_differs():
    ranks = _layout()
    ranks[1]["gradient"]["b"].local[3] *= 1.01
    rows = verify.compare(_one(), verify.put_together(ranks))
    text = verify.table(rows, everything=False)
    assert "gradient b" in text and "gradient a" not in text and "<- differs" in text
    assert "gradient a" in verify.table(rows, everything=True)
