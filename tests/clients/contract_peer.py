"""The other end of the wire for the client's tests: the generated servicers over a few dictionaries, in process.

It stands in for the network peer, not for the engine: a token is one character, a "model" answers with the text it was
given, and state is the characters themselves. An export is the name, a line end and the characters, its manifest the
name alone; who has the characters holds the one record "all". `scripts[method]` replaces what one method does. `seen`
keeps the requests, `ended` how each Generate ended ("finished" or "cancelled").
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
from google.protobuf import any_pb2, timestamp_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from kvfork.v1 import inference_service_pb2 as inf
from kvfork.v1 import inference_service_pb2_grpc as inf_grpc
from kvfork.v1 import server_service_pb2 as srv
from kvfork.v1 import server_service_pb2_grpc as srv_grpc
from kvfork.v1 import snapshot_service_pb2 as snap
from kvfork.v1 import snapshot_service_pb2_grpc as snap_grpc
from kvfork.v1 import types_pb2 as types

OPTIONS = [
    ("grpc.so_reuseport", 0),
    # What a kvfork server allows.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 2),
    ("grpc.keepalive_permit_without_calls", 1),
]

Script = Callable[[Any, grpc.ServicerContext], Any]


def refuse(
    context: grpc.ServicerContext, code: str, reason: str = "", text: str = "no", *details: Any, **facts: str
) -> None:
    """Ends the call with a rich status: ErrorInfo first, then the other details."""
    packed = []
    for detail in (
        [error_details_pb2.ErrorInfo(reason=reason, domain="kvfork", metadata=facts)] if reason else []
    ) + list(details):
        wrapped = any_pb2.Any()
        wrapped.Pack(detail)
        packed.append(wrapped)
    status = status_pb2.Status(code=code_pb2.Code.Value(code), message=text, details=packed)
    context.abort_with_status(rpc_status.to_status(status))


def characters(source: types.Input) -> str:
    """What an input adds to the context."""
    if source.HasField("chat"):
        turns = "".join(
            f"<{types.Role.Name(m.role)[5:].lower()}>{''.join(p.text for p in m.parts)}" for m in source.chat.messages
        )
        wants_answer = not source.chat.HasField("add_generation_prompt") or source.chat.add_generation_prompt
        return turns + ("<assistant>" if wants_answer else "")
    return "".join(part.text or "".join(map(chr, part.tokens.ids)) for part in source.raw.parts)


class Peer:
    """A running server. Use as a context manager."""

    def __init__(self, address: str = "127.0.0.1:0") -> None:
        self.answer = "four words and more"
        self.hold: threading.Event | None = None  # if set, generations wait on it after each token
        self.scripts: dict[str, Script] = {}
        self.seen: list[tuple[str, Any]] = []
        self.metadata: list[dict[str, Any]] = []
        self.ended: list[str] = []
        self.ended_one = threading.Semaphore(0)
        self.snapshots: dict[str, types.Snapshot] = {}
        self.contents: dict[str, str] = {}
        self.stops: dict[str, threading.Event] = {}
        self.counter = 0
        self.server = grpc.server(futures.ThreadPoolExecutor(16), options=OPTIONS)
        for base, add in (
            (inf_grpc.InferenceServiceServicer, inf_grpc.add_InferenceServiceServicer_to_server),
            (snap_grpc.SnapshotServiceServicer, snap_grpc.add_SnapshotServiceServicer_to_server),
            (srv_grpc.ServerServiceServicer, srv_grpc.add_ServerServiceServicer_to_server),
        ):
            add(self._servicer(base), self.server)
        self.health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        self.health.set("kvfork.v1.InferenceService", health_pb2.HealthCheckResponse.NOT_SERVING)
        port = self.server.add_insecure_port(address)
        self.address = address if address.startswith("unix:") else f"127.0.0.1:{port}"

    def __enter__(self) -> Peer:
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop(0).wait()

    def requests(self, method: str) -> list[Any]:
        return [request for name, request in self.seen if name == method]

    def wait_ended(self) -> str:
        """How the next Generate ended; fails after 10 s."""
        assert self.ended_one.acquire(timeout=10), "the server did not see the end of a generation"
        return self.ended[-1]

    def _servicer(self, base: type) -> Any:
        def method(name: str) -> Script:
            def serve(_: Any, request: Any, context: grpc.ServicerContext) -> Any:
                self.seen.append((name, request))
                self.metadata.append(dict(context.invocation_metadata()))
                script = self.scripts.get(name) or getattr(self, name, None)
                return script(request, context) if script else getattr(base(), name)(request, context)

            return serve

        names = [name for name in vars(base) if name[0].isupper()]
        return type(base.__name__, (base,), {name: method(name) for name in names})()

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def keep(self, content: str, options: types.SnapshotOptions, parent: str = "") -> types.Snapshot:
        self.counter += 1
        name = f"snapshots/{options.snapshot_id or f'auto-{self.counter:04}'}"
        kept = types.Snapshot(
            name=name,
            parent=parent,
            model="models/letters",
            token_count=len(content),
            checkpointed_tokens=len(content) // 256 * 256,
            prefix_hash=content.encode()[-8:],
            residency=types.RESIDENCY_MEMORY,
            pinned=options.pinned,
            labels=options.labels,
            create_time=timestamp_pb2.Timestamp(seconds=1_700_000_000 + self.counter),
            expire_time=timestamp_pb2.Timestamp(seconds=1_700_000_000 + self.counter + (options.ttl.seconds or 600)),
            exclusive_bytes=len(content) * 16,
            instance="peer",
        )
        self.snapshots[name], self.contents[name] = kept, content
        return kept

    def content(self, name: str, context: grpc.ServicerContext) -> str:
        if name and name not in self.contents:
            refuse(
                context,
                "NOT_FOUND",
                "SNAPSHOT_NOT_FOUND",
                f"{name} does not exist",
                error_details_pb2.ResourceInfo(resource_type="kvfork.v1.Snapshot", resource_name=name),
            )
        return self.contents.get(name, "")

    def GetSnapshot(self, request: Any, context: Any) -> Any:
        content = self.content(request.name, context)
        ids = map(ord, content) if request.include_tokens else ()
        return snap.GetSnapshotResponse(snapshot=self.snapshots[request.name], token_ids=ids)

    def ListSnapshots(self, request: Any, context: Any) -> Any:
        fits = [
            one
            for one in self.snapshots.values()
            if all(one.labels.get(key) == value for key, value in request.labels.items())
            and request.parent in ("", one.parent)
        ]
        start, size = int(request.page_token or 0), min(request.page_size or 100, 1000)
        more = str(start + size) if start + size < len(fits) else ""
        return snap.ListSnapshotsResponse(snapshots=fits[start : start + size], next_page_token=more)

    def WatchSnapshots(self, request: Any, context: Any) -> Any:
        """What there is, or with a token nothing; then one of each; then no more until the call ends."""
        ended = threading.Event()
        context.add_callback(lambda: (self.ended.append("watch"), ended.set()))
        if not request.resume_token:
            for one in list(self.snapshots.values()):
                yield snap.WatchSnapshotsResponse(changed=one)
        yield snap.WatchSnapshotsResponse(synced=snap.Synced(), resume_token="t1")
        yield snap.WatchSnapshotsResponse(bookmark=snap.Bookmark(), resume_token="t2")
        yield snap.WatchSnapshotsResponse(resume_token="t3")  # a kind that is not known yet
        gone = snap.Gone(name="snapshots/old-0001", reason=snap.GONE_REASON_EXPIRED)
        yield snap.WatchSnapshotsResponse(gone=gone, resume_token="t4")
        ended.wait(10)

    def UpdateSnapshot(self, request: Any, context: Any) -> Any:
        self.content(request.snapshot.name, context)
        mine = self.snapshots[request.snapshot.name]
        if "labels" in request.update_mask.paths:
            mine.labels.clear()
            mine.labels.update(request.snapshot.labels)
        if "pinned" in request.update_mask.paths:
            mine.pinned = request.snapshot.pinned
        if "ttl" in request.update_mask.paths:
            mine.expire_time.seconds = mine.create_time.seconds + request.snapshot.ttl.seconds
        return snap.UpdateSnapshotResponse(snapshot=mine)

    def ExtendSnapshots(self, request: Any, context: Any) -> Any:
        here = [name for name in request.names if name in self.snapshots]
        for name in here:
            self.snapshots[name].expire_time.seconds += request.ttl.seconds or 600
        gone = [name for name in request.names if name not in self.snapshots]
        return snap.ExtendSnapshotsResponse(snapshots=[self.snapshots[name] for name in here], missing=gone)

    def DeleteSnapshot(self, request: Any, context: Any) -> Any:
        if request.name not in self.contents and request.allow_missing:
            return snap.DeleteSnapshotResponse()
        self.content(request.name, context)
        gone = [request.name]
        if request.descendants:
            for name, one in self.snapshots.items():
                if one.parent in gone and not one.pinned:
                    gone.append(name)
        for name in gone:
            del self.snapshots[name], self.contents[name]
        return snap.DeleteSnapshotResponse(deleted=gone)

    def ExportSnapshot(self, request: Any, context: Any) -> Any:
        content = self.content(request.name, context)
        data = request.name.encode()
        if not request.manifest_only:
            data += b"\n" + (b"" if request.held else content.encode())
        summary = snap.ExportSummary(snapshot=self.snapshots[request.name], records=1, bytes=len(data))
        yield snap.ExportSnapshotResponse(data=data, summary=summary)

    def CheckImport(self, request: Any, context: Any) -> Any:
        return snap.CheckImportResponse(held=[b"all"] if request.manifest.decode() in self.contents else [])

    def ImportSnapshot(self, requests: Any, context: Any) -> Any:
        options, data = types.SnapshotOptions(), b""
        for request in requests:
            options.MergeFrom(request.options)
            data += request.data
        name, _, content = data.decode().partition("\n")
        options.snapshot_id = options.snapshot_id or name.removeprefix("snapshots/")
        return snap.ImportSnapshotResponse(snapshot=self.keep(content or self.contents[name], options))

    # -- inference ---------------------------------------------------------------------------------------------------

    def usage(self, cached: int, new: int, completion: int = 0) -> types.Usage:
        return types.Usage(
            prompt_tokens=cached + new,
            cached_tokens=cached,
            new_tokens=new,
            memory_tokens=cached,
            completion_tokens=completion,
        )

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:
        ended = "cancelled"

        def note() -> None:
            self.ended.append(ended)
            self.ended_one.release()

        context.add_callback(note)
        prefix = self.content(request.parent, context)
        prompt = prefix + characters(request.input)
        self.counter += 1
        name = f"generations/{self.counter}"
        stop = self.stops[name] = threading.Event()
        yield inf.GenerateResponse(
            started=inf.Started(generation=name, instance="peer", prompt_tokens=len(prompt), seed=request.sampling.seed)
        )
        if request.output.progress:
            progress = inf.Progress(done_tokens=len(prompt), total_tokens=len(prompt))
            yield inf.GenerateResponse(progress=progress)
        for index, mark in enumerate(request.marks):
            end = mark.token_count if mark.WhichOneof("at") == "token_count" else len(prompt)
            kept = self.keep(prompt[:end], mark.options, request.parent)
            yield inf.GenerateResponse(marked=inf.Marked(mark=index, snapshot=kept))
        said, reason = "", inf.FINISH_REASON_EOS
        for position, letter in enumerate(self.answer, start=len(prompt)):
            if stop.is_set():
                reason = inf.FINISH_REASON_STOPPED
                break
            if request.stopping.HasField("max_tokens") and len(said) == request.stopping.max_tokens:
                reason = inf.FINISH_REASON_MAX_TOKENS
                break
            said += letter
            ids = [ord(letter)] if request.output.token_ids else []
            yield inf.GenerateResponse(
                delta=inf.Delta(text=letter, first_position=position, token_count=1, token_ids=ids)
            )
            while self.hold is not None and not self.hold.wait(0.02) and not stop.is_set():
                if not context.is_active():
                    return
        finished = inf.Finished(reason=reason, usage=self.usage(len(prefix), len(prompt) - len(prefix), len(said)))
        if request.HasField("save"):
            finished.snapshot.CopyFrom(self.keep(prompt + said, request.save, request.parent))
        ended = "finished"
        yield inf.GenerateResponse(finished=finished)

    def StopGeneration(self, request: Any, context: Any) -> Any:
        stop = self.stops.pop(request.generation, None)
        if stop is not None:
            stop.set()
        return inf.StopGenerationResponse(was_running=stop is not None)

    def CreateSnapshot(self, request: Any, context: Any) -> Any:
        prefix = self.content(request.parent, context)
        added = characters(request.input)
        marked = [self.keep((prefix + added)[: m.token_count], m.options, request.parent) for m in request.marks]
        made = self.keep(prefix + added, request.options, request.parent)
        return inf.CreateSnapshotResponse(snapshot=made, usage=self.usage(len(prefix), len(added)), marked=marked)

    def Fork(self, request: Any, context: Any) -> Any:
        prefix = self.content(request.parent, context)
        made = [
            self.keep(prefix + characters(branch.append), branch.options, request.parent) for branch in request.branches
        ]
        new = sum(len(characters(branch.append)) for branch in request.branches)
        return inf.ForkResponse(snapshots=made, usage=self.usage(len(prefix), new))

    def Rollback(self, request: Any, context: Any) -> Any:
        content = self.content(request.source, context)
        match request.WhichOneof("target"):
            case "token_count":
                end = request.token_count
            case "drop_tokens":
                end = len(content) - request.drop_tokens
            case _:
                end = len(self.content(request.ancestor, context))
        if end > len(content):
            refuse(context, "OUT_OF_RANGE", "ROLLBACK_BEYOND_END", "beyond the end", tokenCount=str(len(content)))
        released = []
        if request.release in (inf.RELEASE_SOURCE, inf.RELEASE_ABANDONED):
            released.append(request.source)
            del self.snapshots[request.source], self.contents[request.source]
        kept = self.keep(content[:end], request.options, request.source)
        return inf.RollbackResponse(snapshot=kept, released=released, usage=self.usage(end, 0))

    def CountTokens(self, request: Any, context: Any) -> Any:
        added = characters(request.input)
        total = len(self.content(request.parent, context)) + len(added)
        reply = inf.CountTokensResponse(total_tokens=total, remaining_tokens=4096 - total)
        if request.include_rendered:
            reply.text = added
            reply.token_ids.extend(map(ord, added))
        return reply

    # -- server ------------------------------------------------------------------------------------------------------

    def GetServerInfo(self, request: Any, context: Any) -> Any:
        return srv.GetServerInfoResponse(
            instance="peer", boot_id="b1", version="0.1.0", features=["marks"], limits=srv.Limits(max_fork_branches=8)
        )

    def ListModels(self, request: Any, context: Any) -> Any:
        at = int(request.page_token or 0)
        models = [self.model("models/letters"), self.model("models/other")]
        return srv.ListModelsResponse(models=models[at : at + 1], next_page_token=str(at + 1) if at == 0 else "")

    def GetModel(self, request: Any, context: Any) -> Any:
        return srv.GetModelResponse(model=self.model(request.name or "models/letters"))

    def model(self, name: str) -> srv.Model:
        return srv.Model(
            name=name,
            state=srv.Model.STATE_READY,
            context_tokens=4096,
            vocab_size=0x110000,
            eos_token_ids=[0],
            default_sampling=types.Sampling(temperature=0.0),
        )

    def GetCacheStats(self, request: Any, context: Any) -> Any:
        stats = srv.CacheStats(checkpoint_interval=256, memory_snapshots=len(self.snapshots), memory_bytes=3 << 20)
        return srv.GetCacheStatsResponse(stats=stats)

    def TrimCache(self, request: Any, context: Any) -> Any:
        held = request.memory_bytes if request.HasField("memory_bytes") else 3 << 20
        return srv.TrimCacheResponse(stats=srv.CacheStats(memory_bytes=held, disk_bytes=request.disk_bytes))
