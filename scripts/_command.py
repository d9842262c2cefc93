"""What the scripts share: their options, and how a mistake of the user's is told."""

from __future__ import annotations

import argparse
import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from pydantic import ValidationError

from training.config.load import expand_home, fail
from training.config.messages import first_line
from training.faults import SCRIPT_ERRORS

Main = Callable[..., int]


class Parser(argparse.ArgumentParser):
    """Tells a mistake in the options in one line, as every other mistake is told."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message.removeprefix('argument ')}\n")


def make_parser(doc: str | None, config: bool = False) -> Parser:
    """A parser whose help is the script's docstring.

    Args:
        config: the command takes a config and overrides, as train.py does.
    """
    parser = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if config:
        parser.add_argument("config", type=expand_home, help="YAML file, as for train.py")
        parser.add_argument(
            "overrides", nargs="*", metavar="section.key=value", help="settings, as for train.py"
        )
    return parser


def bounded(
    kind: type = int,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> Callable[[str], Any]:
    """Of argparse: a number within bounds."""
    bounds = (
        (least, operator.ge, "at least"),
        (above, operator.gt, "above"),
        (most, operator.le, "at most"),
    )
    given = [bound for bound in bounds if bound[0] is not None]

    def read(text: str) -> Any:
        value = kind(text)
        if not all(compare(value, bound) for bound, compare, _ in given):
            allowed = " and ".join(f"{words} {bound:g}" for bound, _, words in given)
            raise argparse.ArgumentTypeError(f"{text} must be {allowed}")
        return value

    read.__name__ = kind.__name__
    return read


def listed(kind: Callable[[str], Any] = str) -> Callable[[str], list]:
    """Of argparse: values separated by commas; none for an empty text."""

    def read(text: str) -> list:
        return [kind(part) for part in text.split(",") if part]

    read.__name__ = f"list of {kind.__name__}"
    return read


@contextmanager
def told() -> Iterator[None]:
    """Ends the program with one line and exit code 2 where the user has made a mistake."""
    try:
        yield
    except ValidationError as error:  # options that fill a section of the config
        fail(ValueError(first_line(error, {})))
    except SCRIPT_ERRORS as error:
        fail(error)


def command(main: Main) -> Main:
    """A script's `main`, whose mistakes of the user's are told."""

    @functools.wraps(main)
    def run(arguments: list[str] | None = None) -> int:
        with told():
            return main(arguments)

    return run
