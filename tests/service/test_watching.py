"""Watches over a real cache: what is told, in which order, from which place, and what stops a reader that is slow."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from kvcache.cache import CacheLimits
from kvcache.changes import Change
from kvcache.snapshots import GoneReason, Snapshot
from service.errors import CallError, Draining, InvalidField, ResumeTokenExpired, WatchOverflow, WatchQuota
from service.events import Bookmark, Changed, Gone, Residency, Synced, Watched, WhyGone
from service.handles import Handles
from service.watching import Watches, shown
from tests.kvcache.tiny_worlds import LAYOUTS, World, prompt_of

RED, BLUE = {"color": "red"}, {"color": "blue"}


class Scene:
    """A cache, its watches, and short names for what happens."""

    def __init__(self, *, most: int = 4, boot: str = "boot", bookmark: float = 60.0, names: int = 10_000) -> None:
        limits = CacheLimits(max_snapshots=names, default_ttl=100.0)
        self.world = World(LAYOUTS["all"], limits=limits)
        self.handles = Handles(self.world.cache, "models/m", "here")
        self.watches = Watches(boot, most=most, bookmark_seconds=bookmark)
        self.watches.attach(self.world.cache, self.handles)

    def add(self, name: str, owner: str = "a", **labels: str) -> Snapshot:
        node = self.world.run(prompt_of(300, name), owner=owner).nodes[300]
        return self.world.save(node, name, owner=owner, labels=tuple(labels.items()))

    def watch(self, token: str = "", owner: str = "a", **labels: str) -> AsyncIterator[Watched]:
        return self.watches.watch(owner, labels, token)


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30.0):
            await story()

    asyncio.run(bounded())


def said(watched: Watched) -> str:
    """What a message says, in a word or two."""
    match watched.event:
        case Changed(view):
            return f"+{view.name.removeprefix('snapshots/')}"
        case Gone(name, reason):
            return f"-{name.removeprefix('snapshots/')} {reason.name.lower()}"
        case Synced():
            return "synced"
        case Bookmark():
            return "bookmark"


async def take(watch: AsyncIterator[Watched], count: int) -> list[str]:
    return [said(await anext(watch)) for _ in range(count)]


async def failure(watch: AsyncIterator[Watched]) -> CallError:
    with pytest.raises(CallError) as caught:
        await anext(watch)
    return caught.value


def test_a_watch_lists_then_follows() -> None:
    async def story() -> None:
        scene = Scene()
        one, _ = scene.add("one"), scene.add("two")
        scene.add("foreign", owner="b")
        watch = scene.watch()
        assert await take(watch, 3) == ["+one", "+two", "synced"]
        cache = scene.world.cache
        scene.add("foreign-too", owner="b")
        cache.update(one, labels=RED)
        cache.delete(scene.add("three"), GoneReason.ROLLED_BACK)
        cache.delete(one)
        assert await take(watch, 1) == ["-one deleted"], "what came and went meanwhile is not told"
        scene.world.now += 1000.0
        cache.sweep()
        assert await take(watch, 1) == ["-two expired"]
        await watch.aclose()
        assert scene.watches.count == 0

    run(story)


def test_a_waiting_watch_is_woken_from_another_thread() -> None:
    async def story() -> None:
        scene = Scene()
        watch = scene.watch()
        assert await take(watch, 1) == ["synced"]
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await asyncio.to_thread(scene.add, "one")
        assert said(await waiting) == "+one"
        await watch.aclose()

    run(story)


def test_a_watch_that_begins_before_the_names_are_there_waits_for_them() -> None:
    async def story() -> None:
        scene = Scene()
        scene.add("one")
        early = Watches("boot", most=1)
        waiting = asyncio.ensure_future(anext(early.watch("a", {}, "")))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        early.attach(scene.world.cache, scene.handles)
        assert said(await waiting) == "+one"

    run(story)


def test_labels_choose_and_a_change_of_labels_comes_and_goes() -> None:
    async def story() -> None:
        scene = Scene()
        red, blue = scene.add("red", color="red"), scene.add("blue", color="blue")
        watch = scene.watch(color="red")
        assert await take(watch, 2) == ["+red", "synced"]
        cache = scene.world.cache
        cache.update(blue, labels={**RED, "size": "2"})
        assert await take(watch, 1) == ["+blue"]
        cache.update(red, labels=BLUE)
        cache.update(red, labels={})
        cache.delete(red)  # this watch no longer knows it
        cache.delete(blue)
        assert await take(watch, 2) == ["-red unlisted", "-blue deleted"]
        await watch.aclose()

    run(story)


def test_a_resumed_watch_goes_on_behind_its_token_without_listing() -> None:
    async def story() -> None:
        scene = Scene()
        scene.add("one")
        watch = scene.watch()
        first, synced = await anext(watch), await anext(watch)
        assert (first.resume_token, said(synced)) == ("", "synced")
        await watch.aclose()
        scene.add("two")
        scene.add("three")
        again = scene.watch(synced.resume_token)
        assert await take(again, 2) == ["synced", "+two"]
        await again.aclose()
        half = scene.watch(synced.resume_token)
        two = [await anext(half) for _ in range(2)][-1]
        await half.aclose()
        rest = scene.watch(two.resume_token)
        assert await take(rest, 2) == ["synced", "+three"]
        await rest.aclose()

    run(story)


def test_a_token_fits_its_own_watch_in_its_own_process_only() -> None:
    async def story() -> None:
        scene = Scene()
        watch = scene.watch(color="red")
        token = (await anext(watch)).resume_token
        await watch.aclose()
        for other in (scene.watch(token), scene.watch(token, owner="b", color="red")):
            error = await failure(other)
            assert isinstance(error, InvalidField) and [f.field for f in error.fields] == ["resume_token"]
        for broken in ("x", "é", token[:-4], token + "AAAA", "%%%%"):
            assert isinstance(await failure(scene.watch(broken, color="red")), InvalidField)
        assert isinstance(await failure(Scene(boot="later").watch(token, color="red")), ResumeTokenExpired)

    run(story)


def test_a_token_from_too_long_ago_is_refused() -> None:
    async def story() -> None:
        scene = Scene(names=3)  # so that six changes are kept
        watch = scene.watch()
        token = (await anext(watch)).resume_token
        await watch.aclose()
        for _ in range(4):  # two changes each
            scene.world.cache.delete(scene.add("one"))
        error = await failure(scene.watch(token))
        assert isinstance(error, ResumeTokenExpired) and "start over" in error.hint
        assert scene.watches.count == 0

    run(story)


def test_a_reader_that_falls_too_far_behind_is_told_and_holds_nobody_up() -> None:
    async def story() -> None:
        scene = Scene(names=3)
        slow, quick = scene.watch(), scene.watch()
        assert await take(slow, 1) == await take(quick, 1) == ["synced"]
        for number in range(20):
            one = scene.add(f"name-{number}")
            assert await take(quick, 1) == [f"+name-{number}"]
            scene.world.cache.delete(one)
            assert await take(quick, 1) == [f"-name-{number} deleted"]
        assert isinstance(await failure(slow), WatchOverflow)
        await quick.aclose()
        assert scene.watches.count == 0

    run(story)


def test_an_owner_has_so_many_watches_and_no_more() -> None:
    async def story() -> None:
        scene = Scene(most=2)
        mine = [scene.watch() for _ in range(2)]
        for watch in mine:
            await anext(watch)
        error = await failure(scene.watch())
        assert isinstance(error, WatchQuota) and error.metadata == {"limit": "2"}
        await anext(theirs := scene.watch(owner="b"))
        await mine.pop().aclose()
        await anext(third := scene.watch())
        for watch in (*mine, theirs, third):
            await watch.aclose()

    run(story)


def test_silence_has_bookmarks_and_so_has_noise_that_is_not_asked_for() -> None:
    async def story() -> None:
        scene = Scene(bookmark=0.02)
        watch = scene.watch(color="red")
        assert await take(watch, 2) == ["synced", "bookmark"]
        waiting = asyncio.ensure_future(anext(watch))
        while not waiting.done():
            scene.world.cache.delete(scene.add("blue", color="blue"))
            await asyncio.sleep(0)
        bookmark = waiting.result()
        assert said(bookmark) == "bookmark"
        await watch.aclose()
        again = scene.watch(bookmark.resume_token, color="red")
        scene.add("red", color="red")
        assert await take(again, 2) == ["synced", "+red"]
        await again.aclose()

    run(story)


def test_where_state_is_now_is_told_once_it_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.watching.LOOK_SECONDS", 0.005)

    async def story() -> None:
        scene = Scene()
        scene.add("one")
        watch = scene.watch()
        looking = asyncio.ensure_future(scene.watches.look())
        before = (await anext(watch)).event
        assert said(await anext(watch)) == "synced"
        scene.world.starve()  # also before the first look
        after = (await anext(watch)).event
        assert isinstance(before, Changed) and isinstance(after, Changed)
        assert (before.snapshot.residency, after.snapshot.residency) == (Residency.MEMORY, Residency.TOKENS)
        looking.cancel()
        await watch.aclose()

    run(story)


def test_the_end_of_the_server_ends_every_watch() -> None:
    async def story() -> None:
        scene = Scene()
        watch, early = scene.watch(), Watches("boot", most=1)
        await anext(watch)
        waiting = [asyncio.ensure_future(failure(w)) for w in (watch, early.watch("a", {}, ""))]
        await asyncio.sleep(0.01)
        scene.watches.close()
        early.close()
        assert [type(await w) for w in waiting] == [Draining, Draining]

    run(story)


def test_what_is_left_out_of_a_stretch_is_left_out_for_something_behind_it() -> None:
    stretch = [
        Change("a", None, {}),
        Change("b", {}, RED),
        Change("a", {}, RED),
        Change("c", RED, BLUE),
        Change("b", RED, None, GoneReason.DELETED),
        Change("a", RED, None, GoneReason.EXPIRED),
        Change("a", None, RED),
    ]
    assert list(shown(stretch, RED)) == [(3, Gone("snapshots/c", WhyGone.UNLISTED)), (6, "a")]
    assert list(shown(stretch, {})) == [
        (3, "c"),
        (4, Gone("snapshots/b", WhyGone.DELETED)),
        (6, "a"),
    ]
    assert list(shown(stretch[5:], RED)) == [(0, Gone("snapshots/a", WhyGone.EXPIRED)), (1, "a")]


@pytest.mark.parametrize("seed", range(8))
def test_a_replica_kept_by_a_watch_is_the_listing_however_often_it_is_resumed(seed: int) -> None:
    """Random changes, a reader that stops anywhere and resumes from any token it had last: no difference remains."""

    async def story() -> None:
        rng = random.Random(seed)
        scene = Scene(names=200)
        cache = scene.world.cache
        nodes = [scene.world.run(prompt_of(300, i)).nodes[300] for i in range(3)]
        labels: dict[str, str] = {} if seed % 2 else RED

        def change() -> None:
            name = f"name-{rng.randrange(6)}"
            if not scene.handles.has(name, "a"):
                how = tuple(rng.choice((RED, BLUE, {})).items())
                scene.world.save(cache.hold(rng.choice(nodes)), name, labels=how)
            elif rng.random() < 0.5:
                cache.update(cache.snapshot("a", name), labels=rng.choice((RED, BLUE, {})))
            else:
                cache.delete(cache.snapshot("a", name), rng.choice(list(GoneReason)))

        replica: dict[str, object] = {}
        token = ""
        for _ in range(60):
            watch = scene.watch(token, **labels)
            if not token:
                replica.clear()  # a new listing
            for _ in range(rng.randrange(1, 12)):
                for _ in range(rng.randrange(4)):
                    change()
                try:
                    async with asyncio.timeout(0.001 if token else None):
                        watched = await anext(watch)
                except TimeoutError:
                    break
                match watched.event:
                    case Changed(view):
                        replica[view.name] = view
                    case Gone(name, _):
                        replica.pop(name, None)
                token = watched.resume_token or token
            await watch.aclose()
        watch = scene.watch(token, **labels)
        done = scene.add("the-end", color="red")
        while "snapshots/the-end" not in replica:
            match (await anext(watch)).event:
                case Changed(view):
                    replica[view.name] = view
                case Gone(name, _):
                    replica.pop(name, None)
        await watch.aclose()
        wanted = [s for s in cache.snapshots("a") if labels.items() <= s.labels.items()]
        assert done in wanted
        assert replica == {f"snapshots/{s.id}": scene.handles.view(s) for s in wanted}

    run(story)
