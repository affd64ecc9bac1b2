"""Before any test module imports MLX: MKL has to be in front of it, or real models take minutes, not seconds."""

from __future__ import annotations

from service.engine import cpu

cpu.prepare()
