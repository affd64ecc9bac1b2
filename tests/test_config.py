"""Settings: where they come from, what is refused, and that a refusal says which one and why."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from pathlib import Path

import pytest

from kvcache.checkpoints import CheckpointPolicy
from service import options
from service.config import Config, ConfigError
from service.config_values import GIB, MIB, parse_seconds, parse_size, split_address, split_page_address
from service.options import add_arguments, from_args


def configured(*argv: str, **environ: str) -> Config:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_args(parser.parse_args(argv), environ)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1048576", MIB),
        ("512MiB", 512 * MIB),
        ("2GiB", 2 * GIB),
        ("2 gib", 2 * GIB),
        ("1.5Gi", 3 * GIB // 2),
        ("2GB", 2_000_000_000),
        ("64k", 64_000),
        ("1TiB", 1024 * GIB),
        ("10b", 10),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30), ("30s", 30), ("250ms", 0.25), ("1.5h", 5400), ("10m", 600), ("7d", 604800)]
)
def test_times(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "x", "-1", "1e9", "GiB", "2PiB", "1 2", "nan", "inf"])
def test_what_is_no_size_and_no_time(text):
    with pytest.raises(ValueError, match="must be a size"):
        parse_size(text)
    with pytest.raises(ValueError, match="must be a time"):
        parse_seconds(text)


def test_a_flag_beats_the_variable_and_the_variable_the_default():
    assert configured().max_batch == Config().max_batch
    assert configured(KVFORK_MAX_BATCH="3").max_batch == 3
    assert configured("--max-batch", "5", KVFORK_MAX_BATCH="3").max_batch == 5
    assert configured(KVFORK_MAX_BATCH="").max_batch == Config().max_batch


def test_every_setting_has_a_flag_and_a_variable_that_reach_it():
    texts = {
        "address": "[::1]:7",
        "unix_socket": "/run/k.sock",
        "tls_cert": "/etc/k/cert.pem",
        "tls_key": "/etc/k/key.pem",
        "tls_client_ca": "/etc/k/ca.pem",
        "tokens": "/etc/k/tokens",
        "token_command": "",
        "token_refresh": "19s",
        "admins": "ops, spiffe://here/admin",
        "reflection": "0",
        "max_connections": "20",
        "max_owner_calls": "21",
        "max_owner_running": "22",
        "request_seconds": "23s",
        "share_prefixes": "on",
        "model": "gemma3",
        "instance": "kvfork-0",
        "max_images": "24",
        "max_image_bytes": "25MiB",
        "max_image_pixels": "2097152",
        "image_bytes": "26MiB",
        "max_watches": "27",
        "max_batch": "3",
        "max_queue": "4",
        "max_request_bytes": "5MiB",
        "max_text_bytes": "32MiB",
        "form_seconds": "29s",
        "form_bytes": "30MiB",
        "mask_seconds": "31s",
        "max_fork_branches": "6",
        "max_snapshots": "7",
        "max_pinned": "8",
        "max_pinned_bytes": "28MiB",
        "default_ttl": "9s",
        "max_ttl": "10m",
        "default_max_tokens": "11",
        "active_bytes": "17MiB",
        "memory_bytes": "12MiB",
        "disk_bytes": "13MiB",
        "scratch_dir": "/var/tmp/k",
        "store_dir": "/var/lib/k",
        "key_file": "/etc/k.key",
        "key_command": "",
        "carry_over": "1",
        "exchange_key": "/etc/k/exchange.key",
        "checkpoints": "Marks",
        "state_spacing": "2",
        "daily_write_bytes": "17MiB",
        "snapshot_wait": "18s",
        "prefill_budget": "14",
        "share_decoded": "yes",
        "drain_seconds": "15s",
        "write_stall_seconds": "16s",
        "watchdog_seconds": "17s",
        "engine_restarts": "18",
        "metrics": ":9464",
        "inspector": "[::1]:8080",
        "traces": "OTLP",
        "log_level": "debug",
        "log_format": "json",
    }
    assert set(texts) == {field.name for field in fields(Config)} == {option.name for option in options.OPTIONS}
    by_variable = configured(**{f"KVFORK_{name.upper()}": text for name, text in texts.items()})
    flags = [part for name, text in texts.items() for part in ("--" + name.replace("_", "-"), text)]
    assert configured(*flags) == by_variable
    assert by_variable == Config(
        address="[::1]:7",
        unix_socket=Path("/run/k.sock"),
        tls_cert=Path("/etc/k/cert.pem"),
        tls_key=Path("/etc/k/key.pem"),
        tls_client_ca=Path("/etc/k/ca.pem"),
        tokens=Path("/etc/k/tokens"),
        token_refresh=19.0,
        admins=("ops", "spiffe://here/admin"),
        reflection=False,
        max_connections=20,
        max_owner_calls=21,
        max_owner_running=22,
        request_seconds=23.0,
        share_prefixes=True,
        model="gemma3",
        instance="kvfork-0",
        max_images=24,
        max_image_bytes=25 * MIB,
        max_image_pixels=2097152,
        image_bytes=26 * MIB,
        max_watches=27,
        max_batch=3,
        max_queue=4,
        max_request_bytes=5 * MIB,
        max_text_bytes=32 * MIB,
        form_seconds=29.0,
        form_bytes=30 * MIB,
        mask_seconds=31.0,
        max_fork_branches=6,
        max_snapshots=7,
        max_pinned=8,
        max_pinned_bytes=28 * MIB,
        default_ttl=9.0,
        max_ttl=600.0,
        default_max_tokens=11,
        active_bytes=17 * MIB,
        memory_bytes=12 * MIB,
        disk_bytes=13 * MIB,
        scratch_dir=Path("/var/tmp/k"),
        store_dir=Path("/var/lib/k"),
        key_file=Path("/etc/k.key"),
        carry_over=True,
        exchange_key=Path("/etc/k/exchange.key"),
        checkpoints=CheckpointPolicy.MARKS,
        state_spacing=2,
        daily_write_bytes=17 * MIB,
        snapshot_wait=18.0,
        prefill_budget=14,
        share_decoded=True,
        drain_seconds=15.0,
        write_stall_seconds=16.0,
        watchdog_seconds=17.0,
        engine_restarts=18,
        metrics=":9464",
        inspector="[::1]:8080",
        traces="otlp",
        log_level="debug",
        log_format="json",
    )


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        (":9464", ("127.0.0.1", 9464)),
        ("localhost:0", ("127.0.0.1", 0)),
        ("[::1]:9464", ("::1", 9464)),
        ("0.0.0.0:9464", ("0.0.0.0", 9464)),
    ],
)
def test_metrics_are_on_loopback_unless_a_host_is_named(address: str, parts: tuple[str, int]):
    assert split_page_address("metrics", address) == parts


@pytest.mark.parametrize("address", ["9464", "example.org:9464", ":port", ":70000", "[::1]"])
def test_a_metrics_address_that_is_none_is_refused(address: str):
    with pytest.raises(ConfigError, match="metrics: "):
        configured("--metrics", address)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--inspector", "0.0.0.0:80"), "inspector: .*is not loopback"),
        (("--inspector", "kvfork.example.org:80"), "inspector: must be a loopback address, localhost or another IP"),
        (("--inspector", "8080"), "inspector: must look like"),
        (("--inspector", "0.0.0.0:80", "--tls-cert", "c", "--tls-key", "k"), "inspector: .*whoever reaches it"),
        (
            ("--inspector", ":80", "--tls-cert", "c", "--tls-key", "k", "--tls-client-ca", "a"),
            "inspector: a page cannot show a certificate",
        ),
    ],
)
def test_an_inspector_is_where_calls_of_the_address_could_be(flags: tuple[str, ...], says: str):
    with pytest.raises(ConfigError, match=says):
        configured(*flags)
    secured = ("--tls-cert", "c", "--tls-key", "k", "--tokens", "t")
    assert configured("--inspector", "0.0.0.0:443", *secured).inspector == "0.0.0.0:443"
    assert configured("--inspector", "0.0.0.0:443", "--address", "unix:/run/k", *secured).tls_cert == Path("c")


def test_a_bare_switch_switches_on():
    assert configured("--share-decoded").share_decoded
    assert not configured("--share-decoded", "0", KVFORK_SHARE_DECODED="1").share_decoded


def test_an_unknown_variable_is_refused_with_the_one_that_was_meant():
    with pytest.raises(ConfigError, match="KVFORK_MAX_BACTH: no such setting; did you mean KVFORK_MAX_BATCH"):
        configured(KVFORK_MAX_BACTH="3")
    # Those of other commands, and of other programs, are none of the server's business.
    configured(KVFORK_CACHE_DIR="/x", KVFORK_ACCEPT_GEMMA_TERMS="1", OTHER_MAX_BACTH="3")


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("KVFORK_MAX_BATCH", "many", "whole number"),
        ("KVFORK_MAX_BATCH", "-1", "whole number"),
        ("KVFORK_MEMORY_BYTES", "lots", "must be a size"),
        ("KVFORK_DEFAULT_TTL", "soon", "must be a time"),
        ("KVFORK_SHARE_DECODED", "maybe", "must be 1 or 0"),
        ("KVFORK_LOG_LEVEL", "loud", "must be one of debug"),
    ],
)
def test_a_bad_variable_is_named(variable, value, says):
    with pytest.raises(ConfigError, match=f"^{variable}: .*{says}"):
        configured(**{variable: value})


def test_a_bad_flag_ends_with_usage(capsys):
    with pytest.raises(SystemExit) as caught:
        configured("--memory-bytes", "lots")
    assert caught.value.code == 2
    assert "must be a size such as" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "split"),
    [
        ("127.0.0.1:50051", ("127.0.0.1", 50051)),
        ("127.8.9.1:0", ("127.8.9.1", 0)),
        ("localhost:80", ("127.0.0.1", 80)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_loopback_addresses(address, split):
    assert split_address(address) == split
    assert configured("--address", address).address == address


REACHABLE = ["0.0.0.0:50051", "[::]:50051", "192.168.1.5:50051", "10.0.0.1:1", "[fe80::1]:1"]
TLS = {"tls_cert": Path("c"), "tls_key": Path("k")}


@pytest.mark.parametrize("name", ["a", "kvfork-0", "Kvfork_0.west", "9" * 63])
def test_instances_that_a_header_and_a_route_can_name(name):
    assert configured("--instance", name).instance == name


@pytest.mark.parametrize("name", ["_a", ".a", "a b", "a,b", "a:1", "ä", "a\n", "9" * 64])
def test_instances_that_they_cannot(name):
    with pytest.raises(ConfigError, match=r"^instance: must be 1 to 63 ASCII letters"):
        configured("--instance", name)


@pytest.mark.parametrize("address", [*REACHABLE, "example.org:50051", ":50051"])
def test_an_address_that_others_can_reach_is_refused_in_the_clear(address):
    with pytest.raises(ConfigError, match=r"^address: .*loopback"):
        configured("--address", address)
    with pytest.raises(ConfigError, match="loopback"):
        Config(address=address, tokens=Path("t"))  # there is no way around it in code either, nor with tokens alone


@pytest.mark.parametrize("address", REACHABLE)
def test_an_address_that_others_can_reach_takes_tls_and_callers_who_say_who_they_are(address):
    with pytest.raises(ConfigError, match=r"^address: .*whoever reaches it"):
        Config(address=address, **TLS)
    for shown in ({"tokens": Path("t")}, {"token_command": "cat t"}, {"tls_client_ca": Path("a")}):
        assert Config(address=address, **TLS, **shown).authenticates
    with pytest.raises(ConfigError, match="must be a loopback address, localhost or another IP address"):
        Config(address="example.org:50051", **TLS, tokens=Path("t"))  # a name may come to mean another interface


def test_reflection_is_on_where_only_this_machine_can_ask():
    assert Config().reflects and Config(address="", unix_socket=Path("s")).reflects
    wide = Config(address="0.0.0.0:1", **TLS, tokens=Path("t"))
    assert not wide.reflects
    assert Config(address="0.0.0.0:1", **TLS, tokens=Path("t"), reflection=True).reflects
    assert not Config(reflection=False).reflects


def test_an_owner_leaves_room_for_others_where_there_are_others():
    assert Config(max_batch=8).owner_running == 0
    assert Config(max_batch=8, tokens=Path("t")).owner_running == 6
    assert Config(max_batch=1, tokens=Path("t")).owner_running == 1
    assert Config(max_batch=8, tokens=Path("t"), max_owner_running=0).owner_running == 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tls_cert": Path("c")}, "tls_cert: .*go together"),
        ({"tls_key": Path("k")}, "tls_cert: .*go together"),
        ({"tls_client_ca": Path("a")}, "tls_client_ca: is of no use"),
        ({**TLS, "address": "", "unix_socket": Path("s")}, "tls_cert: is of no use"),
        ({"tokens": Path("t"), "token_command": "cat t"}, "tokens: give either"),
        ({"admins": ("ops",)}, "admins: without authentication"),
        ({"share_prefixes": True}, "share_prefixes: without authentication"),
        ({**TLS, "tls_client_ca": Path("a"), "unix_socket": Path("s")}, "unix_socket: .*no certificate"),
        ({"max_connections": 0}, "max_connections: must be at least 1"),
        ({"request_seconds": 0.0}, "request_seconds: must be above 0"),
    ],
)
def test_access_settings_that_contradict_each_other_are_refused(settings, says):
    with pytest.raises(ConfigError, match=f"^{says}"):
        Config(**settings)


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:-1", "::1"]
)
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match=r"^address: "):
        configured("--address", address)


def test_a_unix_socket_alone():
    for argv in (["--address", "none", "--unix-socket", "/run/k.sock"], ["--address", "unix:/run/k.sock"]):
        config = configured(*argv)
        assert (config.address, config.unix_socket) == ("", Path("/run/k.sock"))
    with pytest.raises(ConfigError, match="nowhere to listen"):
        configured("--address", "none")
    with pytest.raises(ConfigError, match="at most 103 bytes"):
        configured("--unix-socket", "/" + "x" * 103)


@pytest.mark.parametrize(
    "setting",
    [
        {"max_batch": 0},
        {"max_request_bytes": 0},
        {"max_fork_branches": 0},
        {"max_snapshots": 0},
        {"default_max_tokens": 0},
        {"prefill_budget": 0},
        {"max_queue": -1},
        {"max_pinned": -1},
        {"max_pinned_bytes": -1},
        {"memory_bytes": -1},
        {"disk_bytes": -1},
        {"drain_seconds": -1.0},
        {"write_stall_seconds": 0.0},
        {"state_spacing": 1},
        {"daily_write_bytes": -1},
        {"snapshot_wait": -1.0},
        {"checkpoints": CheckpointPolicy.OFF, "store_dir": Path("s")},
        {"default_ttl": 0.0},
        {"default_ttl": 100.0, "max_ttl": 99.0},
        {"model": ""},
        {"key_file": Path("k")},
        {"key_command": "k"},
        {"carry_over": True},
        {"key_file": Path("k"), "key_command": "k", "store_dir": Path("s")},
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        Config(**setting)


def test_budgets_come_from_the_machine_unless_given(tmp_path: Path):
    config = configured("--store-dir", str(tmp_path / "not" / "there" / "yet"))
    quarter = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    assert config.memory_bytes == quarter - quarter % MIB
    assert 0 < config.disk_bytes <= 64 * GIB
    assert configured("--memory-bytes", "1GiB", "--disk-bytes", "0").memory_bytes == GIB
    assert configured().scratch_dir.is_dir()


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0MiB"),
        (64 * MIB, "64MiB"),
        (4 * GIB, "4096MiB"),
        (6_319_128_576, "6026.390625MiB"),
        (1, "0.00000095367431640625MiB"),
        (2**50 + 1, "1073741824.00000095367431640625MiB"),
    ],
)
def test_sizes_are_shown_in_one_form_which_tells_every_byte(size: int, text: str) -> None:
    assert options.shown("memory_bytes", size) == text
    assert options.parse_size(text) == size


def test_help_tells_every_flag_variable_and_default(capsys):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for option in options.OPTIONS:
        assert f"{option.flag} " in text
        assert f"[{option.variable}]" in text
    assert text.count("(default:") == len(options.OPTIONS)
    assert "(default: 64MiB)" in text
    assert "(default: 3600s)" in text


def test_where_nothing_is_written_the_disk_has_no_room():
    assert Config(checkpoints=CheckpointPolicy.OFF, disk_bytes=GIB).disk_budget == 0
    assert Config(checkpoints=CheckpointPolicy.MARKS, disk_bytes=GIB).disk_budget == GIB
