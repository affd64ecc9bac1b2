"""Generate, from call to stream. Owns the order of a stream's events and what a cancelled call leaves behind."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from functools import partial

from kvcache.snapshots import Snapshot
from service import facts
from service.events import Delta, Event, Finished, Marked, Progress, SnapshotView, Started, TokenLogprob, TopLogprob
from service.naming import Naming
from service.outbox import Channel
from service.plan import Picked
from service.request import GenerateCall
from service.resolve import Prompt, check_room, generation_places, resolve_sampling
from service.runtime import Loaded, Running, Runtime, Saving
from service.text.channels import Splitter
from service.text.constraint import RowConstraint
from service.text.forms import FormRow
from service.text.stream import TextStream
from service.work import Admitted, Ended, Failed, Generation, NodeAt, Prefilled, Tokens, Work


class Generations:
    """Every running Generate."""

    def __init__(self, runtime: Runtime) -> None:
        self._rt = runtime

    async def generate(self, call: GenerateCall, owner: str) -> AsyncIterator[Event]:
        deadline = time.monotonic() + call.deadline if call.deadline is not None else None
        loaded, handles = self._rt.need_model(call.model, names_snapshot=bool(call.parent))
        if call.save is not None:
            handles.check_new(owner, [call.save, *(m.options for m in call.marks)])
        else:
            handles.check_new(owner, [m.options for m in call.marks])
        await self._rt.until_named(owner, call.parent)
        with ExitStack() as stack:
            parent = stack.enter_context(handles.using(call.parent, owner)) if call.parent else None
            images = self._rt.images(loaded, owner, stack)
            prompt = await self._rt.prompt(loaded, owner, parent, call.input, call.marks, images=images)
            check_room(len(prompt.tokens), loaded.view, needs=1)
            places = generation_places(call.marks, prompt, reasons=loaded.channels.has_reasoning)
            for mark, place in zip(call.marks, places, strict=True):
                handles.check_id(owner, mark.options, prompt.tokens[:place], grows=place is None)
            if call.save is not None:
                handles.check_id(owner, call.save, prompt.tokens, grows=True)
            seed = call.sampling.seed if call.sampling.seed is not None else secrets.randbits(32)
            room = loaded.view.context_tokens - len(prompt.tokens)
            asked = call.stopping.max_tokens
            most = asked if asked is not None else self._rt.config.default_max_tokens
            form = await loaded.grammars.open(owner, call.constraint) if call.constraint is not None else None
            text, constraint = await self._rt.on_text_thread(
                owner, lambda: _texts(loaded, call, prompt, most, room, form)
            )
            mended = await self._rt.mend(
                parent, images, stack, limit=call.max_recompute_tokens, priority=call.priority, deadline=deadline
            )
            work = Work(
                owner=owner,
                tokens=prompt.tokens,
                base=parent.node if parent else None,
                images=prompt.images,
                keep=self._rt.engine_places(places, parent),
                generation=Generation(
                    sampling=resolve_sampling(call.sampling, loaded.view, seed),
                    stopping=call.stopping,
                    top_logprobs=call.output.top_logprobs,
                    text=text,
                    save=call.save is not None,
                    save_on_cancel=call.save_on_cancel,
                    constraint=constraint,
                    mark_reasoning=None in places,
                ),
                mended=mended,
                max_recompute_tokens=call.max_recompute_tokens,
                progress=call.output.progress,
                priority=call.priority,
                most_new_tokens=min(most, room),
                deadline=deadline,
                # Children of one fork restore the same state; so do calls that go on from one snapshot.
                group=f"{owner} {parent.parent or parent.id}" if parent else "",
            )
            generation = f"generations/{secrets.token_hex(12)}"
            facts.note(generation=generation, parent=call.parent, prompt_tokens=len(prompt.tokens))
            channel, row = self._rt.submit(work)
            self._rt.running[generation] = Running(row, owner, parent.id if parent else "")
            names = stack.enter_context(Naming(loaded, handles, owner, parent))
            saving: Saving | None = None
            if call.save_on_cancel and call.save is not None:
                saving = self._rt.saving[owner, call.save.snapshot_id] = Saving(asyncio.Event())
            try:
                async for event in self._events(call, names, prompt, places, parent, channel, generation, seed):
                    yield event
                    if isinstance(event, Marked | Finished) and event.snapshot is not None:
                        names.told(event.snapshot.name)  # whoever asks for the next one has taken this one
            finally:
                del self._rt.running[generation]
                if channel.ended:
                    channel.close()
                    self._named(owner, call)
                elif saving is not None:
                    # Also when the end is there already and was not read: the work was done, and asked for.
                    saving.cancelled = True
                    self._rt.loop.cancel(row, save=True)
                    held = ExitStack()
                    self._rt.images(loaded, owner, held).hold_on(prompt.tokens)
                    self._rt.spawn(self._save_cancelled(channel, names, owner, call, held))
                else:
                    self._rt.loop.cancel(row)
                    channel.close()

    async def stop(self, generation: str, owner: str) -> bool:
        running = self._rt.running.get(generation)
        if running is None or running.owner != owner:
            return False
        self._rt.loop.stop(running.row)
        return True

    async def _events(
        self,
        call: GenerateCall,
        names: Naming,
        prompt: Prompt,
        places: list[int | None],
        parent: Snapshot | None,
        channel: Channel,
        generation: str,
        seed: int,
    ) -> AsyncIterator[Event]:
        """One generation's events from its channel, with nodes turned into snapshots."""
        saved: SnapshotView | None = None
        save_error = ""
        gathered: Tokens | None = None
        while True:
            coming = await channel.peek()
            if gathered is not None and not (isinstance(coming, Tokens) and coming.channel is gathered.channel):
                yield self._delta(gathered, call)  # whoever leaves here leaves a node behind it where others look
                gathered = None
            event = channel.take()
            match event:
                case Admitted():
                    yield Started(
                        generation=generation,
                        instance=self._rt.instance,
                        prompt_tokens=len(prompt.tokens),
                        seed=seed,
                        queue_seconds=event.queue_seconds,
                    )
                    for marked in await names.parent_marks(call.marks, places):
                        yield marked
                case Prefilled():
                    yield Progress(event.done, len(prompt.tokens))
                case NodeAt() if event.rehome:
                    self._rt.rehome(parent, event)
                case NodeAt() if event.final:
                    saved, save_error = await names.try_save(event, call.save)
                    if saved is not None and call.save_on_cancel:
                        names.told(saved.name)
                case NodeAt():
                    for marked in await names.marked(event, call.marks, places):
                        yield marked
                case Tokens():
                    if gathered is not None:
                        gathered.text += event.text
                        gathered.picked += event.picked
                    else:
                        gathered = event
                    if len(gathered.picked) >= call.output.min_tokens_per_delta or not gathered.picked:
                        yield self._delta(gathered, call)
                        gathered = None
                case Ended():
                    assert event.reason is not None
                    if call.save is not None and saved is None and not save_error:
                        save_error = "NOTHING_TO_SAVE"
                    facts.note(
                        finish=event.reason.name,
                        cached_tokens=event.usage.cached_tokens,
                        recomputed_tokens=event.usage.recomputed_tokens,
                        new_tokens=event.usage.new_tokens,
                        completion_tokens=event.usage.completion_tokens,
                        snapshot=saved.name if saved is not None else "",
                    )
                    yield Finished(
                        reason=event.reason,
                        usage=event.usage,
                        timing=event.timing,
                        stop=event.stop,
                        stop_token_id=event.stop_token_id,
                        snapshot=saved,
                        save_error_reason=save_error,
                    )
                    return
                case Failed():
                    raise event.error

    async def _save_cancelled(
        self, channel: Channel, names: Naming, owner: str, call: GenerateCall, held: ExitStack
    ) -> None:
        """Nobody listens any more, but the state was asked for: waits for it and names it. `held`: its images."""
        assert call.save is not None
        try:
            while not channel.ended:
                event = await channel.get()
                if isinstance(event, NodeAt):
                    await names.try_save(event, call.save if event.final else None)
        finally:
            held.close()
            channel.close()
            self._named(owner, call)

    def _named(self, owner: str, call: GenerateCall) -> None:
        """The snapshot of a call with `save_on_cancel` is there now, or will not come."""
        saving = self._rt.saving.pop((owner, call.save.snapshot_id), None) if call.save is not None else None
        if saving is not None:
            saving.named.set()

    def _delta(self, tokens: Tokens, call: GenerateCall) -> Delta:
        assert self._rt.loaded is not None
        codec = self._rt.loaded.codec

        def logprob(pick: Picked) -> TokenLogprob:
            return TokenLogprob(
                token_id=pick.token,
                logprob=pick.logprob if pick.logprob is not None else 0.0,
                token_bytes=codec.token_bytes(pick.token),
                top=tuple(TopLogprob(t.token, t.logprob, codec.token_bytes(t.token)) for t in pick.top),
            )

        return Delta(
            text=tokens.text,
            first_position=tokens.first_position,
            token_count=len(tokens.picked),
            token_ids=tuple(p.token for p in tokens.picked) if call.output.token_ids else (),
            logprobs=tuple(logprob(p) for p in tokens.picked) if call.output.top_logprobs is not None else (),
            channel=tokens.channel,
        )


def _texts(
    loaded: Loaded, call: GenerateCall, prompt: Prompt, most: int, room: int, row: FormRow | None
) -> tuple[TextStream, RowConstraint | None]:
    """What makes text of a row's tokens, and what keeps it in form. For a text thread."""
    constraint = call.constraint
    splitter: Callable[[], Splitter | None] | None = None
    if constraint is None or constraint.after_reasoning:
        lead = constraint is not None  # constrained text is the answer, marks and all
        splitter = partial(loaded.channels.splitter, loaded.codec, prompt.tokens, lead=lead)
    text = TextStream(
        loaded.codec,
        call.stopping,
        max_new_tokens=most,
        context_room=room,
        context_tail=prompt.tokens[-8:],
        splitter=splitter,
    )
    if constraint is None or row is None:
        return text, None
    return text, loaded.grammars.follow(row, constraint, call.stopping, prompt.tokens)
