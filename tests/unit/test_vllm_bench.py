"""Figures of `bench vllm ttft|latency`, of times that are known."""

import random

import pytest

from cacheblend.bench.vllm_bench import median_interval
from cacheblend.bench.vllm_server import Pair
from cacheblend.cli.bench.servers import _lines
from cacheblend.core.errors import InvalidInputError


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
