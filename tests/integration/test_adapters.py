"""A running engine whose model's adapters are switched: nothing stored under one serves another."""

import copy
import threading
from typing import Any

import pytest
import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.fuse.prefill import PrefillResult
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.engines.hf import SamplingParams
from cacheblend.engines.hf import warmup as warming_module
from cacheblend.engines.hf.scheduler import Scheduler
from cacheblend.engines.hf.tickets import Ask, DoneEvent, Event, TokenEvent
from cacheblend.store import MemoryStore
from fake_adapters import add_adapter, disable, set_adapter
from families import tiny_model
from parity.scenes import RAG, A, B, C, greedy, open_engine, random_ids

CHUNKS = len(A) + len(B) + len(C)
PARAMS = SamplingParams(max_new_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture
def model() -> Any:
    """With adapters a, which is active, and b."""
    model = copy.deepcopy(tiny_model("llama"))
    add_adapter(model, "b", seed=2)
    add_adapter(model, "a", seed=1)
    return model


def plain(model: Any, prompt: Prompt) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([prompt.token_ids.tolist()])).logits[0, -1]
    return logits


def hits(result: PrefillResult) -> int:
    return sum(result.report.hit_tokens.values())


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return float((one - other).norm() / other.norm()) < 1e-4


def test_what_one_adapter_stored_serves_no_other(model: Any) -> None:
    engine = open_engine(model)
    of_a = engine.planner.root
    assert hits(engine.prefill(RAG)) == CHUNKS
    set_adapter(model, "b")
    result = engine.prefill(RAG)
    assert engine.planner.root != of_a
    assert hits(result) == 0 and close(result.logits, plain(model, RAG))
    assert engine.warm([A, B, C]).stored == 3
    assert hits(engine.prefill(RAG)) == CHUNKS
    disable(model)
    assert hits(engine.prefill(RAG)) == 0
    disable(model, False)
    set_adapter(model, "a")
    assert hits(engine.prefill(RAG)) == CHUNKS and engine.planner.root == of_a


def test_an_exact_prefix_of_one_adapter_is_none_of_another(model: Any) -> None:
    engine = open_engine(model)
    lone = Prompt.of([A, text(random_ids(9, 6))])
    assert close(engine.prefill(lone).logits, plain(model, lone))
    set_adapter(model, "b")
    result = engine.prefill(lone)
    assert hits(result) == 0 and close(result.logits, plain(model, lone))


@pytest.mark.parametrize("mode", ["blend", "full"])
def test_answers_are_of_the_adapter_that_is_active(model: Any, mode: Any) -> None:
    """The engine's own view of the model's modules is another one after a switch."""
    engine = open_engine(model, [])
    for name in ("a", "b", "a"):
        set_adapter(model, name)
        assert engine.generate(RAG, PARAMS).token_ids == greedy(model, RAG, 6)
        assert close(engine.prefill(RAG, mode=mode).logits, plain(model, RAG))


def test_an_adapter_that_is_added_later_is_seen() -> None:
    model: Any = copy.deepcopy(tiny_model("llama"))
    engine = open_engine(model)
    before = engine.planner.root
    add_adapter(model, "late", seed=3)
    result = engine.prefill(RAG)
    assert hits(result) == 0 and close(result.logits, plain(model, RAG))
    disable(model)
    assert hits(engine.prefill(RAG)) == CHUNKS and engine.planner.root == before


def test_engines_of_one_adapter_share_a_store_and_those_of_others_do_not(model: Any) -> None:
    store = MemoryStore()
    open_engine(model, store=store)
    other: Any = copy.deepcopy(tiny_model("llama"))
    add_adapter(other, "a", seed=1)
    second = open_engine(other, [], store=store)
    assert hits(second.prefill(RAG)) == CHUNKS
    set_adapter(model, "b")
    assert hits(open_engine(model, [], store=store).prefill(RAG)) == 0


def test_a_switch_between_a_request_and_its_capture_stores_nothing(model: Any) -> None:
    engine = open_engine(model, [], capture=True)
    result = engine.prefill(RAG)
    set_adapter(model, "b")
    engine.store_missed(result)
    assert engine.flush(30)
    assert not list(engine.store.manifests()) and engine.background.failed == 0


def test_a_switch_while_a_passage_is_computed_stores_nothing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(model, [])
    compute = warming_module.compute_chunks

    def switched(*arguments: Any) -> Any:
        yield from compute(*arguments)
        set_adapter(model, "b")

    monkeypatch.setattr(warming_module, "compute_chunks", switched)
    with pytest.raises(InvalidInputError, match=r"adapters were changed while passages were computed.*warm them again"):
        engine.warm([A])
    assert not list(engine.store.manifests())


def test_a_served_request_ends_with_the_adapter_that_it_began_with(model: Any) -> None:
    """Requests of two adapters are not computed together."""
    engine = open_engine(model, [], capture=False)
    prompt = Prompt.of([chunk(random_ids(30, 7)), text(random_ids(9, 8))])
    wanted = {"a": greedy(model, prompt, 6)}
    set_adapter(model, "b")
    wanted["b"] = greedy(model, prompt, 6)
    set_adapter(model, "a")
    assert wanted["a"] != wanted["b"]
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    done, scheduler = {"a": threading.Event(), "b": threading.Event()}, Scheduler(engine)

    def listener(name: str) -> Any:
        def hear(event: Event) -> None:
            if isinstance(event, TokenEvent):
                tokens[name].append(event.token_id)
                if name == "a" and len(tokens["a"]) == 2:  # in the middle of its answer
                    set_adapter(model, "b")
                    scheduler.submit(Ask(prompt, PARAMS), listener("b"))
            if isinstance(event, DoneEvent):
                assert event.error is None
                done[name].set()

        return hear

    try:
        scheduler.submit(Ask(prompt, PARAMS), listener("a"))
        assert all(each.wait(20) for each in done.values())
    finally:
        scheduler.close()
    assert tokens == wanted
