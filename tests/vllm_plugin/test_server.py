"""The plug-in behind vLLM's OpenAI server: bad input, streaming, aborted requests, its metrics. One server for all."""

import json
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoTokenizer

from cacheblend.nano import model_path
from lab.servers.vllm_server import NAME, Server, ServerSettings, serving
from vllm_running import NANO_VOCAB, Asked, Texts

BATCHED = 256
"""Tokens of a step: fewer than a prompt has, so that prefills come in pieces."""

OPTIONS = ("--enforce-eager", "--enable-auto-tool-choice", "--tool-call-parser=hermes")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    extra = {
        "allow_untested_version": True,
        "lookup_timeout_s": 30.0,  # the machine may be busy
        "store": f"file://{tmp_path_factory.mktemp('store')}",
        "recompute_ratio": 1.0,
        "min_match_tokens": 64,
        "refresh_s": 0,
        "controller": False,  # it decides by times
    }
    settings = ServerSettings(model_path(), extra, 2048, BATCHED, "float32", OPTIONS)
    with serving(settings) as running:
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


def post(server: Server, kind: str = "", **fields: Any) -> tuple[int, dict[str, Any]]:
    """Status and answer, whatever the status; of `/v1/chat/completions` where it is a chat."""
    body = {"model": NAME, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True} | fields
    request = urllib.request.Request(
        f"{server.url}/v1/{kind}completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def tokens(server: Server, ids: list[int], chunks: Any = None, **fields: Any) -> list[list[int]]:
    """Of each choice."""
    params = {} if chunks is None else {"kv_transfer_params": {"cacheblend": {"chunks": chunks}}}
    status, answer = post(server, prompt=ids, **params, **fields)
    assert status == 200, answer
    return [choice["token_ids"] for choice in answer["choices"]]


def test_spans_contents_and_plain_requests_answer_alike_at_ratio_one(server: Server, asked: list[Asked]) -> None:
    for one in asked:
        before = server.counted("requests")
        plain = tokens(server, one.ids, [])
        assert server.counted("requests") == before
        assert tokens(server, one.ids, one.spans) == plain
        spans = [[start + 1, stop + 1] for start, stop in one.spans]
        assert tokens(server, [20, *one.ids], spans) == tokens(server, [20, *one.ids], [])
        assert tokens(server, [21, *one.ids]) == tokens(server, [21, *one.ids], [])  # found by content
    assert server.counted("requests") >= 2 * len(asked)


def test_the_endpoint_reports_what_was_done(server: Server, asked: list[Asked]) -> None:
    texts = Texts(32, NANO_VOCAB)
    server.ask([*texts.ids(30), *asked[0].ids], 1)
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
    """Every other form of them: `test_vllm_settings`."""
    before = server.counted("fallbacks")
    status, answer = post(server, prompt=asked[0].ids, **options(**wrong))
    assert status == 200
    assert [choice["token_ids"] for choice in answer["choices"]] == tokens(server, asked[0].ids, [])
    assert server.counted("fallbacks") == before + 1


def test_a_prompt_that_is_one_chunk_and_one_without_a_question(server: Server, asked: list[Asked]) -> None:
    one = asked[1]
    start, stop = one.spans[0]
    alone = one.ids[start:stop]
    assert tokens(server, alone, [[0, len(alone)]]) == tokens(server, alone, [])
    end = one.spans[-1][1]
    assert tokens(server, one.ids[:end], one.spans) == tokens(server, one.ids[:end], [])


@pytest.mark.feature("prompt log-probabilities", "plain")
def test_what_cannot_be_blended_is_answered_plainly_or_refused(server: Server, asked: list[Asked]) -> None:
    spans = {"kv_transfer_params": {"cacheblend": {"chunks": asked[2].spans}}}
    before = server.counted("requests")
    status, answer = post(server, prompt=asked[2].ids, prompt_logprobs=1, **spans)
    assert status == 200
    assert len(answer["choices"][0]["prompt_logprobs"]) == len(asked[2].ids)
    status, _ = post(server, prompt=None, prompt_embeds="AAAA", **spans)
    assert status == 400
    status, answer = post(server, prompt=[])
    assert 400 <= status < 500
    status, answer = post(server, prompt=[30] * 3000)
    assert status == 400
    assert server.counted("requests") == before
    assert tokens(server, asked[2].ids, asked[2].spans) == tokens(server, asked[2].ids, [])


def test_a_stream_has_the_answer_and_several_choices_share_the_blend(server: Server, asked: list[Asked]) -> None:
    one = asked[0]
    streamed = server.ask([9, *one.ids], 6)
    status, answer = post(server, prompt=[9, *one.ids], kv_transfer_params={"cacheblend": {"chunks": []}})
    assert status == 200
    assert streamed.text == answer["choices"][0]["text"]
    assert 1 <= len(streamed.times) <= 6  # vLLM joins tokens that its server is too busy to send one by one
    # Without a seed: vLLM's own CPU build ends where the prefill of a request with a seed comes in pieces.
    drawn = {"n": 3, "temperature": 1.0, "top_k": 1}
    assert tokens(server, [10, *one.ids], **drawn) == 3 * tokens(server, [10, *one.ids], [])


def test_clients_that_go_away_and_many_at_once_harm_nobody(server: Server, asked: list[Asked]) -> None:
    texts = Texts(33, NANO_VOCAB)
    prompts = [[*texts.ids(19), *one.ids] for one in asked * 3]
    plain = [tokens(server, ids, []) for ids in prompts]
    found: list[Any] = [None] * len(prompts)

    def ask(at: int) -> None:
        found[at] = tokens(server, prompts[at])

    def leave() -> None:
        body = json.dumps({"model": NAME, "prompt": prompts[0][3:], "max_tokens": 500, "stream": True}).encode()
        request = urllib.request.Request(f"{server.url}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request) as response:
            response.readline()

    threads = [threading.Thread(target=leave) for _ in range(3)]
    threads += [threading.Thread(target=ask, args=(at,)) for at in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == plain


def told(answer: dict[str, Any]) -> dict[str, Any]:
    """What an answer says of its request."""
    found: dict[str, Any] = answer["kv_transfer_params"]["cacheblend"]
    return found


def test_an_answer_says_what_was_reused_and_why_not(server: Server, asked: list[Asked]) -> None:
    one = asked[0]
    fronts = iter(range(40, 60))
    situations: list[tuple[dict[str, Any], bool, str]] = [
        ({"prompt": [next(fronts), *one.ids]}, True, ""),
        ({"prompt": [next(fronts)] * 100}, False, "nothing stored"),
        ({"prompt": [next(fronts), *one.ids], **options(mode="full")}, False, "mode full"),
        ({"prompt": [next(fronts), *one.ids], **options(chunks=[[3, 1]])}, False, "bad parameters: chunk 0 is [3, 1]"),
        ({"prompt": [next(fronts), *one.ids], **options(speed=3)}, False, "bad parameters: kv_transfer_params"),
        ({"prompt": [next(fronts), *one.ids], "prompt_logprobs": 1}, False, "prompt log-probabilities"),
        ({"prompt": [next(fronts), *one.ids], "cache_salt": "nobody"}, False, "nothing stored"),
    ]
    for fields, blended, reason in situations:
        status, answer = post(server, **fields)
        assert status == 200
        found = told(answer)
        assert (found["blended"], found["reason"][: len(reason)]) == (blended, reason), fields
        assert bool(reason) == (found["reason"] != "")
        assert (sum(found["hit_tokens"].values()) > 0) == blended
        assert (0 < found["prefill_share"] <= 1.2) == blended
        assert (found["row_layers"] > 0) == blended
    tokens(server, one.ids[:20], [])
    for reason in ("nothing stored", "mode full", "bad parameters", "prompt log-probabilities"):
        assert any(f'reason="{reason}"' in key for key in server.counters() if "not_blended" in key), reason


def options(**fields: Any) -> dict[str, Any]:
    return {"kv_transfer_params": {"cacheblend": fields}}


def test_a_request_chooses_ratio_and_selector_and_shares_blocks_only_with_its_like(
    server: Server, asked: list[Asked]
) -> None:
    ids, shares = [61, *asked[1].ids], []
    settings: list[dict[str, Any]] = [{"recompute_ratio": 0.0}, {"recompute_ratio": 0.3}, {"selector": "none"}]
    settings.append({"selector": "random", "recompute_ratio": 0.3})  # a share that no layer changes
    for number, fields in enumerate(settings):
        status, answer = post(server, prompt=ids, **options(**fields))
        assert status == 200
        assert told(answer)["hit_tokens"].get("vllm", 0) == 0, number  # nothing of the others is found
        shares.append(told(answer)["recomputed_tokens"])
    loaded = sum(stop - start for start, stop in asked[1].spans)
    assert shares[0] == shares[2] == 0
    assert 0 < shares[1] < shares[3]  # gradual filtering: 0.3 on average, and less after the last check layer
    assert 0.2 * loaded < shares[3] < 0.4 * loaded
    at_one = tokens(server, ids)  # the server's own ratio
    assert at_one == tokens(server, ids, [])


def test_requests_of_every_selector_at_once_answer_as_without_blending_at_ratio_one(
    server: Server, asked: list[Asked]
) -> None:
    """Their rows are dropped at different layers, some ask the question first, and they are computed as batches."""
    fronts = iter(range(70, 100))
    names = ["hkvd", "query", "hybrid", "head", "random", "all"] * 2
    prompts = [[next(fronts), *asked[at % len(asked)].ids] for at in range(len(names))]
    found: list[Any] = [None] * len(names)

    def ask(at: int) -> None:
        found[at] = post(server, prompt=prompts[at], **options(selector=names[at], recompute_ratio=1.0))

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(len(names))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, ids, (status, answer) in zip(names, prompts, found, strict=True):
        assert status == 200
        assert told(answer)["blended"], name
        status, right = post(server, prompt=ids, **options(mode="full"))
        assert answer["choices"][0]["token_ids"] == right["choices"][0]["token_ids"], name


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
    server.wait_for_captures(before + len(ids) - 10)
    properties = {"city": {"enum": ["Bern", "Oslo"]}, "day": {"enum": [7, 9]}}
    schema = {"type": "object", "properties": properties, "required": ["city", "day"], "additionalProperties": False}
    fields: dict[str, Any] = {
        "tools": [{"type": "function", "function": {"name": "weather", "strict": True, "parameters": schema}}],
        "max_tokens": 90,
        "ignore_eos": False,
        "logit_bias": {str(number): -100 for number in spaces},  # the model would write spaces for ever
    }
    for front, choice in (("Look", {"type": "function", "function": {"name": "weather"}}), ("See", "required")):
        message = {"role": "user", "content": f"{front} {passage} What is the weather?"}
        calls = []
        for more in ({}, options(chunks=[])):
            status, answer = post(server, "chat/", messages=[message], tool_choice=choice, **fields, **more)
            assert status == 200
            assert told(answer)["blended"] == (more == {})
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            calls.append(call["function"])
        assert calls[0] == calls[1]
        assert json.loads(calls[0]["arguments"])["city"] in {"Bern", "Oslo"}
