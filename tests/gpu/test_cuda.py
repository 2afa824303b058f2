"""The invariants on CUDA, in fp32 and bf16, and parity of the attention's routes there."""

import copy
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cacheblend.core.kernels.attention import AttentionSpec
from cacheblend.core.kernels.operations import (
    ATTEND_ASKING,
    ATTEND_ROWS,
    KV_DEVIATION,
    PLACE,
    Operation,
    attend_rows,
)
from cacheblend.core.kernels.upload import upload
from cacheblend.core.load.staging_buffers import Staging
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.core.select.question_selectors import Hybrid, Query
from cacheblend.core.select.selectors import AllRows, Corrected, Head, Hkvd, NoRows, RandomRows
from cacheblend.engines.hf import SamplingParams
from cacheblend.engines.hf.view import ModelView
from cacheblend.store import MemoryStore, open_store
from cacheblend.store.residence import OnDevice, PageLocked, _register
from families import tiny_model
from parity.scenes import (
    BOS,
    QUESTION,
    RAG,
    UNSEEN,
    A,
    B,
    assert_as_reference,
    assert_close,
    assert_same,
    greedy,
    open_engine,
    run,
)
from reference import blend, plain_kv
from reference_attention import dense_attention

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

FAMILIES = ["llama", "gemma3_text", "gpt_oss"]
INVARIANTS = {"hkvd": Hkvd((1,), (1.0,)), "all": AllRows()}
SELECTORS = {
    "hkvd": Hkvd((1,), (0.3,)),
    "gradual": Hkvd((1, 2), (0.3, 0.1)),
    "corrected head": Corrected(Head(0.1, recency=1.0), 0.5),
    "query": Query(0.2),
    "hybrid": Hybrid((1, 2), (0.3, 0.1), early=0.6),
    "random": RandomRows(0.1),
    "none": NoRows(),
}
FP32 = 1e-4  # the device's kernels differ with the number of rows


@cache
def on_device(family: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return copy.deepcopy(tiny_model(family, dtype)).to(DEVICE)


def error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative to the norm, so that no single logit decides."""
    return float((logits.float() - exact).norm() / exact.norm())


@pytest.mark.parametrize("invariant", INVARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_full_recompute_equals_full_prefill(family: str, invariant: str) -> None:
    model = on_device(family)
    with open_engine(model) as engine:
        outcome = run(engine, RAG, INVARIANTS[invariant])
    assert outcome.report.hit_tokens["memory"] == len(outcome.recomputed) == 115
    assert outcome.result.logits.device.type == DEVICE
    assert_same(outcome.result, *plain_kv(model, RAG.token_ids), FP32)


@pytest.mark.parametrize("invariant", INVARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_full_recompute_in_bf16_is_as_near_the_truth_as_full_prefill(family: str, invariant: str) -> None:
    """The truth is an fp32 model of the same, rounded, weights."""
    model = on_device(family, torch.bfloat16)
    exact, _ = plain_kv(copy.deepcopy(model).float(), RAG.token_ids)
    plain, _ = plain_kv(model, RAG.token_ids)
    with open_engine(model) as engine:
        outcome = run(engine, RAG, INVARIANTS[invariant])
    assert error(outcome.result.logits, exact) <= 1.5 * error(plain, exact) + 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_lone_chunk_behind_its_anchor_is_exact(family: str, dtype: torch.dtype) -> None:
    model, prompt = on_device(family, dtype), Prompt.of([text([BOS]), A, QUESTION])
    plain, kv = plain_kv(model, prompt.token_ids)
    with open_engine(model, anchor="bos") as engine:
        outcome = run(engine, prompt, NoRows())
    assert outcome.report.hit_tokens["prefix"] == 1 + len(A)
    if dtype == torch.float32:
        assert_same(outcome.result, plain, kv, FP32)
    else:
        exact, _ = plain_kv(copy.deepcopy(model).float(), prompt.token_ids)
        assert error(outcome.result.logits, exact) <= 1.5 * error(plain, exact) + 0.01


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_fused_pass_equals_the_oracle(family: str, selector: str) -> None:
    model, prompt = on_device(family), Prompt.of([*RAG.segments[:2], UNSEEN, *RAG.segments[2:]])
    with open_engine(model) as engine:
        outcome = run(engine, prompt, SELECTORS[selector])
    reference = blend(model, prompt, SELECTORS[selector], missing=range(32, 53))
    assert_as_reference(outcome, reference, FP32)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_cpu_stored_serves_the_device(family: str) -> None:
    """One model on two devices has one name space; records lie on the CPU either way."""
    with MemoryStore() as store:
        open_engine(tiny_model(family), store=store).close()
        blocks = store.stats().blocks
        with open_engine(on_device(family), store=store) as engine:
            assert store.stats().blocks == blocks
            outcome = run(engine, RAG, SELECTORS["hkvd"])
    assert outcome.report.missed_tokens == 0
    assert_as_reference(outcome, blend(on_device(family), RAG, SELECTORS["hkvd"]), FP32)


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_layers_that_are_sent_beside_computing_are_those_that_are_sent_in_line(codec: str) -> None:
    """Many passes over one store, so that memory given back by one is what the next is sent to."""
    model = on_device("llama", torch.bfloat16)
    with MemoryStore() as store, open_engine(model, store=store, codec=codec, read_ahead=0) as in_line:
        expected = run(in_line, RAG, SELECTORS["hkvd"]).result
        with open_engine(model, [], store=store, codec=codec, read_ahead=2) as beside:
            for _ in range(20):
                result = run(beside, RAG, SELECTORS["hkvd"]).result
                assert_same(result, expected.logits, expected.kv, 0.0)


@pytest.mark.parametrize("codec", ["raw", "int4"])
@pytest.mark.parametrize(
    "url",
    ["cuda://?max_bytes=1GiB", "memory://?page_locked=true", "cuda://?max_bytes=15KB, memory://?page_locked=true"],
)
def test_records_that_lie_elsewhere_are_the_same(url: str, codec: str) -> None:
    """On the device, in page-locked memory, and where the one is too small for all and evicts for each request."""
    model = on_device("llama", torch.bfloat16)
    with MemoryStore() as store, open_engine(model, store=store, codec=codec) as engine:
        expected = run(engine, RAG, SELECTORS["hkvd"]).result
    with open_store(url) as store, open_engine(model, store=store, codec=codec) as engine:
        for _ in range(10):
            outcome = run(engine, RAG, SELECTORS["hkvd"])
            assert outcome.report.missed_tokens == 0
            assert_same(outcome.result, expected.logits, expected.kv, 0.0)


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.bfloat16), ("llama", torch.float32), ("gpt_oss", torch.bfloat16)]
)
def test_norms_take_one_kernel_and_compute_the_same(family: str, dtype: torch.dtype) -> None:
    model = on_device(family, dtype)
    own, ours = (each.get_submodule("model.layers")[0].input_layernorm for each in (model, ModelView(model).model))
    rows = torch.randn(1, 9, len(own.weight), device=DEVICE, dtype=dtype)
    one, other = own(rows).float(), ours(rows).float()
    assert bool(((one - other).abs() <= 2 * torch.finfo(dtype).eps * one.abs() + 1e-6).all())
    with Started() as started:
        ours(rows)
    assert len(started.names) == 1, started.names


class Started(TorchDispatchMode):
    """What is asked of the device, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(each.alias_info is not None for each in func._schema.returns):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_of_layers_compute_what_the_layers_do(family: str, dtype: torch.dtype, caplog: Any) -> None:
    """Passes of many numbers of rows, beside readers of records, and decoding; each number comes twice."""
    model, found = on_device(family, dtype), []
    ratios = [0.05, 0.2, 0.4, 0.7, 1.0] * 2
    for graphs in (False, True):
        with open_engine(model, store=MemoryStore(residence=PageLocked()), layer_graphs=graphs) as engine:
            results = [run(engine, RAG, Hkvd((1,), (ratio,))).result for ratio in ratios]
            answers = engine.generate(RAG, SamplingParams(max_new_tokens=8, ignore_eos=True), ratio=1.0).token_ids
            found.append((results, answers))
            served = (
                [not each._is_plain and bool(each._shared._by_rows) for each in engine.runtime.view._called]
                if graphs
                else []
            )
    assert served and all(served) and "without graphs" not in caplog.text
    tolerance = FP32 if dtype == torch.float32 else 0.1
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert error(other.logits, one.logits.float()) < tolerance
    if dtype == torch.float32:
        assert found[0][1] == found[1][1]


def test_memory_that_is_locked_is_known_to_the_device_as_such() -> None:
    (record,) = PageLocked().keep([torch.arange(5000, dtype=torch.float32)]) or []
    assert record.is_pinned() and torch.equal(record.cuda().cpu(), torch.arange(5000, dtype=torch.float32))


def test_stores_that_go_leave_nothing_locked_and_a_lock_that_is_refused_poisons_nothing() -> None:
    records = [torch.full((2000,), float(number)) for number in range(6)]
    for _ in range(20):
        residence = PageLocked(spare_bytes=1 << 20)
        kept = [residence.keep([record]) or [] for record in records]
        assert all(each[0].is_pinned() for each in kept) and not residence.not_locked
        del kept, residence
    (held,) = PageLocked().keep(records[:1]) or []
    with pytest.raises(RuntimeError, match="cannot be locked"):
        _register(held.data_ptr(), 4096)
    assert torch.ones(3, device=DEVICE).sum().item() == 3


def test_records_that_are_dropped_before_the_device_has_read_them_are_read_as_they_were() -> None:
    """Their memory must not be given to others until then."""
    staging, sleep = Staging(torch.device(DEVICE)), 200_000_000  # cycles
    for residence in (OnDevice(torch.device(DEVICE)), PageLocked()):
        records = residence.keep([torch.full((1 << 20,), float(n)) for n in range(8)]) or []
        with staging.stream():
            torch.cuda._sleep(sleep)
            copies = [record.clone() for (record,) in staging.send([(record,) for record in records])]
            staging.memory.hold(staging.now(), records)
        del records
        for _ in range(16):  # would take the memory, and write to it, if it were free
            torch.full((1 << 20,), -1.0, device=DEVICE)
            residence.keep([torch.full((1 << 20,), -1.0)])
        torch.cuda.synchronize()
        assert len(copies) == 8 and all(bool(copy.eq(number).all()) for number, copy in enumerate(copies))


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_chunks_are_what_a_plain_prefill_gives(family: str) -> None:
    model = on_device(family)
    with open_engine(model, [B], capture=True) as engine:
        engine.generate(Prompt.of([QUESTION, B, UNSEEN, A]), SamplingParams(max_new_tokens=1))
        assert engine.flush(timeout=60)
        manifests = engine.store.manifests()
        assert len(manifests) == 3
        for manifest in manifests:
            _, layers = plain_kv(model, manifest.token_ids)
            for layer, (keys, values) in enumerate(layers):
                records = [engine.store.read(name, layer) for name in manifest.block_names]
                expected = torch.stack([keys, values], dim=1).cpu()
                assert_close(torch.cat(records, dim=2), expected, FP32, f"layer {layer}")


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_equals_generate(family: str) -> None:
    model, steps = on_device(family), 8
    with open_engine(model) as engine:
        answer = engine.generate(RAG, SamplingParams(max_new_tokens=steps, ignore_eos=True), ratio=1.0)
    assert answer.token_ids == greedy(model, RAG, steps)


def test_options_of_an_answer_hold_on_the_device() -> None:
    options = {"logit_bias": [(5, 100.0)], "bad_words": [(5, 5)], "presence_penalty": 0.1, "repetition_penalty": 1.1}
    with open_engine(on_device("llama")) as engine:
        ids = engine.generate(RAG, max_new_tokens=8, min_new_tokens=4, stop_token_ids=[5], **options).token_ids
        assert 5 not in ids[:4] and ids[4:] == [5]
        drawing = {"temperature": 2.0, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "ignore_eos": True}
        assert len(engine.generate(RAG, max_new_tokens=8, **drawing, **options).token_ids) == 8


SPECS = {
    "plain": AttentionSpec(0.125),
    "window": AttentionSpec(0.125, window=100),
    "softcap": AttentionSpec(0.125, softcap=20.0),
    "sinks": AttentionSpec(0.125, sinks=torch.linspace(-2, 2, 8)),
    "all of them": AttentionSpec(0.125, window=100, softcap=20.0, sinks=torch.linspace(-2, 2, 8)),
}
ROWS = {
    "every row": torch.arange(1500),
    "scattered": torch.arange(3, 1500, 7),
    "the last": torch.tensor([1499]),
    "the first": torch.tensor([0, 1]),
    "a run and some": torch.cat([torch.tensor([5, 90, 400]), torch.arange(700, 900), torch.tensor([1301])]),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("operation", [ATTEND_ROWS, ATTEND_ASKING, PLACE, KV_DEVIATION], ids=lambda each: each.name)
def test_the_kernel_serves_this_device(operation: Operation[Any], dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the kernel is for compute capability 8.0 and later")
    pytest.importorskip("triton", reason="Triton is not installed here")
    served = operation.on(torch.device(DEVICE, 0), dtype)
    assert served.name == "Triton", served.reason


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_waits_for_the_device_twice_at_most(family: str, selector: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed here")
    with open_engine(on_device(family, torch.bfloat16), store=MemoryStore()) as engine:
        engine.prefill(RAG, selector=SELECTORS[selector])  # kernels are compiled and checked
        with warnings.catch_warnings(record=True) as waited:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                engine.prefill(RAG, selector=SELECTORS[selector])
            finally:
                torch.cuda.set_sync_debug_mode("default")
    waits = [each for each in waited if "synchroniz" in str(each.message)]
    assert len(waits) <= 2, [f"{each.filename}:{each.lineno}" for each in waits]


def test_what_is_uploaded_may_be_dropped_at_once() -> None:
    """The copy begins long after: its source must not be given to others until then."""
    expected = [torch.full((1 << 16,), number) for number in range(20)]
    upload(expected[0], torch.device(DEVICE))
    torch.cuda._sleep(200_000_000)  # cycles
    found = [upload(each, torch.device(DEVICE)) for each in expected]
    assert all(torch.equal(one.cpu(), two) for one, two in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("spec", SPECS)
def test_every_route_of_attention_equals_the_dense_one(spec: str, rows: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    length, positions, asked = 1500, ROWS[rows].to(DEVICE), SPECS[spec]
    if asked.sinks is not None:
        asked = AttentionSpec(asked.scaling, asked.window, asked.softcap, asked.sinks.to(DEVICE, dtype))
    query, keys, values = (
        torch.randn(heads, n, 64, generator=generator).to(DEVICE, dtype)
        for heads, n in ((8, len(positions)), (2, length), (2, length))
    )
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    out = attend_rows(query, keys, values, positions, asked)
    assert out.dtype == dtype and out.device.type == DEVICE
    assert_close(out.float(), dense_attention(query, keys, values, positions, asked), tolerance, f"{spec}, {rows}")
