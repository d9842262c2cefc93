"""From a YAML file and `section.key=value` words to plain values, and from a validation error to
one line.

YAML here is YAML with the surprises of version 1.1 taken out: `1e-4` and `3e8` are numbers, `on`,
`off`, `yes` and `no` are words, `010` and `1:30` are text (never base eight or sixty), dates are
text, and a key given twice is an error. The same reader parses the values of overrides, so a value
has the same type in both places.
"""

from __future__ import annotations

import difflib
import os.path
import re
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import yaml
from pydantic import AfterValidator, BaseModel, ValidationError
from pydantic.fields import FieldInfo

from models.errors import UserError, allowed_by
from moe.settings import OneOf


class ConfigError(UserError):
    """A mistake in a config, told in one line."""


def fail(error: Exception) -> NoReturn:
    """End the program because of a mistake of the user's: one line, exit code 2."""
    at = getattr(error, "filename", None)  # of an OSError
    told = f"{at}: {error.strerror}" if at else error
    print(f"error: {told}", file=sys.stderr)
    raise SystemExit(2)


# --- paths --------------------------------------------------------------------------------------


def expand_home(text: str) -> str:
    """A path as typed, with a leading `~` or `~user` replaced by that home folder.

    A shell does that outside of quotes and at the beginning of a word only, not in `run.dir=~/x`.
    Every path that a user gives passes through here or through `user_path`: as the `type` of a
    script's argument, or as a config field of type `PathText`.

    Raises:
        UserError: there is no such user.
    """
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise UserError(
            f"{text!r} begins with ~, and there is no user {expanded[1:].partition('/')[0]!r}; "
            f"a file of that name is ./{text}"
        )
    return expanded


def user_path(text: str) -> Path:
    """`expand_home` as a Path, for argparse."""
    return Path(expand_home(text))


PathText = Annotated[str, AfterValidator(expand_home)]
"""Type of a config field that holds a path."""


# --- YAML ---------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """SafeLoader with its own rules for plain scalars and no repeated keys."""

    yaml_implicit_resolvers: typing.ClassVar[dict] = {}

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, TypeError, AttributeError):  # !!int abc, !!bool maybe
            if not isinstance(node, yaml.ScalarNode):
                raise
            tag = node.tag.rpartition(":")[2]
            line = node.start_mark.line + 1
            raise ConfigError(
                f"{node.value[:40]!r} in line {line} cannot be read as {tag}"
            ) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = key_node.value, key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(
                    f"a key must be text (line {line}); put quotes around a text with {{ or ["
                )
            if key in seen:
                raise ConfigError(f"key {key!r} is given twice (second time in line {line})")
            seen.add(key)
        return super().construct_mapping(node, deep)


_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)$|[-+]?0x[0-9a-fA-F_]+$|[-+]?0o[0-7_]+$")
_FLOAT = re.compile(
    r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))([eE][-+]?[0-9]+)?$"
    r"|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)
_RULES = (
    ("bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+0123456789."),
    ("null", re.compile(r"(~|null|Null|NULL)?$"), ["~", "n", "N", ""]),
    ("merge", re.compile(r"<<$"), "<"),
)
for _tag, _pattern, _first in _RULES:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, list(_first))


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node).replace("_", ""), 0)


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float | int:
    text = loader.construct_scalar(node).replace("_", "").lower()
    sign, text = (-1, text[1:]) if text[0] == "-" else (1, text.lstrip("+"))
    if text in (".inf", ".nan"):
        return sign * float(text[1:])
    # 3e8 and 1e4 are how one writes large whole numbers; they count as such.
    if "." not in text and "-" not in text:
        mantissa, exponent = text.split("e")
        if int(exponent) <= 18:
            return sign * int(mantissa) * 10 ** int(exponent)
    return sign * float(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def parse_yaml(text: str, what: str) -> Any:
    """The value of a YAML text; `what` names it in errors.

    Raises:
        ConfigError: not YAML, or a repeated key.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{what} is nested too deep") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{what} is not valid YAML{where}: {problem}") from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: no such file, not YAML, or not a mapping.
    """
    path = user_path(str(path))
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], 1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"config file {path} does not exist{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    value = parse_yaml(text, str(path))
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold sections (name: values), not {kind(value)}")
    return value


# --- overrides ----------------------------------------------------------------------------------


def read_words(
    words: Sequence[str], names: dict[str, Sequence[str]]
) -> tuple[str | None, list[str]]:
    """The config file, if a command line names one, and its overrides.

    Args:
        names: every dotted place → the keys valid there.

    Raises:
        ConfigError: more than one file, an option such as `--steps 41`, or a setting without its
            equals sign.
    """
    for word, value in zip(words, [*words[1:], "…"]):
        if word.startswith("-") and "=" not in word:
            meant = full_name(word, names)
            given = "…" if "=" in value or value.startswith("-") else value
            hint = f"; did you mean {meant}={given}?" if meant else ""
            raise ConfigError(f"{word} is no option; settings are section.key=value{hint}")
    paths = [word for word in words if "=" not in word]
    for word, value in zip(words, [*words[1:], "…"]):
        if word in paths and _is_setting(word, names):
            given = "…" if "=" in value else value
            raise ConfigError(f"{word} is a setting; write {full_name(word, names)}={given}")
    if any(word[-1:] in ("]", "}") for word in paths):
        raise ConfigError(
            f"{paths[-1]} is no config file; put quotes around a value with spaces, for example "
            "'data.sources=[{path: text.jsonl}]'"
        )
    if len(paths) > 1:
        raise ConfigError(f"one config file, please, not {len(paths)}: {' '.join(paths)}")
    return (paths[0] if paths else None), [word for word in words if "=" in word]


def _is_setting(word: str, names: dict[str, Sequence[str]]) -> bool:
    """Whether a word without an equals sign is meant as section.key, and not as a file."""
    section, _, key = word.rpartition(".")
    if key in ("yaml", "yml") or "/" in word:
        return False
    if section:
        return section in names and full_name(word, names) is not None
    return any(key in keys for place, keys in names.items() if place)


def split_override(word: str) -> tuple[str, str]:
    """section.key and the text of its value, of `section.key=value` or `--section.key=value`."""
    path, _, text = word.partition("=")
    return path.strip().removeprefix("--"), text


def apply_overrides(
    values: dict[str, Any],
    overrides: Sequence[str],
    names: dict[str, Sequence[str]],
    kinds: Mapping[str, OneOf] | None = None,
) -> dict[str, Any]:
    """`values` with each `section.key=value` set; a number steps into a list (data.sources.0.path),
    a key of an option into it (router.bias.rate).

    Another kind of an option starts from that kind's defaults: of what it was told before, only
    what the command line said stays.

    Args:
        names: every dotted place → the keys valid there, for the section of a key without one.
        kinds: every dotted place of an option of several kinds → its kinds.

    Raises:
        ConfigError: a word that is no assignment, or a path through something that holds no keys.
    """
    given: set[str] = set()
    for word in overrides:
        path, _, text = word.partition("=")
        path = path.strip().removeprefix("--")
        if "=" not in word or not path:
            raise ConfigError(f"{word!r} is not an override; write section.key=value")
        keys = path.split(".")
        if len(keys) < 2 or not all(keys):
            meant = full_name(path, names)
            example = f"did you mean {meant}={text}?" if meant else "for example train.steps=50"
            raise ConfigError(f"override {word!r} must name section.key; {example}")
        value = parse_yaml(text, f"the value of override {word!r}")
        holder = _enter(values, keys, word, kinds or {})
        place, key = path.rpartition(".")[::2]
        option = (kinds or {}).get(place)
        if option is not None and key == "kind" and holder.get("kind", option.default) != value:
            for old in [old for old in holder if f"{place}.{old}" not in given]:
                del holder[old]
        holder[int(key) if isinstance(holder, list) else key] = value
        given.add(path)
    return values


def _is_index(key: str) -> bool:
    return key.isascii() and key.isdecimal()


def _enter(values: Any, keys: list[str], word: str, kinds: Mapping[str, OneOf]) -> Any:
    """The mapping or list that the last of `keys` is a key of; what is unset on the way there
    becomes one."""
    target = values
    for depth, key in enumerate(keys):
        place = ".".join(keys[:depth])
        if isinstance(target, list):
            if not _is_index(key) or int(key) > len(target):
                raise ConfigError(
                    f"override {word!r}: {place} is a list of {len(target)}, so {key!r} must be a "
                    f"number up to {len(target)}"
                )
            key = int(key)
            if key == len(target):
                target.append(None)
        elif not isinstance(target, dict):
            raise ConfigError(f"override {word!r}: {place} is {kind(target)} and holds no keys")
        if depth == len(keys) - 1:
            break
        inner = target[key] if isinstance(target, list) else target.get(key)
        option = kinds.get(".".join(keys[: depth + 1]))
        if inner is None or (option is not None and inner in option.words):
            target[key] = [] if _is_index(keys[depth + 1]) else {}
        target = target[key]
    return target


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
    "warmup": "optim.warmup_steps",
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
    "save_total_limit": "checkpoint.keep_last",
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
    elif first["type"] == "unknown_key":  # of one kind of an option (`moe.settings`)
        *place, key = map(str, location)
        here = ".".join(place)
        own = {**names, here: first["ctx"]["names"]}
        line = unknown_key_message(here, key, first["input"], own)
    elif first["type"] in ("other_kind", "unknown_kind", "no_kind", "no_mapping"):
        given = "" if first["type"] == "no_kind" else f"={shown(first['input'])}"
        known = first["ctx"].get("names", ()) if first["type"] == "unknown_kind" else ()
        near = nearest(str(first["input"]), known)
        line = f"{'.'.join(map(str, location))}{given} {first['msg']}"
        line += f"; did you mean {near}?" if near else ""
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
