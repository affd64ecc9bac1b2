"""The composition root: builds every object and brackets its life. May import everything; only the CLI imports it."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from kvcache.cache import CacheLimits, PrefixCache
from kvcache.carrying import look_at_others
from kvcache.export import ExchangeKey
from kvcache.keys import read_key_file
from kvcache.store import StoreConfig, TieredStore
from service.config import Config
from service.config_values import split_page_address
from service.core import Core
from service.engine import Engine
from service.events import ModelState, ModelView
from service.extras import install
from service.images.uploads import Uploads
from service.metrics.http import MetricsServer
from service.open_store import KeySource, OpenStore, open_store
from service.rpc.access import Access
from service.rpc.server import serve
from service.runtime import Loaded
from service.text.constraint import Grammars
from service.text.formats import call_form, detect
from service.text.forms import FormLimits
from service.text.tokens import TextCodec
from service.tracing import NoTracer, otlp_tracer

if TYPE_CHECKING:
    from service.inspector.inspector import Inspector

log = logging.getLogger("kvfork")

FALLBACK_TEMPERATURE = 0.7  # where the model names none
END_SECONDS = 5.0  # for threads to come to an end; longer ones are left behind
QUEUE_BYTES = 256 << 20  # state on its way to disk; explicit snapshots may double it


def loader(config: Config, folder: Path, model_name: str, durable: OpenStore | None = None) -> Callable[[], Loaded]:
    """Loads `folder`; to be called on the engine thread."""

    def load() -> Loaded:
        from service.engine import cpu

        cpu.prepare()
        from service.engine.loading import load as load_model
        from service.engine.mlx_engine import MlxEngine

        log.info("loading %s from %s", model_name, folder)
        model, facts = load_model(folder)
        store_config = StoreConfig(
            directory=config.scratch_dir,
            memory_bytes=config.memory_bytes,
            disk_bytes=config.disk_budget,
            queue_bytes=min(QUEUE_BYTES, config.memory_bytes // 4),
            checkpoints=config.kept_on_the_way(),
            daily_write_bytes=config.daily_write_bytes,
        )
        store = durable.store(store_config, facts.fingerprint) if durable is not None else TieredStore(store_config)
        uploads = Uploads(config.image_bytes)
        cache = PrefixCache(
            store,
            facts.layout,
            facts.fingerprint,
            limits=CacheLimits(
                max_snapshots=config.max_snapshots,
                max_pinned=config.max_pinned,
                max_pinned_bytes=config.max_pinned_bytes,
                default_ttl=config.default_ttl,
                max_ttl=config.max_ttl,
            ),
            share_decoded=config.share_decoded,
            share_prefixes=config.share_prefixes,
            durable=durable.about(facts.parts) if durable is not None else None,
            media=uploads,
        )
        if durable is not None:
            owners = durable.ring.owners()
            look_at_others(cache, owners, facts.parts, now=time.time(), carry=config.carry_over)
        store.start()
        codec = TextCodec.load(folder)
        channels = detect(codec)
        view = ModelView(
            name=f"models/{model_name}",
            state=ModelState.READY,
            fingerprint=facts.fingerprint,
            context_tokens=facts.context_tokens,
            vocab_size=facts.vocab_size,
            eos_token_ids=tuple(sorted(codec.eos_ids)),
            vision=facts.preparer is not None,
            trimmable=facts.layout.trimmable,
            tells_reasoning=channels.has_reasoning,
            tells_tool_calls=channels.has_tool_calls,
            call_form=call_form(codec, channels),
            bytes_per_token=facts.footprint.per_token,
            default_temperature=FALLBACK_TEMPERATURE if facts.temperature is None else facts.temperature,
            default_top_p=1.0 if facts.top_p is None else facts.top_p,
            default_top_k=facts.top_k or 0,
        )
        engine = MlxEngine(model, facts.layout, facts.footprint)
        del model  # the engine's alone: with the engine it goes

        def again() -> Engine:
            log.info("loading %s once more", model_name)
            model, now = load_model(folder)
            if now.fingerprint != facts.fingerprint:
                raise ModelHasChanged(f"{folder} is not what it was at the start: snapshots would not fit")
            return MlxEngine(model, facts.layout, facts.footprint)

        return Loaded(
            engine=engine,
            cache=cache,
            codec=codec,
            view=view,
            channels=channels,
            grammars=Grammars(
                codec,
                channels,
                FormLimits(
                    form_seconds=config.form_seconds,
                    form_bytes=config.form_bytes,
                    mask_seconds=config.mask_seconds,
                ),
            ),
            again=again,
            preparer=facts.preparer,
            uploads=uploads,
        )

    return load


class ModelHasChanged(Exception):
    """The model's files are others than at the start of the process."""


class CannotStart(Exception):
    """Something that the settings ask for cannot be had; the text says what."""


async def run(config: Config, folder: Path, model_name: str, ready: Callable[[Sequence[str]], None]) -> int:
    """Serves until a signal ends it. `ready` is told each address; the model is loaded behind. Returns the exit code.

    Raises AccessUnusable before anything else if certificates or tokens cannot be used, then StoreUnusable if there is
    an exchange key or a durable store and it cannot be read or opened; CannotStart if metrics or the inspector have no
    address to be at, TracesUnavailable without what makes traces.
    """
    before = set(threading.enumerate())
    pool = ThreadPoolExecutor(thread_name_prefix="side")
    asyncio.get_running_loop().set_default_executor(pool)
    access = Access(config)
    exchange_key = ExchangeKey(read_key_file(config.exchange_key)) if config.exchange_key is not None else None
    durable: OpenStore | None = None
    if config.store_dir is not None:
        durable = open_store(config.store_dir, KeySource(file=config.key_file, command=config.key_command))
    tracer = otlp_tracer() if config.traces == "otlp" else NoTracer()
    try:
        core = Core(config, model_name, loader(config, folder, model_name, durable), durable, tracer, exchange_key)
        await core.start()
        metrics: MetricsServer | None = None
        inspector: Inspector | None = None
        try:
            metrics = await _metrics(core, config, model_name)
            inspector = await _inspector(config, access)
            inner = inspector.door if inspector is not None else None
            code = await serve(core, config, ready=ready, begin=core.load, access=access, inner=inner)
        finally:
            if inspector is not None:
                await inspector.close()
            if metrics is not None:
                await metrics.close()
            await core.close()
    finally:
        await asyncio.to_thread(tracer.close)
        if durable is not None:
            durable.close()
    pool.shutdown(wait=False, cancel_futures=True)
    if core.hangs or not await _threads_end(before, END_SECONDS):
        # The interpreter would wait for them, or take what they work on from under them.
        os._exit(code)
    return code


async def _threads_end(before: set[threading.Thread], within: float) -> bool:
    """Whether every thread since `before` that the interpreter would wait for has ended, or does so in time."""
    until = time.monotonic() + within
    while left := [each.name for each in set(threading.enumerate()) - before if not each.daemon]:
        if time.monotonic() >= until:
            log.warning("the process ends without %s, which still work", ", ".join(left))
            return False
        await asyncio.sleep(0.02)
    return True


async def _metrics(core: Core, config: Config, model_name: str) -> MetricsServer | None:
    """The metrics' listener, if there is to be one."""
    if not config.metrics:
        return None
    from service.metrics.collector import CONTENT_TYPE, Metrics

    metrics = Metrics(
        core.meter,
        core.totals,
        core.stats,
        version=core.server().version,
        model=model_name,
        max_batch=config.max_batch,
        alive=core.engine_alive,
        watches=core.watches,
        ended=core.snapshots_ended,
    )
    server = MetricsServer(metrics.page, CONTENT_TYPE)
    host, port = split_page_address("metrics", config.metrics)
    try:
        address = await server.start(host, port)
    except OSError as error:
        raise CannotStart(f"cannot listen on {config.metrics} for metrics: {error.strerror}") from error
    if not ipaddress.ip_address(host).is_loopback:
        log.warning("metrics are open to whoever reaches %s; they hold numbers, and no names or texts", address)
    log.info("metrics at http://%s/metrics", address)
    return server


async def _inspector(config: Config, access: Access) -> Inspector | None:
    """The inspector's listener, if there is to be one."""
    if not config.inspector:
        return None
    try:
        from service.inspector.inspector import Inspector
    except ImportError as error:
        raise CannotStart(f"the inspector needs the inspector extra: {install('inspector')} ({error.name})") from None
    host, port = split_page_address("inspector", config.inspector)
    inspector = Inspector(
        context=access.tls.context if access.tls is not None else None,
        names=access.tls.names if access.tls is not None else tuple,
    )
    try:
        address = await inspector.start(host, port)
    except OSError as error:
        raise CannotStart(f"cannot listen on {config.inspector} for the inspector: {error.strerror}") from error
    log.info("inspector at %s", address)
    return inspector


def main(config: Config, folder: Path, model_name: str, ready: Callable[[Sequence[str]], None]) -> int:
    return asyncio.run(run(config, folder, model_name, ready))
