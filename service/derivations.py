"""CreateSnapshot, Fork, Rollback and CountTokens: snapshots from inputs and from snapshots.

Owns what needs the model and what does not: a fork without additions and a rollback to a kept place touch no tensor.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace

from kvcache.cache import Lookup, PrefixCache
from kvcache.media import cut_inside
from kvcache.receipt import MissReason, Usage
from kvcache.snapshots import GoneReason, Snapshot, SnapshotLimit
from kvcache.tree import Node
from service.errors import InvalidField, NotAnAncestor, RecomputeLimit, RollbackBeyondEnd
from service.events import Admission, Counted, Created, Forked, PlanView, RolledBack
from service.handles import Handles
from service.images.intake import CallImages
from service.naming import Naming
from service.receipts import fork_usage, mended_cut, untouched
from service.request import CountTokensCall, CreateSnapshotCall, ForkCall, PlanOptions, Release, RollbackCall, Rounding
from service.resolve import Prompt, check_room, mark_positions, refuse_cut_inside
from service.runtime import Loaded, Runtime, store_full
from service.scheduler import Demand
from service.work import Work


class Derivations:
    """The unary calls that make or measure snapshots."""

    def __init__(self, runtime: Runtime) -> None:
        self._rt = runtime

    async def create_snapshot(self, call: CreateSnapshotCall, owner: str) -> Created:
        loaded, handles = self._rt.need_model(call.model, names_snapshot=bool(call.parent))
        handles.check_new(owner, [call.options, *(m.options for m in call.marks)])
        await self._rt.until_named(owner, call.parent)
        with ExitStack() as stack:
            parent = stack.enter_context(handles.using(call.parent, owner)) if call.parent else None
            images = self._rt.images(loaded, owner, stack)
            prompt = await self._rt.prompt(loaded, owner, parent, call.input, call.marks, images=images)
            end = len(prompt.tokens)
            check_room(end, loaded.view, needs=0)
            places = mark_positions(call.marks, prompt)
            options = [call.options, *(mark.options for mark in call.marks)]
            ends = [end, *places]
            for each, place in zip(options, ends, strict=True):
                handles.check_id(owner, each, prompt.tokens[:place])
            nodes, usage = await self._nodes_at(loaded, parent, prompt, frozenset(ends), owner, images)
            wanted = [loaded.cache.hold(nodes[place]) for place in ends]
            for node in nodes.values():
                loaded.cache.let_go(node)
            names = stack.enter_context(Naming(loaded, handles, owner, parent))
            made = await names.add_all(list(zip(wanted, options, strict=True)))
            snapshot, *marked = (handles.view(each) for each in made)
            return Created(snapshot=snapshot, usage=usage, marked=tuple(marked))

    async def _nodes_at(
        self,
        loaded: Loaded,
        parent: Snapshot | None,
        prompt: Prompt,
        places: frozenset[int],
        owner: str,
        images: CallImages,
    ) -> tuple[dict[int, Node], Usage]:
        """A held node for each place of the prompt; places within the parent are found, those beyond computed."""
        cache = loaded.cache
        nodes: dict[int, Node] = {}
        held = ExitStack()
        try:
            stood: Usage | None = None
            if parent is not None and max(places) <= parent.token_count:
                stood = await self._stand(loaded, parent, images)
            for place in places:
                if parent is not None and place <= parent.token_count:
                    node = cache.hold(parent.node) if place == parent.token_count else cache.cut(parent.node, place)
                    if node is None:
                        raise store_full(f"no state is kept at token {place} of the parent")
                    nodes[place] = node
            if stood is not None:
                return nodes, stood
            work = Work(
                owner=owner,
                tokens=prompt.tokens,
                images=prompt.images,
                base=parent.node if parent else None,
                keep=places - nodes.keys(),
                generation=None,
                mended=await self._rt.mend(parent, images, held),
            )
            events, usage = await self._rt.run(work, parent)
            lost = ""
            for event in events:
                nodes[event.node.end] = event.node
                lost = lost or event.lost
            if lost:
                raise store_full(lost)
        except BaseException:  # a cancelled caller too must leave no hold behind; it is raised on
            for node in nodes.values():
                cache.let_go(node)
            raise
        finally:
            held.close()
        return nodes, usage

    async def fork(self, call: ForkCall, owner: str) -> Forked:
        loaded, handles = self._rt.need_model("", names_snapshot=True)
        handles.check_new(owner, [branch.options for branch in call.branches])
        await self._rt.until_named(owner, call.parent)
        with ExitStack() as stack:
            parent = stack.enter_context(handles.using(call.parent, owner))
            images = self._rt.images(loaded, owner, stack)
            prompts = []
            for i, branch in enumerate(call.branches):
                at = f"branches[{i}].append"
                prompt = await self._rt.prompt(loaded, owner, parent, branch.append, at=at, images=images)
                check_room(len(prompt.tokens), loaded.view, needs=0, at=at)
                prompts.append(prompt)
            for branch, prompt in zip(call.branches, prompts, strict=True):
                handles.check_id(owner, branch.options, prompt.tokens)
            adds = any(len(prompt.tokens) > parent.token_count for prompt in prompts)
            if adds:
                mended = await self._rt.mend(parent, images, stack)
                nodes, usage = await self._run_branches(loaded, parent, prompts, owner, mended)
            else:
                usage = await self._stand(loaded, parent, images)
                nodes = [loaded.cache.hold(parent.node) for _ in prompts]
            options = [branch.options for branch in call.branches]
            names = stack.enter_context(Naming(loaded, handles, owner, parent, one_line=False))
            made = await names.add_all(list(zip(nodes, options, strict=True)))
            return Forked(snapshots=tuple(handles.view(s) for s in made), usage=usage)

    async def _run_branches(
        self, loaded: Loaded, parent: Snapshot, prompts: list[Prompt], owner: str, mended: Usage | None
    ) -> tuple[list[Node], Usage]:
        """A held node for each prompt, one of which adds tokens; those that do are prefilled side by side."""
        cache = loaded.cache
        works = [
            Work(
                owner=owner,
                tokens=p.tokens,
                images=p.images,
                base=parent.node,
                keep=frozenset({len(p.tokens)}),
                generation=None,
                group=f"{owner} {parent.id}",
                mended=mended,
            )
            for p in prompts
            if len(p.tokens) > parent.token_count
        ]
        tasks = [asyncio.ensure_future(self._rt.run(work, parent)) for work in works]
        try:
            done = [await task for task in tasks]
            lost = next((event.lost for events, _ in done for event in events if event.lost), "")
            if lost:
                raise store_full(lost)
        except BaseException:  # one failed, or the caller left: what the others made is let go of
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                for event in () if isinstance(result, BaseException) else result[0]:
                    cache.let_go(event.node)
            raise
        computed = iter(done)
        nodes: list[Node] = []
        usages: list[Usage] = []
        for prompt in prompts:
            if len(prompt.tokens) > parent.token_count:
                events, usage = next(computed)
                nodes.append(events[-1].node)
                usages.append(usage)
            else:
                nodes.append(cache.hold(parent.node))
        seen = sum(span.end - span.start for span in parent.images)
        return nodes, fork_usage(usages, parent_tokens=parent.token_count, parent_images=seen)

    async def _stand(self, loaded: Loaded, parent: Snapshot, images: CallImages, *, limit: int | None = None) -> Usage:
        """What a call names, stands: a snapshot whose state was lost has it computed again, before it gets more names.

        Raises StoreFull if that cannot be kept, RecomputeLimit beyond `limit` tokens.
        """
        cache = loaded.cache
        if cache.stands(parent.node):
            return untouched(cache, parent.node)
        with ExitStack() as held:
            mended = await self._rt.mend(parent, images, held, limit=limit)
            if mended is not None and cache.stands(parent.node):
                return mended_cut(mended, parent)
            tokens = parent.node.all_tokens()
            work = Work(
                owner=parent.owner,
                tokens=tokens,
                images=await images.placed(tokens),
                base=parent.node,
                keep=frozenset({parent.token_count}),
                generation=None,
                mended=mended,
                max_recompute_tokens=limit,
            )
            (event,), usage = await self._rt.run(work, None)
            self._rt.rehome(parent, event)
            if event.lost:
                raise store_full(event.lost)
            return usage

    async def rollback(self, call: RollbackCall, owner: str) -> RolledBack:
        loaded, handles = self._rt.need_model("", names_snapshot=True)
        handles.check_new(owner, [call.options])
        cache = loaded.cache
        await self._rt.until_named(owner, call.source)
        with ExitStack() as stack:
            source = stack.enter_context(handles.using(call.source, owner))
            position, ancestor = self._cut_at(call, source, owner, handles)
            if call.release is Release.SOURCE:
                handles.refuse_if_busy(source, own_uses=1)
            if call.rounding is Rounding.EXACT:
                handles.check_id(owner, call.options, source.node.all_tokens()[:position])
            node = cache.hold(ancestor.node) if ancestor is not None else cache.cut(source.node, position)
            if node is not None and not cache.ready(node):
                cache.let_go(node)  # else the next call would pay for what this one has promised
                node = None
            if node is None and call.rounding is Rounding.DOWN:
                node = _nearest_ready(cache, source, position)
                if node is None:
                    raise RecomputeLimit.over(position, 0, 0)
                position = node.end
            if node is None:
                images = self._rt.images(loaded, owner, stack)
                there = source if position == source.token_count else ancestor
                if there is not None and not cache.stands(there.node):
                    usage = await self._stand(loaded, there, images, limit=call.max_recompute_tokens)
                    if cache.ready(there.node):
                        node = cache.hold(there.node)
                if node is None:
                    base = _held_base(cache, source.node if there is None else there.node, position)
                    stack.callback(cache.let_go, base)
                    node, usage = await self._recompute(call, source, position, base, owner, cache, images)
            else:
                usage = untouched(cache, node)
            names = stack.enter_context(Naming(loaded, handles, owner, source))
            snapshot = await names.add(node, call.options)
            released = self._let_go_of(call.release, source, position, snapshot, handles, cache)
            if released:
                names.told(snapshot.id)  # it is what is left of them, also for a caller who goes now
                await self._rt.written()
            return RolledBack(snapshot=handles.view(snapshot), released=tuple(released), usage=usage)

    @staticmethod
    def _cut_at(call: RollbackCall, source: Snapshot, owner: str, handles: Handles) -> tuple[int, Snapshot | None]:
        """The position to cut at, and the ancestor that stands there if it was named."""
        if call.ancestor is not None:
            ancestor = handles.find(call.ancestor, owner)
            tokens = ancestor.node.all_tokens()
            if source.node.all_tokens()[: len(tokens)] != tokens:
                facts = {"source": call.source, "ancestor": call.ancestor}
                raise NotAnAncestor(
                    f"{call.ancestor} is not a prefix of {call.source}", hint="roll back by token_count", metadata=facts
                )
            return len(tokens), ancestor
        position = call.token_count if call.token_count is not None else source.token_count - (call.drop_tokens or 0)
        if position > source.token_count or position < 0:
            facts = {"tokenCount": str(source.token_count)}
            raise RollbackBeyondEnd(
                f"{call.source} has {source.token_count} tokens", hint="cut within it", metadata=facts
            )
        field = "token_count" if call.token_count is not None else "drop_tokens"
        inside = cut_inside(source.images, position)
        if inside is not None and call.rounding is Rounding.DOWN:
            position = inside.start
        refuse_cut_inside(source.images, position, field)
        if position == 0:
            raise InvalidField.at(field, "nothing would be left: generate without a parent instead")
        return position, None

    async def _recompute(
        self,
        call: RollbackCall,
        source: Snapshot,
        position: int,
        base: Node,
        owner: str,
        cache: PrefixCache,
        images: CallImages,
    ) -> tuple[Node, Usage]:
        """Computes the state at `position` behind `base`, and what of `base` is not stored by the cuts that made it."""
        tokens = source.node.all_tokens()[:position]
        work = Work(
            owner=owner,
            tokens=tokens,
            images=await images.placed(tokens),
            base=base if base.parent is not None else None,
            keep=frozenset({position}),
            generation=None,
            known_tokens=position,
            known_reason=cache.why_recomputed(source.node, position),
            max_recompute_tokens=call.max_recompute_tokens,
        )
        events, usage = await self._rt.run(work, None)
        (event,) = events
        if event.lost:
            cache.let_go(event.node)
            raise store_full(event.lost)
        return event.node, usage

    def _let_go_of(
        self,
        release: Release,
        source: Snapshot,
        position: int,
        result: Snapshot,
        handles: Handles,
        cache: PrefixCache,
    ) -> list[str]:
        if release is Release.NONE:
            return []
        going = [source] if release is Release.SOURCE else cache.abandoned_by(source, position)
        going = [snapshot for snapshot in going if snapshot is not result]
        if release is Release.ABANDONED:
            self._rt.stop_users({snapshot.id for snapshot in going}, source.owner)
        for snapshot in going:
            handles.delete(snapshot, GoneReason.ROLLED_BACK, in_use_ok=True)
        return [f"snapshots/{snapshot.id}" for snapshot in going]

    async def count_tokens(self, call: CountTokensCall, owner: str) -> Counted:
        loaded, handles = self._rt.need_model(call.model, names_snapshot=bool(call.parent))
        await self._rt.until_named(owner, call.parent)
        with ExitStack() as stack:
            parent = stack.enter_context(handles.using(call.parent, owner)) if call.parent else None
            images = self._rt.images(loaded, owner, stack)
            prompt = await self._rt.prompt(loaded, owner, parent, call.input, images=images, bounded=False)
            total = len(prompt.tokens)
            lookup = loaded.cache.lookup(owner, prompt.tokens, base=parent.node if parent else None, keep=())
            try:
                plan = self._planned(call.plan, total, lookup, loaded, owner) if call.plan is not None else None
            finally:
                loaded.cache.release(lookup)
            return Counted(
                total_tokens=total,
                image_tokens=prompt.image_tokens,
                cached_tokens=lookup.position,
                remaining_tokens=max(0, loaded.view.context_tokens - total),
                token_ids=tuple(self._rt.shown(prompt.added)) if call.include_rendered else (),
                text=(prompt.text or loaded.codec.text_of(prompt.added)) if call.include_rendered else "",
                plan=plan,
            )

    def _planned(self, asked: PlanOptions, total: int, lookup: Lookup, loaded: Loaded, owner: str) -> PlanView:
        """What calls that go on from the looked-up prompt of `total` tokens would meet now."""
        rt = self._rt
        known = max(lookup.known, lookup.position)
        disk, memory_bytes, disk_bytes = loaded.cache.weigh(lookup)
        room = loaded.view.context_tokens - total
        most = asked.max_tokens if asked.max_tokens is not None else rt.config.default_max_tokens
        demand = Demand(
            prompt_tokens=total, known_tokens=lookup.position, new_tokens=min(most, max(room, 0)), group="plan"
        )
        found = rt.loop.foresee(demand, asked.branches)
        refused = "CONTEXT_OVERFLOW" if room < 1 else ""
        if not refused and asked.branches > 1:
            try:
                loaded.cache.check_room(owner, count=asked.branches, pinned=0)  # a fork makes as many names
            except SnapshotLimit:
                refused = "SNAPSHOT_QUOTA"
        if refused:
            found = replace(found, admission=Admission.REFUSED, reason=refused)
        return PlanView(
            memory_tokens=lookup.position - disk,
            disk_tokens=disk,
            recomputed_tokens=known - lookup.position,
            new_tokens=total - known,
            miss_reason=lookup.miss_reason if known > lookup.position else MissReason.NONE,
            memory_bytes=memory_bytes,
            disk_bytes=disk_bytes,
            load_seconds=rt.loop.totals.predict_load(memory_bytes=memory_bytes, disk_bytes=disk_bytes),
            prefill_seconds=rt.loop.totals.prefill_speed.predict(total - lookup.position),
            forecast=found,
        )


def _held_base(cache: PrefixCache, node: Node, position: int) -> Node:
    """Where a run to `position` of `node`'s tokens goes on from: the deepest of its own places that is stored.

    If its blocks go further, the last of them: how they were cut decides the last bits. Held.
    """
    base = cache.hold_base(node, position)
    own = node if node.end == position else node.ancestor_at(position)
    if own.end <= base.end:
        return base
    cache.let_go(base)
    return cache.hold(own)


def _nearest_ready(cache: PrefixCache, source: Snapshot, position: int) -> Node | None:
    """The deepest place at or before `position` to go on from without compute, and that cuts no image. Held."""
    while position := cache.checkpoints_before(source.node, position):
        inside = cut_inside(source.images, position)
        if inside is not None:
            position = inside.start
            continue
        node = cache.cut(source.node, position)
        if node is not None and cache.ready(node):
            return node
        if node is not None:
            cache.let_go(node)
        position -= 1
    return None
