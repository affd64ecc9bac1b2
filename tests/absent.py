"""What becomes of a test whose tool or package is not there: skipped with the reason, and failed where CI is "true"."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def missing(reason: str, *, module: bool = False) -> NoReturn:
    """Ends the test, or a module's collection: failed in CI, where everything is expected, else skipped."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason, allow_module_level=module)
