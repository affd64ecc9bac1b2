"""From what the scheduler decided for a tick to the engine's orders. Owns which state the step hands out.

No I/O, and nothing waits; the recorder of each sequence is told of the calls that are ordered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcache.blocks import BLOCK_TOKENS
from kvcache.checkpoints import Take
from kvcache.records import RecordKind
from kvcache.schedule import Call
from service.plan import Capture, Decode, OpenRow, Prefill, RowId, StepPlan
from service.rows import Rows
from service.scheduler import Tick
from service.sequence import Sequence
from service.sight import Sight


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """One step's plan, and what is worth keeping of the state that it captures: at one place a row at most, and at the
    block boundaries that its call passes.
    """

    plan: StepPlan
    takes: dict[RowId, Take]
    passed: dict[RowId, tuple[Take, ...]]


def orders(tick: Tick, rows: Rows, opened: Iterable[Sequence], sight: Sight) -> Orders:
    """A row whose order cannot be made fails, and is closed at the end of the step."""
    made = _Making()
    for row, call in tick.prefill:
        rows.guard(row, made.call, rows.get(row), call)
    for row in tick.save:
        rows.guard(row, made.last_call, rows.get(row))
    for row in tick.decode:
        rows.guard(row, made.decode, rows.get(row))
    decode = tuple(row for row in tick.decode if row in rows)
    shared = tuple(tuple(row for row in call if row in rows) for call in tick.shared)
    plan = StepPlan(
        leave=tuple(row for row in tick.save if row in rows),
        open=tuple(_open_order(seq, sight) for seq in opened if seq.row in rows),
        give=sight.take_given(),
        encode=sight.orders(tick.encode, beside=bool(decode)),
        prefill=tuple(made.prefill),
        sample=tuple(row for row in tick.finish_prefill if row in rows and rows[row].samples_next),
        decode=Decode(rows=decode, shared=shared, captures=made.captures) if decode else None,
        close=rows.take_closing(),
    )
    return Orders(plan=plan, takes=made.takes, passed=made.passed)


class _Making:
    """The calls of one step, as far as they are ordered."""

    def __init__(self) -> None:
        self.prefill: list[Prefill] = []
        self.captures: dict[RowId, Capture] = {}
        self.takes: dict[RowId, Take] = {}
        self.passed: dict[RowId, tuple[Take, ...]] = {}

    def call(self, seq: Sequence, call: Call) -> None:
        """A call of a row's prefill."""
        tokens = seq.tokens[call.start : call.end]
        if seq.rebuilding:
            self.prefill.append(Prefill(row=seq.row, tokens=tokens, logits=False, capture=None))
            return
        seq.recorder.called(call.end)
        capture, passed = self._capture(seq, call.end), self._passed(seq, call)
        logits = call.stop or (capture is not None and RecordKind.LOGITS in capture.kinds)
        self.prefill.append(Prefill(row=seq.row, tokens=tokens, logits=logits, capture=capture, passed=passed))

    def last_call(self, seq: Sequence) -> None:
        """The last token of a row that is saved."""
        end = len(seq.tokens)
        seq.recorder.called(end, decoded=True)
        capture = self._capture(seq, end, final=True)
        self.prefill.append(Prefill(row=seq.row, tokens=seq.tokens[end - 1 :], logits=True, capture=capture))

    def decode(self, seq: Sequence) -> None:
        """Captures a row that this step takes across a block boundary or to a mark, where its state may be wanted."""
        if seq.keeps_decoded and not seq.waits_for_pick:
            end = seq.position + 1
            seq.recorder.called(end, decoded=True)
            capture = self._capture(seq, end)
            if capture is not None:
                self.captures[seq.row] = capture

    def _capture(self, seq: Sequence, end: int, *, final: bool = False) -> Capture | None:
        asked = bool(seq.asked_at(end, final=final)) or final
        if not asked and end % BLOCK_TOKENS:
            return None
        take = self.takes[seq.row] = seq.take_at(end, final=final)
        return seq.recorder.capture(end, logits=RecordKind.LOGITS in take.kinds, kinds=take.kinds)

    def _passed(self, seq: Sequence, call: Call) -> tuple[Capture, ...]:
        """The blocks that end inside the call, where an image is that must be whole. No run can begin there."""
        if not call.passed:
            return ()
        takes = self.passed[seq.row] = tuple(seq.take_at(boundary) for boundary in call.passed)
        return tuple(
            seq.recorder.capture(boundary, logits=False, kinds=[k for k in take.kinds if k is not RecordKind.STATE])
            for boundary, take in zip(call.passed, takes, strict=True)
        )


def _open_order(seq: Sequence, sight: Sight) -> OpenRow:
    generation = seq.work.generation
    restored, seq.restored = seq.restored, None
    return OpenRow(
        row=seq.row,
        restored=restored,
        sampling=generation.sampling if generation else None,
        top_logprobs=generation.top_logprobs if generation else None,
        context=seq.work.tokens,
        constraint=generation.constraint if generation else None,
        images=sight.row_images(seq.work),
    )
