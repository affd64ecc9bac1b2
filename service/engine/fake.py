"""An engine without a model: the next token is a function of the history, state is small real bytes.

For tests and demonstrations of everything around an engine. It keeps the seam's promises (order of a step, failures row
by row, captures) and checks the callers' side of it: a row that was never opened, or state that does not add up to the
tokens it stands for, is an error and never a plausible token.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcache.blocks import token_bytes
from kvcache.layout import CacheLayout, LayerKind
from kvcache.media import MediaKey
from kvcache.records import RecordKind
from service.errors import CallError
from service.footprint import Footprint
from service.plan import Capture, Encode, OpenRow, Payloads, Picked, Prefill, Restored, RowId, StepPlan, StepResult
from service.request import Sampling

START = bytes(32)


def features_of(key: MediaKey) -> bytes:
    """What the tower makes of an image."""
    return hashlib.sha256(b"features" + key).digest() * 8


def after(state: bytes, tokens: Sequence[int]) -> bytes:
    """The recurrent state behind `state` once it has seen `tokens`."""
    for token in tokens:
        state = hashlib.sha256(state + token.to_bytes(4, "little")).digest()
    return state


@dataclass(slots=True)
class _Row:
    order: OpenRow
    tokens: list[int | None]  # None: before a window, where no layer remembers
    state: bytes = START
    logits: bytes | None = None
    token: int | None = None  # picked, not yet fed
    drawn: int = 0
    late: bool = False  # has yet to pick from `logits`, or to say its pick: its constraint has not answered
    unsaid: bool = False  # has picked `token`, and not said it
    lost: bool = False  # its state went with a call that failed

    @property
    def position(self) -> int:
        """Tokens that it has been fed."""
        return len(self.tokens)


class FakeEngine:
    """See `service.engine.Engine`. `layout` needs a layer that sees every token: full or state."""

    def __init__(self, layout: CacheLayout, vocab_size: int = 400) -> None:
        kinds = {layer.kind for layer in layout.layers}
        if not kinds & {LayerKind.FULL, LayerKind.STATE}:
            raise ValueError("a window alone does not say what comes next")
        self.footprint = Footprint()  # as if state took no room
        self._layout = layout
        self._vocab = vocab_size
        self._rows: dict[RowId, _Row] = {}
        self._features: dict[MediaKey, bytes] = {}
        self.encoded: list[MediaKey] = []  # by the tower, in order
        self.tower_parts = 1
        self._parts_left: dict[MediaKey, int] = {}
        self.blind: set[MediaKey] = set()  # images at which the tower fails

    @property
    def rows(self) -> frozenset[RowId]:
        """Rows that hold state."""
        return frozenset(self._rows)

    def step(self, plan: StepPlan) -> StepResult:
        result = StepResult()
        for order in plan.open:
            known = self._rows.get(order.row)
            assert known is None or known.lost, f"row {order.row} was opened twice"
            self._guard(order.row, result, lambda order=order: self._open(order))
        for given in plan.give:
            assert bytes(given.payload) == features_of(given.key), "the features of another image"
            self._features[given.key] = bytes(given.payload)
        for order in plan.encode:
            self._encode(order, result)
        for call in plan.prefill:
            assert call.row in self._rows or call.row in result.failed, f"row {call.row} is not open"
            self._guard(call.row, result, lambda call=call: self._prefill(call, result))
        for row in plan.sample:
            self._guard(row, result, lambda row=row: self._pick(row, result))
        if plan.decode is not None:
            for row in plan.decode.rows:
                self._guard(row, result, lambda row=row: self._decode(row, plan.decode.captures.get(row), result))
        for row in {*plan.close, *result.failed}:
            self._rows.pop(row, None)
        needed = {image.key for row in self._rows.values() for image in row.order.images if image.end > row.position}
        self._features = {key: made for key, made in self._features.items() if key in needed}
        for done in (result.picked, result.captured, result.passed):
            for row in result.failed:
                done.pop(row, None)
        return result

    def active_bytes(self) -> int:
        return sum(4 * len(row.tokens) for row in self._rows.values())

    def relax(self) -> None:
        """Holds no memory but its rows'."""

    def continuation(self, tokens: Sequence[int], count: int, sampling: Sampling | None = None) -> list[int]:
        """The `count` tokens that any row goes on with after `tokens`."""
        state, picked = after(START, tokens), []
        for drawn in range(count):
            picked.append(self._next(state, sampling, drawn))
            state = after(state, picked[-1:])
        return picked

    # -- orders ---------------------------------------------------------------------------------------------------

    def _guard(self, row: RowId, result: StepResult, act: Callable[[], None]) -> None:
        if row in result.failed:
            return
        try:
            act()
        except (ValueError, CallError) as error:  # a row's own failure; anything else is a broken engine
            result.failed[row] = error

    def _open(self, order: OpenRow) -> None:
        row = self._rows.setdefault(order.row, _Row(order, []))
        row.tokens, row.state, row.lost = [], START, False
        if order.restored is not None:
            self._restore(row, order.restored)

    @property
    def half_encoded(self) -> set[MediaKey]:
        """Images that are part of the way through the tower."""
        return set(self._parts_left)

    def _encode(self, order: Encode, result: StepResult) -> None:
        assert order.image.inputs is not None, "the tower needs an image's inputs"
        if order.key in self.blind:
            result.unencoded[order.key] = error = ValueError("the tower fails")
            needs = [name for name, row in self._rows.items() if any(i.key == order.key for i in row.order.images)]
            result.failed.update(dict.fromkeys(needs, error))
            return
        left = self._parts_left.pop(order.key, self.tower_parts)
        left -= left if order.seconds == math.inf else 1
        if left > 0:
            self._parts_left[order.key] = left
            result.encoding.add(order.key)
            return
        self.encoded.append(order.key)
        self._features[order.key] = result.encoded[order.key] = features_of(order.key)

    def _prefill(self, call: Prefill, result: StepResult) -> None:
        row = self._rows[call.row]
        for image in row.order.images:
            touched = image.start < row.position + len(call.tokens) and image.end > row.position
            assert not touched or image.key in self._features, f"row {call.row} is fed an image that nobody has seen"
        left = list(call.tokens)
        passed: list[Payloads] = []
        for what in call.passed:
            count = what.end - len(row.tokens)
            self._feed(row, left[:count])
            left = left[count:]
            passed.append(self._captured(row, what))
        if passed:
            result.passed[call.row] = tuple(passed)
        self._feed(row, left)
        result.prefill_tokens += len(call.tokens)
        row.logits = row.state if call.logits else None
        if call.capture is not None:
            result.captured[call.row] = self._captured(row, call.capture)

    def _decode(self, name: RowId, capture: Capture | None, result: StepResult) -> None:
        row = self._rows[name]
        assert not row.lost, f"row {name} has no state"
        if row.late:
            assert capture is None, f"row {name} is fed nothing in this step"
            result.unfed.add(name)
            self._pick(name, result)
            return
        assert row.token is not None, f"row {name} has picked nothing to feed"
        self._feed(row, [row.token])
        row.logits = row.state
        if capture is not None:
            result.captured[name] = self._captured(row, capture)
        self._pick(name, result)

    def _pick(self, name: RowId, result: StepResult) -> None:
        row = self._rows[name]
        assert row.logits is not None, f"row {name} has no logits to pick from"
        constraint = row.order.constraint
        if constraint is None:
            row.token = self._next(row.logits, row.order.sampling, row.drawn)
            row.drawn += 1
            result.picked[name] = Picked(row.token)
            return
        row.late = True
        if not row.unsaid:
            allowed = constraint.allowed(0.0)
            if allowed is None:
                return
            fitting = [token for token in range(self._vocab) if allowed[token >> 3] >> (token & 7) & 1]
            row.token = fitting[self._next(row.logits, row.order.sampling, row.drawn) % len(fitting)]
            row.drawn += 1
            row.unsaid = True
            constraint.took(row.token)
        ended = constraint.ended(0.0)
        if ended is not None:
            assert row.token is not None
            row.late = row.unsaid = False
            result.picked[name] = Picked(row.token, last=ended)

    # -- state ----------------------------------------------------------------------------------------------------

    def _next(self, logits: bytes, sampling: Sampling | None, drawn: int) -> int:
        if sampling is not None and sampling.temperature:
            logits = hashlib.sha256(logits + f"{sampling.seed} {drawn}".encode()).digest()
        return int.from_bytes(logits[:4], "little") % self._vocab

    def _feed(self, row: _Row, tokens: Sequence[int]) -> None:
        row.tokens += tokens
        row.state = after(row.state, tokens)

    def _captured(self, row: _Row, what: Capture) -> Payloads:
        assert what.end == len(row.tokens), f"the row stands at {len(row.tokens)}, not at {what.end}"
        payloads: Payloads = {}
        for kind in what.kinds:
            if kind is RecordKind.FULL:
                payloads[kind] = _known(row.tokens[what.start : what.end])
            elif kind is RecordKind.WINDOW:
                payloads[kind] = _known(row.tokens[max(what.start, what.end - self._layout.window) : what.end])
            elif kind is RecordKind.STATE:
                payloads[kind] = row.state
            else:
                assert row.logits is not None, "logits were asked for where none were computed"
                payloads[kind] = row.logits
        return payloads

    def _restore(self, row: _Row, restored: Restored) -> None:
        """Raises ValueError if the records do not add up to one state at the position."""
        position = restored.position
        parts: dict[RecordKind, bytes] = {}
        for kind, payload in zip(restored.kinds, restored.payloads, strict=True):
            parts[kind] = parts.get(kind, b"") + bytes(payload)
        row.tokens = [None] * position
        for kind, first in ((RecordKind.FULL, 0), (RecordKind.WINDOW, max(0, position - self._layout.window))):
            if kind not in self._layout.kinds:
                continue
            have = parts.get(kind, b"")
            if kind is RecordKind.FULL:
                have = have[: 4 * position]
            tokens: list[int | None] = [int.from_bytes(have[i : i + 4], "little") for i in range(0, len(have), 4)]
            tokens = tokens[len(tokens) - (position - first) :] if len(tokens) > position - first else tokens
            if len(tokens) < position - first:
                raise ValueError(f"{kind.name}: {len(tokens)} of {position - first} tokens are stored")
            if any(old not in (None, new) for old, new in zip(row.tokens[first:], tokens, strict=True)):
                raise ValueError(f"{kind.name}: the layers do not agree on the tokens")
            row.tokens[first:] = tokens
        seen = [token for token in row.tokens if token is not None]
        rolled = after(START, seen) if RecordKind.FULL in self._layout.kinds else None
        row.state = parts[RecordKind.STATE] if RecordKind.STATE in self._layout.kinds else rolled or START
        if rolled not in (None, row.state):
            raise ValueError("STATE: is not the state behind the stored tokens")
        row.logits = parts.get(RecordKind.LOGITS)
        if row.logits not in (None, row.state):
            raise ValueError("LOGITS: are not those of this place")


def _known(tokens: Sequence[int | None]) -> bytes:
    known = [token for token in tokens if token is not None]
    assert len(known) == len(tokens), "no layer remembers these tokens"
    return token_bytes(known)
