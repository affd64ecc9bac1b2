"""Reading JSON fields one by one, with an error that names the one that is wrong. Owns no field's meaning.

Null counts as absent, as the protocol has it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Never

from .errors import Refused

Object = Mapping[str, Any]


def refuse(param: str, text: str, *, code: str = "invalid_value", status: int = 400) -> Never:
    """Raises Refused for one parameter."""
    raise Refused(status, f"{param}: {text}" if param else text, param=param or None, code=code)


def unsupported(param: str, text: str) -> Never:
    """Raises Refused for what this gateway does not do."""
    refuse(param, text, code="unsupported_parameter")


def document(body: bytes) -> Object:
    """A request's body. Raises Refused for what is no JSON object, or holds what JSON cannot."""

    def constant(name: str) -> Never:
        refuse("", f"the body is no JSON: {name} is no number", code="invalid_json")

    try:
        made = json.loads(body, parse_constant=constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        text = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        refuse("", f"the body is no JSON: {text}", code="invalid_json")
    if not isinstance(made, dict):
        refuse("", "the body must be a JSON object", code="invalid_json")
    return made


class Fields:
    """One object's fields, each to be taken once; `rest_is_unknown` refuses what nobody took."""

    def __init__(self, source: Object, at: str = "") -> None:
        self._left = {name: value for name, value in source.items() if value is not None}
        self._at = at

    def path(self, name: str) -> str:
        return f"{self._at}.{name}" if self._at else name

    def has(self, name: str) -> bool:
        """Whether it is there and was not taken yet."""
        return name in self._left

    def take(self, name: str) -> Any:
        return self._left.pop(name, None)

    def text(self, name: str) -> str | None:
        value = self.take(name)
        return None if value is None else text_of(value, self.path(name))

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            refuse(self.path(name), "must be true or false")
        return value

    def whole(self, name: str, *, least: int | None = None, most: int | None = None) -> int | None:
        value = self.take(name)
        return None if value is None else whole_of(value, self.path(name), least=least, most=most)

    def number(self, name: str) -> float | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            refuse(self.path(name), "must be a number")
        try:
            made = float(value)
        except OverflowError:
            made = math.inf
        if not math.isfinite(made) or abs(made) > 3e38:  # the contract's numbers are of 32 bits
            refuse(self.path(name), "is out of range")
        return made

    def object(self, name: str) -> Object | None:
        value = self.take(name)
        return None if value is None else object_of(value, self.path(name))

    def items(self, name: str) -> Sequence[Any] | None:
        value = self.take(name)
        if value is not None and not isinstance(value, list):
            refuse(self.path(name), "must be an array")
        return value

    def ignore(self, *names: str) -> None:
        """Takes what has no effect here."""
        for name in names:
            self.take(name)

    def rest_is_unknown(self) -> None:
        """Raises Refused naming the first field that is left."""
        for name in sorted(self._left):
            unsupported(self.path(name), "this gateway does not know it")


def object_of(value: Any, at: str) -> Object:
    if not isinstance(value, dict):
        refuse(at, "must be an object")
    return value


def text_of(value: Any, at: str) -> str:
    if not isinstance(value, str):
        refuse(at, "must be a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        refuse(at, "holds half a surrogate pair, which is no character")
    return value


def whole_of(value: Any, at: str, *, least: int | None = None, most: int | None = None) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(at, "must be a whole number")
    if (least is not None and value < least) or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        refuse(at, f"must be {bounds}")
    return value
