"""The report holds what the run folder holds, in one file that needs nothing else."""

import html.parser
import json
import re

import pytest

from tests.training.test_record import NOW, after, make_run
from training.report.record import read_run


class Page(html.parser.HTMLParser):
    """Text and references of a page; fails on tags that are not closed."""

    VOID = ("meta", "br", "link", "img", "input", "hr")

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.references, self.counts = [], [], [], {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        for key, value in attributes:
            if key in ("src", "href", "xlink:href", "data"):
                self.references.append(value)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


EVENTS = [
    {"event": "start", "attempt": 0, "time": NOW - 1000, "steps": 1000, "unigram_entropy": 6.25},
    {
        "event": "step_skipped",
        "attempt": 0,
        "time": NOW,
        "text": "step 7 <b>&",
        "rows": [[0, 0, 1]],
    },
]


@pytest.fixture
def report(script):
    return script("report")


@pytest.fixture
def without_pictures(report, monkeypatch):
    """Drawing takes most of the time, and the tests of the words do not look at pictures."""
    monkeypatch.setattr(report, "figures", lambda record, unigram: iter(()))


def test_the_page_holds_the_run_and_needs_nothing_else(report, tmp_path):
    folder = make_run(tmp_path / "run", after(300, dead_experts=6.0), events=EVENTS)
    source = report.render(read_run(folder), now=NOW)
    page = Page(source)
    text = " ".join(page.text)
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    for piece in (
        "1000 / 1000",
        f"{last['loss']:.3f}",
        f"{last['val_loss']:.3f}",
        "6.250",
        "6 experts get less than a tenth of the mean load",
        "step 7 <b>&",  # escaped in the source, itself again for a reader
        "num_experts_per_tok: 4",
        "torch: 2.13.0",
    ):
        assert piece in text, piece
    assert page.counts["svg"] == page.counts["figure"] >= 8
    assert all(r.startswith(("#", "data:image/")) for r in page.references)
    assert "@import" not in source
    assert not re.search(r"url\((?!#)", source)
    assert "<script" not in source
    assert len(source) < 1_000_000


@pytest.mark.usefixtures("without_pictures")
def test_e22_events_are_sentences(report, tmp_path):
    """Every kind of event that a run writes without a text of its own; none as JSON."""
    events = [
        {"event": "checkpoint", "step": 6, "folder": "runs/x/step_6", "seconds": 1.25},
        {"event": "sample", "step": 4, "sample": " a whale"},
        {"event": "export_check", "exact": True, "lacks": []},
        {"event": "something_new", "step": 5, "some_value": 0.5},
    ]
    folder = make_run(tmp_path / "run", events=[e | {"attempt": 0, "time": NOW} for e in events])
    source = report.render(read_run(folder), now=NOW)
    table = source[source.index("<h2>Events") : source.index("<h2>Config")]
    for told in (
        "saved step 6 in runs/x/step_6 (1.2 s)",
        "text at step 4:  a whale",
        "the trained model computes the same as its export will",
        "step 5, some value 0.5",
    ):
        assert f"<td>{told}</td>" in table
    assert "{" not in table and "_new" not in table


def test_e22_the_load_map_has_its_axes_named_and_the_whole_width(report, tmp_path):
    folder = make_run(tmp_path / "run")
    lines = [{"attempt": 0, "step": s, "load": [[1.0, 0.5], [0.0, 2.0]]} for s in (1, 2, 3)]
    (folder / "load.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (figure,) = [f for name, _, f in report.figures(read_run(folder)) if name == "load"]
    assert (figure.get_supxlabel(), figure.get_supylabel()) == ("step", "expert")
    assert "load / mean" in [axes.get_ylabel() for axes in figure.axes]
    source = report.render(read_run(folder), now=NOW)
    wide = re.findall(r"<figure class=wide>.*?</figure>", source, re.DOTALL)
    assert ["load of each expert" in figure for figure in wide] == [False, True]
    # no picture is wider than a phone, and no word of a header is broken
    assert "minmax(min(440px, 100%), 1fr)" in source
    assert re.search(r"th, td:not\(:last-child\) \{ white-space: nowrap; \}", source)


@pytest.mark.usefixtures("without_pictures")
def test_a_healthy_run_is_called_so(report, tmp_path):
    text = report.render(read_run(make_run(tmp_path / "run")), now=NOW)
    assert "all looks well" in text


@pytest.mark.usefixtures("without_pictures")
def test_runs_without_lines_or_config_have_a_report_too(report, tmp_path):
    folder = make_run(tmp_path / "run", lambda line: None)
    assert "no logged step yet" in report.render(read_run(folder), now=NOW)
    (make_run(tmp_path / "two") / "config.yaml").unlink()
    assert "config.yaml is missing" in report.render(read_run(tmp_path / "two"), now=NOW)


@pytest.mark.usefixtures("without_pictures")
def test_many_events_are_cut_and_counted(report, tmp_path):
    events = [{"event": "sample", "attempt": 0, "time": NOW, "step": i} for i in range(450)]
    text = report.render(read_run(make_run(tmp_path / "run", events=events)), now=NOW)
    assert "The last 200; 250 earlier ones are in events.jsonl." in text
    assert text.count("<td>sample</td>") == 200


@pytest.mark.usefixtures("without_pictures")
def test_command_writes_the_file_and_tells(report, tmp_path, capsys):
    folder = make_run(tmp_path / "run", after(300, max_violation=5.0), events=EVENTS)
    assert report.main([str(folder)]) == 0
    out = capsys.readouterr().out
    assert "unigram entropy of the text 6.250" in out
    assert "warning: max_violation is 5.0 (load" in out
    assert (folder / "report.html").stat().st_size > 2_000
    assert report.main([str(folder), "--out", str(tmp_path / "here.html")]) == 0
    assert (tmp_path / "here.html").exists()
    (folder / "report.html").rename(tmp_path / "first.html")
    saved = folder / "checkpoints" / "step_00001000"
    saved.mkdir(parents=True)
    (saved / "state.json").write_text("{}")
    assert report.main([str(saved)]) == 0
    assert f"report: {folder / 'report.html'} " in capsys.readouterr().out
    assert (folder / "report.html").exists() and not (saved / "report.html").exists()
    with pytest.raises(SystemExit) as caught:
        report.main([str(tmp_path / "nothing")])
    assert caught.value.code == 2
    assert "does not exist; " in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        report.main([str(folder), "--out", str(tmp_path / "here.html" / "x")])
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/here.html/x: Not a directory\n"
