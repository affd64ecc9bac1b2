"""Every client plays the scenarios of clients/conformance; what the page docs/clients.md says of them is so."""

from __future__ import annotations

import re

import pytest

from tests.absent import missing
from tests.conformance.drivers import DRIVERS, Driver, ToolchainMissing, prepared
from tests.conformance.play import Outcome, play
from tests.conformance.scenarios import ROOT, Row, differences, read, server_differences
from tests.conformance.table import TITLES, markdown

PAGE = ROOT / "docs" / "clients.md"


def built(language: str) -> Driver:
    try:
        return prepared(language)
    except ToolchainMissing as absent:
        missing(str(absent))


@pytest.mark.slow
@pytest.mark.timeout(1800)  # the first of these builds everything, with every dependency to fetch
@pytest.mark.parametrize("language", DRIVERS)
def test_a_client_does_what_every_client_does(language: str) -> None:
    driver = built(language)
    outcomes = play(driver, read(), print)

    assert [f"{one.scenario}: {problem}" for one in outcomes for problem in one.problems] == []
    assert [one.scenario for one in outcomes] == [scenario.id for scenario in read()]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("language", [name for name in DRIVERS if name != "python"])
def test_a_clients_own_tests_pass(language: str) -> None:
    driver = built(language)
    driver.run(driver.test)


def test_the_page_shows_every_scenario_and_every_client() -> None:
    """`make conformance` writes it; a cross in it would have failed the test above."""
    scenarios = read()
    outcomes = [Outcome(language=name, scenario=one.id) for name in DRIVERS for one in scenarios]
    assert markdown(scenarios, outcomes) == PAGE.read_text(encoding="utf-8"), "run `make conformance`"


def test_scenarios_are_told_apart_and_the_drain_comes_last() -> None:
    scenarios = read()
    assert len({one.id for one in scenarios}) == len(scenarios)
    assert [one.id for one in scenarios if one.drains] == [scenarios[-1].id]
    assert set(DRIVERS) == set(TITLES)


@pytest.mark.parametrize("language", ["go", "typescript", "rust", "java"])
def test_every_page_of_a_client_leads_to_text_a_fork_and_a_rollback(language: str) -> None:
    page = (ROOT / "clients" / language / "README.md").read_text(encoding="utf-8")
    first = re.search(r"```(?:go|ts|rust|java)\n(.*?)```", page, re.DOTALL)
    assert first is not None
    for call in ("generate", "fork", "rollback"):
        assert re.search(rf"\.{call}\w*\(", first[1], re.IGNORECASE), f"{call} is not in the first example"


def test_a_difference_is_told_by_its_path() -> None:
    wanted = {"a": {"b": 1, "c": True}, "text": {"reference": 2}}
    assert differences(wanted, {"a": {"b": 1, "c": True}, "text": "so"}, {2: "so"}) == []
    assert differences(wanted, {"a": {"b": 2}, "text": "no", "d": 0}, {2: "so"}) == [
        "a.b: 2 instead of 1",
        "a.c: is missing",
        "d: was not asked for",
        "text: 'no' instead of 'so'",
    ]
    assert differences({"a": 1}, {"a": True}, {}) == ["a: True instead of 1"]


def test_the_servers_side_tells_on_rows_that_go_on() -> None:
    wanted = {"cancelled_rows": 1, "most_steps_after": 1, "most_tokens": 10}
    well = Row(row=1, tokens=3, cancelled=7, last=8)
    assert server_differences(wanted, [well, Row(row=2, tokens=99, cancelled=None, last=50)]) == []
    assert server_differences({}, [well]) == []
    assert len(server_differences(wanted, [])) == 1
    assert len(server_differences(wanted, [Row(row=1, tokens=3, cancelled=7, last=9)])) == 1
    assert len(server_differences(wanted, [Row(row=1, tokens=11, cancelled=7, last=8)])) == 1
