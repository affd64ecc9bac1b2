"""Which objects a schema closes, and that schemas which hold together allow each other's properties."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from service.text.closed import close_objects

A, B, C = ({name: {"type": "integer"}} for name in "abc")
POINT = {"properties": A, "required": ["a"]}
SHUT = {"additionalProperties": False}
REFERRED = {"$ref": "#/$defs/p"}
MIX = {"a": 1, "b": "x", "c": 3}  # of two alternatives; but for the closed objects the second would take it


def takes(schema: dict[str, Any], value: object) -> bool:
    closed = json.loads(close_objects(json.dumps(schema)))
    return jsonschema.Draft202012Validator(closed).is_valid(value)


@pytest.mark.parametrize(
    ("schema", "fits", "does_not"),
    [
        ({"properties": A}, {"a": 1}, {"a": 1, "b": 2}),
        ({"items": {"properties": A}}, [{"a": 1}], [{"b": 2}]),
        ({"properties": {"p": {"properties": A}}}, {"p": {"a": 1}}, {"p": {"b": 1}}),
        ({"$ref": "#/$defs/p", "$defs": {"p": POINT}}, {"a": 1}, {"a": 1, "b": 2}),
        ({"anyOf": [{"$ref": "#/$defs/p"}, {"type": "null"}], "$defs": {"p": POINT}}, {"a": 1}, {"a": 1, "b": 2}),
        ({"allOf": [{"properties": A}, {"properties": B}]}, {"a": 1, "b": 2}, {"a": 1, "c": 3}),
        ({"allOf": [REFERRED, {"properties": B}], "$defs": {"p": POINT}}, {"a": 1, "b": 2}, {"a": 1, "c": 3}),
        ({"$ref": "#/$defs/p", "properties": B, "$defs": {"p": POINT}}, {"a": 1, "b": 2}, {"a": 1, "c": 3}),
        ({"properties": A, "anyOf": [{"properties": B, "required": ["b"]}, {"properties": C}]}, {"a": 1, "b": 2}, MIX),
        ({"properties": A, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"a": 1}, {"a": 1, "z": 2}),
        ({"properties": A, "patternProperties": {"^x": {}}}, {"a": 1, "xy": 2}, {"y": 2}),
        ({"allOf": [{**SHUT, "properties": A}, {"properties": B}]}, {"a": 1}, {"a": 1, "b": 2}),  # by its own word
    ],
)  # fmt: skip
def test_an_object_that_names_its_properties_has_no_others(schema: dict[str, Any], fits: object, does_not: object):
    assert takes(schema, fits)
    assert not takes(schema, does_not)


@pytest.mark.parametrize(
    ("schema", "fits"),
    [
        ({"properties": A, "required": ["a", "b"]}, {"a": 1, "b": 2}),
        ({"properties": A, "allOf": [{"required": ["b"]}]}, {"a": 1, "b": 2}),
        ({"properties": A, "anyOf": [{"required": ["b"]}, {"required": ["c"]}]}, {"b": 1, "a": 2}),
        ({"properties": A, "const": {"a": 1, "z": 2}}, {"a": 1, "z": 2}),
        ({"properties": A, "enum": [{"a": 1}, {"z": 2}]}, {"z": 2}),
        ({"allOf": [{"properties": A}, {"patternProperties": {"^x": {"type": "integer"}}}]}, {"a": 1, "x1": 2}),
        ({"allOf": [{"properties": A}, {"patternProperties": {"^x": {}}, "required": ["x1"]}]}, {"a": 1, "x1": 2}),
        ({"allOf": [{"$ref": "#/$defs/0/p"}, {"properties": B}], "$defs": [{"p": POINT}]}, {"a": 1, "b": 2}),
        ({"allOf": [{"$ref": "#p"}, {"properties": B}], "$defs": {"p": {"$anchor": "p", **POINT}}}, {"a": 1, "b": 2}),
        ({"allOf": [{"$ref": "p"}, {"properties": B}], "$defs": {"p": {"$id": "p", **POINT}}}, {"a": 1, "b": 2}),
        (
            {"$id": "urn:x", "allOf": [{"$ref": "urn:x#/$defs/p"}, {"properties": B}], "$defs": {"p": POINT}},
            {"a": 1, "b": 2},
        ),
        (
            {"properties": {"next": {"$ref": "#", "required": ["a"]}, **A}, "additionalProperties": False},
            {"next": {"a": 1, "next": {"a": 2}}},
        ),
    ],
)
def test_what_fits_without_inventing_a_name_still_fits(schema: dict[str, Any], fits: object):
    assert jsonschema.Draft202012Validator(schema).is_valid(fits)
    assert takes(schema, fits)
    assert not takes(schema, {"a": 1, "invented": 2})


@pytest.mark.parametrize(
    ("schema", "fits"),
    [
        ({"type": "object"}, {"z": 1}),  # it names none: it says any object
        ({"properties": A, "additionalProperties": True}, {"a": 1, "z": 2}),
        ({"properties": A, "additionalProperties": {"type": "integer"}}, {"a": 1, "z": 2}),
        ({"properties": A, "unevaluatedProperties": True}, {"z": 1}),
        ({"allOf": [{"properties": A}, {"properties": B, "additionalProperties": True}]}, {"a": 1, "b": 2, "z": 3}),
        ({"const": {"properties": {"a": 1}}}, {"properties": {"a": 1}}),
        ({"properties": {"next": {"$ref": "#"}, **A}}, {"next": {"next": {"a": 1}}}),
    ],
)
def test_what_the_schema_opens_stays_open(schema: dict[str, Any], fits: object):
    assert takes(schema, fits)


def test_what_is_no_object_is_as_it_was():
    for text in ("{", "[]", "true", '{"a": NaN'):
        assert close_objects(text) == text
