"""One row of the table: what came of one family. Owns building it in this process and how it crosses to another."""

from __future__ import annotations

import enum
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.families import families


class Outcome(enum.Enum):
    """The answers that a family can get."""

    OK = "OK"
    REFUSED = "refused"  # at load, by the layer's number, class and reason
    NOT_BUILT = "not built"
    DIFFERS = "differs"
    FAILED = "failed"  # the engine raised, the process crashed, or the time was up


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of one family."""

    name: str
    outcome: Outcome
    note: str = ""
    caches: str = ""  # classes, as the family makes them
    alone: str = ""  # why rows decode in one call each
    wrongs: tuple[str, ...] = ()  # the wrong restores that were tried on it
    seconds: float = field(default=0.0)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "outcome": self.outcome.value})

    @classmethod
    def from_json(cls, text: str) -> Verdict:
        values = json.loads(text)
        return cls(**{**values, "outcome": Outcome(values["outcome"]), "wrongs": tuple(values["wrongs"])})


def judge(name: str, build: Callable[[str], Any] = families.build, *, mutations: bool = True) -> Verdict:
    """Builds the family, on the engine thread, and runs the suite on it, here and now.

    `mutations`: the suite is then tried with wrong restores, and one that it does not see is a difference too.
    """
    began = time.monotonic()
    from service.engine import cpu

    cpu.prepare()
    from service.engine.layers import UnsupportedLayer
    from service.engine.loading import ModelFacts
    from service.engine.probe import probe
    from service.models import resolve
    from tests.engine.rig import Rig
    from tests.families.conformance import Colds, check, mutated
    from tests.families.watched import WatchedEngine

    found: dict[str, Any] = {"caches": "", "alone": ""}

    def load() -> tuple[object, ModelFacts]:
        model = build(name)
        found["caches"] = caches_of(model)
        probed = probe(model)
        found["alone"] = probed.layout.alone
        return model, ModelFacts(
            layout=probed.layout,
            fingerprint=name.encode().hex(),
            context_tokens=4096,
            vocab_size=512,
            footprint=probed.footprint,
            temperature=None,
            top_p=None,
            top_k=None,
        )

    def verdict(outcome: Outcome, note: str) -> Verdict:
        return Verdict(name=name, outcome=outcome, note=note, seconds=round(time.monotonic() - began, 1), **found)

    try:
        rig = Rig(resolve("tiny-llama"), load=load, engine=WatchedEngine)
    except UnsupportedLayer as error:
        return verdict(Outcome.REFUSED, str(error))
    except families.NotBuilt as error:
        return verdict(Outcome.NOT_BUILT, str(error))
    except Exception as error:  # a call that raises is a finding about the family, not about the suite
        return verdict(Outcome.FAILED, f"at load: {type(error).__name__}: {error}")
    try:
        colds: Colds = {}
        differences = [str(difference) for difference in check(rig, colds)]
        if mutations and not differences:
            answers = list(mutated(rig, colds))
            differences = [f"{a.mutation}: applied {a.applied}, seen {a.seen}" for a in answers if a.applied != a.seen]
            found["wrongs"] = tuple(str(answer.mutation) for answer in answers if answer.applied)
    except Exception as error:  # a call that raises is a finding about the family, not about the suite
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:200] or where.line
        return verdict(Outcome.FAILED, f"{type(error).__name__}: {text}")
    finally:
        rig.close()
    if differences:
        more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
        return verdict(Outcome.DIFFERS, differences[0] + more)
    return verdict(Outcome.OK, "")


def caches_of(model: object) -> str:
    """The distinct classes of the model's caches, in order."""
    from service.engine.upstream import CacheList, make_prompt_cache, qualified_name

    def text(cache: object) -> str:
        if isinstance(cache, CacheList):
            return f"CacheList({', '.join(text(member) for member in cache.caches)})"
        return qualified_name(cache)

    return ", ".join(dict.fromkeys(text(cache) for cache in make_prompt_cache(model)))
