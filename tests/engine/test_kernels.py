"""Compiled kernels come from a folder that nobody else can write to. A case that compiles is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.engine import cpu
from service.engine.kernels import UnsafeFolder, private_folder

pytestmark = pytest.mark.mlx

_COMPILES = pytest.mark.skipif(
    sys.platform != "linux" or cpu.prepare().compiler is None, reason="a Linux CPU with g++ compiles kernels"
)

_PLANTED = """
#include <fstream>
__attribute__((constructor)) static void planted() { std::ofstream("%s") << "run"; }
extern "C" void %s() {}
"""
_CALL = "mx.eval(mx.compile(lambda x: mx.exp(x) * x + 1)(mx.zeros(3)))"
_AS_UPSTREAM = f"import mlx.core as mx; {_CALL}"
_AS_WE_DO = f"from service.engine import cpu; mx = cpu.mlx(); {_CALL}; import tempfile; print(tempfile.gettempdir())"


def _run(code: str, temp: Path, cache: Path, variable: str) -> str:
    usual = {name: value for name, value in os.environ.items() if name not in ("TMPDIR", "TMP", "TEMP", "TEMPDIR")}
    env = {**usual, variable: str(temp), "KVFORK_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@_COMPILES
def test_a_library_planted_where_mlx_looks_by_itself_is_not_loaded(tmp_path: Path) -> None:
    shared, cache, mark = tmp_path / "shared", tmp_path / "cache", tmp_path / "mark"
    shared.mkdir()
    _run(_AS_UPSTREAM, shared, cache, "TMPDIR")
    (library,) = shared.glob("mlx/*/cpu/lib*.so")
    source = tmp_path / "planted.cpp"
    source.write_text(_PLANTED % (mark, library.stem.removeprefix("lib")))
    subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", source, "-o", library], check=True, timeout=120)

    _run(_AS_UPSTREAM, shared, cache, "TMPDIR")
    assert mark.exists(), "the test's own plant does not grow"
    mark.unlink()
    for variable in ("TMPDIR", "TMP"):
        assert _run(_AS_WE_DO, shared, cache, variable) == str(shared), "other temporary files have moved too"
    assert not mark.exists()
    made = list(cache.glob("kernels-*/mlx/*/cpu/lib*.so"))
    assert [path.name for path in made] == [library.name]


@_COMPILES
def test_without_a_lasting_folder_of_ours_kernels_go_to_one_that_ends_with_the_process(tmp_path: Path) -> None:
    shared, cache = tmp_path / "shared", tmp_path / "cache"
    shared.mkdir()
    cache.mkdir()
    cache.chmod(0o777)  # others could put another folder in place of ours
    _run(_AS_WE_DO, shared, cache, "TMPDIR")
    assert not list(cache.glob("*/mlx")) and not list(shared.iterdir())


def test_a_private_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    made = private_folder(tmp_path / "new" / "kernels")
    assert made.stat().st_mode & 0o777 == 0o700
    assert private_folder(made) == made


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o722, 0o777])
def test_a_folder_that_is_open_to_others_is_refused(mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(UnsafeFolder, match="open to others"):
        private_folder(folder)


def test_a_link_to_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir(mode=0o700)
    (tmp_path / "kernels").symlink_to(tmp_path / "other")
    with pytest.raises(UnsafeFolder, match="no folder"):
        private_folder(tmp_path / "kernels")


def test_a_folder_in_one_that_others_may_change_is_refused(tmp_path: Path) -> None:
    above = tmp_path / "open"
    (above / "kernels").mkdir(parents=True, mode=0o700)
    above.chmod(0o777)
    with pytest.raises(UnsafeFolder, match="replaced by others"):
        private_folder(above / "kernels")
    above.chmod(0o1777)  # as /tmp: others may add to it, and not take away
    (above / "kernels").chmod(0o700)
    private_folder(above / "kernels")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_somebody_elses_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, -1)
    with pytest.raises(UnsafeFolder, match="belongs to user 12345"):
        private_folder(folder)
    inside = folder / "more"
    inside.mkdir(mode=0o700)
    with pytest.raises(UnsafeFolder, match="replaced by others"):
        private_folder(inside)
