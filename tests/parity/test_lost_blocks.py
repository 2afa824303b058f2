"""Blocks that the store lists but cannot read become misses; after a second loss everything is recomputed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pytest

from cacheblend.core.errors import BlockLostError
from cacheblend.core.load.capture import publish
from cacheblend.core.names import BlockName
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.core.select.question_selectors import Hybrid, Query
from cacheblend.core.select.selectors import Corrected, Head, Hkvd, NoRows, Selector
from cacheblend.engines.hf import BlendEngine
from cacheblend.store import MemoryStore
from families import tiny_model
from parity.scenes import (
    BOS,
    QUESTION,
    RAG,
    A,
    B,
    C,
    Recorded,
    assert_as_reference,
    assert_close,
    assert_same,
    open_engine,
    random_ids,
    run,
)
from reference import blend, plain_kv

pytestmark = pytest.mark.may_fail("block lost")

TOLERANCE = 3e-5
SELECTORS = {
    "hkvd": Hkvd((1, 2), (0.4, 0.2)),
    "corrected head": Corrected(Head(0.1, recency=1.0), 0.5),
    "none": NoRows(),
    "query": Query(0.2),
    "hybrid": Hybrid((1, 2), (0.4, 0.2), early=0.6),
}
REASON = "a bit has rotted"


def selector_of(name: str, family: str) -> Selector:
    """Latents are not corrected."""
    selector = SELECTORS[name]
    return getattr(selector, "inner", selector) if family == "deepseek_v3" else selector


@dataclass
class Loss:
    """A block that cannot be read from `layer` on, once `after` other blocks have failed in earlier reads."""

    name: BlockName
    layer: int
    after: int = 0


class LossyStore(MemoryStore):
    """Lists all its blocks, but cannot read some."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Loss] = []
        self.failed: set[BlockName] = set()

    def read_layers(self, names: Sequence[BlockName], layers: range, heads=None, memory=None):
        read = super().read_layers(names, layers, heads, memory)
        failed = frozenset(self.failed)  # how many layers a read takes depends on the machine
        return [self._lost(name, layers, failed) or records for name, records in zip(names, read, strict=True)]

    def _lost(self, name: BlockName, layers: range, failed: frozenset[BlockName]) -> BlockLostError | None:
        for loss in self.losses:
            if loss.name == name and layers[-1] >= loss.layer and len(failed - {name}) >= loss.after:
                self.failed.add(name)
                return BlockLostError([name], REASON)
        return None


@pytest.fixture
def store() -> LossyStore:
    return LossyStore()


@cache
def _shared(family: str, read_ahead: int) -> tuple[BlendEngine, LossyStore]:
    store = LossyStore()
    return open_engine(tiny_model(family), store=store, read_ahead=read_ahead), store


def lossy_engine(family: str, read_ahead: int = 8) -> tuple[BlendEngine, LossyStore]:
    """An engine that tests share, over a store that has lost nothing yet."""
    engine, store = _shared(family, read_ahead)
    store.losses, store.failed = [], set()
    return engine, store


def names_at(engine, prompt: Prompt, *positions: int) -> list[BlockName]:
    spans = engine.runtime.planner.plan(prompt, engine.store).spans
    return [next(s.name for s in spans if s.start <= position < s.stop) for position in positions]


@pytest.mark.parametrize("read_ahead", [0, 2])
@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("layer", [0, 1, 2, 3])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_a_block_lost_during_the_prefill_is_a_miss(family: str, layer: int, selector: str, read_ahead: int) -> None:
    engine, store = lossy_engine(family, read_ahead)
    store.losses = [Loss(names_at(engine, RAG, 50)[0], layer)]  # the middle block of A
    outcome = run(engine, RAG, selector_of(selector, family))
    lost = range(48, 64)
    assert outcome.report.missed_tokens == len(lost)
    assert len(outcome.report.fallbacks) == 1 and REASON in outcome.report.fallbacks[0]
    assert_as_reference(outcome, blend(tiny_model(family), RAG, selector_of(selector, family), missing=lost), TOLERANCE)


def test_the_second_pass_keeps_nothing_of_an_abandoned_one_whose_work_is_counted() -> None:
    engine, store = lossy_engine("llama")
    lost = names_at(engine, RAG, 50)[0]
    store.losses = [Loss(lost, 1)]  # after layer 0
    early = engine.prefill(RAG, selector=SELECTORS["hkvd"]).report
    store.losses = [Loss(lost, 2)]  # after the check and layer 1
    late = engine.prefill(RAG, selector=SELECTORS["hkvd"]).report
    assert early.missed_tokens == late.missed_tokens == 16
    assert late.row_layers > early.row_layers
    assert late.projected_rows == early.projected_rows + len(RAG)
    selector = Recorded(SELECTORS["hkvd"])  # is called again
    store.losses = [Loss(lost, 3)]
    engine.prefill(RAG, selector=selector)
    assert [(asked.layer, asked.total) for asked in selector.asked] == [(1, 115), (2, 115), (1, 99), (2, 99)]


TWICE = Prompt.of([B, A, C, A, QUESTION])
SOME, MORE = [*range(48, 64), *range(72, 88)], [*range(7, 23), *range(48, 64), *range(72, 88)]


@pytest.mark.parametrize(
    ("prompt", "losses", "selector", "fallbacks", "missing"),
    [
        pytest.param(RAG, [(50, 2, 0), (80, 2, 0)], "hkvd", 1, SOME, id="in the same layer"),
        pytest.param(TWICE, [(25 + 16, 2, 0)], "hkvd", 1, [*range(41, 57), *range(131, 147)], id="a repeated chunk's"),
        # before the check layer no row was dropped, so restarts are cheap, as is the first one after the check
        pytest.param(RAG, [(50, 1, 0), (10, 1, 1), (80, 3, 2)], "hkvd", 3, MORE, id="before the check layer"),
        pytest.param(RAG, [(50, 2, 0), (80, 3, 1)], "query", 2, SOME, id="during the question's pass, query"),
        pytest.param(RAG, [(50, 2, 0), (80, 3, 1)], "hybrid", 2, SOME, id="during the question's pass, hybrid"),
    ],
)
def test_several_lost_blocks_are_misses(
    prompt: Prompt, losses: list[tuple[int, int, int]], selector: str, fallbacks: int, missing: list[int]
) -> None:
    """`losses`: a position, the layer, and how many have failed before."""
    engine, store = lossy_engine("llama")
    store.losses = [Loss(names_at(engine, prompt, at)[0], layer, after) for at, layer, after in losses]
    outcome = run(engine, prompt, SELECTORS[selector])
    assert len(outcome.report.fallbacks) == fallbacks and outcome.report.missed_tokens == len(missing)
    reference = blend(tiny_model("llama"), prompt, SELECTORS[selector], missing=missing)
    assert_as_reference(outcome, reference, TOLERANCE)


@pytest.mark.parametrize("lost", [0, 1, 20], ids=["the anchor", "the first block", "the second block"])
def test_a_lost_block_of_the_exact_prefix_shortens_the_prefix(lost: int, store: LossyStore) -> None:
    """The blocks that follow it in its chain are still stored, but no longer part of an unbroken prefix."""
    model, prompt = tiny_model("llama"), Prompt.of([text([BOS]), A, B, QUESTION])
    with open_engine(model, store=store, anchor="bos") as engine:
        store.losses = [Loss(names_at(engine, prompt, lost)[0], 1)]
        outcome = run(engine, prompt, SELECTORS["hkvd"])
    missing = {0: [0], 1: range(1, 17), 20: range(17, 33)}[lost]
    assert outcome.report.hit_tokens["prefix"] == missing[0]
    reference = blend(model, prompt, SELECTORS["hkvd"], anchor=[BOS], missing=missing)
    assert_as_reference(outcome, reference, TOLERANCE)


@pytest.mark.parametrize("codec", ["raw", "int8", "fp8", "int4"])
def test_the_rest_of_an_exact_front_is_loaded_where_chunks_are_compressed(codec: str, store: LossyStore) -> None:
    """It is reused as chunks are, and is not compressed as they are."""
    model, prompt = tiny_model("llama"), Prompt.of([text([BOS, *random_ids(40, 8)]), A, B, QUESTION])
    with open_engine(model, store=store, codec=codec) as engine:
        first = engine.prefill(prompt, selector=NoRows())
        for block in publish(first.plan, first.kv):
            assert store.write(block)
        right = engine.prefill(prompt, selector=NoRows())
        store.losses = [Loss(names_at(engine, prompt, 1)[0], 1)]
        outcome = run(engine, prompt, NoRows())
    assert right.report.hit_tokens["prefix"] == 41 and outcome.report.hit_tokens["prefix"] == 0
    assert len(outcome.report.fallbacks) == 1 and outcome.report.hit_tokens["memory"] == 41 - 16 + 65
    for layer, (found, expected) in enumerate(zip(outcome.result.kv, right.kv, strict=True)):
        assert_close(found.keys, expected.keys, TOLERANCE, f"keys of layer {layer}")
        assert_close(found.values, expected.values, TOLERANCE, f"values of layer {layer}")


@pytest.mark.parametrize("selector", ["hkvd", "corrected head", "none"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_after_a_second_loss_everything_is_recomputed(family: str, selector: str) -> None:
    engine, store = lossy_engine(family)
    first, second = names_at(engine, RAG, 50, 80)
    store.losses = [Loss(first, 2), Loss(second, 3, after=1)]
    result = engine.prefill(RAG, selector=Recorded(selector_of(selector, family)))
    report = result.report
    assert report.missed_tokens == 115 and report.recomputed_tokens == 0
    assert [REASON in line for line in report.fallbacks] == [True, True]
    assert_same(result, *plain_kv(tiny_model(family), RAG.token_ids), 1e-5)
