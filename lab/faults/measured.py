"""Three figures of one engine: who holds up others, look-ups of a request, equal prompts at once."""

import functools
import gc
import math
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lab.faults.engine import LAYERS, PATIENT_S, Engine, Request, Texts, joined

ROUNDS = 3
BEGIN_S, MOST_S = 1.0, 20.0  # of a round: until the blendable request comes, and until it has its first token, at most
OTHERS = 8  # as many prompts as may wait for the store
LISTED, TENANTS = 20_000, 300
CHUNKS = 20
EQUAL = 8
_BLOCK_SIZE = 32


def held_up(engine: Engine, seed: int) -> dict[str, Any]:
    """What others wait for beside `CASES`: a plain request that decodes, for its next token, and a blendable one that
    comes meanwhile, for its first.

    Returns:
        `held_up_ms`, `held_up_blend_ms`: by how much the longest step, and the blendable request's wait, are longer
        in the worst case than in the one that computes the same of others' (`BESIDE`), medians over rounds; `cases`:
        both of each round, by case.
    """
    texts = Texts(seed)
    _fill(engine, texts)
    for name in (QUIET, PLAIN):
        _beside(engine, texts, f"warm-up {name}", CASES[name])
    cases: dict[str, dict[str, list[float]]] = {name: {"step_ms": [], "blend_ms": []} for name in CASES}
    for number in range(ROUNDS):
        for name, case in CASES.items():
            for key, value in _beside(engine, texts, f"{name}-{number}", case).items():
                cases[name][key].append(value)

    def longer(key: str) -> float:
        medians = {name: statistics.median(each[key]) for name, each in cases.items()}
        return max(medians[name] - medians[beside] for name, beside in BESIDE.items())

    return {"held_up_ms": longer("step_ms"), "held_up_blend_ms": longer("blend_ms"), "cases": cases}


def _beside(engine: Engine, texts: Texts, name: str, case: "Case") -> dict[str, float]:
    """The longest step, and what the blendable request waits for its first token, in ms."""
    engine.forget()
    engine.add(Request(f"{name}-plain", texts.ids(40), (), 7000))
    for _ in range(20):
        engine.step()
    gc.collect()
    longest, waited, came = 0.0, math.inf, math.inf
    with case(engine, texts) as beside:
        for other in beside:
            engine.add(replace(other, name=f"{name}-{other.name}"))
        began = before = time.monotonic()
        while waited == math.inf and before < began + MOST_S:
            if came == math.inf and before > began + BEGIN_S:
                asked, came = texts.asked(texts.ids(40), 4), before
                engine.add(Request(f"{name}-blend", asked.ids, None, 1))
            ended = engine.step()
            now = time.monotonic()
            longest, before = max(longest, now - before), now
            waited = now - came if f"{name}-blend" in ended else math.inf
        for request in ("plain", "blend", *(other.name for other in beside)):
            engine.abort(f"{name}-{request}")
    while engine.is_busy:
        engine.step()
    engine.settle()
    return {"step_ms": 1e3 * longest, "blend_ms": 1e3 * waited}


Case = Callable[[Engine, Texts], AbstractContextManager[Sequence[Request]]]
"""A context in which something holds up the requests that it gives, and may hold up others."""


def others(texts: Texts) -> list[Request]:
    """Requests with two stored chunks, and one that is not."""
    prompts = [joined(texts.ids(40), [*texts.rng.sample(texts.passages, 2), texts.ids(80)], ()) for _ in range(OTHERS)]
    return [Request(f"other-{n}", each.ids, each.spans) for n, each in enumerate(prompts)]


@contextmanager
def quiet(engine: Engine, texts: Texts) -> Iterator[Sequence[Request]]:
    yield ()


@contextmanager
def plain(engine: Engine, texts: Texts) -> Iterator[Sequence[Request]]:
    yield [replace(other, spans=()) for other in others(texts)]


@contextmanager
def hanging(place: str, engine: Engine, texts: Texts) -> Iterator[Sequence[Request]]:
    """`others`, which hang at a place of the store: the first ones that pass it."""
    engine.arm({"place": place, "times": OTHERS, "sleep_s": PATIENT_S, "until_disarmed": True})
    if place == "store list":
        engine.read_list()
    yield others(texts)
    if not engine.disarm():
        raise RuntimeError(f"nothing has passed {place!r}: the measurement shows nothing")


@contextmanager
def long_list(engine: Engine, texts: Texts) -> Iterator[Sequence[Request]]:
    """The store's list is read, and has `LISTED` chunks more than before."""
    from cacheblend.core.names import BlockName, as_token_ids
    from cacheblend.store.disk.store import DiskStore

    more = [(BlockName(texts.rng.randbytes(16)), as_token_ids(texts.ids(80))) for _ in range(LISTED)]
    real = DiskStore.manifests

    def manifests(store: DiskStore) -> Iterator[Any]:
        found = [*real(store)]
        yield from (*found, *(replace(found[0], chunk_id=name, token_ids=ids) for name, ids in more))

    with patch.object(DiskStore, "manifests", manifests):
        engine.read_list()
        yield ()
    engine.read_list()


@contextmanager
def tenants(engine: Engine, texts: Texts) -> Iterator[Sequence[Request]]:
    """`TENANTS` requests of as many tenants, which have stored nothing; vLLM computes them in a moment."""
    yield [Request(f"of-{n}", texts.ids(2), None, 1, salt=f"tenant {n} {texts.ids(4)}") for n in range(TENANTS)]


@contextmanager
def plain_tenants(engine: Engine, texts: Texts) -> Iterator[Sequence[Request]]:
    with tenants(engine, texts) as asked:
        yield [replace(each, spans=()) for each in asked]


QUIET, PLAIN, PLAIN_TENANTS = "nothing", "plain prompts", "plain tenants"
CASES: dict[str, Case] = {
    QUIET: quiet,
    PLAIN: plain,
    PLAIN_TENANTS: plain_tenants,
    "reads hang": partial(hanging, "store read"),
    "look-ups hang": partial(hanging, "store find"),
    "the list hangs": partial(hanging, "store list"),
    "writes hang": partial(hanging, "store write"),
    "a long list": long_list,
    "new tenants": tenants,
}
BESIDE = {
    "reads hang": QUIET,
    "look-ups hang": PLAIN,
    "the list hangs": PLAIN,
    "writes hang": PLAIN,
    "a long list": QUIET,
    "new tenants": PLAIN_TENANTS,
}
"""What others' requests compute in a case, without what holds them up: prompts whose reads hang compute nothing."""


def lookups(engine: Engine, seed: int) -> dict[str, Any]:
    """Look-ups in the store, from any thread, of a request with `CHUNKS` stored chunks.

    Returns:
        `lookups_per_request`: by spans or by content, the larger one; `calls` of each, by method.
    """
    texts = Texts(seed, CHUNKS, 80, 100)
    _fill(engine, texts)
    calls = {}
    for way in ("spans", "content"):
        engine.forget()
        asked = joined(texts.ids(9), texts.rng.sample(texts.passages, CHUNKS), texts.ids(9))
        with counted_lookups() as found:
            engine.ask([Request(way, asked.ids, asked.spans if way == "spans" else None, 2)])
            engine.settle()
            time.sleep(0.5)  # of threads
        calls[way] = dict(found)
    return {"lookups_per_request": max(sum(found.values()) for found in calls.values()), "calls": calls}


@contextmanager
def counted_lookups() -> Iterator[Counter[str]]:
    """Counts calls of a store's look-ups by method; a call inside of another counts as part of it."""
    from cacheblend.store.disk.store import DiskStore

    found: Counter[str] = Counter()
    inside = threading.local()

    def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(*args: Any, **options: Any) -> Any:
            if getattr(inside, "depth", 0):
                return real(*args, **options)
            found[name] += 1
            inside.depth = 1
            try:
                return real(*args, **options)
            finally:
                inside.depth = 0

        return call

    names = ("find", "held", "has_manifest", "manifests", "listing_stamp", "pinned")
    wrapped: dict[str, Any] = {name: counting(name, getattr(DiskStore, name)) for name in names}
    with patch.multiple(DiskStore, **wrapped):
        yield found


def equal(engine: Engine, seed: int) -> dict[str, Any]:
    """Row-layers of equal prompts at once, by those of one: `EQUAL` requests, and one request for as many answers.

    Counted are the plug-in's row-layers, and those that vLLM computes of a prompt beyond its last block, which plain
    equal prompts do not share either.

    Returns:
        `equal_prompts`: the larger one of the two; `row_layers` of each.
    """
    texts = Texts(seed, fewest=150, most=200)
    _fill(engine, texts)
    asked = [joined(texts.ids(40), texts.passages, texts.ids(12)) for _ in range(3)]
    one, copied, answers = (Request(f"equal-{n}", each.ids, each.spans, 1) for n, each in enumerate(asked))
    found = {
        "one": _row_layers(engine, [one]),
        "equal requests": _row_layers(engine, [replace(copied, name=f"copy-{n}") for n in range(EQUAL)]),
        "answers": _row_layers(engine, [replace(answers, choices=EQUAL)]),
    }
    most = max(found["equal requests"], found["answers"])
    return {"equal_prompts": most / found["one"], "row_layers": found}


def _row_layers(engine: Engine, requests: Sequence[Request]) -> float:
    engine.forget()
    before = engine.counters().get("row_layers", 0.0)
    own, real = Counter[str](), engine.scheduler.schedule  # tokens that vLLM computes itself, by request

    def schedule(*args: Any, **options: Any) -> Any:
        output = real(*args, **options)
        own.update(output.num_scheduled_tokens)
        return output

    with patch.object(engine.scheduler, "schedule", schedule):
        engine.ask(requests)
    blended = engine.counters().get("row_layers", 0.0) - before
    return blended + LAYERS * sum(max(0, count - _BLOCK_SIZE) for count in own.values())


def _fill(engine: Engine, texts: Texts) -> None:
    fill = texts.all_passages()
    engine.fill(fill.ids, fill.spans)
    time.sleep(0.5)  # the last captured chunks are listed in a thread
    engine.forget()


MEASURES: dict[str, Callable[[Engine, int], dict[str, Any]]] = {"held": held_up, "lookups": lookups, "equal": equal}
"""The measurements, by the campaign's name."""


def run(model: Path, store: Path, seed: int, measures: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Some of the measurements, in one engine; each as ``{name: what it returns}``."""
    extra = {"store": f"file://{store}", "recompute_ratio": 0.15, "refresh_s": 3600}
    options: dict[str, Any] = {"block_size": _BLOCK_SIZE, "num_gpu_blocks_override": 500, "max_model_len": 8192}
    engine = Engine(model, extra, enable_prefix_caching=True, **options)
    for name in measures:
        yield {"begin": name}
        with nullcontext() if name == "held" else engine.patient():
            yield {name: MEASURES[name](engine, seed)}
