"""The error that says: what was given cannot be used. It needs neither torch nor pydantic."""

from __future__ import annotations

from typing import Any


class UserError(ValueError):
    """A setting, a file or data that cannot be used, told in one line for whoever gave it.

    Programs answer it with that line and exit code 2. Any other ValueError is a fault of the
    program or of a library, and its traceback is shown.
    """


def brief(error: BaseException) -> str:
    """Kind and first line of an error of a library, for a message of one line."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def allowed_by(error: dict[str, Any]) -> str:
    """What would have been right, from one pydantic error."""
    kind_of, context = error["type"], error.get("ctx", {})
    fixed = {
        "int": "a whole number",
        "float": "a number",
        "finite": "a finite number",
        "bool": "true or false",
        "string": "text (put it in quotes if it looks like a number or true/false)",
        "list": "a list",
        "tuple": "a list",
        "dict": "a mapping",
        "model": "a mapping of keys",
        "missing": "a value (it has no default)",
    }
    if (first := kind_of.partition("_")[0]) in fixed:
        return fixed[first]
    if kind_of == "literal_error":
        return f"one of {context['expected']}"
    for name, said in (
        ("min_length", "a list of at least"),
        ("max_length", "a list of at most"),
        ("gt", "a number >"),
        ("ge", "a number >="),
        ("lt", "a number <"),
        ("le", "a number <="),
    ):
        if name in context:  # a limit is an integer where the field is
            whole = kind_of.endswith("equal") and isinstance(context[name], int)
            return f"{said.replace('number', 'whole number') if whole else said} {context[name]:g}"
    return error["msg"]
