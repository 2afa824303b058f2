"""Tenants take turns: many chunks of one, a queue that is bounded, work whose client or server goes, slow forms."""

import asyncio
import contextlib
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.grammar import CompiledGrammar, Grammar, Grammars
from cacheblend.engines.hf.scheduler import TooLateError
from cacheblend.serve import fair_queue
from cacheblend.serve.errors import ApiError
from cacheblend.serve.fair_queue import FairQueue
from cacheblend.serve.settings import ServeSettings
from cacheblend.serve.state import PARSERS
from random_words import words
from serving import keys_of, running, shallow
from small_llama import wait_until


def chunks_of(who: str, count: int) -> dict[str, Any]:
    return {"chunks": [{"text": words(60)} for _ in range(count)]}


def documents_of(who: str, count: int) -> dict[str, Any]:
    return {"documents": [{"id": f"{who} {number}", "text": words(480)} for number in range(count)]}


@pytest.mark.parametrize(("kind", "post_of", "count"), [("chunks", chunks_of, 150), ("documents", documents_of, 30)])
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


def sliced(log: list[str], name: str, count: int) -> Callable[[], Any]:
    def work() -> Iterator[None]:
        for _ in range(count):
            log.append(name)
            time.sleep(0.005)
            yield
        return

    return work


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


def test_a_worker_stands_aside_between_slices_and_its_result_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "ASIDE_S", 3600.0)

    async def main() -> None:
        queue, deadline = FairQueue(1, 50), time.monotonic() + 60
        assert await queue.run("one", lambda: "its result", deadline) == "its result"
        late = asyncio.create_task(queue.run("another", lambda: "never", time.monotonic() + 0.2))
        await asyncio.sleep(0.01)
        assert queue.waiting == 1
        with pytest.raises(TooLateError):
            await late
        queue._release()  # the moment is over
        assert await queue.run("another", lambda: "done", deadline) == "done"
        queue.close()

    asyncio.run(main())


def test_work_for_which_there_is_no_thread_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        queue, done = FairQueue(1, 50), list[str]()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match="new thread"):
                await queue.run("one", lambda: done.append("one"), time.monotonic() + 60)
        await queue.run("two", lambda: done.append("two"), time.monotonic() + 10)
        assert done == ["two"]  # who was told that it failed may send it again
        queue.close()

    asyncio.run(main())


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
    chunks = {"chunks": [{"text": words(600)} for _ in range(60)]}
    with ThreadPoolExecutor(1) as pool:
        with running(ServeSettings(drain_s=0.5), model=shallow()) as url:
            post = pool.submit(httpx.post, f"{url}/v1/chunks", json=chunks, timeout=300)
            while not httpx.get(f"{url}/v1/chunks", timeout=300).json()["data"]:
                time.sleep(0.05)
        answer = post.result(60)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "shutting_down"


WAITING = PARSERS + 6


class Gate:
    """Compiles one slow form each time it is let one through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self._through, compile_now = threading.Semaphore(0), Grammars._compile

        def compile_slowly(grammars: Grammars, grammar: Grammar) -> CompiledGrammar:
            if "slow" in grammar.text:
                self.begun.append(grammar.text)
                assert self._through.acquire(timeout=120)
            return compile_now(grammars, grammar)

        monkeypatch.setattr(Grammars, "_compile", compile_slowly)

    def open(self, count: int = 1) -> None:
        self._through.release(count)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed here")
    made = Gate(monkeypatch)
    yield made
    made.open(100)


Ask = Callable[..., httpx.Response]


@pytest.fixture
def ask(gate: Gate, tmp_path: Path) -> Iterator[Ask]:
    """Asks with a key's name and the fields of a request."""
    ring, keys = keys_of(tmp_path, "alice", "bob")
    settings = ServeSettings(keys=ring, waiting=WAITING, drain_s=1)
    with running(settings, model=shallow()) as url, httpx.Client(base_url=url, timeout=60) as client:

        def post(name: str, path: str = "/v1/completions", timeout: float = 60, **fields: Any) -> httpx.Response:
            if path == "/metrics":
                return client.get(path, headers=keys[name])
            body = {"prompt": "Who has the boot?", **({"max_tokens": 4} if path == "/v1/completions" else {}), **fields}
            return client.post(path, json=body, headers=keys[name], timeout=timeout)

        yield post
        gate.open(100)


def form(*choices: str) -> dict[str, Any]:
    return {"structured_outputs": {"choice": list(choices)}}


def waiting(metrics: str) -> float:
    (value,) = re.findall(r"^cacheblend_requests_waiting (\S+)$", metrics, re.MULTILINE)
    return float(value)


def test_nobody_waits_but_for_his_turn_to_compile(gate: Gate, ask: Ask) -> None:
    assert ask("bob", **form("yes", "no")).status_code == 200
    with ThreadPoolExecutor(16) as pool:
        slow = [pool.submit(ask, "alice", **form(f"slow {number}")) for number in range(PARSERS + 2)]
        wait_until(lambda: len(gate.begun) == 1)
        for name in ("alice", "bob"):
            assert ask(name).status_code == 200
            assert ask(name, prompt=[300, 301, 302]).status_code == 200
            assert ask(name, **form("yes", "no")).json()["choices"][0]["text"] in ("yes", "no")
            assert ask(name, "/tokenize").status_code == 200
        assert len(gate.begun) == 1 and not any(each.done() for each in slow)
        new = pool.submit(ask, "bob", **form("slow, and bob's"))
        wait_until(lambda: waiting(ask("bob", "/metrics").text) == PARSERS + 2)  # one is compiled, the rest wait
        gate.open()
        wait_until(lambda: len(gate.begun) == 2)
        assert "bob" in gate.begun[1]
        gate.open(100)
        assert new.result().status_code == 200
        assert [each.result().status_code for each in slow] == [200] * len(slow)


def test_who_goes_away_is_not_compiled_for_and_too_many_are_told(gate: Gate, ask: Ask) -> None:
    with ThreadPoolExecutor(32) as pool:
        first = pool.submit(ask, "alice", **form("slow 0"))
        wait_until(lambda: len(gate.begun) == 1)
        with pytest.raises(httpx.ReadTimeout):
            ask("alice", timeout=0.5, **form("slow, and gone"))
        slow = [pool.submit(ask, "alice", **form(f"slow {number}")) for number in range(1, WAITING + 8)]
        wait_until(lambda: any(each.done() for each in slow))
        assert ask("alice").status_code == ask("bob").status_code == 200  # forms turn away forms alone
        new = pool.submit(ask, "bob", **form("slow, and bob's"))  # the newest of those that have most gives way
        gate.open(100)
        found = [each.result().status_code for each in (first, *slow)]
    assert {*found} == {200, 429} and found[0] == 200 == new.result().status_code
    assert not any("gone" in text for text in gate.begun)


def test_a_server_that_is_stopped_tells_those_that_wait(gate: Gate) -> None:
    with ThreadPoolExecutor(8) as pool:
        with running(ServeSettings(drain_s=0.2), model=shallow()) as url:
            body = {"prompt": "Who has the boot?", "max_tokens": 4}
            slow = [
                pool.submit(httpx.post, f"{url}/v1/completions", json=body | form(f"slow {number}"), timeout=60)
                for number in range(3)
            ]
            wait_until(lambda: len(gate.begun) == 1 and waiting(httpx.get(f"{url}/metrics").text) == 2)
            threading.Timer(1, gate.open, [100]).start()  # longer than the server waits
        found = [each.result().status_code for each in slow]
    assert found.count(503) >= 2 and len(gate.begun) == 1
