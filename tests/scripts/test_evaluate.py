"""scripts/evaluate.py: perplexities are the run's own; tasks of lm-eval on local files."""

import json
import math

import pytest

from training.report.files import read_metrics


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the trained run, whose folder may be written to."""
    import shutil

    return shutil.copytree(trained, tmp_path / "run", symlinks=True)


def test_perplexity_of_a_run_a_checkpoint_and_its_export(script, run, tmp_path, capsys):
    text = run.parent.parent / "text.txt"
    text.write_text("the white whale swims\n" * 400)
    main, words = script("evaluate").main, ["--text", f"whales={text}", "--seq-len", "16"]
    assert script("export_hf").main([str(run), str(tmp_path / "out")]) == 0
    told = []
    for model in (run, run / "checkpoints/latest", tmp_path / "out"):
        capsys.readouterr()
        assert main([str(model), *words]) == 0
        told.append([line for line in capsys.readouterr().out.splitlines() if "val_" in line])
    assert told[0] == told[1] == told[2] and len(told[0]) == 2
    first, second = [json.loads(line) for line in (run / "scores.jsonl").read_text().splitlines()]
    assert first["scores"] == second["scores"] and first["step"] == 6
    assert first["scores"]["val_perplexity"] == math.exp(first["scores"]["val_loss"])
    assert script("report").main([str(run)]) == 0
    page = (run / "report.html").read_text()
    assert f"<td>val_loss</td><td>{first['scores']['val_loss']:.4f}</td><td>6</td>" in page


def test_the_runs_own_validation_text(script, run, capsys):
    """All rows of it, where the run read the first four."""
    main = script("evaluate").main
    assert main([str(run)]) == 0
    (line,) = (run / "scores.jsonl").read_text().splitlines()
    whole = json.loads(line)["scores"]["val_loss"]
    (run / "scores.jsonl").unlink()
    few = read_metrics(run)[-1]["val_loss"]
    assert whole != few and whole == pytest.approx(few, abs=0.5)


def test_mistakes_are_one_line(script, run, tmp_path, monkeypatch, capsys):
    main = script("evaluate").main
    assert script("export_hf").main([str(run), str(tmp_path / "out")]) == 0
    monkeypatch.setattr(script("evaluate"), "find_spec", lambda name: None)
    for words, told in (
        ([str(tmp_path / "out")], "has no validation text of its own; give --text PATH"),
        ([str(run), "--text", "nowhere.txt"], "nowhere.txt"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(words)
        said = capsys.readouterr().err
        assert ended.value.code == 2 and told in said and said.count("\n") == 1, said


def test_a_task_of_ones_own(script, run, tmp_path, capsys):
    pytest.importorskip("lm_eval")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    rows = [{"question": "the white", "choices": ["whale", "qqq"], "answer": 0}] * 6
    (tasks / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tasks / "whales.yaml").write_text(
        f"""task: whales
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tasks / "rows.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
    )
    words = ["--tasks", "whales", "--task-folder", str(tasks), "--limit", "4"]
    assert script("evaluate").main([str(run), *words]) == 0
    assert "whales/acc" in capsys.readouterr().out
    (line,) = (run / "scores.jsonl").read_text().splitlines()
    kept = json.loads(line)
    assert 0 <= kept["scores"]["whales/acc"] <= 1 and "whales/acc_stderr" in kept["scores"]
    assert kept["settings"] == {"limit": 4, "few_shot": None}
    with pytest.raises(SystemExit):
        script("evaluate").main([str(run), "--tasks", "whalez", "--task-folder", str(tasks)])
    assert "--tasks=whalez is no task of lm-eval or in" in capsys.readouterr().err
