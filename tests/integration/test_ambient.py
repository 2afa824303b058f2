"""What a caller sets around calls changes no number: autocast, gradients, inference mode, default device and dtype.

Nor do compiled layers: they compute what the plain ones compute, or are not used."""

import contextlib
import inspect
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from cacheblend.core.config import BlendConfig
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.engines.hf import BlendEngine, SamplingParams
from cacheblend.engines.hf.ambient import without_ambient
from cacheblend.engines.hf.baselines import full_recompute, fused, prefix_caching
from cacheblend.engines.hf.prefiller import HfPrefill
from cacheblend.engines.hf.request import Request
from cacheblend.engines.hf.scheduler import Scheduler
from cacheblend.engines.hf.tickets import Ask, DoneEvent, Event, TokenEvent
from campaign import rotating
from families import BLENDABLE, HYBRID, tiny_model

BLOCK = 16
NAMES = sorted(family.name for family in [*BLENDABLE, *HYBRID])
SOME = [name for name in ("llama", "gemma2", "mixtral", "deepseek_v2", "lfm2-tail") if name in NAMES]
GREEDY = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)


@contextlib.contextmanager
def set_to(turn_on: Callable[[Any], None], on: Any, off: Any) -> Any:
    """What is the process's or the thread's, and has no context of its own."""
    turn_on(on)
    try:
        yield
    finally:
        turn_on(off)


class Passing(TorchFunctionMode):
    """A caller's own mode, which changes nothing."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
    "gradients": torch.enable_grad,
    "inference mode": torch.inference_mode,
    "default device": lambda: torch.device("meta"),
    "default dtype float64": lambda: set_to(torch.set_default_dtype, torch.float64, torch.float32),
    "default dtype bfloat16": lambda: set_to(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "default dtype float16": lambda: set_to(torch.set_default_dtype, torch.float16, torch.float32),
    "default device of the thread": lambda: set_to(torch.set_default_device, "meta", None),
    "deterministic algorithms": lambda: set_to(torch.use_deterministic_algorithms, True, False),
    "denormals": lambda: set_to(torch.set_flush_denormal, True, False),
    "no oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
    "hooks of saved tensors": torch.autograd.graph.save_on_cpu,
    "a mode": Passing,
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "math attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
}


def ids(seed: int, count: int) -> list[int]:
    return torch.randint(3, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


CHUNKS = [chunk(ids(seed, 40)) for seed in (1, 2, 3)]
PROMPT = Prompt.of([text([1, 5, 6]), *CHUNKS, text(ids(9, 12))])
LONE = Prompt.of([text([1]), CHUNKS[0], text(ids(8, 12))])


def opened(family: str) -> BlendEngine:
    config = BlendConfig(block_size=BLOCK, recompute_ratio=0.3, capture=True)
    return BlendEngine(tiny_model(family), store="memory", config=config, bos_id=1, fingerprint="of this test")


def warmed(engine: BlendEngine, draws: Callable[[], AbstractContextManager[Any]]) -> BlendEngine:
    for each in CHUNKS:
        with draws():
            engine.warm([each])
    return engine


def outcomes(engine: BlendEngine, draws: Callable[[], AbstractContextManager[Any]]) -> list[torch.Tensor]:
    """What every way of computing comes to, each inside of settings of its own."""
    found: list[Any] = []
    with draws():
        found.append(engine.generate(PROMPT, GREEDY).token_ids)
    for mode in ("blend", "reuse", "prefix", "full"):
        with draws():
            found.append(engine.prefill(PROMPT, mode=mode).logits)  # type: ignore[arg-type]
    with draws():
        found.append(engine.prefill(LONE).logits)
    with draws():
        prefill = engine.runtime.open_prefill(PROMPT)
    is_done = False
    while not is_done:
        with draws():
            assert prefill.awaited is not prefill
        with draws():
            is_done = prefill.advance() and prefill.done
    with draws():
        found.append(prefill.result().logits)
        prefill.close()
    with draws():
        request = engine.start(PROMPT, GREEDY)
    while not request.done:
        with draws():
            request.step()
    with draws():
        request.finish()
    found.append(request.token_ids)
    with draws():
        pieces, answers = engine.stream(PROMPT, GREEDY), list[Any]()
    while not answers or answers[-1] is not None:
        with draws():
            answers.append(next(pieces, None))
    found.append(answers[-2].answer.token_ids)
    for baseline in (full_recompute, prefix_caching):
        with draws():
            found.append(baseline(engine, PROMPT).logits)
    with draws():
        found.append(fused(engine, PROMPT, engine.config.make_selector()).logits)
    with draws():
        engine.flush()
    return [torch.as_tensor(each).float() for each in found]


def drawn(seed: int) -> Callable[[], AbstractContextManager[Any]]:
    draws = random.Random(seed)

    def draw() -> AbstractContextManager[Any]:
        stack = ExitStack()
        for name in draws.sample(sorted(SETTINGS), draws.choice((1, 1, 2, 3))):
            stack.enter_context(SETTINGS[name]())
        return stack

    return draw


@pytest.mark.parametrize("family", rotating(NAMES, core=SOME))
def test_the_default_dtype_changes_nothing_in_any_family(family: str) -> None:
    """It is the process's, so that nobody can switch it off for one thread; no model's code asks for it."""
    model = tiny_model(family)
    prompt = torch.tensor([PROMPT.token_ids.tolist()])
    with torch.no_grad():
        wanted = model(input_ids=prompt).logits
        for dtype in (torch.float64, torch.bfloat16):
            with set_to(torch.set_default_dtype, dtype, torch.float32):
                found = model(input_ids=prompt).logits
            torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", SOME)
def test_no_setting_around_any_call_changes_what_is_computed_or_stored(family: str) -> None:
    with opened(family) as plain, opened(family) as other:
        nothing = contextlib.nullcontext
        wanted = outcomes(warmed(plain, nothing), nothing)
        seed = SOME.index(family)
        found = outcomes(warmed(other, drawn(seed)), drawn(100 + seed))
        for number, (one, two) in enumerate(zip(wanted, found, strict=True)):
            torch.testing.assert_close(one, two, atol=2e-5, rtol=1e-4, msg=lambda text, n=number: f"{n}: {text}")
        again = outcomes(other, nothing)  # from what was stored inside of settings
        with ThreadPoolExecutor(1) as pool:
            elsewhere = pool.submit(outcomes, other, drawn(200 + seed)).result()
        for one, two in zip([*wanted, *wanted], [*again, *elsewhere], strict=True):
            torch.testing.assert_close(one, two, atol=2e-5, rtol=1e-4)


def test_an_engine_opened_inside_of_settings_is_the_same_and_they_stay_outside() -> None:
    with opened("llama") as plain:
        wanted = outcomes(warmed(plain, contextlib.nullcontext), contextlib.nullcontext)
    for name, setting in SETTINGS.items():
        with setting():
            before = (torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), torch.get_default_device())
            engine = opened("llama")
            assert before == (torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), torch.get_default_device())
        with engine:
            found = outcomes(warmed(engine, contextlib.nullcontext), contextlib.nullcontext)
        for one, two in zip(wanted, found, strict=True):
            torch.testing.assert_close(one, two, atol=2e-5, rtol=1e-4, msg=name)


def test_a_scheduler_and_background_work_started_inside_of_settings_compute_outside_of_them() -> None:
    with opened("llama") as plain:
        wanted = plain.generate(PROMPT, GREEDY).token_ids
    for setting in SETTINGS.values():
        events: list[Event] = []
        with opened("llama") as engine:
            with setting():
                scheduler = Scheduler(engine.runtime)
                scheduler.submit(Ask(PROMPT, GREEDY), events.append)
            scheduler.close(60)
            engine.flush()
            *tokens, done = events
            assert isinstance(done, DoneEvent) and done.error is None
            assert [event.token_id for event in tokens if isinstance(event, TokenEvent)] == wanted
            prompt = Prompt.of([text([1]), CHUNKS[0], text(ids(8, 12))])
            loaded = engine.prefill(prompt)
            assert sum(loaded.report.hit_tokens.values()) > 0
            torch.testing.assert_close(loaded.logits, engine.prefill(prompt, mode="full").logits, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", [BlendEngine, Request, HfPrefill])
def test_all_public_methods_are_entry_points(kind: type) -> None:
    """One that is added is, without anything to think of, and so are properties."""
    public = [each for name, each in inspect.getmembers_static(kind) if not name.startswith("_")]
    functions = [each.fget if isinstance(each, property) else each for each in public]
    functions = [each for each in functions if inspect.isfunction(each)]
    assert functions and all(hasattr(each, "__wrapped__") for each in functions)


class Entries:
    """Of each kind one, which says what it finds set around it."""

    @property
    def found(self) -> bool:
        return torch.is_autocast_enabled("cpu") or torch.is_grad_enabled() or torch.empty(1).is_meta

    @found.setter
    def found(self, value: bool) -> None:
        assert not self.found

    @staticmethod
    def static() -> bool:
        return Entries().found

    def method(self) -> bool:
        return self.found

    def pieces(self) -> Iterator[bool]:
        try:
            received = yield self.found
            assert received == "sent"
            yield self.found
        finally:
            self.ended = self.found

    def given(self) -> Iterator[bool]:
        return self.pieces()


def test_every_kind_of_entry_is_computed_outside_of_settings() -> None:
    inner = without_ambient(type("Guarded", (Entries,), {}))()
    for setting in (SETTINGS["autocast bfloat16"], SETTINGS["default device"], torch.enable_grad):
        with setting():
            inner.found = True
            assert not inner.found and not inner.static() and not inner.method()
            for pieces in (inner.pieces(), inner.given()):
                assert next(pieces) is pieces.send("sent") is False
                with pytest.raises(StopIteration):
                    next(pieces)
                assert Entries().found, "the caller's own settings stay"
            left = inner.pieces()
            next(left)
            left.close()
            assert inner.ended is False


def test_settings_come_back_after_an_error() -> None:
    @without_ambient
    def fail() -> None:
        assert not torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled()
        assert torch.empty(1).device.type == "cpu"
        raise KeyError

    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        with pytest.raises(KeyError):
            fail()
        assert torch.is_autocast_enabled("cpu") and torch.is_grad_enabled() and torch.empty(1).is_meta
