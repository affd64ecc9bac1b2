"""The shape of the public API: the same in both flavours, and free of protobuf."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvfork_client as package
import pytest
from kvfork_client.generating import GenerateOptions, generate_request

PAIRS = [
    (package.Client, package.AsyncClient),
    (package.Snapshot, package.AsyncSnapshot),
    (package.Generation, package.AsyncGeneration),
    (package.Watch, package.AsyncWatch),
    (package.Export, package.AsyncExport),
]
# The protocols of the two worlds differ in these.
RENAMED = {"__enter__": "__aenter__", "__exit__": "__aexit__", "__iter__": "__aiter__", "__next__": "__anext__"}


def public(cls: type) -> dict[str, Any]:
    return {name: getattr(cls, name) for name in dir(cls) if not name.startswith("_")}


def signature_texts() -> Iterator[tuple[str, str]]:
    """Every annotation of everything public, as text."""
    for name in package.__all__:
        item = getattr(package, name)
        if inspect.isclass(item):
            for field, annotation in getattr(item, "__annotations__", {}).items():
                yield f"{name}.{field}", str(annotation)
            for method_name, method in inspect.getmembers(item, inspect.isfunction):
                if method_name.startswith("_") and method_name not in {"__init__", *RENAMED, *RENAMED.values()}:
                    continue
                for parameter, annotation in method.__annotations__.items():
                    yield f"{name}.{method_name}({parameter})", str(annotation)
            for property_name, prop in inspect.getmembers(item, lambda member: isinstance(member, property)):
                yield f"{name}.{property_name}", str(prop.fget.__annotations__.get("return"))
        elif inspect.isfunction(item):
            for parameter, annotation in item.__annotations__.items():
                yield f"{name}({parameter})", str(annotation)
        else:
            yield name, str(item)


def test_no_protobuf_in_public_signatures() -> None:
    found = dict(signature_texts())
    assert "Client.generate(return)" in found
    assert "GenerationResult.finished" in found
    tainted = {where: text for where, text in found.items() if re.search(r"_pb|protobuf|ProtoMessage", text)}
    assert tainted == {}


def test_every_public_annotation_can_be_resolved() -> None:
    for name in package.__all__:
        item = getattr(package, name)
        if inspect.isclass(item):
            for method in vars(item).values():
                if inspect.isfunction(method) and method.__name__ not in ("__enter__", "__init__"):
                    typing.get_type_hints(method)


@pytest.mark.parametrize(("sync", "asynchronous"), PAIRS, ids=lambda cls: cls.__name__)
def test_both_flavours_have_the_same_methods_and_parameters(sync: type, asynchronous: type) -> None:
    ours, theirs = public(sync), public(asynchronous)
    ours.pop("close", None)  # close / aclose of a generation; a client's is compared below
    theirs.pop("aclose", None)
    theirs.pop("close", None)
    assert ours.keys() == theirs.keys()
    for name, member in ours.items():
        if inspect.isfunction(member):
            assert _parameters(member) == _parameters(theirs[name]), name
    for name in RENAMED:
        assert (name in vars(sync)) == (RENAMED[name] in vars(asynchronous)), name


def _parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [
        (parameter.name, parameter.kind, parameter.default)
        for parameter in inspect.signature(function).parameters.values()
    ]


def test_the_documented_options_are_those_that_work() -> None:
    keywords = [
        parameter.name
        for parameter in inspect.signature(generate_request).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    assert list(GenerateOptions.__annotations__) == keywords


def test_all_names_what_is_there() -> None:
    assert sorted(set(package.__all__)) == sorted(package.__all__)
    assert [name for name in package.__all__ if not hasattr(package, name)] == []


def test_the_client_imports_no_server_code() -> None:
    folder = Path(package.__file__).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom) and not node.level
                else []
            )
            assert not {name.partition(".")[0] for name in names} & {"service", "kvcache", "mlx", "mlx_lm", "numpy"}, (
                path
            )


def test_importing_the_client_loads_no_server_code() -> None:
    code = "import sys, kvfork_client; print({'service', 'kvcache', 'mlx', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
