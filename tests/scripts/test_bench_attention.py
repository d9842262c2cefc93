"""The benchmark of attention: on a CPU what runs there, with its error."""

from __future__ import annotations

import re

import pytest

SMALL = ["data.seq_len=64", "model.num_attention_heads=2", "model.num_key_value_heads=1"]


@pytest.fixture
def bench(script):
    return script("bench_attention")


def test_what_runs_here_is_measured_and_right(bench, tmp_path, capsys):
    arguments = ["configs/quickstart.yaml", *SMALL, "--rows", "3", "--repeats", "1"]
    assert bench.main([*arguments, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert re.match(r"2 heads, 1 of keys and values, width 32; \d+ documents of \d+ to 64 ", out)
    assert float(re.search(r"^ours .* error (\S+)$", out, re.M)[1]) < 1e-5
    assert "rows " in out
    assert "cannot" not in out


def test_an_attention_across_borders_shows(bench, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        bench, "packed_attention", lambda q, k, v, *_: bench.causal_attention(q, k, v)
    )
    long = ["data.seq_len=1024", "model.max_position_embeddings=1024", "--rows", "6"]
    arguments = ["configs/quickstart.yaml", *SMALL, *long]
    assert bench.main([*arguments, "--repeats", "1", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert float(re.search(r"^ours .* error (\S+)$", out, re.M)[1]) > 0.1


def test_a_mistake_in_the_config_is_one_line(bench, capsys):
    assert bench.main(["configs/quickstart.yaml", "model.hiden_size=3"]) == 2
    assert "hidden_size" in capsys.readouterr().err
