"""A running engine whose model's adapters are switched: nothing stored under one serves another."""

import contextlib
import copy
import threading
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient

from cacheblend.core.errors import ModelChangedError
from cacheblend.core.fuse.prefill import PrefillResult
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.engines.hf import BlendEngine, SamplingParams
from cacheblend.engines.hf.scheduler import Scheduler
from cacheblend.engines.hf.tickets import Ask, DoneEvent, Event, TokenEvent
from cacheblend.nano import model_path
from cacheblend.serve.app import create_app
from cacheblend.serve.settings import ServeSettings
from fake_adapters import add_adapter, disable, layers, set_adapter
from families import tiny_model
from parity.scenes import QUESTION, RAG, UNSEEN, A, B, C, assert_close, greedy, open_engine, random_ids
from reference import plain_kv

CHUNKS = len(A) + len(B) + len(C)
PARAMS = SamplingParams(max_new_tokens=6, temperature=0, ignore_eos=True)


def with_adapters(model: Any) -> Any:
    """With adapters a, which is active, and b."""
    add_adapter(model, "b", seed=2)
    add_adapter(model, "a", seed=1)
    return model


@pytest.fixture
def model() -> Any:
    return with_adapters(copy.deepcopy(tiny_model("llama")))


def plain(model: Any, prompt: Prompt) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([prompt.token_ids.tolist()])).logits[0, -1]
    return logits


def hits(result: PrefillResult) -> int:
    return sum(result.report.hit_tokens.values())


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return float((one - other).norm() / other.norm()) < 1e-4


def test_what_one_adapter_stored_serves_no_other(model: Any) -> None:
    engine, lone = open_engine(model), Prompt.of([A, text(random_ids(9, 6))])
    of_a = engine.runtime.planner.root
    assert hits(engine.prefill(RAG)) == CHUNKS and close(engine.prefill(lone).logits, plain(model, lone))
    set_adapter(model, "b")
    for prompt in (lone, RAG):  # an exact prefix neither
        result = engine.prefill(prompt)
        assert engine.runtime.planner.root != of_a
        assert hits(result) == 0 and close(result.logits, plain(model, prompt))
    assert engine.warm([A, B, C]).stored == 3
    assert hits(engine.prefill(RAG)) == CHUNKS
    add_adapter(model, "late", seed=3)
    result = engine.prefill(RAG)
    assert hits(result) == 0 and close(result.logits, plain(model, RAG))
    disable(model)
    assert hits(engine.prefill(RAG)) == 0
    disable(model, False)
    set_adapter(model, "a")
    assert hits(engine.prefill(RAG)) == CHUNKS and engine.runtime.planner.root == of_a
    # Engines of one adapter share a store, and those of others do not.
    other = with_adapters(copy.deepcopy(tiny_model("llama")))
    assert hits(open_engine(other, [], store=engine.store).prefill(RAG)) == CHUNKS
    add_adapter(other, "another", seed=7)
    assert hits(open_engine(other, [], store=engine.store).prefill(RAG)) == 0

    # Answers are of the adapter that is active: the engine's own view of the model's modules is another one then.
    engine = open_engine(model, [])
    for name in ("a", "b", "a"):
        set_adapter(model, name)
        assert engine.generate(RAG, PARAMS).token_ids == greedy(model, RAG, 6)
        assert close(engine.prefill(RAG).logits, plain(model, RAG))
        assert close(engine.prefill(RAG, mode="full").logits, plain(model, RAG))


def test_adapters_that_were_loaded_in_inference_mode_are_followed() -> None:
    """Whose tensors have no version."""
    with torch.inference_mode():
        model = with_adapters(copy.deepcopy(tiny_model("llama")))
    engine, wanted = open_engine(model, []), list[list[int]]()
    for name in ("a", "b"):
        set_adapter(model, name)
        wanted.append(greedy(model, RAG, 6))
        assert engine.generate(RAG, PARAMS).token_ids == wanted[-1]
    assert wanted[0] != wanted[1]


def test_a_switch_between_a_request_and_its_capture_stores_nothing(model: Any) -> None:
    engine = open_engine(model, [], capture=True)
    result = engine.prefill(RAG)
    set_adapter(model, "b")
    engine.runtime.store_missed(result)
    assert engine.flush(30)
    assert not list(engine.store.manifests()) and engine.runtime.background.given_up["failed"] == 0


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
    done, scheduler = {"a": threading.Event(), "b": threading.Event()}, Scheduler(engine.runtime)

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


def test_a_switch_while_a_request_is_admitted_changes_no_answer_that_runs(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(model, [], capture=False)
    inner, wanted = engine.runtime.background.begin_request, greedy(model, RAG, 6)
    scheduler, tokens = Scheduler(engine.runtime, has_thread=False), (list[int](), list[int]())

    def begin_request() -> None:
        set_adapter(model, "b")
        inner()

    def submit(number: int) -> None:
        hear = lambda event: isinstance(event, TokenEvent) and tokens[number].append(event.token_id)  # noqa: E731
        scheduler.submit(Ask(RAG, PARAMS), hear)

    submit(0)
    scheduler.run()
    monkeypatch.setattr(engine.runtime.background, "begin_request", begin_request)
    submit(1)
    while scheduler.waiting or scheduler.active:
        scheduler.run()
    assert tokens == (wanted, wanted) != greedy(model, RAG, 6)
    scheduler.close()


def test_nobody_who_submits_waits_for_a_look_at_the_adapters(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(model, [], capture=False)
    inner, looks, let_go = engine.runtime.adapters.latest_version, threading.Event(), threading.Event()
    scheduler, begun, ask = Scheduler(engine.runtime), threading.Event(), Ask(RAG, SamplingParams(ignore_eos=True))

    def latest_version() -> int:
        looks.set()
        assert let_go.wait(60)
        return inner()

    try:
        scheduler.submit(ask, lambda event: begun.set())
        assert begun.wait(20)
        monkeypatch.setattr(engine.runtime.adapters, "latest_version", latest_version)
        scheduler.submit(ask, lambda event: None)
        assert looks.wait(20)
        other = threading.Thread(target=scheduler.submit, args=(ask, lambda event: None))
        other.start()
        other.join(30)
        assert not other.is_alive()
    finally:
        let_go.set()
        scheduler.close()


TOLERANCE = 1e-5


def in_layer(model: Any, index: int, meanwhile: Callable[[], None]) -> Any:
    """Before the projection of queries in a layer something happens, once; in all copies of the module too."""
    done: list[bool] = []

    def happen(*_: Any) -> None:
        if not done:
            done.append(True)
            meanwhile()

    return model.model.layers[index].self_attn.q_proj.base_layer.register_forward_pre_hook(happen)


def stored_with(engine: BlendEngine, model: Any) -> set[str]:
    """The adapters of all chunks that are listed, each of which is a plain prefill with the adapter of its name."""
    names, roots = set[str](), {}
    for name in ("a", "b"):
        set_adapter(model, name)
        roots[engine.runtime.follow().planner.root] = name
    for manifest in engine.store.manifests():
        set_adapter(model, roots[manifest.root])
        names.add(roots[manifest.root])
        _, layers_kv = plain_kv(model, manifest.token_ids)
        at = 0
        for block, entry in zip(manifest.block_names, engine.store.find(manifest.block_names), strict=True):
            assert entry is not None
            rows = slice(at, at + len(entry.token_ids))
            at = rows.stop
            for layer, (keys, values) in enumerate(layers_kv):
                expected = torch.stack([keys[:, rows], values[:, rows]], dim=1)
                assert_close(engine.store.read(block, layer), expected, TOLERANCE, f"layer {layer}")
    return names


def in_place(model: Any, name: str, scaling: float) -> None:
    """Changes lists and scales, as PEFT does."""
    for lora in layers(model):
        lora.active_adapters[:] = [name]
        lora.scaling["a"] = scaling


@pytest.mark.parametrize(
    ("there", "back"),
    [
        (lambda model: set_adapter(model, "b"), lambda model: set_adapter(model, "a")),
        (lambda model: in_place(model, "b", 30.0), lambda model: in_place(model, "a", 2.0)),
    ],
    ids=["switched", "in place"],
)
def test_a_switch_and_back_in_the_middle_of_a_capture_changes_nothing(
    model: Any, there: Callable[[Any], None], back: Callable[[Any], None]
) -> None:
    """No look can notice it: the adapters before and after are the same."""
    engine = open_engine(model, [])
    in_layer(model, 1, lambda: there(model))
    in_layer(model, 3, lambda: back(model))
    assert engine.warm([A, B]).stored == 2
    assert stored_with(engine, model) == {"a"}


@pytest.mark.parametrize("follows", [False, True])
def test_a_warm_that_another_thread_overtakes_stores_nothing(model: Any, follows: bool) -> None:
    """Neither under the names of the adapters that it began with, nor under those of now."""
    engine = open_engine(model, [])

    def other_thread() -> None:
        set_adapter(model, "b")
        if follows:
            engine.prefill(RAG)  # now the engine is in step with b

    in_layer(model, 2, other_thread)
    with pytest.raises(ModelChangedError, match=r"adapters were changed while passages were computed.*warm them again"):
        engine.warm([A])
    assert not engine.store.manifests()


def test_a_request_that_another_thread_overtakes_keeps_its_adapters(model: Any) -> None:
    """Planned, computed and decoded with a, and not stored: not even its text, which is exact."""
    engine = open_engine(model, [], capture=True)
    wanted = greedy(model, RAG, 6)

    def other_thread() -> None:
        set_adapter(model, "b")
        engine.prefill(RAG)

    in_layer(model, 2, other_thread)
    assert engine.generate(RAG, PARAMS).token_ids == wanted
    assert engine.flush(30)
    assert not engine.store.manifests() and engine.store.stats().blocks == 0
    assert engine.generate(RAG, PARAMS).token_ids == greedy(model, RAG, 6) != wanted


def test_a_state_that_is_kept_names_what_it_computes(model: Any) -> None:
    """Between the look and the plan another thread may look, too: the plan is of the state, not of the engine."""
    engine = open_engine(model, [A, B, C])
    state = engine.runtime.follow()
    wanted = engine.prefill(RAG).logits
    set_adapter(model, "b")
    engine.warm([A, B, C])
    result = engine.prefill(RAG, state=state)
    assert torch.equal(result.logits, wanted) and state.planner.root != engine.runtime.planner.root
    assert not torch.allclose(engine.prefill(RAG).logits, wanted, atol=1e-2)


def test_threads_that_answer_and_store_while_another_one_switches(model: Any) -> None:
    """Every answer is one adapter's or the other's, and so is every record, under its own adapter's names."""
    engine = open_engine(model, [], capture=True, recompute_ratio=1.0)
    prompts = [
        Prompt.of([text(random_ids(5, 90 + i)), chunk(random_ids(20, 70 + i)), UNSEEN, QUESTION]) for i in range(6)
    ]
    right: dict[str, list[list[int]]] = {}
    for name in ("a", "b"):
        set_adapter(model, name)
        right[name] = [greedy(model, prompt, 6) for prompt in prompts]
    stop, wrong = threading.Event(), list[Any]()

    def switch() -> None:
        for name in cycle("ab"):
            with engine.runtime.adapters._lock:  # a look in between would find, and name, a mixture of both
                set_adapter(model, name)
            if stop.wait(0.002):
                return

    def answer(first: int) -> None:
        for number, prompt in enumerate(prompts[first::2]):
            found = engine.generate(prompt, PARAMS).token_ids
            if found not in [right[name][first + 2 * number] for name in ("a", "b")]:
                wrong.append((first, number))
            with contextlib.suppress(ModelChangedError):
                engine.warm(prompt.chunks[:1])

    switcher = threading.Thread(target=switch)
    answering = [threading.Thread(target=answer, args=(first,)) for first in (0, 1)]
    for thread in (switcher, *answering):
        thread.start()
    for thread in answering:
        thread.join(120)
    stop.set()
    switcher.join(10)
    assert not wrong and engine.flush(60)
    stored_with(engine, model)


def test_the_server_names_what_it_stored_when_adapters_are_switched_while_it_stores() -> None:
    """503 with `Retry-After`, nothing stored; then the ids and pins are those of the adapter that is active."""
    with BlendEngine.from_pretrained(model_path(), store="memory", dtype="float32") as engine:
        model: Any = with_adapters(engine.model)
        with TestClient(create_app(engine, ServeSettings())) as client:
            hook = in_layer(model, 1, lambda: set_adapter(model, "b"))
            body = {"chunks": [{"text": "The scarf stays with the bowl."}], "pin": True}
            refused = client.post("/v1/chunks", json=body)
            assert refused.status_code == 503 and refused.headers["Retry-After"] == "1", refused.text
            assert refused.json()["error"]["code"] == "model_changed"
            assert not engine.store.manifests() and not engine.store.pinned()
            hook.remove()
            (stored,) = client.post("/v1/chunks", json=body).json()["data"]
            assert stored["held"] and stored["pinned"]
            (listed,) = client.get("/v1/chunks").json()["data"]
            assert listed["id"] == stored["id"]
            set_adapter(model, "a")  # nobody has asked since: the list is that of the adapter in effect
            assert client.get("/v1/chunks").json()["data"] == []
            (other,) = client.post("/v1/chunks", json=body).json()["data"]
            assert other["held"] and other["id"] != stored["id"]
