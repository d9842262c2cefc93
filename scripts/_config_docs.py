#!/usr/bin/env python3
"""Writes docs/configuration.md from the docstrings under the config's fields.

python scripts/_config_docs.py            # renews the file
"""

from __future__ import annotations

import argparse
import sys
import typing
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pydantic import BaseModel

from models.config import ModelConfig
from models.families import FAMILIES
from models.moe_config import MoEModelConfig
from moe.settings import OneOf
from training.config.build import Config, ModelSection
from training.config.describe import FIRST, default, first_sentence, values
from training.config.messages import models_in, option_in

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "configuration.md"

HEAD = """\
# Configuration

A run is described by one YAML file and any number of `section.key=value` words:

```
python train.py configs/quickstart.yaml train.steps=50 run.name=try
```

- A file holds only what differs from the defaults below. The resolved config of a run, every
  field spelled out, with versions and commit, is `runs/NAME/config.yaml`; it loads again as it is.
- Values are typed the same way in both places. `1e-4` and `3e8` are numbers; `off`, `on`, `yes`,
  `no` are words and never booleans (those are `true` and `false`); `010` is text, and where a
  number is wanted an error.
- On the command line lists and mappings are written `[a, b]` and `{a: b}` (in quotes, for the
  shell); a number steps into a list: `data.sources.0.path=text.jsonl`. Text with `: ` or ` #` in it
  needs YAML's quotes inside the shell's.
- An option with settings of its own is `null` (off) or one of a few kinds, and only the chosen
  kind's settings exist: `router.bias: {kind: sign, rate: 0.01}` in a file, on the command line
  `router.bias.kind=sign router.bias.rate=0.01` or `'router.bias={kind: sign, rate: 0.01}'`;
  `router.bias=null` switches it off. Another `kind` on the command line starts from that kind's
  defaults, but for what all kinds share, such as `optim.lr`.
- `auto` stands for what the model's family has; the resolved config spells it out.
- Mistakes end with exit code 2 and one line before any model is built: an unknown key or kind (with
  the nearest valid name), a missing or wrong value, a combination that is impossible.
- A leading `~` in a path is your home folder, in both places.

**Bold keys** are the ones to begin with; the rest can stay as it is. The tables are made from the
docstrings in the code by `python scripts/_config_docs.py`.
"""


def table(
    model: type[BaseModel], place: str, skip: Collection[str] = (), head: bool = True
) -> Iterator[str]:
    """The fields of a class.

    Args:
        place: dotted, of the class.
        skip: keys without a row.
    """
    if head:
        yield "| key | values | default | meaning |"
        yield "|---|---|---|---|"
    for key, field in model.model_fields.items():
        if key in skip:
            continue
        name = f"**`{key}`**" if f"{place}.{key}" in FIRST else f"`{key}`"
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        yield f"| {name} | {values(field)} | {default(model, key)} | {meaning} |"


def nested(model: type[BaseModel], place: str, skip: Collection[str] = ()) -> Iterator[str]:
    """What the options of a section hold, below a heading each."""
    for key, field in model.model_fields.items():
        if key in skip:
            continue
        here, option, inner = f"{place}.{key}", option_in(field), models_in(field)
        inner = [each for each in inner if each is not ModelConfig]
        if not inner:
            continue
        if option is None:
            each = "Each of " if typing.get_origin(field.annotation) is list else ""
            yield from (f"### {each}{here}", "", first_sentence(inner[0]), "")
            yield from (*table(inner[0], here), "")
        else:
            yield from (f"### {here}", "")
            yield from kinds_of(option, here)
        for each in inner:
            yield from nested(each, here)


def kinds_of(option: OneOf, place: str) -> Iterator[str]:
    """The kinds of an option, and their settings."""
    for kind, chosen in option.table.items():
        plain = " (the default kind)" if kind == option.default else ""
        yield f"- `kind: {kind}`{plain}: {first_sentence(chosen)}"
    yield ""
    yield from kinds_table(option.table, place)


def kinds_table(kinds: Mapping[str, type[BaseModel]], place: str) -> Iterator[str]:
    """The settings of an option's kinds: a row for each, and which kinds have it."""
    rows: dict[str, list[str]] = {}
    for kind, chosen in kinds.items():
        for row in table(chosen, place, skip=("kind",), head=False):
            rows.setdefault(row, []).append(f"`{kind}`")
    if not rows:
        return
    every = len(kinds)
    yield from ("| kinds | key | values | default | meaning |", "|---|---|---|---|---|")
    for row, having in rows.items():
        yield f"| {'all' if len(having) == every > 1 else ', '.join(having)} {row}"
    yield ""


def render() -> str:
    """The whole page."""
    lines = [HEAD]
    for name, field in Config.model_fields.items():
        section, *others = models_in(field)
        lines += [f"## {name}", ""]
        if (option := option_in(field)) is not None:  # what all kinds have is shown once
            lines += [*kinds_of(option, name), *nested(section, name)]
            for other in others:
                lines += nested(other, name, skip=section.model_fields)
            continue
        lines += [first_sentence(section), ""]
        lines += [*table(section, name, skip=("config",) if section is ModelSection else ()), ""]
        if section is ModelSection:
            lines += [
                "The architecture stands in the same section, under the names of a Hugging Face",
                "`config.json`. A field left out takes the family's default in transformers, shown",
                "where all families agree; one that the family does not have must be left out.",
                "",
                *table(ModelConfig, name),
                "",
                "Also in the families with experts:",
                "",
                *table(MoEModelConfig, name, skip=tuple(ModelConfig.model_fields)),
                "",
            ]
            for family, adds in FAMILIES.items():
                own = (*ModelConfig.model_fields, *MoEModelConfig.model_fields)
                if adds.model_fields.keys() - set(own):
                    lines += [f"Also in {family}:", "", *table(adds, name, skip=own), ""]
        lines += nested(section, name)
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: list[str] | None = None) -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(arguments)
    TARGET.write_text(render(), encoding="utf-8")
    print(f"wrote {TARGET.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
