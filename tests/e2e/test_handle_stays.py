"""A handle is what it was when it was made: whatever is asked of it, and however often, gives the same bits.

Log-probabilities are compared, of every step and of several tokens: another last bit anywhere in the state shows there.
"""

from __future__ import annotations

from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import server_service_pb2 as server_pb
from kvfork.v1 import snapshot_service_pb2 as snapshot_pb
from kvfork.v1 import types_pb2 as pb

from tests.e2e.live import Answer, LiveServer, generate, greedy, prompt_of, raw, refused

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
