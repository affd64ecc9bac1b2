"""Tokens: what a file may hold, what is found in it, and that no refusal repeats what stood there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from service.auth.authenticator import Authenticator
from service.auth.callers import LOCAL, Caller
from service.auth.source import TokenSource
from service.auth.tokens import TokensUnusable, TokenTable, new_token, parse_tokens
from service.errors import Unauthenticated


def bearer(token: str) -> list[tuple[str, str | bytes]]:
    return [("authorization", f"Bearer {token}")]


def test_a_token_is_found_by_itself_alone():
    token, line = new_token("alice")
    other, second = new_token("alice")
    admin, third = new_token("ops", admin=True)
    text = f"# who\n\n{line}  # laptop\n{second}\n  {third}\r\n"
    assert token not in text
    table = parse_tokens(text, "it")
    assert len(table) == 3
    found = [table.find(each) for each in (token, other, admin)]
    assert found == [Caller("alice"), Caller("alice"), Caller("ops", admin=True)]
    for wrong in ("", token[:-1], token + "x", token.upper(), str(line), line.digest.hex()):
        assert table.find(wrong) is None


@pytest.mark.parametrize("end", ["\x85", "\f", "\v", "\u2028", "\u2029", "\x1c", "\x1d", "\x1e", "\r"])
def test_a_comment_ends_with_its_line_and_nowhere_else(end: str):
    (token, line), (_, other) = new_token("alice"), new_token("bob")
    table = parse_tokens(f"{other}\n# was: {end}{line}\n", "it")
    assert len(table) == 1 and table.find(token) is None


def test_tokens_differ_and_are_long_enough_for_a_plain_hash():
    made = {new_token("a")[0] for _ in range(100)}
    assert len(made) == 100
    assert all(len(token.removeprefix("kvf_")) == 43 for token in made)  # 256 bits


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "there is no token in it"),
        ("# nobody\n", "there is no token in it"),
        ("alice kvf_SECRETSECRET\n", "line 1: .*not a token"),
        ("\nalice\n", "line 2: must be an owner"),
        ("alice sha256:SECRET\n", "line 1: the second word"),
        (f"alice sha256:{'a' * 64} root\n", 'line 1: .*at most the word "admin"'),
        (f"alice sha256:{'a' * 64} admin twice\n", "line 1"),
        (f"-alice sha256:{'a' * 64}\n", "line 1: an owner's name"),
        (f"a\x00SECRET sha256:{'a' * 64}\n", "line 1: an owner's name"),
        (f"alice sha256:{'a' * 64}\nbob sha256:{'a' * 64}\n", "one token stands there for alice and bob"),
        (f"alice sha256:{'a' * 64}\nalice sha256:{'A' * 64} admin\n", "one token stands there for"),
    ],
)
def test_a_table_that_cannot_be_meant_is_refused_without_its_words(text: str, says: str):
    with pytest.raises(TokensUnusable, match=says) as caught:
        parse_tokens(text, "it")
    assert "SECRET" not in str(caught.value)


def test_a_caller_is_who_its_token_says_and_nobody_without():
    token, line = new_token("alice")
    door = Authenticator(tokens=TokenTable([line]), admins=frozenset({"alice"}))
    assert door.by_metadata(bearer(token)) == Caller("alice", admin=True)
    assert door.by_metadata([("authorization", f"bearer  {token} ")]) == Caller("alice", admin=True)
    refused: dict[str, list[list[tuple[str, str | bytes]]]] = {
        "TOKEN_MISSING": [[], [("x-token", token)], [("authorization-bin", token.encode())]],
        "TOKEN_UNKNOWN": [
            bearer("kvf_other"),
            bearer(""),
            [("authorization", token)],
            [("authorization", f"Basic {token}")],
            [("authorization", f"Bearer {token}".encode())],
            bearer("x" * 100_000),
            [*bearer(token), *bearer(token)],  # which one counts would depend on who reads it
        ],
    }
    for reason, attempts in refused.items():
        for metadata in attempts:
            with pytest.raises(Unauthenticated) as caught:
                door.by_metadata(metadata)
            assert caught.value.reason == reason
            assert token not in str(caught.value)


def test_certificates_count_where_there_is_no_token():
    token, line = new_token("alice")
    both = Authenticator(tokens=TokenTable([line]), certificates=True, admins=frozenset({"spiffe://here/ops"}))
    assert both.by_metadata([]) is None  # the certificate is to tell
    assert both.by_metadata(bearer(token)) == Caller("alice")
    with pytest.raises(Unauthenticated):  # a good certificate does not make a bad token good
        both.by_metadata(bearer("kvf_other"))
    named = both.by_certificate({"x509_common_name": [b"ignored"], "x509_subject_alternative_name": [b"web-1"]})
    assert named == Caller("web-1")
    ops = both.by_certificate({"x509_subject_alternative_name": [b"spiffe://here/ops"]})
    assert ops == Caller("spiffe://here/ops", admin=True)
    assert both.by_certificate({"x509_common_name": [b"bob"]}) == Caller("bob")
    for peer in (
        {},
        {"x509_common_name": []},
        {"x509_subject_alternative_name": [b"a", b"b"], "x509_common_name": [b"a"]},
        {"x509_common_name": [b"two words"]},
        {"x509_common_name": [b"\xff"]},
        {"x509_common_name": [b"*"]},
    ):
        with pytest.raises(Unauthenticated) as caught:
            both.by_certificate(peer)
        assert caught.value.reason == "CERTIFICATE_UNUSABLE"


def test_without_authentication_everybody_is_local():
    assert Authenticator().by_metadata(bearer("anything")) == LOCAL


def test_a_file_is_due_when_it_changes_and_is_refused_if_others_may_write_it(tmp_path: Path):
    first, second = new_token("a")[1], new_token("b")[1]
    path = tmp_path / "tokens"
    path.write_text(f"{first}\n")
    source = TokenSource(path)
    assert source.due()
    assert len(source.read()) == 1
    assert not source.due()
    path.write_text(f"{first}\n{second}\n")
    assert source.due()
    assert len(source.read()) == 2
    path.unlink()
    assert source.due()
    with pytest.raises(TokensUnusable, match="cannot be read: No such file"):
        source.read()
    assert not source.due()  # said once, not every second
    path.write_text(f"{first}\n")
    os.chmod(path, 0o620)
    with pytest.raises(TokensUnusable, match="can be changed by others"):
        source.read()
    path.chmod(0o600)
    path.write_bytes(b"\xff\n")
    with pytest.raises(TokensUnusable, match="no UTF-8"):
        source.read()


def test_a_pipe_or_device_in_the_files_place_is_refused_and_not_waited_for(tmp_path: Path):
    path = tmp_path / "tokens"
    path.write_text(f"{new_token('alice')[1]}\n")
    path.chmod(0o600)
    source = TokenSource(file=path)
    assert len(source.read()) == 1
    path.unlink()
    os.mkfifo(path, 0o600)  # opened like a file, it would wait for somebody who writes, for ever
    assert source.due()
    with pytest.raises(TokensUnusable, match="cannot be read: it is no regular file"):
        source.read()
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(TokensUnusable, match="it is no regular file"):
        source.read()


def test_a_command_prints_the_table_and_what_it_says_stays_unsaid(tmp_path: Path):
    line = new_token("a")[1]
    script = tmp_path / "tokens.py"
    script.write_text(f"print('{line}')\n")
    source = TokenSource(command=f"{sys.executable} {script} 'a secret argument'", every=0.0)
    assert source.due()
    assert len(source.read()) == 1
    assert source.due()
    script.write_text("print('alice kvf_SECRET'); raise SystemExit(3)\n")
    for command in (source.command, "/no/such/program SECRET", "unbalanced 'SECRET"):
        with pytest.raises(TokensUnusable, match="the token command failed") as caught:
            TokenSource(command=command).read()
        assert "SECRET" not in str(caught.value)
        assert "secret" not in str(caught.value)
