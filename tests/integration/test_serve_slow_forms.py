"""Forms that take long to compile, over HTTP: who waits for them, and who does not.

Situations: one key sends more of them at once than there are threads that read prompts; beside it plain prompts, token
ids, and a form that is kept, of its own and of another key; the other key's new form; a client that goes away before
its form's turn; more forms than may wait; the server is stopped.
"""

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from cacheblend.engines.hf.grammar import CompiledGrammar, Grammar, Grammars
from cacheblend.engines.hf.tickets import Limits
from cacheblend.serve.settings import ServeSettings
from cacheblend.serve.state import PARSERS
from serving import keys_of, running, shallow
from small_llama import wait_until

pytest.importorskip("xgrammar", reason="xgrammar is not installed here")

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
    made = Gate(monkeypatch)
    yield made
    made.open(100)


Ask = Callable[..., httpx.Response]


@pytest.fixture
def ask(gate: Gate, tmp_path: Path) -> Iterator[Ask]:
    """Asks with a key's name and the fields of a request."""
    ring, keys = keys_of(tmp_path, "alice", "bob")
    settings = ServeSettings(keys=ring, limits=Limits(waiting=WAITING), drain_s=1)
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


def waiting(ask: Ask) -> float:
    (value,) = re.findall(r"^cacheblend_requests_waiting (\S+)$", ask("bob", "/metrics").text, re.MULTILINE)
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
        wait_until(lambda: waiting(ask) == PARSERS + 2)  # one is compiled, the rest wait
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
            ask("alice", timeout=1, **form("slow, and gone"))
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
        with running(ServeSettings(drain_s=1), model=shallow()) as url:
            body = {"prompt": "Who has the boot?", "max_tokens": 4}
            slow = [
                pool.submit(httpx.post, f"{url}/v1/completions", json=body | form(f"slow {number}"), timeout=60)
                for number in range(3)
            ]
            wait_until(lambda: len(gate.begun) == 1)
            threading.Timer(3, gate.open, [100]).start()  # longer than the server waits
        found = [each.result().status_code for each in slow]
    assert found.count(503) >= 2 and len(gate.begun) == 1
