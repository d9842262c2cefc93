"""Whole runs from weights with a dead expert: each remedy brings it back, without one it stays
dead; and a run that dies after a revival goes on bit for bit."""

import json

import pytest
import torch

import train
from models.build import build_model
from models.config import ModelConfig
from models.first_weights import FirstWeights
from models.hf import export_hf
from tests.training.tiny import MODEL
from training.checkpoint.weights import load_model
from training.report.files import LOAD, read_metrics

LAYER, EXPERT, E = 1, 2, 8
STEPS = 24
OWN = {"family": "glm4_moe", "num_experts": E, "first_k_dense_replace": 0, "rms_norm_eps": 1e-5}
TIMES = ("attempt", "time", "tokens_per_second", "time_left_s", "mfu", "max_memory_gib")
# remedy → words, the step from which the expert has a quarter of the mean load
REMEDIES = {
    "revival": (["router.bias=null", "experts.policy.kind=revive", "experts.policy.after=5"], 7),
    "quantile": (["router.bias.kind=quantile"], 7),
    "sign": (["router.bias.kind=sign", "router.bias.rate=0.05"], 20),
    "min_load": (["router.bias.kind=min_load", "router.bias.rate=0.05"], 20),
}


@pytest.fixture(scope="module")
def words(tiny_config, tmp_path_factory):
    """Of a run from a model in which one expert has a router row of -100 times the direction in
    which the tokens lie."""
    first = FirstWeights(embedding=0.02)  # small, so that tokens can share a direction
    model = build_model(ModelConfig(**MODEL | OWN), seed=0, first=first)
    moe, seen = model.layers[LAYER].moe, []
    hook = moe.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model.embed.weight += 0.03  # so that there is such a direction
        model(torch.randint(0, 288, (8, 32), generator=torch.Generator().manual_seed(0)))
        mean_D = seen[0].flatten(0, 1).mean(0)
        moe.router.weight[EXPERT] = -100 * mean_D / mean_D.norm()
    hook.remove()
    folder = tmp_path_factory.mktemp("planted") / "model"
    export_hf(model, folder)
    given = [f"model.{key}={value}" for key, value in OWN.items()]
    given += [f"model.init_from={folder}", f"train.steps={STEPS}", "optim.lr=1e-3"]
    # too weak to bring it back in so few steps
    given += ["router.balance.coef=0.001", "checkpoint.every_steps=null"]
    return [str(tiny_config), *given, "eval.every_steps=null", "eval.rows=128"]


def run(name, words, folder, code=0):
    assert train.main([*words, f"run.name={name}", f"run.dir={folder}"]) == code
    return folder / name


def loads(folder):
    """Step → load / mean load of the planted expert."""
    return {line["step"]: line["load"][LAYER][EXPERT] for line in read_metrics(folder, LOAD)}


def revivals(folder):
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "expert_revived"]


@pytest.fixture(scope="module")
def untreated(words, tmp_path_factory):
    return run("none", [*words, "router.bias=null"], tmp_path_factory.mktemp("none"))


def test_without_a_remedy_it_stays_dead(untreated):
    found = loads(untreated)
    assert list(found) == list(range(1, STEPS + 1))
    assert max(found.values()) < 0.1
    assert not revivals(untreated)


@pytest.mark.parametrize("remedy", REMEDIES)
def test_a_remedy_brings_it_back_in_time(remedy, words, untreated, tmp_path):
    extra, first = REMEDIES[remedy]
    folder = run(remedy, [*words, *extra], tmp_path)
    found = loads(folder)
    assert found[1] == loads(untreated)[1] == 0
    after = [load for step, load in found.items() if step >= first]
    assert sum(after) / len(after) > 0.25, found
    mine = [(e["step"], e["expert"]) for e in revivals(folder) if e["layer"] == LAYER]
    assert mine[:1] == ([(5, EXPERT)] if remedy == "revival" else [])


def test_a_run_that_dies_after_a_revival_goes_on_bit_for_bit(words, monkeypatch, tmp_path):
    words = [*words, *REMEDIES["revival"][0], "checkpoint.every_steps=3", "train.steps=10"]
    whole = run("whole", words, tmp_path)
    real = train.train_step

    def dies(*arguments, **keywords):
        if arguments[0].step == 8:
            raise RuntimeError("a fault")
        return real(*arguments, **keywords)

    monkeypatch.setattr(train, "train_step", dies)
    run("parts", words, tmp_path, code=1)
    monkeypatch.setattr(train, "train_step", real)
    parts = run("parts", words, tmp_path)
    for name in ("metrics.jsonl", LOAD):
        one, two = (
            [{k: v for k, v in line.items() if k not in TIMES} for line in read_metrics(f, name)]
            for f in (whole, parts)
        )
        assert one == two, name
    told = [
        {(e["step"], e["layer"], e["expert"], e["parent"]) for e in revivals(f)}
        for f in (whole, parts)
    ]
    assert told[0] == told[1]
    assert min(told[1])[0] == 5, "before the checkpoint of step 6"
    models = [load_model(folder) for folder in (whole, parts)]
    for (name, one), two in zip(models[0].named_parameters(), models[1].parameters()):
        assert torch.equal(one, two), name
