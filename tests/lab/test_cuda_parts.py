"""The parts of `lab cuda` on a CPU: ways of attention, arms, time that is short, and events on a device."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.kernels.attention import attend_rows
from cacheblend.core.kernels.attention_spec import AttentionSpec
from cuda_bench import bench, needs_no_gpu
from lab.gpu import attention_ways, context, kernels, process, run, stores, timeline, ttft

# ---- attention --------------------------------------------------------------------------------------------


@needs_no_gpu
def test_other_ways_of_attention_are_beside_ours() -> None:
    ways = kernels.attention.measure(bench(), kernels.DRY)
    for layout in ("scattered", "runs of 16"):
        found = ways[layout]["ways"]
        assert set(found) == set(attention_ways.WAYS)
        for name in ("cacheblend", "PyTorch, masks by group", "PyTorch, one mask", "FlexAttention"):
            assert found[name]["error"] <= 1e-5 and found[name]["of_flash"] > 0, name
        for name in ("PyTorch varlen", "flash-attn varlen", "vLLM varlen"):
            assert "Error: " in found[name]["skipped"], name


def over_runs(query: Any, pages: Any, begins: Any, seen: Any, table: Any, scale: float) -> torch.Tensor:
    """What a kernel over sequences in pages computes: the last row of each sees its last key."""
    out = torch.empty_like(query)
    for number, length in enumerate(seen.tolist()):
        rows = slice(int(begins[number]), int(begins[number + 1]))
        count = rows.stop - rows.start
        keys, values = (part[table[number].long()].flatten(0, 1)[:length].transpose(0, 1) for part in pages)
        at = torch.arange(length - count, length)
        out[rows] = attend_rows(query[rows].transpose(0, 1), keys, values, at, AttentionSpec(scale))
    return out


def test_ways_over_runs_ask_for_what_the_rows_see(monkeypatch: pytest.MonkeyPatch) -> None:
    def torchs(
        query, keys, values, begins, none, longest, most, *, scale, window_size, enable_gqa, seqused_k, block_table
    ):
        assert none is None and window_size == (-1, 0) and enable_gqa
        assert (longest, most) == (int(begins.diff().max()), int(seqused_k.max()))
        return over_runs(query, (keys, values), begins, seqused_k, block_table, scale)

    def flash_attns(query, keys, values, begins, ends, longest, most, *, softmax_scale, causal, block_table):
        assert causal and ends.dtype == torch.int32
        return over_runs(query, (keys, values), begins, ends.diff(), block_table, softmax_scale)

    def vllms(query, keys, values, *, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k, **more):
        assert (
            more["causal"] and max_seqlen_q == int(cu_seqlens_q.diff().max()) and max_seqlen_k == int(seqused_k.max())
        )
        pages = keys, values
        return over_runs(query, pages, cu_seqlens_q, seqused_k, more["block_table"], more["softmax_scale"])

    modules = {
        "torch.nn.attention.varlen": SimpleNamespace(varlen_attn=torchs),
        "flash_attn": SimpleNamespace(flash_attn_varlen_func=flash_attns),
        "vllm.vllm_flash_attn": SimpleNamespace(flash_attn_varlen_func=vllms),
    }
    monkeypatch.setattr(attention_ways, "import_module", modules.__getitem__)
    sizes = kernels.attention.AttentionSizes(600, 50, 4, 2, 32, torch.float32, 1)
    for layout in kernels.attention.measure(bench(), sizes).values():
        for name in ("PyTorch varlen", "flash-attn varlen", "vLLM varlen"):
            assert layout["ways"][name].get("error", 1.0) <= 1e-5, layout["ways"][name]


def test_attention_that_differs_is_an_error_and_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(rows: attention_ways.Rows) -> attention_ways.Call:
        return lambda: attention_ways.plain(rows)() + 1

    monkeypatch.setattr(kernels.attention, "WAYS", {"cacheblend": wrong, "FlexAttention": wrong})
    found = kernels.measure(bench())
    assert "attention of scattered: differs from PyTorch by 1" in found["error"]
    assert set(found["figures"]) == {"place_of_bandwidth"}


# ---- the first token --------------------------------------------------------------------------------------


def test_compiled_layers_are_measured_beside_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def pretend(view: Any, device: torch.device) -> str:
        asked.append(view)
        return "" if len(asked) == 1 else "no compiler"

    monkeypatch.setattr(stores, "compile_layers", pretend)
    found = ttft.measure_compiled(bench())
    arms = [(arm["store"], arm["ratio"]) for arm in found["points"][0]["arms"]]
    assert arms == [(store, ratio) for ratio in (0.15, 0.05) for store in (stores.STORES[0], stores.COMPILED)]
    assert "error" not in found and not found["figures"]
    with pytest.raises(InvalidInputError, match="layers are not compiled: no compiler"):
        ttft.measure_compiled(bench())


def test_a_point_that_is_short_of_time_keeps_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ttft, "timed", lambda arm, prompt, model: (1.0, None))
    tried = bench()
    monkeypatch.setattr(context.Bench, "left_s", property(lambda self: -1.0))
    monkeypatch.setattr(context.Bench, "has_time", lambda self, what, seconds: True)
    found = ttft._measure((ttft.Point("tiny", "", 1, 16, 5, 1.0),), "ttft", tried)
    assert {arm["runs"] for arm in found["points"][0]["arms"]} == {1}
    assert tried.skipped["ttft tiny, 16 tokens, rounds"] == "time was up after 1 of 5"


def test_points_are_expected_to_take_as_long_as_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(context.Bench, "has_time", lambda self, what, seconds: asked.append(seconds) or True)
    monkeypatch.setattr(ttft, "_measure_point", lambda *_: [])
    clock = iter([0.0, 30.0, 30.0, 40.0])
    monkeypatch.setattr(ttft, "time", SimpleNamespace(monotonic=lambda: next(clock)))  # not that of other threads
    ttft._measure(tuple(ttft.Point("tiny", "", 1, 16, 5, seconds) for seconds in (10.0, 20.0)), "ttft", bench())
    assert asked == [5.0, 5.0, 0.5 * 3 * 20.0]


# ---- time, and the device ---------------------------------------------------------------------------------


def test_what_there_is_no_time_for_is_skipped_and_said() -> None:
    found = run.run(("kernels", "ttft"), dry_run=True, minutes=0.001)
    assert set(found["skipped"]) == {"kernels", "ttft"} and "were left" in found["skipped"]["ttft"]
    assert not found["figures"] and not found["parts"]
    late = bench(until=0.0)
    assert ttft.measure(late) == {"figures": {}, "points": []}
    assert list(late.skipped) == ["ttft tiny"]


def test_later_parts_keep_the_time_that_they_need_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PARTS", {name: replace(part, missing=lambda: "") for name, part in run.PARTS.items()})
    running = run._Run(1000.0, False, print, print)
    names = list(run.PARTS)
    until = {name: running._task(name, names[place + 1 :]).until for place, name in enumerate(names)}
    assert until["large"] == until["vllm"] == 1000  # nobody leaves it anything for the large shape
    assert until["timeline"] == 1000 - 240 - process.GRACE_S == until["ttft"] + 20 + process.GRACE_S


def test_events_of_a_device_are_put_into_lanes() -> None:
    def event(name: str, start: float, end: float, device: str = "DeviceType.CUDA") -> Any:
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), device_type=device)

    events = [
        event("cacheblend: begin", 1000.0, 1001.0, "DeviceType.CPU"),
        event("aten::mm", 1010.0, 1020.0, "DeviceType.CPU"),
        event("Memcpy HtoD (Pinned -> Device)", 1100.0, 1300.0),
        event("Memcpy DtoD (Device -> Device)", 1300.0, 1310.0),
        event("_place_kernel", 1300.0, 1400.0),
        event("ampere_bf16_gemm", 1350.0, 1500.0),
    ]
    found = timeline.slices_of(events, [(0.0, 5e-5)], is_cuda=True)
    lanes = [(each.lane, round(1e6 * each.start_s), round(1e6 * each.end_s)) for each in found]
    assert lanes == [
        ("read", 0, 50),
        ("copy", 100, 300),
        ("compute", 300, 310),
        ("place", 300, 400),
        ("compute", 350, 500),
    ]
