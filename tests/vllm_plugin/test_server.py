"""The plug-in behind vLLM's OpenAI server: bad input, streaming, aborted requests, metrics; adapters that come and go;
parallel engines; and two servers on one store, also while both are killed in turn under load.

Situations that meet in that load: stored passages in any order, passages that are captured at the moment of the kill,
prompts without passages, requests that are under way on the server that dies, a server that starts beside one that
works, and one that finds a store full of what others wrote.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from cacheblend.engines.vllm.versions import vllm_version
from cacheblend.nano import model_path
from cacheblend.store import open_store
from lab.servers.processes import free_port, wait_until
from lab.servers.vllm_server import NAME, Server, ServerSettings, command_of, environment, serving
from redis_server import needs_redis, redis_server
from vllm_models import make_adapter
from vllm_prompts import NANO_VOCAB, Asked, Texts, ask, prompts
from vllm_running import Served, Vllm
from vllm_running import tokens as tokens_of


def settings(model: Path, store: Path | str, *options: str, batched: int = 256, **extra: Any) -> ServerSettings:
    """A server's: recomputes all, and lists the store anew for each look-up. `batched`: tokens of a step; fewer than a
    prompt has, so that prefills come in pieces."""
    known = {
        "allow_untested_version": True,
        "lookup_timeout_s": 30.0,  # the machine may be busy
        "store": str(store) if "://" in str(store) else f"file://{store}",
        "recompute_ratio": 1.0,
        "refresh_s": 0,
        "controller": False,  # it decides by times
    }
    return ServerSettings(model, known | extra, 2048, batched, "float32", ("--enforce-eager", *options))


def post(server: Server, path: str, **body: Any) -> tuple[int, Any]:
    """Status and answer, whatever the status."""
    request = urllib.request.Request(
        f"{server.url}/v1/{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            status, said = response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        status, said = error.code, error.read().decode()
    return status, json.loads(said) if said.startswith("{") else said


def complete(server: Server, ids: Any, chunks: Any = None, path: str = "completions", **fields: Any) -> tuple[int, Any]:
    """Greedy, with the spans of the prompt's chunks; None: the server finds them."""
    body: dict[str, Any] = {"model": NAME, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    body |= {"prompt": ids, "return_token_ids": True} | ({} if chunks is None else options(chunks=chunks))
    return post(server, path, **body | fields)


def options(**fields: Any) -> dict[str, Any]:
    return {"kv_transfer_params": {"cacheblend": fields}}


def tokens(server: Server, ids: list[int], chunks: Any = None, **fields: Any) -> list[list[int]]:
    """Of each choice."""
    return answered(server, ids, chunks, **fields)[0]


def answered(server: Server, ids: list[int], chunks: Any = None, **fields: Any) -> tuple[list[list[int]], Any]:
    """The tokens of each choice, and what the plug-in says of the request."""
    status, answer = complete(server, ids, chunks, **fields)
    assert status == 200, answer
    return [choice["token_ids"] for choice in answer["choices"]], told(answer)


def told(answer: dict[str, Any]) -> Any:
    return answer["kv_transfer_params"]["cacheblend"]


@pytest.fixture(scope="module")
def readable(models: dict[str, Path]) -> Path:
    """A model that has a tokenizer."""
    AutoTokenizer.from_pretrained(model_path()).save_pretrained(models["llama"])
    return models["llama"]


# ---- one server for all requests -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    tools = "--enable-auto-tool-choice", "--tool-call-parser=hermes"
    with serving(settings(model_path(), tmp_path_factory.mktemp("store"), *tools, min_match_tokens=64)) as running:
        yield running


@pytest.fixture(scope="module")
def asked(server: Server) -> list[Asked]:
    """Prompts whose passages are stored."""
    texts = Texts(31, NANO_VOCAB)
    passages = texts.passages(5)
    first, *others = [texts.prompt(texts.rng.sample(passages, 5)) for _ in range(4)]
    server.ask(first.ids, 1, first.spans)
    server.wait_for_captures(sum(map(len, passages)))
    return others


def test_spans_contents_and_plain_requests_answer_alike_at_ratio_one(server: Server, asked: list[Asked]) -> None:
    for one in asked:
        before = server.counted("requests")
        plain = tokens(server, one.ids, [])
        assert server.counted("requests") == before
        assert tokens(server, one.ids, one.spans) == plain
        behind, by_content = one.behind([20]), [21, *one.ids]
        assert tokens(server, behind.ids, behind.spans) == tokens(server, behind.ids, [])
        assert tokens(server, by_content) == tokens(server, by_content, [])
    assert server.counted("requests") >= 2 * len(asked)
    # A prompt that is one chunk, and one without a question.
    start, stop = asked[1].spans[0]
    chunk, unasked = asked[1].ids[start:stop], asked[1].ids[: asked[1].spans[-1][1]]
    assert tokens(server, chunk, [[0, len(chunk)]]) == tokens(server, chunk, [])
    assert tokens(server, unasked, asked[1].spans) == tokens(server, unasked, [])
    # The endpoint reports what was done.
    found = server.counters()
    assert any('source="disk"' in key or 'source="memory"' in key for key in found)
    counters = "prompt_tokens recomputed_tokens row_layers captured_tokens load_seconds blend_seconds"
    for name in counters.split():
        assert server.counted(name) > 0, name


@pytest.mark.parametrize(
    "wrong",
    [
        {"chunks": [[0, 100_000]]},
        {"chunks": [[100, 200], [150, 250]]},
        {"chunks": [["a", "b"]]},
        {"chunks": "all"},
        {"chunk": []},
    ],
    ids=["outside", "overlapping", "words", "a word", "an unknown key"],
)
def test_bad_spans_disable_blending_and_are_counted(server: Server, asked: list[Asked], wrong: Any) -> None:
    """Every other form of them is drawn without a server."""
    before = server.counted("fallbacks")
    assert tokens(server, asked[0].ids, **options(**wrong)) == tokens(server, asked[0].ids, [])
    assert server.counted("fallbacks") == before + 1


@pytest.mark.feature("prompt log-probabilities", "plain")
def test_what_cannot_be_blended_is_answered_plainly_or_refused(server: Server, asked: list[Asked]) -> None:
    one, before = asked[2], server.counted("requests")
    status, answer = complete(server, one.ids, one.spans, prompt_logprobs=1)
    assert status == 200
    assert len(answer["choices"][0]["prompt_logprobs"]) == len(one.ids)
    assert complete(server, None, one.spans, prompt_embeds="AAAA")[0] == complete(server, [30] * 3000)[0] == 400
    assert 400 <= complete(server, [])[0] < 500
    assert server.counted("requests") == before
    assert tokens(server, one.ids, one.spans) == tokens(server, one.ids, [])


def test_a_stream_has_the_answer_and_several_choices_share_the_blend(server: Server, asked: list[Asked]) -> None:
    ids = asked[0].ids
    streamed = server.ask([9, *ids], 6)
    status, answer = complete(server, [9, *ids], [])
    assert status == 200
    assert streamed.text == answer["choices"][0]["text"]
    assert 1 <= len(streamed.times) <= 6  # vLLM joins tokens that its server is too busy to send one by one
    # Without a seed: vLLM's own CPU build ends where the prefill of a request with a seed comes in pieces.
    assert tokens(server, [10, *ids], n=3, temperature=1.0, top_k=1) == 3 * tokens(server, [10, *ids], [])


def test_clients_that_go_away_and_many_at_once_harm_nobody(server: Server, asked: list[Asked]) -> None:
    texts = Texts(33, NANO_VOCAB)
    given = [[*texts.ids(19), *one.ids] for one in asked * 3]
    plain = [tokens(server, ids, []) for ids in given]

    def leave(_: int) -> None:
        body = json.dumps({"model": NAME, "prompt": given[0][3:], "max_tokens": 500, "stream": True}).encode()
        request = urllib.request.Request(f"{server.url}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request) as response:
            response.readline()

    with ThreadPoolExecutor(3 + len(given)) as pool:
        left = pool.map(leave, range(3))
        assert list(pool.map(lambda ids: tokens(server, ids), given)) == plain
        list(left)


def test_an_answer_says_what_was_reused_and_why_not(server: Server, asked: list[Asked]) -> None:
    ids, fronts = asked[0].ids, iter(range(40, 60))
    situations: list[tuple[list[int], dict[str, Any], str]] = [
        (ids, {}, ""),
        ([50] * 100, {}, "nothing stored"),
        (ids, options(mode="full"), "mode full"),
        (ids, options(chunks=[[3, 1]]), "bad parameters: chunk 0 is [3, 1]"),
        (ids, options(speed=3), "bad parameters: kv_transfer_params"),
        (ids, {"prompt_logprobs": 1}, "prompt log-probabilities"),
        (ids, {"cache_salt": "nobody"}, "nothing stored"),
    ]
    for given, fields, reason in situations:
        found = answered(server, [next(fronts), *given], **fields)[1]
        assert found["blended"] == (not reason) == (not found["reason"]), fields
        assert found["reason"].startswith(reason), fields
        assert (sum(found["hit_tokens"].values()) > 0) == found["blended"]
        assert (0 < found["prefill_share"] <= 1.2) == found["blended"]
        assert (found["row_layers"] > 0) == found["blended"]
    tokens(server, ids[:20], [])
    for reason in ("nothing stored", "mode full", "bad parameters", "prompt log-probabilities"):
        assert any(f'reason="{reason}"' in key for key in server.counters() if "not_blended" in key), reason


def test_a_request_chooses_ratio_and_selector_and_shares_blocks_only_with_its_like(
    server: Server, asked: list[Asked]
) -> None:
    ids, shares = [61, *asked[1].ids], []
    chosen: list[dict[str, Any]] = [{"recompute_ratio": 0.0}, {"recompute_ratio": 0.3}, {"selector": "none"}]
    chosen.append({"selector": "random", "recompute_ratio": 0.3})  # a share that no layer changes
    for fields in chosen:
        found = answered(server, ids, **options(**fields))[1]
        assert found["hit_tokens"].get("vllm", 0) == 0, fields  # nothing of the others is found
        shares.append(found["recomputed_tokens"])
    loaded = sum(stop - start for start, stop in asked[1].spans)
    assert shares[0] == shares[2] == 0
    assert 0 < shares[1] < shares[3]  # gradual filtering: 0.3 on average, and less after the last check layer
    assert 0.2 * loaded < shares[3] < 0.4 * loaded
    assert tokens(server, ids) == tokens(server, ids, [])  # the server's own ratio


def test_requests_of_every_selector_at_once_answer_as_without_blending_at_ratio_one(
    server: Server, asked: list[Asked]
) -> None:
    """Their rows are dropped at different layers, some ask the question first, and they are computed as batches."""
    names = ["hkvd", "query", "hybrid", "head", "random", "all"] * 2
    given = [[70 + at, *asked[at % len(asked)].ids] for at in range(len(names))]

    def choose(ids: list[int], name: str) -> Any:
        return answered(server, ids, **options(selector=name, recompute_ratio=1.0))

    with ThreadPoolExecutor(len(names)) as pool:
        found = list(pool.map(choose, given, names))
    for name, ids, (answer, said) in zip(names, given, found, strict=True):
        assert said["blended"], name
        assert answer == tokens(server, ids, **options(mode="full")), name


@pytest.mark.feature("tools", "blends")
def test_a_tool_is_called_as_without_blending(server: Server) -> None:
    """Its arguments obey the schema; the passage in the message is found by its content."""
    rng = random.Random(36)
    passage = " ".join("".join(rng.choices("abcdefg", k=4)) for _ in range(60))
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    ids = tokenizer.encode(passage)
    spaces = [number for number in range(6, len(tokenizer)) if not tokenizer.decode([number]).strip()]
    before = server.counted("captured_tokens")
    tokens(server, [30, *ids, 31], [[11, 1 + len(ids)]])
    server.wait_for_captures(int(before) + len(ids) - 10)
    properties = {"city": {"enum": ["Bern", "Oslo"]}, "day": {"enum": [7, 9]}}
    schema = {"type": "object", "properties": properties, "required": ["city", "day"], "additionalProperties": False}
    fields: dict[str, Any] = {
        "tools": [{"type": "function", "function": {"name": "weather", "strict": True, "parameters": schema}}],
        "max_tokens": 90,
        "temperature": 0,
        "logit_bias": {str(number): -100 for number in spaces},  # the model would write spaces for ever
    }
    for front, choice in (("Look", {"type": "function", "function": {"name": "weather"}}), ("See", "required")):
        fields["messages"] = [{"role": "user", "content": f"{front} {passage} What is the weather?"}]
        calls = []
        for more in ({}, options(chunks=[])):
            status, answer = post(server, "chat/completions", model=NAME, tool_choice=choice, **fields, **more)
            assert status == 200
            assert told(answer)["blended"] == (more == {})
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            calls.append(call["function"])
        assert calls[0] == calls[1]
        assert json.loads(calls[0]["arguments"])["city"] in {"Bern", "Oslo"}


# ---- adapters, parallel engines, the shadow check ------------------------------------------------------------------


def test_adapters_come_change_and_go(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded at the server's start and while it serves, replaced in place, missing."""
    for seed, name in enumerate("abc", 1):
        make_adapter(tmp_path / name, seed)
    slots = "--skip-tokenizer-init", "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
    texts = Texts(41)
    passages = texts.passages(4)
    fixed, fresh = texts.prompt(passages), iter(range(1000, 2000))
    how = settings(models["llama"], tmp_path / "store", *slots, "--lora-modules", f"first={tmp_path}/a")
    with serving(how) as server:

        def load(name: str, inplace: bool = False) -> int:
            body = {"lora_name": "second", "lora_path": str(tmp_path / name), "load_inplace": inplace}
            return post(server, "load_lora_adapter", **body)[0]

        def learn_and_blend(model: str) -> list[list[int]]:
            """Has the passages stored, then blends them."""
            before = server.counted("captured_tokens")
            one = texts.prompt(texts.rng.sample(passages, 4))
            tokens(server, one.ids, one.spans, model=model, detokenize=False)
            if server.counted("captured_tokens") == before:
                server.wait_for_captures(int(before) + sum(map(len, passages)), 0.0)
            return blended(model, 20)

        def blended(model: str, front: int) -> list[list[int]]:
            """The answer of a prompt that begins with this token; and of another one, as the server computes it alone:
            nothing is shared with what was asked before, also of other weights from the same path."""
            one, other = fixed.behind([front]), fixed.behind([next(fresh)])
            plain = {"model": model, "detokenize": False}
            found, again = (answered(server, each.ids, each.spans, **plain) for each in (one, other))
            alone = answered(server, other.ids, [], **plain)
            assert [said["blended"] for _, said in (found, again, alone)] == [True, True, False]
            assert again[0] == alone[0]
            return found[0]

        base, first = learn_and_blend(NAME), learn_and_blend("first")
        assert load("missing") == 404
        assert server.is_up()
        assert load("b") == 200
        second = learn_and_blend("second")
        assert load("c", inplace=True) == 200
        third = learn_and_blend("second")
        assert len({str(each) for each in (base, first, second, third)}) == 4
        assert load("b", inplace=True) == 200
        captured = server.counted("captured_tokens")
        assert blended("second", 20) == second  # what was stored with these weights
        assert server.counted("captured_tokens") == captured
        shutil.rmtree(tmp_path / "a")
        assert blended("first", 21) == blended("first", 21)  # vLLM holds it
        assert blended(NAME, 20) == base
        assert server.counted("fallbacks") == 0


@pytest.mark.feature("data parallel 2", "blends")
def test_two_engines_behind_one_server_blend_and_answer_as_without_the_plugin(llama: Served, readable: Path) -> None:
    """Each has a scheduler, workers and a cache of its own, and both the store: what one stores the other blends."""
    nodes = len([*Path("/sys/devices/system/node").glob("node[0-9]*")])
    if nodes < 2 and not vllm_version().startswith(("0.31", "0.32")):
        pytest.skip("vLLM 0.33's CPU worker wants a memory node for each engine")
    texts = Texts(71)
    passages = texts.passages(4)
    first = texts.prompt(passages)
    others = [texts.prompt(texts.rng.sample(passages, 3), front).ids for front in range(12, 24)]
    others.append(texts.ids(100))
    right, *rest = tokens_of(llama.plain(ask([first, *(Asked(ids, []) for ids in others)])))
    with serving(settings(readable, llama.store, "--data-parallel-size", "2", batched=512)) as server:
        assert tokens(server, first.ids, first.spans, max_tokens=8) == right
        server.wait_for_captures(sum(map(len, passages)))
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(lambda ids: tokens(server, ids, max_tokens=8), others)) == rest
        counted = {name: n for name, n in server.counters().items() if name.startswith("vllm:cacheblend_requests")}
    engines = [value for name, value in counted.items() if "_total" in name and value]
    assert len(engines) == 2 and sum(engines) >= len(others) - 1, counted


def test_answers_are_compared_while_the_server_has_no_request(readable: Path, tmp_path: Path) -> None:
    """By an engine in a process of its own; figures come to the endpoint, and the server ends while answers wait."""
    first, *others = prompts(51, 7, 5, held=5)
    with serving(settings(readable, tmp_path, recompute_ratio=0.1, shadow=1.0, shadow_floor=0.8)) as server:
        server.ask(first.ids, 1, first.spans)
        server.wait_for_captures(sum(stop - start for start, stop in first.spans))
        for one in others:
            server.ask(one.ids, 6, one.spans)
        end = time.monotonic() + 120.0
        while server.counted("shadow") + server.counted("shadow_dropped") < len(others) and time.monotonic() < end:
            time.sleep(0.1)
        shown = {name: server.shown(f"shadow_{name}") for name in ("kl_count", "kl_sum", "ratio", "waiting")}
        assert server.counted("shadow") == shown["kl_count"] == len(others) and server.counted("shadow_dropped") == 0
        assert server.counted("shadow_tokens") == 6 * len(others)
        assert server.counted("shadow_changes") >= 1 and shown["ratio"] > 0.1
        assert shown["kl_sum"] > 1 and shown["waiting"] == 0
        with ThreadPoolExecutor(len(others)) as pool:
            list(pool.map(lambda one: server.ask(one.ids, 20, one.spans), others))
        ends_at = time.monotonic()
    assert time.monotonic() - ends_at < 60


# ---- two servers on one store --------------------------------------------------------------------------------------

REQUESTS, DISTINCT, TOKENS, REFRESH_S = 200, 40, 4, 0.5


class Killable:
    """A server in a process group of its own, which can be killed and started again on the same port."""

    def __init__(self, how: ServerSettings) -> None:
        self._settings, self._port = how, free_port()
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

    def ask(self, one: Asked, chunks: Any = None) -> list[int]:
        """The answer's tokens.

        Raises:
            OSError, HTTPException: the server is away, or died meanwhile.
        """
        status, answer = complete(self.server, one.ids, chunks, max_tokens=TOKENS)
        if status != 200:
            raise OSError(answer)
        found: list[int] = answer["choices"][0]["token_ids"]
        return found

    def loaded(self) -> float:
        """Tokens that were loaded from the store since the server started."""
        name = "vllm:cacheblend_hit_tokens_total"
        found = self.server.counters().items()
        return sum(count for key, count in found if key.startswith(name) and 'source="vllm"' not in key)


class Load:
    """What is asked, and what a vLLM without the plug-in answers.

    Attributes:
        given: prompts of passages that one server stores and the other blends, and the other way round.
        reordered: the passages of each in other orders, which are found by content.
        mixed: all kinds, each with the spans that are named.
    """

    def __init__(self, vllm: Vllm, model: Path) -> None:
        texts = Texts(71)
        passages = [texts.passages(3, 70, 100) for _ in range(2)]
        self.given = [texts.prompt(each) for each in passages]
        self.reordered = [
            [texts.prompt(texts.rng.sample(each, 3), front=7 + number) for number in range(12)] for each in passages
        ]
        known = [passage for each in passages for passage in each]
        self.mixed: list[tuple[Asked, Any]] = []
        for number in range(DISTINCT):
            fresh = texts.prompt(texts.passages(2, 70, 90))
            by_content = texts.prompt(texts.rng.sample(known, 3)), None
            plain = Asked(texts.ids(90), []), []
            self.mixed.append((by_content, by_content, (fresh, fresh.spans), plain)[number % 4])
        every = [*self.given, *self.reordered[0], *self.reordered[1], *(one for one, _ in self.mixed)]
        said = vllm.run(model, [ask(every, chunks=None, sampling={"max_tokens": TOKENS})], None)["answers"][0]
        self.right = {tuple(one.ids): answer["tokens"][0] for one, answer in zip(every, said, strict=True)}

    def is_right(self, one: Asked, answer: list[int]) -> bool:
        return bool(answer == self.right[tuple(one.ids)])


@pytest.fixture(scope="module")
def load(vllm: Vllm, readable: Path) -> Load:
    return Load(vllm, readable)


def check_shared(load: Load, writer: Killable, reader: Killable, given: Asked, others: list[Asked]) -> None:
    """One server stores a prompt's passages; the other finds and blends them, soon after."""
    assert load.is_right(given, writer.ask(given, given.spans))
    writer.server.wait_for_captures(sum(stop - start for start, stop in given.spans), pause=2 * REFRESH_S)
    before = reader.loaded()
    for one in others:  # the first one after the pause may start the reading of the list that the next one uses
        assert load.is_right(one, reader.ask(one))
        if reader.loaded() > before:
            return
        time.sleep(REFRESH_S)
    raise AssertionError("the other server never found what was stored")


def run_load(load: Load, pair: tuple[Killable, Killable]) -> None:
    """Four clients ask 200 requests of both servers, which are killed and restarted in turn; each answer is checked.

    A client whose server is away, or dies under its request, asks the other one.
    """
    draw = random.Random(5)
    todo = [load.mixed[number % DISTINCT] for number in range(REQUESTS)]
    draw.shuffle(todo)
    lock, wrong, retried = threading.Lock(), list[tuple[Asked, list[int]]](), [0]
    gate = threading.Semaphore(REQUESTS // 5)

    def client(number: int) -> None:
        while True:
            gate.acquire()
            with lock:
                if not todo:
                    return
                one, spans = todo.pop()
            answer, at = None, number
            while answer is None:
                try:
                    answer = pair[at % 2].ask(one, spans)
                except (OSError, HTTPException):
                    at, retried[0] = at + 1, retried[0] + 1
                    time.sleep(0.05)
            if not load.is_right(one, answer):
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
        pair[number].start()
        gate.release(REQUESTS // 10)
    gate.release(REQUESTS)
    for each in clients:
        each.join(300)
    assert not any(each.is_alive() for each in clients) and not todo
    assert wrong == [] and retried[0] > 0


def serve_and_kill(load: Load, model: Path, store: str) -> None:
    how = settings(model, store, batched=512, min_match_tokens=64, refresh_s=REFRESH_S)
    first, second = pair = Killable(how), Killable(how)
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        for each in pair:
            stack.callback(each.kill)
        list(pool.map(Killable.start, pair))
        check_shared(load, first, second, load.given[0], load.reordered[0])
        check_shared(load, second, first, load.given[1], load.reordered[1])
        run_load(load, pair)
        for each in pair:  # since its restart each has blended what others had stored
            for one in load.reordered[0][-3:]:
                assert load.is_right(one, each.ask(one))
            assert each.loaded() > 0
    with open_store(store) as opened:  # nothing in it is damaged, whoever was killed while writing
        assert opened.verify() == []
        assert len(opened.manifests()) >= 6


def test_two_servers_on_one_folder(load: Load, readable: Path, tmp_path: Path) -> None:
    serve_and_kill(load, readable, f"file://{tmp_path}/store?ram_bytes=64MiB")


@needs_redis
@pytest.mark.slow
def test_two_servers_on_one_redis(load: Load, readable: Path) -> None:
    with redis_server() as redis:
        serve_and_kill(load, readable, f"{redis.url}?prefix=shared")
