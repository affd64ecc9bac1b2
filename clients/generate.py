"""`python clients/generate.py [--check] [LANGUAGE…]`: what the clients in other languages have of the contract.

From `proto/` come messages and calls, from the Python client's error tree the reasons, so that a field or a reason
that is new reaches every client by this one command. `--check` writes nothing and fails if anything would change.

| language   | generator                                         | what is left to its own build |
|------------|---------------------------------------------------|-------------------------------|
| go         | protoc-gen-go, protoc-gen-go-grpc (`go install`)  |                               |
| typescript | protoc-gen-es, in clients/typescript/codegen      |                               |
| rust       | tonic-prost-build, in clients/rust/codegen        |                               |
| java       | calls, reasons, protos with Java's options: this  | messages: protoc, by Maven    |
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLIENTS = ROOT / "clients"
PROTO = ROOT / "proto"
PROTOS = tuple(
    f"kvfork/v1/{name}.proto" for name in ("types", "inference_service", "snapshot_service", "server_service")
)
RPC_PROTOS = ("google/rpc/error_details.proto", "google/rpc/status.proto")  # of google.golang.org/genproto and the like

GO_MODULE = "kvfork.example/go"
GO_TOOLS = {
    "protoc-gen-go": "google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12",
    "protoc-gen-go-grpc": "google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2",
}
NOTE = "Made by clients/generate.py. Do not edit."


class CannotGenerate(Exception):
    """A toolchain is missing or failed; the text says which."""


@dataclass(frozen=True, slots=True)
class Made:
    """A language's generated files: their folder, and which files in it are of this script's making."""

    folder: Path
    patterns: Sequence[str]
    make: Callable[[Path], None]  # writes them under a folder that stands for `folder`

    def committed(self) -> dict[str, bytes]:
        return _files(self.folder, self.patterns)


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason of the error table. `gone`: the snapshot that was named is of no more use."""

    name: str
    code: str
    gone: bool
    text: str


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python clients/generate.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("languages", nargs="*", metavar="LANGUAGE", help=f"of {', '.join(LANGUAGES)}; none: all")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if anything would change")
    options = parser.parse_args(arguments)
    unknown = set(options.languages) - set(LANGUAGES)
    if unknown:
        parser.error(f"nothing is generated for {', '.join(sorted(unknown))}")
    stale = []
    for language in options.languages or LANGUAGES:
        try:
            changed = generate(language, check=options.check)
        except CannotGenerate as error:
            print(f"{language}: {error}", file=sys.stderr)
            return 2
        print(f"{language}: {', '.join(changed) or 'up to date'}", file=sys.stderr)
        stale += changed
    if options.check and stale:
        print("run `make gen-clients`", file=sys.stderr)
        return 1
    return 0


def generate(language: str, *, check: bool) -> list[str]:
    """Makes one language's files; the names of those that changed, or would. Raises CannotGenerate."""
    made = LANGUAGES[language]
    with tempfile.TemporaryDirectory(prefix="kvfork-generate-") as folder:
        made.make(Path(folder))
        fresh, before = _files(Path(folder), made.patterns), made.committed()
        changed = sorted(name for name in fresh.keys() | before.keys() if fresh.get(name) != before.get(name))
        for name in () if check else changed:
            target = made.folder / name
            if name in fresh:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(fresh[name])
            else:
                target.unlink()
    return changed


def _files(folder: Path, patterns: Sequence[str]) -> dict[str, bytes]:
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(found)}


def protoc(*arguments: str, protos: Sequence[str] = PROTOS, path: Sequence[Path] = ()) -> None:
    """The protoc of grpcio-tools, as for the Python stubs. `path`: where plugins are looked for first."""
    import google.rpc

    googleapis = Path(next(iter(google.rpc.__path__))).parents[1]  # its package has the sources beside the stubs
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", f"-I{googleapis}", *arguments, *protos]
    found = os.pathsep.join([*map(str, path), os.environ["PATH"]])
    _run(command, env={**os.environ, "PATH": found})


def _run(command: Sequence[str], *, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> None:
    if shutil.which(command[0]) is None:
        raise CannotGenerate(f"{command[0]} is not on PATH")
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise CannotGenerate(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def tools_folder() -> Path:
    """Where plugins are kept from one run to the next."""
    root = os.environ.get("KVFORK_CACHE_DIR") or Path.home() / ".cache" / "kvfork"
    return Path(root) / "tools" / "protoc"


def reasons() -> list[Reason]:
    """Every reason that a server tells, in the order of the error tree."""
    sys.path[:0] = [str(CLIENTS / "python"), str(PROTO)]
    from kvfork_client import errors

    def below(kind: type[errors.KVForkError]) -> Iterator[type[errors.KVForkError]]:
        for child in kind.__subclasses__():
            yield child
            yield from below(child)

    found = []
    for kind in dict.fromkeys(below(errors.KVForkError)):  # one of two bases comes up twice
        if kind.REASON:
            said = " ".join((kind.__doc__ or "").split()) or f"{kind.advice[:1].upper()}{kind.advice[1:]}."
            # Of WRONG_INSTANCE only a client that names the instance by itself can tell that the snapshot is gone.
            gone = issubclass(kind, errors.SnapshotNotFound) and kind.CODE.name == "NOT_FOUND"
            found.append(Reason(kind.REASON, kind.CODE.name, gone, said))
    for name, code, text in (
        ("INVALID_FIELD", "INVALID_ARGUMENT", "Fields of the request are wrong; the error lists them."),
        ("UNSUPPORTED", "UNIMPLEMENTED", "Part of the contract that this server does not serve yet."),
        ("ROW_FAILED", "INTERNAL", "One generation failed by itself; the incident leads to the server's log."),
        ("INTERNAL", "INTERNAL", "The server's fault; the incident leads to its log."),
        ("TRUNCATED", "INTERNAL", "Told by the client: a stream ended without its last message."),
    ):
        if all(reason.name != name for reason in found):
            found.append(Reason(name, code, gone=False, text=text))
    return sorted(found, key=lambda reason: reason.name)


def pascal(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


# -- go ----------------------------------------------------------------------------------------------------------------


def _go(folder: Path) -> None:
    tools = tools_folder()
    for program, package in GO_TOOLS.items():
        version = package.rpartition("@")[2]
        if not (tools / version / program).exists():
            _run(["go", "install", package], env={**os.environ, "GOBIN": str(tools / version), "CGO_ENABLED": "0"})
    mapped = [f"M{proto}={GO_MODULE}/kvforkv1" for proto in PROTOS]
    options = [f"--{plugin}_opt={','.join([f'module={GO_MODULE}', *mapped])}" for plugin in ("go", "go-grpc")]
    path = [tools / package.rpartition("@")[2] for package in GO_TOOLS.values()]
    protoc(f"--go_out={folder}", f"--go-grpc_out={folder}", *options, path=path)
    lines = ["// Code generated by clients/generate.py. DO NOT EDIT.\n\npackage kvfork\n\nconst (\n"]
    for reason in reasons():
        lines.append(f"\t// {reason.code}. {reason.text}\n\t{pascal(reason.name)} Reason = {quoted(reason.name)}\n")
    gone = ", ".join(pascal(reason.name) for reason in reasons() if reason.gone)
    lines.append(f")\n\n// goneReasons tell that a snapshot is of no more use.\nvar goneReasons = []Reason{{{gone}}}\n")
    (folder / "reasons.go").write_text("".join(lines), encoding="utf-8")


def quoted(text: str) -> str:
    return f'"{text}"'


# -- typescript --------------------------------------------------------------------------------------------------------


def _typescript(folder: Path) -> None:
    project = CLIENTS / "typescript" / "codegen"
    plugins = project / "node_modules" / ".bin"
    if not (plugins / "protoc-gen-es").exists():
        _run(["npm", "ci", "--no-audit", "--no-fund"], cwd=project)
    options = "target=ts,import_extension=js"
    protoc(f"--es_out={folder}", f"--es_opt={options}", protos=[*PROTOS, *RPC_PROTOS], path=[plugins])
    said = "/** Every reason that a server tells. A newer server may tell others. */"
    lines = [f"// {NOTE}\n\n{said}\nexport const reasons = {{\n"]
    for reason in reasons():
        lines.append(f"  /** {reason.text} */\n")
        lines.append(f'  {reason.name}: {{ code: "{reason.code}", gone: {str(reason.gone).lower()} }},\n')
    lines.append("} as const;\n\nexport type Reason = keyof typeof reasons;\n")
    (folder / "reasons.ts").write_text("".join(lines), encoding="utf-8")


# -- rust --------------------------------------------------------------------------------------------------------------


def _rust(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        described = Path(scratch) / "kvfork.binpb"
        protoc(f"--descriptor_set_out={described}", "--include_imports", "--include_source_info")
        env = {**os.environ}
        env.setdefault("CARGO_TARGET_DIR", str(tools_folder().parent / "rust-codegen"))
        codegen = CLIENTS / "rust" / "codegen"
        _run(["cargo", "run", "--quiet", "--", str(described), str(folder)], cwd=codegen, env=env)
    known = reasons()
    lines = [f"// {NOTE}\n\n/// Why a call failed, as the server names it.\n"]
    lines.append("#[derive(Clone, Debug, PartialEq, Eq, Hash)]\n#[non_exhaustive]\npub enum Reason {\n")
    for reason in known:
        lines.append(f"    /// {reason.code}. {reason.text}\n    {pascal(reason.name)},\n")
    lines.append("    /// A reason that is newer than this client.\n    Other(String),\n}\n\nimpl Reason {\n")
    lines.append("    /// The reason of a name.\n    pub fn of(name: &str) -> Reason {\n        match name {\n")
    lines += [f'            "{reason.name}" => Reason::{pascal(reason.name)},\n' for reason in known]
    lines.append("            other => Reason::Other(other.to_owned()),\n        }\n    }\n\n")
    lines.append("    /// Its name, as in the contract.\n    pub fn as_str(&self) -> &str {\n        match self {\n")
    lines += [f'            Reason::{pascal(reason.name)} => "{reason.name}",\n' for reason in known]
    lines.append("            Reason::Other(name) => name,\n        }\n    }\n\n")
    lines.append("    /// Whether it tells that a snapshot is of no more use.\n    pub fn is_gone(&self) -> bool {\n")
    gone = "\n                | ".join(f"Reason::{pascal(reason.name)}" for reason in known if reason.gone)
    lines.append(f"        matches!(\n            self,\n            {gone}\n        )\n    }}\n}}\n")
    (folder / "reasons.rs").write_text("".join(lines), encoding="utf-8")


# -- java --------------------------------------------------------------------------------------------------------------


_JAVA_KINDS = {  # by whether client and server stream
    (False, False): "UNARY",
    (False, True): "SERVER_STREAMING",
    (True, False): "CLIENT_STREAMING",
    (True, True): "BIDI_STREAMING",
}


def _java(folder: Path) -> None:
    from google.protobuf import descriptor_pb2

    with tempfile.TemporaryDirectory() as scratch:
        described = Path(scratch) / "kvfork.binpb"
        protoc(f"--descriptor_set_out={described}")
        files = descriptor_pb2.FileDescriptorSet.FromString(described.read_bytes()).file
    lines = [f"// {NOTE}\npackage kvfork.client;\n\n"]
    lines.append("import io.grpc.MethodDescriptor;\nimport io.grpc.MethodDescriptor.MethodType;\n")
    lines.append("import io.grpc.protobuf.ProtoUtils;\nimport com.google.protobuf.Message;\n\n")
    lines.append("/** Every call of the contract, for {@link io.grpc.stub.ClientCalls}. */\nfinal class Methods {\n")
    for file in files:
        for service in file.service:
            for method in service.method:
                asked, told = (
                    f"kvfork.v1.{kind.rpartition('.')[2]}" for kind in (method.input_type, method.output_type)
                )
                kind = _JAVA_KINDS[method.client_streaming, method.server_streaming]
                name = "".join(f"_{c}" if c.isupper() else c.upper() for c in method.name).lstrip("_")
                lines.append(f"  static final MethodDescriptor<{asked}, {told}> {name} =\n")
                lines.append(f'      method("kvfork.v1.{service.name}", "{method.name}", MethodType.{kind},\n')
                lines.append(f"          {asked}.getDefaultInstance(), {told}.getDefaultInstance());\n")
    lines.append(
        """
  private Methods() {}

  private static <Q extends Message, R extends Message> MethodDescriptor<Q, R> method(
      String service, String name, MethodType type, Q request, R response) {
    return MethodDescriptor.<Q, R>newBuilder()
        .setType(type)
        .setFullMethodName(MethodDescriptor.generateFullMethodName(service, name))
        .setSampledToLocalTracing(true)
        .setRequestMarshaller(ProtoUtils.marshaller(request))
        .setResponseMarshaller(ProtoUtils.marshaller(response))
        .build();
  }
}
"""
    )
    package = folder / "src" / "main" / "java" / "kvfork" / "client"
    package.mkdir(parents=True)
    (package / "Methods.java").write_text("".join(lines), encoding="utf-8")
    lines = [f"// {NOTE}\npackage kvfork.client;\n\nimport io.grpc.Status;\n\n"]
    lines.append("/** Why a call failed, as the server names it. */\npublic enum Reason {\n")
    for reason in reasons():
        lines.append(
            f"  /** {reason.text} */\n  {reason.name}(Status.Code.{reason.code}, {str(reason.gone).lower()}),\n"
        )
    lines.append(
        """  /** gRPC itself ended the call, or the reason is newer than this client: see its name. */
  OTHER(Status.Code.UNKNOWN, false);

  private final Status.Code code;
  private final boolean gone;

  Reason(Status.Code code, boolean gone) {
    this.code = code;
    this.gone = gone;
  }

  /** The status code that comes with it. */
  public Status.Code code() {
    return code;
  }

  /** Whether it tells that a snapshot is of no more use. */
  public boolean isGone() {
    return gone;
  }

  static Reason of(String name) {
    for (Reason reason : values()) {
      if (reason != OTHER && reason.name().equals(name)) {
        return reason;
      }
    }
    return OTHER;
  }
}
"""
    )
    (package / "Reason.java").write_text("".join(lines), encoding="utf-8")
    for name in PROTOS:  # the contract itself knows of no language
        copy = folder / "src" / "main" / "proto" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = (PROTO / name).read_text(encoding="utf-8")
        declared = "package kvfork.v1;\n"
        assert text.count(declared) == 1, name
        with_option = text.replace(declared, f"{declared}\noption java_multiple_files = true;\n")
        copy.write_text(f"// {NOTE}\n{with_option}", encoding="utf-8")


LANGUAGES: dict[str, Made] = {
    "go": Made(CLIENTS / "go", ("kvforkv1/*.go", "reasons.go"), _go),
    "typescript": Made(CLIENTS / "typescript" / "src" / "gen", ("**/*.ts",), _typescript),
    "rust": Made(CLIENTS / "rust" / "src" / "gen", ("*.rs",), _rust),
    "java": Made(
        CLIENTS / "java",
        (
            "src/main/java/kvfork/client/Methods.java",
            "src/main/java/kvfork/client/Reason.java",
            "src/main/proto/**/*.proto",
        ),
        _java,
    ),
}

if __name__ == "__main__":
    sys.exit(main())
