"""The settings file and what shows it: order of sources, refusals that name the key, and no secret on a screen."""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

import pytest

from service.cli import main
from service.cli.config import commented_defaults
from service.config import ConfigError
from service.options import OPTIONS, Given, add_arguments, configured, gather


def given(*argv: str, **environ: str) -> dict[str, Given]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return gather(parser.parse_args(argv), environ)


def test_a_flag_beats_a_variable_beats_the_file_beats_the_default(tmp_path: Path):
    file = tmp_path / "kvfork.toml"
    file.write_text("max-batch = 3\nmax-queue = 4\ndefault-ttl = '5m'\n")
    found = given("--config", str(file), "--max-batch", "1", KVFORK_MAX_BATCH="2", KVFORK_MAX_QUEUE="5")
    assert found["max_batch"] == Given(1, "--max-batch")
    assert found["max_queue"] == Given(5, "KVFORK_MAX_QUEUE")
    assert found["default_ttl"] == Given(300.0, str(file))
    assert found["max_snapshots"] == Given(10_000, "default")
    assert found["memory_bytes"].source == "default for this machine"
    assert configured(found).max_batch == 1
    assert given(KVFORK_CONFIG=str(file))["max_batch"] == Given(3, str(file))


def test_every_value_is_taken_as_its_flag_takes_it(tmp_path: Path):
    file = tmp_path / "kvfork.toml"
    file.write_text(
        """
        address = "unix:/run/k.sock"
        tokens = "/etc/k/tokens"
        admins = ["ops", "spiffe://here/admin"]
        memory-bytes = "2GiB"
        disk-bytes = 1048576
        max-ttl = 86400
        snapshot-wait = 2.5
        share-decoded = true
        reflection = false
        """
    )
    config = configured(given("--config", str(file)))
    assert (config.address, config.unix_socket, config.tokens) == ("", Path("/run/k.sock"), Path("/etc/k/tokens"))
    assert config.admins == ("ops", "spiffe://here/admin")
    assert (config.memory_bytes, config.disk_bytes) == (2 << 30, 1 << 20)
    assert (config.max_ttl, config.snapshot_wait) == (86400.0, 2.5)
    assert (config.share_decoded, config.reflection) == (True, False)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max-bach = 3", "max-bach: no such setting; did you mean max-batch?"),
        ("max_batch = 3", "max_batch: no such setting; did you mean max-batch?"),
        ("zzz = 1", "zzz: no such setting$"),
        ("config = 'other.toml'", "config: no such setting"),
        ("[serve]\nmax-batch = 3", "serve: no such setting"),
        ("[max-batch]\nn = 3", "max-batch: must be a string, a number"),
        ("max-batch = 'many'", "max-batch: must be a whole number"),
        ("max-batch = 2.5", "max-batch: must be a whole number"),
        ("max-batch = -1", "max-batch: must be a whole number"),
        ("share-decoded = 'perhaps'", "share-decoded: must be 1 or 0"),
        ("admins = [1]", "admins: must be a string, a number"),
        ("max-batch = ", "is no TOML file"),
    ],
)
def test_what_a_file_cannot_mean_is_refused_by_name(tmp_path: Path, text: str, says: str):
    file = tmp_path / "kvfork.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        given("--config", str(file))
    assert str(file) in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config: .*none\.toml cannot be read: No such file"):
        given("--config", str(tmp_path / "none.toml"))


def test_the_commented_defaults_are_the_defaults(tmp_path: Path):
    text = commented_defaults()
    assert tomllib.loads(text) == {}
    keys = {option.key for option in OPTIONS}
    set_ones = "\n".join(
        line[1:] for line in text.splitlines() if line[1:].partition(" =")[0] in keys and not line.endswith('""')
    )
    file = tmp_path / "kvfork.toml"
    file.write_text(set_ones)
    assert len(tomllib.loads(set_ones)) > 20
    # Sizes of this machine move between two looks; all else is the same.
    moving = {"disk_bytes"}
    again, plain = given("--config", str(file)), given()
    assert {k: v.value for k, v in again.items() if k not in moving} == {
        k: v.value for k, v in plain.items() if k not in moving
    }


def test_config_show_prints_a_file_with_every_source_and_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "kvfork.toml"
    file.write_text("max-batch = 3\nkey-command = 'print-key --password SECRET'\nstore-dir = '/k'\n")
    monkeypatch.setenv("KVFORK_TOKEN_COMMAND", "print-tokens SECRET")
    assert main(["config", "show", "--config", str(file), "--max-queue", "7", "--unix-socket", "/s"]) == 0
    shown = capsys.readouterr().out
    assert "SECRET" not in shown
    lines = {line.partition(" =")[0].lstrip("#"): line for line in shown.splitlines()}
    assert set(lines) == {option.key for option in OPTIONS}
    sizes = [line.split(" # ")[0].strip() for name, line in lines.items() if name.endswith("bytes")]
    assert len(sizes) >= 7
    assert all(re.fullmatch(r'(\S+ = "\d+(\.\d+)?MiB"|#\S+ = "")', size) for size in sizes), sizes
    assert lines["max-batch"].split() == ["max-batch", "=", "3", "#", str(file)]
    assert lines["max-queue"].split() == ["max-queue", "=", "7", "#", "--max-queue"]
    assert lines["token-command"].split() == ["#token-command", "=", '"***"', "#", "KVFORK_TOKEN_COMMAND"]
    assert lines["key-command"].split()[:3] == ["#key-command", "=", '"***"']
    again = tmp_path / "again.toml"
    again.write_text(shown)
    monkeypatch.delenv("KVFORK_TOKEN_COMMAND")
    assert configured(given("--config", str(again), "--token-command", "x")).max_queue == 7


def test_config_show_says_what_serve_would_say(capsys: pytest.CaptureFixture[str]):
    assert main(["config", "show", "--address", "0.0.0.0:1"]) == 2
    assert "is not loopback" in capsys.readouterr().err


def test_token_new_prints_the_token_once_and_keeps_its_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from service.auth.callers import Caller
    from service.auth.source import TokenSource
    from service.auth.tokens import parse_tokens

    assert main(["token", "new", "alice"]) == 0
    out, err = capsys.readouterr()
    token = out.strip()
    assert token not in err
    assert parse_tokens(err.splitlines()[-1], "it").find(token) == Caller("alice")
    file = tmp_path / "tokens"
    made = []
    for args in (["alice"], ["bob"], ["ops", "--admin"]):
        assert main(["token", "new", *args, "--to", str(file)]) == 0
        made.append(capsys.readouterr().out.strip())
        file.write_text(file.read_text().rstrip("\n"))  # as an editor may leave it
    assert file.stat().st_mode & 0o777 == 0o600
    table = TokenSource(file).read()
    assert [table.find(token) for token in made] == [Caller("alice"), Caller("bob"), Caller("ops", admin=True)]
    assert not any(token in file.read_text() for token in made)
    assert main(["token", "new", "two words"]) == 2
    assert main(["token", "new", "alice", "--to", str(tmp_path / "no" / "file")]) == 1
