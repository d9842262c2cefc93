"""A whole run of the families whose attention is of another kind."""

from __future__ import annotations

import os
import signal

import pytest

from scripts import export_hf, import_hf
from tests.training.test_train import assert_same_run, before_step
from training.checkpoint.weights import load_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
RUN = (
    "train.steps=6", "optim.schedule.warmup_steps=0", "eval.every_steps=3",
    "train.checkpointing=selective",
)  # fmt: skip
LATENT = (
    "model.family=deepseek_v3", "model.head_dim=4", "model.num_key_value_heads=2",
    "model.intermediate_size=16", "model.q_lora_rank=6", "model.kv_lora_rank=8",
    "model.qk_nope_head_dim=4", "model.qk_rope_head_dim=4", "model.v_head_dim=6",
    "model.n_group=2", "model.topk_group=1", "model.num_experts=8", "model.first_k_dense_replace=1",
)  # fmt: skip


def test_deepseek_v3_trains_resumes_and_is_continued(run, tmp_path, monkeypatch) -> None:
    assert run("run.name=whole", *LATENT, *RUN) == 0
    with monkeypatch.context() as patch:
        before_step(patch, 4, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        assert run("run.name=stopped", *LATENT, *RUN) == 75
    assert run("run.name=stopped", *LATENT, *RUN) == 0
    assert_same_run(tmp_path / "runs/stopped", tmp_path / "runs/whole")
    config = load_model(tmp_path / "runs/whole").config
    assert (config.q_lora_rank, config.head_dim, config.moe_layers) == (6, 4, [1])
    assert export_hf.main(["runs/whole", "out", "--check"]) == 0
    assert import_hf.main(["out", "weights"]) == 0
    names = ("model.init_from=weights", "data.tokenizer=null", "model.rope_theta=5e4")
    assert run("run.name=on", *LATENT, *RUN, *names) == 0
