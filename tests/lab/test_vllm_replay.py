"""The replay's arithmetic and its trace; servers are measured, not tested."""

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from cacheblend.core.errors import InvalidInputError
from lab.servers.ragpulse import LENGTHS, REQUESTS, TraceText, read_trace
from lab.servers.replay import Sample, row_layer_ceiling
from lab.servers.vllm_replay import FILLING_TOKENS, filling_prompts, prompt


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
