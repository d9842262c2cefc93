"""Weights continued on longer texts: another base, scaling and length beside `model.init_from`."""

from __future__ import annotations

import os
import signal

import pytest

from scripts import export_hf
from tests.training.test_train import assert_same_run, before_step, events
from training.checkpoint.weights import load_model
from training.config.build import ConfigError, load_config

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SHORT = ("train.steps=4", "optim.schedule.warmup_steps=0", "eval.every_steps=null", "eval.rows=128")
LONGER = (
    "model.init_from=runs/short",
    "model.rope_theta=50000",
    "model.rope_scaling={rope_type: yarn, factor: 2.0}",
    "model.max_position_embeddings=64",
    "data.seq_len=64",
)
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}


def test_trains_resumes_and_exports(run, tmp_path, monkeypatch, capsys) -> None:
    assert run("run.name=short", *SHORT) == 0
    capsys.readouterr()
    assert run("run.name=whole", *LONGER, *SHORT) == 0
    told = (
        "the weights of runs/short continue with max_position_embeddings: 32 → 64; "
        f"rope_theta: 10000.0 → 50000.0; rope_scaling: null → {YARN}"
    )
    assert told in " ".join(capsys.readouterr().out.split())
    whole = tmp_path / "runs/whole"
    assert [line["text"] for line in events(whole, "model_changed")] == [told]

    with monkeypatch.context() as patch:
        before_step(patch, 3, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        assert run("run.name=stopped", *LONGER, *SHORT) == 75
    assert run("run.name=stopped", *LONGER, *SHORT) == 0
    assert_same_run(tmp_path / "runs/stopped", whole)

    config = load_model(whole).config
    assert (config.rope_theta, config.rope_scaling) == (50_000.0, YARN)
    assert export_hf.main([str(whole), "out", "--check"]) == 0
    # and the scaling can be taken away again
    plain = ["run.name=x", "model.init_from=out", "model.rope_scaling=null", "data.tokenizer=null"]
    assert run(*plain, "model.max_position_embeddings=64", *SHORT, "train.steps=1") == 0


def test_what_is_not_of_positions_stays(run, tiny_config, tmp_path) -> None:
    assert run("run.name=short", *SHORT, "train.steps=1") == 0
    for words in (["model.hidden_size=32"], ["model.rms_norm_eps=1e-3", "model.rope_theta=7e4"]):
        with pytest.raises(ConfigError, match=r"contradicts model\.init_from") as caught:
            load_config(tiny_config, [*LONGER, *words])
        assert "rope_theta" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"data\.seq_len=128 .*max_position_embeddings=64"):
        load_config(tiny_config, [*LONGER, "data.seq_len=128"])
    with pytest.raises(ConfigError, match="rope_scaling of type yarn needs factor"):
        load_config(tiny_config, [*LONGER, "model.rope_scaling={rope_type: yarn}"])
