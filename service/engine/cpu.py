"""The CPU facts. Owns how MLX is made fast and reproducible on a Linux CPU; does not own models, caches or steps.

MLX's CPU build links the reference BLAS (about 2 GFLOP/s). Loading MKL into the process before the first
`import mlx.core` puts its float32 product in front (about a hundred times faster); bfloat16, float16 and quantised
products stay slow, so weights are loaded as float32 there. `docs/models.md` has the figures behind each choice.

Import MLX through `mlx()`, or call `prepare()` before the first `import mlx.core`. This module alone imports no MLX.
"""

import ctypes
import ctypes.util
import dataclasses
import importlib.metadata
import os
import platform
import shutil
import sys
import threading
from pathlib import Path
from types import ModuleType

from service.engine.kernels import give_mlx_a_folder
from service.limits import keep_file_limits

# Strict mode makes a product's bits independent of how its inputs are aligned and of the number of threads, which
# a restore from disk needs. AUTO keeps the widest instructions that this CPU has. Figures: docs/models.md.
DEFAULT_CBWR = "AUTO,STRICT"

# OpenMP's workers spin for 200 ms after each product unless told otherwise, on the cores that the event loop, the
# clients and other models need. After one millisecond they sleep: a warm turn took 0.17 s in place of 0.21 s.
DEFAULT_BLOCKTIME_MS = "1"

_lock = threading.Lock()
_process = ctypes.CDLL(None)
_M_MMAP_THRESHOLD = -3  # malloc.h
_MKL_NAME_BYTES = 198  # what its manual asks for
_report: "CpuReport | None" = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CpuReport:
    """What was found and done for this process."""

    accelerator: str
    """`metal`, `cuda` or `cpu`."""
    blas: Path | None
    """The MKL library in front of MLX's own BLAS; None: MLX's own (slow on Linux CPU, Accelerate on macOS)."""
    cbwr: str | None
    """MKL's reproducibility mode in force (`MKL_CBWR`); None without MKL."""
    compiler: Path | None
    """The g++ that `mx.compile` calls on a Linux CPU; None: not there, or not needed on this platform."""
    compile_enabled: bool
    """False when `mx.compile` had to be switched off, or is by MLX_DISABLE_COMPILE."""
    compute_dtype: str | None
    """The dtype to load weights as: `float32` on a CPU; None: as stored."""
    mlx_was_imported: bool
    """True when MLX was imported before `prepare()`, too late for MKL: products are slow."""


def prepare() -> CpuReport:
    """Get the process ready for `import mlx.core`; does its work once, then returns the same report.

    Loads MKL where it is installed and sets `MKL_CBWR` and `KMP_BLOCKTIME` unless the user has set them; compiled
    kernels get a folder that is this user's alone (UnsafeFolder if there is none). On macOS it only reports.
    """
    global _report  # the facts are the process's, like the loaded library itself
    with _lock:
        if _report is None:
            _report = _prepare()
        return _report


def mlx() -> ModuleType:
    """Return `mlx.core`, imported with all of this module's preparations done."""
    global _report
    report = prepare()
    import mlx.core as mx

    with _lock:
        if not report.compile_enabled:
            mx.disable_compile()
        if report.accelerator != "metal" and mx.default_device() == mx.cpu:
            # A CUDA build without a GPU computes on the CPU after all.
            _report = dataclasses.replace(report, accelerator="cpu", compute_dtype="float32")
    return mx


def arithmetic() -> tuple[str, ...]:
    """All but the software's versions that the last bits of a computation depend on, in this process."""
    mx = mlx()
    report = prepare()
    facts = [report.accelerator, str(mx.device_info()["architecture"]), f"compile {report.compile_enabled}"]
    if report.blas is not None:
        library = ctypes.CDLL(str(report.blas))
        name = ctypes.create_string_buffer(_MKL_NAME_BYTES)
        library.MKL_Get_Version_String(name, _MKL_NAME_BYTES)
        # The branch is the kind of processor that it computes for, where the mode leaves that to MKL.
        facts += [name.value.decode(), f"{report.cbwr} {library.MKL_CBWR_Get_Auto_Branch()}"]
    return tuple(facts)


def trim_heap() -> None:
    """Returns the heap's free pages to the system where the C library keeps them (glibc); else does nothing."""
    if hasattr(_process, "malloc_trim"):
        _process.malloc_trim(0)


def _keep_heaps_small() -> None:
    # Left alone, glibc puts ever larger blocks on its heaps, where the small ones among them keep the rest from going
    # back: after one 4,000-token prefill of a model of a few MiB the process stayed 17 MiB larger than what it held.
    if hasattr(_process, "mallopt") and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        _process.mallopt(_M_MMAP_THRESHOLD, 2 << 20)


def find_mkl() -> Path | None:
    """Path of MKL's single dynamic library, or None. The pip package puts it under `sys.prefix/lib`."""
    try:
        entries = importlib.metadata.files("mkl") or []
    except importlib.metadata.PackageNotFoundError:
        entries = []
    listed = [Path(str(entry.locate())) for entry in entries if entry.name.startswith("libmkl_rt.so")]
    for path in [*listed, *sorted(Path(sys.prefix, "lib").glob("libmkl_rt.so*"))]:
        if path.is_file():
            return path.resolve()
    name = ctypes.util.find_library("mkl_rt")
    return Path(name) if name else None


def _prepare() -> CpuReport:
    too_late = "mlx.core" in sys.modules
    keep_file_limits()
    if sys.platform == "darwin":
        on_gpu = platform.machine() == "arm64"
        return CpuReport(
            accelerator="metal" if on_gpu else "cpu",
            blas=None,
            cbwr=None,
            compiler=None,
            compile_enabled=_compile_is_wanted(),
            compute_dtype=None if on_gpu else "float32",
            mlx_was_imported=too_late,
        )
    _keep_heaps_small()
    give_mlx_a_folder()
    on_gpu = any(name.startswith("mlx-cuda") for name in _mlx_backends())
    blas = None if too_late else _load_mkl()
    # MLX's CPU JIT runs exactly `g++`; a clang++ alone does not help it.
    compiler = shutil.which("g++")
    return CpuReport(
        accelerator="cuda" if on_gpu else "cpu",
        blas=blas,
        cbwr=os.environ.get("MKL_CBWR") if blas else None,
        compiler=Path(compiler) if compiler else None,
        compile_enabled=_compile_is_wanted() and (on_gpu or compiler is not None),
        compute_dtype=None if on_gpu else "float32",
        mlx_was_imported=too_late,
    )


def _compile_is_wanted() -> bool:
    """Whether MLX was not told otherwise from outside; once it is switched on by a call, that counts no more."""
    return "MLX_DISABLE_COMPILE" not in os.environ


def _load_mkl() -> Path | None:
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    path = find_mkl()
    if path is None:
        return None
    # MKL reads its mode once, at its first call.
    os.environ.setdefault("MKL_CBWR", DEFAULT_CBWR)
    os.environ.setdefault("KMP_BLOCKTIME", DEFAULT_BLOCKTIME_MS)
    try:
        # Global, so that the BLAS symbols which MLX resolves later are found here first.
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None  # a broken install computes slowly, as one without MKL; `kvfork doctor` says so
    return path


def _mlx_backends() -> list[str]:
    found = (importlib.metadata.distributions(name=name) for name in ("mlx-cuda", "mlx-cuda-12", "mlx-cuda-13"))
    return [str(dist.metadata["Name"]).lower() for dists in found for dist in dists]
