"""Plays the scenarios of clients/conformance with the Python client: `python driver.py ADDRESS`.

A scenario comes as one JSON line on stdin, what was seen goes as one JSON line to stdout.
"""

from __future__ import annotations

import base64
import gc
import hashlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvfork_client import (
    Client,
    Delta,
    Generation,
    Image,
    KVForkError,
    Mark,
    Progress,
    Release,
    Rounding,
    Sampling,
    SaveOptions,
    Snapshot,
    SnapshotNotFound,
    Stopping,
    Tls,
    Usage,
    raw,
)

Given = Mapping[str, Any]
GREEDY = Sampling(temperature=0)


def length(count: int) -> Stopping:
    """Exactly this many tokens, whatever the model says."""
    return Stopping(max_tokens=count, ignore_eos=True)


def adds_up(usage: Usage | None) -> bool:
    assert usage is not None
    return usage.cached_tokens + usage.recomputed_tokens + usage.new_tokens == usage.prompt_tokens


def join(deltas: Sequence[Delta], start: int) -> bool:
    """Whether each delta begins where the one before it ended."""
    for delta in deltas:
        if delta.first_position != start:
            return False
        start += delta.token_count
    return True


def failure(call: Callable[[], Any]) -> KVForkError:
    try:
        call()
    except KVForkError as error:
        return error
    raise AssertionError("the call was to fail")


def code(error: KVForkError) -> str:
    return error.CODE.name


def first_deltas(generation: Generation, count: int) -> list[Delta]:
    """Reads so many, and leaves the generation running."""
    return [next(generation) for _ in range(count)]


def long_prompt(given: Given) -> str:
    return given["prompt"] * given["times"]


def stream(client: Client, given: Given) -> dict[str, Any]:
    generation = client.generate(given["prompt"], sampling=GREEDY, stopping=length(given["max_tokens"]))
    kinds: list[str] = []
    deltas: list[Delta] = []
    for event in generation.events():
        kind = type(event).__name__.lower()
        if kinds[-1:] != [kind]:
            kinds.append(kind)
        if isinstance(event, Delta):
            deltas.append(event)
    result = generation.result()
    assert generation.started is not None
    return {
        "events": kinds,
        "reason": result.finished.reason.name,
        "completion_tokens": result.usage.completion_tokens,
        "text": result.text,
        "text_is_sum_of_deltas": "".join(delta.text for delta in deltas) == result.text,
        "positions_join": join(deltas, generation.started.prompt_tokens),
        "receipt_adds_up": adds_up(result.usage),
    }


def marks(client: Client, given: Given) -> dict[str, Any]:
    stopping = length(given["max_tokens"])
    generation = client.generate(
        given["prompt"],
        sampling=GREEDY,
        stopping=stopping,
        marks=[Mark.prompt_end(), Mark.at(given["mark_at"])],
        save=True,
    )
    result = generation.result()
    assert generation.started is not None and result.snapshot is not None
    again = generation.marks[0].generate(sampling=GREEDY, stopping=stopping).result()
    prompt_tokens = generation.started.prompt_tokens
    return {
        "marks": len(generation.marks),
        "first_is_prompt_end": generation.marks[0].token_count == prompt_tokens,
        "second_tokens": generation.marks[1].token_count,
        "saved_is_prompt_and_answer": result.snapshot.token_count == prompt_tokens + result.usage.completion_tokens,
        "same_text_from_prompt_end": again.text == result.text,
        "recomputed_tokens": again.usage.recomputed_tokens,
    }


def fork(client: Client, given: Given) -> dict[str, Any]:
    source = client.create_snapshot(given["prompt"])
    children = source.fork(given["appends"])
    stopping = length(given["max_tokens"])
    with ThreadPoolExecutor() as pool:
        ran = pool.map(lambda child: child.generate(sampling=GREEDY, stopping=stopping).result(), children)
        results = list(ran)
    copies = source.fork(2)
    return {
        "children": len(children),
        "distinct_names": len({child.name for child in children}),
        "parents_are_the_source": all(child.parent == source.name for child in children),
        "finished": len(results),
        "completion_tokens": sum(result.usage.completion_tokens for result in results),
        "receipts_add_up": adds_up(children.usage) and all(adds_up(result.usage) for result in results),
        "plain_copies": len(copies),
        "copies_have_its_tokens": all(copy.tokens() == source.tokens() for copy in copies),
    }


def rollback_exact(client: Client, given: Given) -> dict[str, Any]:
    stopping = length(given["max_tokens"])
    generation = client.generate(
        long_prompt(given), sampling=GREEDY, stopping=stopping, marks=[Mark.prompt_end()], save=True
    )
    result = generation.result()
    end, prompt = result.snapshot, generation.marks[0]
    assert end is not None
    cut = end.rollback(token_count=prompt.token_count)
    again = cut.generate(sampling=GREEDY, stopping=stopping).result()
    dropped = end.rollback(drop_tokens=3)
    ancestor = end.rollback(ancestor=prompt)
    beyond = failure(lambda: end.rollback(token_count=end.token_count + 1))
    last = dropped.rollback(drop_tokens=1, release=Release.SOURCE)
    return {
        "cut_at_prompt": cut.token_count == prompt.token_count,
        "same_text_again": again.text == result.text,
        "dropped_three": dropped.token_count == end.token_count - 3,
        "to_ancestor": ancestor.token_count == prompt.token_count,
        "released_source": last.released == (dropped.name,),
        "beyond_end": {
            "code": code(beyond),
            "reason": beyond.reason,
            "told_token_count": beyond.metadata.get("tokenCount") == str(end.token_count),
        },
    }


def rollback_down(client: Client, given: Given) -> dict[str, Any]:
    source = client.create_snapshot(long_prompt(given))
    back = source.rollback(token_count=given["cut_at"], rounding=Rounding.DOWN)
    assert back.usage is not None
    return {
        "token_count": back.token_count,
        "recomputed_tokens": back.usage.recomputed_tokens,
        "new_tokens": back.usage.new_tokens,
    }


def errors(client: Client, given: Given) -> dict[str, Any]:
    fields = failure(client.generate("Hi", sampling=Sampling(temperature=-1, top_p=2)).result)
    snapshot = failure(lambda: client.get_snapshot(given["missing"]))
    model = failure(lambda: client.model(given["model"]))
    too_long = failure(client.generate("word " * given["too_many_words"]).result)
    return {
        "fields": {
            "code": code(fields),
            "reason": fields.reason,
            "fields": sorted(violation.field for violation in fields.fields),
        },
        "snapshot": {
            "code": code(snapshot),
            "reason": snapshot.reason,
            "resource": snapshot.resource,
            "snapshot_is_gone": isinstance(snapshot, SnapshotNotFound),
        },
        "model": {
            "code": code(model),
            "reason": model.reason,
            "resource": model.resource,
            "snapshot_is_gone": isinstance(model, SnapshotNotFound),
        },
        "too_long": {"code": code(too_long), "reason": too_long.reason, "metadata": sorted(too_long.metadata)},
    }


def expired(client: Client, given: Given) -> dict[str, Any]:
    snapshot = client.create_snapshot(given["prompt"], options=SaveOptions(ttl=given["ttl_seconds"]))
    time.sleep(given["wait_seconds"])
    generation = snapshot.generate(stopping=length(4))
    seen: list[Any] = []
    error = failure(lambda: seen.extend(generation.events()))
    return {
        "code": code(error),
        "reason": error.reason,
        "told_expire_time": "expireTime" in error.metadata,
        "events_before": len(seen),
        "handle_knows": snapshot.gone is error,
    }


def stop(client: Client, given: Given) -> dict[str, Any]:
    generation = client.generate(
        given["prompt"], sampling=GREEDY, stopping=length(given["max_tokens"]), save=SaveOptions()
    )
    first_deltas(generation, given["after_deltas"])
    was_running = generation.stop()
    result = generation.result()
    assert generation.started is not None and result.snapshot is not None
    total = generation.started.prompt_tokens + result.usage.completion_tokens
    return {
        "was_running": was_running,
        "reason": result.finished.reason.name,
        "snapshot_holds_all": result.snapshot.token_count == total,
        "receipt_adds_up": adds_up(result.usage),
        "was_running_later": client.stop(generation.started.generation),
    }


def cancel_prefill(client: Client, given: Given) -> dict[str, Any]:
    generation = client.generate(long_prompt(given), stopping=length(given["max_tokens"]), progress=True)
    deltas = 0
    for event in generation.events():
        if isinstance(event, Progress) and event.done_tokens < event.total_tokens:
            generation.cancel()
            break
        deltas += isinstance(event, Delta)
    return {"code": code(failure(generation.result)), "deltas": deltas}


def cancel_decode(client: Client, given: Given) -> dict[str, Any]:
    generation = client.generate(given["prompt"], stopping=length(given["max_tokens"]))
    deltas = first_deltas(generation, given["after_deltas"])
    generation.cancel()
    return {"code": code(failure(generation.result)), "deltas": len(deltas)}


def deadline(client: Client, given: Given) -> dict[str, Any]:
    generation = client.generate(
        given["prompt"], stopping=length(given["max_tokens"]), timeout=given["timeout_seconds"]
    )
    deltas: list[Delta] = []
    error = failure(lambda: deltas.extend(generation))
    return {"code": code(error), "some_deltas": bool(deltas)}


def save_on_cancel(client: Client, given: Given) -> dict[str, Any]:
    generation = client.generate(
        given["prompt"],
        stopping=length(given["max_tokens"]),
        save=SaveOptions(snapshot_id=given["snapshot_id"]),
        save_on_cancel=True,
    )
    first_deltas(generation, given["after_deltas"])
    generation.cancel()
    ended = code(failure(generation.result))
    kept: Snapshot | None = None
    while kept is None:  # it is there a moment after the call has ended
        try:
            kept = client.get_snapshot(f"snapshots/{given['snapshot_id']}")
        except SnapshotNotFound:
            time.sleep(0.05)
    assert generation.started is not None
    return {
        "code": ended,
        "longer_than_prompt": kept.token_count > generation.started.prompt_tokens,
        "goes_on": kept.generate(stopping=length(2)).result().usage.completion_tokens == 2,
    }


def abandoned(client: Client, given: Given) -> dict[str, Any]:
    def read_one_and_forget() -> None:
        first_deltas(client.generate(given["prompt"], stopping=length(given["max_tokens"])), 1)

    read_one_and_forget()
    gc.collect()
    return {"dropped": True}


def slow_reader(client: Client, given: Given) -> dict[str, Any]:
    generation = client.generate(given["prompt"], sampling=GREEDY, stopping=length(given["max_tokens"]))
    deltas = first_deltas(generation, 1)
    time.sleep(given["pause_seconds"])
    deltas += list(generation)
    result = generation.result()
    assert generation.started is not None
    return {
        "text": result.text,
        "tokens_in_deltas": sum(delta.token_count for delta in deltas),
        "completion_tokens": result.usage.completion_tokens,
        "positions_join": join(deltas, generation.started.prompt_tokens),
    }


def big_message(client: Client, given: Given) -> dict[str, Any]:
    text = given["word"] * given["words"]
    counted = client.count_tokens(text, rendered=True)
    over = failure(lambda: client.count_tokens(given["word"] * given["too_many_words"]))
    return {
        "text_came_back": counted.text.endswith(text),
        "reply_over_4_mib": len(counted.text) > 4 * 2**20,
        "over_limit": {"code": code(over), "reason": over.reason},
    }


def image(_: Client, given: Given) -> dict[str, Any]:
    file = base64.b64decode(given["png_base64"])
    with Client(given["peer"], timeout=60) as client:
        kept = client.create_snapshot(raw(given["words_before"], Image(data=file)))
        known = raw(given["words_before"], Image(sha256=hashlib.sha256(file).digest()))
        again = client.count_tokens(known)
        result = kept.generate(given["question"], stopping=length(given["max_tokens"])).result()
        no_picture = failure(lambda: client.create_snapshot(raw(Image(data=b"no picture"))))
    assert kept.usage is not None
    return {
        "spans": len(kept.info.image_spans),
        "image_tokens_counted": kept.usage.image_tokens > 0,
        "known_by_digest": again.total_tokens == kept.token_count,
        "recomputed_tokens": result.usage.recomputed_tokens,
        "completion_tokens": result.usage.completion_tokens,
        "no_picture": {"code": code(no_picture), "reason": no_picture.reason},
    }


def retry(_: Client, given: Given) -> dict[str, Any]:
    with Client(given["peer"], timeout=30) as client:
        before = client.generate(given["prompt"]).result()
        generation = client.generate(given["prompt"])
        seen: list[Any] = []
        after = failure(lambda: seen.extend(generation.events()))
        told = failure(client.generate(given["prompt"]).result)
        made = client.snapshot("snapshots/source").fork(2)
    return {
        "before_started": before.text,
        "after_started": {"code": code(after), "events": len(seen)},
        "told_not_to": {"code": code(told), "reason": told.reason},
        "fork": len(made),
    }


def socket(client: Client, given: Given) -> dict[str, Any]:
    with Client(given["socket"], token=given["token"]) as other:
        return {"same_instance": other.server_info().instance == client.server_info().instance}


def secured(_: Client, given: Given) -> dict[str, Any]:
    tls = Tls(ca=given["ca"])
    with Client(given["peer"], token=given["token"], tls=tls) as client:
        let_in = bool(client.server_info().instance)
    with Client(given["peer"], tls=tls) as client:
        without = failure(client.server_info)
    with Client(given["peer"], token=given["unknown_token"], tls=tls) as client:
        unknown = failure(client.server_info)
    with Client(given["peer"], tls=True, retry=False, timeout=10) as client:
        other = failure(client.server_info)
    try:
        Client("example.org:443", token=given["token"])
        refused = False
    except ValueError:
        refused = True
    return {
        "with_token": let_in,
        "without_token": {"code": code(without), "reason": without.reason},
        "unknown_token": {"code": code(unknown), "reason": unknown.reason},
        "other_roots": code(other),
        "token_in_clear_refused": refused,
    }


def drain(client: Client, given: Given) -> dict[str, Any]:
    generation = client.generate(given["prompt"], stopping=length(given["max_tokens"]), save=True)
    first_deltas(generation, 1)
    with Client(given["address"], retry=False) as impatient:
        while not impatient.server_info().draining:
            time.sleep(0.02)
        refused = failure(impatient.generate(given["prompt"]).result)
    result = generation.result()
    return {
        "new_call": {"code": code(refused), "reason": refused.reason},
        "running_ended": result.finished.reason.name,
        "snapshot_made": result.snapshot is not None,
    }


PLAYS: dict[str, Callable[[Client, Given], dict[str, Any]]] = {
    "stream": stream,
    "marks": marks,
    "fork": fork,
    "rollback-exact": rollback_exact,
    "rollback-down": rollback_down,
    "errors": errors,
    "expired": expired,
    "stop": stop,
    "cancel-prefill": cancel_prefill,
    "cancel-decode": cancel_decode,
    "deadline": deadline,
    "save-on-cancel": save_on_cancel,
    "abandoned": abandoned,
    "slow-reader": slow_reader,
    "big-message": big_message,
    "image": image,
    "retry": retry,
    "socket": socket,
    "secured": secured,
    "drain": drain,
}


def main() -> None:
    address = sys.argv[1]
    with Client(address, timeout=600) as client:
        for line in sys.stdin:
            asked = json.loads(line)
            told: dict[str, Any] = {"scenario": asked["scenario"]}
            play = PLAYS.get(asked["scenario"])
            if play is None:
                told["error"] = "this driver does not know the scenario"
            else:
                try:
                    told["observed"] = play(client, asked["given"])
                except Exception:  # whatever went wrong is what the suite wants to see
                    told["error"] = traceback.format_exc()
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
