"""`lab serve`, `agent` and `routing`: what they write and ask, not how fast anything is; no server outlives them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.engines.hf import BlendEngine
from cacheblend.nano import model_path
from command_line import Run, runner
from lab.checkout import environment
from lab.cli import main
from lab.servers import routing
from lab.servers.agent import DISCOVERED, FIRST_COUNTED, MARKED, PREFIX, Turn, conversations, figures, tool_results
from lab.servers.discovery import learn_in_order, learning, watch_ms
from lab.servers.embedded_server import Asked, Got
from lab.servers.replay import random_ids
from lab.servers.routing import AFFINITY, ROUND_ROBIN, Router
from lab.settings import Sizes
from redis_server import needs_redis


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys, main=main)


def test_serve_writes_its_figures_or_says_why_not(run: Run, tmp_path: Path) -> None:
    # Serve writes its figures
    out = tmp_path / "serve.json"
    done = run("serve", "-m", "nano", "--chunks", 3, "--chunk-tokens", 70, "--runs", 1, "--json-file", out)
    assert done.code == 0, done.err
    result = json.loads(out.read_text())
    assert set(result["figures"]) == {"ttft_speedup", "overhead_ms"}
    assert len(result["ttft"]["ttft_s"]["blend"]) == len(result["ttft"]["ttft_s"]["full"]) == 1
    assert result["model"].endswith("model")
    # What cannot be measured
    assert "exclude each other" in run("serve", "-m", "nano", "--shape", "tiny").err
    assert run("serve", "-m", "nano", "--trace", tmp_path).code == 2


@pytest.mark.slow
def test_the_cost_of_the_shadow_check(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    size = ("--chunks", 2, "--chunk-tokens", 70, "--runs", 2, "--requests", 4, "--clients", 2)
    done = run("serve", "-m", "nano", *size, "--shadow", 1.0, "--json-file", out)
    assert done.code == 0, done.err
    result = json.loads(out.read_text())
    found = result["shadow"]
    assert result["figures"]["shadow_overhead"] == found["overhead"] < 1
    assert len(found["by_round"]) == 2 and {len(rates) for rates in found["requests_per_s"].values()} == {2}
    counted = {name.split("{")[0]: value for name, value in found["metrics"].items()}
    assert counted["cacheblend_shadow_waiting"] == 0 and counted["cacheblend_shadow_total"] > 0


@pytest.mark.slow
def test_an_agent_of_three_arms(run: Run, tmp_path: Path) -> None:
    data, out, picture = tmp_path / "passages.json", tmp_path / "agent.json", tmp_path / "agent.png"
    data.write_text(json.dumps([{"text": f"The mill number {n} stood by river {n * n}. " * 9} for n in range(9)]))
    size = ("--sessions", 2, "--turns", 4, "--results", 5, "--result-tokens", 80, "--kept", 4, "--first-reads", 3)
    how = ("--reorder", 0, "--pause", 0.5, "--json-file", out, "--plot", picture)
    done = run("agent", "-m", "nano", "--data", data, *size, *how)
    assert done.code == 0, done.err
    result = json.loads(out.read_text())
    assert picture.stat().st_size > 0
    assert {"agent_gain", "agent_gain_marked"} <= set(result["figures"])
    arms = result["requests"]
    asked = [[(each["session"], each["turn"]) for each in requests] for requests in arms.values()]
    assert len(arms) == 3 and asked[0] == asked[1] == asked[2] and len(asked[0]) == 8
    lengths = [[each["prompt_tokens"] for each in requests] for requests in arms.values()]
    for one, other in zip(lengths[0], lengths[2], strict=True):
        assert abs(one - other) <= 8, "equal requests; chunks are tokenised apart from their neighbours"
    loaded = {arm: [sum(each["hit_tokens"].values()) for each in requests] for arm, requests in arms.items()}
    assert loaded["prefix caching"][1] > 200, "the second turn begins as the first"
    assert sum(loaded["marked"]) > 0 and max(loaded["discovered"][4:]) > 80, "the second session reads again"
    assert result["settings"]["pause_s"] == 0.5 and result["settings"]["sizes"]["sessions"] == 2


def _text(message: dict[str, object]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)  # type: ignore[union-attr]


@given(
    st.builds(
        lambda kept, more, first, reads, turns, reorder: Sizes(
            sessions=2, turns=turns, results=kept + more, first_reads=min(first, kept), reads=min(reads, kept),
            kept=kept, reorder=reorder,
        ),
        st.integers(1, 6), st.integers(1, 5), st.integers(1, 6), st.integers(1, 6), st.integers(3, 8),
        st.sampled_from([0.0, 0.5, 1.0]),
    ),
    st.integers(0, 99),
)  # fmt: skip
def test_history_grows_and_results_are_dropped_oldest_first(sizes: Sizes, seed: int) -> None:
    results = [f"result {number} " for number in range(sizes.results)]
    sessions = conversations(results, sizes, seed)
    assert sessions == conversations(results, sizes, seed)
    assert [[turn.number for turn in session] for session in sessions] == [list(range(1, sizes.turns + 1))] * 2
    for session in sessions:
        for before, turn in pairwise(session):
            assert turn.notes[:-1] == before.notes and len(turn.notes) == turn.number - 1
            assert len(set(turn.results)) == len(turn.results) <= sizes.kept
            assert len(set(turn.results) - set(before.results)) >= 1, "each turn reads something"
            if not sizes.reorder:  # without reordering what stays keeps its order
                stays = [each for each in before.results if each in turn.results]
                assert list(turn.results[: len(stays)]) == stays


@given(st.lists(st.text(min_size=1), min_size=1, max_size=4), st.lists(st.text(min_size=1), max_size=3))
def test_marks_do_not_change_the_text(results: list[str], notes: list[str]) -> None:
    turn = Turn(1, 2, tuple(notes), tuple(results), "a task", "a question")
    plain = turn.messages()
    assert all(isinstance(message["content"], str) for message in plain)
    for marked in (turn.messages("results"), turn.messages("question")):
        assert [_text(message) for message in marked] == [_text(message) for message in plain]
        assert [message["role"] for message in marked] == [message["role"] for message in plain]
        assert sum(isinstance(message["content"], list) for message in marked) == 1


def test_tool_results_have_the_length_that_is_asked_for(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    data = tmp_path / "passages.json"
    data.write_text(json.dumps([{"text": f"The mill number {n} stands by the river. " * 6} for n in range(20)]))
    sizes = Sizes(results=7, result_tokens=64)
    found = tool_results(data, tokenizer, sizes)
    assert len(set(found)) == 7
    assert all(abs(len(tokenizer.encode(text, add_special_tokens=False)) - 64) <= 8 for text in found)
    with pytest.raises(InvalidInputError, match="are needed"):
        tool_results(data, tokenizer, Sizes(results=7, result_tokens=100_000))


@pytest.mark.parametrize("wrong", [{"results": 6}, {"first_reads": 7}, {"reads": 7}])
def test_sizes_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidInputError):
        Sizes(**wrong)


def test_the_gain_is_of_later_turns_alone() -> None:
    def requests(early: float, late: float) -> list[dict[str, object]]:
        same = {"hit_tokens": {"chunk": 5}, "prompt_tokens": 10}
        times = {turn: early if turn < FIRST_COUNTED else late for turn in range(1, 6)}
        return [{"turn": turn, "ttft_s": seconds, **same} for turn, seconds in times.items()]

    found = figures({PREFIX: requests(1, 6), MARKED: requests(9, 3), DISCOVERED: requests(9, 2)})
    assert found["agent_gain"] == 3 and found["agent_gain_marked"] == 2 and found["loaded_prefix"] == 0.5


@given(st.integers(1, 5), st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=40))
@settings(max_examples=50, deadline=None)
def test_round_robin_is_even_whatever_is_asked(servers: int, asked: list[list[int]]) -> None:
    router = Router(servers, ROUND_ROBIN)
    counts = Counter(router.choose(chunks) for chunks in asked)
    assert not asked or max(counts.values()) - min(counts[server] for server in range(servers)) <= 1


@given(st.integers(1, 5), st.integers(1, 12), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_affinity_sends_a_topic_where_it_went_and_spreads_topics(servers: int, topics: int, draw) -> None:
    router = Router(servers, AFFINITY)
    asked = [draw.randrange(topics) for _ in range(60)]
    sent: dict[int, set[int]] = {}
    for topic in asked:
        chunks = [4 * topic + each for each in range(4)]
        draw.shuffle(chunks)
        sent.setdefault(topic, set()).add(router.choose(chunks))
    assert all(len(places) == 1 for places in sent.values())
    counts = Counter(place for places in sent.values() for place in places)
    assert max(counts.values()) - min(counts[server] for server in range(servers)) <= 1


def test_a_request_goes_where_most_of_its_chunks_are() -> None:
    # A request goes where most of its chunks are
    router = Router(2, AFFINITY)
    first, second = router.choose([0, 1, 2]), router.choose([3, 4, 5])
    assert first != second
    assert router.choose([0, 4, 5]) == second
    assert router.choose([1, 2, 5]) == first
    # Threads do not lose requests
    router, found = Router(2, ROUND_ROBIN), Counter[int]()
    lock = threading.Lock()

    def ask() -> None:
        for _ in range(200):
            chosen = router.choose([1])
            with lock:
                found[chosen] += 1

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: 400, 1: 400}


class EngineHere:
    """What a server of `completing` answers, by an engine in this process."""

    def __init__(self, engine: BlendEngine, ratio: float) -> None:
        self._engine, self._ratio = engine, ratio

    def store(self, chunks: list[list[int]]) -> None:
        self._engine.warm(map(chunk, chunks))
        self._engine.store.flush()

    def ask(self, asked: Asked, tokens: int, mode: str) -> Got:
        assert mode == "blend" and asked.spans
        edges = [0, *(edge for span in asked.spans for edge in span), len(asked.ids)]
        parts = [asked.ids[start:stop] for start, stop in pairwise(edges)]
        prompt = Prompt.of([(chunk if number % 2 else text)(part) for number, part in enumerate(parts) if part])
        report = self._engine.prefill(prompt, ratio=self._ratio).report
        return Got(report.ttft_s, {"hit_tokens": report.hit_tokens})


@contextmanager
def completing_here(folder: Path, ratio: float, clients: int, *, store: str) -> Iterator[EngineHere]:
    with BlendEngine.from_pretrained(folder, store=store, config={"capture": False}, device="cpu") as engine:
        yield EngineHere(engine, ratio)


@needs_redis
@pytest.mark.parametrize("where", ["here", pytest.param("servers", marks=pytest.mark.slow)])
def test_affinity_finds_its_own_topics_in_memory(
    where: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "here":  # five servers take half a minute to start
        monkeypatch.setattr(routing, "completing", completing_here)
    small = "routing --shape tiny --chunks 2 --chunk-tokens 64 --topics 4 --requests 8 --clients 1"
    found = runner(capsys, main=main)(*small.split(), "--json").json
    for policy in ("round robin", "affinity"):
        assert sum(found[policy]["loaded_tokens"].values()) == 8 * 2 * 64, "every chunk was stored, and is loaded"
        assert len(found[policy]["ttft_s"]) == 8
    assert found["figures"]["affinity_memory"] == 1.0
    assert found["figures"]["round_robin_memory"] < 1.0
    assert found["affinity"]["loaded_tokens"].get("redis", 0) == 0


def requests(*passages: str) -> Iterator[list[int]]:
    """A request for each: new ids, the passages that it names, a question."""
    for number, names in enumerate(passages):
        body = [token for name in names for token in random_ids(f"passage {name}", 90)]
        yield [*random_ids(f"front {number}", 20), *body, *random_ids(f"question {number}", 9)]


def test_what_recurs_is_learnt_in_order() -> None:
    # What recurs is learnt in order
    learnt, whole = learn_in_order(requests("ab", "bc", "ac", "ab", "d", "d"), 3)
    assert sorted(learnt.chunks) == sorted(random_ids(f"passage {name}", 90) for name in "abc")
    assert learnt.figures.stored_tokens == learnt.figures.wasted_tokens == 270 and learnt.wasted == 1
    assert whole.figures.stored_tokens == 360 and whole.figures.hit_tokens == 180
    assert whole.wasted == 0.5  # c and d came no more
    assert sorted(whole.found_in(requests("ca", "x", "a"))) == sorted(
        random_ids(f"passage {name}", 90) for name in "ac"
    )
    assert not whole.found_in(requests("x"))
    # Nothing is learnt of requests that share nothing
    told = list[int]()
    with learning() as learner:
        learner.see(requests("a", "b", ""), told.append)
        learnt = learner.learnt
    assert told == [1, 2, 3] and not learnt.chunks and learnt.wasted == 0 and not learnt.figures.runs
    # A watcher that is full is timed
    assert watch_ms(watch_tokens=1 << 15) > 0


# ---- no server outlives its benchmark -------------------------------------------------------------------------------


BENCHMARK = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from lab.servers.processes import running

folder = Path(sys.argv[1])
SERVER = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"

def server(name):
    path = folder / name
    return running([sys.executable, "-c", SERVER, str(path)], {}, lambda: path.exists() and path.read_text())

def ask(process):
    process.wait()  # as a request that the server does not answer

def measure():
    with server("one") as one, server("two") as two, ThreadPoolExecutor() as clients:
        asked = [clients.submit(ask, each) for each in (one, two)]
        (folder / "asked").touch()
        [each.result() for each in asked]

if sys.argv[2] == "a thread":
    threading.Thread(target=measure, daemon=True).start()
    time.sleep(600)
measure()
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(holds: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_servers_end_with_the_benchmark(number: signal.Signals, tmp_path: Path) -> None:
    """While requests to them are under way, and two run at a time."""
    command = [sys.executable, "-c", BENCHMARK, str(tmp_path), "the main thread"]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE)
    try:
        wait_until((tmp_path / "asked").exists)
        servers = [int((tmp_path / name).read_text()) for name in ("one", "two")]
        assert all(map(is_alive, servers))
        if number == signal.SIGINT:  # as a terminal sends it, to all of them
            for pid in servers:
                os.kill(pid, number)
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode not in (0, -signal.SIGKILL)
        assert not any(map(is_alive, servers))
    finally:
        process.kill()


def test_a_benchmark_in_a_thread_leaves_signals_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BENCHMARK, str(tmp_path), "a thread"]
    process = subprocess.Popen(command, env=environment())
    try:
        wait_until((tmp_path / "asked").exists)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM  # as without a benchmark
    finally:
        process.kill()
        for name in ("one", "two"):
            os.kill(int((tmp_path / name).read_text()), signal.SIGKILL)
