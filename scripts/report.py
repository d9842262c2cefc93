#!/usr/bin/env python3
"""One self-contained HTML file about a run: findings in words, curves, events, config.

    python scripts/report.py runs/quickstart                 # writes runs/quickstart/report.html
    python scripts/report.py runs/quickstart --out here.html

It needs only the run folder, works while the run is at work, and the file needs no network.
"""

from __future__ import annotations

import html
import io
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts._command import command, make_parser
from training.config.load import user_path
from training.report.findings import Finding, findings
from training.report.plots import figures
from training.report.record import Record, read_run, unigram_entropy, with_errors
from training.report.units import human_count, human_time

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2rem auto;
  padding: 0 1rem; }
h1 { margin-bottom: 0; }
h2 { margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
.sub { opacity: .7; margin-top: .2rem; overflow-wrap: anywhere; }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0; }
.card { background: var(--soft); border-radius: .5rem; padding: .6rem 1rem; min-width: 7rem; }
.card b { display: block; font-size: 1.3rem; font-variant-numeric: tabular-nums; }
.card span { font-size: .8rem; opacity: .75; }
.finding { border-left: 5px solid; background: var(--soft); padding: .5rem .9rem; margin: .6rem 0; }
.problem { border-color: #b3261e; }
.warning { border-color: #d97a1a; }
.note { border-color: #1f5fa8; }
.plots { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(440px, 100%), 1fr)); }
figure { margin: 0; background: #fff; border-radius: .5rem; padding: .3rem; min-width: 0; }
figure svg { width: 100%; height: auto; }
figure.wide { grid-column: 1 / -1; overflow-x: auto; }
figure.wide svg { min-width: 640px; }
figcaption { color: #444; font-size: .8rem; padding: 0 .5rem; }
table { border-collapse: collapse; font-size: .85rem; width: 100%; }
td, th { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th, td:not(:last-child) { white-space: nowrap; }
td:last-child { overflow-wrap: anywhere; }
pre { background: var(--soft); padding: .8rem; overflow-x: auto; font-size: .8rem; }
@media (max-width: 600px) {
  table, tbody, tr, td { display: block; }
  tr:first-child { display: none; }
  tr { border-bottom: 1px solid var(--line); padding: .4rem 0; }
  td { border: 0; padding: 0; }
  td:not(:last-child) { display: inline-block; padding-right: .7rem; opacity: .75; }
}
"""

EVENTS_SHOWN = 200
WIDE = ("load", "load_by_layer")
"""Pictures with much in them, which take the whole width."""


def svg(figure: Figure) -> str:
    """A figure as an SVG element, without the file's head."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "report"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def cards(record: Record, unigram: float | None) -> list[tuple[str, str]]:
    """The numbers to see first: (value, what it is)."""
    last, val = record.last, record.series("val_loss")
    out: list[tuple[str, str]] = []
    if last:
        steps = record.setting("train.steps")
        out.append((f"{last['step']}{f' / {steps}' if steps else ''}", "steps"))
        out.append((f"{float(last['loss']):.3f}", "training loss"))
    if val.steps:
        out.append((f"{val.values[-1]:.3f}", f"validation loss at step {val.steps[-1]}:"))
    if unigram is not None:
        out.append((f"{unigram:.3f}", "unigram entropy of the text"))
    if "tokens" in last:
        out.append((human_count(last["tokens"]), "tokens"))
    speed = record.series("tokens_per_second").finite
    if speed:
        out.append((human_count(sorted(speed)[len(speed) // 2]), "tokens per second (median)"))
    if "max_memory_gib" in last:
        out.append((f"{last['max_memory_gib']:.1f} GiB", "memory peak"))
    if record.training_seconds:
        out.append((human_time(record.training_seconds), "of training between log lines"))
    return out


def _finding(finding: Finding) -> str:
    return (
        f'<div class="finding {finding.level}"><b>{finding.level}</b>: {html.escape(finding.seen)}'
        f"<br>→ {html.escape(finding.remedy)}</div>"
    )


def sentence(event: dict[str, Any]) -> str:
    """What happened, in words: the event's own, or those of its kind and its values."""
    if event.get("text"):
        return event["text"]
    kind, step = event.get("event"), event.get("step")
    if kind == "sample" and "sample" in event:
        return f"text at step {step}: {event['sample']}"
    if kind == "checkpoint" and "folder" in event:
        return f"saved step {step} in {event['folder']} ({event.get('seconds', 0):.1f} s)"
    if kind == "export_check" and "exact" in event:
        same = "computes the same as" if event["exact"] else "computes otherwise than"
        return f"the trained model {same} its export will"
    known = ("event", "attempt", "time", "text")
    rest = [f"{key} {value}" for key, value in event.items() if key not in known]
    return ", ".join(rest).replace("_", " ")


def _event_row(event: dict[str, Any]) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.get("time", 0)))
    text = sentence(event)
    detail = f"{text[:400]}{'…' if len(text) > 400 else ''}"
    kind = str(event.get("event", "")).replace("_", " ")
    cells = (when, event.get("attempt", ""), kind, detail)
    return "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>"


def _score_rows(record: Record) -> str:
    """The last value of each score that was measured, with the step of its checkpoint."""
    rows = {}
    for line in record.scores:
        limit = line["settings"]["limit"]
        for name, value, error in with_errors(line["scores"]):
            shown = f"{value:.4f}" + (f" ± {error:.4f}" if error else "")
            rows[name] = (name, shown, line["step"], "all" if limit is None else limit)
    return "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows.values()
    )


def render(record: Record, now: float | None = None) -> str:
    """The whole page."""
    unigram = unigram_entropy(record)
    found = findings(record, now)
    told = "".join(map(_finding, found)) or "<p>Nothing stands out: all looks well.</p>"
    shown = "".join(
        f"<figure{' class=wide' * (name in WIDE)}>{svg(figure)}"
        f"<figcaption>{html.escape(text)}</figcaption></figure>"
        for name, text, figure in figures(record, unigram)
    )
    numbers = "".join(
        f'<div class="card"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'
        for value, name in cards(record, unigram)
    )
    events = record.events[-EVENTS_SHOWN:]
    left_out = len(record.events) - len(events)
    name = html.escape(record.folder.resolve().name)
    config = record.folder / "config.yaml"
    config_text = (
        config.read_text(encoding="utf-8") if config.is_file() else "config.yaml is missing"
    )
    head = " · ".join(line for line in record.head if not line.startswith("Every setting"))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f'<h1>{name}</h1><p class="sub">{html.escape(head)}</p>'
        f'<div class="cards">{numbers}</div>'
        f"<h2>Findings</h2>{told}"
        f'<h2>Curves</h2><div class="plots">{shown}</div>'
        + (
            "<h2>Scores</h2><table><tr><th>score</th><th>value</th><th>step</th>"
            f"<th>questions</th></tr>{_score_rows(record)}</table>"
        )
        * bool(record.scores)
        + "<h2>Events</h2>"
        + (
            f"<p>The last {len(events)}; {left_out} earlier ones are in events.jsonl.</p>"
            * (left_out > 0)
        )
        + "<table><tr><th>time</th><th>attempt</th><th>event</th><th>what</th></tr>"
        + "".join(map(_event_row, events))
        + f"</table><h2>Config</h2><details><summary>config.yaml, every setting</summary>"
        f"<pre>{html.escape(config_text)}</pre></details></body></html>\n"
    )


@command
def main(arguments: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("run", type=user_path, help="run folder, or a checkpoint in it")
    parser.add_argument("--out", type=user_path, help="file to write (default RUN/report.html)")
    options = parser.parse_args(arguments)
    record = read_run(options.run)
    out = options.out or record.folder / "report.html"
    out.write_text(render(record), encoding="utf-8")
    print(" | ".join(f"{name} {value}" for value, name in cards(record, unigram_entropy(record))))
    for finding in findings(record):
        print(f"{finding.level}: {finding.seen}\n  → {finding.remedy}")
    print(f"report: {out} ({out.stat().st_size / 1024:.0f} KiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
