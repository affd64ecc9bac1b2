"""Two replicas behind Envoy: one killed and started again under a thousand calls, one drained, and a gateway in front.

Both hold a durable snapshot of the same name with another content each, so that a call that went astray would show.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from kvfork_client import (
    Client,
    Durability,
    KVForkError,
    ResourceExhausted,
    Sampling,
    SaveOptions,
    Snapshot,
    SnapshotNotDurable,
    Started,
    Stopping,
    Tls,
    TokenMissing,
    Unavailable,
    tokens,
)
from kvfork_client.values import FinishReason

from service.auth.tokens import new_token
from tests.certificates import Authority
from tests.e2e import proxy
from tests.e2e.live import PATIENCE, ROOT, LiveServer, prompt_of, until
from tests.e2e.proxy import Envoy
from tests.gateway.live import LiveGateway

pytestmark = [pytest.mark.mlx, pytest.mark.slow]

RESULTS = 1_000  # calls that must have had one
BEFORE, DURING, AFTER = 350, 60, 200  # of them: before the kill, while a replica is away, and from it when it is back
AGENTS = 6
PLAN = {"a": prompt_of(300, seed=1), "b": prompt_of(300, seed=2)}
PLAN_ID = "the-plan"
GREEDY = Sampling(temperature=0)
DISK = Durability.DISK


def stopping(count: int) -> Stopping:
    return Stopping(max_tokens=count, ignore_eos=True)


class Replicas:
    """Servers with names, ports and stores that they keep over a restart."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, LiveServer] = {}
        self._addresses: dict[str, str] = {}

    def start(self, name: str, *more: str, wait: bool = True) -> LiveServer:
        where = self._addresses.get(name, "127.0.0.1:0")
        flags = ("--address", where, "--instance", name, "--store-dir", str(self._folder / name), *more)
        server = self._running[name] = LiveServer("tiny-gemma3", *flags, wait=wait)
        self._addresses[name] = server.address
        return server

    def kill(self, name: str) -> None:
        server = self._running.pop(name)
        server.kill()
        server.close()

    def terminate(self, name: str) -> int:
        server = self._running.pop(name)
        code = server.terminate()
        server.close()
        return code

    @property
    def addresses(self) -> list[str]:
        return [self._addresses[name] for name in sorted(self._addresses)]

    def close(self) -> None:
        for server in self._running.values():
            assert not server.complaints(), server.complaints()
            server.close()


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    proxy.program()  # before servers are started for nothing
    made = Replicas(tmp_path)
    try:
        made.start("a")
        made.start("b")
        yield made
    finally:
        made.close()


@pytest.fixture
def envoy(replicas: Replicas) -> Iterator[Envoy]:
    with Envoy(replicas.addresses) as running:
        until(lambda: len(running.healthy()) == 2, what="both replicas to be called healthy")
        yield running


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a call ended. `asked`: the instance that it was for, if for one; `by`: the one that says it answered."""

    what: str
    asked: str
    by: str
    error: KVForkError | None = None


@dataclass
class Tally:
    """Of all agents' calls."""

    ended: list[Ended] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def call(self, what: str, work: Callable[[], Any], *, on: Snapshot | None = None) -> Any:
        """Makes a call and writes down its end. Raises its error."""
        asked = on.instance if on is not None else ""
        try:
            got = work()
        except KVForkError as error:
            self.ended.append(Ended(what=what, asked=asked, by="", error=error))
            raise
        self.ended.append(Ended(what=what, asked=asked, by=instance_of(got)))
        return got

    def results(self, by: str = "", since: int = 0) -> int:
        return sum(one.error is None and by in ("", one.by) for one in self.ended[since:])


def instance_of(got: Any) -> str:
    """The instance that a result says it is from."""
    if isinstance(got, Snapshot):
        return got.instance
    if isinstance(got, list):
        (instance,) = {child.instance for child in got}
        return str(instance)
    return "" if got is None or isinstance(got, tuple) else str(got.snapshot.instance)


def turn(tally: Tally, client: Client, number: int, plans: list[Snapshot]) -> None:
    """What an agent does over and over: a prompt anywhere, and then what its handles allow where they are."""
    durability = DISK if number % 4 == 0 else None
    prompt = tokens(prompt_of(20 + number % 200, seed=number))
    root = tally.call(
        "create", lambda: client.create_snapshot(prompt, options=SaveOptions(ttl=600, durability=durability))
    )
    first, second = tally.call("fork", lambda: root.fork(2), on=root)
    made = tally.call(
        "generate",
        lambda: first.generate(tokens([7, 8]), save=True, sampling=GREEDY, stopping=stopping(4)).result(),
        on=first,
    )
    assert made.snapshot is not None
    back = tally.call("rollback", lambda: made.snapshot.rollback(drop_tokens=3), on=made.snapshot)
    assert tally.call("get", back.refresh, on=back).token_count == root.token_count + 3
    for plan in plans:
        assert tally.call("read", plan.tokens, on=plan) == tuple(PLAN[plan.instance])
    for handle in (first, second, made.snapshot, back, root):
        tally.call("release", handle.release, on=handle)


def agent(tally: Tally, address: str, number: int, names: list[tuple[str, str]]) -> None:
    """Turns until it is over. Every second agent leaves repeating to gRPC's own policy, the others see each failure."""
    with Client(address, timeout=PATIENCE, retry=number % 2 == 0) as client:
        plans = [client.routed(instance=instance).snapshot(name).refresh() for instance, name in names]
        for count in itertools.count():
            if tally.over.is_set():
                return
            try:
                turn(tally, client, number * 10_000 + count, plans)
            except KVForkError:  # written down
                time.sleep(0.05)


def is_retryable(error: KVForkError) -> bool:
    """Whether the error says that the same call may be made again."""
    if isinstance(error, Unavailable):
        return error.reason == "" or error.retry_after is not None  # a proxy's own, or ours with a time to wait
    return isinstance(error, ResourceExhausted) and error.retry_after is not None


def go_on(plan: Snapshot) -> tuple[list[int], list[float], int]:
    """Greedy tokens behind a snapshot, their log-probabilities bit for bit, and how many were computed again."""
    generation = plan.generate(tokens([5, 6]), sampling=GREEDY, stopping=stopping(8), token_ids=True, top_logprobs=3)
    deltas = list(generation)
    assert generation.finished is not None
    values = [v for d in deltas for one in d.logprobs for v in (one.logprob, *(top.logprob for top in one.top))]
    assert len(values) == 8 * 4
    return [i for d in deltas for i in d.token_ids], values, generation.finished.usage.recomputed_tokens


def test_a_thousand_calls_through_a_killed_replica_end_well_or_may_be_made_again(
    replicas: Replicas, envoy: Envoy
) -> None:
    tally = Tally()
    with ExitStack() as stack:
        client = stack.enter_context(Client(envoy.address, timeout=PATIENCE))
        plans = {
            instance: client.routed(instance=instance).create_snapshot(
                tokens(ids), options=SaveOptions(snapshot_id=PLAN_ID, durability=DISK)
            )
            for instance, ids in PLAN.items()
        }
        assert [plan.instance for plan in plans.values()] == ["a", "b"]
        lost = client.routed(instance="a").create_snapshot("held in memory alone")
        boots = {name: client.routed(instance=name).server_info().boot_id for name in PLAN}
        before = {name: go_on(plan) for name, plan in plans.items()}

        names = [(plan.instance, plan.name) for plan in plans.values()]
        pool = stack.enter_context(ThreadPoolExecutor(AGENTS))
        stack.callback(tally.over.set)
        agents = [pool.submit(agent, tally, envoy.address, number, names) for number in range(AGENTS)]

        def wait_for(condition: Callable[[], bool], what: str) -> None:
            until(lambda: condition() or any(one.done() for one in agents), what=what, patience=120)

        wait_for(lambda: tally.results() >= BEFORE, "calls before the kill")
        under_way = client.routed(instance="a").generate("Once upon", stopping=stopping(100_000)).events()
        assert isinstance(next(under_way), Started)
        killed = len(tally.ended)
        replicas.kill("a")
        with pytest.raises(Unavailable):
            list(under_way)
        wait_for(lambda: tally.results("b", killed) >= DURING, "calls while a replica is away")
        wait_for(lambda: any(one.asked == "a" and one.error for one in tally.ended[killed:]), "calls that miss it")
        replicas.start("a")
        back = len(tally.ended)
        wait_for(lambda: tally.results("a", back) >= AFTER and tally.results() >= RESULTS, "calls after the restart")
        tally.over.set()
        for one in agents:
            one.result(PATIENCE)

        failed = [one for one in tally.ended if one.error is not None]
        gone = [one for one in failed if isinstance(one.error, SnapshotNotDurable)]
        counts = Counter((one.what, one.asked, type(one.error).__name__) for one in failed)
        print(f"{len(tally.ended)} calls, {tally.results()} results", counts)
        # Whatever failed may be made again, but for handles that lived in the killed process alone.
        assert [one for one in failed if one not in gone and not is_retryable(one.error)] == []
        assert {(one.asked, one.error.metadata["bootId"]) for one in gone} <= {("a", boots["a"])}
        # No call about a handle was answered by another replica, and those of the other one noticed nothing.
        assert [one for one in tally.ended if one.asked and one.by not in ("", one.asked)] == []
        assert [one for one in failed if one.asked == "b"] == []
        assert not any(one.error for one in tally.ended[:killed])
        # A call about no handle that was not already at the killed replica found the other one.
        assert sum(not one.asked for one in failed) <= AGENTS
        assert {one.by for one in tally.ended if one.what == "create" and one.error is None} == {"a", "b"}

        # The durable ones go on bit-equal, with nothing computed again; the other one says why it is gone.
        assert client.routed(instance="a").server_info().boot_id != boots["a"]
        assert {name: go_on(plan) for name, plan in plans.items()} == before
        assert before["a"][0] != before["b"][0] and before["a"][2] == 0
        with pytest.raises(SnapshotNotDurable) as caught:
            lost.refresh()
        assert caught.value.metadata == {"bootId": boots["a"]}


def test_a_drained_replica_delivers_what_runs_and_no_call_without_a_handle_notices(
    replicas: Replicas, envoy: Envoy
) -> None:
    over = threading.Event()
    by: list[str] = []  # the instances that took the calls without a handle

    def keep_asking(number: int) -> None:
        with Client(envoy.address, timeout=PATIENCE) as mine:
            for count in itertools.count():
                if over.is_set():
                    return
                prompt = tokens(prompt_of(10, seed=number * 1000 + count))
                by.append(mine.create_snapshot(prompt, options=SaveOptions(ttl=60)).instance)

    def until_both_answer(askers: list[Future[None]]) -> None:
        since = len(by)
        until(
            lambda: set(by[since:]) == {"a", "b"} or any(one.done() for one in askers), what="both replicas to answer"
        )

    with Client(envoy.address, timeout=PATIENCE) as client, ThreadPoolExecutor(3) as pool:
        running = client.routed(instance="b").generate(
            "Hello", save=SaveOptions(durability=DISK), stopping=stopping(20_000)
        )
        events = running.events()
        started = next(events)
        assert isinstance(started, Started) and started.instance == "b"
        askers = [pool.submit(keep_asking, number) for number in range(3)]
        try:
            until_both_answer(askers)
            assert replicas.terminate("b") == 0
            *_, finished = events
            assert finished.reason is FinishReason.STOPPED
            saved = finished.snapshot
            with pytest.raises(Unavailable):
                client.routed(instance="b").server_info()
            replicas.start("b")
            until(lambda: len(envoy.healthy()) == 2, what="the replica to be called healthy again")
            assert saved.refresh().token_count == started.prompt_tokens + finished.usage.completion_tokens
            until_both_answer(askers)
        finally:
            over.set()
        for asker in askers:
            asker.result(PATIENCE)


def test_calls_go_to_the_instance_or_the_session_that_they_name(replicas: Replicas, envoy: Envoy) -> None:
    with Client(envoy.address, timeout=PATIENCE, retry=False) as client:

        def answering(client: Client) -> set[str]:
            return {client.server_info().instance for _ in range(8)}

        assert answering(client) == {"a", "b"}
        assert [answering(client.routed(instance=name)) for name in ("a", "b")] == [{"a"}, {"b"}]
        sessions = [answering(client.routed(session=f"task {number}")) for number in range(20)]
        assert {len(each) for each in sessions} == {1} and set().union(*sessions) == {"a", "b"}
        assert answering(client.routed(session="task 1", instance="a")) == {"a"}
        with pytest.raises(Unavailable):
            client.routed(instance="c").server_info()

        made = client.routed(instance="a").create_snapshot("only here")
        for name, there in (("a", [made.name]), ("b", [])):
            asked = [sys.executable, "-m", "service", "snapshots", "list", "--json", "--address", envoy.address]
            listed = subprocess.run([*asked, "--instance", name], capture_output=True, text=True, cwd=ROOT, check=True)
            assert [json.loads(line)["snapshot"]["name"] for line in listed.stdout.splitlines()] == there


def test_with_tls_on_both_sides_a_token_says_who_calls(tmp_path: Path) -> None:
    proxy.program()
    authority = Authority()
    certificate, key = authority.server().write(tmp_path, "cert")
    key.rename(tmp_path / "key.pem")
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    token, line = new_token("alice")
    tokens_file = tmp_path / "tokens"
    tokens_file.touch(mode=0o600)
    tokens_file.write_text(f"{line}\n")
    replicas = Replicas(tmp_path)
    with ExitStack() as stack:
        stack.callback(replicas.close)
        for name in ("a", "b"):
            tls = ("--tls-cert", str(certificate), "--tls-key", str(tmp_path / "key.pem"))
            replicas.start(name, *tls, "--tokens", str(tokens_file), wait=False)
        envoy = stack.enter_context(Envoy(replicas.addresses, certificates=tmp_path))
        until(lambda: len(envoy.healthy()) == 2, what="both replicas to be called healthy")
        with Client(envoy.address, token=token, tls=Tls(ca=tmp_path / "ca.pem"), timeout=PATIENCE) as client:
            made = [client.routed(instance=name).create_snapshot("mine") for name in ("a", "b")]
            assert [one.refresh().instance for one in made] == ["a", "b"]
            with pytest.raises(TokenMissing):
                client.with_token(None).get_snapshot(made[0])


def test_a_gateway_goes_on_where_its_conversation_is_and_elsewhere_when_that_replica_is_away(
    replicas: Replicas, envoy: Envoy
) -> None:
    with LiveGateway(envoy, "--alias", "*=tiny-gemma3") as gateway, gateway.client() as openai:
        messages: list[Any] = []

        def said(text: str) -> tuple[str, int]:
            """The instance that answers one more message, and how many tokens of the prompt it had."""
            messages.append({"role": "user", "content": text})
            answer = openai.chat.completions.create(
                model="any", messages=messages, max_completion_tokens=8, temperature=0
            )
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            return answer.kvfork["instance"], answer.usage.prompt_tokens_details.cached_tokens

        home, before = said("Where are you?")
        for number in range(6):
            instance, reused = said(f"And now, {number}?")
            assert (instance, reused > before) == (home, True), (instance, reused, before)
            before = reused
        replicas.kill(home)
        moved, reused = said("Are you still there?")
        assert (moved != home, reused) == (True, 0)
        instance, reused = said("And to stay?")
        assert (instance, reused > before) == (moved, True)
