"""A pass with the kernels hardly ever waits for the device: what it has to know on the host it knows before."""

from collections.abc import Callable

import pytest
import torch

from cacheblend.core.fuse import rows
from cacheblend.core.kernels import operations
from cacheblend.core.kernels.registry import Served
from cacheblend.core.select.question_selectors import Hybrid, Query
from cacheblend.core.select.selectors import AllRows, Hkvd, Selector
from families import tiny_model
from parity.scenes import RAG, A, B, C, open_engine, run
from sync_counting import CountSyncs

MOST = 2  # of a pass

interpreter = pytest.importorskip("triton.runtime.interpreter", reason="Triton is not installed here")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted beside a device")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels serve this processor, under Triton's interpreter, which itself may read what it likes."""
    from cacheblend.core.kernels import attention_triton, deviation_triton, placing_triton

    place = torch.device("cpu"), torch.float32
    for operation, kernel in (
        (operations.ATTEND_ROWS, attention_triton.attend_rows),
        (operations.PLACE, placing_triton.place),
        (operations.KV_DEVIATION, deviation_triton.kv_deviation),
    ):
        monkeypatch.setitem(operation._served, place, Served(kernel, "Triton"))
    monkeypatch.setattr(rows, "_is_on_host", lambda tensor: False)  # this processor stands for a device
    real = interpreter.GridExecutor.__call__

    def call(*args: object, **options: object) -> object:
        with torch._C.DisableTorchFunction():
            return real(*args, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", call)


@pytest.mark.parametrize(
    "selector",
    [Hkvd((1,), (0.2,)), Hkvd((1, 2), (0.5, 0.2)), Query(0.2), Hybrid((1, 2), (0.3, 0.1), early=0.6), AllRows()],
    ids=["hkvd", "gradual", "query", "hybrid", "all"],
)
@pytest.mark.usefixtures("kernels")
def test_a_pass_waits_for_the_device_twice_at_most(
    selector: Selector, record_property: Callable[[str, object], None]
) -> None:
    engine = open_engine(tiny_model("llama"), sentence_end_ids=[5, 9])
    with CountSyncs() as counted:
        result = engine.prefill(RAG, selector=selector)
    record_property("syncs", len(counted.calls))
    assert result.report.hit_tokens["memory"] == len(A) + len(B) + len(C)
    assert len(counted.calls) <= MOST, counted.calls
    expected = run(open_engine(tiny_model("llama"), sentence_end_ids=[5, 9]), RAG, selector)
    torch.testing.assert_close(result.logits, expected.result.logits, rtol=0, atol=2e-4)


def test_the_count_counts() -> None:
    with CountSyncs() as counted:
        host = torch.arange(5)
        assert host.tolist()[0] == 0 and bool(host.any()) and len(host[host > 1]) == 3
        assert counted.calls == []
        device = torch.zeros(5, device="cpu")
        later = (device + 1).sum(), host.to(torch.device("cpu"))
        assert int(later[0]) == 5 and later[1].tolist() == [0, 1, 2, 3, 4] and len(device[device > 1]) == 0
        assert bool((device[1:] == 0).all()) and len(device.nonzero()) == 0
    assert counted.calls == ["__int__", "tolist", "__getitem__", "__bool__", "nonzero"]
