"""Chat completions by calls of the contract. Owns what a request becomes: rendering, going on from a kept place, n.

Every prompt is rendered by the server first. Where a kept snapshot holds the beginning of those very tokens, the call
goes on from it with the rest of them, and so asks for exactly what it would have asked for without.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace

import kvfork_client as kv

from .answer import Choice
from .calling import OWN, Calling, Habit, needs_habit, plan
from .completion import Completion, Stream
from .conversations import Bounds, Place, same_tokens
from .errors import Refused
from .fields import refuse
from .keeping import Caller, Held, Keeper, Prompt, Start
from .messages import as_messages, images_of
from .request import ChatRequest
from .tools import Spellings

_PROBE = {"type": "function", "function": {"name": "kvforkprobe", "description": "", "parameters": {"type": "object"}}}

_ASKED_SECONDS = 30.0  # for a server to say who a caller is
_KNOWN_SECONDS = 10.0  # until it is asked again
_MOST_KNOWN = 1000  # callers; where no token is needed, anybody can invent more

# A place that was kept is gone, or too dear to come to: there is another way to the same tokens.
_LOST = (kv.SnapshotNotFound, kv.ModelChanged, kv.CutInsideImage, kv.RecomputeLimit)


class Completions:
    """For one event loop. `close` lets go of what was kept. `clock`: monotonic seconds."""

    def __init__(
        self,
        client: kv.AsyncClient,
        *,
        bounds: Bounds,
        aliases: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._aliases = dict(aliases)
        self._clock = clock
        self._let_in: OrderedDict[bytes, float] = OrderedDict()  # until when a caller is not asked about, by its key
        self._keeper = Keeper(bounds)
        self._spellings = Spellings()
        self._habits: dict[str, Habit] = {}  # by fingerprint
        self._openings: dict[str, tuple[int, ...]] = {}  # by fingerprint: what opens an answer

    def caller(self, token: str | None) -> Caller:
        """Raises Refused for a token that no header can carry."""
        try:
            client = self._client.with_token(token)
        except ValueError as error:
            raise Refused(401, str(error), code="invalid_api_key", kind="authentication_error") from None
        return Caller(hashlib.sha256((token or "").encode()).digest(), client)

    async def let_in(self, caller: Caller) -> None:
        """Asks the server who that is, and learns what it allows. Raises KVForkError for who may not call.

        For some seconds it does not ask again: the server judges every call of a completion by itself.
        """
        if self._clock() < self._let_in.get(caller.key, -math.inf):
            return
        info = await caller.client.server_info(timeout=_ASKED_SECONDS)
        self._keeper.limit(info.limits.max_ttl)
        self._let_in[caller.key] = self._clock() + _KNOWN_SECONDS
        self._let_in.move_to_end(caller.key)
        while len(self._let_in) > _MOST_KNOWN:
            self._let_in.popitem(last=False)

    async def model(self, name: str, caller: Caller) -> kv.ModelInfo:
        """The model behind a name or an alias. Raises KVForkError."""
        bare = name.removeprefix("models/")
        try:
            return await caller.client.model(_full(self._aliases.get(bare, bare)))
        except (kv.ModelNotFound, kv.InvalidArgument):
            if "*" not in self._aliases:
                raise
            return await caller.client.model(_full(self._aliases["*"]))

    async def start(self, request: ChatRequest, caller: Caller) -> Completion:
        """For a caller that was let in. Returns once every choice was admitted; close what it returns.

        Raises Refused, KVForkError.
        """
        model = await self.model(request.model, caller)
        habit = await self._habit(model, caller) if needs_habit(request) else Habit(template=False)
        calling = plan(request, habit)
        save = request.extension.save
        if request.n > 1 and save is not None and save.snapshot_id:
            refuse("kvfork.save.snapshot_id", "names one snapshot; leave it out where n is above 1")
        prompt = await self._prompt(request, calling, model, caller)
        sparing = False
        away = False  # the server that holds the place; another one may be there, and computes the prompt anew
        while True:
            place = None if away else self._keeper.find(prompt, model, caller)
            try:
                return await self._begin(request, calling, model, caller, prompt, place, sparing=sparing)
            except kv.Unavailable:
                if place is None:
                    raise
                away = True
            except _LOST:
                if place is None:
                    raise
                self._keeper.forget(place)
            except kv.SnapshotQuota:
                # What was asked for goes before what is kept for the next time: what would be, then what is.
                if sparing and (save is None or not self._keeper.give_up(caller)):
                    raise
                sparing = True
                await self._keeper.settle(caller)

    async def close(self) -> None:
        await self._keeper.close()

    async def _habit(self, model: kv.ModelInfo, caller: Caller) -> Habit:
        """What the model knows of tools. Raises KVForkError."""
        known = self._habits.get(model.fingerprint)
        if known is not None:
            return known
        turn = kv.Message.user("?")
        plain = await caller.client.count_tokens(kv.chat((turn,)), model=model.name, rendered=True)
        told = kv.chat((turn,), template_vars={"tools": [_PROBE]})
        with_tool = await caller.client.count_tokens(told, model=model.name, rendered=True)
        if model.tells_tool_calls and plain.token_ids != with_tool.token_ids:
            made = Habit(template=True, form=model.tool_call_form or OWN)
        else:
            made = Habit(template=False, system=await self._takes_system(model, caller))
        self._habits[model.fingerprint] = made
        return made

    async def _takes_system(self, model: kv.ModelInfo, caller: Caller) -> bool:
        turns = (kv.Message.system("?"), kv.Message.user("?"))
        try:
            await caller.client.count_tokens(kv.chat(turns), model=model.name)
        except kv.InvalidArgument:
            return False
        return True

    async def _prompt(self, request: ChatRequest, calling: Calling, model: kv.ModelInfo, caller: Caller) -> Prompt:
        turns = as_messages(calling.turns, lambda turn: self._spellings.spelled(caller, turn))
        variables = dict(request.template_vars)
        if calling.template_tools:
            variables["tools"] = list(calling.template_tools)
        chat = kv.chat(turns, template_vars=variables)
        if request.extension.parent:
            return Prompt(input=chat)
        ids = (await caller.client.count_tokens(chat, model=model.name, rendered=True)).token_ids
        images = tuple(hashlib.sha256(image.data).digest() for image in images_of(request.turns))
        return Prompt(input=chat, ids=ids, images=images, turns_end=await self._turns_end(chat, ids, model, caller))

    async def _turns_end(self, chat: kv.ChatInput, ids: tuple[int, ...], model: kv.ModelInfo, caller: Caller) -> int:
        """Where the turns end and what opens the answer begins. Asked once per model, since models open all alike.

        Not those that open with nothing: every prompt ends with that.
        """
        opening = self._openings.get(model.fingerprint)
        if not opening or ids[len(ids) - len(opening) :] != opening:
            closed = replace(chat, add_generation_prompt=False)
            turns = (await caller.client.count_tokens(closed, model=model.name, rendered=True)).token_ids
            opening = self._openings[model.fingerprint] = ids[same_tokens(ids, turns) :]
        return len(ids) - len(opening) or len(ids)

    async def _begin(
        self,
        request: ChatRequest,
        calling: Calling,
        model: kv.ModelInfo,
        caller: Caller,
        prompt: Prompt,
        place: Place[Held] | None,
        *,
        sparing: bool,
    ) -> Completion:
        """`sparing`: without a snapshot that the caller has not asked for."""
        given = request.extension
        start = Start(parent=Held(given.parent, given.instance) if given.parent else None, given=prompt.input)
        if place is not None and sparing:
            place = place.uncut
        if place is not None:
            start = await self._keeper.stand_at(place, prompt, caller)
        keeps = prompt.ids is not None and request.extension.save is None and not sparing
        own = self._keeper.options
        marks = [kv.Mark.at(prompt.turns_end, own)] if keeps and start.tokens < prompt.turns_end else []
        shared: kv.AsyncSnapshot | None = None  # the prompt, for several choices
        if request.n > 1 and not sparing:
            shared = await self._shared(start, marks, model, caller)
            start = replace(start, parent=shared, given=None, passing=(*start.passing, Held.of(shared)))

        def ended(completion: Completion) -> None:
            if keeps:
                marked = shared.marks.get(0) if shared is not None else None
                self._keeper.remember(completion, caller, prompt, model, place=place, shared=marked)
            for choice in completion.choices:
                if choice.calls and not choice.left_out:
                    self._spellings.remember(caller, choice.calls, choice.content, "".join(choice.said))
            self._keeper.release(caller, start.passing)

        completion = Completion(
            request=request, model=model, prompt_usage=shared.usage if shared is not None else None, ended=ended
        )
        try:
            for index in range(request.n):
                generation = caller.client.generate(
                    start.given,
                    start.parent,
                    model=model.name,
                    sampling=_sampling(request.sampling, index),
                    stopping=request.stopping,
                    save=request.extension.save or (own if keeps else False),
                    marks=marks if shared is None else [],
                    constraint=calling.constraint,
                    max_recompute_tokens=request.extension.max_recompute_tokens,
                    priority=request.extension.priority,
                    token_ids=True,
                    top_logprobs=request.top_logprobs,
                )
                choice = Choice(
                    index,
                    calls=bool(request.tools),
                    logprobs=request.top_logprobs is not None,
                    opening=calling.opening,
                )
                completion.streams.append(Stream(choice, generation))
            await completion.admitted()
        except BaseException:  # whatever it was: nothing runs on
            await completion.close()
            raise
        return completion

    async def _shared(
        self, start: Start, marks: list[kv.Mark], model: kv.ModelInfo, caller: Caller
    ) -> kv.AsyncSnapshot:
        assert start.given is not None
        try:
            return await caller.client.create_snapshot(
                start.given, start.parent, model=model.name, marks=marks, options=self._keeper.passing_options
            )
        except BaseException:  # a caller who left as well: nothing goes on from there
            self._keeper.release(caller, start.passing)
            raise


def _full(model: str) -> str:
    return f"models/{model.removeprefix('models/')}"


def _sampling(sampling: kv.Sampling, index: int) -> kv.Sampling:
    """Choices of one call differ, also where it fixes a seed."""
    return sampling if sampling.seed is None else replace(sampling, seed=(sampling.seed + index) % 2**32)
