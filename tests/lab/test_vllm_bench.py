"""Figures of `lab vllm ttft|latency|shadow`, of servers and times that are known; a replay's arithmetic and trace."""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines import processor, provenance
from lab.bench import figure_lines, median_interval
from lab.servers import vllm_bench
from lab.servers.replay import LENGTHS, REQUESTS, Sample, TraceText, prompt, read_trace, row_layer_ceiling
from lab.servers.vllm_replay import FILLING_TOKENS, filling_prompts
from lab.servers.vllm_server import Pair, Streamed, dtype_of
from lab.settings import PromptShape


@pytest.mark.parametrize("seed", range(5))
def test_nineteen_of_twenty_intervals_hold_the_median(seed: int) -> None:
    draw = random.Random(seed)
    held = 0
    for number in range(200):
        low, high = median_interval([draw.gauss(1, 0.1) for _ in range(20)], number, 400)
        held += low <= 1 <= high
    assert 175 <= held <= 200
    assert median_interval([0.25] * 7) == (0.25, 0.25)


def test_a_figure_is_printed_with_its_interval_beside_it() -> None:
    result = {"figures": {"ttft_speedup": 4, "plain_overhead": 0.01}, "intervals": {"plain_overhead": [-0.02, 0.03]}}
    assert figure_lines(result) == "ttft_speedup: 4.000\nplain_overhead: 0.010 (95 %: -0.020 to 0.030)"


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
        pair, PromptShape(3, 40), 4, seed=1, advance=lambda *at: done.append(at), requests=5, clients=2
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


def write_trace(folder: Path, passages: list[list[int]]) -> Path:
    """Requests with these passages; passage i has 10 + i tokens, other texts 3."""
    ids = {"sys_prompt": 900, "history": 901, "user_input": 902, "web_search": 903}
    for name, file in LENGTHS.items():
        key = f"{name.removesuffix('s_ids')}_id"
        rows = (
            [{key: number, "token_length": 10 + number} for number in range(50)]
            if name == "passages_ids"
            else [{key: ids[name], "token_length": 3}]
        )
        (folder / file).write_text("\n".join(map(json.dumps, rows)) + "\n")
    requests = [
        {"hash_ids": {"passages_ids": each, **{name: [number] for name, number in ids.items()}}} for each in passages
    ]
    (folder / REQUESTS).write_text("\n".join(map(json.dumps, requests)) + "\n\n")
    return folder


@pytest.mark.parametrize("seed", range(20))
def test_the_store_is_filled_by_prompts_that_fit(seed: int) -> None:
    """What discovery learns may be as long as a request: longer than two passages together."""
    draw = random.Random(seed)
    chunks = [[draw.randrange(1000) for _ in range(draw.choice([1, 64, 700, 1484, 1500, 2100]))] for _ in range(12)]
    prompts = list(filling_prompts(chunks))
    found = [ids[start:stop] for ids, spans in prompts for start, stop in spans]
    assert sorted(found) == sorted(chunks)
    for ids, spans in prompts:
        assert len(ids) <= FILLING_TOKENS or len(spans) == 1
        assert len(ids) <= max(FILLING_TOKENS, *map(len, chunks)) + 17  # a server takes 64 more than its longest prompt
    for (ids, _), (_, (following, *_)) in pairwise(prompts):
        assert len(ids) + following[1] - following[0] > FILLING_TOKENS  # it had no place
    assert list(filling_prompts([])) == []


def test_a_trace_has_its_requests_in_order_with_lengths(tmp_path: Path) -> None:
    first, second = read_trace(write_trace(tmp_path, [[4, 2], []]))
    assert first.passages == (TraceText(4, 14), TraceText(2, 12))
    assert second.passages == ()
    assert first.system == (TraceText(900, 3),)
    assert len(TraceText(4, 14).token_ids()) == 14
    assert TraceText(4, 14).token_ids() == TraceText(4, 14).token_ids() != TraceText(5, 14).token_ids()


def test_a_request_is_its_own_tokens_passages_and_question(tmp_path: Path) -> None:
    (request,) = read_trace(write_trace(tmp_path, [[1, 0]]))
    parts = [text.token_ids() for text in (*request.passages, *request.question)]
    assert prompt(request, [7, 8], whole=False) == [7, 8, *parts[0], *parts[1], *parts[2]]
    assert len(prompt(request, [7, 8], whole=True)) == 2 + 11 + 10 + 4 * 3


def test_the_sample_comes_from_the_last_third_and_its_store_from_the_rest(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path, [[1], [2], [], [3], [1, 9], [2, 1]]))
    sample = Sample.of(trace, 2, seed=0)
    assert {request.passages[0].id for request in sample.requests} == {1, 2}
    assert {passage.id for passage in sample.stored} == {1, 2}  # 9 is new, 3 is not asked for
    assert sorted(sample.held_tokens(request) for request in sample.requests) == [11, 23]
    with pytest.raises(InvalidInputError, match="2 requests with passages, not 3"):
        Sample.of(trace, 3, seed=0)


def test_the_ceiling_counts_rows_times_layers() -> None:
    # 100 tokens, 80 stored, 5 layers: 100 + 4 * (20 + 0.25 * 80) = 260 of 500
    assert row_layer_ceiling([(100, 80)], layers=5, ratio=0.25) == pytest.approx(500 / 260)
    assert row_layer_ceiling([(100, 0)], layers=5, ratio=0.25) == pytest.approx(1)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (REQUESTS, "{", "line 1"),
        (REQUESTS, '{"hash_ids": {"passages_ids": [1]}}', "hash_ids.sys_prompt"),
        (REQUESTS, '{"hash_ids": {"sys_prompt": [5000], "passages_ids": []}}', "1_sys_prompt.jsonl"),
        (LENGTHS["history"], '{"history_id": 1}', "3_history.jsonl, line 1"),
        (LENGTHS["history"], "[1]", "an object, got list"),
    ],
)
def test_a_broken_trace_is_named_by_file_and_line(tmp_path: Path, file: str, content: str, words: str) -> None:
    write_trace(tmp_path, [[1]])
    (tmp_path / file).write_text(content + "\n")
    with pytest.raises(InvalidInputError, match=words):
        read_trace(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="RAGPulse folder"):
        read_trace(tmp_path)
