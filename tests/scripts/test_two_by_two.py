"""scripts/two_by_two.py: what it asks for, what it makes of the answers; the real runs take minutes
(`--cpu`) or four GPUs."""

import json

import pytest

from scripts import two_by_two
from scripts.two_by_two import Failed, Parts, main


def test_refusals(tmp_path, capsys, monkeypatch):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "summary.md").write_text("")
    assert main([str(tmp_path / "old"), "--cpu"]) == 2
    assert "old is not empty" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert main([str(tmp_path / "new")]) == 2
    assert "four GPUs are needed, there are 2; allowed here: --cpu" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_part_that_fails_keeps_no_other_from_running(tmp_path, monkeypatch):
    def fails(self):
        raise Failed("the sky is down")

    monkeypatch.setattr(Parts, "verify", fails)
    monkeypatch.setattr(Parts, "large", lambda self: ["12 tokens/s"])
    assert main([str(tmp_path / "out"), "--cpu", "--only", "verify", "large"]) == 1
    summary = (tmp_path / "out/summary.md").read_text()
    assert "## verify\n\nfailed:\n\nthe sky is down" in summary and "12 tokens/s" in summary


def test_efficiency_is_that_of_one_gpu_with_the_same_routing(tmp_path, monkeypatch):
    asked = []

    def engine(self, name, nproc, *words):
        asked.append((nproc, words))
        speed = {1: 100.0, 2: 190.0, 4: 360.0}[nproc] * (2 if "balanced" in words else 1)
        hidden = {"hidden": 0.91} if "--exposed" in words else {}
        return {"tokens/s": speed, "peak GiB": 3.0, "losses": "5.1 5.0", **hidden}

    monkeypatch.setattr(Parts, "engine", engine)
    lines = Parts(tmp_path, cpu=False, steps=60).scaling()
    assert "| 4 | real | 360 | 90 | 90% | 3.0 | 91% | 5.0 |" in lines
    assert "| 2 | balanced | 380 | 190 | 95% | 3.0 |  | 5.0 |" in lines
    sizes = {n: next(w for w in words if "global_batch" in w) for n, words in asked}
    assert sizes == {n: f"train.global_batch_size={8 * n}" for n in (1, 2, 4)}
    assert all(("parallel.nodes=2" in words) == (n > 1) for n, words in asked)


def test_a_script_that_fails_is_named_with_its_last_line(tmp_path):
    with pytest.raises(Failed, match=r"no\.yaml --gpus 4: exit code 2: .*no\.yaml"):
        Parts(tmp_path, cpu=True, steps=1).run("estimate", "estimate.py", "no.yaml", "--gpus", "4")


def test_figures_are_those_of_the_slowest_rank(tmp_path, monkeypatch):
    rows = [{"step s": 1.0, "peak GiB": 5.0}, {"step s": 2.0, "peak GiB": 4.0}]

    def run(self, name, *words):
        path = words[words.index("--json") + 1]
        (tmp_path / path).write_text(json.dumps({"rows": rows}))

    monkeypatch.setattr(Parts, "run", run)
    row = Parts(tmp_path, cpu=True, steps=1).engine("a", 2)
    assert row == {"step s": 2.0, "peak GiB": 5.0}


def test_the_parts_are_those_of_the_command_line():
    assert all(hasattr(Parts, name) for name in two_by_two.PARTS)
