"""`kvfork config show`: what a server would run with, and where each value comes from."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap

_EPILOG = """\
examples:
  kvfork config show                                   what `kvfork serve` would run with here, and why
  kvfork config show --config kvfork.toml --max-batch 4
  kvfork config show --default > kvfork.toml           every setting with its meaning, to begin from

A flag beats its variable, the variable the file, the file the default. What is printed is a settings file.
"""

_WIDTH = 100


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command and its verb, which takes every flag of `serve`."""
    from service.options import add_arguments

    parser = subparsers.add_parser(
        "config",
        help="show the settings of a server and where they come from",
        description="Show the settings that `kvfork serve` would run with.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, verb=None, parser=parser)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")
    show = verbs.add_parser("show", help="every value and its source; commands are masked, for they may hold secrets")
    show.add_argument("--default", action="store_true", help="the defaults instead, with what each setting means")
    add_arguments(show)
    show.set_defaults(verb=_show)


def run(args: argparse.Namespace) -> int:
    """Carries out one verb. Returns 0 well, 2 for settings that cannot be used."""
    if args.verb is None:
        args.parser.print_help()
        return 2
    return int(args.verb(args))


def _show(args: argparse.Namespace) -> int:
    from service.config import ConfigError
    from service.options import configured, gather

    if args.default:
        print(commented_defaults(), end="")
        return 0
    try:
        given = gather(args, os.environ)
        configured(given)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lines = [(toml_line(name, each.value), each.source) for name, each in given.items()]
    width = min(48, max(len(line) for line, _ in lines))
    for line, source in lines:
        print(f"{line:{width}}  # {source}")
    return 0


def commented_defaults() -> str:
    """A settings file in which every setting is explained and none is set."""
    from service.options import OPTIONS, gather

    plain = gather(argparse.Namespace(), {})
    parts = ["# Settings of `kvfork serve`, with their defaults on this machine. Take a # away to set one.\n"]
    for option in OPTIONS:
        text = textwrap.fill(option.help, _WIDTH, initial_indent="# ", subsequent_indent="# ")
        line = toml_line(option.name, plain[option.name].value, mask=False)
        parts.append(f"\n{text}\n{line if line.startswith('#') else '#' + line}\n")
    return "".join(parts)


def toml_line(name: str, value: object, *, mask: bool = True) -> str:
    """`key = value`; a comment where there is no value, or none that may be shown."""
    from service.options import SECRET, shown

    key = name.replace("_", "-")
    if mask and name in SECRET and value:
        return f'#{key} = "***"'
    if name == "address" and not value:
        return 'address = "none"'
    if value is None or value == "" or value == ():
        return f'#{key} = ""'
    if isinstance(value, bool):
        return f"{key} = {'true' if value else 'false'}"
    text = shown(name, value)
    return f"{key} = {text if text.isdigit() else json.dumps(text, ensure_ascii=False)}"
