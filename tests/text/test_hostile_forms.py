"""Forms that are made to break what compiles or follows them: each costs its own call, and the next form is served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service.errors import CallError, ConstraintFailed, EngineDown, InvalidField, QueueFull
from service.request import Constraint, Form, Stopping
from service.text import forms
from service.text.constraint import Grammars, RowConstraint
from service.text.form_frames import Reply
from service.text.formats import detect
from service.text.forms import FormLimits, Gone
from service.text.tokens import TextCodec
from tests.text import tiny_codecs

MIB = 1 << 20
PATIENCE = 60.0
PLAIN = Constraint(form=Form.REGEX, text="ab?")


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = tiny_codecs.save(tmp_path_factory.mktemp("codec"), tiny_codecs.byte_level(), eos="<|im_end|>")
    return TextCodec.load(folder)


def made(codec: TextCodec, **limits: object) -> Grammars:
    return Grammars(codec, detect(codec), FormLimits(**{"form_seconds": 0.5, "mask_seconds": 0.3, **limits}))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def grammars(codec: TextCodec) -> Iterator[Grammars]:
    both = made(codec)
    yield both
    both.close()


async def opened(grammars: Grammars, constraint: Constraint, owner: str = "owner") -> RowConstraint:
    return grammars.follow(await grammars.open(owner, constraint), constraint, Stopping(), [])


def serves(grammars: Grammars, codec: TextCodec) -> None:
    """Another form is compiled and followed to its end."""
    row = asyncio.run(opened(grammars, PLAIN, owner=f"another {random.random()}"))
    for token in codec.encode_continuation("ab"):
        assert row.allowed(PATIENCE) is not None
        row.took(token)
    assert row.ended(PATIENCE) is True


def chain(count: int, name: str, first: str) -> str:
    return f"start: {first}0\n" + "".join(f"{name}{i}: {name}{i + 1}\n" for i in range(count)) + f'{name}{count}: "a"\n'


def references(count: int) -> str:
    chained = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(count)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**chained, f"d{count}": {"type": "string"}}})


DEEP = {
    "a chain of rules": (Form.LARK, chain(4500, "r", "r")),
    "a chain of terminals": (Form.LARK, chain(4500, "T", "T")),
    "items in items": (Form.JSON_SCHEMA, '{"type":"array","items":' * 1500 + "{}" + "}" * 1500),
    "alternatives in alternatives": (Form.JSON_SCHEMA, '{"anyOf":[' * 2000 + "{}" + "]}" * 2000),
    "brackets in brackets": (Form.REGEX, "(" * 30_000 + "a" + ")" * 30_000),
}
SLOW = {
    "a large divisor": (Form.JSON_SCHEMA, '{"type":"integer","multipleOf":9999991}'),
    "many that may be": (Form.REGEX, "a?" * 30_000),
    "many that repeat": (Form.REGEX, "(a*)*" * 10_000),
}


@pytest.mark.parametrize("name", [*DEEP, *SLOW])
def test_what_cannot_be_compiled_is_refused_by_its_field_and_the_next_form_is_served(
    grammars: Grammars, codec: TextCodec, name: str
) -> None:
    kind, text = {**DEEP, **SLOW}[name]
    with pytest.raises(InvalidField) as caught:
        asyncio.run(opened(grammars, Constraint(form=kind, text=text)))
    assert [violation.field for violation in caught.value.fields] == [f"constraint.{kind.value}"]
    serves(grammars, codec)


def test_a_long_chain_of_references_costs_nobody_else_anything(grammars: Grammars, codec: TextCodec) -> None:
    with contextlib.suppress(CallError):
        asyncio.run(opened(grammars, Constraint(form=Form.JSON_SCHEMA, text=references(700))))
    serves(grammars, codec)


@pytest.mark.parametrize("watch", [False, True])
def test_memory_beyond_the_limit_ends_the_form(codec: TextCodec, *, watch: bool) -> None:
    grammars = made(codec, form_seconds=30.0, form_bytes=24 * MIB, watch=watch)
    try:
        with pytest.raises(InvalidField, match="24 MiB"):
            asyncio.run(opened(grammars, Constraint(form=Form.REGEX, text="a?" * 30_000)))
        serves(grammars, codec)
    finally:
        grammars.close()


def test_no_owner_takes_every_place_and_a_cancelled_call_gives_its_own_back(codec: TextCodec) -> None:
    grammars = made(codec, form_seconds=1000.0)
    divisors = [f'{{"type":"integer","multipleOf":{9999991 - 2 * i}}}' for i in range(12)]
    slow = [Constraint(form=Form.JSON_SCHEMA, text=text) for text in divisors]

    async def crowd() -> None:
        calls = [asyncio.create_task(grammars.open("greedy", each)) for each in slow]
        await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE):
            await opened(grammars, PLAIN, owner="modest")
        assert not any(call.done() for call in calls)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        async with asyncio.timeout(PATIENCE):
            await opened(grammars, PLAIN, owner="greedy")

    try:
        asyncio.run(crowd())
        assert grammars._forms._root is not None
        root = grammars._forms._root._process.pid
        _until(lambda: len(descendants(root)) <= 2)  # the two plain forms: nothing computes for who has left
    finally:
        grammars.close()
    assert not Path(f"/proc/{root}").exists()


def test_closing_ends_at_once_what_compiles(codec: TextCodec) -> None:
    grammars = made(codec, form_seconds=1000.0)

    async def left() -> int:
        form, text = SLOW["a large divisor"]
        call = asyncio.create_task(opened(grammars, Constraint(form=form, text=text)))
        while grammars._forms._root is None or not descendants(grammars._forms._root._process.pid):  # noqa: ASYNC110 - processes tell nobody
            await asyncio.sleep(0.01)
        root = grammars._forms._root._process.pid
        children = descendants(root)
        grammars.close()
        _until(lambda: not any(_computes(pid) for pid in (root, *children)))
        with pytest.raises(InvalidField):
            await call
        return root

    asyncio.run(left())


def test_processes_that_are_killed_are_begun_anew(codec: TextCodec, grammars: Grammars) -> None:
    asyncio.run(opened(grammars, PLAIN))
    root = grammars._forms._root
    assert root is not None
    for pid in descendants(root._process.pid):
        os.kill(pid, signal.SIGKILL)
    row = asyncio.run(opened(grammars, PLAIN))
    assert row.allowed(PATIENCE) is not None
    os.kill(root._process.pid, signal.SIGKILL)
    root._process.wait()
    assert row.allowed(PATIENCE) is not None  # it has a process of its own
    serves(grammars, codec)
    assert grammars._forms._root is not root


@pytest.mark.parametrize("dies", ["at once", "behind the vocabulary"])
def test_a_root_that_dies_while_it_begins_is_an_unavailable_server(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dies: str
) -> None:
    reads = "import os" if dies == "at once" else "import os, time; time.sleep(0.3)"
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{reads}; os.kill(os.getpid(), 9)\n")
    python.chmod(0o700)
    grammars = made(codec)
    try:
        with monkeypatch.context() as broken:
            broken.setattr(sys, "executable", str(python))
            with pytest.raises(EngineDown, match="compiles the form"):
                asyncio.run(opened(grammars, PLAIN))
        serves(grammars, codec)
    finally:
        grammars.close()


def test_a_root_that_hangs_is_replaced(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = made(codec)
    try:
        asyncio.run(opened(grammars, PLAIN))
        root = grammars._forms._root
        assert root is not None
        os.kill(root._process.pid, signal.SIGSTOP)
        monkeypatch.setattr(forms, "START_SECONDS", 8.0)
        asyncio.run(opened(grammars, PLAIN, owner="another"))
        assert grammars._forms._root is not root
        assert not root.alive
    finally:
        grammars.close()


def test_no_more_files_is_no_room(codec: TextCodec) -> None:
    grammars = made(codec)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def play() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(QueueFull):
                await opened(grammars, PLAIN)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    try:
        asyncio.run(play())
        serves(grammars, codec)
    finally:
        grammars.close()


FULL = """\
import os

fork = os.fork


def fork_if_there_is_room():
    if os.path.exists({flag!r}):
        raise BlockingIOError
    return fork()


os.fork = fork_if_there_is_room
"""


def test_where_the_system_has_no_room_for_a_process_running_rows_go_on(
    codec: TextCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "full"
    (tmp_path / "sitecustomize.py").write_text(FULL.format(flag=str(flag)))
    monkeypatch.syspath_prepend(tmp_path)  # which the processes begin with
    grammars = made(codec)
    try:
        row = asyncio.run(opened(grammars, PLAIN))
        root = grammars._forms._root
        flag.touch()
        for form in (PLAIN, Constraint(form=Form.REGEX, text="ba?")):  # a compiled one's row, and one to compile
            with pytest.raises(QueueFull):
                asyncio.run(opened(grammars, form))
        flag.unlink()
        assert row.allowed(PATIENCE) is not None
        row.took(codec.encode_continuation("a")[0])
        assert row.ended(PATIENCE) is False
        serves(grammars, codec)
        assert grammars._forms._root is root
    finally:
        grammars.close()


def test_what_the_library_panics_with_shows_no_addresses(grammars: Grammars) -> None:
    lazy = Constraint(form=Form.LARK, text='start: x y\nx[lazy]: /.*/\ny: "b"')
    with pytest.raises(InvalidField) as caught:
        asyncio.run(opened(grammars, lazy))
    (violation,) = caught.value.fields
    assert "unknown" not in violation.text


def test_another_owners_compiled_form_is_not_found(grammars: Grammars) -> None:
    asyncio.run(opened(grammars, PLAIN, owner="one"))
    asyncio.run(opened(grammars, PLAIN, owner="two"))
    forms = [form for (owner, constraint), form in grammars._forms._kept.items() if constraint == PLAIN]
    assert len(forms) == len(set(map(id, forms))) >= 2


AMBIGUOUS = "\n".join(
    [
        "start: x",
        "x: " + " | ".join(f"x x{i}" for i in range(40)) + ' | "a"',
        *(f'x{i}: x x{(i + 1) % 40} | x | "a"' for i in range(40)),
    ]
)
"""Each mask takes longer than the one before, up to the library's own limit."""


def test_a_row_beyond_its_budget_ends_and_says_so(codec: TextCodec) -> None:
    grammars = made(codec, form_seconds=60.0, mask_seconds=0.002)
    try:
        row = asyncio.run(opened(grammars, Constraint(form=Form.LARK, text=AMBIGUOUS)))
        (letter,) = codec.encode_continuation("a")

        def follow() -> None:
            for _ in range(2000):
                assert row.allowed(PATIENCE) is not None
                row.took(letter)
                assert row.ended(PATIENCE) is False

        with pytest.raises(ConstraintFailed, match=r"0\.002 s"):
            follow()
    finally:
        grammars.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_grammars_leave_the_processes_alive(codec: TextCodec) -> None:
    rng = random.Random(int(os.environ.get("TESTS_SEED", "1")))
    grammars = made(codec, form_seconds=0.5, mask_seconds=0.5)
    followed: list[str] = []

    async def play(owner: str) -> None:
        row = await grammars.open(owner, _random_form(rng))
        for _ in range(8):
            answer = row.answer(PATIENCE)
            if answer is None or answer[0] is not Reply.MASK or not any(answer[1][1:]):
                break
            bits = int.from_bytes(answer[1][1:], "little")
            row.take(rng.choice([token for token in range(codec.vocab_size) if bits >> token & 1]))
            row.answer(PATIENCE)
        followed.append(owner)

    try:
        for number in range(150):
            with contextlib.suppress(CallError, Gone):  # most are refused, and a row may end
                asyncio.run(play(f"owner {number % 3}"))
        assert followed, "no form was good enough to be followed"
        serves(grammars, codec)
    finally:
        grammars.close()


def _random_form(rng: random.Random) -> Constraint:
    kind = rng.choice([Form.LARK, Form.REGEX, Form.JSON_SCHEMA])
    if kind is Form.REGEX:
        pieces = ["a", "b?", "(a*)*", "[^x]", "(", ")", "|", "{3,900}", ".*", "\\w+", "(?i)", "é", "\\p{L}", "^", "$"]
        return Constraint(form=kind, text="".join(rng.choices(pieces, k=rng.randint(1, 400))) or "a")
    if kind is Form.LARK:
        names = [rng.choice("xyzTUV") + str(i) for i in range(rng.randint(1, 60))]
        atoms = [*names, '"a"', "/[a-z]+/", "/a*/", "%json{}", "(", ")", "|", "*", "+", "?", "~ 3..9", '""']
        rules = [f"{name}: {' '.join(rng.choices(atoms, k=rng.randint(1, 12)))}" for name in names]
        return Constraint(form=kind, text="\n".join([f"start: {rng.choice(names)}", *rules]))

    def schema(depth: int) -> object:
        words: dict[str, object] = {}
        known = ["type", "items", "properties", "anyOf", "allOf", "$ref", "pattern", "multipleOf", "enum"]
        for word in rng.sample(known, 2):
            words[word] = {
                "type": rng.choice(["object", "array", "string", "integer", "number"]),
                "items": schema(depth - 1) if depth else True,
                "properties": {name: schema(depth - 1) if depth else {} for name in rng.sample("abcd", 2)},
                "anyOf": [schema(depth - 1) if depth else {} for _ in range(2)],
                "allOf": [schema(depth - 1) if depth else {} for _ in range(2)],
                "$ref": rng.choice(["#", "#/properties/a", "#/items"]),
                "pattern": "(a*)*" * rng.randint(1, 50),
                "multipleOf": rng.choice([3, 0.01, 99991]),
                "enum": ["a", {"b": 1}],
            }[word]
        return words

    return Constraint(form=kind, text=json.dumps(schema(rng.randint(0, 5))))


def descendants(pid: int) -> list[int]:
    """Running ones, in the group of the root."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if fields[0] != "Z" and int(fields[2]) == pid and int(stat.parent.name) != pid:
                found.append(int(stat.parent.name))
    return found


def _computes(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)
