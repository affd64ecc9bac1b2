"""A server that fails as the "retry" scenario needs it, in this process, and counts what it is asked.

Generate, call by call: twice UNAVAILABLE before anything was sent, then a whole answer; UNAVAILABLE after Started;
UNAVAILABLE with the word not to repeat it. Fork: UNAVAILABLE once, then the children.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from kvfork.v1 import inference_service_pb2 as pb
from kvfork.v1 import inference_service_pb2_grpc as pb_grpc
from kvfork.v1 import types_pb2 as types

ANSWER = "four words and more"


def unavailable(context: grpc.ServicerContext, reason: str, *trailers: tuple[str, str]) -> None:
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="kvfork"))
    status = rpc_status.to_status(status_pb2.Status(code=code_pb2.UNAVAILABLE, message="not now", details=[info]))
    context.abort_with_status(status._replace(trailing_metadata=(*status.trailing_metadata, *trailers)))


class FailingPeer(pb_grpc.InferenceServiceServicer):
    """Listens at `address` until closed."""

    def __init__(self) -> None:
        self._generations = 0
        self._forks: list[str] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait()

    def counted(self) -> dict[str, int]:
        """Calls by what became of them."""
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
            unavailable(context, "MODEL_LOADING")
        if self._generations == 5:
            unavailable(context, "ENGINE_DOWN", ("grpc-retry-pushback-ms", "-1"))
        yield pb.GenerateResponse(started=pb.Started(generation="generations/1", prompt_tokens=1))
        if self._generations == 4:
            unavailable(context, "ENGINE_DOWN")
        yield pb.GenerateResponse(delta=pb.Delta(text=ANSWER, first_position=1, token_count=4))
        finished = pb.Finished(reason=pb.FINISH_REASON_EOS, usage=types.Usage(prompt_tokens=1, new_tokens=1))
        yield pb.GenerateResponse(finished=finished)

    def Fork(self, request: Any, context: Any) -> Any:
        self._forks.append(request.request_id)
        if len(self._forks) == 1:
            unavailable(context, "MODEL_LOADING")
        names = [f"snapshots/child-{number}" for number, _ in enumerate(request.branches)]
        return pb.ForkResponse(snapshots=[types.Snapshot(name=name) for name in names])
