"""Settings: frozen classes of named values, and options that are one of several kinds.

    class Sign(Settings):
        kind: Literal["sign"] = "sign"
        rate: float = 1e-3

    BIASES = {"sign": Sign, "quantile": Quantile}

    class RouterConfig(Settings):
        bias: one_of(BIASES) | None = None

    RouterConfig(bias={"kind": "sign", "rate": 0.01})

A setting of one kind does not exist while another kind is chosen, so nothing can be set in vain.
The table is read when a value is checked: a file of your own adds a kind by `BIASES["toy"] = Toy`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, SerializationInfo, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError, core_schema


class Settings(BaseModel):
    """No unknown keys, no silent conversions, no changes after it is made."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


class OneOf:
    """How a value of one of several kinds is checked: what `one_of` puts into an annotation."""

    def __init__(
        self, table: Mapping[str, type[Settings]], default: str | None, words: tuple[str, ...]
    ) -> None:
        self.table, self.default, self.words = table, default, words

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self._checked,
            serialization=core_schema.plain_serializer_function_ser_schema(_dumped, info_arg=True),
        )

    def _checked(self, value: Any) -> Settings | str:
        if isinstance(value, Settings) or (isinstance(value, str) and value in self.words):
            return value
        if not isinstance(value, Mapping):
            kind = value if isinstance(value, str) and value in self.table else "…"
            words = "".join(f"{word} or " for word in self.words)
            text = f"must be {words}a mapping: {{kind: {kind}, …}}"
            raise PydanticCustomError("no_mapping", "{text}", {"text": text})
        kind = value.get("kind", self.default)
        if kind is None:
            having = self._having(*value) if value else []
            given = f" with {', '.join(value)}" if having else ""
            text = f"is missing; allowed{given}: {', '.join(having or self.table)}"
            raise _error("no_kind", text, "kind", None, having or self.table)
        chosen = self.table.get(kind) if isinstance(kind, str) else None
        if chosen is None:
            text = f"is unknown; allowed: {', '.join(self.table)}"
            raise _error("unknown_kind", text, "kind", kind, self.table)
        unknown = [key for key in value if key not in chosen.model_fields]
        if unknown:
            has = [key for key in chosen.model_fields if key != "kind"]
            text = f"is no key of kind {kind}, which has {', '.join(has) or 'no other'}"
            if others := self._having(unknown[0]):
                text += f"; it is one of kind {', '.join(others)}"
                raise _error("other_kind", text, unknown[0], value[unknown[0]], has)
            raise _error("unknown_key", text, unknown[0], value[unknown[0]], has)
        return chosen.model_validate({"kind": kind, **value})

    def shares(self, key: str, first: object, second: object) -> bool:
        """Whether two kinds have a setting from one class, so that it means the same in both."""
        known = [self.table[kind] for kind in (first, second) if kind in self.table]
        owners = {_owner(chosen, key) for chosen in known}
        return len(known) == 2 and len(owners) == 1 and None not in owners

    def _having(self, *keys: str) -> list[str]:
        """The kinds that have all of these keys."""
        return [kind for kind, found in self.table.items() if set(keys) <= {*found.model_fields}]


def _owner(settings: type[Settings], key: str) -> type | None:
    """The class that `settings` have `key` from; None: they have no such key."""
    return next((c for c in settings.__mro__ if key in inspect.get_annotations(c)), None)


def _error(name: str, text: str, key: str, given: Any, names: Iterable[str]) -> ValidationError:
    """An error about one key of a value, whose text continues `place.key=given `.

    Args:
        names: what would be right in its place, for whoever looks for the nearest.
    """
    said = PydanticCustomError(name, "{text}", {"text": text, "names": list(names)})
    details = InitErrorDetails(type=said, loc=(key,), input=given)
    return ValidationError.from_exception_data("settings", [details])


def _dumped(value: Any, info: SerializationInfo) -> Any:
    if not isinstance(value, Settings):
        return value
    values = value.model_dump(mode=info.mode)
    return {"kind": values["kind"], **values}  # the kind first, wherever its class has it


def one_of(
    table: Mapping[str, type[Settings]], default: str | None = None, words: tuple[str, ...] = ()
) -> Any:
    """The annotation of a field whose value is one of several kinds, told apart by their `kind`.

    Args:
        table: kind → its settings, a class with a field `kind`; read when a value is checked.
        default: the kind of a mapping that names none; None: each must.
        words: plain words that are values too.
    """
    return Annotated[Any, OneOf(table, default, words)]
