"""How much a message may hold, counted in its bytes before anything is made of it. Pure; owns the count, no wording.

A field of two bytes becomes an object of fifty and more: 64 MiB of empty parts are 32 million of them. So the fields of
a message and of all messages in it are counted first, one step each, and the count ends at its limit: a long text is
one field, and what is refused costs no more than what is allowed.
"""

from __future__ import annotations

from functools import cache
from typing import TypeAlias

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from service.rpc.fields import MAX_PARTS, MAX_TOKENS

MAX_FIELDS = 4 * MAX_PARTS  # a message has a role, parts and their kind
SMALL = 2**20  # bytes that are not counted: whatever they hold, it takes some tens of megabytes for a moment
_NUMBER, _BYTES = 0, 2  # kinds of a field on the wire
_WIDTHS = {1: 8, 5: 4, 3: 0, 4: 0}  # of others; the last two are a group's ends, and what is between them counts
_HIGH = bytes(range(0x80, 0x100))  # all bytes of a number but its last

# What is in a field: another message, or packed numbers. Other fields are what their bytes are.
Shape: TypeAlias = "dict[int, Shape | None]"

_NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
    FieldDescriptor.CPPTYPE_BOOL,
    FieldDescriptor.CPPTYPE_ENUM,
}


def shape_of(method: str) -> Shape:
    """Of the requests of "/package.Service/Method"; empty if nobody knows it."""
    try:
        found = descriptor_pool.Default().FindMethodByName(method.removeprefix("/").replace("/", "."))
    except KeyError:
        return {}
    return _shape(found.input_type)


@cache
def _shape(message: Descriptor) -> Shape:
    shape: Shape = {}
    for field in message.fields:
        if field.message_type is not None:
            shape[field.number] = _shape(field.message_type)
        elif field.is_repeated and field.cpp_type in _NUMBERS:
            shape[field.number] = None
    return shape


def holds_too_much(data: bytes, shape: Shape, *, fields: int = MAX_FIELDS, numbers: int = MAX_TOKENS) -> bool:
    """Whether a message has more fields, or more packed numbers in one of them, than may be.

    What cannot be read is passed over: the parser fails there, and makes nothing of what follows.
    """
    if len(data) <= SMALL:
        return False
    count = 0
    todo = [(0, len(data), shape)]
    while todo:
        at, end, shape = todo.pop()
        while at < end:
            count += 1
            if count > fields:
                return True
            tag = data[at]
            at += 1
            if tag >= 0x80:
                tag, at = _number(data, at - 1, end)
            kind = tag & 7
            if kind == _BYTES:
                size, at = _number(data, at, end)
                start, at = at, at + size
                if at > end:
                    break
                if size and (number := tag >> 3) in shape:
                    below = shape[number]
                    if below is not None:
                        todo.append((start, at, below))
                    elif size > numbers and len(data[start:at].translate(None, _HIGH)) > numbers:
                        return True
            elif kind == _NUMBER:
                _, at = _number(data, at, end)
            elif kind in _WIDTHS:
                at += _WIDTHS[kind]
            else:
                break
    return False


def _number(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A number and where it ends."""
    if at < end and data[at] < 0x80:
        return data[at], at + 1
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return 7, end  # no number: a tag of this kind is none
