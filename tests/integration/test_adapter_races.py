"""Adapters that are switched by another thread in the middle of a request, a warm or a capture."""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient

from cacheblend.core.errors import ModelChangedError
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.engines.hf import BlendEngine, SamplingParams
from cacheblend.nano import model_path
from cacheblend.serve.app import create_app
from cacheblend.serve.settings import ServeSettings
from fake_adapters import add_adapter, layers, set_adapter
from families import tiny_model
from parity.scenes import QUESTION, RAG, UNSEEN, A, B, C, assert_close, greedy, open_engine, random_ids
from reference import plain_kv

PARAMS = SamplingParams(max_new_tokens=6, temperature=0, ignore_eos=True)
TOLERANCE = 1e-5


@pytest.fixture
def model() -> Any:
    """With adapters a, which is active, and b."""
    return with_adapters(copy.deepcopy(tiny_model("llama")))


def with_adapters(model: Any) -> Any:
    add_adapter(model, "b", seed=2)
    add_adapter(model, "a", seed=1)
    return model


def in_layer(model: Any, index: int, meanwhile: Callable[[], None]) -> Any:
    """Before the projection of queries in a layer something happens, once; in all copies of the module too."""
    done: list[bool] = []

    def happen(*_: Any) -> None:
        if not done:
            done.append(True)
            meanwhile()

    return model.model.layers[index].self_attn.q_proj.base_layer.register_forward_pre_hook(happen)


def assert_stored_as(engine: BlendEngine, model: Any, name: str) -> None:
    """Every chunk that is listed is a plain prefill with this adapter, under its name."""
    set_adapter(model, name)
    root = engine.follow().planner.root
    found = engine.store.manifests()
    assert found and all(manifest.root == root for manifest in found)
    for manifest in found:
        _, layers_kv = plain_kv(model, manifest.token_ids)
        at = 0
        for block, entry in zip(manifest.block_names, engine.store.find(manifest.block_names), strict=True):
            assert entry is not None
            rows = slice(at, at + len(entry.token_ids))
            at = rows.stop
            for layer, (keys, values) in enumerate(layers_kv):
                expected = torch.stack([keys[:, rows], values[:, rows]], dim=1)
                assert_close(engine.store.read(block, layer), expected, TOLERANCE, f"layer {layer}")


def test_a_switch_and_back_in_the_middle_of_a_capture_changes_nothing(model: Any) -> None:
    """No look can notice it: the adapters before and after are the same."""
    engine = open_engine(model, [])
    in_layer(model, 1, lambda: set_adapter(model, "b"))
    in_layer(model, 3, lambda: set_adapter(model, "a"))
    assert engine.warm([A, B]).stored == 2
    assert_stored_as(engine, model, "a")


def test_lists_and_scales_that_are_changed_in_their_place_and_back_change_nothing(model: Any) -> None:
    engine = open_engine(model, [])

    def change() -> None:
        for lora in layers(model):
            lora.active_adapters[:] = ["b"]
            lora.scaling["a"] = 30.0

    def change_back() -> None:
        for lora in layers(model):
            lora.active_adapters[:] = ["a"]
            lora.scaling["a"] = 2.0

    in_layer(model, 1, change)
    in_layer(model, 3, change_back)
    assert engine.warm([A, B]).stored == 2
    assert_stored_as(engine, model, "a")


def test_a_warm_whose_engine_follows_another_thread_meanwhile_stores_nothing(model: Any) -> None:
    """Neither under the names of the adapters that it began with, nor under those of now."""
    engine = open_engine(model, [])

    def other_thread() -> None:
        set_adapter(model, "b")
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
    state = engine.follow()
    wanted = engine.prefill(RAG).logits
    set_adapter(model, "b")
    engine.warm([A, B, C])
    result = engine.prefill(RAG, state=state)
    assert torch.equal(result.logits, wanted) and state.planner.root != engine.planner.root
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

    def switching() -> Iterator[None]:
        while not stop.is_set():
            for name in ("a", "b"):
                with engine.adapters._lock:  # a look in between would find, and name, a mixture of both
                    set_adapter(model, name)
                yield

    def switch() -> None:
        for _ in switching():
            stop.wait(0.002)

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
    roots = {}
    for name in ("a", "b"):
        set_adapter(model, name)
        roots[engine.follow().planner.root] = name
    for manifest in engine.store.manifests():
        set_adapter(model, roots[manifest.root])
        _, found = plain_kv(model, manifest.token_ids)
        assert len(manifest.block_names) <= 2
        tokens = min(len(manifest.token_ids), 16)
        for layer, (keys, values) in enumerate(found):
            expected = torch.stack([keys[:, :tokens], values[:, :tokens]], dim=1)
            assert_close(engine.store.read(manifest.block_names[0], layer), expected, TOLERANCE, f"layer {layer}")


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
