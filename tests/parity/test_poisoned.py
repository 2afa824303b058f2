"""No history of requests makes a stored block differ from a plain prefill of its chain: the embedded engine."""

import copy
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import ModelChangedError, StoreError
from cacheblend.core.plan.plan import BlendPlan
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.engines import keeper
from cacheblend.engines.hf import BlendEngine, SamplingParams
from cacheblend.engines.hf.scheduler import Limits, Scheduler
from cacheblend.engines.hf.tickets import Ask, DoneEvent, Event, TokenEvent
from cacheblend.store import DiskStore, KVStore, MemoryStore, TieredStore
from campaign import seeds, share
from fake_adapters import add_adapter, disable, set_adapter
from families import VOCAB, tiny_model
from poison import (
    HISTORIES,
    KV,
    TOLERANCE,
    Hostile,
    Part,
    Tally,
    Witness,
    WitnessMemory,
    Written,
    compare,
    name_of,
    names_in,
)
from reference import plain_kv

COMMAND = "CACHEBLEND_HISTORIES=600 pytest tests/parity/test_poisoned.py"
FAMILIES = ["llama", "qwen3", "gemma3_text", "cohere2", "deepseek_v3"]
ADAPTERS = ["", "a", "b"]
TENANTS = ["", "t", "u"]
BOS = 1
BLOCK_SIZE = 8


class WitnessDisk(Witness, DiskStore):
    """In a folder."""


@cache
def adapted_model(family: str) -> Any:
    """With adapters a and b."""
    model: Any = copy.deepcopy(tiny_model(family))
    add_adapter(model, "a", seed=1)
    add_adapter(model, "b", seed=2)
    return model


def switch(model: Any, adapter: str) -> None:
    disable(model, not adapter)
    if adapter:
        set_adapter(model, adapter)


class History:
    """A random sequence of requests and other events on one engine, and the comparison afterwards."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = rng = random.Random(seed)
        self.tally = Tally(histories=1)
        self.family = FAMILIES[seed % len(FAMILIES)]
        self.model = adapted_model(self.family)
        switch(self.model, "")
        anchor = rng.choice(["none", "bos", "system"])
        config = BlendConfig(
            anchor=anchor,
            block_size=BLOCK_SIZE,
            tile_rows=rng.choice([8, 64]),
            recompute_ratio=rng.choice([0.0, 0.15, 0.5, 1.0]),
            selector=rng.choice(["hkvd", "random", "query", "head"]),
            capture_batch_tokens=rng.choice([64, 4096]),
            salt=rng.choice(["", "salt"]),
            codec=rng.choice(["raw", "raw", "raw", "raw", "int8"]),
        )
        self.store, self.witness = self._open_store(folder)
        self.prompts: list[Prompt] = []
        self.hostile = Hostile(rng, range(3, VOCAB), BLOCK_SIZE, most=120)
        self.engine = BlendEngine(
            self.model,
            store=self.store,
            config=config,
            bos_id=BOS if anchor == "bos" else None,
            fingerprint=f"weights of {self.family}",
        )

    def _open_store(self, folder: Path) -> tuple[KVStore, Any]:
        kind = self.rng.choice(["memory", "memory", "small memory", "disk", "small disk", "tiers"])
        self.tally.meet(kind)
        small = 12 * tiny_block_bytes(self.model)
        if kind in ("memory", "small memory"):
            memory = WitnessMemory(small if kind == "small memory" else 1 << 28)
            return memory, memory
        disk = WitnessDisk(folder, durable=False, max_bytes=2 * small if kind == "small disk" else 1 << 28)
        return (TieredStore(MemoryStore(small), disk) if kind == "tiers" else disk), disk

    # ---- what happens -----------------------------------------------------------------------------------

    def play(self) -> Tally:
        """Everything, and the comparison."""
        events = [self.answer, self.serve, self.threads, self.warm, self.adapter, self.trouble, self.lose, self.evict]
        with self.engine:
            for _ in range(self.rng.randint(4, 8)):
                self.rng.choices(events, weights=[4, 4, 2, 2, 2, 1, 1, 1])[0]()
                if self.rng.random() < 0.4:
                    self.engine.flush(60)
            self.witness.draw = None
            assert self.engine.flush(60)
            assert self.engine.runtime.background.given_up["failed"] == 0
            self.tally.add(self._compared())
        self.store.close()
        return self.tally

    def prompt(self) -> Prompt:
        parts = self.hostile.prompt()
        bos = self.engine.runtime.planner.anchor.rule == "bos" and self.rng.random() < 0.8
        self.prompts.append(as_prompt(parts, bos=bos))
        return self.prompts[-1]

    def params(self) -> SamplingParams:
        return SamplingParams(max_new_tokens=self.rng.randint(1, 3), temperature=0, ignore_eos=True)

    def answer(self) -> None:
        """One request; its client may go away in the middle of the answer."""
        self.tally.meet("requests")
        ratio = self.rng.choice([None, 0.0, 0.3, 1.0])
        if self.rng.random() < 0.2:
            for _ in self.engine.stream(self.prompt(), self.params(), ratio=ratio):
                return
        self.engine.generate(self.prompt(), self.params(), ratio=ratio)

    def serve(self) -> None:
        """Several requests of several tenants at once, with the same chunks; some are cancelled."""
        rng = self.rng
        limits = Limits(active=rng.randint(1, 4), row_layers=rng.choice([16, 200, 4096]), catch_up_s=0.0)
        scheduler = Scheduler(self.engine.runtime, limits)
        count = rng.randint(2, 5)
        self.tally.meet("requests", count)
        done = [threading.Event() for _ in range(count)]
        tickets: list[Any] = []

        def listener(number: int, cancelled: bool) -> Callable[[Event], None]:
            def hear(event: Event) -> None:
                if cancelled and isinstance(event, TokenEvent) and number < len(tickets):
                    tickets[number].cancelled = True
                if isinstance(event, DoneEvent):
                    done[number].set()

            return hear

        try:
            for number in range(count):
                mode = rng.choices(["blend", "reuse", "prefix", "full"], weights=[5, 1, 1, 1])[0]
                ask = Ask(self.prompt(), self.params(), mode=mode, tenant=rng.choice(TENANTS))  # type: ignore[arg-type]
                cancelled = rng.random() < 0.25
                tickets.append(scheduler.submit(ask, listener(number, cancelled)))
                if cancelled and rng.random() < 0.5:
                    tickets[-1].cancelled = True
                self.tally.meet("cancelled", cancelled)
            assert all(each.wait(60) for each in done)
        finally:
            scheduler.close()

    def threads(self) -> None:
        """Requests, a warm and a switch of adapters at the same time."""
        prompts = [self.prompt(), self.prompt()]
        chunks = [chunk(ids) for ids in self.hostile.chunks]
        params, adapter = self.params(), self.rng.choice(ADAPTERS)
        self.tally.meet("requests", 2)
        self.tally.meet("switches beside requests")
        wrong: list[BaseException] = []

        def run(work: Callable[[], object]) -> threading.Thread:
            def guarded() -> None:
                try:
                    work()
                except (ModelChangedError, StoreError):
                    pass
                except BaseException as error:
                    wrong.append(error)

            thread = threading.Thread(target=guarded)
            thread.start()
            return thread

        works: list[Callable[[], object]] = [
            *(lambda each=each: self.engine.generate(each, params) for each in prompts),  # type: ignore[misc]
            lambda: self.engine.warm(chunks, system=prompts[0]),
            lambda: self._switch_at_once(adapter),
        ]
        self.rng.shuffle(works)
        for thread in [run(work) for work in works]:
            thread.join(60)
        assert not wrong, wrong

    def warm(self) -> None:
        """Chunks before they are used, for a tenant."""
        self.tally.meet("warmed")
        chunks = [chunk(ids) for ids in self.rng.sample(self.hostile.chunks, self.rng.randint(1, 3))]
        try:
            self.engine.warm(chunks, system=self.prompt(), tenant=self.rng.choice(TENANTS))
        except StoreError:
            self.tally.meet("store errors")

    def adapter(self) -> None:
        self.tally.meet("switched")
        self._switch_at_once(self.rng.choice(ADAPTERS))

    def _switch_at_once(self, adapter: str) -> None:
        with self.engine.runtime.adapters._lock:  # a look in the middle would find, and name, a mixture of both
            switch(self.model, adapter)

    def trouble(self) -> None:
        """The store fails now and then, or works again."""
        self.tally.meet("store trouble")
        self.witness.draw = None if self.witness.draw else random.Random(self.rng.random())

    def lose(self) -> None:
        """Somebody deletes blocks."""
        names = sorted(names_in(self.witness))
        for name in self.rng.sample(names, min(3, len(names))):
            self.tally.meet("deleted", self.store.delete(name))  # type: ignore[arg-type]

    def evict(self) -> None:
        self.store.prune(self.witness.stats().bytes // 2)

    # ---- what is stored ---------------------------------------------------------------------------------

    def _compared(self) -> Tally:
        roots: dict[bytes, str] = {}
        for adapter in ADAPTERS:
            switch(self.model, adapter)
            state = self.engine.runtime.follow()
            for tenant in TENANTS:
                planner = state.planner_of(tenant)
                assert planner.exact_root is not None
                roots |= {bytes(root): adapter for root in (planner.root, planner.exact_root)}
        assert len(roots) == len(ADAPTERS) * len(TENANTS) * (1 if self.engine.config.codec == "raw" else 2)
        known: dict[tuple[str, tuple[int, ...]], list[KV]] = {}

        def prefill(root: bytes, ids: Sequence[int]) -> list[KV]:
            key = roots[root], tuple(ids)
            if key not in known:
                switch(self.model, roots[root])
                known[key] = plain_kv(self.model, ids)[1]
            return known[key]

        self.tally.meet("evicted", self.witness.stats().evictions)
        written: dict[bytes, Written] = self._anchors(roots) | getattr(self.witness, "written", {})
        names = names_in(self.witness)
        assert len(names) == self.witness.stats().blocks
        return compare(self.store, names, written, roots, prefill)

    def _anchors(self, roots: Iterable[bytes]) -> dict[bytes, Written]:
        """The anchors' blocks, which are not written in front of compressed chunks."""
        found = {}
        for root in roots:
            for prompt in self.prompts:
                name = root
                for segment in self.engine.runtime.planner.anchor.segments(prompt):
                    for start in range(0, len(segment), BLOCK_SIZE):
                        ids = segment[start : start + BLOCK_SIZE].tolist()
                        parent, name = name, name_of(name, ids)
                        found[name] = Written(parent, ids)
        return found


def tiny_block_bytes(model: Any) -> int:
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers * config.num_key_value_heads * 2 * BLOCK_SIZE * width * 4)


def as_prompt(parts: Sequence[Part], *, bos: bool = False) -> Prompt:
    first = [text([BOS])] if bos else []
    return Prompt.of([*first, *(chunk(ids) if is_chunk else text(ids) for ids, is_chunk in parts)])


@pytest.fixture(autouse=True)
def keeps_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a store error the next chunk is captured at once."""
    monkeypatch.setattr(keeper, "PAUSE_S", 0)


def played(tmp_path: Path, seeds: Sequence[int]) -> Tally:
    tally = Tally()
    for seed in seeds:
        found = History(seed, tmp_path / f"store-{seed}").play()
        if found.poisoned:
            found.what = [f"history {seed}: {each}" for each in found.what]
        tally.add(found)
    return tally


@pytest.mark.may_fail("store write", "block lost", "background work")
def test_no_history_poisons_a_block(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    tally = played(tmp_path, seeds(HISTORIES, known=max(600, HISTORIES)))
    tally.report("hf", record_property, COMMAND)
    assert tally.poisoned == 0, tally.what[:5]
    assert tally.histories == HISTORIES and tally.blocks >= 5 * HISTORIES  # or nothing was shown


def publish_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake: chunks are stored as their prompt computed them."""
    real = BlendPlan.publishable.fget  # type: ignore[attr-defined]

    def all_computed(plan: BlendPlan) -> Any:
        return [*real(plan), *(span for span in plan.spans if span.source.value == "miss")]

    monkeypatch.setattr(BlendPlan, "publishable", property(all_computed))
    monkeypatch.setattr("cacheblend.engines.hf.warmup.ChunkWarmer._capture", lambda *_: None)


@pytest.mark.may_fail("store write", "block lost", "background work")
def test_what_would_be_poisoned_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that were stored in context are counted, and are far from any rounding."""
    publish_chunks(monkeypatch)
    tally = played(tmp_path, range(3))
    assert tally.poisoned > 10 and tally.smallest_poison > 100 * TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_a_neighbour_that_was_seen_is_far_from_rounding(family: str) -> None:
    """Also where it is one token, and keys are compared at equal positions: then the values tell."""
    rng, model, off = random.Random(7), tiny_model(family), list[float]()
    for _ in range(share(150)):
        ids, beside = (
            [rng.randrange(3, VOCAB) for _ in range(count)] for count in (rng.randint(1, 20), rng.randint(1, 3))
        )
        alone, seen = plain_kv(model, ids)[1], plain_kv(model, [*beside, *ids])[1]
        pairs = zip(alone, seen, strict=True)
        off.append(max(float((a[1] - b[1][:, len(beside) :]).abs().max() / a[1].abs().max()) for a, b in pairs))
    assert min(off) > 100 * TOLERANCE
