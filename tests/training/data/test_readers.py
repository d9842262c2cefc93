"""Readers find every good document, name every bad one, and go on from any place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from training.data import DataError, SourceConfig
from training.data.file_reader import FileReader
from training.data.files import find_files
from training.data.hub_reader import HubReader
from training.data.sources import make_reader, resolve

BAD = [
    (b'{"text": "cut off', "malformed JSON"),
    (b'{"text": "caf\xe9"}', "invalid UTF-8"),
    (b'["a", "list"]', "not an object"),
    (b'{"title": "no text here"}', "no text field"),
    (b'{"text": 7}', "text is not a string"),
    (b'{"text": ' + b"9" * 5000 + b"}", "malformed JSON"),
    (b'{"text": null}', "text is not a string"),
    (b'{"text": "half \\ud83d a character"}', "invalid UTF-8"),
]


def reader(path: Path | str, **source) -> FileReader:
    source = SourceConfig(path=str(path), **source)
    return FileReader(find_files(source, "data.sources[0].path")[0], source)


def texts(source: FileReader | HubReader, start: dict | None = None) -> list[str]:
    return [item.text for item in source.items(start) if item.problem is None]


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":  # of two frames, as tools that compress in parallel write
        half = len(data) // 2
        data = b"".join(
            pyarrow.compress(part, codec="zstd", asbytes=True)
            for part in (data[:half], data[half:])
        )
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".json"])
def test_bad_lines_are_named_and_good_ones_kept(tmp_path: Path, suffix: str) -> None:
    """NVIDIA-NeMo/Automodel#1694, huggingface/datasets#5053."""
    lines: list[bytes] = []
    for i in range(10):
        lines.append(json.dumps({"text": f"good {i}"}).encode())
        if i < len(BAD):
            lines.append(BAD[i][0])
    path = write(tmp_path / f"a{suffix}", b"\n".join(lines))  # no newline at the end
    items = list(reader(path).items())
    assert [i.text for i in items if i.problem is None] == [f"good {i}" for i in range(10)]
    problems = [item for item in items if item.problem is not None]
    assert [item.problem for item in problems] == [kind for _, kind in BAD]
    for number, item in enumerate(problems):
        assert f"a{suffix}:{2 * number + 2}:" in item.place


def test_a_truncated_gzip_gives_its_whole_lines_and_the_next_file(tmp_path: Path) -> None:
    whole = "".join(json.dumps({"text": f"line {i} " + "x" * 50}) + "\n" for i in range(2000))
    data = gzip.compress(whole.encode())
    (tmp_path / "a.jsonl.gz").write_bytes(data[: len(data) // 2])
    write(tmp_path / "b.jsonl.gz", b'{"text": "next file"}\n')
    items = list(reader(tmp_path).items())
    problems = [item for item in items if item.problem is not None]
    assert [item.problem for item in problems] == ["truncated or damaged gzip"]
    good = [item.text for item in items if item.problem is None]
    assert good[-1] == "next file"
    assert len(good) > 500
    assert [int(text.split()[1]) for text in good[:-1]] == list(range(len(good) - 1))
    assert f"a.jsonl.gz:{len(good)}" in problems[0].place


def test_a_file_that_is_no_gzip_is_one_problem(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b'{"text": "plain"}\n')
    items = list(reader(tmp_path / "a.jsonl.gz").items())
    assert [item.problem for item in items] == ["truncated or damaged gzip"]


def test_blank_lines_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"text": "a"}\r\n\r\n\n{"text": "b\\r\\n"}\r\n'
    assert texts(reader(write(tmp_path / "a.jsonl", data))) == ["a", "b\r\n"]


def test_text_files_lines_and_other_fields(tmp_path: Path) -> None:
    write(tmp_path / "t/a.txt", b"one\ntwo\n")
    write(tmp_path / "t/sub/b.md.gz", "drei ß".encode())
    write(tmp_path / "t/.hidden/c.txt", b"not read")
    assert texts(reader(tmp_path / "t")) == ["one\ntwo\n", "drei ß"]
    assert texts(reader(tmp_path / "t/a.txt", format="lines")) == ["one", "two"]
    write(tmp_path / "u.txt", b"bad \xff")
    assert [item.problem for item in reader(tmp_path / "u.txt").items()] == ["invalid UTF-8"]
    path = write(tmp_path / "f.jsonl", b'{"content": "x", "text": "y"}\n')
    assert texts(reader(path, text_field="content")) == ["x"]


def parquet(path: Path, values: list, kind: str = "string", rows: int = 7) -> Path:
    table = pyarrow.table({"id": range(len(values)), "text": pyarrow.array(values, kind)})
    pyarrow.parquet.write_table(table, path, row_group_size=rows)
    return path


def test_parquet(tmp_path: Path) -> None:
    values = [f"row {i}" for i in range(30)]
    values[12] = None
    items = list(reader(parquet(tmp_path / "a.parquet", values)).items())
    assert [item.text for item in items] == values
    assert items[12].problem == "text is not a string"
    assert "row group 1, row 6" in items[12].place
    large = parquet(tmp_path / "b.parquet", ["x"], "large_string")
    assert texts(reader(large)) == ["x"]
    with pytest.raises(DataError, match=r"no column 'body'.*id, text"):
        list(reader(large, text_field="body").items())
    with pytest.raises(DataError, match=r"'id' .* int64, not string"):
        list(reader(large, text_field="id").items())
    (tmp_path / "c.parquet").write_bytes(large.read_bytes()[:-10])
    items = list(reader(tmp_path / "c.parquet").items())
    assert [item.problem for item in items] == ["unreadable parquet"]


def arrow(path: Path, values: list, kind: str = "file", rows: int = 7) -> Path:
    table = pyarrow.table({"n": list(range(len(values))), "text": values})
    make = {"file": pyarrow.ipc.new_file, "stream": pyarrow.ipc.new_stream}[kind]
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_arrow(tmp_path: Path, kind: str) -> None:
    values = [f"text {i}" if i % 5 else None for i in range(40)]
    whole = arrow(tmp_path / "a.arrow", values, kind)
    items = list(reader(whole).items())
    assert [item.text for item in items] == values
    assert {item.problem for item in items if item.text is None} == {"text is not a string"}
    for i in range(0, 40, 3):  # from any place on
        assert [item.text for item in reader(whole).items(items[i].next)] == values[i + 1 :]
    with pytest.raises(DataError, match=r"no column 'body' \(text_field\); it has n, text"):
        list(reader(whole, text_field="body").items())
    cut = write(tmp_path / "cut.arrow", whole.read_bytes()[: whole.stat().st_size * 6 // 10])
    items = list(reader(cut).items())
    assert items[-1].problem == "unreadable arrow" and str(cut) in items[-1].place
    kept = [item.text for item in items[:-1]]
    assert kept == values[: len(kept)]  # what was whole of a stream counts


def test_parquet_with_invalid_utf8_keeps_its_neighbours(tmp_path: Path) -> None:
    raw = pyarrow.array([b"fine", b"caf\xe9", b"also fine"], pyarrow.binary())
    table = pyarrow.table({"text": raw.view(pyarrow.string())})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    items = list(reader(tmp_path / "a.parquet").items())
    assert [item.text for item in items] == ["fine", None, "also fine"]
    assert items[1].problem == "invalid UTF-8"


def test_reading_goes_on_from_every_place(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    write(folder / "a.jsonl", b'{"text": "a1"}\n[]\n\n{"text": "a2"}\n')
    write(folder / "b.jsonl.gz", b'{"text": "b1"}\n{"text": "b2"}\n')
    write(folder / "c.txt", b"c")
    write(folder / "d.jsonl", b"")
    parquet(folder / "e.parquet", ["e1", "e2", None, "e3"], rows=2)
    parquet(folder / "f.parquet", ["f1"])
    write(folder / "g.jsonl.zst", b'{"text": "g1"}\n{"text": "g2"}\n')
    write(folder / "h.json", b'[{"text": "h1"}, 5, {"text": "h2"}]')
    write(folder / "i.json", b'{"text": "i1"}\n{"text": "i2"}\n')
    source = reader(folder)
    items = list(source.items())
    assert len(items) == 18
    for index, item in enumerate(items):
        place = json.loads(json.dumps(source.snapshot(item.next)))
        assert list(reader(folder).items(place)) == items[index + 1 :], f"after item {index}"
        assert 0 <= source.fraction(place) <= 1


def test_which_files(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.csv"):
        write(tmp_path / name, b'{"text": "x"}\n')

    def names(path: str | list[str], **source) -> list[str]:
        return [p.name for p in find_files(SourceConfig(path=path, **source), "data.path")[0]]

    assert names(str(tmp_path)) == ["a.jsonl", "b.jsonl"]
    assert names(f"{tmp_path}/*.jsonl") == ["a.jsonl", "b.jsonl"]
    twice = [f"{tmp_path}/b.jsonl", str(tmp_path)]
    assert names(twice) == ["b.jsonl", "a.jsonl"], "as listed, each file once"
    assert names(f"{tmp_path}/c.csv", format="lines") == ["c.csv"]
    for path, message in [
        (f"{tmp_path}/none.jsonl", "no such file"),
        (f"{tmp_path}/*.txt", "no such file"),
        (f"{tmp_path}/c.csv", "format of .*c.csv.* not known"),
    ]:
        with pytest.raises(DataError, match=message):
            names(path)
    write(tmp_path / "empty/readme.rst", b"x")
    with pytest.raises(DataError, match="none of the 1 files there"):
        names(f"{tmp_path}/empty")


def test_c10_a_folder_is_not_hidden_by_where_it_lies(tmp_path):
    write(tmp_path / ".venv/texts/a.txt", b"one")
    write(tmp_path / ".venv/texts/.b.txt", b"hidden")
    for path in (tmp_path / ".venv/texts", tmp_path / ".venv/*/*.txt"):
        source = SourceConfig(path=str(path), name="x")
        assert [file.name for file in find_files(source, "path")[0]] == ["a.txt"]


def test_c10_a_folder_says_what_is_taken_and_what_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    write(folder / "README.md", b"# about\n")
    write(folder / "LICENSE.txt", b"as you like\n")
    write(folder / "dataset_info.json", b"{}")
    write(folder / "a.jsonl.gz", b'{"text": "a1"}\n{"text": "a2"}\n')
    write(folder / "b.jsonl.zst", b'{"text": "b1"}\n{"text": "b2"}\n')
    write(folder / "c.json", b'[\n {"text": "c1"},\n {"text": "c2"}\n]\n')
    write(folder / "d.json", b'{"text": "d1"}\n')
    write(folder / "inner/e.txt", b"e1")
    write(folder / "inner/notes.md", b"n1")
    write(folder / ".cache/f.jsonl", b"broken")
    write(folder / "picture.png", b"png")
    write(folder / "license-notes.jsonl", b'{"text": "l1"}\n')
    parquet(folder / "p.parquet", ["p1"])
    source = make_reader(SourceConfig(path=str(folder)), "data.sources[0]")
    assert texts(source) == ["a1", "a2", "b1", "b2", "c1", "c2", "d1", "e1", "n1", "l1", "p1"]
    (line,) = source.notes
    assert line == (
        f"{folder}: 8 files taken: a.jsonl.gz, b.jsonl.zst, c.json, d.json, inner/e.txt, "
        "inner/notes.md, license-notes.jsonl, p.parquet; left out: .cache/f.jsonl (hidden); "
        "LICENSE.txt, README.md, dataset_info.json (about the data); picture.png (ending not known)"
    )
    # what is named by itself is taken, each once
    paths = [str(folder / "README.md"), f"{folder}/*.json", str(folder / "c.json")]
    source = make_reader(SourceConfig(path=paths), "data.sources[0]")
    assert texts(source) == ["# about\n", "c1", "c2", "d1"]
    assert source.notes == [
        f"{folder}/*.json: 2 files taken: {folder}/c.json, {folder}/d.json; left out: "
        f"{folder}/dataset_info.json (about the data)",
        f"listed more than once, and taken once: {folder}/c.json",
    ]


def test_c10_damaged_zst_and_json_are_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.zst", b"".join(b'{"text": "%d"}\n' % i for i in range(9999)))
    path.write_bytes(path.read_bytes()[:-20])
    *good, bad = reader(path).items()
    assert len(good) > 1000 and bad.problem == "truncated or damaged zstd"
    path = write(tmp_path / "b.json", b'[{"text": "1"}, {"text": ')
    (bad,) = reader(path).items()
    assert bad.problem == "malformed JSON" and str(path) in bad.place
    path = write(tmp_path / "c.json", b'[{"text": "1"}, 5, {"text": "2"}]')
    assert [item.problem for item in reader(path).items()] == [None, "not an object", None]


def test_a_changed_file_is_another_identity(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "x"}\n')
    before = reader(path).identity()
    assert reader(path).identity() == before
    write(path, b'{"text": "y"}\n{"text": "z"}\n')
    assert reader(path).identity() != before


def hub(path: Path, **source) -> HubReader:
    return HubReader(SourceConfig(hub="json", files=str(path), **source), "data.sources[0].hub")


def test_datasets_stream_goes_on_from_every_place(tmp_path: Path) -> None:
    lines = [{"text": f"row {i}", "id": i} for i in range(25)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = hub(path)
    places, found = [], []
    for item in source.items():
        found.append(item.text)
        places.append(json.loads(json.dumps(source.snapshot(item.next))))
    assert found == [line["text"] for line in lines]
    for index in (0, 11, 23, 24):
        assert texts(hub(path), places[index]) == found[index + 1 :]


def test_a_folder_of_save_to_disk_is_read(tmp_path: Path) -> None:
    import datasets

    lines = [{"text": f"row {i}"} for i in range(25)]
    datasets.Dataset.from_list(lines).save_to_disk(tmp_path / "plain", num_shards=2)
    given = SourceConfig(path=str(tmp_path / "plain"))
    assert texts(make_reader(given, "data.sources[0]")) == [line["text"] for line in lines]
    assert resolve(given, "data.sources[0]").name == "plain"
    both = datasets.Dataset.from_list(lines).train_test_split(5)
    both.save_to_disk(tmp_path / "splits")
    with pytest.raises(DataError, match=r"saved data sets: .*splits/test, .*splits/train"):
        make_reader(SourceConfig(path=str(tmp_path / "splits")), "data.sources[0]")


def test_hub_mistakes_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n')
    with pytest.raises(DataError, match=r"no column 'body'.*it has text"):
        hub(path, text_field="body").open()
    unknown = HubReader(SourceConfig(hub="nobody/no-such-data"), "data.sources[0].hub")
    for wrong in (hub(tmp_path / "none.jsonl"), unknown):
        with pytest.raises(DataError, match=r"cannot be opened.*reachable") as caught:
            wrong.open()
        assert "\n" not in str(caught.value)
