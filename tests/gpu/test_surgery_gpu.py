"""Experts that come and go on a GPU: no waiting in a step, the same bits, cheap changes, nothing
compiled or captured anew."""

from __future__ import annotations

import dataclasses
import statistics
import time

import pytest
import torch

import train
from models.build import build_model, parameter_kinds
from models.config import ModelConfig
from moe import MoE, MoEConfig, RouterConfig
from moe.surgery import Change, change_layer
from tests.engines import local_engine
from tests.gpu.test_training import CUDA, WIDE
from tests.training.test_loop import batch_of, router, rows, take_step
from tests.training.test_surgery_runs import CHANGED, EVENTS, GLM, losses, of_run
from tests.training.tiny import write_inputs
from training.data.batch import make_batch
from training.optim.groups import parameter_groups
from training.surgery import changes as surgery
from training.surgery.changes import make_changes
from training.surgery.importance import ExpertImportance, down_projections

pytestmark = pytest.mark.gpu
QUANTILE = RouterConfig(
    score="sigmoid", bias={"kind": "quantile"}, balance={"kind": "micro", "coef": 0.01}
)


def build(config, setting=None, **options):
    model = build_model(
        ModelConfig(**config),
        dtype=torch.bfloat16,
        device=CUDA,
        seed=None,
        router=setting or router(),
        **options,
    )
    for parameter in model.parameters():  # where it is: the host would take long for a large one
        torch.nn.init.normal_(parameter, std=0.05)
    groups = parameter_groups(model, parameter_kinds(model), weight_decay=0.1)
    return model, local_engine(groups)


def importance_of(model, optimizer, how, slots):
    def weights():
        return down_projections(model, optimizer, slots)

    return ExpertImportance(
        len(model.layers), slots, how=how, decay=0.9, weights=weights, device=CUDA
    )


@pytest.mark.parametrize("how", ["load", "gate_mass", "reap", "taylor"])
def test_a_step_never_waits_for_the_device(how):
    slots = WIDE["num_experts"]
    model, optimizer = build(WIDE, QUANTILE, start_experts=slots - 1, importance=how)
    importance = importance_of(model, optimizer, how, slots)
    tokens, labels = rows()

    def step(number: int):
        batches = [batch_of(tokens, labels).pin_memory() for _ in range(2)]
        take_step(
            model, optimizer, batches, step=number, lr=0.01, device=CUDA,
            followers=[importance],
        )  # fmt: skip

    for number in (1, 2):
        step(number)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in (3, 4):
            step(number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (importance.importance_LE[:, : slots - 1] > 0).all()
    assert not importance.importance_LE[:, slots - 1 :].any()


@pytest.mark.parametrize("kernels", ["auto", "triton", "reference"])
def test_a_dormant_clone_changes_no_bit(kernels):
    torch.manual_seed(0)
    config = MoEConfig(512, 256, 32, 4, start_experts=24, kernels=kernels, router=QUANTILE)
    layer = MoE(config, device=CUDA, dtype=torch.bfloat16)
    x_BTD = torch.randn(2, 2048, 512, device=CUDA, dtype=torch.bfloat16)
    before, _ = layer(x_BTD)
    change_layer(layer, Change("clone", 27, 3), dormant=True, noise=0.01)
    after, stats = layer(x_BTD)
    assert torch.equal(before, after)
    assert stats.counts_E[24:].sum() == 0
    change_layer(layer, Change("retire", 3))
    _, stats = layer(x_BTD)
    assert stats.counts_E[3] == 0
    assert stats.counts_E.sum() == 4 * 4096


def words(folder):
    """A run with events, wide enough for tiles, without what else would be compiled."""
    keys = ("hidden_size", "moe_intermediate_size", "head_dim")
    wide = [f"model.{key}={WIDE[key]}" for key in keys]
    more = ["run.device=cuda", "train.steps=9", "eval.every_steps=null", "eval.rows=128"]
    return [str(write_inputs(folder / "inputs")), *GLM, *wide, EVENTS, *more]


def made(folder):
    return [(e["step"], e["layer"], e["change"]) for e in of_run(folder, *CHANGED)]


def test_a_captured_run_is_the_same(monkeypatch, tmp_path):
    """The graph reads the mask where it is."""
    monkeypatch.chdir(tmp_path)
    given = [*words(tmp_path), "train.compile=false"]
    assert train.main([*given, "run.name=plain"]) == 0
    assert train.main([*given, "train.cuda_graph=true", "run.name=captured"]) == 0
    plain, captured = (tmp_path / "runs" / name for name in ("plain", "captured"))
    assert len(made(plain)) == 4
    assert made(captured) == made(plain)
    assert losses(captured) == losses(plain)


def test_nothing_is_compiled_anew(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    graphs = []
    real = surgery.make_changes

    def make(*arguments, **keywords):
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return real(*arguments, **keywords)

    monkeypatch.setattr(surgery, "make_changes", make)
    torch._dynamo.reset()
    assert train.main([*words(tmp_path), "train.compile=true", "run.name=compiled"]) == 0
    assert len(made(tmp_path / "runs" / "compiled")) == 4
    assert graphs[0] > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs[0]


def long_batch(tokens_BL):
    """One document a row."""
    rows, length = tokens_BL.shape
    positions_BL = torch.arange(length).repeat(rows, 1)
    given = make_batch([None] * rows, ((-1, 0, 0),) * rows, length, 0)
    return dataclasses.replace(
        given,
        tokens_BL=tokens_BL,
        labels_BL=tokens_BL.roll(-1, 1),
        positions_BL=positions_BL,
        valid_BL=torch.ones_like(tokens_BL, dtype=torch.bool),
        num_targets=tokens_BL.numel(),
        num_tokens=tokens_BL.numel(),
    )


def test_a_change_costs_less_than_half_a_step():
    """OLMoE's experts, four layers of them: one change in each."""
    slots, layers = 64, 4
    config = {
        "family": "glm4_moe", "vocab_size": 50304, "hidden_size": 2048, "num_hidden_layers": layers,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": slots,
        "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "first_k_dense_replace": 0,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    model, optimizer = build(config, start_experts=slots - 1)
    importance = importance_of(model, optimizer, "taylor", slots)
    given = long_batch(torch.randint(0, 50304, (2, 4096)))
    times = []
    for number in range(1, 9):
        batches = [given.to(CUDA)]
        torch.cuda.synchronize()
        start = time.perf_counter()
        take_step(
            model, optimizer, batches, step=number, lr=1e-4, device=CUDA,
            followers=[importance],
        )  # fmt: skip
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    costs = []
    for attempt in range(4):
        kind, parent = ("clone", 3) if attempt % 2 == 0 else ("retire", None)
        changes = [Change(kind, slots - 1, parent, layer) for layer in range(layers)]
        torch.cuda.synchronize()
        start = time.perf_counter()
        make_changes(model, optimizer, changes, dormant=False, noise=0.01, seed=0, step=attempt)
        torch.cuda.synchronize()
        costs.append(time.perf_counter() - start)
    median = statistics.median(times[3:])
    told = f"step {1e3 * median:.1f} ms, changes {[round(1e3 * cost, 1) for cost in costs]} ms"
    print(told)
    assert max(costs[1:]) < 0.5 * median, told
