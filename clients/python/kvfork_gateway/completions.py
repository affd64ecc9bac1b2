"""Chat completions by calls of the contract. Owns what a request becomes: rendering, going on from a known place, n.

Every prompt is rendered by the server first. Where a kept snapshot holds the beginning of those very tokens, the call
goes on from it with the rest of them, and so asks for exactly what it would have asked for without.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import kvfork_client as kv

from .answer import Choice
from .completion import Completion, Stream
from .conversations import Bounds, Conversations, Kept, Place, digest
from .errors import Refused, refused_by
from .fields import refuse, unsupported
from .messages import as_messages, images_of
from .request import ChatRequest
from .tools import Spellings

LABELS = {"kvfork-gateway": "reuse"}
"""Of the snapshots that the gateway keeps for itself."""

_PROBE = {"type": "function", "function": {"name": "kvforkprobe", "description": "", "parameters": {"type": "object"}}}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: a digest of the token, and a client that calls in its name."""

    key: bytes
    client: kv.AsyncClient = field(compare=False, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt:
    """What is asked of the model. `ids` None: with a parent of the caller's own, whose tokens are not looked at."""

    input: kv.InputLike
    ids: tuple[int, ...] | None
    images: tuple[bytes, ...]


class Completions:
    """For one event loop. `close` lets go of what was kept."""

    def __init__(self, client: kv.AsyncClient, *, bounds: Bounds, aliases: Mapping[str, str]) -> None:
        self._client = client
        self._bounds = bounds
        self._aliases = dict(aliases)
        self._conversations: Conversations[Caller] = Conversations(bounds)
        self._spellings = Spellings()
        self._takes_tools: dict[str, bool] = {}  # by fingerprint
        self._tasks: set[asyncio.Task[None]] = set()

    def caller(self, token: str | None) -> Caller:
        """Raises Refused for a token that no header can carry."""
        try:
            client = self._client.with_token(token)
        except ValueError as error:
            raise Refused(401, str(error), code="invalid_api_key", kind="authentication_error") from None
        return Caller(hashlib.sha256((token or "").encode()).digest(), client)

    async def models(self, caller: Caller) -> list[kv.ModelInfo]:
        """Raises Refused."""
        try:
            return await caller.client.models()
        except kv.KVForkError as error:
            raise refused_by(error) from None

    async def start(self, request: ChatRequest, caller: Caller) -> Completion:
        """Returns once every choice was admitted; close what it returns. Raises Refused."""
        try:
            return await self._start(request, caller)
        except kv.KVForkError as error:
            raise refused_by(error) from None

    async def close(self) -> None:
        """Lets go of all that was kept, as far as the server still hears of it."""
        self._release(self._conversations.clear())
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)

    async def _start(self, request: ChatRequest, caller: Caller) -> Completion:
        model = await self._model(request.model, caller)
        if request.tools:
            await self._require_tools(model, caller)
        if request.n > 1 and request.extension.save is not None and request.extension.save.snapshot_id:
            refuse("kvfork.save.snapshot_id", "names one snapshot; leave it out where n is above 1")
        prompt = await self._prompt(request, model, caller)
        while True:
            place = self._place(prompt, model, caller)
            try:
                return await self._begin(request, model, caller, prompt, place)
            except (kv.SnapshotNotFound, kv.ModelChanged, kv.WrongInstance, kv.CutInsideImage):
                if place is None:
                    raise
                self._release(self._conversations.drop(place.entry))

    async def _model(self, name: str, caller: Caller) -> kv.ModelInfo:
        bare = name.removeprefix("models/")
        bare = self._aliases.get(bare, bare)
        try:
            return await caller.client.model(f"models/{bare.removeprefix('models/')}")
        except (kv.ModelNotFound, kv.InvalidArgument):
            any_name = self._aliases.get("*")
            if any_name is None:
                raise
            return await caller.client.model(f"models/{any_name.removeprefix('models/')}")

    async def _require_tools(self, model: kv.ModelInfo, caller: Caller) -> None:
        """Raises Refused unless the model's template writes tools."""
        known = self._takes_tools.get(model.fingerprint)
        if known is None:
            turn = (kv.Message.user("?"),)
            plain = await caller.client.count_tokens(kv.chat(turn), model=model.name, rendered=True)
            with_tool = kv.chat(turn, template_vars={"tools": [_PROBE]})
            told = await caller.client.count_tokens(with_tool, model=model.name, rendered=True)
            known = self._takes_tools[model.fingerprint] = plain.token_ids != told.token_ids
        if not known:
            unsupported("tools", "the model's chat template does not write them")

    async def _prompt(self, request: ChatRequest, model: kv.ModelInfo, caller: Caller) -> _Prompt:
        turns = as_messages(request.turns, lambda turn: self._spellings.spelled(caller, turn))
        variables = dict(request.template_vars)
        if request.tools:
            variables["tools"] = list(request.tools)
        chat = kv.chat(turns, template_vars=variables)
        if request.extension.parent:
            return _Prompt(input=chat, ids=None, images=())
        counted = await caller.client.count_tokens(chat, model=model.name, rendered=True)
        images = tuple(hashlib.sha256(image.data).digest() for image in images_of(request.turns))
        return _Prompt(input=chat, ids=counted.token_ids, images=images)

    def _place(self, prompt: _Prompt, model: kv.ModelInfo, caller: Caller) -> Place | None:
        if prompt.ids is None:
            return None
        return self._conversations.find(
            caller, model.name, prompt.ids, prompt.images, trimmable=model.trimmable, now=time.monotonic()
        )

    async def _begin(
        self, request: ChatRequest, model: kv.ModelInfo, caller: Caller, prompt: _Prompt, place: Place | None
    ) -> Completion:
        extension = request.extension
        parent: kv.SnapshotRef | None = extension.parent or None
        given: kv.InputLike | None = prompt.input
        passing: list[kv.SnapshotRef] = []  # names for this call alone
        own = kv.SaveOptions(ttl=self._bounds.ttl, labels=LABELS)
        keeps = prompt.ids is not None and extension.save is None
        if place is not None:
            assert prompt.ids is not None
            parent, behind, passing = await self._stand_at(place, caller)
            given = kv.raw(kv.tokens(prompt.ids[behind:]))
        shared: kv.AsyncSnapshot | None = None
        if request.n > 1:
            shared = await caller.client.create_snapshot(given or (), parent, model=model.name, options=own)
            if not keeps:
                passing.append(shared)
            parent, given = shared, None
        options = kv.GenerateOptions(
            model=model.name,
            stopping=request.stopping,
            save=extension.save or (own if keeps else False),
            marks=[kv.Mark.prompt_end(own)] if keeps and shared is None else [],
            constraint=request.constraint,
            max_recompute_tokens=extension.max_recompute_tokens,
            priority=extension.priority,
            token_ids=True,
            top_logprobs=request.top_logprobs,
        )
        completion = Completion(
            request=request, model=model, prompt_usage=shared.usage if shared else None, ended=lambda: None
        )

        def ended() -> None:
            if keeps:
                self._remember(completion, caller, prompt, model, place, shared)
            for choice in completion.choices:
                if choice.calls:
                    self._spellings.remember(caller, choice.calls, choice.content, "".join(choice.said))
            self._release([(caller, name if isinstance(name, str) else name.name) for name in passing])

        completion.ended = ended
        try:
            for index in range(request.n):
                generation = caller.client.generate(
                    given, parent, **{**options, "sampling": _sampling(request.sampling, index)}
                )
                choice = Choice(index, calls=bool(request.tools), logprobs=request.top_logprobs is not None)
                completion.streams.append(Stream(choice, generation))
            await completion.admitted()
        except BaseException:  # whatever it was: nothing runs on, and nothing stays
            await completion.close()
            raise
        return completion

    async def _stand_at(self, place: Place, caller: Caller) -> tuple[kv.SnapshotRef, int, list[kv.SnapshotRef]]:
        """(the snapshot to go on from, its tokens, names to let go of afterwards)."""
        if not place.cut:
            return place.snapshot, place.tokens, []
        source = caller.client.snapshot(place.snapshot)
        short = kv.SaveOptions(ttl=min(60.0, self._bounds.ttl), labels=LABELS)
        cut = await source.rollback(token_count=place.tokens, rounding=kv.Rounding.DOWN, options=short)
        if cut.token_count < place.prompt_tokens and place.prompt:
            await cut.release()
            return place.prompt, place.prompt_tokens, []
        return cut, cut.token_count, [cut]

    def _remember(
        self,
        completion: Completion,
        caller: Caller,
        prompt: _Prompt,
        model: kv.ModelInfo,
        place: Place | None,
        shared: kv.AsyncSnapshot | None,
    ) -> None:
        """What later turns can go on from: the end of each answer, and of the prompt also where no answer came."""
        assert prompt.ids is not None
        prompt_digest = digest(prompt.ids)
        for stream in completion.streams:
            marked = shared or stream.generation.marks.get(0)
            finished = stream.choice.finished
            end = finished.snapshot if finished is not None else None
            if marked is None and end is None:
                continue
            kept = Kept(
                model=model.name,
                images=prompt.images,
                prompt_tokens=len(prompt.ids),
                prompt_digest=prompt_digest,
                answer=stream.choice.ids if end is not None else stream.choice.ids[:0],
                prompt=marked.name if marked is not None else "",
                end=end.name if end is not None else "",
                follows=place.entry if place is not None else None,
            )
            self._release(self._conversations.add(caller, kept, time.monotonic()))

    def _release(self, gone: Sequence[tuple[Caller, str]]) -> None:
        """In the background: nobody waits for it, and what fails expires by itself."""
        for caller, name in gone:
            self._spawn(_delete(caller.client, name))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _delete(client: kv.AsyncClient, name: str) -> None:
    with contextlib.suppress(kv.KVForkError):
        await client.delete_snapshot(name, allow_missing=True, timeout=30.0)


def _sampling(sampling: kv.Sampling, index: int) -> kv.Sampling:
    """Choices of one call differ, also where it fixes a seed."""
    return sampling if sampling.seed is None else replace(sampling, seed=(sampling.seed + index) % 2**32)
