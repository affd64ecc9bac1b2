"""A short run of `fuzz_rpc`, and that it reaches what it is to reach."""

from __future__ import annotations

import random

import pytest

from tests.e2e.fuzz_rpc import Maker, Pool, fuzz, rpcs

pytestmark = [pytest.mark.mlx]


def test_every_method_of_the_contract_is_fuzzed_with_messages_that_parse() -> None:
    methods = {rpc.path.rpartition("/")[2] for rpc in rpcs()}
    assert len(methods) == 20 and {"Generate", "WatchSnapshots", "ImportSnapshot", "TrimCache"} <= methods
    maker = Maker(random.Random(0), Pool())
    for rpc in rpcs():
        made = [maker.message(rpc.request) for _ in range(50)]
        assert all(rpc.request.FromString(message.SerializeToString()) is not None for message in made)
        fields = {field.name for message in made for field, _ in message.ListFields()}
        assert fields == {field.name for field in rpc.request.DESCRIPTOR.fields}, "each field is set now and then"


@pytest.mark.slow
def test_random_messages_get_answers_of_the_contract_and_leave_nothing_behind() -> None:
    seen = fuzz(20.0, seed=7)
    assert sum(seen.values()) > 200
    for method in ("Generate", "Fork", "Rollback", "CreateSnapshot", "CountTokens", "UpdateSnapshot", "DeleteSnapshot"):
        assert (
            seen[f"{method} OK"]
            and sum(n for line, n in seen.items() if line.startswith(method)) > seen[f"{method} OK"]
        )
