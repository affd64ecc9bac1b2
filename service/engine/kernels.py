"""Where MLX puts the kernels that it compiles on a Linux CPU. Owns that folder, and whose it may be.

MLX writes them into the folder for temporary files, under a name that everybody can tell beforehand, and loads what it
finds there: on a machine with other users that is code of theirs. So it is given a folder that only this user can
write to. MLX finds the folder by the first of the variables below that C's environment has. TEMPDIR is nobody else's;
where one of the others is set, it changes in C's environment alone, so that all else of the process, and the commands
of the settings, go on with the one that the user chose.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import platform
import shutil
import stat
import tempfile
from pathlib import Path

_process = ctypes.CDLL(None)
_VARIABLES = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")  # the order of std::filesystem::temp_directory_path


class UnsafeFolder(Exception):
    """A folder that code must not be loaded from. The text says why."""


def give_mlx_a_folder() -> Path:
    """Points MLX at a folder of this user's in the cache, else at one of this process's. Before anything is compiled.

    Raises UnsafeFolder if neither can be had.
    """
    from service.models.cache_dir import cache_root  # its package needs this one

    # Libraries of one machine's C library may not load on another that has the same home.
    lasting = cache_root() / "-".join(("kernels", platform.machine(), *platform.libc_ver()))
    try:
        folder = private_folder(lasting)
    except (UnsafeFolder, OSError):
        folder = private_folder(Path(tempfile.mkdtemp(prefix="kvfork-kernels-")))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    variable = next((name for name in _VARIABLES if name in os.environ), _VARIABLES[-1])
    _process.setenv(variable.encode(), os.fsencode(folder), 1)
    return folder


def private_folder(path: Path) -> Path:
    """`path` without links on the way, made with mode 0700 if it is not there.

    Raises UnsafeFolder unless it is this user's alone and nobody else can put another in its place; OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.parent.resolve() / path.name
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafeFolder(f"{path} is no folder")
    if found.st_uid != os.geteuid():
        raise UnsafeFolder(f"{path} belongs to user {found.st_uid}, this is {os.geteuid()}")
    if found.st_mode & 0o077:
        raise UnsafeFolder(f"{path} is open to others (mode {stat.S_IMODE(found.st_mode):04o}, should be 0700)")
    for above in path.parents:
        found = above.stat()
        sticky = found.st_mode & stat.S_ISVTX  # others may add to it, and not take away
        if found.st_uid not in (0, os.geteuid()) or (found.st_mode & 0o022 and not sticky):
            raise UnsafeFolder(f"{path} can be replaced by others, who may change {above}")
    return path
