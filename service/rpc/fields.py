"""Wrong fields of one request. Owns how violations are gathered and the checks that several messages share.

Every check takes the field's path, notes what is wrong, and returns a value of the right type, so that reading goes on
and the caller hears of everything at once. `Fields.check` raises; what was returned for a wrong field is never used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from google.protobuf import duration_pb2

from service.errors import FieldViolation, InvalidField

# Kept violations: more would not fit into a status, and a hostile message could hold millions.
MOST_KEPT = 64

# Pieces of one request, all inputs together. A message of the largest size could hold tens of millions, and only
# looking at each would hold up every other call; these are far beyond any context.
MAX_PARTS = 2**16
MAX_TOKENS = 2**22
# The template writes a conversation once for each message whose end is marked.
MAX_WRITTEN = 2**16  # messages times such marks

MAX_LABELS = 64
MAX_LABEL_KEY = 63  # as Kubernetes labels, which orchestrators copy from
MAX_LABEL_VALUE = 255
MAX_LABELS_TOGETHER = 4096  # bytes of one snapshot's: they stay in memory for as long as it lives
MAX_TOKEN_ID = 2**31 - 1  # ids are int32 on the way to the model; the vocabulary's own bound is the model's to check

_SNAPSHOT_ID = re.compile(r"[a-z0-9][a-z0-9-]{7,62}")
# A name is only looked up, so it need not look like an id of ours: an odd one is simply not found.
_NAME_ID = re.compile(r"[^/\x00-\x20\x7f]{1,128}")
_LABEL_KEY = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?")
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


class Fields:
    """Gathers what is wrong with one request."""

    def __init__(self, *, max_images: int = 0) -> None:
        """`max_images`: how many a request may have, all inputs together."""
        self._max_images = max_images
        self._found: list[FieldViolation] = []
        self._reasons: set[str] = set()
        self._metadata: dict[str, str] = {}
        self._count = 0
        self._parts = self._tokens = self._images = 0

    def wrong(self, path: str, text: str, *, reason: str = InvalidField.reason, **metadata: str) -> None:
        """Notes that the field at `path` is wrong. `reason` tells more than INVALID_FIELD where the contract does."""
        self._count += 1
        self._reasons.add(reason)
        self._metadata.update(metadata)
        if len(self._found) < MOST_KEPT:
            self._found.append(FieldViolation(path, text))

    def check(self) -> None:
        """Raises `InvalidField` if anything was wrong; a reason other than INVALID_FIELD only if it is the only one."""
        if not self._count:
            return
        listed = "; ".join(f"{violation.field}: {violation.text}" for violation in self._found)
        text = listed if self._count == 1 else f"{self._count} fields are wrong: {listed}"
        reason = next(iter(self._reasons)) if len(self._reasons) == 1 else InvalidField.reason
        metadata = {**self._metadata, "fieldCount": str(self._count)}
        raise InvalidField(text, fields=tuple(self._found), reason=reason, metadata=metadata)

    def too_many(self, path: str, *, parts: int = 0, tokens: int = 0, images: int = 0) -> bool:
        """Whether the request now has more parts, tokens or images than are looked at; then `path` is wrong."""
        self._parts += parts
        self._tokens += tokens
        self._images += images
        for count, most, what in (
            (self._parts, MAX_PARTS, "parts"),
            (self._tokens, MAX_TOKENS, "tokens"),
            (self._images, self._max_images, "images"),
        ):
            if count > most:
                self.wrong(path, f"a request has at most {most} {what}")
                return True
        return False

    # Checks shared by several messages.

    def number(
        self, path: str, value: float, low: float, high: float, *, above_low: bool = False, below_high: bool = False
    ) -> float:
        """A finite number between `low` and `high`; `above_low` and `below_high` leave the ends out."""
        ok = math.isfinite(value) and low <= value <= high
        if not ok or (above_low and value == low) or (below_high and value == high):
            ends = "(["[not above_low], "])"[below_high]
            self.wrong(path, f"must be in {ends[0]}{low:g}, {high:g}{ends[1]}, is {value:g}")
        return value

    def name(self, path: str, value: str, collection: str, *, required: bool = False) -> str:
        """A resource name "{collection}/{id}"; empty is allowed unless `required`."""
        if not value:
            if required:
                self.wrong(path, f'must be set: "{collection}/{{id}}"')
            return value
        head, _, tail = value.partition("/")
        if head != collection or not _NAME_ID.fullmatch(tail):
            self.wrong(path, f'must look like "{collection}/{{id}}", is {quoted(value)}')
        return value

    def snapshot_id(self, path: str, value: str) -> str:
        """A caller-chosen id, or empty."""
        if value and not _SNAPSHOT_ID.fullmatch(value):
            self.wrong(path, f"must match [a-z0-9][a-z0-9-]{{7,62}}, is {quoted(value)}")
        return value

    def request_id(self, path: str, value: str) -> str:
        """A UUID in lower case, or empty."""
        if value and not _UUID.fullmatch(value):
            self.wrong(path, f"must be a UUID, is {quoted(value)}")
        return value.lower()

    def duration(
        self, path: str, value: duration_pb2.Duration, *, longest: float = math.inf, what: str = "the limit"
    ) -> float:
        """Seconds; positive and at most `longest`."""
        seconds = value.seconds + value.nanos / 1e9
        if abs(value.nanos) >= 1_000_000_000 or value.seconds * value.nanos < 0:
            self.wrong(path, f"is no duration: {value.seconds} s and {value.nanos} ns")
        elif seconds <= 0:
            self.wrong(path, f"must be positive, is {seconds:g} s")
        elif seconds > longest:
            self.wrong(path, f"must be at most {longest:g} s ({what}), is {seconds:g} s")
        return seconds

    def labels(self, path: str, value: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
        """Labels in the order of their keys."""
        if len(value) > MAX_LABELS:
            self.wrong(path, f"at most {MAX_LABELS} labels, are {len(value)}")
            return ()
        together = sum(len(key.encode()) + len(text.encode()) for key, text in value.items())
        if together > MAX_LABELS_TOGETHER:
            self.wrong(path, f"keys and values have at most {MAX_LABELS_TOGETHER} bytes together, have {together}")
            return ()
        ordered = tuple(sorted(value.items()))
        for key, text in ordered:
            at = f"{path}[{quoted(key)}]"
            if len(key) > MAX_LABEL_KEY or not _LABEL_KEY.fullmatch(key):
                self.wrong(
                    at, f"a key has 1 to {MAX_LABEL_KEY} of A-Z a-z 0-9 . _ / - and begins and ends with the first"
                )
            if len(text) > MAX_LABEL_VALUE:
                self.wrong(at, f"a value has at most {MAX_LABEL_VALUE} characters, has {len(text)}")
        return ordered


def quoted(value: str, most: int = 80) -> str:
    """`value` in quotes, shortened, with nothing in it that could upset a terminal or a log."""
    return ascii(value if len(value) <= most else value[:most] + "...")
