"""Three figures of one engine: what a slow store costs others, look-ups of a request, equal prompts at once."""

import functools
import gc
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lab.faults.engine import LAYERS, PATIENT_S, Engine, Request, Texts, joined

READ_S = 1.0
"""How long a slow store takes to read a layer."""

ROUNDS, ROUND_S = 3, 9.0
CHUNKS = 20
EQUAL = 8
_BLOCK_SIZE = 32


def stall(engine: Engine, seed: int) -> dict[str, Any]:
    """Engine steps of a plain request that decodes while another's reads take `READ_S` a layer, and while they do not.

    Both kinds of rounds take equally long, so that their longest steps are of as many.

    Returns:
        `stall_ms`: the longest step with slow reads less that without, the median over rounds; `longest_ms` of each.
    """
    texts = Texts(seed)
    _fill(engine, texts)
    _decode_beside(engine, texts, "warm-up", 1.0)
    longest: dict[str, list[float]] = {"fast": [], "slow": []}
    for number in range(ROUNDS):
        longest["fast"].append(_decode_beside(engine, texts, f"fast-{number}", ROUND_S))
        engine.arm({"place": "store read", "times": 10_000, "sleep_s": READ_S, "until_disarmed": True})
        longest["slow"].append(_decode_beside(engine, texts, f"slow-{number}", ROUND_S))
        if not engine.disarm():
            raise RuntimeError("no read of the store was slowed down: the measurement shows nothing")
    differences = [slow - fast for fast, slow in zip(longest["fast"], longest["slow"], strict=True)]
    return {"stall_ms": max(0.0, statistics.median(differences)), "longest_ms": longest}


def _decode_beside(engine: Engine, texts: Texts, name: str, seconds: float) -> float:
    """The longest step in ms, from the arrival of a blended request on."""
    engine.forget()
    asked = texts.asked(texts.ids(40), 4)
    engine.add(Request(f"{name}-plain", texts.ids(40), (), 7000))
    for _ in range(20):
        engine.step()
    gc.collect()
    engine.add(Request(f"{name}-blend", asked.ids, asked.spans, 2))
    longest, end = 0.0, time.monotonic() + seconds
    while (before := time.monotonic()) < end:
        engine.step()
        longest = max(longest, time.monotonic() - before)
    for kind in ("plain", "blend"):
        engine.abort(f"{name}-{kind}")
    while engine.is_busy:
        engine.step()
    return 1e3 * longest


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


MEASURES: dict[str, Callable[[Engine, int], dict[str, Any]]] = {"stall": stall, "lookups": lookups, "equal": equal}
"""The measurements, by the campaign's name."""


def run(model: Path, store: Path, seed: int, measures: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Some of the measurements, in one engine; each as ``{name: what it returns}``."""
    extra = {"store": f"file://{store}", "recompute_ratio": 0.15, "refresh_s": 3600, "lookup_timeout_s": PATIENT_S}
    options: dict[str, Any] = {"block_size": _BLOCK_SIZE, "num_gpu_blocks_override": 500, "max_model_len": 8192}
    engine = Engine(model, extra, enable_prefix_caching=True, **options)
    for name in measures:
        yield {"begin": name}
        yield {name: MEASURES[name](engine, seed)}
