"""Settings in a user's words: what `train.py --help` and docs/configuration.md say of a field."""

from __future__ import annotations

import textwrap
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from models.config import ModelConfig
from models.families import FAMILIES
from models.moe_config import MoEModelConfig
from moe.settings import OneOf
from training.config.load import ConfigError
from training.config.messages import full_name, models_in, option_in
from training.config.sections import Config, ModelSection

FIRST = {
    "run.name", "model.family", "model.hf_config", "data.sources", "data.tokenizer", "data.seq_len",
    "train.steps", "train.global_batch_size", "train.micro_batch_size", "optim.lr",
    "optim.schedule.warmup_steps", "eval.every_steps", "checkpoint.every_steps",
}  # fmt: skip
"""The settings that a first run of one's own needs."""


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
    """What a field of a class is if it is left out."""
    field = model.model_fields[key]
    if model in (ModelConfig, MoEModelConfig) and key != "family":
        usual = None if field.is_required() else field.default
        having = [family for family in FAMILIES.values() if issubclass(family, model)]
        values = [family.defaults.get(key, usual) for family in having]
        same = all(value == values[0] for value in values)
        return "by family" if not same else "`null`" if values[0] is None else _code(values[0])
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "`null`"
    if isinstance(value, list) and value and isinstance(value[0], BaseModel):
        value = [item.model_dump(exclude_defaults=True) for item in value]
    if isinstance(value, BaseModel):
        return f"`{value.kind}`" if option_in(field) is not None else "below"
    return _code(value)


def _code(value: Any) -> str:
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def values(field: FieldInfo) -> str:
    """What a field can be: words, kinds, or a type and its bounds."""
    option = option_in(field)
    if option is None:
        return " ".join(filter(None, (type_name(field.annotation), limits(field))))
    kinds = ", ".join(f"`{kind}`" for kind in option.table)
    return "".join(f"`{word}`, " for word in option.words) + f"kinds {kinds}"


def first_sentence(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split("\n\n")[0].split())


# --- train.py --help ------------------------------------------------------------------------------


def describe(place: str, names: Mapping[str, Any]) -> Iterator[str]:
    """Lines about a place of the config: its settings, or those of its kinds.

    Args:
        place: dotted, as `optim.schedule`; "" for the sections.
        names: every dotted place → the keys that are valid there (`training.config.build`).

    Raises:
        ConfigError: there is no such place; names the nearest.
    """
    if not place:
        for name, field in Config.model_fields.items():
            section, *others = models_in(field)
            told = first_sentence(section) if not others else "kinds " + _kinds(option_in(field))
            yield f"{name:11} {told}"
        return
    found: list[type[BaseModel]] = [Config]
    for key in place.split("."):
        if ModelSection in found:  # the fields of the architecture stand beside its own
            found = [ModelSection, ModelConfig, MoEModelConfig, *FAMILIES.values()]
        holder = next((model for model in found if key in model.model_fields), None)
        if holder is None:
            meant = full_name(place, dict(names))
            hint = f"; did you mean {meant}?" if meant else ""
            raise ConfigError(f"there is no setting {place}{hint}")
        field = holder.model_fields[key]
        found = models_in(field)
    yield f"{place}: {_plain(values(field))}, default {_plain(default(holder, key))}"
    yield from _wrapped(" ".join((field.description or "").split()))
    option = option_in(field)
    for model in found:
        kind = f"kind {model.model_fields['kind'].default}: " if option is not None else ""
        yield from ("", *_wrapped(kind + first_sentence(model)))
        yield from _settings(model)
        if model is ModelSection:
            yield from _settings(ModelConfig)
            yield from _settings(MoEModelConfig)


def _settings(model: type[BaseModel]) -> Iterator[str]:
    for key, field in model.model_fields.items():
        if key in ("kind", "config"):
            continue
        what = f"  {key}: {_plain(values(field))}, default {_plain(default(model, key))}. "
        text = what + " ".join((field.description or "").split())
        yield from _wrapped(text, "      ")


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, 100, subsequent_indent=indent, break_on_hyphens=False)


def _kinds(option: OneOf | None) -> str:
    return ", ".join(option.table) if option is not None else ""


def _plain(markdown: str) -> str:
    return markdown.replace("`", "").replace("*", "")
