"""A document that a reader yields, or what was wrong in its place.

What is wrong with a line is an item too: whether to stop or to skip is up to whoever reads.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from training.data.config import DataError

Position = dict[str, Any]
"""Where a reader resumes, as plain JSON."""

_NO_FIELD = "no text field"


class Item(NamedTuple):
    """A document, or what was wrong in its place."""

    text: str | None
    size: int
    """bytes of the text in UTF-8"""
    next: Position
    """where reading resumes after this item"""
    problem: str | None = None
    """kind of problem, for counting"""
    place: str = ""
    """file:line (or file, row) and detail, for the message"""

    def check(self, on_bad_line: str) -> None:
        """Raise DataError if something was wrong and `on_bad_line` is stop."""
        if self.problem is not None and on_bad_line == "stop":
            # A field by another name is missing everywhere: leaving such lines out leaves nothing.
            skip = " (data.on_bad_line=skip leaves such lines out)"
            raise DataError(f"{self.problem} at {self.place}{skip * (self.problem != _NO_FIELD)}")


def bad_item(problem: str, place: str, detail: BaseException | str, position: Position) -> Item:
    """An item without text; of an error, the first line is told."""
    if isinstance(detail, BaseException):
        detail = first_line(detail)
    return Item(None, 0, position, problem, f"{place}: {detail}")


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return str(error).split("\n")[0][:200]


def item_from_bytes(line: bytes, place: str, position: Position) -> Item:
    """The item of a text in UTF-8."""
    try:
        return Item(line.decode("utf-8"), len(line), position)
    except UnicodeDecodeError as error:
        return bad_item("invalid UTF-8", place, error, position)


def item_from_json(line: bytes, field: str, place: str, position: Position) -> Item:
    """The item of one JSON object."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return bad_item("invalid UTF-8", place, error, position)
    except (ValueError, RecursionError) as error:  # JSON's own, or a number of 4,300 digits
        return bad_item("malformed JSON", place, error, position)
    return item_from_row(row, field, place, position)


def item_from_row(row: Any, field: str, place: str, position: Position) -> Item:
    """The item of one object: the text in its `field`, or what is wrong with it."""
    if not isinstance(row, dict):
        return bad_item("not an object", place, f"a {type(row).__name__}, not an object", position)
    if field not in row:
        names = ", ".join(map(str, list(row)[:10]))
        likely = max(
            (name for name, value in row.items() if isinstance(value, str)),
            key=lambda name: len(row[name]),
            default=None,
        )
        remedy = f"; give the source text_field: {likely}" if likely else ""
        detail = f"no field {field!r}; it has {names or 'none'}{remedy}"
        return bad_item(_NO_FIELD, place, detail, position)
    text = row[field]
    if not isinstance(text, str):
        detail = f"field {field!r} is {type(text).__name__}, not a string"
        return bad_item("text is not a string", place, detail, position)
    try:
        return Item(text, len(text.encode("utf-8")), position)
    except UnicodeEncodeError as error:  # "\ud800" in JSON: half a character
        return bad_item("invalid UTF-8", place, error, position)
