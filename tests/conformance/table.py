"""What is known of the clients as one page, docs/clients.md."""

from __future__ import annotations

from collections.abc import Sequence

from tests.conformance.play import Outcome
from tests.conformance.scenarios import Scenario

TITLES = {"python": "Python", "go": "Go", "typescript": "TypeScript", "rust": "Rust", "java": "Java"}

HEAD = """\
# Clients

Five languages with one small vocabulary: *client*, *snapshot*, *generation* (a stream of text that can be stopped or
cancelled), *fork*, *rollback*, *receipt*, and errors with a reason and details. Each has a page that leads to the first
text, fork and rollback: [Python](../clients/python/README.md), [Go](../clients/go/README.md),
[TypeScript](../clients/typescript/README.md), [Rust](../clients/rust/README.md), [Java](../clients/java/README.md).
For [Swift](../clients/swift/README.md) there is a recipe and a sample, that nobody has built yet, and
[grpcurl](../clients/grpcurl/README.md) needs none of it.

Every client plays [the same scenarios](../clients/conformance/README.md) against the same kind of server, which is
watched meanwhile: a cancelled row is let go of within one step. `make conformance` plays them and writes this page.

"""


def markdown(scenarios: Sequence[Scenario], outcomes: Sequence[Outcome]) -> str:
    """The page. A scenario that a language has not played is an empty cell."""
    languages = [language for language in TITLES if any(one.language == language for one in outcomes)]
    went = {(one.language, one.scenario): "✓" if not one.problems else "✗" for one in outcomes}
    rows = [
        ["scenario", *(TITLES[language] for language in languages)],
        ["---", *(":-:" for _ in languages)],
    ]
    for scenario in scenarios:
        cells = [went.get((language, scenario.id), "") for language in languages]
        rows.append([f"`{scenario.id}`: {scenario.title}", *cells])
    return HEAD + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
