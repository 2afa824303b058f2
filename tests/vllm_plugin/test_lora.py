"""LoRA adapters in unmodified vLLM: requests of each blend with it, and find only what was stored with it.

vLLM's CPU build computes rows without an adapter, in one batch with rows that have one, with the last slot's: so the
engines here have a slot more than adapters wherever the base model is asked beside them.

Behind them a worker's adapters without an engine, by vLLM's own slots and stand-ins for weights: what comes into a
slot, what has to stay, and who is told what.
"""

import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.model_manager import AdapterLRUCache, LRUCacheLoRAModelManager

import vllm_prompts
from cacheblend.core.select.selectors import Hkvd
from cacheblend.engines.vllm.internals.lora import LoadedAdapters
from cacheblend.engines.vllm.jobs import Adapter, AdapterSeen, BlendJob, StepJobs
from cacheblend.engines.vllm.worker.adapters import AdapterChangedError, WorkerAdapters
from rank_threads import ThreadGroup, on_all
from vllm_models import make_adapter, merge_adapter
from vllm_prompts import COUNT, FORGET, Asked, prompts
from vllm_running import (
    TWO_RANKS,
    Serve,
    between,
    check_blended,
    check_oracle,
    close,
    dense,
    expected,
    found_in,
    tokens,
)
from vllm_workers import LAYERS, Prefill, Store, make_worker

Adapters = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """Three adapters: one of all layers' parts, one of attention alone with another rank, one of the embedding too."""
    root = tmp_path_factory.mktemp("adapters")
    make_adapter(root / "a", 1)
    make_adapter(root / "b", 2, rank=8, modules=("q_proj", "v_proj", "down_proj"))
    make_adapter(root / "c", 3, embeds=True)
    return {name: {"name": name, "number": number, "path": str(root / name)} for number, name in enumerate("abc", 1)}


@pytest.fixture(scope="module")
def merged(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], Path]:
    """The model's folder with the adapter of a folder in its weights, or with none."""

    @cache
    def made(adapter: str | None) -> Path:
        folder = tmp_path_factory.mktemp("merged") / "model"
        return models["llama"] if adapter is None else merge_adapter(models["llama"], Path(adapter), folder)

    return made


@pytest.fixture
def lora(serve: Serve) -> Serve:
    """With so many slots."""
    return lambda slots=4, **more: serve("llama", enable_lora=True, max_loras=slots, max_lora_rank=8, **more)


def ask(asked: list[Asked], adapters: list[Any], **more: Any) -> dict[str, Any]:
    return vllm_prompts.ask(asked, adapters=adapters, **{"sampling": {"max_tokens": 6, "logprobs": 4}, **more})


def requests(answers: list[Any], *steps: int) -> list[float]:
    """Blended ones between the counts of these steps."""
    counts = [answers[step]["vllm:cacheblend_requests"] for step in steps]
    return [after - before for before, after in pairwise(counts)]


@pytest.mark.feature("LoRA adapters", "blends")
def test_adapters_and_the_base_blend_alternately_and_in_one_step(lora: Serve, adapters: Adapters) -> None:
    """The same passages with each, one by one, found by content, and all at once: at ratio 1 as vLLM answers."""
    asked, model = prompts(3, 8, 3, held=5), lora()
    whose = [None, *adapters.values()] * 2
    alone, at_once = ask(asked, whose, alone=True), ask([asked[0]] * 4 + [asked[1]] * 4, whose)
    right, right_at_once = model.plain(alone), model.plain({**at_once, "alone": True})
    steps = [alone, alone, FORGET, COUNT, {**alone, "chunks": None}, FORGET, COUNT, at_once, COUNT]
    found = model.run(steps, {"recompute_ratio": 1.0, "min_reused_share": 0.1})
    answers = found["answers"]
    close(answers[0] + answers[1] + answers[4] + answers[7], 3 * right + right_at_once)
    assert requests(answers, 3, 6, 8) == [8, 8]
    check_blended(found)
    per = [frozenset(one["tokens"][0][0] for one in right[at::4]) for at in range(4)]
    assert len(set(per)) == 4  # each answers in its own way, or this would show little


@pytest.mark.parametrize("in_pages", [False, True], ids=["buffers", "pages"])
def test_first_tokens_and_logprobs_are_those_of_the_dense_oracle_with_the_adapter_merged(
    lora: Serve, adapters: Adapters, merged: Callable[[str], Path], in_pages: bool
) -> None:
    asked, whose = prompts(21, 6, 4, held=5), [*adapters.values()] * 2
    first = {"sampling": {"max_tokens": 1, "logprobs": 8}}
    steps = [ask(asked, whose, alone=True), FORGET, ask(asked, whose, **first)]
    result = lora().run(steps, {"recompute_ratio": 0.2, "check_layers": [1], "in_pages": in_pages})
    check_blended(result, len(asked))
    for one, mine, answer in zip(asked, whose, result["answers"][2], strict=True):
        assert check_oracle(dense(merged(mine["path"])), [one], [answer], within=3e-3) == 0


def test_weights_replaced_under_the_same_name_find_nothing_of_the_old_ones(
    lora: Serve, adapters: Adapters, tmp_path: Path
) -> None:
    """In place, from the same path; later the first weights come back, and what was stored with them is used again."""
    asked, live = prompts(5, 3, 3, held=5), {"name": "live", "number": 7, "path": str(tmp_path / "live")}
    step = ask(asked, [live] * 3, alone=True)
    right = {name: lora().plain(ask(asked, [adapters[name]] * 3, alone=True)) for name in "ab"}
    steps: list[dict[str, Any]] = []
    for name in "aba":
        files = {"copy": [adapters[name]["path"], live["path"]]}
        steps += [files, {"load": {**live, "inplace": True}}, FORGET, step, FORGET, COUNT, step, COUNT]
    answers = lora(2).run(steps, {"recompute_ratio": 1.0, "min_reused_share": 0.1})["answers"]
    changed = []
    for number, name in enumerate("aba"):
        given = answers[8 * number : 8 * number + 8]
        close(given[3] + given[6], 2 * right[name])
        assert requests(given, 5, 7) == [3]
        changed.append(given[7].get("vllm:cacheblend_fallbacks LoRA changed", 0))
    assert changed[0] == 0 and changed[2] >= changed[1] >= 1  # the first request after each change


@pytest.mark.parametrize("slots", [1, 2])
def test_more_adapters_than_slots_blend_in_turn(lora: Serve, adapters: Adapters, slots: int) -> None:
    """At once and one by one; where vLLM keeps as many in memory as it has slots, files are read again. Jobs take many
    steps, in which vLLM decodes for others."""
    asked, whose = prompts(9, 6, 3, held=5), [*adapters.values()] * 2
    long = {"sampling": {"max_tokens": 12, "logprobs": 4}}
    alone, at_once = ask(asked, whose, alone=True, **long), ask(asked, whose, **long)
    steps = [at_once, FORGET, alone, FORGET, COUNT, at_once, COUNT, FORGET, alone]
    found = lora(slots).run(steps, {"recompute_ratio": 1.0, "budget_row_layers": 400})  # a layer
    right, answers = lora().plain(alone), found["answers"]
    close(answers[0] + answers[2] + answers[5] + answers[8], 4 * right)
    assert requests(answers, 4, 6) == [6]
    check_blended(found)


@pytest.mark.slow
def test_with_torch_compile_on(lora: Serve, adapters: Adapters) -> None:
    """vLLM's compiled layers and ours read from wrappers of their own."""
    step = ask(prompts(17, 4, 3, held=5), [None, *adapters.values()])
    alone = {**step, "alone": True}
    answers = lora(enforce_eager=False).run([alone, FORGET, COUNT, step, COUNT], {"recompute_ratio": 1.0})["answers"]
    close(answers[0] + answers[3], 2 * lora().plain(alone))
    assert requests(answers, 2, 4) == [4]


def test_preempted_requests_of_several_adapters_are_provided_again(lora: Serve, adapters: Adapters) -> None:
    asked, whose = prompts(11, 6, 3, held=5), [*adapters.values()] * 2
    step = ask(asked, whose, sampling={"max_tokens": 100, "logprobs": 1})
    steps = [ask(asked, whose, alone=True, sampling={"max_tokens": 1}), FORGET, step]
    small = {"num_gpu_blocks_override": 40, "max_model_len": 1024, "block_size": 32}
    found = lora(**small).run(steps, {"recompute_ratio": 1.0})
    assert tokens(found["answers"][2]) == tokens(lora().plain({**step, "alone": True}))
    assert found["metrics"]["vllm:num_preemptions"] > 0
    assert found["metrics"]["vllm:cacheblend_requests"] >= 6


def test_the_shadow_check_compares_with_the_adapter_of_each_request(
    lora: Serve, adapters: Adapters, merged: Callable[[str | None], Path]
) -> None:
    """What it finds is what dense models with the adapters merged find."""
    asked, whose = prompts(13, 8, 3, held=5), [None, *adapters.values()] * 2
    step = ask(asked, whose, sampling={"max_tokens": 20, "logprobs": -1})
    steps = [ask(asked, whose, alone=True), COUNT, step, COUNT]
    model = lora(enable_prefix_caching=False, max_logprobs=-1)
    answers = model.run(steps, {"recompute_ratio": 0.3, "shadow": 1.0})["answers"]
    right: Counter[str] = Counter()
    for at, mine in enumerate(whose[:4]):
        right.update(expected(merged(mine and mine["path"]), asked[at::4], answers[2][at::4]))
    found = found_in(between(answers[1], answers[3]))
    assert found == pytest.approx(dict(right), rel=2e-3, abs=2e-3)
    assert found[""] == 8 and found["_tokens yes"] > 0 and found["_tokens no"] > 0


def test_two_tensor_parallel_ranks_answer_as_one(lora: Serve, adapters: Adapters, tmp_path: Path) -> None:
    asked, whose = prompts(15, 4, 3, held=5), [*adapters.values(), adapters["a"]]
    steps = [ask(asked, whose, alone=True), FORGET, ask(asked, whose)]
    found = []
    for name, ranks in (("one", {}), ("two", TWO_RANKS)):
        extra = {"store": f"file://{tmp_path}/{name}", "recompute_ratio": 0.2}
        found.append(lora(2, max_cpu_loras=2, **ranks).run(steps, extra))
        check_blended(found[-1], 4)
    for step in (0, 2):
        close(found[1]["answers"][step], found[0]["answers"][step])


# ---- a worker's adapters ------------------------------------------------------------------------------------------

ALONE: Any = SimpleNamespace(size=1, agree_each=list)


class Weights:
    """An adapter as vLLM holds it."""

    def __init__(self, number: int, value: float) -> None:
        self.id, part = number, SimpleNamespace(lora_a=[torch.full((2, 3), value), None], scaling=1.0)
        self.loras = {"layer": part}


class Layer:
    """One of vLLM's LoRA layers."""

    def __init__(self) -> None:
        self.punica_wrapper = self.own = object()

    def set_mapping(self, wrapper: Any) -> None:
        self.punica_wrapper = wrapper

    def reset_lora(self, slot: int) -> None:
        """Has no weights."""


def request(number: int, *, inplace: bool = False) -> Any:
    return SimpleNamespace(lora_int_id=number, lora_name=f"adapter {number}", lora_path="", load_inplace=inplace)


class Manager(LRUCacheLoRAModelManager):
    """vLLM's manager of slots, without a model."""

    def __init__(self, slots: int, capacity: int, modules: Any) -> None:
        self.lora_config = SimpleNamespace(max_loras=slots, max_cpu_loras=capacity)  # type: ignore[assignment]
        self._registered_adapters = AdapterLRUCache(capacity, self.deactivate_adapter)
        self._active_adapters = AdapterLRUCache(slots, self._deactivate_adapter)
        self.lora_index_to_id = [None] * slots
        self.modules, self.device, self.vocab_size = dict(enumerate(modules)), torch.device("cpu"), 10
        self._last_mapping = None

    def _add_adapter(self, lora: Any) -> None:
        self._registered_adapters[lora.id] = lora

    def _get_lora_layer_weights(self, lora: Any, name: Any) -> None:
        return None


class Files:
    """What adapters' files hold now; those of numbers that are not there cannot be loaded."""

    def __init__(self, numbers: Any) -> None:
        self.held = {number: float(number) for number in numbers}
        self.reads = 0

    def _load_adapter(self, asked: Any) -> Weights:
        self.reads += 1
        if asked.lora_int_id not in self.held:
            raise FileNotFoundError("no such adapter")
        return Weights(asked.lora_int_id, self.held[asked.lora_int_id])


def make_loaded(slots: int = 1, capacity: int = 0, files: Any = None, modules: Any = ()) -> Any:
    model = SimpleNamespace(lora_manager=Manager(slots, capacity or slots, modules))
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=32), model_config=SimpleNamespace(max_model_len=64)
    )
    made = LoadedAdapters(model, config)  # type: ignore[arg-type]
    made._loader = files if files is not None else Files(range(1, 10))
    return made


def worker_adapters(loaded: Any, ranks: Any = ALONE, timeout_s: float = 10.0) -> Any:
    return WorkerAdapters(loaded, ranks, timeout_s)


def adapter(number: int, digest: str) -> Any:
    return Adapter(number, digest, request(number))


def digests(*numbers: int) -> dict[int, str]:
    """Of what `Files` holds at first."""
    loaded = make_loaded(9)
    seen = worker_adapters(loaded)
    seen.begin_step([request(number) for number in numbers], is_idle=True)
    return {number: one.digest for number, one in seen.take_seen().items()}


def vllm_computes(loaded: Any, numbers: Any) -> None:
    """vLLM's own step with these adapters, as its model runner begins it."""
    manager = loaded._manager
    for number in numbers:
        if number not in manager.list_adapters():
            if len(manager) + 1 > manager.capacity:
                manager.remove_oldest_adapter()
            manager.add_adapter(Weights(number, float(number)))
        else:
            manager.add_adapter(manager.list_adapters()[number])
        manager.activate_adapter(number)
    manager._last_mapping = LoRAMapping(tuple(numbers), tuple(numbers), True)


@pytest.mark.parametrize("seed", range(6))
def test_what_vllm_computes_in_a_step_stays_where_it_is(seed: int) -> None:
    """Steps at random: our jobs get slots beside its batch or wait; pinned adapters stay; what is used is right."""
    rng = random.Random(seed)
    slots = rng.choice([1, 2, 3])
    loaded = make_loaded(slots, slots + rng.choice([0, 2]))
    manager, side, known = loaded._manager, worker_adapters(loaded), digests(*range(1, 7))
    used = 0
    for _ in range(200):
        batch = rng.sample(range(1, 7), rng.randint(0, slots - len(loaded._pinned())))
        if batch:
            vllm_computes(loaded, batch)
        if rng.random() < 0.05 and slots > 1 and not loaded._pinned() and batch:
            manager.pin_adapter(batch[0])
        pinned, before = loaded._pinned(), list(manager.lora_index_to_id)
        side.begin_step([], is_idle=not batch)
        wanted = [adapter(number, known[number]) for number in rng.sample(range(1, 7), 2)]
        for one, is_in in zip(wanted, side.admits(wanted), strict=True):
            if not is_in:
                assert len({*batch, *pinned}) == slots
                continue
            side.use(one)
            used += 1
            slot = manager.lora_index_to_id.index(one.number)
            assert manager.list_adapters()[one.number].loras["layer"].lora_a[0][0, 0] == one.number
            assert slot < slots and len(manager) <= manager.capacity
        for number in {*batch, *pinned}:
            assert manager.lora_index_to_id.index(number) == before.index(number)
        assert not side.take_seen()
    assert used > 100


def test_rows_are_ours_inside_and_vllms_wrapper_is_never_written_to() -> None:
    layers = [Layer(), Layer()]
    loaded = make_loaded(2, modules=layers)
    vllm_computes(loaded, [4, 5])
    mapping = loaded._manager._last_mapping
    for number, rows, slot in ((5, 7, 1), (5, 3, 1), (0, 3, -1), (4, 64, 0)):
        with loaded.applied(number, rows, layers[:1]):
            wrapper: Any = layers[0].punica_wrapper
            assert wrapper.token_lora_indices.tolist() == [slot] * rows == wrapper.sampler_indices.tolist()
            assert wrapper.no_lora == (number == 0)
            assert layers[1].punica_wrapper is layers[1].own
        assert layers[0].punica_wrapper is layers[0].own
    with pytest.raises(ZeroDivisionError), loaded.applied(4, 1, layers):
        raise ZeroDivisionError
    assert all(layer.punica_wrapper is layer.own for layer in layers)
    loaded._manager.remove_adapter(4)
    vllm_computes(loaded, [6])  # in the slot of 4
    with loaded.applied(6, 1, layers):
        assert layers[0].punica_wrapper.token_lora_indices.tolist() == [0]  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="in no slot"), loaded.applied(4, 1, layers):
        pass
    assert mapping.index_mapping == (4, 5)


def test_weights_that_have_changed_are_told_and_not_used() -> None:
    files = Files([1])
    loaded = make_loaded(files=files)
    side = worker_adapters(loaded)
    side.begin_step([request(1)], is_idle=True)
    first = side.take_seen()[1].digest
    side.use(adapter(1, first))
    files.held[1] = 8.0
    side.use(adapter(1, first))  # the files are not what vLLM computes with
    assert not side.take_seen()
    side.begin_step([request(1, inplace=True)], is_idle=True)
    second = side.take_seen()[1].digest
    assert second not in ("", first)
    with pytest.raises(AdapterChangedError, match="adapter 1"):
        side.use(adapter(1, first))
    assert side.take_seen() == {1: AdapterSeen(second)}
    loaded._manager.remove_adapter(1)
    files.held[1] = 1.0
    with pytest.raises(AdapterChangedError):  # read again, since vLLM let it go
        side.use(adapter(1, second))
    assert side.take_seen() == {1: AdapterSeen(first)}


def test_who_is_loaded_when() -> None:
    """One that cannot be loaded is told, one in vLLM's batch is not read again in place, and one without a place is
    looked at later."""
    files = Files([1, 2])
    loaded = make_loaded(files=files)
    side = worker_adapters(loaded)
    side.begin_step([request(9)], is_idle=True)
    assert side.take_seen()[9].error == "FileNotFoundError: no such adapter"
    vllm_computes(loaded, [1])
    reads, held = files.reads, loaded._manager.list_adapters()[1]
    side.begin_step([request(1, inplace=True)], is_idle=False)
    assert loaded._manager.list_adapters()[1] is held
    assert files.reads == reads and side.take_seen()[1].digest
    side.begin_step([request(2), request(2)], is_idle=False)
    assert side.admits([adapter(2, ""), None, adapter(1, "")]) == [False, True, True]
    side.begin_step([], is_idle=False)
    assert not side.take_seen()
    side.begin_step([], is_idle=True)
    assert side.take_seen()[2].digest
    assert side.admits([adapter(1, "")]) == [True]
    # Without LoRA nothing is asked, and nobody waits.
    side = worker_adapters(None, SimpleNamespace(size=2, agree_each=None))
    side.begin_step([], is_idle=False)
    assert side.admits([None, None]) == [True, True] and side.overdue([None]) == []
    side.use(None)


@pytest.mark.parametrize("what", ["same", "one fails", "other weights"])
def test_ranks_agree_on_what_they_hold(what: str) -> None:
    def work(group: ThreadGroup, ranks: Any) -> Any:
        files = Files([] if what == "one fails" and group.rank else [1])
        if what == "other weights" and group.rank:
            files.held[1] = 3.0
        side = worker_adapters(make_loaded(files=files), ranks)
        side.begin_step([request(1)], is_idle=True)
        return side.take_seen()[1]

    (first, second), _ = on_all(2, work)
    assert bool(first.digest) == (what == "same") == bool(second.digest)
    assert bool(first.error) == bool(second.error) == (what != "same")


# ---- in a worker ---------------------------------------------------------------------------------------------------


class Noted(Prefill):
    """A stand-in for a prefill that notes whose layers ran together, and which adapter was in the slot."""

    def __init__(self, name: str, log: list[Any], loaded: Any) -> None:
        super().__init__()
        self._name, self._log, self._loaded = name, log, loaded

    def next_layer(self) -> Any:
        self._log.append((self._name, list(self._loaded._manager.lora_index_to_id)))
        yield from super().next_layer()


@pytest.fixture
def scene() -> Any:
    loaded, log = make_loaded(), list[Any]()
    made = make_worker(Store(), SimpleNamespace(size=1, rank=0))
    made.adapters = made.checks._adapters = worker_adapters(loaded, timeout_s=0.0)
    made._opener.blend = lambda job: Noted(job.request_id, log, loaded)
    yield SimpleNamespace(side=made, loaded=loaded, log=log)
    made._capture_writer._keeper._store.gate.set()
    made.close()


def blends(**adapters: Any) -> Any:
    return StepJobs(blend=[BlendJob(name, None, Hkvd(), 4, [[5, 6, 7]], None, one) for name, one in adapters.items()])  # type: ignore[arg-type]


def test_layers_of_one_adapter_run_together_and_those_of_others_apart(scene: Any) -> None:
    known = digests(1, 2)
    one, other = adapter(1, known[1]), adapter(2, known[2])
    scene.side.step(blends(a=one, b=other, c=one, base=None))
    scene.side.adapters._timeout_s = 10.0
    for _ in range(20):
        scene.side.step(StepJobs(is_idle=True))
    assert scene.side.take_provided() == {"a", "b", "c", "base"}
    assert all(not outcome.failure for outcome in scene.side.take_outcomes().values())
    assert len(scene.log) == 4 * LAYERS
    slots = {"a": [1], "b": [2], "c": [1]}
    assert all(slots.get(name, held) == held for name, held in scene.log)


@pytest.mark.may_fail("no LoRA slot")
def test_a_job_without_a_slot_waits_for_one_and_is_left_to_vllm_after_a_while(scene: Any) -> None:
    known = digests(1, 2)
    vllm_computes(scene.loaded, [2])
    scene.side.step(blends(waits=adapter(1, known[1]), base=None))
    scene.side.adapters._timeout_s = 10.0
    for _ in range(3):
        scene.side.step(StepJobs())
    assert scene.side.take_provided() == {"base"}  # it need not wait for the first
    scene.side.adapters._timeout_s = 0.0
    scene.side.step(StepJobs())
    assert scene.side.take_outcomes()["waits"].failure == "no LoRA slot"
    assert scene.side.take_failed_blocks() == {6, 7}
    assert scene.loaded._manager.lora_index_to_id == [2]
    scene.side.step(blends(later=adapter(1, known[1])))
    scene.side.step(StepJobs(is_idle=True))
    assert not scene.side.take_outcomes()["later"].failure


def test_a_job_for_other_weights_fails_by_name_and_nothing_is_computed_for_it(scene: Any) -> None:
    scene.side.step(blends(old=adapter(1, "old"), base=None))
    scene.side.step(StepJobs(is_idle=True))
    outcomes = scene.side.take_outcomes()
    assert (outcomes["old"].failure, outcomes["base"].failure) == ("LoRA changed", "")
    assert {name for name, _ in scene.log} == {"base"}
    assert scene.side.adapters.take_seen()[1].digest == digests(1)[1]
