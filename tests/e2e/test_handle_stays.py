"""A handle is what it was when it was made: whatever is asked of it, and however often, gives the same bits.

Log-probabilities are compared, of every step and of several tokens: another last bit anywhere in the state shows there.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb

from tests.e2e.live import Answer, LiveServer, generate, greedy, prompt_of, raw, refused

pytestmark = [pytest.mark.mlx]

SHOWN = inference_pb.OutputOptions(token_ids=True, top_logprobs=5)
Said = list[tuple[float, ...]]


def said(answer: Answer) -> Said:
    """Every log-probability that an answer tells, in order."""
    return [(entry.logprob, *(top.logprob for top in entry.top)) for entry in answer.logprobs]


def ask(server: LiveServer, parent: str, given: pb.Input | None = None, tokens: int = 6) -> tuple[Said, pb.Usage]:
    answer = generate(server, greedy(given, parent=parent, tokens=tokens, output=SHOWN))
    return said(answer), answer.usage


def rolled_back(server: LiveServer, source: str, place: int, most: int | None = 0) -> inference_pb.RollbackResponse:
    """A handle at `place`; by default one that must cost nothing."""
    return server.inference.Rollback(
        inference_pb.RollbackRequest(source=source, token_count=place, max_recompute_tokens=most)
    )


def grown(server: LiveServer, length: int, tokens: int, seed: int) -> str:
    """A snapshot of a prompt and what was decoded behind it."""
    answer = generate(
        server, greedy(raw(prompt_of(length, seed)), tokens=tokens, output=SHOWN, save=pb.SnapshotOptions())
    )
    return answer.finished.snapshot.name


def never_moves(server: LiveServer, handle: str, seed: int, recomputed: int) -> None:
    """Asked with input and without, before and after: the same bits, at the promised cost; its fork says the same."""
    more = raw(prompt_of(20, seed))
    (fork,) = server.inference.Fork(
        inference_pb.ForkRequest(parent=handle, branches=[inference_pb.ForkBranch()])
    ).snapshots
    first, _ = ask(server, handle, more)
    bare, usage = ask(server, handle)
    assert usage.recomputed_tokens == recomputed, usage
    for name in (handle, fork.name, handle):
        assert ask(server, name, more)[0] == first
        again, usage = ask(server, name)
        assert again == bare and usage.recomputed_tokens == recomputed


def test_a_cut_between_boundaries_stays_as_it_is_where_state_can_be_cut(llama: LiveServer) -> None:
    source = grown(llama, 700, 30, seed=51)
    for place in (300, 699, 715):  # in a block that prefill made, in its tail, in what decode made
        handle = rolled_back(llama, source, place).snapshot.name
        never_moves(llama, handle, seed=place, recomputed=1)


def test_a_boundary_that_decode_passed_stays_as_it_is(
    server: LiveServer, hybrid: LiveServer, llama: LiveServer
) -> None:
    for each in (server, hybrid, llama):
        source = grown(each, 500, 300, seed=52)
        for place in (512, 768):
            back = rolled_back(each, source, place)
            assert back.usage.recomputed_tokens == 0
            never_moves(each, back.snapshot.name, seed=place, recomputed=0)


def test_a_boundary_that_prefill_passed_says_what_a_prompt_that_ends_there_says(
    server: LiveServer, hybrid: LiveServer, llama: LiveServer, cold_server_for
) -> None:
    for model, each in (("tiny-gemma3", server), ("tiny-qwen3_5", hybrid), ("tiny-llama", llama)):
        source = grown(each, 600, 4, seed=53)
        handle = rolled_back(each, source, 512).snapshot.name
        never_moves(each, handle, seed=53, recomputed=0)
        cold = generate(cold_server_for(model), greedy(raw(prompt_of(512, 53)), tokens=6, output=SHOWN))
        assert cold.usage.new_tokens == 512
        assert ask(each, handle)[0] == said(cold)


def test_a_rollback_within_its_limit_leaves_nothing_to_the_next_call(hybrid: LiveServer, server: LiveServer) -> None:
    """Evicted state is computed by the rollback, or refused; an ancestor that is named is no exception."""
    for each in (hybrid, server):
        source = grown(each, 600, 200, seed=54)
        ancestor = rolled_back(each, source, 700, most=None).snapshot.name
        each.server.TrimCache(server_pb.TrimCacheRequest(memory_bytes=0, disk_bytes=0))
        there = each.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name=source)).snapshot
        assert there.residency == pb.RESIDENCY_TOKENS
        for target in ({"ancestor": ancestor}, {"token_count": 768}, {"token_count": 690}):
            place = target.get("token_count", 700)
            request = inference_pb.RollbackRequest(source=source, max_recompute_tokens=place - 1, **target)
            refusal = refused(lambda call=each.inference.Rollback, request=request: call(request))
            assert (refusal.reason, refusal.metadata["needed"]) == ("RECOMPUTE_LIMIT", str(place))
        back = each.inference.Rollback(inference_pb.RollbackRequest(source=source, ancestor=ancestor))
        assert (back.usage.prompt_tokens, back.usage.recomputed_tokens) == (700, 700)
        assert back.usage.miss_reason == pb.MISS_REASON_EVICTED
        never_moves(each, back.snapshot.name, seed=54, recomputed=0)


@pytest.mark.parametrize("place", [300, 511])
def test_a_cut_inside_a_block_that_was_evicted_comes_back_as_it_was(llama: LiveServer, place: int) -> None:
    source = grown(llama, 700, 4, seed=55)
    handle = rolled_back(llama, source, place).snapshot.name
    first, _ = ask(llama, handle, raw(prompt_of(20, 55)))
    bare, _ = ask(llama, handle)
    for given, before in ((raw(prompt_of(20, 55)), first), (None, bare)):
        llama.server.TrimCache(server_pb.TrimCacheRequest(memory_bytes=0, disk_bytes=0))
        again, usage = ask(llama, handle, given)
        assert (usage.cached_tokens, usage.recomputed_tokens) == (0, place) and again == before
        assert usage.miss_reason == pb.MISS_REASON_EVICTED and not usage.state_remade
    there = llama.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name=handle)).snapshot
    assert there.state_revision == 0


def test_decoded_state_that_was_evicted_is_told_to_be_another(server: LiveServer, llama: LiveServer) -> None:
    for each in (server, llama):
        source = grown(each, 300, 20, seed=56)
        _, usage = ask(each, source)
        assert not usage.state_remade
        each.server.TrimCache(server_pb.TrimCacheRequest(memory_bytes=0, disk_bytes=0))
        other, usage = ask(each, source)
        assert usage.state_remade and usage.recomputed_tokens == 320
        there = each.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name=source)).snapshot
        assert there.state_revision == 1
        again, usage = ask(each, source)
        assert again == other and not usage.state_remade and usage.recomputed_tokens == 0


class World:
    """Handles of one server, with what was first said from each and has to be said again."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.said: dict[str, dict[int, Said]] = {}  # by handle and question; none yet asked: empty
        self.revisions: dict[str, int] = {}
        self.asked = self.again = self.remade = 0

    def add(self, snapshot: pb.Snapshot, like: str = "") -> None:
        """`like`: a handle whose very state it has."""
        self.said[snapshot.name] = dict(self.said.get(like, {}))
        self.revisions[snapshot.name] = 0
        assert snapshot.state_revision == 0

    def any(self) -> str:
        return self.rng.choice(sorted(self.said))

    def note(self, server: LiveServer, handle: str, usage: pb.Usage) -> None:
        """A call went on from a handle: nothing but a receipt that says so may have changed its state."""
        found = server.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name=handle)).snapshot
        if usage.state_remade:
            self.remade += 1
            self.said[handle] = {}
        else:
            assert found.state_revision == self.revisions[handle]
        self.revisions[handle] = found.state_revision

    def ask(self, server: LiveServer, handle: str, question: int) -> None:
        given = raw(prompt_of(7 * question, question)) if question else None
        told, usage = ask(server, handle, given, tokens=4)
        self.note(server, handle, usage)
        before = self.said[handle].setdefault(question, told)
        self.asked, self.again = self.asked + 1, self.again + (before is not told)
        assert told == before, (handle, question, usage)


def play(model: str, seed: int, steps: int, store: Path) -> World:
    """Random calls on one store, over restarts of its server."""
    world, kept = World(random.Random(seed)), pb.SnapshotOptions(durability=pb.DURABILITY_DISK)
    rng, left = world.rng, steps
    while left:
        with LiveServer(model, "--store-dir", str(store)) as server:
            for handle in sorted(world.said):
                world.ask(server, handle, rng.randrange(3))
            while left:
                left -= 1
                act = rng.choice(
                    ["grow", "cut", "cut", "fork", "add", "trim", "ask", "ask", "ask", "ask", "ask", "end"]
                )
                handle = world.any() if world.said else ""
                if act == "grow" or not handle:
                    given = raw(prompt_of(rng.choice([40, 200, 500, 700]), rng.randrange(4)))
                    parent = handle if rng.random() < 0.3 else ""
                    tokens = rng.choice([5, 70])
                    answer = generate(server, greedy(given, parent=parent, tokens=tokens, output=SHOWN, save=kept))
                    if parent:
                        world.note(server, parent, answer.usage)
                    world.add(answer.finished.snapshot)
                elif act == "cut":
                    end = server.snapshots.GetSnapshot(snapshot_pb.GetSnapshotRequest(name=handle)).snapshot.token_count
                    place = rng.choice([rng.randrange(1, end + 1), max(1, end - end % 256)])
                    back = server.inference.Rollback(
                        inference_pb.RollbackRequest(source=handle, token_count=place, options=kept)
                    )
                    world.add(back.snapshot)
                    # What it costs is paid: the call behind it computes one token again at most.
                    told, usage = ask(server, back.snapshot.name, tokens=4)
                    assert usage.recomputed_tokens <= 1, (place, end, usage)
                    world.note(server, back.snapshot.name, usage)
                    world.said[back.snapshot.name][0] = told
                elif act in ("fork", "add"):
                    extra = raw(prompt_of(11, rng.randrange(4))) if act == "add" else None
                    branch = inference_pb.ForkBranch(append=extra, options=kept)
                    forked = server.inference.Fork(inference_pb.ForkRequest(parent=handle, branches=[branch]))
                    world.note(server, handle, forked.usage)
                    world.add(forked.snapshots[0], like=handle if act == "fork" else "")
                elif act == "trim":
                    size = rng.choice([0, 0, 200_000])
                    server.server.TrimCache(server_pb.TrimCacheRequest(memory_bytes=size, disk_bytes=size))
                elif act == "end":
                    break
                else:
                    world.ask(server, handle, rng.randrange(3))
            assert server.terminate() == 0
    return world


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gemma3", "tiny-qwen3_5"])
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_whatever_is_done_a_handle_says_what_it_said_or_its_receipt_tells_why(
    model: str, seed: int, tmp_path: Path
) -> None:
    world = play(model, seed, 50, tmp_path / "s")
    assert world.again > 10, "it asked too little twice to show anything"


def forked(server: LiveServer, parent: str, durability: int = 0) -> inference_pb.ForkResponse:
    """Two plain copies."""
    branch = inference_pb.ForkBranch(options=pb.SnapshotOptions(durability=durability))
    return server.inference.Fork(inference_pb.ForkRequest(parent=parent, branches=[branch, branch]))


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gemma3", "tiny-qwen3_5"])
def test_a_copy_of_what_was_evicted_stands_as_it_was_and_the_receipt_says_what_that_cost(
    model: str, tmp_path: Path
) -> None:
    with LiveServer(model, "--store-dir", str(tmp_path / "s")) as server:
        made = server.inference.CreateSnapshot(inference_pb.CreateSnapshotRequest(input=raw(prompt_of(700, 57))))
        handles = {made.snapshot.name: 700}
        if model == "tiny-llama":  # in its block, of which the whole has to be computed again
            handles[rolled_back(server, made.snapshot.name, 400).snapshot.name] = 400
        for handle, count in handles.items():
            first, _ = ask(server, handle)
            for durability in (pb.DURABILITY_MEMORY, pb.DURABILITY_DISK):
                server.server.TrimCache(server_pb.TrimCacheRequest(memory_bytes=0, disk_bytes=0))
                reply = forked(server, handle, durability)
                usage = reply.usage
                assert (usage.prompt_tokens, usage.cached_tokens, usage.recomputed_tokens) == (count, 0, count)
                assert usage.miss_reason == pb.MISS_REASON_EVICTED and not usage.state_remade
                for child in reply.snapshots:
                    assert child.residency != pb.RESIDENCY_TOKENS
                    assert child.durable == (durability == pb.DURABILITY_DISK)
                again = forked(server, handle).usage
                assert (again.prompt_tokens, again.cached_tokens, again.miss_reason) == (count, count, 0)
                for name in (handle, reply.snapshots[0].name):
                    assert ask(server, name)[0] == first


def test_a_rollback_of_what_was_evicted_makes_the_cuts_that_made_it(llama: LiveServer, hybrid: LiveServer) -> None:
    for each, places in ((llama, (512, 700)), (hybrid, (512, 600, 700))):
        marks = [pb.Mark(token_count=place) for place in (181, 282)]
        made = each.inference.CreateSnapshot(
            inference_pb.CreateSnapshotRequest(input=raw(prompt_of(700, 58)), marks=marks)
        ).snapshot.name
        for place in places:
            first, _ = ask(each, rolled_back(each, made, place, most=None).snapshot.name)
            each.server.TrimCache(server_pb.TrimCacheRequest(memory_bytes=0, disk_bytes=0))
            request = inference_pb.RollbackRequest(source=made, token_count=place, max_recompute_tokens=place - 1)
            refusal = refused(lambda call=each.inference.Rollback, request=request: call(request))
            assert (refusal.reason, refusal.metadata["needed"]) == ("RECOMPUTE_LIMIT", str(place))
            assert refusal.metadata["nearestCheckpoint"] == "0"
            back = rolled_back(each, made, place, most=place)
            assert (back.usage.cached_tokens, back.usage.recomputed_tokens) == (0, place)
            assert back.usage.miss_reason == pb.MISS_REASON_EVICTED and not back.usage.state_remade
            assert ask(each, back.snapshot.name)[0] == first


def test_a_cut_that_was_evicted_is_copied_as_it_was_by_a_rollback_too(llama: LiveServer) -> None:
    source = grown(llama, 700, 4, seed=59)
    handle = rolled_back(llama, source, 400).snapshot.name
    first, usage = ask(llama, handle)
    assert (usage.recomputed_tokens, usage.grid_tokens) == (1, 1)
    assert usage.miss_reason == pb.MISS_REASON_BETWEEN_CHECKPOINTS
    for target in ({"token_count": 400}, {"ancestor": handle}):
        llama.server.TrimCache(server_pb.TrimCacheRequest(memory_bytes=0, disk_bytes=0))
        back = llama.inference.Rollback(inference_pb.RollbackRequest(source=handle, **target))
        assert (back.usage.prompt_tokens, back.usage.recomputed_tokens) == (400, 400) and not back.usage.state_remade
        assert ask(llama, back.snapshot.name)[0] == first and ask(llama, handle)[0] == first
