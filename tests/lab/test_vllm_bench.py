"""Figures of `lab vllm ttft|latency|shadow`, of servers and times that are known."""

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines import processor, provenance
from lab.cli.servers import _lines
from lab.servers import vllm_bench
from lab.servers.prompts import PromptShape
from lab.servers.vllm_bench import median_interval
from lab.servers.vllm_server import Pair, Streamed, dtype_of


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


class Asked:
    """A stand-in for a server: notes what it is asked, and has answers that wait for a while."""

    def __init__(self, log: list[str], name: str, waiting: int = 0) -> None:
        self.log, self.name, self.waiting, self.left = log, name, waiting, 0
        self.prompts: list[tuple[tuple[int, ...], int]] = []

    def ask(self, ids: Sequence[int], tokens: int, chunks: Sequence[Sequence[int]]) -> Streamed:
        assert all(0 < start < stop < len(ids) for start, stop in chunks) and len(chunks) == 3
        self.prompts.append((tuple(ids), tokens))
        self.log.append(self.name)
        self.left = self.waiting
        return Streamed([0.001])

    def wait_for_captures(self, tokens: int) -> None:
        assert tokens == 3 * 40
        self.log.clear()

    def shown(self, name: str) -> float:
        assert name == "shadow_waiting"
        self.left = max(0, self.left - 1)
        return self.left

    def counted(self, name: str) -> float:
        return {"shadow": 7.0, "shadow_dropped": 2.0}[name]

    def counters(self) -> dict[str, float]:
        return {"vllm:cacheblend_shadow_total": 7.0}


@pytest.mark.parametrize("waiting", [0, 3, 10**9])
def test_both_servers_are_asked_the_same_in_turn_and_the_checked_one_settles(
    waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    plain, checked = Asked(log, "plain"), Asked(log, "checked", waiting)

    @contextmanager
    def serving(self: Pair, max_model_len: int) -> Iterator[tuple[Asked, Asked]]:
        assert max_model_len == 32 + 3 * 40 + 32 + 16
        yield plain, checked

    now = [0.0]
    monkeypatch.setattr(Pair, "serving", serving)
    monkeypatch.setattr(vllm_bench.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(vllm_bench.time, "monotonic", lambda: now[0])
    done: list[tuple[int, int]] = []
    pair = Pair(shape="tiny", shadow=0.02, dtype="float32")
    found = vllm_bench.shadow(
        pair, PromptShape(3, 40), 4, seed=1, progress=lambda *at: done.append(at), requests=5, clients=2
    )
    assert plain.prompts[0] != checked.prompts[0]  # stores chunks
    assert {tokens for _, tokens in plain.prompts[1:]} == {vllm_bench.ANSWERED}
    for at in range(1, 26, 5):  # clients are threads: within a round the order is theirs
        assert set(plain.prompts[at : at + 5]) == set(checked.prompts[at : at + 5])
    assert len(set(plain.prompts)) == 26 and len(plain.prompts) == len(checked.prompts) == 26
    turns = [log[at] for at in range(0, len(log), 5)]
    assert turns == ["checked", "plain", "plain", "checked"] * 2 + ["checked", "plain"]
    figures, shadow = found["figures"], found["shadow"]
    assert len(shadow["by_round"]) == 4 and figures["shadow_overhead"] == shadow["overhead"]
    low, high = found["intervals"]["shadow_overhead"]
    assert min(shadow["by_round"]) <= low <= figures["shadow_overhead"] <= high <= max(shadow["by_round"])
    assert (figures["shadow_compared"], figures["shadow_dropped"], shadow["share"]) == (7, 2, 0.02)
    assert done == [(number, 5) for number in range(1, 6)]
    assert checked.left == 0 or now[0] >= 5 * vllm_bench.SETTLE_S


def test_two_servers_have_the_plug_in_and_stores_of_their_own() -> None:
    with ExitStack() as stack:
        first, second = Pair(shape="tiny", ratio=0.3, shadow=0.02)._extras(stack)
        assert first is not None and second is not None
        assert (first.pop("shadow"), second.pop("shadow")) == (0.0, 0.02)
        stores = [each.pop("store") for each in (first, second)]
        assert first == second and first["recompute_ratio"] == 0.3
        folders = [Path(store.removeprefix("file://").split("?")[0]) for store in stores]
        assert folders[0] != folders[1] and all(folder.is_dir() for folder in folders)
        without, with_it = Pair(shape="tiny")._extras(stack)
        assert without is None and with_it is not None and "shadow" not in with_it
    assert not any(folder.exists() for folder in folders)
