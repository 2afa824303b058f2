"""The scheduler side alone: chunks that are captured, evicted, announced."""

import time
from typing import Any

import pytest

from cacheblend.core.load.capture import manifest_of
from cacheblend.engines.vllm.jobs import StepReport
from cacheblend.engines.vllm.metrics import Counts
from cacheblend.engines.vllm.scheduler.capture_queue import CaptureQueue, tokens_within
from cacheblend.store import MemoryStore
from vllm_requests import CHUNK, PROMPT, Request, scheduling, start


def test_chunks_that_were_evicted_are_announced_when_they_are_next_asked_for() -> None:
    """Found by content, with captures off: by default nobody marks anything."""
    side = scheduling([CHUNK], blend_fields={"capture": False}, keeps_events=True)
    listing, store = side._finder._listing, side._finder._store
    start(side, Request(PROMPT, name="listed"))
    (chunk,) = listing.take_changes(9).added
    entries, store.find = store.find, lambda names: [None for _ in names]
    assert start(side, Request(PROMPT, name="evicted")) == 0
    assert [each.chunk_id for each in listing.take_changes(9).removed] == [chunk.chunk_id]
    assert start(side, Request(PROMPT, name="still")) == 0
    assert listing.take_changes(9).removed == []
    store.find = entries
    assert start(side, Request(PROMPT, name="back")) == 141
    assert [each.chunk_id for each in listing.take_changes(9).added] == [chunk.chunk_id]


def test_a_server_that_does_not_answer_has_not_lost_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    side = scheduling([CHUNK], keeps_events=True)
    listing, store = side._finder._listing, side._finder._store
    start(side, Request(PROMPT, name="listed"))
    listing.take_changes(9)
    monkeypatch.setattr(type(store), "is_reachable", False)
    store.find = lambda names: [None for _ in names]
    assert start(side, Request(PROMPT, name="down")) == 0
    assert listing.take_changes(9).removed == []


def test_an_idle_engine_does_not_wait_for_captures_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    from cacheblend.engines.vllm.scheduler import capture_queue as module

    side = scheduling([])
    missing = Request([1, 2, 3, *CHUNK, 4, 5], [[3, 103]], "missing")
    start(side, missing)
    side.allocated(missing, [[1]], 0)
    side.finished(missing)
    side.take_jobs()
    assert side.is_busy
    now = time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now + module.STUCK_S + 1)
    assert not side.is_busy


def test_what_is_captured_is_found_by_content_and_announced() -> None:
    store = MemoryStore(1 << 20)
    side = scheduling([], store, refresh_s=1000)
    side._finder._listing._keeps_changes = True
    missing = Request([1, 2, 3, *CHUNK, 4, 5], [[3, 103]], "missing")
    start(side, missing)
    side.allocated(missing, [[1]], 0)
    side.finished(missing)
    (job,) = side.take_jobs().capture
    scheduling([CHUNK], store)  # the workers store it
    side.reported(StepReport(1))
    end = time.monotonic() + 30
    events: list[Any] = []
    while not events:
        assert time.monotonic() < end
        events = side.take_events()
    assert [event.token_ids for event in events] == [CHUNK]
    assert events[0].block_hashes == list(manifest_of(job.chunk, job.planner, "").block_names)
    assert start(side, Request(PROMPT, name="later")) == 141
    assert side.take_events() == []


def test_a_capture_that_failed_is_tried_again_for_the_next_request_that_misses_the_chunk() -> None:
    side = scheduling([])

    def misses(name: str) -> Request:
        request = Request([1, 2, 3, *CHUNK, 4, 5], [[3, 103]], name)
        assert start(side, request) == 0
        side.allocated(request, [[1]], 0)
        return request

    side.finished(misses("first"))
    assert len(side.take_jobs().capture) == 1
    meanwhile = misses("meanwhile")
    side.reported(StepReport(1))  # that it has ended: nothing is in the store
    side.finished(meanwhile)  # it missed the chunk while it was computed
    assert side.take_jobs().capture == []
    side.finished(misses("later"))
    assert len(side.take_jobs().capture) == 1


def test_captures_are_bounded_in_bytes() -> None:
    side = scheduling([], capture_bytes=250)
    side._captures = CaptureQueue(256, 250, side.counts)
    chunks = [list(range(at, at + 100)) for at in (100, 200, 300)]
    huge = list(range(1000, 1300))
    ids, spans = [1], []
    for chunk in (*chunks, huge):
        spans.append([len(ids), len(ids) + len(chunk)])
        ids += chunk
    request = Request([*ids, 5], spans)
    start(side, request)
    side.allocated(request, [[1]], 0)
    side.finished(request)
    assert len(side.take_jobs().capture) == 2
    assert side.take_jobs().capture == []
    side.reported(StepReport(1))
    assert len(side.take_jobs().capture) == 1
    side.reported(StepReport(3))
    assert not side.is_busy
    assert side.counts.take().data["fallbacks"] == {"capture too large": 1}
    assert Counts().take() is None


def test_a_bound_of_less_than_a_token_is_a_bound() -> None:
    assert [tokens_within(nbytes, 320) for nbytes in (1, 319, 320, 641)] == [1, 1, 1, 2]
    assert tokens_within(1, 0) == 0  # nothing is known of the sizes
