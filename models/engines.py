"""Where other engines differ from transformers on an exported folder: the one table of facts, whose
rows stand in the files of the families.

`scripts/export_hf.py` prints its notes from here, docs/huggingface.md shows `markdown_table()`, and
`scripts/check_engines.py` runs every row in the engines that are installed and fails where a
verdict is not what it sees. Versions: vLLM 0.32.0, llama.cpp of October 2026, mistral.rs 0.9.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from models.config import FAMILIES, ModelConfig

ENGINES = ("vLLM", "llama.cpp", "mistral.rs")


@dataclass(frozen=True)
class Verdict:
    """What an engine makes of a folder."""

    kind: Literal["yes", "wrong", "no", "untried"]
    """The same tokens; other tokens without an error; it does not load; or nobody has looked."""
    words: str = ""
    """What it does, as the end of the sentence "ENGINE ..."; empty for yes."""

    def __str__(self) -> str:
        plain = {"yes": "yes", "untried": "not tried"}
        return plain.get(self.kind) or f"**{self.kind}**: {self.words}"


YES = Verdict("yes")


def wrong(words: str) -> Verdict:
    return Verdict("wrong", words)


def no(words: str = "does not load it") -> Verdict:
    return Verdict("no", words)


@dataclass(frozen=True)
class Feature:
    """A row of a family: as it usually is (`name` empty), or one feature on top of that."""

    name: str
    """The setting, as in config.json."""
    has: Callable[[Any], bool]
    """Whether a config of the family has the feature."""
    example: dict[str, Any]
    """Fields that give a model the feature; of the first row, what runs in the most engines."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    """By engine; one that is not there says yes."""

    def verdict(self, engine: str) -> Verdict:
        return self.verdicts.get(engine, YES)


def untried(what: str) -> Verdict:
    return Verdict("untried", f"has not been tried with {what}")


ROPE_SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "dynamic": {"factor": 4.0},
}


def scaled_by(kind: str) -> Callable[[ModelConfig], bool]:
    """Whether a config has this kind of RoPE scaling."""
    return lambda c: (c.rope_scaling or {}).get("rope_type") == kind


def otherwise(*kinds: str) -> dict[str, Verdict]:
    """Of an engine that makes something else of these kinds of RoPE scaling."""
    return {kind: wrong(f"computes {kind} RoPE scaling otherwise") for kind in kinds}


def rope_rows(**engines: dict[str, Verdict]) -> Iterator[Feature]:
    """The rows of RoPE scaling. vLLM has been tried with linear scaling alone.

    Args:
        engines: with _ for a dot; what they make of each kind.
    """
    verdicts = {name.replace("_", "."): found for name, found in engines.items()}
    for kind, example in ROPE_SCALINGS.items():
        name = f"{kind} RoPE scaling"
        own = {engine: found[kind] for engine, found in verdicts.items() if kind in found}
        more = {} if kind == "linear" else {"vLLM": untried(name)}
        scaling = {"rope_scaling": {"rope_type": kind, **example}}
        yield Feature(name, scaled_by(kind), scaling, more | own)


def rows() -> list[tuple[str, Feature]]:
    """(family, feature) of the whole table."""
    return [(name, row) for name, family in FAMILIES.items() for row in family.engine_rows]


def notes(config: ModelConfig) -> list[str]:
    """One line for each engine and feature of this model where the engine is known to differ."""
    found = {}
    for feature in config.engine_rows:
        if feature.has(config):
            for engine in ENGINES:
                verdict = feature.verdict(engine)
                if verdict.kind != "yes":
                    found[f"{engine} {verdict.words}"] = None  # each once, in order
    return list(found)


def markdown_table() -> str:
    """The table of docs/huggingface.md."""
    lines = [f"| family | with | {' | '.join(ENGINES)} |", "|---|" + "---|" * (len(ENGINES) + 1)]
    for family, feature in rows():
        cells = [str(feature.verdict(engine)) for engine in ENGINES]
        lines.append(f"| {family} | {feature.name or '–'} | {' | '.join(cells)} |")
    return "\n".join(lines)
