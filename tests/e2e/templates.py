"""Models with another chat template, for tests that need to know what theirs writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from service.models.folder import MANIFEST


def with_template(source: Path, folder: Path, template: str | None) -> Path:
    """A model's folder with another chat template, or none; its weights are linked."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path)
        elif path.name not in ("chat_template.jinja", MANIFEST):  # the manifest has checksums of the files as they were
            shutil.copy(path, folder)
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    settings.pop("chat_template", None)
    if template is not None:
        settings["chat_template"] = template
    config.write_text(json.dumps(settings))
    return folder
