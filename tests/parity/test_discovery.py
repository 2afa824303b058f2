"""Text that recurs is reused by itself, and no history of requests changes an answer at r = 1, or stores another KV
than a plain prefill's.

Situations: passages of several tenants in any order, marked by some clients and not by others, cut short, with text
between; requests one at a time and at once; a store that is small, and one that others fill; chunks that are deleted;
runs longer than the context leaves room for; clients whose text must not be kept; engines with discovery off, without
capture, with the anchor "system". Too many runs while a chunk is pinned, is a document's, was marked by a client, or is
nobody's; runs that were used and are seen no more; weights that change while a request is being watched; a store that
hangs.
"""

import random
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import pytest

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.load.capture import ChunkJob, manifest_of
from cacheblend.core.names import BlockName
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.engines.chunk_index import ChunkListing
from cacheblend.engines.discovery import Discovery
from cacheblend.engines.hf import BlendEngine, SamplingParams
from cacheblend.engines.hf.scheduler import Limits, Scheduler
from cacheblend.engines.hf.tickets import Ask, DoneEvent, Event
from cacheblend.store import MemoryStore
from cacheblend.store.documents import DocumentRecord
from campaign import seeds, share
from families import VOCAB, tiny_model
from parity.scenes import greedy
from poison import Tally, WitnessMemory, Written, compare, names_in
from reference import plain_kv

BOS, ANSWER = 1, SamplingParams(max_new_tokens=3, temperature=0, ignore_eos=True)
FAMILY = "llama"


def open_engine(store: Any = None, **config: Any) -> BlendEngine:
    settings = BlendConfig.of({"anchor": "bos", "block_size": 32} | config)
    return BlendEngine(
        tiny_model(FAMILY),  # type: ignore[arg-type]
        store=store or MemoryStore(1 << 28),
        config=settings,
        bos_id=BOS,
        fingerprint="weights",
    )


@pytest.fixture
def engine() -> Iterator[BlendEngine]:
    with open_engine() as opened:
        yield opened


def ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=count)


A, B, C = ids(1, 90), ids(2, 120), ids(3, 70)
EVICTED = ids(4, 70)  # which is still listed


def ask(engine: BlendEngine, *parts: list[int], ratio: float | None = None) -> Any:
    """The report of a request without any mark, after what it is worth has been learnt."""
    answer = engine.generate(Prompt.of([text([BOS, *chain(*parts)])]), ANSWER, ratio=ratio)
    assert engine.flush(60)
    return answer.report


def full(engine: BlendEngine, prompt: Prompt) -> list[int]:
    return greedy(engine.model, prompt, ANSWER.max_new_tokens)


def test_text_that_recurs_is_reused_at_its_third_sighting(engine: BlendEngine) -> None:
    assert ask(engine, ids(10, 5), A, B, ids(11, 9)).hit_tokens["memory"] == 0
    assert ask(engine, ids(12, 7), B, A, ids(13, 9)).hit_tokens["memory"] == 0
    third = ask(engine, ids(14, 3), A, ids(15, 6), B, ids(16, 9))
    assert third.hit_tokens["memory"] == len(A) + len(B) and third.recomputed_tokens < len(A)
    found = engine.runtime.discovery.figures if engine.runtime.discovery else None
    assert found is not None and (found.runs, found.stored_tokens, found.hit_tokens) == (2, 210, 210)
    assert found.wasted_tokens == 0 and found.unwatched == 0


def test_a_used_run_that_is_split_still_counts_what_is_loaded_from_it(engine: BlendEngine) -> None:
    for seed in (10, 20, 30):  # A B recurs as one run, and is loaded
        ask(engine, ids(seed, 5), A, B, ids(seed + 1, 9))
    loaded = len(A) + len(B)
    for seed, part in ((40, A), (50, B), (60, A), (70, [*A, *ids(80, 6), *B])):  # the run is split, its chunk stays
        loaded += ask(engine, ids(seed, 5), part, ids(seed + 1, 9)).hit_tokens["memory"]
    assert engine.runtime.discovery is not None and engine.runtime.discovery.figures.hit_tokens == loaded > 4 * len(A)
    assert engine.runtime.discovery.figures.stored_tokens == len(A) + len(B)  # the parts are loaded from it


def test_evicted_runs_and_parts_of_a_chunk_that_is_gone_are_stored_again(engine: BlendEngine) -> None:
    for seed, part in ((10, [*A, *B]), (20, [*A, *B]), (30, [*A, *B]), (40, A), (50, C), (60, C)):
        ask(engine, ids(seed, 5), part, ids(seed + 1, 9))
    for name in names_in(engine.store):
        engine.store.delete(name)  # type: ignore[arg-type]
    for part in (A, C):
        assert ask(engine, ids(70 + len(part), 5), part, ids(170, 9)).hit_tokens["memory"] == 0
        assert ask(engine, ids(270 + len(part), 5), part, ids(370, 9)).hit_tokens["memory"] == len(part)
    stored = 2 * len(A) + len(B) + 2 * len(C)
    assert engine.runtime.discovery is not None and engine.runtime.discovery.figures.stored_tokens == stored


def test_marked_chunks_go_first_and_are_found_where_nobody_marks_them(engine: BlendEngine) -> None:
    engine.generate(Prompt.of([text([BOS]), chunk(C), text(ids(10, 5))]), ANSWER)
    assert engine.flush(60)
    assert ask(engine, ids(11, 8), C, ids(12, 5)).hit_tokens["memory"] == len(C)
    for seed in (10, 20, 30):
        ask(engine, ids(seed, 5), A, B, ids(seed + 1, 9))
    marked = Prompt.of([text([BOS]), chunk([*A[40:], *B[:50]]), text([*A, *ids(40, 9)])])
    report = engine.generate(marked, ANSWER).report
    assert report.missed_tokens == 100 and report.hit_tokens["memory"] == len(A)


@pytest.mark.parametrize(
    ("sent", "near"),
    [
        (A, 0),  # found
        ([*ids(20, 6), *A], 90),  # a title in front
        (A[1:], 89),  # a blank stripped
        ([*A[:-1], 7, 7], 25),  # another end: two blocks of 32 are loaded
        ([*A, *B], 26 + 120),  # a document of two chunks as one passage
        (ids(21, 100), 0),
        (EVICTED, 0),
    ],
)
def test_a_missed_passage_that_is_stored_with_another_beginning_or_end_is_counted(
    engine: BlendEngine, sent: list[int], near: int
) -> None:
    engine.warm([chunk(A), chunk(B), chunk(EVICTED)])
    engine.runtime.discovery.listing.prepare(engine.runtime.planner.root).result()  # type: ignore[union-attr]
    gone = next(each for each in engine.store.manifests() if each.token_ids.tolist() == EVICTED)
    for name in gone.block_names:
        engine.store.delete(name)
    prompt = Prompt.of([text([BOS, *ids(23, 4)]), chunk(sent), text(ids(24, 5))])
    report = engine.generate(prompt, ANSWER).report
    assert report.near_miss_tokens == near <= report.missed_tokens


def test_near_misses_tell_nothing_of_another_tenants_text_and_count_each_place_once(engine: BlendEngine) -> None:
    """One who guesses at another's passages learns nothing; a passage that stands twice is missed, and told, twice."""
    engine.warm([chunk(A)], tenant="a")
    listing, told = engine.runtime.discovery.listing, dict[str, int]()  # type: ignore[union-attr]
    titled = [*ids(20, 6), *A]
    prompt = Prompt.of([text([BOS]), chunk(titled), text(ids(24, 3)), chunk(titled), text(ids(25, 5))])
    for tenant in ("a", "b", ""):
        listing.prepare(engine.runtime.planner_of(tenant).root).result()  # type: ignore[union-attr]
        with engine.runtime.open_prefill(prompt, tenant=tenant) as prefill:
            result = prefill.run()
        engine.runtime.store_missed(result, tenant, may_keep=lambda tokens: False)
        told[tenant] = result.report.near_miss_tokens
        assert told[tenant] <= result.report.missed_tokens == 2 * len(titled)
    assert told == {"a": 2 * len(A), "b": 0, "": 0}


def test_what_another_store_user_listed_is_found_after_the_list_is_read() -> None:
    store = MemoryStore(1 << 28)
    with open_engine(store) as first:
        first.warm([chunk(A)])
    with open_engine(store) as second:
        ask(second, ids(10, 5), B)  # while the list is read
        assert ask(second, ids(11, 6), A, ids(12, 5)).hit_tokens["memory"] == len(A)


def test_one_tenant_learns_nothing_from_another_and_what_must_not_be_kept_is_not(engine: BlendEngine) -> None:
    def prompt(number: int, run: list[int]) -> Prompt:
        return Prompt.of([text([BOS, *ids(number, 5), *run, *ids(50 + number, 6)])])

    for number, tenant in enumerate(("t", "u", "")):
        serve(engine, [Ask(prompt(number, A), ANSWER, tenant=tenant)])
    assert engine.runtime.discovery is not None and engine.runtime.discovery.figures.runs == 0
    serve(engine, [Ask(prompt(9, A), ANSWER, tenant="u")])
    assert engine.runtime.discovery.figures.runs == 1
    for number in range(20, 23):
        serve(engine, [Ask(prompt(number, C), ANSWER, may_keep=lambda tokens: False)])
    assert [m.root for m in engine.store.manifests()] == [engine.runtime.planner_of("u").root]
    assert engine.runtime.discovery.figures.stored_tokens == len(A)


def test_what_prompts_begin_with_is_an_exact_prefix_at_the_third_sighting(engine: BlendEngine) -> None:
    system = ids(5, 100)
    for number in range(2):
        assert ask(engine, system, ids(20 + number, 40)).hit_tokens["prefix"] == 0
    third = Prompt.of([text([BOS, *system, *ids(30, 40)])])
    answer = engine.generate(third, ANSWER)
    assert answer.report.hit_tokens["prefix"] == 1 + 96 and answer.token_ids == full(engine, third)
    assert not engine.store.manifests()  # no chunk: a run that always stands at the beginning is none
    assert engine.store.stats().blocks == 1 + len(system) // 32  # and no text that was seen once


def test_nothing_is_learnt_where_it_is_off_and_limits_that_cannot_work_are_refused() -> None:
    settings: list[dict[str, Any]] = [{"discover": False}, {"anchor": "system"}, {"capture": False}]
    for off in settings:
        with open_engine(**off) as engine:
            for seed in (10, 20, 30):
                assert ask(engine, ids(seed, 5), A, ids(seed + 1, 5)).hit_tokens["memory"] == 0
            assert not engine.store.manifests()
    for name, wrong in (("min_run_tokens", 62), ("watch_tokens", 63)):
        with pytest.raises(InvalidInputError, match=f"{name}.*{wrong}"):
            BlendConfig.of({name: wrong})


@pytest.mark.may_fail("discovery")
def test_a_watcher_that_fails_affects_no_answer(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("for a test")

    assert engine.runtime.discovery is not None
    monkeypatch.setattr(engine.runtime.discovery._recurrences, "see", fail)
    assert ask(engine, A, B).prompt_tokens == 1 + len(A) + len(B)
    assert "its answer is not affected" in caplog.text


def serve(engine: BlendEngine, asks: Sequence[Ask]) -> list[Any]:
    """Their reports, asked at once."""
    scheduler, done = Scheduler(engine.runtime, Limits(active=4, catch_up_s=0.0)), threading.Event()
    reports: dict[int, Any] = {}

    def listener(number: int) -> Any:
        def hear(event: Event) -> None:
            if isinstance(event, DoneEvent):
                assert event.error is None
                reports[number] = event.report
                if len(reports) == len(asks):
                    done.set()

        return hear

    try:
        for number, each in enumerate(asks):
            scheduler.submit(each, listener(number))
        assert done.wait(60)
    finally:
        scheduler.close()
    assert engine.flush(60)
    return [reports[number] for number in range(len(asks))]


class History:
    """Random requests on one engine, and the comparison afterwards."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.pool = [ids(1000 * seed + number, rng.randint(40, 150)) for number in range(4)]
        size = rng.choice([1 << 28, 1 << 28, 1 << 19])
        self.store = WitnessMemory(size)
        self.engine = open_engine(self.store, recompute_ratio=1.0, block_size=rng.choice([8, 32, 256]))
        self.tally = Tally(histories=1)

    def prompt(self) -> Prompt:
        rng = self.rng
        parts = [text([BOS])]
        for _ in range(rng.randint(1, 3)):
            passage = rng.choice(self.pool)[rng.choice([0, 0, 0, 5, 64]) :]
            parts.append(text(ids(rng.randrange(1 << 30), rng.randint(0, 9))))
            if passage:
                parts.append(chunk(passage) if rng.random() < 0.2 else text(passage))
        parts.append(text(ids(rng.randrange(1 << 30), rng.randint(1, 9))))
        joined: list[Any] = []
        for part in parts:  # without a mark a text is one segment
            if joined and not joined[-1].is_chunk and not part.is_chunk:
                joined[-1] = text([*joined[-1].token_ids.tolist(), *part.token_ids.tolist()])
            else:
                joined.append(part)
        return Prompt.of(joined)

    def play(self) -> Tally:
        tenants = ["", "t"]
        with self.engine as engine:
            for _ in range(self.rng.randint(4, 9)):
                if self.rng.random() < 0.3:
                    prompts = [self.prompt() for _ in range(3)]
                    serve(engine, [Ask(each, ANSWER, tenant=self.rng.choice(tenants)) for each in prompts])
                else:
                    prompt = self.prompt()
                    answer = engine.generate(prompt, ANSWER, ratio=1.0)
                    assert answer.token_ids == full(engine, prompt)
                    self.tally.meet("hit tokens", sum(answer.report.hit_tokens.values()))
                    assert engine.flush(60)
                if self.rng.random() < 0.2:
                    names = sorted(names_in(self.store))
                    for name in self.rng.sample(names, min(2, len(names))):
                        self.store.delete(name)  # type: ignore[arg-type]
            assert engine.flush(60) and engine.runtime.background.given_up["failed"] == 0
            assert engine.runtime.discovery is not None
            self.tally.meet("runs", engine.runtime.discovery.figures.runs)
            roots = {bytes(engine.runtime.planner_of(tenant).root): tenant for tenant in tenants}
            written: dict[bytes, Written] = getattr(self.store, "written", {})
            names = names_in(self.store)
            self.tally.add(
                compare(self.store, names, written, roots, lambda root, seen: plain_kv(engine.model, seen)[1])
            )
        return self.tally


def test_no_history_gives_another_answer_or_stores_another_kv() -> None:
    tally = Tally()
    for seed in seeds(share(24), known=24):
        tally.add(History(seed).play())
    assert tally.poisoned == 0, tally.what[:5]
    # by the three that are always drawn
    assert tally.met["runs"] >= 4 and tally.met["hit tokens"] > 500 and tally.blocks > 40


def test_a_closed_engine_is_watched_no_more_and_nobody_waits_for_it(engine: BlendEngine) -> None:
    assert engine.runtime.discovery is not None
    request = engine.start(Prompt.of([text([BOS, *A, *B])]), ANSWER)
    engine.close(wait=False)
    request.step()
    request.finish()
    assert (
        engine.runtime.discovery.flush(1)
        and engine.runtime.known_in(Prompt.of([text([BOS, *A])]), engine.runtime.follow()) is not None
    )


# ---- what it takes off the store, and what it remembers -------------------------------------------------------------


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
            assert engine.flush(60) and engine.runtime.discovery is not None
            assert (engine.runtime.discovery.figures.hit_tokens, engine.runtime.discovery.figures.wasted_tokens) == (
                len(A),
                0,
            )
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
        assert engine.runtime.discovery is not None and engine.runtime.discovery.figures.hit_tokens >= 4 * 150
        assert len(engine.runtime.discovery._stored) * 150 <= FEW
        assert len(list(engine.store.manifests())) > FEW // 150  # used ones stay until the store is full


def test_nothing_that_was_asked_before_a_reset_is_wanted_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be computed with new weights, and stored under the names of the old ones."""
    store = MemoryStore(1 << 20)
    root = open_engine(store).runtime.planner_of("").root
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
    assert discovery.flush(30) and discovery.take() is None and not discovery.has_work
    for seed in (30, 40):
        discovery.watch(root, Prompt.of([text([*ids(seed, 5), *A, *ids(seed + 1, 9)])]), None, "new weights")
    assert discovery.flush(30)
    wanted = discovery.take()
    assert wanted is not None
    run, asker = wanted
    assert (asker, run.sightings) == ("new weights", 2)
    discovery.close()


def test_a_store_that_hangs_keeps_no_idle_engine_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked to take off what is given up; vLLM steps, without a request, for as long as there is work."""
    store, hangs, let_go = MemoryStore(1 << 20), threading.Event(), threading.Event()
    planner = open_engine(store).runtime.planner_of("")
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
        while (wanted := discovery.take()) is not None:
            discovery.stored(wanted[0], manifest_of(ChunkJob((), wanted[0].token_ids), planner, ""))
    assert hangs.wait(30) and discovery.has_work  # it may answer soon
    monkeypatch.setattr("cacheblend.engines.discovery.time.monotonic", lambda: moment + 3600)
    while discovery.take() is not None:
        pass
    assert not discovery.has_work
    see(A, 9000)
    assert not discovery.has_work  # nobody gets any further
    let_go.set()
    assert discovery.flush(30)
    see(A, 9100)
    assert discovery.has_work and discovery.flush(30)
    discovery.close()
