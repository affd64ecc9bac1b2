"""What the system lets this process do, settled before anything else runs. Knows nothing of the rest."""

from __future__ import annotations

import resource
import sys

FILES = 65_536  # more than any setting needs; some systems' own limit is a billion, which programs then walk through
FEW_FILES = 1024  # below it connections, segments and a model's files get in each other's way


def no_core_dumps() -> None:
    """No image of this process is written when it dies: its memory has keys, tokens and prompts in it."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def open_files() -> tuple[int, int]:
    """How many files this process may have open now, and how many it may ask for."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def take_all_files() -> None:
    """As many open files as may be asked for, within reason."""
    soft, hard = open_files()
    most = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def keep_file_limits() -> None:
    """Makes the number of open files none of mlx-lm's business; call it once, before that is imported.

    It sets it to 2,048, at most 4,096, whatever it was: that lowers what a server was given, and where less may be
    asked for, the import fails and no model loads.
    """
    change = resource.setrlimit

    def change_for_others(what: int, limits: tuple[int, int]) -> None:
        by = sys._getframe(1).f_globals.get("__name__", "")  # noqa: SLF001 - the one way to know who calls
        if what != resource.RLIMIT_NOFILE or by.partition(".")[0] != "mlx_lm":
            change(what, limits)

    resource.setrlimit = change_for_others
