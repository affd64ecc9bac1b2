"""One sequence on the engine thread: a work, the tokens so far, what it cost, and its place in the tree.

Owns the receipt's arithmetic, the row's text and which of its places somebody wants; the scheduler owns its state, the
engine its KV cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from kvcache.blocks import BLOCK_TOKENS
from kvcache.cache import Lookup, PrefixCache
from kvcache.checkpoints import Take, take_at
from kvcache.media import image_positions
from kvcache.receipt import MissReason, Usage, lost_to_grid
from kvcache.records import FetchResult, RecordKind, Tier
from kvcache.restore import disk_tokens
from kvcache.schedule import Call, is_decoded, is_trimmed, plan_calls, whole_spans
from service.events import FinishReason, Timing
from service.plan import Picked, Restored, RowId
from service.recorder import Recorder
from service.text.stream import Piece
from service.work import Tokens, Work, WorkEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Who wants the state at one place. False if nobody does."""

    declared: bool  # it is among the places to keep
    rehomed: bool  # the parent's own, which was lost and is computed again on the way
    reasoning_end: bool  # which was not told yet
    end: bool  # the generation's, which may be gone on from

    def __bool__(self) -> bool:
        return self.declared or self.rehomed or self.reasoning_end or self.end


class Sequence:
    """Made at submission; `emit` carries events to whoever submitted it."""

    def __init__(
        self, row: RowId, work: Work, cache: PrefixCache, emit: Callable[[WorkEvent], None], now: float
    ) -> None:
        self.row = row
        self.work = work
        self.emit = emit
        self.tokens = array("I", work.tokens)
        self.prompt_tokens = len(work.tokens)
        self._share_decoded = cache.share_decoded
        self._policy = cache.checkpoints.policy
        self._layout = cache.layout
        self._whole = whole_spans(work.tokens, cache.layout)
        self.recorder = Recorder(cache, work.owner, self.tokens, work.base)
        self.position = 0  # tokens whose state the engine holds
        self.computed = 0  # tokens of the prompt that went through the model
        self.completion = 0
        self.restored: Restored | None = None
        self.lookup: Lookup | None = None
        self._disk_tokens = 0
        self._disk_bytes = 0
        self.arrived = now
        self.admitted = now
        self.opened = now
        self.first_token: float | None = None
        self.last_token = now
        self.prefill_seconds = 0.0
        self.announced = False
        self.restore_tries = 0
        self.rebuilding = False  # its state was lost in decode, and is computed again
        self.finish_reason: FinishReason | None = None
        self.overdue: FinishReason | None = None  # why it ends, to be saved, with the pick that it waits for
        self.mark_at: int | None = None  # the reasoning's end, once it is known and asked for
        self.mark_told = False
        self.stop: str | None = None
        self.stop_token_id: int | None = None
        self.lost = ""  # why state of a boundary that a handle needs is not stored
        self.ending = False  # computed to its end; what is left is to be stored
        self.cancelled = False  # given up, but what it has is to be saved first
        self.hands_out_last = False  # then the last block is to be handed out

    @property
    def keeps_state(self) -> bool:
        """Whether state past the prompt may be asked for again."""
        generation = self.work.generation
        return generation is not None and (generation.save or generation.save_on_cancel)

    @property
    def waits_for_pick(self) -> bool:
        """Whether all its tokens are fed: its constraint has yet to let it pick another."""
        return self.position == len(self.tokens)

    @property
    def samples_next(self) -> bool:
        """Whether the end of the prefill calls is where the next token is picked."""
        return self.work.generation is not None and not self.rebuilding

    @property
    def explicit(self) -> bool:
        """Whether a caller holds on to what is stored: then it is not skipped when the writer is busy."""
        return bool(self.work.keep) or self.keeps_state or self.rehomes or self._marks_reasoning

    @property
    def keeps_decoded(self) -> bool:
        """Whether blocks that decode makes are worth keeping."""
        return self.keeps_state or self._share_decoded or self._marks_reasoning

    @property
    def _marks_reasoning(self) -> bool:
        """Whether the reasoning's end is asked for, and still ahead."""
        generation = self.work.generation
        return generation is not None and generation.mark_reasoning and not self.mark_told

    def asked_at(self, end: int, *, final: bool = False) -> Asked:
        """Who wants the state at exactly `end`; `final`: the generation's last."""
        base = self.work.base
        return Asked(
            declared=end in self.work.keep,
            rehomed=self.rehomes and base is not None and end == base.end,
            reasoning_end=end == self.mark_at and not self.mark_told,
            end=final and self.keeps_state,
        )

    def take_at(self, end: int, *, final: bool = False) -> Take:
        """What to keep at the boundary or place `end`: all of one that is asked for or final, else as the policy says.

        Asked once for each place, before the step that reaches it.
        """
        if final or self.asked_at(end):
            return Take((*self._layout.kinds, RecordKind.LOGITS))
        base = self.work.base
        places = [*self.work.keep, base.end] if self.rehomes and base is not None else self.work.keep
        return take_at(
            self._policy, self._layout, end, places=places, open_end=self.keeps_state or self._marks_reasoning
        )

    def first_kept(self, lookup: Lookup) -> int | None:
        """The first place behind the lookup's that the same call could begin at again, should this one not end.

        A parent's decoded tokens, computed again, are other state than its own: none of that is found by the parent's
        name before all of it stands.
        """
        base, stops = self.work.base, set(self.work.keep)
        alike, parent_end = 0, 0  # between them, what is computed is not the parent's
        if base is not None and lookup.position < base.end:
            stops.add(base.end)
            parent_end = base.end
            alike = next((node.start for node in base.path() if is_decoded(node.schedule)), parent_end)
        for call in plan_calls(lookup.position, self.prompt_tokens, stops, lookup.replay, self._whole):
            if call.end == parent_end:
                return call.end
            if not alike < call.end < parent_end and (call.stop or call.end % BLOCK_TOKENS == 0):
                take = self.take_at(call.end)
                if {*take.firm, *take.passing} >= set(self._layout.kinds):
                    return call.end
        return None

    def found(self, lookup: Lookup, read: FetchResult | None) -> list[Call]:
        """The lookup's records have been read (or none were needed): what is left to call."""
        self.lookup = lookup
        self.recorder.start_at(lookup)
        self.position = lookup.position
        if lookup.plan is not None and read is not None:
            # The payloads go on to the engine; only what the receipt needs stays here.
            self._disk_tokens = disk_tokens(lookup.plan, read.tiers)
            self._disk_bytes = read.bytes_from(Tier.DISK)
        self._take_over(lookup, read)
        if self.position == self.prompt_tokens:
            return []
        stops = set(self.work.keep)
        if self.rehomes:
            assert self.work.base is not None
            stops.add(self.work.base.end)
        return plan_calls(self.position, self.prompt_tokens, stops, lookup.replay, self._whole)

    def rebuilt_from(self, lookup: Lookup, read: FetchResult | None) -> list[Call]:
        """The calls that lead back to where the lost state stood; the receipt and the tree know nothing of them."""
        self._take_over(lookup, read)
        # The prompt is cut where it was cut before; for what was generated any cut is as good as another.
        cuts = {*self.work.keep, self.prompt_tokens, *lookup.replay}
        if lookup.position == self.position:
            return []
        return plan_calls(lookup.position, self.position, (), cuts, self._whole)

    def _take_over(self, lookup: Lookup, read: FetchResult | None) -> None:
        """What was read goes to the engine with the row's next order."""
        if lookup.plan is not None and read is not None:
            self.restored = Restored(
                position=lookup.position,
                kinds=tuple(record.kind for record in lookup.plan.records),
                starts=lookup.plan.starts,
                payloads=tuple(read.payloads),
            )

    @property
    def rehomes(self) -> bool:
        """The parent's own state was lost and is computed again on the way.

        State that is there stays the parent's: what is computed beside it, for want of logits, serves this call alone.
        """
        base, lookup = self.work.base, self.lookup
        if base is None or lookup is None or not lookup.position < base.end <= self.prompt_tokens:
            return False
        return lookup.as_made or not lookup.stands

    @property
    def remakes(self) -> bool:
        """Of the parent's state or logits something was lost that comes back in other last bits only."""
        base, lookup = self.work.base, self.lookup
        if base is None or lookup is None or lookup.position >= base.end or lookup.as_made:
            return False
        return not (lookup.stands and is_trimmed(base.schedule))  # a cut had no logits ever

    def picked(self, pick: Picked, now: float) -> Piece:
        """The row has its next token; what that makes of the text, which is said already."""
        generation = self.work.generation
        assert generation is not None
        if self.first_token is None:
            self.first_token = now
        self.last_token = now
        self.tokens.append(pick.token)
        self.completion += 1
        piece = generation.text.push(pick.token, last=pick.last)
        self.say(piece, [pick])
        if piece.reasoning_ended and generation.mark_reasoning:
            self.mark_at = len(self.tokens)
        return piece

    def say(self, piece: Piece, picked: list[Picked]) -> None:
        """The piece's text by channel; `picked` goes with its own."""
        end = len(self.tokens)
        for spoken in piece.before:
            self.emit(Tokens(spoken.text, end - len(picked), [], spoken.channel))
        if picked or piece.text:
            self.emit(Tokens(piece.text, end - len(picked), picked, piece.channel))
        for spoken in piece.after:
            self.emit(Tokens(spoken.text, end, [], spoken.channel))

    def usage(self) -> Usage:
        """The receipt so far."""
        lookup = self.lookup
        if lookup is None:
            return Usage(prompt_tokens=0)  # stopped before anything was looked up
        # A prefill that was stopped has a receipt for what it did.
        done = min(self.position, self.prompt_tokens)
        known = min(max(lookup.known, self.work.known_tokens), done)
        position, disk, disk_bytes = lookup.position, self._disk_tokens, self._disk_bytes
        mended = self.work.mended
        if mended is not None:  # what was restored from there on was computed for this very call
            position, disk = min(position, mended.cached_tokens), mended.disk_tokens
            disk_bytes += mended.disk_bytes_read
        recomputed = known - position
        base = self.work.base
        # A cut never had logits: its last token is the price of where it was made.
        kept = base.end if base is not None and not is_trimmed(base.schedule) else 0
        grid = lost_to_grid(position, known, kept=kept)
        return Usage(
            prompt_tokens=done,
            cached_tokens=position,
            recomputed_tokens=recomputed,
            new_tokens=done - known,
            image_tokens=image_positions(self.tokens[:done]),
            completion_tokens=self.completion,
            memory_tokens=position - disk,
            disk_tokens=disk,
            disk_bytes_read=disk_bytes,
            grid_tokens=grid,
            diverged_at=known if known < done else None,
            miss_reason=self._miss_reason(lookup, lacked=recomputed - grid) if recomputed else MissReason.NONE,
            remade=self.remakes and recomputed > 0,
        )

    def _miss_reason(self, lookup: Lookup, lacked: int) -> MissReason:
        """Why what was known had to be computed again; a rollback's cut between kept places is nobody's loss."""
        reason = lookup.miss_reason if self.work.mended is None else self.work.mended.miss_reason
        if reason is MissReason.NONE and lacked:
            reason = self.work.known_reason
        return MissReason.BETWEEN_CHECKPOINTS if reason is MissReason.NONE else reason

    def timing(self) -> Timing:
        """Seconds by phase so far."""
        return Timing(
            queue=self.admitted - self.arrived,
            load=self.opened - self.admitted,
            prefill=self.prefill_seconds,
            decode=self.last_token - self.first_token if self.first_token is not None else 0.0,
        )
