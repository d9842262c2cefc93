"""The corpus of installed packages: what is taken, what is left out, whose it is."""

import json
from importlib import metadata
from pathlib import Path

import pytest

from training.data import python_corpus
from training.data.corpora import write_corpus

LONG = "def f(x):\n    return x + 1\n" * 20


def install(site: Path, name: str, files: dict[str, bytes], fields: str = "") -> None:
    """A package as pip leaves it: files, METADATA and RECORD."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{fields}")
    for path, content in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(content)
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))


@pytest.fixture
def site(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    # `distributions` is read once for the real call and must not see this Python's packages
    real = metadata.distributions
    monkeypatch.setattr(python_corpus.metadata, "distributions", lambda: real(path=[str(folder)]))
    return folder


def test_files_of_packages_with_their_license(site, tmp_path):
    install(site, "beta", {"beta/a.py": LONG.encode()}, "License-Expression: MIT\n")
    install(
        site,
        "Alpha",
        {"alpha/z.py": b"# z\n" + LONG.encode(), "alpha/b.py": b"# b\n" + LONG.encode()},
        "License: long text\nClassifier: License :: OSI Approved\n"
        "Classifier: License :: OSI Approved :: BSD License\n",
    )
    install(site, "gamma", {"g.py": b"# g\n" + LONG.encode()})
    out = tmp_path / "corpus" / "python.jsonl"
    assert write_corpus("python", out) == 4
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(row["package"], row["id"], row["license"]) for row in rows] == [
        ("Alpha-1.0", "alpha/b.py", "BSD License"),
        ("Alpha-1.0", "alpha/z.py", "BSD License"),
        ("beta-1.0", "beta/a.py", "MIT"),
        ("gamma-1.0", "g.py", "unknown"),
    ]
    assert rows[0]["text"] == "# b\n" + LONG


def test_what_is_left_out(site):
    install(
        site,
        "one",
        {
            "one/kept.py": LONG.encode(),
            "one/copy.py": LONG.replace("    ", "\t").encode(),  # the same but for whitespace
            "one/short.py": b"x = 1\n",
            "one/latin.py": b"# \xe9\n" + LONG.encode(),
            "one/table.py": ("data = '" + "0" * 2000 + "'\n" + LONG).encode(),
            "one/huge.py": LONG.encode() * 3000,
            "one/notes.txt": LONG.encode(),
            "one/missing.py": LONG.encode(),
        },
    )
    install(site, "two", {"two/kept.py": LONG.encode()})
    (site / "one" / "missing.py").unlink()
    kept = [(row["package"], row["id"]) for row in python_corpus.python_documents()]
    assert kept == [("one-1.0", "one/copy.py")]


def test_this_python_has_enough_of_it():
    sizes = [len(row["text"]) for row, _ in zip(python_corpus.python_documents(), range(300))]
    assert len(sizes) == 300
    assert sum(sizes) > 1_000_000
