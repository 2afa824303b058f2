"""Two vLLM servers on one store: what one captures the other blends, also while both are killed in turn under load.

Situations that meet in the load: stored passages in any order, passages that are captured at the moment of the kill,
prompts without passages, requests that are under way on the server that dies, a server that starts beside one that
works, and one that finds a store full of what others wrote.
"""

import json
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from cacheblend.nano import model_path
from cacheblend.store import open_store
from lab.servers.processes import free_port, wait_until
from lab.servers.vllm_server import (
    NAME,
    Server,
    ServerSettings,
    command_of,
    environment,
)
from redis_server import needs_redis, redis_server
from vllm_running import Texts, Vllm

REQUESTS, DISTINCT, TOKENS, REFRESH_S = 200, 40, 4, 0.5


class Killable:
    """A server in a process group of its own, which can be killed and started again on the same port."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings, self._port = settings, free_port()
        self.server = Server(f"http://127.0.0.1:{self._port}")
        self._process: subprocess.Popen[Any] | None = None
        self._words = tempfile.TemporaryFile("w+")  # noqa: SIM115

    def start(self) -> None:
        quiet = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            command_of(self._settings, self._port),
            env=environment() | quiet | {"VLLM_CPU_KVCACHE_SPACE": "1"},
            stdout=self._words,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        wait_until(self.server.is_up, self._process, self._words)

    def kill(self) -> None:
        """As a machine does that runs out of memory: the server and its engine, at once."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def ask(self, one: "One") -> list[int]:
        """The answer's tokens.

        Raises:
            OSError, HTTPException: the server is away, or died meanwhile.
        """
        body: dict[str, Any] = {"model": NAME, "prompt": one.ids, "max_tokens": TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        if one.spans is not None:
            body["kv_transfer_params"] = {"cacheblend": {"chunks": one.spans}}
        headers = {"content-type": "application/json"}
        url = f"{self.server.url}/v1/completions"
        with urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=120
        ) as got:
            found: list[int] = json.load(got)["choices"][0]["token_ids"]
            return found

    def loaded(self) -> float:
        """Tokens that were loaded from the store since the server started."""
        name = "vllm:cacheblend_hit_tokens_total"
        found = self.server.counters().items()
        return sum(count for key, count in found if key.startswith(name) and 'source="vllm"' not in key)


@dataclass(frozen=True)
class One:
    """A request: `spans` None: its passages are found by content; empty: it has none."""

    ids: list[int]
    spans: list[list[int]] | None


class Load:
    """What is asked, and what a vLLM without the plug-in answers.

    Attributes:
        first, second: prompts of passages that one server stores and the other blends, and the other way round.
        mixed: all kinds.
        reordered: the passages of each in other orders.
    """

    def __init__(self, vllm: Vllm, model: Path) -> None:
        texts = Texts(71)
        passages = [texts.passages(3, 70, 100) for _ in range(2)]
        self.tokens = [sum(map(len, each)) for each in passages]
        self.first, self.second = (One(p.ids, p.spans) for p in map(texts.prompt, passages))
        self.reordered = [
            [One(texts.prompt(texts.rng.sample(each, 3), front=7 + number).ids, None) for number in range(12)]
            for each in passages
        ]
        known = [passage for each in passages for passage in each]
        self.mixed = []
        for number in range(DISTINCT):
            fresh = texts.prompt(texts.passages(2, 70, 90))
            by_content = One(texts.prompt(texts.rng.sample(known, 3)).ids, None)
            self.mixed.append((by_content, by_content, One(fresh.ids, fresh.spans), One(texts.ids(90), []))[number % 4])
        every = [self.first, self.second, *self.reordered[0], *self.reordered[1], *self.mixed]
        steps = [{"ask": [one.ids for one in every], "sampling": {"max_tokens": TOKENS}}]
        (said,) = vllm.run(model, steps, None)["answers"]
        self._answers = {tuple(one.ids): answer["tokens"][0] for one, answer in zip(every, said, strict=True)}

    def answer(self, one: One) -> list[int]:
        found: list[int] = self._answers[tuple(one.ids)]
        return found


@pytest.fixture(scope="module")
def model(models: dict[str, Path]) -> Path:
    AutoTokenizer.from_pretrained(model_path()).save_pretrained(models["llama"])
    return models["llama"]


@pytest.fixture(scope="module")
def load(vllm: Vllm, model: Path) -> Load:
    return Load(vllm, model)


@contextmanager
def two_servers(model: Path, store: str) -> Iterator[tuple[Killable, Killable]]:
    extra = {"store": store, "recompute_ratio": 1.0, "min_match_tokens": 64, "refresh_s": REFRESH_S}
    extra["controller"] = False  # of so small a model everything is computed sooner than it is loaded
    extra["allow_untested_version"] = True
    settings = ServerSettings(model, extra, 1024, 512, "float32", ("--enforce-eager",))
    with ExitStack() as stack:
        pair = Killable(settings), Killable(settings)
        for each in pair:
            stack.callback(each.kill)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(Killable.start, pair))
        yield pair


def check_shared(load: Load, writer: Killable, reader: Killable, given: One, tokens: int, others: list[One]) -> None:
    """One server stores a prompt's passages; the other finds and blends them, soon after."""
    assert writer.ask(given) == load.answer(given)
    writer.server.wait_for_captures(tokens, pause=2 * REFRESH_S)
    before = reader.loaded()
    for one in others:  # the first one after the pause may start the reading of the list that the next one uses
        assert reader.ask(one) == load.answer(one)
        if reader.loaded() > before:
            break
        time.sleep(REFRESH_S)
    assert reader.loaded() > before, "the other server never found what was stored"


def run_load(load: Load, pair: tuple[Killable, Killable], restart: Callable[[Killable], None]) -> None:
    """Four clients ask 200 requests of both servers, which are killed and restarted in turn; each answer is checked.

    A client whose server is away, or dies under its request, asks the other one.
    """
    draw = random.Random(5)
    todo = [load.mixed[number % DISTINCT] for number in range(REQUESTS)]
    draw.shuffle(todo)
    lock, wrong, retried = threading.Lock(), list[tuple[One, list[int]]](), [0]
    gate = threading.Semaphore(REQUESTS // 5)

    def client(number: int) -> None:
        while True:
            gate.acquire()
            with lock:
                if not todo:
                    return
                one = todo.pop()
            answer, at = None, number
            while answer is None:
                try:
                    answer = pair[at % 2].ask(one)
                except (OSError, HTTPException, urllib.error.URLError):
                    at, retried[0] = at + 1, retried[0] + 1
                    time.sleep(0.05)
            if answer != load.answer(one):
                with lock:
                    wrong.append((one, answer))

    clients = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(4)]
    for each in clients:
        each.start()
    for number in (0, 1):
        time.sleep(0.5)  # into the requests that are let through
        gate.release(REQUESTS // 5)
        pair[number].kill()
        gate.release(REQUESTS // 10)
        restart(pair[number])
        gate.release(REQUESTS // 10)
    gate.release(REQUESTS)
    for each in clients:
        each.join(300)
    assert not any(each.is_alive() for each in clients) and not todo
    assert wrong == [] and retried[0] > 0


def check_store(store: str) -> None:
    """Nothing in it is damaged, whoever was killed while writing."""
    with open_store(store) as opened:
        assert opened.verify() == []
        assert len(opened.manifests()) >= 6


def serve_and_kill(load: Load, model: Path, store: str) -> None:
    with two_servers(model, store) as (first, second):
        check_shared(load, first, second, load.first, load.tokens[0], load.reordered[0])
        check_shared(load, second, first, load.second, load.tokens[1], load.reordered[1])
        run_load(load, (first, second), Killable.start)
        for each in (first, second):  # since its restart each has blended what others had stored
            for one in load.reordered[0][-3:]:
                assert each.ask(one) == load.answer(one)
            assert each.loaded() > 0
    check_store(store)


def test_two_servers_on_one_folder(load: Load, model: Path, tmp_path: Path) -> None:
    serve_and_kill(load, model, f"file://{tmp_path}/store?ram_bytes=64MiB")


@needs_redis
@pytest.mark.slow
def test_two_servers_on_one_redis(load: Load, model: Path) -> None:
    with redis_server() as redis:
        serve_and_kill(load, model, f"{redis.url}?prefix=shared")
