"""The engine on MLX: carries out one `StepPlan` with upstream's model code. Decides nothing.

Runs on the engine thread only. A row is either *apart*, with caches of its own in normal form, or in the decode batch.
Prefill runs apart, one row a call, as the canonical schedule says; decode runs the batch (`batch`).

A decode call that fails ends nobody but the culprit. If it could not be built, its rows are as they were (`hold`) and
make the step one by one. If it failed while it was computed, its rows' state is lost: the caller opens them again, up
to the token that they picked last, and they make their next step one by one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from kvcache.layout import CacheLayout
from kvcache.media import MediaKey
from service.engine import cpu, features, layers
from service.engine.batch import DecodeBatch
from service.engine.calls import Fed, Pass, calls_of
from service.engine.groups import decode_batch
from service.engine.sampling import Mask, RowSampler, pick_all
from service.footprint import Footprint
from service.plan import (
    Capture,
    Decode,
    Encode,
    GivenFeatures,
    OpenRow,
    Picked,
    Prefill,
    RowId,
    RowImage,
    StepPlan,
    StepResult,
    TokenMask,
)

log = logging.getLogger("kvfork.engine")

MASK_GRACE = 0.02  # seconds that a step waits for constraints once its logits are there; usual are none
MASK_SLICE = 0.01  # and where every row waits for its own
FAILED_CALLS = 2  # after more of them a row stays alone: with others it fails, and by itself nobody does


@dataclass(slots=True)
class _Row:
    caches: list | None  # None while in the batch, or lost
    sampler: RowSampler | None
    constraint: TokenMask | None = None
    logits: mx.array | None = None  # (1, vocab), of the last position
    token: int | None = None  # picked, not yet fed
    late: bool = False  # has yet to pick from `logits`, or to say its pick: its constraint has not answered
    unsaid: Picked | None = None  # that pick
    images: tuple[RowImage, ...] = ()
    position: int = 0  # tokens that its caches hold
    alone: bool = False  # decodes in a call of its own
    failed_calls: int = 0  # decode calls that failed with this row and others in them

    def part(self) -> None:
        """A call with this row and others in it failed."""
        self.caches, self.logits, self.alone = None, None, True
        self.failed_calls += 1

    def needs(self, key: MediaKey) -> bool:
        """Whether a prefill call to come touches the image."""
        return any(image.key == key and image.end > self.position for image in self.images)


class MlxEngine:
    """See `service.engine.Engine`."""

    def __init__(
        self,
        model,
        layout: CacheLayout,
        footprint: Footprint | None = None,
        *,
        feature_bytes: int = features.FEATURE_BYTES,
    ) -> None:
        """`model`: upstream's text model or `Calls`; `feature_bytes` bound images' features that no open row needs."""
        self.footprint = footprint or Footprint()
        self._calls = calls_of(model)
        self._layout = layout
        self._rows: dict[RowId, _Row] = {}
        self._batch = self._empty_batch()
        self._features = features.HeldFeatures(feature_bytes)
        self._towers: dict[MediaKey, Pass] = {}  # images that are part of the way through

    def step(self, plan: StepPlan) -> StepResult:
        result = StepResult()
        self._leave(plan.leave, result)
        payloads = layers.SharedPayloads()
        for order in plan.open:
            self._guard(order.row, result, self._open, order, payloads)
        del payloads
        began = time.perf_counter()
        for given in plan.give:
            self._give(given, result)
        for order in plan.encode:
            self._encode(order, result)
        if plan.encode:
            result.encode_seconds = time.perf_counter() - began
        began = time.perf_counter()
        for call in plan.prefill:
            self._guard(call.row, result, self._prefill, call, result)
        if plan.prefill:
            result.prefill_seconds = time.perf_counter() - began
        self._sample([row for row in plan.sample if row not in result.failed], result)
        if plan.decode is not None:
            began = time.perf_counter()
            self._decode(plan.decode, result)
            result.decode_seconds = time.perf_counter() - began
        self._close({*plan.close, *result.failed})
        if self._features:
            self._features.shrink(self._needed())
        if self._towers:
            kept = self._needed() | result.encoding
            self._towers = {key: under_way for key, under_way in self._towers.items() if key in kept}
        return result

    def active_bytes(self) -> int:
        apart = sum(layers.nbytes(row.caches) for row in self._rows.values() if row.caches is not None)
        return apart + sum(array.nbytes for array in self._batch.live())

    @property
    def feature_bytes(self) -> int:
        """Bytes of images' features that are held."""
        return self._features.nbytes

    def relax(self) -> None:
        mx.clear_cache()
        cpu.trim_heap()

    # -- orders ---------------------------------------------------------------------------------------------------

    def _guard(self, row: RowId, result: StepResult, act, *args) -> None:
        """Runs one row's order; what it raises ends that row alone."""
        if row in result.failed:
            return
        try:
            act(*args)
        except Exception as error:  # whatever a model or a record can raise is this row's end, not the engine's
            result.failed[row] = error

    def _open(self, order: OpenRow, payloads: layers.SharedPayloads) -> None:
        sampler = None
        if order.sampling is not None:
            sampler = RowSampler(order.sampling, order.top_logprobs, order.context)
        # One whose state was lost keeps all else.
        row = self._rows.setdefault(order.row, _Row(None, sampler, order.constraint))
        row.caches = self._calls.caches()
        row.images, row.position = order.images, 0
        if order.restored is not None:
            row.logits = layers.restore(row.caches, self._layout, order.restored, payloads)
            row.position = order.restored.position

    def _give(self, given: GivenFeatures, result: StepResult) -> None:
        if not self._features.touch(given.key):
            try:
                self._features.put(given.key, features.read(given.payload))
            except Exception as error:  # a payload that cannot be read is the end of the rows that wait for it
                self._lacks(given.key, error, result)

    def _encode(self, order: Encode, result: StepResult) -> None:
        try:
            if not self._features.touch(order.key):
                under_way = self._towers.pop(order.key, None) or self._calls.new_pass()
                made = self._calls.encode_some(order.image, under_way, order.seconds)
                if made is None:
                    self._towers[order.key] = under_way
                    result.encoding.add(order.key)
                    return
                self._features.put(order.key, made)
            result.encoded[order.key] = features.written(self._features[order.key])
        except Exception as error:  # whatever a tower can raise is the end of the rows that wait for it
            self._lacks(order.key, error, result)

    def _lacks(self, key: MediaKey, error: Exception, result: StepResult) -> None:
        """There will be no features for an image: the rows that need them end."""
        result.unencoded[key] = error
        result.failed.update({name: error for name, row in self._rows.items() if row.needs(key)})

    def _needed(self) -> set[MediaKey]:
        """Images that an open row has still to prefill."""
        return {image.key for row in self._rows.values() for image in row.images if image.end > row.position}

    def _prefill(self, call: Prefill, result: StepResult) -> None:
        row = self._rows[call.row]
        logits = self._calls.prefill(call.tokens, row.position, row.images, self._features, row.caches)
        row.position += len(call.tokens)
        # Without the logits in the list, MLX never computes the head of the model for this call.
        row.logits = logits if call.logits else None
        if call.passed:  # while window layers still hold what the call had
            mx.eval(layers.live_arrays(row.caches))
            result.passed[call.row] = tuple(
                layers.capture(row.caches, self._layout, what, None) for what in call.passed
            )
        layers.normalise(row.caches)
        mx.eval(layers.live_arrays(row.caches), *([row.logits] if call.logits else []))
        result.prefill_tokens += len(call.tokens)
        if call.capture is not None:
            result.captured[call.row] = layers.capture(row.caches, self._layout, call.capture, row.logits)

    def _sample(self, rows: list[RowId], result: StepResult) -> None:
        """The first token of each row. Together; if that raises, each by itself, so that only the culprit ends."""
        if not rows:
            return
        try:
            logits = mx.concatenate([self._rows[row].logits for row in rows])
            picks = self._picks(rows, logits)
        except Exception as error:
            if len(rows) == 1:
                result.failed[rows[0]] = error
            else:
                for row in rows:
                    self._sample([row], result)
            return
        self._take(rows, picks, logits, result)

    def _decode(self, order: Decode, result: StepResult) -> None:
        late = [row for row in order.rows if self._rows[row].late]
        rows = [row for row in order.rows if row not in late]
        self._catch_up(late, MASK_SLICE if not rows else 0.0, result)
        if not rows:
            return
        self._leave([row for row in self._batch.rows if row not in rows], result)
        rows = [row for row in rows if row not in result.failed]
        self._arrange(order, result)
        rows = [row for row in rows if row not in result.lost and row not in result.failed]
        self._join([row for row in rows if not self._rows[row].alone and row not in self._batch.rows])
        if self._batch.rows:
            self._together(order, result)
        for row in rows:
            if self._rows[row].alone and row not in result.lost:
                self._guard(row, result, self._by_itself, row, order, result)

    def _together(self, order: Decode, result: StepResult) -> None:
        """One call for the whole batch. If it fails its rows go on one by one, and the culprit shows itself."""
        rows = list(self._batch.rows)
        undo = self._batch.hold()
        try:
            logits = self._batch.step(self._calls, [self._fed(row) for row in rows])
        except Exception as error:  # nothing was computed: whoever is to blame raises again in a call of its own
            if len(rows) == 1:
                result.failed[rows[0]] = error
                return
            log.warning("a decode call of %d rows failed (%s); one call each", len(rows), type(error).__name__)
            undo()
            for row in rows:
                self._rows[row].part()
            self._leave(rows, result)
            return
        del undo  # else every cache would be copied
        try:
            # With the state: recurrent state that no logit needed yet would grow its graph.
            picks = self._picks(rows, logits, self._batch.live())
        except Exception as error:  # raised before any row has taken a token
            self._lose(rows, error, result)
            return
        for row in rows:
            self._rows[row].position += 1
        for row, what in order.captures.items():
            if row in self._batch.rows:
                at = rows.index(row)
                self._guard(row, result, self._capture, row, what, logits[at : at + 1], result)
        self._take(rows, picks, logits, result)

    def _fed(self, name: RowId) -> Fed:
        row = self._rows[name]
        return Fed(row.token, self._calls.place(row.position, row.images))

    def _lose(self, rows: list[RowId], error: Exception, result: StepResult) -> None:
        """MLX raises once; what a failed evaluation left behind looks computed and may be rubbish. All of it goes."""
        self._batch = self._empty_batch()
        if len(rows) == 1:
            result.failed[rows[0]] = error
            return
        log.warning("a decode call of %d rows failed (%s); all start anew", len(rows), type(error).__name__)
        for row in rows:
            self._rows[row].part()
            result.lost[row] = error

    def _by_itself(self, name: RowId, order: Decode, result: StepResult) -> None:
        """One row's own call: after a batch that failed, and always for a row that fits into no batch."""
        row = self._rows[name]
        logits = self._calls.decode([self._fed(name)], row.caches)
        row.position += 1
        layers.normalise(row.caches)
        (pick,) = self._picks([name], logits, layers.live_arrays(row.caches))
        if name in order.captures:
            result.captured[name] = layers.capture(row.caches, self._layout, order.captures[name], logits)
        row.alone = row.failed_calls > FAILED_CALLS
        self._take([name], [pick], logits, result)

    def _capture(self, row: RowId, what: Capture, logits: mx.array, result: StepResult) -> None:
        result.captured[row] = self._batch.capture(row, what, logits)

    def _picks(self, rows: list[RowId], logits: mx.array, state: Sequence[mx.array] = ()) -> list[Picked | Exception]:
        """A pick for each row of `logits` (rows, vocab), evaluated with `state`; `_Late` for one without a mask yet."""
        mx.eval(logits, *state)
        until = time.perf_counter() + MASK_GRACE  # masks are made while the model computes
        masks = {
            i: _mask(constraint, logits.shape[-1], until)
            for i, row in enumerate(rows)
            if (constraint := self._rows[row].constraint) is not None
        }
        return pick_all(logits, [self._rows[row].sampler for row in rows], masks)

    def _take(self, rows: list[RowId], picks: list[Picked | Exception], logits: mx.array, result: StepResult) -> None:
        """Each row has its pick, and says it once its constraint has said whether anything may follow."""
        told: list[RowId] = []
        for i, (name, pick) in enumerate(zip(rows, picks, strict=True)):
            row = self._rows[name]
            if name in result.failed:
                continue
            if isinstance(pick, _Late):
                row.late, row.logits = True, logits[i : i + 1]
            elif isinstance(pick, Exception):
                result.failed[name] = pick
            else:
                row.token, row.unsaid = pick.token, pick
                if row.constraint is not None:
                    self._guard(name, result, row.constraint.took, pick.token)
                told.append(name)
        until = time.perf_counter() + MASK_GRACE
        for name in told:
            self._guard(name, result, self._say, name, until, result)

    def _say(self, name: RowId, until: float, result: StepResult) -> None:
        row = self._rows[name]
        pick = row.unsaid
        assert pick is not None
        if row.constraint is not None:
            ended = row.constraint.ended(_left(until))
            if ended is None:
                row.late = True
                return
            pick = replace(pick, last=ended)
        row.late, row.unsaid = False, None
        result.picked[name] = pick

    def _catch_up(self, late: list[RowId], wait: float, result: StepResult) -> None:
        """Rows whose constraints answered late: those that have now go on with the next step."""
        until = time.perf_counter() + wait
        for name in late:
            result.unfed.add(name)
            self._guard(name, result, self._try_again, name, until, result)

    def _try_again(self, name: RowId, until: float, result: StepResult) -> None:
        row = self._rows[name]
        if row.unsaid is not None:
            self._say(name, until, result)
        elif row.constraint is None or row.constraint.allowed(_left(until)) is not None:
            (pick,) = self._picks([name], row.logits)
            self._take([name], [pick], row.logits, result)

    def _empty_batch(self) -> DecodeBatch:
        return decode_batch(self._layout, own=self._calls.copies_lone_rows)

    # -- the batch ------------------------------------------------------------------------------------------------

    def _join(self, rows: list[RowId]) -> None:
        """Takes rows into the batch, together if that goes, else those that can; the others go on alone."""
        if rows and not self._joined(rows) and len(rows) > 1:
            for row in rows:
                self._joined([row])

    def _joined(self, rows: list[RowId]) -> bool:
        undo = self._batch.hold()
        try:
            self._batch.join(rows, [self._rows[row].caches for row in rows])
        except Exception as error:  # caches that upstream cannot put side by side are no fault of their rows
            undo()
            if len(rows) == 1:
                log.warning("row %d decodes in calls of its own: %s", rows[0], error)
                self._rows[rows[0]].alone, self._rows[rows[0]].failed_calls = True, FAILED_CALLS + 1
            return False
        for row in rows:
            self._rows[row].caches = None
            self._rows[row].logits = None
        return True

    def _arrange(self, order: Decode, result: StepResult) -> None:
        """Moves rows between calls as the scheduler says."""
        try:
            self._batch.arrange(order.shared or (order.rows,))
        except Exception as error:  # rows are half moved: whose caches are whole, nobody knows
            self._lose(list(self._batch.rows), error, result)

    def _leave(self, rows: Iterable[RowId], result: StepResult) -> None:
        """Takes rows out of the batch into caches of their own."""
        going = [row for row in rows if row in self._batch.rows]
        for row in going:
            self._guard(row, result, self._extract, row)
        self._batch.drop(going)

    def _extract(self, row: RowId) -> None:
        self._rows[row].caches = self._batch.extract(row)

    def _close(self, rows: set[RowId]) -> None:
        self._batch.drop([row for row in self._batch.rows if row in rows])
        for row in rows:
            self._rows.pop(row, None)


class _Late(Exception):
    """A constraint has not answered yet."""


def _left(until: float) -> float:
    return max(0.0, until - time.perf_counter())


def _mask(constraint: TokenMask, vocab_size: int, until: float) -> Mask | Exception:
    """True for each token that may be picked, (vocab_size,); what a constraint raises is its row's end."""
    try:
        allowed = constraint.allowed(_left(until))
    except Exception as error:  # whatever a grammar can raise must not end the other rows
        return error
    if allowed is None:
        return _Late()
    bits = np.unpackbits(np.frombuffer(allowed, dtype=np.uint8), bitorder="little")[:vocab_size]
    # A head may be wider than the vocabulary: what lies beyond is no token.
    return np.pad(bits, (0, vocab_size - len(bits))).view(np.bool_)
