"""JSON schemas whose objects are closed: an object that names its properties has no others unless the schema opens it.

JSON Schema itself says the opposite, and a small model writes invented keys, some of them twice, for as long as it may.
A schema opens an object with `additionalProperties` or `unevaluatedProperties`; one that closes it by itself, with the
first, is left as it is. Else schemas that hold together for one object (`allOf`, `anyOf` beside `properties`, `$ref`
beside either) allow each other's properties. What a schema requires, matches by a pattern or has in a constant is named
by it too: closing must leave something that fits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_INSIDE = ("items", "prefixItems", "contains", "additionalItems", "additionalProperties", "unevaluatedProperties")
_TOGETHER = ("allOf", "anyOf", "oneOf")
_OPENING = ("additionalProperties", "unevaluatedProperties")

_OPEN = ""
"""Stands among names for "any": no model is asked for a property without a name."""


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Stands among names for all that it matches."""

    text: str


Names = frozenset[str | _Pattern]


def close_objects(text: str) -> str:
    """The schema with its objects closed; one that is no JSON object is as it was. Raises RecursionError."""
    try:
        schema = json.loads(text)
    except ValueError:
        return text
    return json.dumps(_Closing(schema).closed(schema, frozenset())) if isinstance(schema, dict) else text


class _Closing:
    def __init__(self, whole: dict[str, Any]) -> None:
        self._whole = whole
        self._known: dict[int, Names] = {}
        self._called = dict(_called(whole))  # schemas by what `$ref` may call them, beside pointers

    def closed(self, schema: Any, others: Names) -> Any:
        """`others`: names of properties of schemas that hold for the same object."""
        if isinstance(schema, list):
            return [self.closed(each, others) for each in schema]
        if not isinstance(schema, dict):
            return schema
        target = self._target(schema)
        own, referred = _keys(schema), self._names(target)
        spoken = {word: [self._names(each) for each in _list(schema, word)] for word in _TOGETHER}
        here = others | own | referred
        made = dict(schema)
        for word in _MAPS:
            if isinstance(schema.get(word), dict):
                made[word] = {name: self.closed(each, frozenset()) for name, each in schema[word].items()}
        for word in _INSIDE:
            if word in schema:
                made[word] = self.closed(schema[word], frozenset())
        for word in _TOGETHER:
            if not isinstance(schema.get(word), list):
                continue
            beside = here.union(*(names for other in _TOGETHER if other != word for names in spoken[other]))
            made[word] = [
                # Alternatives do not hold together.
                self.closed(
                    each, beside.union(*spoken[word][:i], *spoken[word][i + 1 :]) if word == "allOf" else beside
                )
                for i, each in enumerate(schema[word])
            ]
        around = (others | own).union(*(names for word in _TOGETHER for names in spoken[word]))
        if target is not None and not around <= referred:
            del made["$ref"]  # elsewhere the same schema stands alone
            made["allOf"] = [*_list(made, "allOf"), self.closed(target, around)]
        around |= referred
        if isinstance(schema.get("properties"), dict) and _OPEN not in around and "additionalProperties" not in schema:
            allowed = sorted(name for name in around if isinstance(name, str))
            made["properties"] |= dict.fromkeys((name for name in allowed if name not in made["properties"]), True)
            patterns = {name.text for name in around if isinstance(name, _Pattern)}
            if patterns:
                made["patternProperties"] = dict.fromkeys(sorted(patterns), True) | made.get("patternProperties", {})
            made["additionalProperties"] = False
        return made

    def _names(self, schema: Any) -> Names:
        """The properties that the schema, or one that holds together with it, names; `_OPEN` if one takes any."""
        if not isinstance(schema, dict):
            return frozenset()
        if id(schema) not in self._known:
            self._known[id(schema)] = frozenset()  # a circle says no more
            parts = [each for word in _TOGETHER for each in _list(schema, word)]
            self._known[id(schema)] = _keys(schema).union(
                self._names(self._target(schema)), *(self._names(part) for part in parts)
            )
        return self._known[id(schema)]

    def _target(self, schema: dict[str, Any]) -> dict[str, Any] | None:
        """What `$ref` refers to, if it is a schema inside the document."""
        pointer = schema.get("$ref")
        if not isinstance(pointer, str):
            return None
        if pointer in self._called:
            return self._called[pointer]
        base, hash_, path = pointer.partition("#")
        found: Any = self._called.get(base) if base else self._whole
        if not hash_ or (path and not path.startswith("/")):
            return None
        for step in path.split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = found[int(name)] if name.isdecimal() and len(name) < 6 and int(name) < len(found) else None
            else:
                found = found.get(name) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else None


def _keys(schema: dict[str, Any]) -> Names:
    names: set[str | _Pattern] = set()
    for values in (schema.get("properties"), schema.get("const"), *_list(schema, "enum")):
        if isinstance(values, dict):
            names.update(values)
    names.update(name for name in _list(schema, "required") if isinstance(name, str))
    if isinstance(schema.get("patternProperties"), dict):
        names.update(map(_Pattern, schema["patternProperties"]))
    names.discard(_OPEN)
    if any(schema.get(word, False) is not False for word in _OPENING):
        names.add(_OPEN)
    return frozenset(names)


def _called(schema: Any, base: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Schemas inside by their `$id` and `$anchor`, alone and behind the `$id` around them."""
    if isinstance(schema, list):
        for each in schema:
            yield from _called(each, base)
    if not isinstance(schema, dict):
        return
    identity, anchor = schema.get("$id"), schema.get("$anchor")
    if isinstance(identity, str) and identity:
        base = identity.rstrip("#")
        yield base, schema
    if isinstance(anchor, str):
        yield f"#{anchor}", schema
        yield f"{base}#{anchor}", schema
    for each in schema.values():
        yield from _called(each, base)


def _list(schema: dict[str, Any], word: str) -> list[Any]:
    found = schema.get(word)
    return found if isinstance(found, list) else []
