#!/usr/bin/env python3
"""Writes docs/configuration.md from the docstrings under the config's fields.

python scripts/_config_docs.py            # renews the file
"""

from __future__ import annotations

import argparse
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from models.config import ModelConfig
from models.families import FAMILIES
from training.config.build import Config, ModelSection
from training.config.load import models_in

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
  number is wanted an error. `null` empties a field.
- On the command line lists and mappings are written `[a, b]` and `{a: b}` (in quotes, for the
  shell); a number steps into a list: `data.sources.0.path=text.jsonl`. Text with `: ` or ` #` in it
  needs YAML's quotes inside the shell's.
- Mistakes end with exit code 2 and one line before any model is built: an unknown key (with the
  nearest valid name), a wrong type, a combination that is impossible, and a setting that another
  setting makes useless. What the command line switches off, it switches off whole:
  `eval.every_steps=null` is enough for a file that has `eval.sample.prompt`.
- A leading `~` in a path is your home folder, in both places.

The tables are made from the docstrings in the code by `python scripts/_config_docs.py`.
"""


def type_name(annotation: Any) -> str:
    """A field's type in a user's words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{word}`" for word in arguments)
    if origin in (list, tuple):
        return f"list of {type_name(arguments[0])}"
    if origin is dict:
        return "mapping"
    if arguments:
        parts = [type_name(part) for part in arguments if part is not type(None)]
        return " or ".join(dict.fromkeys(parts))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    return {int: "integer", float: "number", str: "text", bool: "`true`, `false`"}[annotation]


def limits(field: FieldInfo) -> str:
    """The bounds of a number, if there are any."""

    def found(annotation: Any, metadata: list[Any]) -> Iterator[str]:
        for item in metadata:
            for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
                if getattr(item, name, None) is not None:
                    yield f"{sign} {getattr(item, name):g}"
            yield from found(None, list(getattr(item, "metadata", ())))
        if typing.get_origin(annotation) is typing.Annotated:
            inner, *more = typing.get_args(annotation)
            yield from found(inner, more)
        elif typing.get_origin(annotation) not in (list, None):
            for part in typing.get_args(annotation):
                if not isinstance(part, (str, bool, int)):
                    yield from found(part, [])

    return " and ".join(dict.fromkeys(found(field.annotation, field.metadata)))


def default(model: type[BaseModel], key: str) -> str:
    field = model.model_fields[key]
    if model is ModelConfig and key != "family":
        usual = None if field.is_required() else field.default
        values = [family.defaults.get(key, usual) for family in FAMILIES.values()]
        same = all(value == values[0] for value in values)
        return "by family" if not same else "empty" if values[0] is None else _code(values[0])
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "empty"
    if isinstance(value, list) and value and isinstance(value[0], BaseModel):
        value = [item.model_dump(exclude_defaults=True) for item in value]
    return "below" if isinstance(value, BaseModel) else _code(value)


def _code(value: Any) -> str:
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def table(model: type[BaseModel], skip: tuple[str, ...] = ()) -> Iterator[str]:
    yield "| key | values | default | meaning |"
    yield "|---|---|---|---|"
    for key, field in model.model_fields.items():
        if key in skip:
            continue
        values = " ".join(filter(None, (type_name(field.annotation), limits(field))))
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        yield f"| `{key}` | {values} | {default(model, key)} | {meaning} |"


def nested(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Tables inside a section: each model once, under the first key that holds it."""
    seen: set[type[BaseModel]] = set()
    for key, field in model.model_fields.items():
        for inner in models_in(field.annotation):
            if inner not in seen and inner is not ModelConfig:
                seen.add(inner)
                yield key, inner


def first_sentence(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split("\n\n")[0].split())


def render() -> str:
    """The whole page."""
    lines = [HEAD]
    for name, field in Config.model_fields.items():
        (section,) = models_in(field.annotation)
        lines += [f"## {name}", "", first_sentence(section), ""]
        lines += [*table(section, skip=("config",) if section is ModelSection else ()), ""]
        if section is ModelSection:
            lines += [
                "The architecture stands in the same section, under the names of a Hugging Face",
                "`config.json`. A field left out takes the family's default in transformers, shown",
                "where all families agree; one that the family does not have must be left out.",
                "",
                *table(ModelConfig),
                "",
            ]
            for name_, family in FAMILIES.items():
                own = tuple(ModelConfig.model_fields)
                if len(family.model_fields) > len(own):
                    lines += [f"Also in {name_}:", "", *table(family, skip=own), ""]
        for key, inner in nested(section):
            lines += [f"### Each of {name}.{key}", "", first_sentence(inner), "", *table(inner), ""]
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
