"""From a model's name to a folder that MLX can load: names, download, conversion, tiny models, checks.

Owns the cache directory. Does not load a model for use: that is the engine's. Reading order: registry, resolve,
folder, wheels, convert, gguf_weights, gguf_tokenizer, tiny. Importing this package imports no MLX.
"""

from service.models.errors import (
    BadModelFolder,
    ConversionFailed,
    DownloadFailed,
    ModelError,
    NotEnoughSpace,
    TermsNotAccepted,
    UnknownModel,
)
from service.models.folder import Manifest, read_manifest, validate, verify
from service.models.registry import DEFAULT, KNOWN
from service.models.resolve import ensure, is_present, resolve

__all__ = [
    "DEFAULT",
    "KNOWN",
    "BadModelFolder",
    "ConversionFailed",
    "DownloadFailed",
    "Manifest",
    "ModelError",
    "NotEnoughSpace",
    "TermsNotAccepted",
    "UnknownModel",
    "ensure",
    "is_present",
    "read_manifest",
    "resolve",
    "validate",
    "verify",
]
