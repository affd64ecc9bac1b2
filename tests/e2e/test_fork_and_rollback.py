"""What kvfork is for, told as tests: generate, name the state, fork it, take steps back, go on. Read this file first.

Every call goes through the public client to a real server with a tiny model of random weights: its words mean nothing,
but they depend on every token before them, so a state that is off by anything says something else.

In a receipt (`usage`), cached tokens came from a stored state, new tokens were computed for the first time, and
recomputed tokens had been computed before but their state could not be used. The first rule of this project is that
an agent that takes a step back pays for no token twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork_client import (
    Client,
    FinishReason,
    Mark,
    Message,
    MissReason,
    NotAnAncestor,
    Release,
    Rounding,
    Sampling,
    SaveOptions,
    SnapshotRolledBack,
    Stopping,
    Usage,
    raw,
    tokens,
)

from tests.e2e.live import LiveServer, prompt_of

MODELS = ("tiny-llama", "tiny-gemma3", "tiny-qwen3_5")
"""Full attention, whose state can be cut anywhere; sliding windows and recurrent layers, whose state cannot."""

GREEDY = Sampling(temperature=0)
SYSTEM = Message.system("You plan journeys. " + "Name the boat, the pier and the hour. " * 30)
QUESTION = Message.user("How do I cross the river?")


def of(count: int) -> Stopping:
    """Exactly this many tokens."""
    return Stopping(max_tokens=count, ignore_eos=True)


def receipt(usage: Usage) -> tuple[int, int, int]:
    """(cached, recomputed, new)."""
    assert usage.cached_tokens + usage.recomputed_tokens + usage.new_tokens == usage.prompt_tokens
    return usage.cached_tokens, usage.recomputed_tokens, usage.new_tokens


@pytest.fixture(params=MODELS)
def client(request: pytest.FixtureRequest, server_for: Callable[[str], LiveServer]) -> Iterator[Client]:
    """A client of a running server."""
    with server_for(request.param).client() as client:
        yield client


@pytest.fixture
def cold(client: Client, cold_server_for: Callable[[str], LiveServer]) -> Iterator[Client]:
    """A client of a second server with the same model, which has seen nothing of what the first one was told."""
    with cold_server_for(client.model().name.removeprefix("models/")).client() as cold:
        yield cold


def test_an_agent_forks_a_plan_and_takes_back_a_thought(client: Client, cold: Client) -> None:
    # An agent asks. The end of the prompt is marked; the end of the answer is saved.
    asked = client.generate(
        [SYSTEM, QUESTION], sampling=GREEDY, stopping=of(20), marks=[Mark.prompt_end()], save=True, token_ids=True
    )
    first = asked.result()
    prompt, answer = asked.marks[0], first.snapshot
    assert answer is not None
    length = first.usage.prompt_tokens
    assert length > 512, "long enough to leave every window behind"
    assert receipt(first.usage) == (0, 0, length)
    assert first.finished.reason is FinishReason.MAX_TOKENS
    assert (prompt.token_count, answer.token_count) == (length, length + 20)

    # It tries three continuations of the same prompt. Nobody computes the prompt again.
    branches = prompt.fork([tokens(prompt_of(9, seed)) for seed in (1, 2, 3)])
    assert receipt(branches.usage) == (length, 0, 27)
    running = [branch.generate(sampling=GREEDY, stopping=of(12)) for branch in branches]
    texts = [generation.result() for generation in running]
    assert [receipt(text.usage) for text in texts] == [(length + 9, 0, 0)] * 3
    assert len({text.text for text in texts}) == 3

    # The answer was no good: back to the end of the prompt, and another way from there.
    back = answer.rollback(token_count=length)
    assert back.usage is not None and receipt(back.usage) == (length, 0, 0)
    again = back.generate(sampling=GREEDY, stopping=of(20), token_ids=True).result()
    assert receipt(again.usage) == (length, 0, 0)
    assert (again.text, again.token_ids) == (first.text, first.token_ids), "the same prefix says the same"

    other = back.generate(tokens(prompt_of(16, 4)), sampling=GREEDY, stopping=of(12)).result()
    assert receipt(other.usage) == (length, 0, 16)
    # And that is what a server says that has seen none of this.
    context = (*back.tokens(), *prompt_of(16, 4))
    fresh = cold.generate(tokens(context), sampling=GREEDY, stopping=of(12)).result()
    assert receipt(fresh.usage) == (0, 0, length + 16)
    assert other.text == fresh.text


def test_a_fork_without_additions_makes_equal_children_for_nothing(client: Client) -> None:
    root = client.create_snapshot(tokens(prompt_of(600, 10)))
    children = root.fork(3)
    assert receipt(children.usage) == (600, 0, 0)
    assert {child.info.prefix_hash for child in children} == {root.info.prefix_hash}
    assert {child.parent for child in children} == {root.name}
    assert len({child.name for child in children}) == 3
    said = {child.generate(sampling=GREEDY, stopping=of(10)).result().text for child in children}
    assert len(said) == 1


def test_dropping_tokens_counts_from_the_end(client: Client, cold: Client) -> None:
    root = client.create_snapshot(tokens(prompt_of(300, 11)), marks=[Mark.at(270)])
    shorter = root.rollback(drop_tokens=30)
    assert shorter.token_count == 270
    assert shorter.tokens() == tuple(prompt_of(300, 11)[:270])
    assert shorter.usage is not None and receipt(shorter.usage) == (270, 0, 0), "270 was marked on the way"
    assert says(shorter) == cold_says(cold, prompt_of(300, 11)[:270])


def test_going_back_to_an_ancestor_gives_its_very_state(client: Client) -> None:
    root = client.create_snapshot(tokens(prompt_of(300, 12)))
    child = client.create_snapshot(tokens(prompt_of(40, 13)), root)
    grandchild = client.create_snapshot(tokens(prompt_of(40, 14)), child)
    back = grandchild.rollback(ancestor=root)
    assert back.usage is not None and receipt(back.usage) == (300, 0, 0)
    assert (back.token_count, back.info.prefix_hash) == (300, root.info.prefix_hash)
    assert says(back) == says(root)
    with pytest.raises(NotAnAncestor):
        root.rollback(ancestor=child)


def test_a_cut_between_two_kept_places_is_exact_and_says_what_it_cost(client: Client, cold: Client) -> None:
    context = prompt_of(700, 15)
    root = client.create_snapshot(tokens(context))
    cut = root.rollback(token_count=600)
    assert cut.token_count == 600
    assert cut.usage is not None
    if client.model().trimmable:
        assert receipt(cut.usage) == (600, 0, 0)
    else:
        assert receipt(cut.usage) == (512, 88, 0)
        assert cut.usage.miss_reason is MissReason.BETWEEN_CHECKPOINTS
    assert says(cut) == cold_says(cold, context[:600])


def test_rounding_down_computes_nothing(client: Client, cold: Client) -> None:
    context = prompt_of(700, 16)
    root = client.create_snapshot(tokens(context))
    cut = root.rollback(token_count=600, rounding=Rounding.DOWN)
    assert cut.token_count == (600 if client.model().trimmable else 512)
    assert cut.usage is not None and receipt(cut.usage) == (cut.token_count, 0, 0)
    more = prompt_of(8, 17)
    said = cut.generate(tokens(more), sampling=GREEDY, stopping=of(10)).result()
    assert receipt(said.usage) == (cut.token_count, 0, 8)
    assert said.text == cold_says(cold, context[: cut.token_count] + more)


def test_releasing_the_source_ends_its_name_and_nothing_else(client: Client) -> None:
    root = client.create_snapshot(tokens(prompt_of(300, 18)), marks=[Mark.at(270)])
    child = client.create_snapshot(tokens(prompt_of(20, 19)), root)
    back = root.rollback(token_count=270, release=Release.SOURCE)
    assert back.released == (root.name,)
    with pytest.raises(SnapshotRolledBack):
        root.refresh()
    assert receipt(child.generate(sampling=GREEDY, stopping=of(5)).result().usage) == (320, 0, 0)


def test_releasing_what_was_abandoned_spares_siblings_and_pins(client: Client) -> None:
    root = client.create_snapshot(tokens(prompt_of(300, 20)))
    thought = client.create_snapshot(tokens(prompt_of(30, 21)), root)
    deeper = client.create_snapshot(tokens(prompt_of(30, 22)), thought)
    pinned = client.create_snapshot(tokens(prompt_of(30, 23)), thought, options=SaveOptions(pinned=True))
    sibling = client.create_snapshot(tokens(prompt_of(30, 24)), root)
    back = deeper.rollback(token_count=300, release=Release.ABANDONED)
    assert set(back.released) == {thought.name, deeper.name}
    for gone in (thought, deeper):
        with pytest.raises(SnapshotRolledBack):
            gone.refresh()
    for kept in (root, pinned, sibling, back):
        kept.refresh()
    assert says(back) == says(root)


def test_a_plan_that_left_before_the_cut_is_not_given_up_and_writes_on(client: Client) -> None:
    plan_a = client.create_snapshot(tokens(prompt_of(700, 70)))
    plan_b = client.create_snapshot(tokens(prompt_of(450, 71)), plan_a.rollback(token_count=300))
    with plan_b.generate(sampling=GREEDY, stopping=of(120)) as writes:
        deltas = iter(writes)
        first = next(deltas)
        back = plan_a.rollback(drop_tokens=20, release=Release.ABANDONED)
        assert back.released == (plan_a.name,)
        assert first.token_count + sum(delta.token_count for delta in deltas) == 120
        result = writes.result()
    assert result.finished.reason is FinishReason.MAX_TOKENS
    assert plan_b.refresh().token_count == 750


def test_a_calls_own_marks_beyond_the_cut_are_given_up_with_its_end(client: Client) -> None:
    marks = [Mark.at(400), Mark.at(600), Mark.prompt_end()]
    asked = client.generate(tokens(prompt_of(700, 72)), sampling=GREEDY, stopping=of(10), save=True, marks=marks)
    end = asked.result().snapshot
    assert end is not None
    before, within, prompt = (asked.marks[i] for i in range(3))
    further = client.create_snapshot(tokens(prompt_of(10, 73)), within)
    again = client.create_snapshot(tokens(prompt_of(700, 72)))  # another call's, were it the same tokens
    back = end.rollback(token_count=400, release=Release.ABANDONED)
    assert set(back.released) == {within.name, prompt.name, end.name, further.name}
    for kept in (before, again, back):
        kept.refresh()


def test_a_rollback_of_a_rollback_still_agrees_with_a_cold_server(client: Client, cold: Client) -> None:
    grown = client.generate(
        tokens(prompt_of(500, 25)), sampling=GREEDY, stopping=of(40), save=True, marks=[Mark.at(400), Mark.at(450)]
    )
    end = grown.result().snapshot
    assert end is not None
    once = end.rollback(token_count=450)
    twice = once.rollback(token_count=400)
    for back, length in ((once, 450), (twice, 400)):
        assert back.usage is not None and receipt(back.usage) == (length, 0, 0)
        assert says(back) == cold_says(cold, prompt_of(500, 25)[:length])


def says(snapshot: object) -> str:
    """Ten greedy tokens."""
    return snapshot.generate(sampling=GREEDY, stopping=of(10)).result().text  # type: ignore[attr-defined]


def cold_says(cold: Client, context: list[int]) -> str:
    """What the other server says after the whole context."""
    return cold.generate(tokens(context), sampling=GREEDY, stopping=of(10)).result().text


def test_a_branch_like_an_earlier_one_counts_as_restored(llama: LiveServer) -> None:
    one, other = (raw(tokens(prompt_of(length, seed=90 + length))) for length in (30, 20))
    with llama.client() as client:
        parent = client.create_snapshot(raw(tokens(prompt_of(40, seed=90))))
        first, again = parent.fork([one]).usage, parent.fork([one, other]).usage
    assert (first.prompt_tokens, first.cached_tokens, first.new_tokens) == (70, 40, 30)
    assert (again.prompt_tokens, again.recomputed_tokens) == (90, 0)
    assert again.cached_tokens + again.new_tokens == 90
    assert 20 <= again.new_tokens < 50  # of the first branch a part at least was there


def test_a_plain_fork_of_an_evicted_parent_computes_it_once_and_says_so(llama: LiveServer) -> None:
    with llama.client() as client:
        parent = client.create_snapshot(tokens(prompt_of(300, 74)))
        llama.server.TrimCache(server_pb.TrimCacheRequest(memory_bytes=0, disk_bytes=0))
        first, again = parent.fork(2)[0], parent.fork(1)[0]
        assert first.usage is not None and again.usage is not None
        assert receipt(first.usage) == (0, 300, 0) and first.usage.miss_reason is MissReason.EVICTED
        assert receipt(again.usage) == (300, 0, 0)
