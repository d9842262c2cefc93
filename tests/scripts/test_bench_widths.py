"""The bench of experts of different widths runs on a CPU, and its widths are what it says."""

import json


def test_a_small_run(script, tmp_path, capsys):
    bench = script("bench_widths")
    assert bench.main(["--small", "--seconds", "0", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "widths.json").read_text())["rows"]
    assert [row["method"] for row in found] == [
        "mixed",
        "one width, reference",
        "padded, reference",
    ]
    assert all(row["error"] < 1e-5 and row["tflops"] > 0 for row in found)
    assert "written to" in capsys.readouterr().out


def test_widths_have_the_mean_that_is_asked_for(script):
    bench = script("bench_widths")
    for _, _, N, E, _ in bench.SHAPES:
        sizes = bench.spread(N, E, 64)
        assert len(sizes) == E
        assert all(size % 64 == 0 and size > 0 for size in sizes)
        assert abs(sum(sizes) / E / N - 1) < 0.06
        assert max(sizes) >= 1.4 * N
