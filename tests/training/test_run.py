"""The run folder: what a resumed run may change, how long it is, which attempt it is."""

import types

import pytest

from training.config.load import ConfigError
from training.report.run_log import RunLog
from training.run import _next_attempt, differences, total_steps

OLD = {
    "run": {"name": "a", "seed": 0, "device": "cpu"},
    "model": {"hidden_size": 8, "kernels": "auto", "mlp_only_layers": []},
    "data": {"sources": [{"path": "x", "weight": 1.0}], "seq_len": 8},
    "optim": {"betas": [0.9, 0.95]},
    "train": {"steps": 10},
}


def changed(section: str, **values):
    return OLD | {section: OLD[section] | values}


@pytest.mark.parametrize(
    ("new", "allowed", "refused"),
    [
        (OLD, [], []),
        (changed("run", name="b"), [], []),
        (changed("run", device="cuda"), ["run.device: 'cpu' → 'cuda'"], []),
        (changed("run", seed=1), [], ["run.seed: 0 → 1"]),
        (changed("model", hidden_size=9), [], ["model.hidden_size: 8 → 9"]),
        (changed("model", mlp_only_layers=[1]), [], ["model.mlp_only_layers: [] → [1]"]),
        (changed("model", kernels="triton"), ["model.kernels: 'auto' → 'triton'"], []),
        (changed("model", new_field=3), [], ["model.new_field: None → 3"]),
        (changed("train", steps=20), ["train.steps: 10 → 20"], []),
        (changed("optim", betas=[0.9, 0.99]), ["optim.betas: [0.9, 0.95] → [0.9, 0.99]"], []),
        (
            changed("data", sources=[{"path": "y", "weight": 1.0}]),
            ["data.sources.0.path: 'x' → 'y'"],
            [],
        ),
    ],
)
def test_differences_by_name(new, allowed, refused):
    assert differences(OLD, new) == (allowed, refused)


def test_steps_from_epochs():
    def config(steps=None, epochs=None, batch=4, warmup=2):
        return types.SimpleNamespace(
            train=types.SimpleNamespace(steps=steps, epochs=epochs, global_batch_size=batch),
            optim=types.SimpleNamespace(schedule=types.SimpleNamespace(warmup_steps=warmup)),
        )

    assert total_steps(config(steps=7), None) == 7
    assert total_steps(config(epochs=2), 10) == 5
    assert total_steps(config(epochs=1.1), 10) == 3
    with pytest.raises(ConfigError, match=r"train\.epochs=2 needs a known number of rows"):
        total_steps(config(epochs=2), None)
    assert total_steps(config(epochs=2, warmup=5), 10) == 5
    assert total_steps(config(steps=7, batch=10_000), 10) == 7
    with pytest.raises(ConfigError, match=r"global_batch_size=10001 .* 1000 times .* has 10 rows"):
        total_steps(config(steps=7, batch=10_001), 10)


def test_attempts_count_up_whatever_was_written(tmp_path):
    assert _next_attempt(tmp_path) == 0
    for attempt in (0, 1):
        log = RunLog(tmp_path, attempt)
        log.event("start")
        log.close()
        assert _next_attempt(tmp_path) == attempt + 1
    (tmp_path / "events.jsonl").write_text("")
    log = RunLog(tmp_path, 4)
    log.metrics({"step": 1})
    log.close()
    assert _next_attempt(tmp_path) == 5, "metrics alone tell it too"
