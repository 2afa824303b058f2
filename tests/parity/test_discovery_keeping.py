"""What discovery takes off the store, and what it remembers.

Situations: too many runs while a chunk is pinned, is a document's, was marked by a client, or is nobody's; runs that
were used and are seen no more; weights that change while a request is being watched; a run that nobody saw again; a
store that hangs.
"""

import threading
import time
from typing import Any

import pytest

from cacheblend.core.load.capture import ChunkJob, manifest_of
from cacheblend.core.names import BlockName
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.engines.chunk_index import ChunkListing
from cacheblend.engines.discovery import Discovery
from cacheblend.engines.hf import BlendEngine
from cacheblend.store import MemoryStore
from cacheblend.store.documents import DocumentRecord
from parity.test_discovery import ANSWER, BOS, A, ask, ids, open_engine

FEW = 600
"""Ids of learnt runs that are kept: those of a few runs."""


def learn(engine: BlendEngine, run: list[int], seed: int, times: int = 2) -> None:
    for number in range(times):
        ask(engine, ids(seed + number, 5), run, ids(seed + number + 50, 9))


def crowd_out(engine: BlendEngine) -> None:
    """So many other runs are learnt that those before are given up."""
    for number in range(6):
        learn(engine, ids(1000 + number, 150), 2000 + 100 * number)


@pytest.mark.parametrize("keeper", ["pin", "document", "mark", "nobody"])
def test_an_unused_chunk_goes_unless_somebody_else_has_it(keeper: str) -> None:
    with open_engine(watch_tokens=FEW) as engine:
        learn(engine, A, 10)
        [stored] = engine.store.manifests()
        if keeper == "pin":
            engine.store.pin(stored.block_names)
        elif keeper == "document":
            record = DocumentRecord(stored.root, "c", "id", "digest", len(A), (stored.block_names,))
            engine.store.documents.put(record)
        elif keeper == "mark":
            marked = Prompt.of([text([BOS, *ids(30, 5)]), chunk(A), text(ids(31, 9))])
            assert engine.generate(marked, ANSWER).report.hit_tokens["memory"] == len(A)
            assert engine.flush(60) and engine.discovery is not None
            assert (engine.discovery.figures.hit_tokens, engine.discovery.figures.wasted_tokens) == (len(A), 0)
        crowd_out(engine)
        is_kept = keeper != "nobody"
        assert engine.store.has_manifest(stored.chunk_id) == is_kept
        assert engine.store.held(list(stored.block_names)) == [is_kept] * len(stored.block_names)
        hit = ask(engine, ids(40, 5), A, ids(41, 9)).hit_tokens["memory"]
        assert hit == (len(A) if is_kept else 0)


def test_runs_that_were_used_and_are_seen_no_more_are_not_remembered() -> None:
    with open_engine(watch_tokens=FEW) as engine:
        for number in range(8):
            learn(engine, ids(3000 + number, 150), 4000 + 100 * number, times=3)
        assert engine.discovery is not None and engine.discovery.figures.hit_tokens >= 4 * 150
        assert len(engine.discovery._stored) * 150 <= FEW
        assert len(list(engine.store.manifests())) > FEW // 150  # used ones stay until the store is full


def test_nothing_that_was_asked_before_a_reset_is_wanted_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be computed with new weights, and stored under the names of the old ones."""
    store = MemoryStore(1 << 20)
    root = open_engine(store).planner_of("").root
    discovery = Discovery[str](store, ChunkListing(store, None, 64, 30.0), 64, 1 << 16)
    see, is_watching, go_on = discovery._recurrences.see, threading.Event(), threading.Event()

    def slow(*what: Any) -> Any:
        is_watching.set()
        assert go_on.wait(30)
        return see(*what)

    monkeypatch.setattr(discovery._recurrences, "see", slow)
    for seed in (10, 20):
        discovery.watch(root, Prompt.of([text([*ids(seed, 5), *A, *ids(seed + 1, 9)])]), None, "old weights")
    assert is_watching.wait(30)
    discovery.reset()
    go_on.set()
    assert discovery.flush(30) and discovery.take(lambda run: True) is None and not discovery.has_work
    for seed in (30, 40):
        discovery.watch(root, Prompt.of([text([*ids(seed, 5), *A, *ids(seed + 1, 9)])]), None, "new weights")
    assert discovery.flush(30)
    wanted = discovery.take(lambda run: True)
    assert wanted is not None and (wanted.asker, wanted.run.sightings) == ("new weights", 2)
    discovery.close()


def test_a_store_that_hangs_keeps_no_idle_engine_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked to take off what is given up; vLLM steps, without a request, for as long as there is work."""
    store, hangs, let_go = MemoryStore(1 << 20), threading.Event(), threading.Event()
    planner = open_engine(store).planner_of("")
    discovery = Discovery[str](store, ChunkListing(store, None, 64, 30.0), 64, FEW)
    pinned, moment = store.pinned, time.monotonic()

    def slow() -> set[BlockName]:
        hangs.set()
        assert let_go.wait(60)
        return pinned()

    monkeypatch.setattr(store, "pinned", slow)

    def see(run: list[int], seed: int) -> None:
        discovery.watch(planner.root, Prompt.of([text([*ids(seed, 5), *run, *ids(seed + 1, 9)])]), None, "asker")

    for number in range(30):
        for seed in (100 * number, 100 * number + 50):
            see(ids(5000 + number, 150), seed)
            if not hangs.is_set() and not discovery.flush(0.2):
                break
        if hangs.is_set():
            break
        while (wanted := discovery.take(lambda run: True)) is not None:
            discovery.stored(wanted.run, manifest_of(ChunkJob((), wanted.run.token_ids), planner, ""))
    assert hangs.wait(30) and discovery.has_work  # it may answer soon
    monkeypatch.setattr("cacheblend.engines.discovery.time.monotonic", lambda: moment + 3600)
    while discovery.take(lambda run: True) is not None:
        pass
    assert not discovery.has_work
    see(A, 9000)
    assert not discovery.has_work  # nobody gets any further
    let_go.set()
    assert discovery.flush(30)
    see(A, 9100)
    assert discovery.has_work and discovery.flush(30)
    discovery.close()
