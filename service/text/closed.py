"""JSON schemas whose objects are closed: an object that names its properties has no others unless the schema opens it.

JSON Schema itself says the opposite, and a small model writes invented keys, some of them twice, for as long as it may.
A schema opens an object with `additionalProperties` or `unevaluatedProperties`; one that closes it by itself, with the
first, is left as it is. Else schemas that hold together for one object (`allOf`, `anyOf` beside `properties`, `$ref`
beside either) allow each other's properties.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_INSIDE = ("items", "prefixItems", "contains", "additionalItems", "additionalProperties", "unevaluatedProperties")
_TOGETHER = ("allOf", "anyOf", "oneOf")
_OPENING = ("additionalProperties", "unevaluatedProperties")

_OPEN = ""
"""Stands among names for "any": no model is asked for a property without a name."""

Names = frozenset[str]


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
        if target is not None and around:
            del made["$ref"]  # elsewhere the same schema stands alone
            made["allOf"] = [*_list(made, "allOf"), self.closed(target, around)]
        around |= referred
        if isinstance(schema.get("properties"), dict) and _OPEN not in around and "additionalProperties" not in schema:
            made["properties"] |= dict.fromkeys(sorted(around - own), True)
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
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            return None
        found: Any = self._whole
        for step in pointer.split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else None


def _keys(schema: dict[str, Any]) -> Names:
    properties = schema.get("properties")
    names = frozenset(properties) if isinstance(properties, dict) else frozenset()
    return names | {_OPEN} if any(schema.get(word, False) is not False for word in _OPENING) else names


def _list(schema: dict[str, Any], word: str) -> list[Any]:
    found = schema.get(word)
    return found if isinstance(found, list) else []
