"""What is shipped to run kvfork under something else parses, and starts it with flags that there are."""

from __future__ import annotations

import argparse
import configparser
import json
import plistlib
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from service.config import Config
from service.options import add_arguments, from_args, refuse_unknown_variables

ROOT = Path(__file__).parents[1]
UNITS = ROOT / "docs" / "units"


def config_of(words: list[str]) -> Config:
    """The configuration that a command line gives; it must be `kvfork serve …`."""
    assert Path(words[0]).name == "kvfork" and words[1] == "serve", words
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    return from_args(parser.parse_args(words[2:]), {})


def unit() -> configparser.ConfigParser:
    found = configparser.ConfigParser(interpolation=None, strict=False)
    found.optionxform = str  # type: ignore[assignment,method-assign]  # systemd's keys have case
    found.read(UNITS / "kvfork.service")
    return found


def containerfile() -> dict[str, str]:
    """The last of each instruction."""
    text = re.sub(r"\\\n\s*", "", (UNITS / "Containerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return dict(line.split(" ", 1) for line in lines)


def stop_seconds(value: str) -> float:
    return float(value.removesuffix("s"))


def test_the_systemd_unit_starts_a_server_and_lets_it_drain() -> None:
    service = unit()["Service"]
    config = config_of(shlex.split(service["ExecStart"]))
    assert str(config.unix_socket) == f"/run/{service['RuntimeDirectory']}/socket"
    assert str(config.store_dir) == f"/var/lib/{service['StateDirectory']}"
    assert service["KillSignal"] == "SIGTERM"
    assert stop_seconds(service["TimeoutStopSec"]) > config.drain_seconds + 10
    refuse_unknown_variables(dict([service["Environment"].split("=", 1)]))


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("there is no systemd-analyze here")
    text = (UNITS / "kvfork.service").read_text()
    # The program is not installed at that place here, and the user is not there.
    text = text.replace("/opt/kvfork/bin/kvfork", "/bin/true").replace("User=kvfork", "User=root")
    copy = tmp_path / "kvfork.service"
    copy.write_text(text.replace("Group=kvfork", "Group=root"))
    done = subprocess.run([analyze, "verify", "--man=no", str(copy)], capture_output=True, text=True)
    about = [line for line in done.stderr.splitlines() if "kvfork.service" in line]
    assert about == [], done.stderr


def test_the_launchd_agent_starts_a_server_and_lets_it_drain() -> None:
    agent = plistlib.loads((UNITS / "kvfork.plist").read_bytes())
    config = config_of(agent["ProgramArguments"])
    assert config.store_dir is not None
    assert agent["ExitTimeOut"] > config.drain_seconds + 10
    assert agent["Umask"] == 0o077
    refuse_unknown_variables(agent["EnvironmentVariables"])


def test_the_container_starts_a_server_and_is_asked_for_its_health_where_it_listens() -> None:
    found = containerfile()
    config = config_of([*json.loads(found["ENTRYPOINT"]), *json.loads(found["CMD"])])
    assert config.address == "" and str(config.unix_socket) == "/run/kvfork/socket"
    assert found["STOPSIGNAL"] == "SIGTERM" and found["USER"] != "root"
    probe = json.loads(found["HEALTHCHECK"].partition("CMD ")[2])
    assert probe == ["kvfork", "health", "--live", "--address", f"unix:{config.unix_socket}"]
    for source in re.findall(r"^COPY (.+) \S+$", (UNITS / "Containerfile").read_text(), re.MULTILINE):
        assert all((ROOT / name).exists() for name in source.split()), source
    refuse_unknown_variables(dict([found["ENV"].split("=", 1)]))


def test_extras_that_the_container_installs_are_there() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.findall(r"\.\[([a-z,]+)\]", (UNITS / "Containerfile").read_text())
    assert asked and {name for names in asked for name in names.split(",")} <= set(extras)
