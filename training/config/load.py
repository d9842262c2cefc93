"""From a YAML file and `section.key=value` words to plain values.

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import yaml
from pydantic import AfterValidator

from models.errors import UserError
from moe.settings import OneOf
from training.config.messages import full_name, kind


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
    what the command line said stays, and what both kinds inherit from one class.

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
        if option is not None and key == "kind":
            before = holder.get("kind", option.default)
            for old in [old for old in holder if f"{place}.{old}" not in given]:
                if before != value and not option.shares(old, before, value):
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
