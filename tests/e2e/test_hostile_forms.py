"""Forms that are made to end or stall the server: their own calls end, and another owner's are served meanwhile."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from kvfork.v1 import inference_service_pb2 as inference_pb
from kvfork.v1 import types_pb2 as pb

from tests.e2e.live import GREEDY, PATIENCE, LiveServer, generate, greedy, raw, refused, until
from tests.e2e.test_owners import house_of
from tests.gateway.live import LiveGateway
from tests.text.test_hostile_forms import DEEP, SLOW, descendants

FIELDS = {"lark": "constraint.lark", "regex": "constraint.regex", "json_schema": "constraint.json_schema"}


def asking(form: inference_pb.Constraint) -> inference_pb.GenerateRequest:
    stopping = pb.Stopping(max_tokens=4)
    return inference_pb.GenerateRequest(input=raw("Say it."), sampling=GREEDY, stopping=stopping, constraint=form)


def form_of(kind: str, text: str) -> inference_pb.Constraint:
    return inference_pb.Constraint(**{kind: text})


def test_deep_forms_are_refused_by_their_field_over_both_wires(llama: LiveServer) -> None:
    for name, (kind, text) in DEEP.items():
        asked = asking(form_of(kind.value, text))
        failure = refused(lambda asked=asked: llama.inference.Generate(asked))
        assert (failure.code, failure.fields) == ("INVALID_ARGUMENT", (FIELDS[kind.value],)), name
    assert generate(llama, asking(form_of("regex", "ab"))).text == "ab"
    nested: dict[str, object] = {}
    for _ in range(300):
        nested = {"type": "array", "items": nested}
    with LiveGateway(llama) as gateway, gateway.client() as client:
        form = {"type": "json_schema", "json_schema": {"name": "deep", "schema": nested}}
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model="tiny-llama",
                messages=[{"role": "user", "content": "Say it."}],
                response_format=form,  # type: ignore[arg-type]
            )
    assert caught.value.param == "response_format"


def test_slow_forms_hold_up_nobody_else_nor_the_servers_end(tmp_path: Path) -> None:
    with house_of(tmp_path, "--form-seconds", "1000s") as house:
        alice, mallory = house.owner("alice"), house.owner("mallory")
        divisors = [f'{{"type":"integer","multipleOf":{9999991 - 2 * i}}}' for i in range(8)]
        asked = [form_of("json_schema", text) for text in divisors]
        asked += [form_of(kind.value, text) for kind, text in SLOW.values()]
        calls = [mallory.inference.Generate(asking(form), timeout=PATIENCE * 4) for form in asked]
        until(lambda: _forms_of(house.server), what="a form to be compiled")
        assert generate(alice, greedy(raw("Good morning."), tokens=8)).ids  # type: ignore[arg-type]
        assert generate(alice, asking(form_of("regex", "ab"))).text == "ab"  # type: ignore[arg-type]
        counted = alice.inference.CountTokens(
            inference_pb.CountTokensRequest(input=raw("Good morning.")), timeout=PATIENCE
        )
        assert counted.total_tokens > 0
        assert not all(call.done() for call in calls)
        root = _forms_of(house.server)
        assert house.server.terminate() == 0
        until(lambda: not any(descendants(pid) for pid in root), what="what compiles to end with the server")


def _forms_of(server: LiveServer) -> list[int]:
    """The roots of the server's processes that compile something."""
    files = Path(f"/proc/{server.process.pid}/task").glob("*/children")  # a thread has begun them
    return [int(pid) for file in files for pid in file.read_text().split() if descendants(int(pid))]
