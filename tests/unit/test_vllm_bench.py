"""Figures of `bench vllm ttft|latency`, of times that are known."""

import random

import pytest
import torch

from cacheblend.bench.vllm_bench import median_interval
from cacheblend.bench.vllm_server import Pair, dtype_of
from cacheblend.cli.bench.servers import _lines
from cacheblend.core.errors import InvalidInputError
from cacheblend.engines import processor, provenance


def test_the_interval_of_a_constant_is_the_constant() -> None:
    assert median_interval([0.25] * 7) == (0.25, 0.25)


@pytest.mark.parametrize("seed", range(5))
def test_nineteen_of_twenty_intervals_hold_the_median(seed: int) -> None:
    draw = random.Random(seed)
    held = 0
    for number in range(200):
        low, high = median_interval([draw.gauss(1, 0.1) for _ in range(20)], number, 400)
        held += low <= 1 <= high
    assert 175 <= held <= 200


def test_a_figure_is_printed_with_its_interval_beside_it() -> None:
    result = {"figures": {"ttft_speedup": 4, "plain_overhead": 0.01}, "intervals": {"plain_overhead": [-0.02, 0.03]}}
    assert _lines(result) == "ttft_speedup: 4.000\nplain_overhead: 0.010 (95 %: -0.020 to 0.030)"


def test_prompts_longer_than_the_model_takes_are_refused_before_a_server_starts() -> None:
    longer = Pair(shape="qwen2.5-0.5b").serving(32769)
    with pytest.raises(InvalidInputError, match=r"32769 tokens.*qwen2\.5-0\.5b takes 32768.*fewer"), longer:
        pass


@pytest.mark.parametrize(
    ("asked", "multiplies", "cuda", "found"),
    [
        ("auto", True, False, "bfloat16"),
        ("auto", False, False, "float32"),
        ("auto", False, True, "bfloat16"),
        ("bfloat16", False, False, "bfloat16"),
        ("float16", True, False, "float16"),
    ],
)
def test_nobody_is_measured_in_a_dtype_that_the_processor_emulates_unless_asked_for(
    asked: str, multiplies: bool, cuda: bool, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "multiplies_bf16", lambda: multiplies)
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    assert dtype_of(asked) == found


@pytest.mark.parametrize(
    ("machine", "extensions", "onednn", "found"),
    [
        ("x86_64", {"BF16"}, True, True),
        ("x86_64", {"BF16", "AMX"}, True, True),
        ("x86_64", set(), True, False),  # AVX-512 without bf16: oneDNN takes it, four times as slow as float32
        ("AMD64", set(), False, False),
        ("aarch64", set(), True, True),
        ("aarch64", set(), False, False),
    ],
)
def test_products_that_are_converted_to_float32_and_back_are_not_taken_for_fast_ones(
    machine: str, extensions: set[str], onednn: bool, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(processor, "extensions", lambda: extensions)
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn, raising=False)
    assert processor.multiplies_bf16() is found


def test_a_result_names_the_instructions_that_decide_how_fast_a_processor_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: True, raising=False)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: True, raising=False)
    assert provenance.machine()["instructions"] == "AVX512 BF16 AMX"
    monkeypatch.delattr("torch.cpu._is_amx_tile_supported")
    assert processor.instructions() == "AVX512 BF16"
