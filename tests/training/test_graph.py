"""What of captured steps can be seen without a GPU: fixed buffers, forms, and refusals."""

from __future__ import annotations

import pytest
import torch

from models.config import ModelConfig
from models.documents import Documents
from moe.config import RouterConfig
from moe.control import routers_of
from moe.kernels.common.activations import ACTIVATIONS
from tests.training.test_loop import batch_of, rows
from training import graph as module
from training.config.build import ConfigError, load_config, make_plan
from training.graph import StepGraph, computation, pad_documents, places


def batches(shift: int, documents: list[int] | None = None):
    tokens, labels = rows()
    batch = batch_of(tokens.roll(shift, 1), labels.roll(shift, 1))
    if documents is not None:
        object.__setattr__(batch, "documents", Documents.from_lengths(documents))
    return [batch]


def test_padded_documents_end_with_empty_ones():
    padded = pad_documents(Documents.from_lengths([3, 5]), 4)
    assert padded.cu_seqlens_N1.tolist() == [0, 3, 8, 8, 8]
    assert padded.cu_seqlens_N1.dtype == torch.int32
    assert padded.lengths == (3, 5, 0, 0)
    padded.check(1, 8)
    with pytest.raises(ValueError, match="2 documents do not fit 1 places"):
        pad_documents(Documents.from_lengths([3, 5]), 1)


def test_work_sees_the_numbers_of_its_step_in_the_same_buffers(monkeypatch):
    """Two runs as they are, one that is captured, then replays; another form starts over."""
    monkeypatch.setattr(module, "FEWEST_DOCUMENTS", 2)
    calls, replays = [], []

    def work(given, targets, tokens):
        calls.append(given[0].tokens_BL)
        return given[0].tokens_BL.sum() + targets, given[0].documents.cu_seqlens_N1 + tokens.int()

    class Graph:
        def __init__(self, form):
            self.form = form

        def replay(self):
            replays.append(self.form)
            form = self.form
            for kept, new in zip(form.result, work(form.batches, form.targets, form.tokens)):
                kept.copy_(new)

    def capture(self, form, work):
        form.graph, form.result = Graph(form), work(form.batches, form.targets, form.tokens)

    monkeypatch.setattr(StepGraph, "_capture", capture)
    now = ["one"]
    graph, results = StepGraph(lambda: now[0]), []
    size = batches(0)[0].tokens_BL.numel()
    for step in range(5):
        given = batches(step, [size - step - 1, step + 1])
        results.append((given[0], graph.run(work, given, 7 + step, 100 * step)))
    assert len(replays) == 3
    assert len({tensor.data_ptr() for tensor in calls}) == 1, "the same buffer in every step"
    for step, (batch, (total, ends)) in enumerate(results):  # none was changed by a later step
        assert total == batch.tokens_BL.sum() + 7 + step
        assert torch.equal(ends, batch.documents.cu_seqlens_N1 + 100 * step)
    graph.run(work, batches(0, [size - 3, 1, 1, 1]), 1, 1)
    assert len(replays) == 3, "more documents: a form of its own"
    assert len(graph._forms) == 2
    now[0] = "another"
    graph.run(work, batches(0, [size]), 1, 1)
    assert len(replays) == 3
    assert len(graph._forms) == 1, "the past keeps no memory"


def test_places_are_powers_of_two(monkeypatch):
    size = batches(0)[0].tokens_BL.numel()
    for count, room in ((1, 16), (16, 16), (17, 32), (32, 32), (33, 64)):
        lengths = [1] * (count - 1) + [size - count + 1]
        assert places(batches(0, lengths)) == room


def test_what_changes_a_router_changes_the_computation():
    from tests.training.test_loop import build

    top_k = {"kind": "steps", "start": 3, "levels": [[2, 2]]}
    setting = RouterConfig(bias=None, top_k=top_k, capacity={"factor": 1.5})
    model, _ = build(torch.float32, setting)
    before = computation(model)
    assert computation(model) == before
    router = routers_of(model)[0]
    rules = router.rules
    for owner, field, value in (
        (rules.top_k, "k", 1),
        (rules.top_k, "fading", True),
        (rules.capacity, "limited", False),
        (router, "frozen", True),
    ):
        kept = getattr(owner, field)
        setattr(owner, field, value)
        assert computation(model) != before, field
        setattr(owner, field, kept)
    assert computation(model) == before


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["run.device=cpu"], "a run on cpu; allowed: a CUDA device"),
        (["train.dtype=float32"], "train.dtype=float32; allowed: bfloat16"),
        (["model.kernels=reference"], "model.kernels=reference; allowed: auto, triton, hopper"),
        (["model.hidden_act=mish"], "model.hidden_act=mish, which no kernel knows; allowed: an"),
        (["model.head_dim=12"], "heads of width 12; allowed: multiples of 8"),
        ([], "router.balance.kind=global and 2 micro-batches in a step; allowed: router.balance"),
        (
            [
                "router.noise.kind=jitter",
                "router.noise.size=0.1",
                "train.checkpointing=full",
                "train.micro_batch_size=4",
            ],
            "train.checkpointing=full and random routing; allowed: train.checkpointing=none",
        ),
    ],
)
def test_what_cannot_be_captured_is_refused_by_name(tiny_config, words, refusal, monkeypatch):
    monkeypatch.setitem(ModelConfig.activations, "mish", "mish_glu")
    monkeypatch.setitem(ACTIVATIONS, "mish_glu", ACTIVATIONS["swiglu"])
    config = load_config(tiny_config, ["run.device=cuda", "train.cuda_graph=true", *words])
    with pytest.raises(ConfigError) as error:
        make_plan(config, cuda=True)
    assert str(error.value).startswith("train.cuda_graph=true cannot go with ")
    assert refusal in str(error.value)
    good = ["run.device=cuda", "train.cuda_graph=true", "router.balance.kind=lagged"]
    assert make_plan(load_config(tiny_config, good), cuda=True).accumulation == 2
