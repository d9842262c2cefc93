"""metrics.jsonl and events.jsonl survive crashes."""

import io
import json
import resource
import sys

import pytest
from rich.console import Console

from training.report.files import DISK_FULL, read_lines, read_metrics
from training.report.run_log import RunLog, progress_line
from training.report.units import human_bytes, human_count, human_time


def test_lines_are_json_with_attempt_and_time(tmp_path, capsys):
    log = RunLog(tmp_path, attempt=3)
    log.metrics({"step": 1, "loss": float("nan"), "mfu": None, "norm": float("inf")})
    log.event("skip", "step 1 was skipped", rows=[(0, 1, 2)], folder=tmp_path)
    log.event("silent", value=-float("inf"))
    log.close()
    log.close()
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    assert line.pop("time") > 1e9
    assert line == {"attempt": 3, "step": 1, "loss": "nan", "norm": "inf"}
    skip, silent = read_lines(tmp_path / "events.jsonl")
    assert (skip["event"], skip["attempt"], skip["rows"]) == ("skip", 3, [[0, 1, 2]])
    assert skip["folder"] == str(tmp_path) and silent["value"] == "-inf"
    assert capsys.readouterr().out == "step 1 was skipped\n"
    for text in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize("torn", ["", '{"step": 3, "lo', "x" * 10_000])
def test_a_line_that_a_crash_cut_off_is_removed(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    whole = "".join(json.dumps({"step": s, "attempt": 0}) + "\n" for s in (1, 2))
    path.write_text(whole + torn)
    assert [line["step"] for line in read_lines(path)] == [1, 2]
    log = RunLog(tmp_path, attempt=1)
    log.metrics({"step": 3})
    log.close()
    assert path.read_text().startswith(whole)
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3]
    assert len(path.read_text().splitlines()) == 3


def test_a_file_that_is_one_torn_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step"')
    RunLog(tmp_path).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_lines_that_are_no_objects_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    odd = b'5\nnull\n[1]\n"x"\n\xff\xfe\n\0\0\n\n{"step": \n' + b"[" * 100_000 + b"\n"
    path.write_bytes(b'{"step": 1}\n' + odd + b'{"attempt": 1}\n{"step": 2, "attempt": 1}\n')
    assert len(list(read_lines(path))) == 3
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


@pytest.mark.parametrize("room", [0, 30])
def test_lines_wait_while_the_disk_is_full(tmp_path, capsys, room):
    """No space, or space for half of a line: nothing is lost, torn or glued together."""
    path = tmp_path / "metrics.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = RunLog(tmp_path)
    log.metrics({"step": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, before[1]))
    try:
        for step in (2, 3):
            log.metrics({"step": step})
        assert [line["step"] for line in read_lines(path)] == [1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (
        capsys.readouterr().out == f"no space to write {path}; its lines wait until there is some\n"
    )
    log.metrics({"step": 4})
    assert [json.loads(text)["step"] for text in path.read_text().splitlines()] == [1, 2, 3, 4]
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, before[1]))
    try:
        log.metrics({"step": 5})
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "its last lines (1) are lost" in capsys.readouterr().out
    RunLog(tmp_path).close()
    assert [json.loads(text)["step"] for text in path.read_text().splitlines()] == [1, 2, 3, 4]


@pytest.mark.parametrize("number", DISK_FULL)
def test_the_screen_may_be_a_file_on_a_full_disk(monkeypatch, tmp_path, number):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(number, "No space left on device")

    log = RunLog(tmp_path, console=Console(file=io.StringIO()))
    monkeypatch.setattr(sys, "stdout", Full())
    log.event("start", "hello")
    log.table("parameters", [{"a": 1}])
    log.close()
    assert len(list(read_lines(tmp_path / "events.jsonl"))) == 1


def test_of_two_attempts_the_later_one_counts_from_its_first_step_on(tmp_path):
    """wandb/wandb#2234: steps 0 to 12, a crash, on from 10 with other values: both are kept."""
    lines = [(0, step, 1.0) for step in range(13)] + [(1, step, 2.0) for step in range(10, 13)]
    lines += [(2, 11, 3.0)]
    text = "".join(json.dumps({"attempt": a, "step": s, "loss": v}) + "\n" for a, s, v in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    curve = [(line["step"], line["loss"]) for line in read_metrics(tmp_path)]
    assert curve == [(s, 1.0) for s in range(10)] + [(10, 2.0), (11, 3.0)]
    assert len(list(read_lines(tmp_path / "metrics.jsonl"))) == 17
    assert read_metrics(str(tmp_path)) == read_metrics(tmp_path)
    assert read_metrics(tmp_path / "nothing") == []


def test_other_processes_say_nothing(capsys):
    log = RunLog(None)
    log.say("hello")
    log.event("start", "hello")
    log.metrics({"step": 1})
    log.table("t", [{"a": 1}])
    log.close()
    assert capsys.readouterr().out == ""


def test_screen_colours_only_on_a_terminal(tmp_path, capsys):
    log = RunLog(tmp_path)
    log.table(
        "groups", [{"name": "a", "count": 12345, "lr": 1e-4}, {"name": "bcd", "count": 1, "lr": 1}]
    )
    log.warn("[odd] text " + "long " * 60)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.splitlines()[:3] == ["groups", "  name  count   lr", "  a     12,345  0.0001"]
    assert out.splitlines()[-1].startswith("[odd] text long long"), "one line, no markup"
    screen = io.StringIO()
    log = RunLog(tmp_path, console=Console(file=screen, force_terminal=True, width=60))
    log.warn("[odd] text")
    log.table("groups", [{"name": "a", "count": 12345}])
    assert "\x1b" in screen.getvalue() and "[odd] text" in screen.getvalue()
    assert "12,345" in screen.getvalue()


def test_human_units():
    counts = (0, 7, 999, 1234, 1_234_567, 3.05e9, 2e12)
    assert [human_count(v) for v in counts] == ["0", "7", "999", "1.23k", "1.23M", "3.05B", "2T"]
    assert [human_bytes(v) for v in (0, 950, 28.2e6, 12.1e9)] == [
        "0 B",
        "950 B",
        "28.2 MB",
        "12.1 GB",
    ]
    times = (0.2, 59, 61, 3700, 50 * 3600, -3)
    assert [human_time(v) for v in times] == ["0s", "59s", "1m01s", "1h01m", "2d02h", "0s"]
    metrics = {
        "step": 7,
        "loss": 3.14159,
        "tokens_per_second": 1.25e6,
        "mfu": 0.412,
        "max_violation": 0.5,
        "time_left_s": 754,
        "max_memory_gib": 38.12,
    }
    assert progress_line(metrics, 1000) == (
        "step    7/1000 | loss 3.1416 | 1.25M tok/s | MFU 41.2% | max_violation 0.50 | 12m34s left "
        "| 38.1 GiB"
    )
    del metrics["mfu"], metrics["max_violation"]
    assert "MFU" not in progress_line(metrics, 10)
