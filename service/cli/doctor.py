"""`kvfork doctor`: what this machine has, and what to do about what it lacks. Owns the checks and their table."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from service.extras import install
from service.limits import FEW_FILES, open_files

if TYPE_CHECKING:
    from service.engine.cpu import CpuReport

OK, WARNING, PROBLEM, ABSENT = "ok", "warning", "problem", "absent"

# Below this many float32 GFLOP/s a product does not run in an optimised BLAS (MLX's own CPU build: about 2).
_SLOW_GFLOPS = 20.0
_ROOM_FOR_MODELS = 1_500_000_000

_TOOLCHAINS = {
    "go": ("go", "version"),
    "node": ("node", "--version"),
    "java": ("java", "-version"),
    "rust": ("cargo", "--version"),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the report."""

    name: str
    state: str
    """`ok`; `warning`: works, but worse; `problem`: the server can't run; `absent`: optional and not there."""
    found: str
    advice: str = ""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "doctor", help="check this machine", description="Check this machine and say what to do about what it lacks."
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the report. Returns 1 if the server can't run here, else 0."""
    checks = []
    for check in all_checks():
        checks.append(check)
        if not args.json:
            print(
                f"{check.state:<8}{check.name:<12}{check.found}"
                + (f"\n{'':20}-> {check.advice}" if check.advice else "")
            )
    if args.json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
    return int(any(check.state == PROBLEM for check in checks))


def all_checks() -> Iterator[Check]:
    """Every check in the order of the report; the product's speed takes about a second."""
    yield Check(name="python", state=OK, found=f"{platform.python_version()} ({sys.executable})")
    yield Check(name="platform", state=OK, found=f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs")
    yield _files(*open_files())
    yield from _mlx_checks()
    yield from _cache_checks()
    for name, command in _TOOLCHAINS.items():
        yield _toolchain(name, command)


def _files(soft: int, hard: int) -> Check:
    found = "any number of open files" if hard == -1 else f"{hard:,} open files"
    if 0 <= hard < FEW_FILES:
        advice = f"connections and the store may run out of them: raise the hard limit to {FEW_FILES:,} or more"
        return Check(name="files", state=WARNING, found=found, advice=f"{advice} (ulimit -Hn, LimitNOFILE=)")
    return Check(name="files", state=OK, found=found + ("" if soft == hard else f", {soft:,} unless asked for more"))


def _mlx_checks() -> Iterator[Check]:
    from service.engine import cpu

    try:
        mx = cpu.mlx()
    except ImportError as error:
        extras = ("server", "cpu") if sys.platform == "linux" else ("server",)
        yield Check(name="mlx", state=PROBLEM, found=str(error), advice=install(*extras))
        return
    report = cpu.prepare()
    versions = ", ".join(f"{package} {_version(package)}" for package in ("mlx", "mlx-lm"))
    yield Check(name="mlx", state=OK, found=f"{versions}, computing on {report.accelerator}")
    yield _blas(report)
    yield _compiler(report)
    yield _speed(mx, report)


def _blas(report: CpuReport) -> Check:
    if report.blas:
        return Check(name="blas", state=OK, found=f"{report.blas} (MKL_CBWR={report.cbwr})")
    if sys.platform == "darwin" or report.accelerator != "cpu":
        return Check(name="blas", state=OK, found="the platform's own")
    if platform.machine() == "x86_64":
        advice = f"{install('cpu')} brings MKL, about a hundred times faster"
    else:
        advice = "no faster one is known for this processor; use small models"
    return Check(name="blas", state=WARNING, found="MLX's reference BLAS, which is slow", advice=advice)


def _compiler(report: CpuReport) -> Check:
    if report.accelerator != "cpu" or sys.platform == "darwin":
        return Check(name="compile", state=OK, found="on; needs no C++ compiler here")
    if report.compiler:
        return Check(name="compile", state=OK, found=f"on, with {report.compiler}")
    return Check(
        name="compile",
        state=WARNING,
        found="off: there is no g++",
        advice="install g++ (Debian: apt install g++); without it some models run a little slower",
    )


def _speed(mx: Any, report: CpuReport) -> Check:
    gflops = matmul_gflops(mx)
    found = f"{gflops:,.0f} GFLOP/s in a float32 product"
    if gflops < _SLOW_GFLOPS:
        return Check(name="speed", state=WARNING, found=found, advice="see blas above; or other programs use the CPU")
    return Check(name="speed", state=OK, found=found)


def matmul_gflops(mx: Any) -> float:
    """Best of a few float32 products of 768 × 768, in GFLOP/s; stops after about a second."""
    size = 768
    left = mx.random.normal((size, size))
    mx.eval(left, left @ left)  # the first product pays for set-up
    best = float("inf")
    began = time.perf_counter()
    for _ in range(8):
        start = time.perf_counter()
        mx.eval(left @ left)
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() - began > 1.0:
            break
    return float(2 * size**3 / best / 1e9)


def _cache_checks() -> Iterator[Check]:
    try:
        from service.models import cache_dir
        from service.models.status import statuses
    except ModuleNotFoundError as error:
        advice = install("server")
        yield Check(name="models", state=PROBLEM, found=f"{error.name} is not installed", advice=advice)
        return
    root = cache_dir.cache_root()
    free = cache_dir.free_bytes()
    found = f"{root}, {free / 1e9:,.1f} GB free"
    place = root
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        advice = f"make it writable, or set {cache_dir.VARIABLE}"
        yield Check(name="cache", state=WARNING, found=f"{found}, not writable", advice=advice)
    elif free < _ROOM_FOR_MODELS:
        advice = f"getting a model takes up to 1.3 GB; make room, or set {cache_dir.VARIABLE}"
        yield Check(name="cache", state=WARNING, found=found, advice=advice)
    else:
        yield Check(name="cache", state=OK, found=found)
    known = statuses()
    here = [status.name for status in known if status.state == "here"]
    broken = [status.name for status in known if status.state == "damaged"]
    listed = ", ".join(here) or "none yet; the first use fetches one"
    if broken:
        advice = f"kvfork models get {broken[0]} makes it anew"
        yield Check(name="models", state=WARNING, found=f"{listed}; damaged: {', '.join(broken)}", advice=advice)
    else:
        yield Check(name="models", state=OK, found=listed)


def _toolchain(name: str, command: tuple[str, ...]) -> Check:
    path = shutil.which(command[0])
    if path is None:
        return Check(
            name=name, state=ABSENT, found=f"no {command[0]}", advice=f"needed only to build the {name} client"
        )
    try:
        done = subprocess.run(
            [path, *command[1:]], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(name=name, state=WARNING, found=f"{path} does not run: {error}", advice="reinstall it")
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()  # java answers on stderr
    if done.returncode != 0 or not lines:
        return Check(name=name, state=WARNING, found=f"{path} fails: {' '.join(lines[:1])}", advice="reinstall it")
    return Check(name=name, state=OK, found=lines[0])


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
