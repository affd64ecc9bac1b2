"""Other servers that scenarios need: one that fails on purpose, in this process, and one that lets in who may.

Each is made with what the driver will be given, adds what the driver needs to find it, and counts what it is asked.
"""

from __future__ import annotations

import datetime as dt
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, Protocol

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from kvfork.v1 import inference_service_pb2 as pb
from kvfork.v1 import inference_service_pb2_grpc as pb_grpc
from kvfork.v1 import types_pb2 as types

from service.auth.tokens import new_token
from tests.conformance.scenarios import ROOT
from tests.e2e.live import LiveServer

ANSWER = "four words and more"
MODEL = "tiny-llama"  # of the secured server; it is asked nothing that needs it

SEEING_MODEL = "tiny-qwen3_5-vl"


class Peer(Protocol):
    """Listens until closed."""

    def close(self) -> None: ...

    def counted(self) -> dict[str, int]:
        """Calls by what became of them."""
        ...


def refuse(context: grpc.ServicerContext, code: str, reason: str, *trailers: tuple[str, str]) -> None:
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="kvfork"))
    number = code_pb2.Code.Value(code)
    status = rpc_status.to_status(status_pb2.Status(code=number, message="as planned", details=[info]))
    context.abort_with_status(status._replace(trailing_metadata=(*status.trailing_metadata, *trailers)))


def _server() -> grpc.Server:
    return grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])


class FailingPeer(pb_grpc.InferenceServiceServicer):
    """Generate, call by call: twice UNAVAILABLE before anything was sent, then a whole answer; UNAVAILABLE after
    Started; UNAVAILABLE with the word not to repeat it. Fork: UNAVAILABLE once, then the children.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self._generations = 0
        self._forks: list[str] = []
        self._server = _server()
        pb_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        given["peer"] = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait()

    def counted(self) -> dict[str, int]:
        late = self._generations - 3
        return {
            "before_started": min(self._generations, 3),
            "after_started": min(max(late, 0), 1),
            "told_not_to": max(late - 1, 0),
            "fork": len(self._forks),
            "fork_request_ids": len({name for name in self._forks if name}),
        }

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:
        self._generations += 1
        if self._generations <= 2:
            refuse(context, "UNAVAILABLE", "MODEL_LOADING")
        if self._generations == 5:
            refuse(context, "UNAVAILABLE", "ENGINE_DOWN", ("grpc-retry-pushback-ms", "-1"))
        yield pb.GenerateResponse(started=pb.Started(generation="generations/1", prompt_tokens=1))
        if self._generations == 4:
            refuse(context, "UNAVAILABLE", "ENGINE_DOWN")
        yield pb.GenerateResponse(delta=pb.Delta(text=ANSWER, first_position=1, token_count=4))
        finished = pb.Finished(reason=pb.FINISH_REASON_EOS, usage=types.Usage(prompt_tokens=1, new_tokens=1))
        yield pb.GenerateResponse(finished=finished)

    def Fork(self, request: Any, context: Any) -> Any:
        self._forks.append(request.request_id)
        if len(self._forks) == 1:
            refuse(context, "UNAVAILABLE", "MODEL_LOADING")
        names = [f"snapshots/child-{number}" for number, _ in enumerate(request.branches)]
        return pb.ForkResponse(snapshots=[types.Snapshot(name=name) for name in names])


class SecuredServer:
    """`kvfork serve` with a certificate that nobody knows but who is given its root, and a token to be let in."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvfork-conformance-")
        folder = Path(self._folder.name)
        names = ("key.pem", "cert.pem", "ca.pem")
        for name, content in zip(names, _certificates("localhost"), strict=True):
            (folder / name).write_bytes(content)
        given["token"], line = new_token("somebody")
        (folder / "tokens").write_text(f"{line}\n", encoding="utf-8")
        command = [sys.executable, "-m", "service", "serve", "--model", MODEL, "--address", "127.0.0.1:0"]
        command += ["--tls-cert", "cert.pem", "--tls-key", "key.pem", "--tokens", "tokens", "--scratch-dir", "."]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        self._process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        told = self._process.stdout.readline()
        assert told.startswith("listening on "), told
        given["peer"] = f"localhost:{told.split()[-1].rpartition(':')[2]}"
        given["ca"] = str(folder / "ca.pem")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._folder.cleanup()

    def counted(self) -> dict[str, int]:
        return {}


class SeeingServer:
    """A server on a model that sees images."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._server = LiveServer(SEEING_MODEL)
        given["peer"] = self._server.address

    def close(self) -> None:
        self._server.close()

    def counted(self) -> dict[str, int]:
        return {}


def _certificates(host: str) -> tuple[bytes, bytes, bytes]:
    """A host's key, its certificate, and the root that signed it, all PEM, good for an hour."""
    root_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root_name, name = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]) for text in ("a root", host))
    now = dt.datetime.now(dt.UTC)

    def signed(subject: x509.Name, public: ec.EllipticCurvePublicKey, *, is_root: bool) -> bytes:
        made = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(root_name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(minutes=5))
            .not_valid_after(now + dt.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=is_root, path_length=None), critical=True)
        )
        if not is_root:
            made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        return made.sign(root_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    root = signed(root_name, root_key.public_key(), is_root=True)
    return private, signed(name, key.public_key(), is_root=False), root


PEERS: dict[str, Callable[[dict[str, Any]], Peer]] = {
    "failing": FailingPeer,
    "secured": SecuredServer,
    "seeing": SeeingServer,
}
