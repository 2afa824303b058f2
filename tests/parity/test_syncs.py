"""A pass with the kernels hardly ever waits for the device: what it has to know on the host it knows before.

Counted on a CUDA device that this processor pretends to be: the calls in which a real one's host would wait.
See `pretended_device`.
"""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.core.select.question_selectors import Hybrid, Query
from cacheblend.core.select.selectors import AllRows, Corrected, Head, Hkvd, NoRows, RandomRows, Selector, Threshold
from cacheblend.engines.hf import BlendEngine
from campaign import rotating
from families import tiny_model
from parity.scenes import TILE_ROWS, open_engine, random_ids
from pretended_device import COUNTED, DEVICE, Pretended, PretendedDevice, counted, on_device, plain

pytest.importorskip("triton.runtime.interpreter", reason="Triton is not installed here")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted beside a device")

# ---- torch.cuda, and the kernels -----------------------------------------------------------------------------


class _Event:
    """Has passed: work on this device is done when it is started."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record_event(self, event: Any = None) -> _Event:
        return event or _Event()

    def wait_event(self, event: _Event) -> None: ...

    def wait_stream(self, stream: "_Stream") -> None: ...


@contextmanager
def _nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


def pretend_cuda(patch: pytest.MonkeyPatch) -> None:
    """Has `torch.cuda` answer for the pretended device, and the kernels serve it under Triton's interpreter."""
    from triton.runtime import interpreter

    from cacheblend.core.kernels import attention_triton, deviation_triton, kv_placement_triton, operations
    from cacheblend.core.kernels.operations import Served
    from cacheblend.core.load import staging_buffers
    from cacheblend.core.load.loader import LayerLoader

    answers = {
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda *_: _Stream(),
        "stream": _nothing,
        "device": _nothing,
        "device_of": _nothing,
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda *_: COUNTED.add("synchronize"),
        "get_device_properties": lambda *_: SimpleNamespace(multi_processor_count=1),
        "get_device_capability": lambda *_: (9, 0),
    }
    for name, answer in answers.items():
        patch.setattr(torch.cuda, name, answer)
    for name in ("_shared_memory", "_processors"):  # without what is known of a device there may be here
        patch.setattr(attention_triton, name, getattr(attention_triton, name).__wrapped__)
    patch.setattr(Pretended, "record_stream", lambda self, stream: None, raising=False)
    for operation, kernel in (
        (operations.ATTEND_ROWS, attention_triton.attend_rows),
        (operations.ATTEND_ASKING, attention_triton.attend_asking),
        (operations.PLACE, kv_placement_triton.place),
        (operations.KV_DEVIATION, deviation_triton.kv_deviation),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            patch.setitem(operation._served, (DEVICE, dtype), Served(kernel, "Triton"))
    real_launch, real_load = interpreter.GridExecutor.__call__, LayerLoader._load_overlapped
    lock = threading.RLock()  # the interpreter replaces functions of triton.language while it runs

    def launch(self: Any, *args: Any, **options: Any) -> Any:
        with torch._C.DisableTorchFunction(), lock:
            return real_launch(self, *tree_map_only(torch.Tensor, plain, args), **options)

    def load(self: Any, *args: Any) -> Any:
        with PretendedDevice():  # a mode is of one thread
            return real_load(self, *args)

    patch.setattr(interpreter.GridExecutor, "__call__", launch)
    patch.setattr(LayerLoader, "_load_overlapped", load)
    patch.setattr(staging_buffers, "_stream", lambda device: _Stream())


# ---- passes ---------------------------------------------------------------------------------------------------

MOST = 2
"""Calls of a pass that wait; one is `torch.cuda.synchronize` in the end, so that the measured time is right."""

SELECTORS = {
    "hkvd": Hkvd((1,), (0.2,)),
    "gradual": Hkvd((1, 2), (0.5, 0.2)),
    "query": Query(0.2),
    "hybrid": Hybrid((1, 2), (0.3, 0.1), early=0.6),
    "corrected head": Corrected(Head(0.1, recency=1.0), 0.5),
    "random": RandomRows(0.1),
    "none": NoRows(),
    "all": AllRows(),
}
FAMILIES = ["llama", "qwen3", "gemma3_text", "gpt_oss"]
SYSTEM, A, B, UNSEEN, C, QUESTION = (random_ids(tokens, 90 + tokens) for tokens in (7, 20, 17, 10, 33, 9))
CHUNKS = (chunk(A), chunk(B), chunk(C))
PROMPT = Prompt.of([text(SYSTEM), CHUNKS[1], chunk(UNSEEN), CHUNKS[0], CHUNKS[2], text(QUESTION)])


@pytest.fixture(scope="module")
def device() -> Iterator[None]:
    """This processor pretends to be a device."""
    with pytest.MonkeyPatch.context() as patch:
        pretend_cuda(patch)
        with PretendedDevice():
            yield


@cache
def engines(family: str) -> tuple[BlendEngine, BlendEngine]:
    """On the device, and on this processor; in tiles of a few rows for one family, in one tile for the others, which
    takes the interpreter less time."""
    model, tile_rows = on_device(copy.deepcopy(tiny_model(family))), TILE_ROWS if family == "llama" else 256
    there = open_engine(model, CHUNKS, sentence_end_ids=[5, 9], tile_rows=tile_rows)
    return there, open_engine(tiny_model(family), CHUNKS, sentence_end_ids=[5, 9])


def waits(family: str, selector: Selector) -> list[str]:
    """The calls of a pass that wait; its logits are those without a device."""
    engine, expected = engines(family)
    with counted() as calls:
        result = engine.prefill(PROMPT, selector=selector)
    assert result.report.hit_tokens["memory"] == len(A) + len(B) + len(C)
    assert isinstance(result.logits, Pretended) and isinstance(result.kv[-1].keys, Pretended)
    wanted = expected.prefill(PROMPT, selector=selector).logits
    torch.testing.assert_close(plain(result.logits), wanted, rtol=0, atol=2e-4)
    return calls


@pytest.mark.parametrize("family", rotating(FAMILIES, core=["llama"]))
@pytest.mark.usefixtures("device")
def test_a_pass_waits_for_the_device_twice_at_most(family: str, record_property: Callable[[str, object], None]) -> None:
    found = {name: waits(family, selector) for name, selector in SELECTORS.items()}
    for calls in found.values():
        record_property("syncs", len(calls))
    assert all("synchronize" in calls and len(calls) <= MOST for calls in found.values()), found


@pytest.mark.parametrize(
    "selector", [Query(0.2, words=1.0, hops=1), Hybrid((1, 2), (0.3, 0.1), 0.6, words=1.0, hops=2)]
)
@pytest.mark.usefixtures("device")
def test_each_hop_waits_once_for_the_spans_that_it_follows(selector: Selector) -> None:
    """The host looks for their words."""
    calls = waits("llama", selector)
    assert len(calls) <= selector.hops + MOST and calls[-1] == "synchronize", calls


@pytest.mark.parametrize("checks", [(1,), (1, 2)])
@pytest.mark.usefixtures("device")
def test_a_threshold_waits_for_its_count_at_each_check_layer(checks: tuple[int, ...]) -> None:
    """How many rows exceed the bound depends on the numbers; nothing else waits."""
    calls = waits("llama", Threshold(0.1, checks))
    assert calls == [*["nonzero"] * len(checks), "synchronize"]


COPIES = {
    "to that blocks": lambda host, there: host.to(there.device),
    "cpu that blocks": lambda host, there: there.cpu(),
    "tensor": lambda host, there: torch.tensor([1, 2], device="cuda"),
    "as_tensor": lambda host, there: torch.as_tensor([1, 2], device="cuda"),
    "copy_ that blocks": lambda host, there: there.copy_(host),
    "to of memory that is not pinned": lambda host, there: host.to(there.device, non_blocking=True),
    "copy_ of memory that is not pinned": lambda host, there: there.copy_(host, non_blocking=True),
    "__getitem__ with an index on the host": lambda host, there: there[host],
    "__setitem__ with a value on the host": lambda host, there: there.__setitem__(slice(None), host),
    "repeat_interleave": lambda host, there: there.repeat_interleave(there),
    "tolist": lambda host, there: there.tolist(),
    "item": lambda host, there: there[0].item(),
    "where": lambda host, there: torch.where(there),
    "masked_select": lambda host, there: there.masked_select(there > 1),
}


@pytest.mark.usefixtures("device")
def test_the_count_counts_what_waits_and_nothing_else() -> None:
    with counted() as calls:
        host = torch.arange(5)
        assert host.tolist()[0] == 0 and bool(host.any()) and len(host[host > 1]) == 3
        host.to(torch.float32), host.pin_memory().to("cuda", non_blocking=True)
        there = torch.zeros(5, device="cuda")
        assert there.device.type == "cuda" and there.is_cuda and calls == []
        later = (there + 1).sum()
        assert int(later) == 5 and there[1:].eq(0).all() and len(there[there > 1]) == 0 and len(there.nonzero()) == 0
        assert calls == ["__int__", "__bool__", "__getitem__ with a mask", "nonzero"]
    for what, copied in COPIES.items():
        with counted() as calls:
            copied(host, torch.ones(5, dtype=torch.int64, device="cuda"))
        assert calls == [what]
    pinned = torch.ones(5).pin_memory()
    with counted() as calls:
        there.copy_(pinned, non_blocking=True)
        sent = pinned.to("cuda", non_blocking=True)
        pinned.zero_()
        picked = there[torch.zeros(2, dtype=torch.int64, device="cuda")]
        there[1:3] = 7.0
        repeated = there.repeat_interleave(torch.ones_like(there, dtype=torch.int64), output_size=5)
        results = [sent, picked, repeated, *there.topk(2), there.new_zeros(3), torch.cat([there, sent]).sort().values]
    assert calls == [] and all(each.device.type == "cuda" for each in results)
    assert plain(sent).tolist() == [1] * 5 and plain(there).tolist() == [1, 7, 7, 1, 1]
    with pytest.raises(RuntimeError, match="on the device and on the host"):  # as on a device
        there + host
    assert (there + torch.tensor(2)).device.type == "cuda"  # a number may lie on the host
