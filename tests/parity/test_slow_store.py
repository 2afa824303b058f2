"""A store that does not answer in the time that a request waits for it: what it has is computed, exactly as if it were
missing, and neither stored again nor waited for by anybody else."""

import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from cacheblend.core.load import budget
from cacheblend.core.names import BlockName, state_name
from cacheblend.core.plan.blocks import BlockEntry
from cacheblend.core.plan.plan import Source
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.selectors import NoRows
from cacheblend.engines.hf import SamplingParams, prefiller
from cacheblend.store import MemoryStore
from families import tiny_model
from parity.scenes import QUESTION, RAG, A, B, C, assert_as_reference, open_engine, run
from parity.test_hybrids import ONE_PIECE, assert_full
from parity.test_lost_blocks import SELECTORS, TOLERANCE
from reference import blend

TIMEOUT_S = 0.25
SLOW = "s3"


class HangingStore(MemoryStore):
    """Memory, of which some blocks lie in a tier of their own, whose reads hang from some layer on until it is let go.

    Attributes:
        slow: the blocks of that tier.
        layer: the first that it does not read; None: it reads all.
        finds: whether look-ups hang, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.slow: set[BlockName] = set()
        self.layer: int | None = None
        self.finds, self.gate = False, threading.Event()
        self.asked = self.hanging = 0

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        self.asked += 1
        if self.finds:
            self._hang()
        found = super().find(names)
        return [e and replace(e, tier=SLOW) if n in self.slow else e for n, e in zip(names, found, strict=True)]

    def read_layers(self, names: Sequence[BlockName], layers: range, heads=None, memory=None):
        if self.layer is not None and layers[-1] >= self.layer and self.slow.intersection(names):
            self._hang()
        return super().read_layers(names, layers, heads, memory)

    def _hang(self) -> None:
        self.hanging += 1
        self.gate.wait()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingStore]:
    monkeypatch.setattr(prefiller, "CLOSE_S", 0.05)
    monkeypatch.setattr(budget, "PAUSE_S", 0.0)  # each request asks the store
    opened = HangingStore()
    yield opened
    opened.gate.set()


def spans_of(engine, *sources: Source):
    return [span for span in engine.runtime.planner.plan(RAG, engine.store).spans if span.source in sources]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("seed", range(6))
def test_what_a_slow_tier_has_is_computed_as_if_it_were_missing(family: str, seed: int, store: HangingStore) -> None:
    draw = random.Random(f"{family} {seed}")
    model, name = tiny_model(family), draw.choice(sorted(SELECTORS))
    settings = {"load_timeout_s": TIMEOUT_S, "read_ahead": draw.choice([0, 2, 8])}
    with open_engine(model, store=store, **settings) as engine:
        loaded = spans_of(engine, Source.LOADED)
        slow = draw.sample(loaded, draw.randint(1, len(loaded)))
        store.slow, store.layer = {span.name for span in slow}, draw.randint(0, 3)
        outcome = run(engine, RAG, SELECTORS[name])
        report = outcome.report
        lost = [row for span in slow for row in range(span.start, span.stop)]
        assert (len(report.load_timeouts), report.fallbacks) == (1, [])
        assert f"from {SLOW} takes longer than the 0.25 s allowed (load_timeout_s)" in report.load_timeouts[0]
        assert (report.missed_tokens, report.left_out_tokens) == (0, len(lost))
        assert report.wait_s > TIMEOUT_S / 2  # in the pass that was given up
        assert report.plan_s + report.wait_s + report.compute_s <= report.ttft_s
        assert not outcome.result.plan.missed_chunks()  # they are held: nothing is stored again
        assert_as_reference(outcome, blend(model, RAG, SELECTORS[name], missing=sorted(lost)), TOLERANCE)
        store.layer = None
        store.gate.set()
        assert engine.prefill(RAG).report.hit_tokens[SLOW] == len(lost)


def test_a_store_that_hangs_takes_no_more_threads_than_there_are(store: HangingStore) -> None:
    others = set(threading.enumerate())  # of engines that other tests left open
    with open_engine(tiny_model("llama"), store=store, load_timeout_s=0.01) as engine:
        store.slow = {span.name for span in spans_of(engine, Source.LOADED)}
        store.layer = 1
        for number in range(3 * prefiller.THREADS):
            store.finds = number % 2 == 0
            report = engine.generate(RAG, SamplingParams(max_new_tokens=1)).report
            assert report.load_timeouts and not report.hit_tokens.get(SLOW)
        began = set(threading.enumerate()) - others
        readers = [each for each in began if each.name.startswith("cacheblend-reader")]
        assert store.hanging <= len(readers) <= prefiller.THREADS
    # closing the engine does not wait for them


@pytest.mark.parametrize("is_timed", [False, True])
def test_by_default_a_request_waits_as_long_as_computing_what_is_stored_takes(
    store: HangingStore, monkeypatch: pytest.MonkeyPatch, is_timed: bool
) -> None:
    """By the pace of the prompts before, or measured now; not measured as long as the store is quick."""
    monkeypatch.setattr(budget, "LEAST_S", 0.01)
    asked: list[int] = []
    with open_engine(tiny_model("llama"), store=store, load_timeout_s=None) as engine:
        model, real = engine.runtime.prefiller, engine.runtime.prefiller._compute_s

        def compute_s(tokens: int, planner: object) -> float:
            asked.append(tokens)
            return min(0.02, real(tokens, planner))  # type: ignore[arg-type]

        monkeypatch.setattr(model, "_compute_s", compute_s)
        monkeypatch.setattr(budget, "LEAST_S", 60.0)
        if is_timed:
            engine.prefill(RAG)
            assert not asked  # a store that is quick needs no measure
        assert (model._pace.seconds(1) is not None) == is_timed
        monkeypatch.setattr(budget, "LEAST_S", 0.01)
        loaded = spans_of(engine, Source.LOADED)
        store.slow, store.layer = {span.name for span in loaded}, 0
        report = engine.prefill(RAG).report
        assert report.load_timeouts and report.left_out_tokens == len(A) + len(B) + len(C)
        assert len(A) + len(B) + len(C) in asked
        assert model._pace.seconds(1) is not None


def test_waiting_for_ever_can_be_asked_for(store: HangingStore) -> None:
    with open_engine(tiny_model("llama"), store=store, load_timeout_s=float("inf")) as engine:
        store.slow = {span.name for span in spans_of(engine, Source.LOADED)}
        store.layer = 1
        threading.Timer(0.3, store.gate.set).start()
        report = engine.prefill(RAG).report
        assert not report.load_timeouts and report.hit_tokens[SLOW] == len(A) + len(B) + len(C)


@pytest.mark.parametrize("family", ONE_PIECE)
def test_states_that_do_not_come_are_computed(family: str, store: HangingStore) -> None:
    """Of a model with recurrent layers, whose prefill goes on from a snapshot that lies in the store."""
    prompt = Prompt.of([A, QUESTION])
    with open_engine(tiny_model(family), [A], store=store, load_timeout_s=TIMEOUT_S) as engine:
        spans = engine.runtime.planner.plan(prompt, store).spans
        store.slow, store.layer = {state_name(span.name) for span in spans}, 0
        outcome = run(engine, prompt, NoRows())
        report = outcome.report
        assert (len(report.load_timeouts), report.fallbacks) == (1, [])
        assert report.load_timeouts[0].startswith("reading states takes longer")
        assert report.hit_tokens["prefix"] == report.missed_tokens == 0
        assert_full(outcome, engine, prompt)
        store.layer = None
        store.gate.set()
        assert run(engine, prompt, NoRows()).report.hit_tokens["prefix"] == len(A)


def test_what_passes_between_two_steps_is_no_computing() -> None:
    with open_engine(tiny_model("llama")) as engine, engine.runtime.open_prefill(RAG) as prefill:
        paused, done = 0.0, False
        while not done:
            done = prefill.advance()
            began = time.perf_counter()
            time.sleep(0.02)
            paused += time.perf_counter() - began
        report = prefill.result().report
        assert report.plan_s + report.wait_s + report.compute_s <= report.ttft_s - paused
