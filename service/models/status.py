"""Which known models are here. Looks only: fetches, makes and changes nothing."""

import dataclasses
from pathlib import Path

from service.models import cache_dir, folder
from service.models.errors import BadModelFolder, UnknownModel
from service.models.registry import KNOWN, GgufModel, TrainedModel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """One known model as it stands in the cache."""

    name: str
    state: str
    """`here`, `absent`, `old` (of an earlier converter; made anew when used) or `damaged` (likewise)."""
    path: Path | None
    """None while absent."""
    size: int
    """Bytes of the folder; 0 while absent."""
    license: str
    summary: str


def statuses() -> list[ModelStatus]:
    """Every known model, the default first."""
    return [_status(name) for name in KNOWN]


def find(name_or_path: str) -> Path:
    """The folder of a model that is here; UnknownModel or BadModelFolder where there is none."""
    if name_or_path in KNOWN:
        path = cache_dir.model_dir(name_or_path)
        if not path.exists():
            raise UnknownModel(f"{name_or_path} is not here yet: kvfork models get {name_or_path}")
        return folder.validate(path)
    path = Path(name_or_path).expanduser()
    if not path.exists():
        raise UnknownModel(f"{name_or_path!r} is neither a model folder nor one of {', '.join(KNOWN)}")
    return folder.validate(path.absolute())


def _status(name: str) -> ModelStatus:
    model = KNOWN[name]
    path = cache_dir.model_dir(name)
    here = path.is_dir()
    return ModelStatus(
        name=name,
        state=_state(path, model.converter) if here else "absent",
        path=path if here else None,
        size=sum(file.stat().st_size for file in path.iterdir()) if here else 0,
        license=model.license if isinstance(model, GgufModel | TrainedModel) else "none needed",
        summary=model.summary,
    )


def _state(path: Path, converter: int) -> str:
    try:
        manifest = folder.read_manifest(path)
        folder.validate(path)
    except BadModelFolder:
        return "damaged"
    if manifest is None:
        return "damaged"
    return "old" if manifest.converter < converter else "here"
