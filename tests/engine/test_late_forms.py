"""A form that answers late: its row waits alone, and then says what it would have said."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from service.request import Constraint, Form, Stopping
from tests.engine.rig import Rig, open_rig, prompt_of
from tests.text.test_hostile_forms import descendants

pytestmark = pytest.mark.mlx

FORM = Constraint(form=Form.REGEX, text="([a-z]{4} )*")
TOKENS = 24


@pytest.fixture(params=["tiny-llama", "tiny-gemma3", "tiny-qwen3_5"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = open_rig(request.param)
    yield made
    made.close()


def test_no_other_row_waits_for_a_form_that_does_not_answer(rig: Rig) -> None:
    held, free = prompt_of(rig, 40), prompt_of(rig, 70, 2)
    alone = rig.run(held, generate=TOKENS, form=FORM)
    neighbour = rig.run(free, generate=3 * TOKENS)
    stopping = Stopping(ignore_eos=True)
    constraints = [rig.constraint(FORM, stopping, held, "owner") for _ in range(2)]
    root = rig.grammars._forms._root
    assert root is not None
    children = descendants(root._process.pid)
    for pid in children:
        os.kill(pid, signal.SIGSTOP)
    tickets = [rig.submit(held, generate=TOKENS, stopping=stopping, constraint=each, save=True) for each in constraints]
    assert rig.submit(free, generate=3 * TOKENS).wait().tokens == neighbour.tokens
    assert rig.loop.totals.late_rows > 0
    assert not any(ticket.ended.is_set() for ticket in tickets)
    for pid in children:
        os.kill(pid, signal.SIGCONT)
    for ticket in tickets:
        assert ticket.wait().tokens == alone.tokens
        node = ticket.outcome.nodes[max(ticket.outcome.nodes)]
        assert list(node.all_tokens()) == [*held, *alone.tokens]
        more = rig.run([*node.all_tokens(), 9], base=node, generate=2)
        assert more.usage is not None and more.usage.recomputed_tokens == 0
