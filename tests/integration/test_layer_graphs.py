"""Graphs of layers, without a GPU: what a graph keeps is run again in a thread that stops at the attention."""

import copy
import logging
import queue
import random
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cacheblend.core.kernels.operations import attend_rows
from cacheblend.core.load import layer_kv
from cacheblend.core.select.selectors import Corrected, Head, Hkvd
from cacheblend.engines.hf import SamplingParams
from cacheblend.engines.hf.layer_graphs import MOST_ROWS, graphed_layers, padded
from cacheblend.engines.hf.layers import HfLayerRunner
from cacheblend.engines.hf.prefiller import HfPrefill
from cacheblend.engines.hf.view import ModelView
from campaign import rotating
from families import BLENDABLE, HYBRID, tiny_model
from parity.scenes import RAG, assert_close, assert_same, greedy, open_engine, run

TOLERANCE = 3e-5
ATTENDING = {family.name for family in BLENDABLE}
FAMILIES = sorted(family.name for family in [*BLENDABLE, *HYBRID])

LATENT = {
    "axk1",
    "glm4_moe_lite",
    "minicpm3",
    "youtu",
    *(f"deepseek_v{n}{more}" for n in (2, 3) for more in ("", "-yarn")),
}
STATES = {"kimi_linear", "kimi_linear-full", "bailing_hybrid", "falcon_h1"}
PLAIN = LATENT | STATES | {"gemma4_text", "gemma4_unified_text"}
"""Families whose layers are given what no graph can be: latents' taps, states, caches that layers share."""


class Again:
    """In the place of a `CudaRecorder`: runs the same code again, in two parts."""

    def __init__(self, factor: float = 1.0, error: Exception | None = None) -> None:
        self.factor, self.error, self.replays, self.here = factor, error, 0, True

    def is_here(self) -> bool:
        return self.here

    def record(self, run: Callable[[Callable[[], None]], None]) -> tuple[Callable[[], None], Callable[[], None]]:
        if self.error is not None:
            raise self.error
        splits: list[None] = []
        run(lambda: splits.append(None))
        if len(splits) != 1:
            raise RuntimeError(f"{len(splits)} attentions")
        halves: list[Generator[None]] = []

        def first() -> None:
            self.replays += 1
            halves[:] = [stopping(run)]  # one that was not gone on with is let go
            next(halves[0])

        def second() -> None:
            assert next(halves.pop(), "end") == "end"

        return first, second


def stopping(run: Callable[[Callable[[], None]], None]) -> Generator[None]:
    """Runs up to the call of its argument, and then what is behind it, in a thread that waits in between."""
    told: queue.SimpleQueue[BaseException | bool] = queue.SimpleQueue()
    go_on: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def split() -> None:
        told.put(True)
        if not go_on.get(timeout=60):
            raise GeneratorExit

    def work() -> None:
        try:
            with torch.no_grad():
                run(split)
            told.put(False)
        except BaseException as error:
            told.put(error)

    thread = threading.Thread(target=work)
    thread.start()
    is_done = False
    try:
        for _ in range(2):
            found = told.get(timeout=60)
            if isinstance(found, BaseException):
                raise found
            if found:
                yield
                go_on.put(True)
        is_done = True
    finally:
        if not is_done:
            go_on.put(False)
        thread.join(60)


class Broken(Again):
    """Its graphs compute something else."""

    def record(self, run: Callable[[Callable[[], None]], None]) -> Any:
        first, second = super().record(run)
        cells = dict(zip(run.__code__.co_freevars, run.__closure__ or (), strict=True))

        def wrong() -> None:
            second()
            cells["into"].cell_contents.mul_(1.001)

        return first, wrong


def graphed(engine: Any, recorder: Again) -> Any:
    engine.runtime.view.run_as(graphed_layers(engine.runtime.view.layers, recorder))
    return engine


@pytest.mark.parametrize("family", rotating(FAMILIES))
def test_blends_answers_and_full_prefills_are_those_of_plain_layers(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, recorder = tiny_model(family), Again()
    selectors = [Hkvd((1, 2), (ratio, ratio)) for ratio in (0.2, 0.4, 1.0)]
    with open_engine(model) as engine:
        expected = [run(engine, RAG, selector) for selector in selectors]
    with open_engine(model) as engine:
        graphed(engine, recorder)
        found = [run(engine, RAG, selector) for selector in selectors for _ in range(2)]
        answer = engine.generate(RAG, SamplingParams(max_new_tokens=6, ignore_eos=True), ratio=1.0)
    assert answer.token_ids == greedy(model, RAG, 6)
    for number, one in enumerate(found):
        plain = expected[number // 2]
        assert one.recomputed == plain.recomputed
        assert_close(one.result.logits, plain.result.logits, TOLERANCE, f"pass {number}")
        if family in ATTENDING:
            assert_same(one.result, plain.result.logits, plain.result.kv, TOLERANCE)
    is_mixture = "it waits for the device" in caplog.text
    assert recorder.replays == 0 if family in PLAIN else recorder.replays > 0 or is_mixture
    assert is_mixture or "without graphs" not in caplog.text


class Scene:
    """Layers of a view beside themselves in graphs, and rows that attend to any row in front of them."""

    def __init__(self, recorder: Again, family: str = "gemma3_text", rows: int = 200) -> None:
        self.view, self.recorder = ModelView(copy.deepcopy(tiny_model(family))), recorder
        self.plain, self.graphed = list(self.view.layers), graphed_layers(self.view.layers, recorder)
        generator = torch.Generator().manual_seed(0)
        self.runner = HfLayerRunner(self.view, torch.randint(100, (rows,), generator=generator), torch.arange(rows) * 3)
        self.hidden = self.runner.embed()

    def difference(self, layer: int, rows: torch.Tensor) -> float:
        """Of the output of a layer's rows, graphs beside plain layers."""
        outs = []
        for layers in (self.plain, self.graphed):
            self.view.run_as(layers)
            attend = lambda q, k, v, spec: attend_rows(q, k, v, torch.arange(len(rows)), spec)  # noqa: E731
            outs.append(self.runner.run(layer, self.hidden[rows].clone(), rows, attend))
        return float((outs[0] - outs[1]).abs().max())


@torch.no_grad()
def test_any_rows_through_any_layers_in_any_order_are_those_of_plain_layers() -> None:
    draw, scene = random.Random(3), Scene(Again())
    sizes = [1, 2, 9, 64, 65, 130, 200, *(draw.randrange(1, 200) for _ in range(40))]
    for size in sizes * 2:
        rows = torch.tensor(sorted(draw.sample(range(200), size)))
        assert scene.difference(draw.randrange(len(scene.plain)), rows) < TOLERANCE, size
    assert scene.recorder.replays == 2 * len(sizes)


@torch.no_grad()
def test_projected_rows_stay_as_they_were_when_others_are_projected() -> None:
    scene, rows = Scene(Again()), torch.arange(20)
    assert scene.difference(0, rows) < TOLERANCE
    served = scene.recorder.replays
    first = scene.runner.project(0, scene.hidden[rows], rows)
    kept = [part.clone() for part in first]
    scene.runner.project(0, scene.hidden[rows + 40], rows + 40)
    assert all(map(torch.equal, first, kept)) and scene.recorder.replays == served + 2


@torch.no_grad()
@pytest.mark.parametrize("how", ["another weight", "in its place", "a hook", "another stream", "under way elsewhere"])
def test_what_graphs_do_not_know_of_is_computed_without_them(how: str) -> None:
    scene, rows, called = Scene(Again()), torch.arange(30), []
    assert scene.difference(0, rows) < TOLERANCE
    served, norm = scene.recorder.replays, scene.view.layers[0].input_layernorm
    if how == "another weight":  # in the model itself, whose modules are others with the same parameters
        norm._parameters["weight"] = torch.nn.Parameter(norm.weight * 3, requires_grad=False)
    elif how == "in its place":
        norm.weight.mul_(3)
    elif how == "a hook":
        norm.register_forward_hook(lambda *_: called.append(1))
    elif how == "another stream":
        scene.recorder.here = False
    else:
        scene.graphed[0]._shared.lock.acquire()
    assert scene.difference(0, rows) < TOLERANCE
    assert scene.recorder.replays - served == (how in ("another weight", "in its place"))
    assert len(called) == 2 * (how == "a hook")


@torch.no_grad()
@pytest.mark.parametrize("error", [None, RuntimeError("operation not permitted\nin a capture")], ids=["wrong", "fails"])
def test_graphs_that_are_wrong_are_not_used(error: Exception | None, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(Again(error=error) if error else Broken())
    with caplog.at_level(logging.WARNING, "cacheblend.graphs"):
        assert [scene.difference(0, torch.arange(30)) for _ in range(3)] == [0, 0, 0]
    (record,) = caplog.records
    assert ("operation not permitted" if error else "30 rows differ by 0.00") in record.getMessage()
    assert scene.recorder.replays == (0 if error else 1)


@torch.no_grad()
def test_an_attention_that_fails_is_told_and_leaves_the_graphs_usable() -> None:
    scene, rows = Scene(Again()), torch.arange(30)
    scene.view.run_as(scene.graphed)

    def fail(*_: Any) -> torch.Tensor:
        raise KeyError("lost")

    for _ in range(2):
        with pytest.raises(KeyError, match="lost"):
            scene.runner.run(0, scene.hidden[rows].clone(), rows, fail)
        assert scene.difference(0, rows) < TOLERANCE


class Launches(TorchDispatchMode):
    """Names of the operations that a device would start something for: neither views nor memory alone."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in str(func) and "view" not in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_a_deep_layer_with_graphs_is_at_most_twenty_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the thread that computes: both graphs are one each, the attention two, as rows are few; a device's loader has
    a thread of its own, which places what it read."""
    monkeypatch.setattr(layer_kv, "attend_rows", lambda query, *_: query.transpose(0, 1).contiguous())
    monkeypatch.setattr(layer_kv, "place", lambda *_: None)
    recorder, found, advance = Again(), list[list[str]](), HfPrefill.advance

    def counted(prefill: HfPrefill, layers: int = 1) -> bool:
        before = recorder.replays
        with Launches() as launches:  # type: ignore[no-untyped-call]
            is_done = advance(prefill, layers)
        names = [name for name in launches.names if name != "aten.fill_.Scalar"]  # by tests alone, see conftest
        found.append([*names, "join", *["graph"] * 2 * (recorder.replays - before)])
        return is_done

    monkeypatch.setattr(HfPrefill, "advance", counted)
    with open_engine(tiny_model("llama", torch.bfloat16), tile_rows=256) as engine:
        graphed(engine, recorder)
        for selector in (Hkvd((1,), (0.2,)), Corrected(Head(0.2, recency=1.0), 0.5)):
            for _ in range(2):  # the first captures
                found.clear()
                engine.prefill(RAG, selector=selector)
            deep = found[2]  # of four
            assert deep.count("graph") == 2 and len(deep) <= 20, deep


def test_rows_are_padded_to_few_numbers_and_by_little() -> None:
    sizes = {rows: padded(rows) for rows in range(1, MOST_ROWS + 1)}
    assert all(rows <= size <= max(rows + 7, rows * 9 // 8) for rows, size in sizes.items())
    assert sizes[1] == 1 and max(sizes.values()) == MOST_ROWS and len(set(sizes.values())) == 49
