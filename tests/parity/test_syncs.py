"""A pass with the kernels hardly ever waits for the device: what it has to know on the host it knows before."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch

from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.question_selectors import Hybrid, Query
from cacheblend.core.select.selectors import AllRows, Head, Hkvd, NoRows, RandomRows, Selector, Threshold
from cacheblend.engines.hf import BlendEngine
from campaign import rotating
from families import tiny_model
from parity.scenes import RAG, TILE_ROWS, UNSEEN, A, B, C, open_engine
from sync_counting import Pretended, PretendedDevice, counted, on_device, plain, pretend_cuda

MOST = 2
"""Calls of a pass that wait; one is `torch.cuda.synchronize` in the end, so that the measured time is right."""

SELECTORS = {
    "hkvd": Hkvd((1,), (0.2,)),
    "gradual": Hkvd((1, 2), (0.5, 0.2)),
    "query": Query(0.2),
    "hybrid": Hybrid((1, 2), (0.3, 0.1), early=0.6),
    "head": Head(0.1),
    "random": RandomRows(0.1),
    "none": NoRows(),
    "all": AllRows(),
}
FAMILIES = ["llama", "qwen3", "gemma3_text", "gpt_oss"]
PROMPT = Prompt.of([*RAG.segments[:2], UNSEEN, *RAG.segments[2:]])

pytest.importorskip("triton.runtime.interpreter", reason="Triton is not installed here")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted beside a device")


@pytest.fixture
def device() -> Iterator[None]:
    """This processor pretends to be a device."""
    with pytest.MonkeyPatch.context() as patch:
        pretend_cuda(patch)
        with PretendedDevice():
            yield


def engine_on_device(family: str) -> BlendEngine:
    """In tiles of a few rows for one family, in one tile for the others, which takes the interpreter less time."""
    model, tile_rows = on_device(copy.deepcopy(tiny_model(family))), TILE_ROWS if family == "llama" else 256
    return open_engine(model, sentence_end_ids=[5, 9], tile_rows=tile_rows)


def waits(engine: BlendEngine, selector: Selector) -> tuple[list[str], torch.Tensor]:
    """The calls of a pass that wait, and its logits."""
    with counted() as calls:
        result = engine.prefill(PROMPT, selector=selector)
    assert result.report.hit_tokens["memory"] == len(A) + len(B) + len(C)
    assert isinstance(result.logits, Pretended) and isinstance(result.kv[-1].keys, Pretended)
    return calls, plain(result.logits)


@pytest.mark.parametrize("family", rotating(FAMILIES, core=["llama"]))
@pytest.mark.usefixtures("device")
def test_a_pass_waits_for_the_device_twice_at_most(family: str, record_property: Callable[[str, object], None]) -> None:
    engine, found = engine_on_device(family), dict[str, list[str]]()
    expected = open_engine(tiny_model(family), sentence_end_ids=[5, 9])
    for name, selector in SELECTORS.items():
        found[name], logits = waits(engine, selector)
        record_property("syncs", len(found[name]))
        torch.testing.assert_close(logits, expected.prefill(PROMPT, selector=selector).logits, rtol=0, atol=2e-4)
    assert all("synchronize" in calls and len(calls) <= MOST for calls in found.values()), found


@pytest.mark.parametrize("selector", [Query(0.2, hops=1), Hybrid((1, 2), (0.3, 0.1), 0.6, words=1.0, hops=2)])
@pytest.mark.usefixtures("device")
def test_each_hop_waits_once_for_the_spans_that_it_asks(selector: Selector) -> None:
    """The host has to know which rows the next pass computes."""
    calls, logits = waits(engine_on_device("llama"), selector)
    assert len(calls) <= selector.hops + MOST and calls[-1] == "synchronize", calls
    expected = open_engine(tiny_model("llama"), sentence_end_ids=[5, 9]).prefill(PROMPT, selector=selector)
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=2e-4)


@pytest.mark.parametrize("checks", [(1,), (1, 2)])
@pytest.mark.usefixtures("device")
def test_a_threshold_waits_for_its_count_at_each_check_layer(checks: tuple[int, ...]) -> None:
    """How many rows exceed the bound depends on the numbers; nothing else waits."""
    calls, _ = waits(engine_on_device("llama"), Threshold(0.1, checks))
    assert calls == [*["nonzero"] * len(checks), "synchronize"]


@pytest.mark.usefixtures("device")
def test_the_count_counts() -> None:
    with counted() as calls:
        host = torch.arange(5)
        assert host.tolist()[0] == 0 and bool(host.any()) and len(host[host > 1]) == 3
        host.to(torch.float32), host.pin_memory().to("cuda", non_blocking=True)
        assert calls == []
        there = torch.zeros(5, device="cuda")
        assert there.device.type == "cuda" and there.is_cuda and calls == []
        later = (there + 1).sum()
        assert int(later) == 5 and there[1:].eq(0).all() and len(there[there > 1]) == 0 and len(there.nonzero()) == 0
        assert calls == ["__int__", "__bool__", "__getitem__ with a mask", "nonzero"]


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


@pytest.mark.parametrize("what", COPIES)
@pytest.mark.usefixtures("device")
def test_copies_and_reads_are_counted(what: str) -> None:
    host, there = torch.arange(5), torch.ones(5, dtype=torch.int64, device="cuda")
    with counted() as calls:
        COPIES[what](host, there)
    assert calls == [what]


@pytest.mark.usefixtures("device")
def test_what_does_not_wait_is_not_counted_and_stays_on_the_device() -> None:
    there, pinned = torch.zeros(5, device="cuda"), torch.ones(5).pin_memory()
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


@pytest.mark.usefixtures("device")
def test_tensors_of_both_sides_are_refused_as_on_a_device() -> None:
    there = torch.zeros(5, device="cuda")
    with pytest.raises(RuntimeError, match="on the device and on the host"):
        there + torch.arange(5)
    assert (there + torch.tensor(2)).device.type == "cuda"  # a number may lie on the host
