"""Page tokens. Owns how a place in a listing becomes an opaque string that only fits the listing it came from.

A token is base64url of: 8 bytes of a digest over the listing and its filters, the last key's time as a big-endian
double, its name. It is no secret and no permission: a forged one at most starts the caller's own listing elsewhere.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import struct

from service.errors import FieldViolation, PageTokenInvalid
from service.rpc.fields import Fields

DEFAULT_PAGE = 100
LARGEST_PAGE = 1000

Place = tuple[float, str]  # (create time in Unix seconds, name) of the last item that was seen

_HEAD = struct.Struct(">8sd")


def page_size(value: int, fields: Fields) -> int:
    """0 means the default; too large is cut down."""
    if value < 0:
        fields.wrong("page_size", f"must not be negative, is {value}")
    return min(value, LARGEST_PAGE) if value > 0 else DEFAULT_PAGE


def encode_place(place: Place, listing: object) -> str:
    """The token for what comes after `place` in `listing`, which is any JSON value that tells listings apart."""
    time, name = place
    return base64.urlsafe_b64encode(_HEAD.pack(_digest(listing), time) + name.encode()).decode()


def decode_place(token: str, listing: object) -> Place | None:
    """The place to go on after; None from the start. Raises PageTokenInvalid if `token` is not of this `listing`."""
    if not token:
        return None
    try:
        raw = base64.b64decode(token, altchars=b"-_", validate=True)
        digest, time = _HEAD.unpack_from(raw)
        name = raw[_HEAD.size :].decode()
    except (binascii.Error, struct.error, ValueError):  # ValueError: not ASCII, not UTF-8
        raise _invalid("is no page token of this server") from None
    if digest != _digest(listing) or math.isnan(time):
        raise _invalid("belongs to another listing: owner and filters must be the same again")
    return time, name


def _digest(listing: object) -> bytes:
    return hashlib.sha256(json.dumps(listing, sort_keys=True).encode()).digest()[:8]


def _invalid(text: str) -> PageTokenInvalid:
    violation = FieldViolation("page_token", text)
    return PageTokenInvalid(f"page_token: {text}", fields=(violation,), hint="start over without a page token")
