"""One rank without the others: what it sends comes back, and whole steps of it are timed."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from parallel.exchange.dispatch import DispatchPlan, steps_of
from parallel.exchange.transport import Split
from scripts.bench import parallel as bench  # its processes import it by this name
from scripts.bench.fake_ranks import Mirror, mirrored
from scripts.bench.ranks import cases


@pytest.mark.parametrize(("ranks", "kind", "chunks"), [(2, "all_to_all", 2), (4, "pairwise", 1)])
@pytest.mark.parametrize("skew", [1, 3])
def test_a_rank_gets_what_it_sends_as_often_as_asked(ranks, kind, chunks, skew):
    plan = DispatchPlan(ranks, 4, chunks, kind)
    own_B2 = np.random.default_rng(0).integers(1, 50, (plan.bins, 2))
    if kind == "all_to_all":
        own_B2[:-1].reshape(chunks, ranks, 2)[:, 0] = 0  # what stays here is in the last bin
    counts_NB2 = mirrored(np.stack([own_B2] * ranks), skew)
    for step in steps_of(counts_NB2, plan, 0):
        for split in (step.rows, step.pairs):
            assert sum(split.send) > 0
            assert sum(split.receive) == skew * sum(split.send)
            if kind == "all_to_all":
                assert split.receive == [skew * rows for rows in split.send]


def test_rows_come_back_in_multiples():
    rows = torch.arange(6.0).view(3, 2)
    split = Split(np.array([[0, 3], [6, 0]]), 0)
    there = Mirror().start(rows, split).wait()
    assert torch.equal(there, torch.cat([rows, rows]))
    assert torch.equal(Mirror().start(there, split.reversed()).wait(), rows)


def test_the_layouts_to_measure():
    names = [case.name for case in cases([1, 2, 8], [1, 2, 8], ["fsdp2"], [1, 2])]
    assert names[0] == "one process"
    assert "2 ranks, fsdp2, not split" in names
    assert "8 ranks, fsdp2, within_node over 8, pairwise, skew 2" in names
    assert not [name for name in names if "2 ranks" in name and "over 8" in name]
    assert not [name for name in names if "all_gather, skew" in name]


def test_whole_steps_of_one_rank_of_eight(tmp_path):
    arguments = ["rank", "configs/quickstart.yaml", "--small", "--ranks", "1,8", "--repeats", "1"]
    arguments += ["--modes", "one|fsdp2.*across.*(2 chunks|all_gather)$", "--out", str(tmp_path)]
    settings = ["data.seq_len=32", "train.micro_batch_size=2", "run.device=cpu"]
    assert bench.main([*arguments, *settings]) == 0
    rows = json.loads((tmp_path / "rank.json").read_text())["rows"]
    assert [row["rank"].rsplit(", ", 1)[-1] for row in rows] == [
        "one process",
        "2 chunks",
        "all_gather",
    ]
    for row in rows:
        assert row["tokens/s"] == pytest.approx(2 * 32 / row["step ms"] * 1e3)
    assert "2 node(s) × 4 local" in rows[1]["plan"]
    assert "experts split over 2 (across_nodes)" in rows[1]["plan"]


def test_an_unknown_rank_is_named(capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(["rank", "configs/quickstart.yaml", "--ranks", "2", "--modes", "teleport"])
    assert stop.value.code == 2
    assert "--modes='teleport' finds none" in capsys.readouterr().err
