"""Tenants take turns: many chunks of one, a queue that is bounded, and work whose client or server goes."""

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.tickets import Limits, QueueFullError, TooLateError
from cacheblend.serve.errors import ApiError
from cacheblend.serve.fair_queue import FairQueue
from cacheblend.serve.settings import ServeSettings
from random_words import words
from serving import keys_of, running, shallow

# ---- many chunks --------------------------------------------------------------------------------------------


def chunks_of(who: str, count: int) -> dict[str, Any]:
    return {"chunks": [{"text": words(60)} for _ in range(count)]}


def documents_of(who: str, count: int) -> dict[str, Any]:
    return {"documents": [{"id": f"{who} {number}", "text": words(480)} for number in range(count)]}


@pytest.mark.parametrize(("kind", "post_of", "count"), [("chunks", chunks_of, 300), ("documents", documents_of, 60)])
def test_a_short_post_does_not_wait_for_a_long_one(
    tmp_path: Path, kind: str, post_of: Callable[[str, int], dict[str, Any]], count: int
) -> None:
    ring, headers = keys_of(tmp_path, "many", "few")
    ended: list[str] = []
    with running(ServeSettings(keys=ring, drain_s=5), model=shallow()) as url:

        def post(who: str, number: int) -> None:
            answer = httpx.post(f"{url}/v1/{kind}", json=post_of(who, number), headers=headers[who], timeout=600)
            assert answer.status_code == 200
            ended.append(who)

        long = threading.Thread(target=post, args=("many", count))
        long.start()
        while not httpx.get(f"{url}/v1/{kind}", headers=headers["many"], timeout=600).json()["data"]:
            time.sleep(0.02)
        post("few", 1)
        long.join()
    assert ended == ["few", "many"]


def test_work_for_a_client_that_is_gone_is_not_done(nano_url: str) -> None:
    before = len(httpx.get(f"{nano_url}/v1/chunks", timeout=60).json()["data"])
    with contextlib.suppress(httpx.TimeoutException):
        httpx.post(f"{nano_url}/v1/chunks", json=chunks_of("", 300), timeout=0.5)
    assert httpx.post(f"{nano_url}/v1/chunks", json=chunks_of("", 1), timeout=300).status_code == 200
    assert len(httpx.get(f"{nano_url}/v1/chunks", timeout=60).json()["data"]) < before + 300


# ---- the queue ----------------------------------------------------------------------------------------------


def sliced(log: list[str], name: str, count: int) -> Callable[[], Any]:
    def work() -> Iterator[None]:
        for _ in range(count):
            log.append(name)
            time.sleep(0.005)
            yield
        return

    return work


def test_tenants_take_turns_whatever_they_ask_for() -> None:
    log: list[str] = []

    async def go() -> None:
        queue, end = FairQueue(1, 100), time.monotonic() + 60
        many = [asyncio.create_task(queue.run("a", sliced(log, "a", 10), end)) for _ in range(3)]
        await asyncio.sleep(0.01)
        one = asyncio.create_task(queue.run("b", sliced(log, "b", 5), end))
        await asyncio.gather(one, *many)
        queue.close()

    asyncio.run(go())
    first, last = log.index("b"), len(log) - log[::-1].index("b")
    assert log.count("a") == 30 and log[first:last].count("a") <= 6


def test_the_queue_is_bounded_and_who_has_most_gives_way() -> None:
    async def go() -> None:
        queue, end = FairQueue(1, 3), time.monotonic() + 60
        log: list[str] = []
        many = [asyncio.create_task(queue.run("a", sliced(log, str(n), 3), end)) for n in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await queue.run("a", sliced(log, "too many", 1), end)
        await queue.run("b", sliced(log, "b", 1), end)
        ended = await asyncio.gather(*many, return_exceptions=True)
        assert [isinstance(each, QueueFullError) for each in ended] == [False, False, False, True]
        assert "too many" not in log and "3" not in log and queue.waiting == 0
        assert await queue.run("a", lambda: 7, end) == 7  # all places are free again
        queue.close()

    asyncio.run(go())


@pytest.mark.parametrize("seed", range(5))
def test_places_are_given_back_however_work_ends(seed: int) -> None:
    rng = random.Random(seed)

    def fails() -> None:
        raise ValueError("it fails")

    async def gone() -> bool:
        return rng.random() < 0.3

    async def go() -> None:
        queue, tasks = FairQueue(2, 50), []
        for _ in range(40):
            work = rng.choice([fails, lambda: 1, sliced([], "x", 3)])
            end = time.monotonic() + rng.choice([-1, 0.02, 60])
            tasks.append(asyncio.create_task(queue.run(rng.choice("abc"), work, end, gone)))
            if rng.random() < 0.3:
                await asyncio.sleep(0.002)
            if rng.random() < 0.2:
                rng.choice(tasks).cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        kinds = (ValueError, TooLateError, ApiError, asyncio.CancelledError)
        assert all(each in (1, None) or isinstance(each, kinds) for each in ended)
        assert await queue.run("a", lambda: 7, time.monotonic() + 60) == 7
        await asyncio.sleep(0.05)
        assert queue.waiting == 0 and queue._running == 0
        queue.close()

    asyncio.run(go())


def test_a_full_queue_is_told_before_a_text_is_tokenised() -> None:
    with running(ServeSettings(limits=Limits(active=1, waiting=0)), model=shallow()) as url:
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "lamp"})
        assert answer.status_code == 429 and answer.headers["retry-after"]


# ---- a server that ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "lamp", "max_tokens": 1900}),
        ("/v1/responses", {"input": "lamp", "max_output_tokens": 1900}),
    ],
)
def test_a_stream_that_a_drain_cuts_ends_with_an_error(path: str, body: dict[str, Any]) -> None:
    told: list[str] = []
    with running(ServeSettings(drain_s=0), model=shallow()) as url:
        began = threading.Event()

        def read() -> None:
            with httpx.stream(
                "POST", url + path, json=body | {"ignore_eos": True, "stream": True}, timeout=60
            ) as stream:
                for line in filter(None, stream.iter_lines()):
                    told.append(line)
                    if '"text":' in line or "output_text.delta" in line:
                        began.set()

        reader = threading.Thread(target=read)
        reader.start()
        began.wait(30)
    reader.join(30)
    last = json.loads([line for line in told if line.startswith("data: {")][-1][6:])
    if path == "/v1/completions":
        assert told[-1] == "data: [DONE]" and last["error"]["code"] == "shutting_down"
    else:
        assert last["type"] == "response.failed" and last["response"]["error"]["message"]
        assert last["response"]["status"] == "failed"


def test_a_post_that_a_drain_cuts_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    warm = BlendEngine.warm

    def slowly(engine: BlendEngine, *given: Any, **options: Any) -> Any:
        time.sleep(0.3)
        return warm(engine, *given, **options)

    monkeypatch.setattr(BlendEngine, "warm", slowly)
    chunks, found = [{"text": words(600)} for _ in range(60)], list[httpx.Response]()
    with running(ServeSettings(drain_s=0.5), model=shallow()) as url:
        client = threading.Thread(
            target=lambda: found.append(httpx.post(f"{url}/v1/chunks", json={"chunks": chunks}, timeout=300))
        )
        client.start()
        while not httpx.get(f"{url}/v1/chunks", timeout=300).json()["data"]:
            time.sleep(0.05)
    client.join(60)
    assert [answer.status_code for answer in found] == [503]
    assert found[0].json()["error"]["code"] == "shutting_down"
