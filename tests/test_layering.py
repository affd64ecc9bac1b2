"""Who may import whom. Every module is read, so a rule holds for imports inside functions and for types as well."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "service": ROOT,
    "kvcache": ROOT,
    **dict.fromkeys(
        ("kvfork_client", "kvfork_gateway", "kvfork_langgraph", "kvfork_agents"), ROOT / "clients" / "python"
    ),
}

# The joints of the layout: a rule about a module that is gone would hold for ever.
MUST_EXIST = (
    "kvcache.blocks",
    "kvcache.cache",
    "kvcache.mlx_arrays",
    "kvcache.receipt",
    "kvcache.store",
    "service.app",
    "service.cli",
    "service.config",
    "service.core",
    "service.core_api",
    "service.engine",
    "service.errors",
    "service.events",
    "service.inspector.inspector",
    "service.loop",
    "service.models",
    "service.plan",
    "service.request",
    "service.rpc.server",
    "service.scheduler",
    "service.text",
    "kvfork_client",
    "kvfork_gateway.serving",
)

MLX = ("mlx", "mlx_lm", "mlx_vlm")
WIRE = ("grpc", "grpc_health", "grpc_reflection", "grpc_status", "google", "kvfork")
MODELS = ("transformers", "tokenizers", "gguf", "huggingface_hub", "safetensors")

# What works between the engine thread's mailbox and the engine.
ENGINE_THREAD = tuple(
    f"service.{name}" for name in ("steps", "orders", "opening", "keeping", "ends", "rows", "parking", "restores")
)

# What a module and all below it must not import.
NEVER: dict[str, tuple[str, ...]] = {
    "kvcache": (*WIRE, "mlx_lm", "mlx_vlm", *MODELS, "service", "kvfork_client", "kvcache.mlx_arrays"),
    "service.engine": (
        *WIRE,
        "service.app",
        "service.cli",
        "service.core",
        "service.loop",
        "service.rpc",
        "service.scheduler",
        "kvfork_client",
    ),
    "service.models": (*WIRE, "service.app", "service.cli", "service.core", "service.loop", "service.rpc"),
    "service.text": (*WIRE, *MLX, "service.rpc", "service.loop", "service.engine"),
    "service.core": (*WIRE, *MLX, "service.rpc", "service.app", "service.cli"),
    "service.loop": (*WIRE, *MLX, "asyncio", "service.rpc", "service.app", "service.core"),
    **dict.fromkeys(ENGINE_THREAD, (*WIRE, *MLX, "asyncio", "threading", "time", "service.loop", "service.engine")),
    "kvfork_client": (*MLX, *MODELS, "numpy", "service", "kvcache"),
}

# The only things of this project and of others that a module and all below it may import, stdlib aside.
ONLY: dict[str, tuple[str, ...]] = {
    "service.rpc": (
        *WIRE,
        "cryptography",
        "service.rpc",
        "service.auth",
        "service.config",
        "service.config_values",
        "service.core_api",
        "service.errors",
        "service.events",
        "service.request",
        "kvcache.receipt",
    ),
    # A client of the contract like any other: what it may see and do is the door's to say.
    "service.inspector": ("grpc", "grpc_status", "google", "kvfork", "h11", "service.inspector"),
    "service.core_api": ("service.events", "service.request"),
    "service.request": ("kvcache.origin",),
    "service.errors": (),
    "service.events": ("kvcache.receipt",),
    "service.config": ("kvcache.checkpoints", "service.auth.callers", "service.config_file", "service.config_values"),
    "service.config_values": ("kvcache.checkpoints", "service.config_file"),
    "service.options": (
        "kvcache.checkpoints",
        "service.auth.callers",
        "service.config",
        "service.config_file",
        "service.config_values",
    ),
    "service.config_file": (),
    "service.auth": ("service.auth", "service.errors"),
    "kvfork_client": ("grpc", "grpc_status", "google", "kvfork", "kvfork_client"),
    "kvfork_langgraph": ("kvfork_client", "kvfork_langgraph", "langgraph", "langchain_core"),
    # A client of the gateway: all that it knows of the server's side it has from there.
    "kvfork_agents": ("kvfork_agents", "agents", "openai"),
    # A client of the contract: all that it knows of a server it has from there.
    "kvfork_gateway": ("kvfork_client", "kvfork_gateway", "uvicorn"),
}

# Who may import a thing; nobody else does.
IMPORTERS: dict[str, tuple[str, ...]] = {
    "mlx": ("service.engine", "service.models", "kvcache.mlx_arrays"),
    "mlx_lm": ("service.engine", "service.models"),
    "grpc": ("service.rpc", "service.inspector", "kvfork_client"),
    "llguidance": ("service.text.form_worker",),
    "langgraph": ("kvfork_langgraph",),
    "agents": ("kvfork_agents",),
    "kvfork": ("service.rpc", "service.inspector", "kvfork_client"),
    "h11": ("service.inspector.http",),
    "prometheus_client": ("service.metrics.collector",),
    "opentelemetry": ("service.tracing",),
    "uvicorn": ("kvfork_gateway.serving", "service.cli.gateway"),
    "kvfork_gateway": ("kvfork_gateway", "service.cli.gateway"),
    "service.app": ("service.cli",),
    "service.inspector": ("service.inspector", "service.app"),
    "service.cli": ("service.cli", "service.__main__"),
    "service.rpc": ("service.rpc", "service.app", "service.cli.serve"),
    "kvcache.mlx_arrays": ("service.engine", "service.app"),
}

# The scheduler decides and does nothing else: it and all it imports know no time, no thread and no machine.
PURE = "service.scheduler"
PURE_NEVER = (
    *MLX,
    *WIRE,
    *MODELS,
    "numpy",
    "asyncio",
    "os",
    "queue",
    "random",
    "secrets",
    "socket",
    "threading",
    "time",
)
KVCACHE_VALUES = {
    "kvcache",
    "kvcache.blocks",
    "kvcache.errors",
    "kvcache.layout",
    "kvcache.media",
    "kvcache.origin",
    "kvcache.receipt",
    "kvcache.records",
    "kvcache.schedule",
}

# Settings come from one place. The others read what is no setting of the server, set a variable for a library, or hand
# the environment on to a command.
READS_ENVIRONMENT = (
    "service.options",
    "service.cli",
    "service.models",
    "service.engine.cpu",
    "service.engine.kernels",
    "service.auth.source",
    "service.open_store",
    "service.text.tokens",
    "kvfork_client",
)


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def all_modules() -> dict[str, Path]:
    return {
        module_name(path, root): path for package, root in PACKAGES.items() for path in (root / package).rglob("*.py")
    }


MODULES = all_modules()


def within(name: str, prefixes: Iterable[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under `if TYPE_CHECKING`, which import nothing."""
    yield tree
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            yield from _running(node)


def imports_of(module: str) -> set[str]:
    """Full names of what `module` imports: modules, and members that are modules themselves."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in _running(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, base] if base else up)
            members = {f"{base}.{alias.name}" for alias in node.names}
            submodules = {member for member in members if member in MODULES}
            # `from service import errors` means service.errors, not the empty package around it.
            found |= submodules
            if submodules != members:
                found.add(base)
    return found


def closure(module: str) -> Iterator[str]:
    """`module` and all modules of ours that it needs, at any distance."""
    seen, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name in seen or name not in MODULES:
            continue
        seen.add(name)
        yield name
        waiting += imports_of(name)


def outside_stdlib(names: Iterable[str]) -> set[str]:
    return {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names}


def test_the_modules_that_the_rules_are_about_exist():
    assert [name for name in MUST_EXIST if name not in MODULES] == []
    rules = [*NEVER, *ONLY, PURE, *READS_ENVIRONMENT]
    assert [name for name in rules if name not in MODULES] == []


@pytest.mark.parametrize("layer", NEVER)
def test_a_layer_does_not_import_what_it_must_not_know(layer):
    wrong = {
        (module, name)
        for module in MODULES
        if within(module, [layer])
        for name in imports_of(module)
        if within(name, NEVER[layer])
    }
    assert wrong == set()


@pytest.mark.parametrize("layer", ONLY)
def test_a_layer_imports_only_what_it_may(layer):
    wrong = {
        (module, name)
        for module in MODULES
        if within(module, [layer])
        for name in outside_stdlib(imports_of(module))
        if not within(name, ONLY[layer])
    }
    assert wrong == set()


@pytest.mark.parametrize("thing", IMPORTERS)
def test_a_thing_is_imported_only_where_it_belongs(thing):
    wrong = {
        (module, name)
        for module in MODULES
        if not within(module, IMPORTERS[thing])
        for name in imports_of(module)
        if within(name, [thing])
    }
    assert wrong == set()


def test_the_scheduler_and_all_it_imports_are_pure():
    reached = set(closure(PURE))
    assert "service.plan" in reached
    wrong = {(module, name) for module in reached for name in imports_of(module) if within(name, PURE_NEVER)}
    assert wrong == set()
    assert {module for module in reached if within(module, ["kvcache"])} <= KVCACHE_VALUES


def test_only_settings_read_the_environment():
    wrong = set()
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
            if named and not within(module, READS_ENVIRONMENT):
                wrong.add((module, ast.unparse(node)))
    assert wrong == set()


@pytest.mark.parametrize("module", ["service.scheduler", "kvcache.cache", "service.request", "service.events"])
def test_importing_loads_neither_mlx_nor_grpc(module):
    check = f"import sys, {module}; print(sorted({{'mlx', 'grpc', 'numpy', 'google'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def test_importing_the_client_loads_nothing_of_the_server():
    check = "import sys, kvfork_client; print(sorted({'mlx', 'service', 'kvcache', 'numpy'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"
