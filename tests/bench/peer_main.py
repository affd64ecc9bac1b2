"""Runs a peer as fast as this machine lets it: MKL in front of MLX's own products, weights in float32.

    python -m tests.bench.peer_main MODULE MODEL_FOLDER FLAGS-OF-THE-PEER...

Half precision products are fifty times slower on a CPU, so the weights are copied to float32 first, into a folder that
goes with the process; a peer that computes in bfloat16 here would be beaten by its dtype. On other devices the folder
is served as it is.
"""

from __future__ import annotations

import runpy
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

from service.engine import cpu


def float32_copy(folder: Path, target: Path) -> None:
    """The model in `folder` with floating-point weights as float32."""
    mx = cpu.mlx()
    for path in folder.iterdir():
        if path.suffix == ".safetensors":
            arrays = {
                name: array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array
                for name, array in mx.load(str(path)).items()
            }
            mx.save_safetensors(str(target / path.name), arrays, metadata={"format": "mlx"})
        elif path.is_file():
            shutil.copy(path, target / path.name)


def main(arguments: list[str]) -> None:
    module, folder, *flags = arguments
    report = cpu.prepare()
    cpu.mlx()
    warnings.filterwarnings("ignore", message="mlx_lm.server is not recommended")
    with tempfile.TemporaryDirectory(prefix="kvfork-bench-") as copy:
        model = folder
        if report.compute_dtype == "float32":
            float32_copy(Path(folder), Path(copy))
            model = copy
        print(f"serving {model}", flush=True)
        sys.argv = [module, "--model", model, *flags]
        runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    import signal

    # The temporary folder goes with an orderly exit only.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    main(sys.argv[1:])
