"""What is wrong with an export, in the contract's words. Owns reasons, facts and advice; `kvcache.export` finds it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvcache.errors import CutExport, DamagedExport, ExportError, ForeignKey
from kvcache.manifest import Item, Manifest
from kvcache.records import NoteKind
from service.errors import (
    CallError,
    ExchangeKeyDiffers,
    ExportDamaged,
    ExportIncomplete,
    ExportUnreadable,
    FingerprintDiffers,
    InvalidField,
)
from service.images.limits import TOO_LARGE, ImageLimits
from service.media import ImageRefused
from service.runtime import Loaded


def check_fingerprint(manifest: Manifest, loaded: Loaded) -> None:
    """Raises FingerprintDiffers for a snapshot of another model."""
    here = loaded.cache.fingerprint
    if manifest.fingerprint != here:
        raise FingerprintDiffers(
            f"the snapshot is of a model with fingerprint {manifest.fingerprint}, {loaded.view.name} has {here}",
            hint="its state fits the same weights, tokenizer and software alone; make it again from its tokens",
            metadata={"have": here, "want": manifest.fingerprint, "model": loaded.view.name},
        )


def check_images(manifest: Manifest, limits: ImageLimits) -> None:
    """Raises InvalidField for an image whose file is larger than this server takes."""
    for item in manifest.items:
        if item.kind is NoteKind.MEDIA and item.size > limits.max_bytes:
            text = f"has {item.size:,} bytes; {limits.max_bytes:,} are taken"
            raise image_refused(item, ImageRefused(TOO_LARGE, text))


def image_refused(item: Item, refused: ImageRefused) -> InvalidField:
    """For an image that came along and that this server would not have taken from a caller."""
    return InvalidField.at("data", f"{item} of the export {refused}", reason=refused.reason)


@contextmanager
def translated() -> Iterator[None]:
    """What is wrong with an export as the contract's errors."""
    try:
        yield
    except ForeignKey as error:
        raise ExchangeKeyDiffers(
            "the export was signed with another exchange key than this server's",
            hint="give both instances the same --exchange-key",
            metadata={"have": error.ours.hex(), "want": error.theirs.hex()},
        ) from None
    except DamagedExport as error:
        raise ExportDamaged(
            f"the export is damaged: {error.part} is not what was signed",
            hint="nothing of it was kept; export the snapshot again",
            metadata={"record": error.part},
        ) from None
    except CutExport as error:
        raise incomplete(error.part) from None
    except ExportError as error:
        raise ExportUnreadable(
            f"what was sent {error}", hint="send the data of ExportSnapshot as it is, from its first byte on"
        ) from None


def incomplete(part: str) -> CallError:
    """For an export that lacks `part`."""
    return ExportIncomplete(
        f"the export ends before {part} was there, or it was left out and is not held here any more",
        hint="call CheckImport and ExportSnapshot again; what came is not sent twice",
        metadata={"record": part},
    )
