"""Names and mistakes in a user's words: the nearest key, and one line for a pydantic error."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from models.errors import allowed_by
from moe.settings import OneOf

# --- names --------------------------------------------------------------------------------------


def kind(value: Any) -> str:
    """What a YAML value is, in a user's words."""
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true/false"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def shown(value: Any) -> str:
    """A value in an error message, as a config file spells it."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else repr(value)


def option_in(field: FieldInfo) -> OneOf | None:
    """The kinds of a field that is one of several kinds."""

    def found(annotation: Any) -> Iterator[OneOf]:
        yield from (item for item in getattr(annotation, "__metadata__", ()))
        for argument in typing.get_args(annotation):
            yield from found(argument)

    items = (*field.metadata, *found(field.annotation))
    return next((item for item in items if isinstance(item, OneOf)), None)


def models_in(field: FieldInfo) -> list[type[BaseModel]]:
    """The classes of a field's nested values: those of its kinds, or those it mentions."""

    def found(annotation: Any) -> Iterator[type[BaseModel]]:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
        for argument in typing.get_args(annotation):
            yield from found(argument)

    option = option_in(field)
    return [*(found(field.annotation) if option is None else option.table.values())]


def nearest(name: str, candidates: Sequence[str]) -> str | None:
    """The candidate most like `name`: equal but for dashes and case, else closest in spelling."""
    plain = name.replace("-", "_").lower()
    for candidate in candidates:
        if candidate.lower() == plain:
            return candidate
    longer = [name for name in candidates if _part_of(plain, name)]
    longer = longer or [name for name in candidates if _part_of(name, plain)]
    if plain and len(longer) == 1:
        return longer[0]
    close = difflib.get_close_matches(plain, candidates, 1, cutoff=0.6)
    return close[0] if close else None


def _part_of(name: str, longer: str) -> bool:
    """Whether a name is a run of whole words of a longer one, as `every` is of `every_steps`."""
    return f"_{name.lower()}_" in f"_{longer.lower()}_"


# How other programs call what has another name here: → section.key.
_OTHER_NAMES = {
    "learning_rate": "optim.lr",
    "max_lr": "optim.lr",
    "max_grad_norm": "optim.clip_norm",
    "grad_clip": "optim.clip_norm",
    "wd": "optim.weight_decay",
    "warmup": "optim.schedule.warmup_steps",
    "lr_scheduler_type": "optim.schedule",
    "batch_size": "train.global_batch_size",
    "train_batch_size": "train.global_batch_size",
    "per_device_train_batch_size": "train.micro_batch_size",
    "max_steps": "train.steps",
    "max_iters": "train.steps",
    "num_train_epochs": "train.epochs",
    "gradient_checkpointing": "train.checkpointing",
    "activation_checkpointing": "train.checkpointing",
    "precision": "train.dtype",
    "torch_dtype": "train.dtype",
    "block_size": "data.seq_len",
    "max_seq_len": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "sequence_length": "data.seq_len",
    "context_length": "data.seq_len",
    "output_dir": "run.dir",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep.last",
    "eval_steps": "eval.every_steps",
    "logging_steps": "log.every_steps",
    "n_layer": "model.num_hidden_layers",
    "num_layers": "model.num_hidden_layers",
    "n_head": "model.num_attention_heads",
    "num_heads": "model.num_attention_heads",
    "n_embd": "model.hidden_size",
    "d_model": "model.hidden_size",
    "top_k": "model.num_experts_per_tok",
}
# Values likewise.
_OTHER_VALUES = {
    "gpu": "cuda",
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
}


def _other_name(key: str, names: dict[str, Sequence[str]]) -> str | None:
    """The place of what other programs call `key`, if it is none of the places here."""
    place = _OTHER_NAMES.get(key)
    section, _, own = (place or "").rpartition(".")
    return place if own in names.get(section, ()) else None


def full_name(key: str, names: dict[str, Sequence[str]]) -> str | None:
    """section.key of a key that was typed without its section, with dashes or misspelt."""
    section, _, own = key.lstrip("-").rpartition(".")
    plain = own.replace("-", "_").lower()
    found = nearest(own, list(names.get(section, ()))) if section else None
    if found is not None:
        return f"{section}.{found}"
    # Reversed, so that of several places the first counts: run.name, not data.sources.name.
    places = {k: f"{p}.{k}" for p, keys in reversed(names.items()) if p for k in keys}
    return places.get(plain) or _other_name(plain, names) or places.get(nearest(own, list(places)))


def unknown_key_message(section: str, key: str, value: Any, names: dict[str, Sequence[str]]) -> str:
    """One line about a key that does not exist.

    Args:
        section: dotted place of the key; "" for the top level.
        names: every dotted place (with "" for the top level) → the keys that are valid there.
    """
    here = list(names.get(section, ()))
    given = "" if isinstance(value, (dict, list)) else f"={shown(value)}"
    head = f"unknown key {section}.{key}{given}" if section else f"unknown section or key {key!r}"
    best = nearest(key, here)
    plain = key.replace("-", "_").lower()
    # An exact name elsewhere beats a similar one here: the key sits one level too high or astray.
    # Not one that lacks a letter, as train.step does, or a word, as log.every does.
    exact = [f"{place}.{plain}" for place, keys in names.items() if place and plain in keys]
    other = _other_name(plain, names)
    if other is not None and (not exact or other.startswith(f"{section}.")):
        return f"{head}; did you mean {other}?"
    alike = best and (
        difflib.SequenceMatcher(None, plain, best.lower()).ratio() > 0.85 or _part_of(plain, best)
    )
    if best is not None and (alike or not exact):
        where = f"{section}.{best}" if section else best
        return f"{head}; did you mean {where}?"
    if exact:
        return f"{head}; did you mean {' or '.join(exact[:3])}?"
    everywhere = {f"{place}.{k}": k for place, keys in names.items() if place for k in keys}
    close = difflib.get_close_matches(plain, list(everywhere.values()), 1, cutoff=0.75)
    if close:
        full = next(place for place, k in everywhere.items() if k == close[0])
        return f"{head}; did you mean {full}?"
    valid = ", ".join(here)
    return f"{head}; valid names{' in ' + section if section else ''}: {valid}"


# --- messages -----------------------------------------------------------------------------------


def _hint(value: Any, allowed: str) -> str:
    words = re.findall(r"'(\w+)'", allowed)
    near = None
    if isinstance(value, str):
        other = _OTHER_VALUES.get(value.lower())
        near = other if other in words else nearest(value, words)
    if near is not None:
        return f"; did you mean {near}?"
    if isinstance(value, str) and "number" in allowed and re.fullmatch(r"[-+]?0[0-9]+", value):
        return f" (a leading 0 is ambiguous; write {int(value)})"
    return ""


def first_line(error: ValidationError, names: dict[str, Sequence[str]]) -> str:
    """The first of a pydantic error's findings in one line: key, value, what is allowed.

    Args:
        names: every dotted place → the keys valid there, for the nearest name.
    """
    found = error.errors(include_url=False)
    # An unknown key is often the cause of what else is wrong, so it is told first.
    found.sort(key=lambda e: e["type"] not in ("extra_forbidden", "unknown_key", "other_kind"))
    first = found[0]
    location = [part for part in first["loc"] if not _is_union_tag(part)]
    if first["type"] == "extra_forbidden" and location[-1:] != [first["loc"][-1]]:
        location.append(first["loc"][-1])
    if location[:2] == ["model", "config"]:
        del location[1]  # the file has the architecture's keys right under model
    if first["type"] == "extra_forbidden":
        *place, key = location
        line = unknown_key_message(
            ".".join(str(p) for p in place if not isinstance(p, int)),
            str(key),
            first["input"],
            names,
        )
    elif first["type"] == "value_error":
        # Our own validators write whole sentences.
        line = str(first["ctx"]["error"])
        place = ".".join(map(str, location))
        if place and place not in line and not _mentions(line, place, names):
            line = _placed(line, place, location, first["input"], names)
    elif first["type"] in ("unknown_key", "other_kind", "unknown_kind", "no_kind", "no_mapping"):
        line = _option_error(first, list(map(str, location)), names)
    elif first["type"] == "model_type" and len(location) > 1:
        place = ".".join(map(str, location))
        keys = ", ".join(names.get(place, ()))
        line = f"{place}={shown(first['input'])} must be null or a mapping of its keys: {keys}"
    else:
        places = [e for e in found if e["loc"][: len(location)] == first["loc"][: len(location)]]
        allowed = " or ".join(dict.fromkeys(allowed_by(e) for e in places))
        given = "" if first["type"] == "missing" else f"={shown(first['input'])}"
        verb = "is missing: it needs" if first["type"] == "missing" else "must be"
        place = ".".join(map(str, location))
        line = f"{place}{given} {verb} {allowed}{_hint(first['input'], allowed)}"
    return " ".join(line.split())


def _option_error(
    found: dict[str, Any], location: list[str], names: dict[str, Sequence[str]]
) -> str:
    """An error of an option of several kinds (`moe.settings`), with the nearest name."""
    kind_of, given = found["type"], found["input"]
    if kind_of == "unknown_key":
        *holder, key = location
        place = ".".join(holder)
        return unknown_key_message(place, key, given, {**names, place: found["ctx"]["names"]})
    near = nearest(str(given), found["ctx"]["names"]) if kind_of == "unknown_kind" else None
    told = "" if kind_of == "no_kind" else f"={shown(given)}"
    hint = f"; did you mean {near}?" if near else ""
    return f"{'.'.join(location)}{told} {found['msg']}{hint}"


def _mentions(line: str, place: str, names: dict[str, Sequence[str]]) -> bool:
    """Whether a sentence already names a key of the section it is about."""
    return any(f"{place}.{key}" in line for key in names.get(place, ()))


def _placed(
    line: str, place: str, location: list[Any], given: Any, names: dict[str, Sequence[str]]
) -> str:
    """A sentence of a section's own validator, with the place of the key that it begins with."""
    key, rest = re.fullmatch(r"(\w*)(.*)", line, re.DOTALL).groups()
    if key not in names.get(".".join(p for p in location if isinstance(p, str)), ()):
        return f"{place}: {line}"
    value = given.get(key) if rest.startswith(" ") and isinstance(given, dict) else None
    told = "" if value is None or isinstance(value, (dict, list)) else f"={shown(value)}"
    return f"{place}.{key}{told}{rest}"


def _is_union_tag(part: Any) -> bool:
    """Whether a step of a pydantic location names a branch of a union instead of a key."""
    return isinstance(part, str) and (
        part in ("int", "float", "str", "bool", "none")
        or part.startswith(("literal[", "list[", "dict[", "constrained-", "function-", "tuple["))
        or (part[:1].isupper() and part.isidentifier())
    )
