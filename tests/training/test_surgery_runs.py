"""Whole runs in which experts come and go: what is told, how they go on after a fault, and what is
exported."""

from __future__ import annotations

import json

import pytest
import torch

import train
from models.hf import export_hf
from models.hf.check import check_export
from models.hf.config import config_from_hf
from training.checkpoint.tensors import read_weights
from training.checkpoint.weights import CheckpointTensors, load_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def exported(folder, into):
    """config.json of the export of a run's last checkpoint, after transformers computed the same as
    we do."""
    latest = (folder / "checkpoints" / "latest").resolve()
    config = config_from_hf(latest / "model")
    export_hf(CheckpointTensors(latest), into, config=config)
    receipt = check_export(load_model(latest), into, new_tokens=8)
    assert receipt.passed, str(receipt)
    return json.loads((into / "config.json").read_text())


GLM = [
    "model.family=glm4_moe",
    "model.first_k_dense_replace=0",
    "model.num_experts=6",
    "experts.start=4",
]
EVENTS = (
    "experts.events=[{step: 3, kind: clone, layer: 0, expert: 1}, {step: 5, kind: retire, "
    "layer: 0}, {step: 5, kind: clone, layer: 1}, {step: 7, kind: retire, layer: 1, expert: 0}]"
)
POLICY = [
    "experts.policy.kind=resize",
    "experts.policy.every=1",
    "experts.policy.retire_below=0.9",
    "experts.policy.retire_after=2",
    "experts.policy.cooldown=1",
    "experts.policy.clone_above=1.01",
]


def lines(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def of_run(folder, *names):
    """Events of these kinds without times, those of a step that was done twice once."""
    found = {}
    for event in lines(folder, "events.jsonl"):
        if event["event"] in names:
            kept = {k: v for k, v in event.items() if k not in ("time", "attempt", "seconds")}
            found[json.dumps(kept, sort_keys=True)] = kept
    return list(found.values())


CHANGED = ("expert_cloned", "expert_retired", "expert_revived")


def losses(folder):
    return {line["step"]: line["loss"] for line in lines(folder, "metrics.jsonl")}


def test_a_run_with_a_clone_and_a_retirement(tiny_config, monkeypatch, tmp_path):
    """The loss does not move at the clone, the events are told, a run that dies between them goes
    on bit for bit, and the export has the experts in use alone."""
    monkeypatch.chdir(tmp_path)
    words = [str(tiny_config), *GLM, EVENTS, "train.steps=9", "checkpoint.every_steps=4"]
    assert train.main([*words, "run.name=whole"]) == 0
    whole = tmp_path / "runs" / "whole"
    told = of_run(whole, *CHANGED)
    assert [(e["step"], e["change"], e["layer"], e["experts"]) for e in told] == [
        (3, "clone", 0, 5),
        (5, "retire", 0, 4),
        (5, "clone", 1, 5),
        (7, "retire", 1, 4),
    ]
    before, after = told[0]["probe_loss"]
    assert before == after
    assert all(abs(b - a) < 0.05 for b, a in (event["probe_loss"] for event in told))
    counts = {line["step"]: line["layers/0/experts"] for line in lines(whole, "metrics.jsonl")}
    assert [counts[step] for step in (1, 3, 4, 5, 6, 9)] == [4, 4, 5, 5, 4, 4]

    real = train.train_step
    for died in (5, 8):  # from the checkpoint of step 4: before, and after, the last events

        def dies(*arguments, died=died, **keywords):
            if arguments[0].step == died:
                raise RuntimeError("a fault")
            return real(*arguments, **keywords)

        monkeypatch.setattr(train, "train_step", dies)
        assert train.main([*words, "run.name=parts"]) == 1
    monkeypatch.setattr(train, "train_step", real)
    assert train.main([*words, "run.name=parts"]) == 0
    parts = tmp_path / "runs" / "parts"
    assert losses(parts) == losses(whole)
    assert of_run(parts, *CHANGED) == told
    ours, theirs = (
        read_weights((folder / "checkpoints" / "latest").resolve()) for folder in (parts, whole)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    assert exported(whole, tmp_path / "hf")["n_routed_experts"] == 4
    latest = whole / "checkpoints" / "latest"
    # a run without slots would use the free ones
    plain = [word for word in words if not word.startswith("experts.")]
    assert train.main([*plain, "run.name=other", f"model.init_from={latest}"]) == 2
    assert train.main([*plain, "run.name=whole", "train.steps=12"]) == 2


def test_the_policy_resizes_and_goes_on_bit_for_bit(tiny_config, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = [str(tiny_config), *GLM, *POLICY, "train.steps=9", "checkpoint.every_steps=3"]
    words += ["experts.importance.kind=gate_mass"]
    assert train.main([*words, "run.name=whole"]) == 0
    whole = tmp_path / "runs" / "whole"
    told = of_run(whole, *CHANGED)
    assert {event["change"] for event in told} == {"clone", "retire"}
    assert train.main([*words, "run.name=dry", "experts.policy.dry_run=true"]) == 0
    dry = tmp_path / "runs" / "dry"
    assert not of_run(dry, *CHANGED)
    first = next(e for e in of_run(dry, "surgery_dry_run"))
    assert {k: first[k] for k in ("step", "change", "layer", "expert", "parent")} == {
        k: told[0][k] for k in ("step", "change", "layer", "expert", "parent")
    }
    plain = [word for word in words if not word.startswith("experts.")]
    assert train.main([*plain, "model.num_experts=4", "run.name=plain"]) == 0

    real = train.train_step

    def dies(*arguments, **keywords):
        if arguments[0].step == 8:
            raise RuntimeError("a fault")
        return real(*arguments, **keywords)

    monkeypatch.setattr(train, "train_step", dies)
    assert train.main([*words, "run.name=parts"]) == 1
    monkeypatch.setattr(train, "train_step", real)
    assert train.main([*words, "run.name=parts"]) == 0
    parts = tmp_path / "runs" / "parts"
    assert losses(parts) == losses(whole)
    assert of_run(parts, *CHANGED) == told
    # layers of different numbers: this family says it with experts that nothing chooses
    masks = read_weights((whole / "checkpoints" / "latest").resolve())
    counts = [int(masks[f"layers.{layer}.moe.router.active_E"].sum()) for layer in (0, 1)]
    assert exported(whole, tmp_path / "hf")["n_routed_experts"] == max(counts)


def test_layers_are_levelled_before_the_end(tiny_config, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = [str(tiny_config), "model.num_experts=6", "experts.start=4", *POLICY]
    words += ["train.steps=11", "experts.importance.kind=reap"]
    assert train.main([*words, "run.name=refused"]) == 2
    words += ["router.end_steps=2"]
    assert train.main([*words, "run.name=levelled"]) == 0
    folder = tmp_path / "runs" / "levelled"
    told = of_run(folder, *CHANGED)
    assert max(event["step"] for event in told) <= 9
    last = lines(folder, "metrics.jsonl")[-1]
    assert last["layers/0/experts"] == last["layers/1/experts"]
    assert exported(folder, tmp_path / "hf")["num_experts"] == last["layers/0/experts"]


@pytest.mark.parametrize("which", ["replace", "resize"])
def test_the_policy_goes_on_with_as_few_families_as_a_token_needs(
    which, tiny_config, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    words = [str(tiny_config), "run.seed=2", "train.steps=24", "experts.copies.kind=family"]
    words += ["train.global_batch_size=2", "router.exportable=false", "model.init.router=3"]
    words += ["optim.router.lr_multiplier=5", *(POLICY if which == "resize" else POLICY[:-1])]
    words += [
        f"experts.policy.kind={which}",
        "experts.policy.retire_below=0.95",
        "experts.policy.retire_after=1",
    ]
    assert train.main([*words, "experts.importance.kind=load", "run.name=few"]) == 0
    folder = tmp_path / "runs" / "few"
    buffers = read_weights((folder / "checkpoints" / "latest").resolve())
    fewest = 4
    for layer in ("layers.0.moe.router.", "layers.1.moe.router."):
        family_E = buffers[f"{layer}family_E"][buffers[f"{layer}active_E"] > 0]
        fewest = min(fewest, len(family_E.unique()))
    assert fewest == 2


def test_families_share_tokens_and_dissolve(tiny_config, monkeypatch, tmp_path, capsys):
    """The loss hardly moves at the clone in a family of models without selection bias, and what is
    exported has no families."""
    monkeypatch.chdir(tmp_path)
    words = [str(tiny_config), "model.num_experts=6", "model.norm_topk_prob=true", "train.steps=12"]
    words += ["experts.start=4", "experts.copies.kind=family", "experts.importance.kind=load"]
    words += ["experts.events=[{step: 4, kind: clone}, {step: 6, kind: clone}]"]
    assert train.main([*words, "run.name=refused"]) == 2
    assert train.main([*words, "router.end_steps=3", "run.name=family"]) == 0
    folder = tmp_path / "runs" / "family"
    told = of_run(folder, *CHANGED)
    assert [event["step"] for event in told] == [4, 4, 6, 6]
    assert all(abs(after - before) < 0.002 for before, after in (e["probe_loss"] for e in told))
    changes = [
        event["text"] for event in lines(folder, "events.jsonl") if "change" in event["event"]
    ]
    assert changes == ["step 10: copies of one expert may be chosen together from now on"]
    assert exported(folder, tmp_path / "hf")["num_experts"] == 6

    kept = [*words, "router.exportable=false", "run.name=kept"]
    assert train.main(kept) == 0
    together = [word.replace("kind=family", "kind=copy") for word in words]
    capsys.readouterr()
    assert train.main([*together, "run.name=kept", "train.steps=13"]) == 2
    assert "choice within families (experts.copies)" in capsys.readouterr().err
    assert train.main([*together, "run.name=family", "train.steps=13"]) == 0
