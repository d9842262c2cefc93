"""Validation against plain sums, samples, and that neither leaves a trace; FLOPs and peaks."""

import math
import random
import types

import numpy as np
import pytest
import torch

from models.build import build_model
from models.config import ModelConfig
from parallel import World
from tests.training.test_loop import batch_of, build, rows
from tests.training.tiny import MODEL
from training.config.build import load_config
from training.device import max_memory_gib, peak_flops
from training.due import due_after
from training.estimate.flops import flops_per_token, matmul_weights, run_flops
from training.evaluate import sample_text, validate

CPU = torch.device("cpu")


def test_loss_per_source_and_over_all():
    model, _ = build()
    tokens, labels = rows(6)
    labels[5] = -100
    cut = [batch_of(t, y) for t, y in zip(tokens.split(2), labels.split(2))]
    sources = {"a": cut[:2], "b": iter(cut[2:]), "nothing": []}
    metrics = validate(model, sources, world=World(), device=CPU)
    with torch.no_grad():
        logits = model(tokens, logits=True).logits.double()
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none"
    ).view(labels.shape)
    counted = labels != -100
    expected = {
        "val_loss": losses.sum() / counted.sum(),
        "val_loss/a": losses[:4].sum() / counted[:4].sum(),
        "val_loss/b": losses[4:].sum() / counted[4:].sum(),
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value.item(), rel=1e-6), name
        perplexity = metrics[name.replace("loss", "perplexity")]
        assert perplexity == pytest.approx(math.exp(value.item()), rel=1e-5)
    assert len(metrics) == 6, "a source without targets has no number"
    assert set(validate(model, {"a": cut}, world=World(), device=CPU)) == {
        "val_loss",
        "val_perplexity",
    }
    assert validate(model, {}, world=World(), device=CPU) == {}


def draws() -> tuple[float, ...]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()  # noqa: NPY002


def test_nothing_is_left_behind(monkeypatch):
    """Random states, mode, gradients, parameters and buffers are as before, also after an error."""
    model, optimizer = build()
    model.train()
    tokens, labels = rows(2)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    expected = draws()
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)

    class Drawing(torch.nn.Module):
        def forward(self, *arguments, **keywords):
            assert not self.training and not torch.is_grad_enabled()
            draws()
            return model(*arguments, **keywords)

    drawing = Drawing()
    drawing.train()
    validate(drawing, {"a": [batch_of(tokens, labels)]}, world=World(), device=CPU)
    monkeypatch.setattr(Drawing, "forward", lambda *_, **__: draws() and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        validate(drawing, {"a": [batch_of(tokens, labels)]}, world=World(), device=CPU)
    assert drawing.training and model.training and torch.is_grad_enabled()
    assert draws() == expected
    assert not optimizer.gradient.any()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_samples_are_the_same_for_the_same_weights():
    model, _ = build()
    tokenizer = types.SimpleNamespace(
        prompt=lambda text: [ord(c) for c in text] or [2],
        decode=lambda ids: " ".join(str(i) for i in ids),
    )
    torch.manual_seed(0)
    first = sample_text(model, tokenizer, "abc", 12, world=World())
    torch.manual_seed(5)
    assert sample_text(model, tokenizer, "abc", 12, world=World()) == first
    assert len(first.split()) == 12 and len(set(first.split())) > 1
    assert model.training
    begun = sample_text(model, tokenizer, "", 12, world=World())
    assert begun == sample_text(model, tokenizer, "\x02", 12, world=World()) != first


# --- FLOPs --------------------------------------------------------------------------------------

FAMILIES = {
    "qwen3_moe": {**MODEL, "intermediate_size": 24, "mlp_only_layers": [1]},
    "glm4_moe": {
        **{k: v for k, v in MODEL.items() if k != "family"},
        "family": "glm4_moe",
        "intermediate_size": 24,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "tie_word_embeddings": False,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_built_model(family):
    config = ModelConfig(**FAMILIES[family])
    model = build_model(config, device="meta")
    active, total = matmul_weights(config)
    names = {n: p for n, p in model.named_parameters() if p.dim() > 1 and "embed" not in n}
    tied = config.hidden_size * config.vocab_size if config.tie_word_embeddings else 0
    assert total == sum(p.numel() for p in names.values()) + tied
    idle = sum(
        p.numel() * (config.num_experts - config.num_experts_per_tok) // config.num_experts
        for n, p in names.items()
        if n.endswith((".w1", ".w2"))
    )
    assert active == total - idle


def test_flops_by_hand():
    config = ModelConfig(**MODEL)
    active, _ = matmul_weights(config)
    attention = 2 * 3 * 2 * 2 * 8 * (33 / 2) * 2  # layers, passes, products, heads, width, keys
    assert flops_per_token(config, 32) == pytest.approx(6 * active + attention)


def test_peaks_and_memory(monkeypatch):
    assert peak_flops(CPU) is None
    cuda = torch.device("cuda")
    for name, peak in (
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GB200", 2500e12),
        ("Some Other GPU", None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_flops(cuda) == peak, name
    assert 0.05 < max_memory_gib(CPU) < 100


# --- what is due --------------------------------------------------------------------------------


def test_what_is_due(tiny_config):
    base = load_config(tiny_config)

    def at(step, log=4, evaluate=6, save=5, steps=13):
        every = {"log": log, "eval": evaluate, "checkpoint": save}
        config = base.model_copy(
            update={
                part: getattr(base, part).model_copy(update={"every_steps": steps_between})
                for part, steps_between in every.items()
            }
        )
        found = due_after(config, step, steps)
        return "".join(c for c, on in zip("les", (found.log, found.evaluate, found.save)) if on)

    assert [at(step) for step in range(1, 14)] == [
        *("l", "", "", "l", "ls", "le", "", "l", "", "ls", "", "le", "les"),
    ]
    assert at(13, evaluate=None, save=None) == "ls", "the end is always saved"
    assert at(12, evaluate=None, save=None) == "l"


def test_flops_of_a_run_follow_the_experts_per_token(tiny_config):
    def flops(*words):
        return run_flops(load_config(tiny_config, [*words, "train.steps=1000"]), 1000)

    config = load_config(tiny_config).model.config
    per_expert = flops_per_token(config, 32, 3) - flops_per_token(config, 32, 2)
    assert per_expert == 6 * 2 * 3 * 16 * 8  # two layers of three matrices
    tokens = 4 * 32
    constant = flops()
    assert constant == pytest.approx(1000 * tokens * flops_per_token(config, 32))
    ramp = ("router.top_k.kind=linear", "router.top_k.start=4")
    # half of the run at 3 on average: half an expert more; soft computes the next whole number
    more = (flops(*ramp) - constant) / (1000 * tokens * per_expert)
    assert more == pytest.approx(0.5, abs=0.01)
    soft = (flops(*ramp, "router.top_k.soft=true") - constant) / (1000 * tokens * per_expert)
    assert soft == pytest.approx(0.75, abs=0.01)
