"""Scripts tell a mistake of the user's in one line, and show the traceback of a fault of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.errors import UserError
from parallel.processes import RankError

ROOT = Path(__file__).resolve().parents[2]

# Script, one of its parts, and words with which main comes to that part.
PARTS = [
    ("export_hf", "resolve", ["run", "out"]),
    ("generate", "read_tokenizer", ["run", "--tokenizer", "t"]),
    ("import_hf", "load_hf", ["folder", "out"]),
    ("upcycle", "load_model", ["folder", "out", "--experts", "4", "--top-k", "2"]),
    ("report", "read_run", ["run"]),
    ("prepare_data", "make_reader", ["text", "--out", "store", "--train-tokenizer", "300"]),
    ("to_gguf", "convert", ["folder", "file"]),
    ("verify", "plans", [str(ROOT / "configs/quickstart.yaml"), "--nproc", "2"]),
]


@pytest.mark.parametrize(("name", "part", "words"), PARTS, ids=[name for name, *_ in PARTS])
def test_c12_a_script_tells_mistakes_and_shows_faults(
    script, monkeypatch, tmp_path, capsys, name, part, words
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("a whale")
    module = script(name)

    def raising(error: Exception):
        def fail(*_, **__):
            raise error

        monkeypatch.setattr(module, part, fail)

    for error in (ValueError("of a library"), KeyError("key")):
        raising(error)
        with pytest.raises(type(error)):
            module.main(words)
    raising(UserError("what is wrong"))
    try:
        code = module.main(words)
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and capsys.readouterr().err == "error: what is wrong\n"


def test_c12_doctor_shows_faults(monkeypatch, script, tmp_path, capsys) -> None:
    module = script("doctor")

    def fault(*_):
        raise ValueError("of a library")

    monkeypatch.setattr("training.report.record.read_run", fault)
    with pytest.raises(ValueError, match="of a library"):
        module.main([str(tmp_path)])
    monkeypatch.undo()
    with pytest.raises(SystemExit) as stop:
        module.main([str(tmp_path / "nowhere")])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_c12_verify_shows_faults_of_its_own_comparison(monkeypatch, script, capsys) -> None:
    """What a process of the layout raised is told; what this process raises is a fault."""
    module = script("verify")

    def failed(*_, **__):
        raise RankError("process 1: it broke")

    words = [
        str(ROOT / "configs/quickstart.yaml"),
        "--nproc",
        "2",
        "parallel.expert=2",
        "parallel.nodes=2",
        "run.device=cpu",
    ]
    monkeypatch.setattr(module, "run_processes", failed)
    assert module.main(words) == 1
    assert "the layout failed: process 1: it broke" in capsys.readouterr().err
    monkeypatch.setattr(module, "run_processes", lambda *_, **__: [])
    with pytest.raises((ValueError, IndexError, KeyError)):
        module.main(words)
