"""Keys, and what they keep apart: chunks, documents, quotas, and what one tenant could learn of another by time.

Documents of a server are stored by id, edited, listed in pages, dropped; each key its own."""

import json
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient

from cacheblend.core.plan.prompt import Prompt, part_of, text
from cacheblend.engines.hf import BlendEngine
from cacheblend.nano import model_path
from cacheblend.serve.app import create_app
from cacheblend.serve.keys import KeyRing, add_key, read_keys, remove_key
from cacheblend.serve.settings import ServeSettings
from cacheblend.serve.tenants import Tenants
from cacheblend.store import DiskStore
from cacheblend.store.base import SMALL_FILE_BYTES
from campaign import share
from openai_asking import PASSAGES, ask, extras, messages
from random_words import text_of
from serving import connected, keys_of, running, shallow
from small_llama import wait_until

TRIES = max(30, share(100))
WORDS = ["boot", "lamp", "rope", "coin", "drum", "flag", "glove", "helmet", "jar", "kite", "lock", "map"]


def passage(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(60))


def rank_sum_z(one: list[float], other: list[float]) -> float:
    """Mann and Whitney's statistic in standard deviations: 0 where both come from one distribution."""
    ranked = sorted((value, side) for side, values in enumerate((one, other)) for value in values)
    ranks = sum(rank for rank, (_, side) in enumerate(ranked, 1) if side == 0)
    n, m = len(one), len(other)
    mean, deviation = n * (n + m + 1) / 2, math.sqrt(n * m * (n + m + 1) / 12)
    return (ranks - mean) / deviation


def test_the_statistic_tells_distributions_apart() -> None:
    rng = random.Random(1)
    one, same, sooner = ([rng.gauss(mean, 1) for _ in range(100)] for mean in (0, 0, -1))
    assert abs(rank_sum_z(one, same)) < 3 < abs(rank_sum_z(one, sooner))


def test_no_hit_and_no_difference_in_time(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """As the client sees it, of the whole answer."""
    ring, keys = keys_of(tmp_path, "mine", "theirs")
    settings, rng = ServeSettings(keys=ring, chunk_tokens=16), random.Random(2)
    times: dict[str, list[float]] = {"stored by another": [], "never stored": []}
    with running(settings, model=shallow()) as url, httpx.Client(base_url=url, timeout=60) as http:

        def ask(text: str, key: dict[str, str]) -> dict[str, Any]:
            parts = [{"type": "text", "text": part} for part in (text, f"Who has the {rng.choice(WORDS)}?")]
            body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1, "temperature": 0}
            began = time.perf_counter()
            answer = http.post("/v1/chat/completions", json=body, headers=key)
            seconds = time.perf_counter() - began
            return {"seconds": seconds, **answer.json()["cacheblend"]}

        def store(text: str) -> None:
            assert http.post("/v1/chunks", json={"chunks": [{"text": text}]}, headers=keys["mine"]).status_code == 200

        ask(passage(rng), keys["theirs"])
        for number in range(TRIES):
            known, unknown = passage(rng), passage(rng)
            store(known)
            tries = [("stored by another", known), ("never stored", unknown)]
            for what, text in tries if number % 2 else tries[::-1]:
                report = ask(text, keys["theirs"])
                assert report["missed_tokens"] > 0 and report["hit_tokens"]["memory"] == 0
                assert report["hit_tokens"]["prefix"] < 5  # the template's own text
                times[what].append(report["seconds"])
            if number < 5:
                assert ask(known, keys["mine"])["missed_tokens"] == 0
    z = rank_sum_z(times["stored by another"], times["never stored"])
    record_property("rank_sum_z", z)
    assert abs(z) < 4, z


def test_keys_keep_tenants_apart(tmp_path: Path) -> None:
    ring, headers = keys_of(tmp_path, "one", "other")
    mine, theirs = headers.values()
    file, secret = tmp_path / "keys.json", mine["Authorization"].removeprefix("Bearer ")
    assert secret not in file.read_text() and file.stat().st_mode & 0o77 == 0
    with running(ServeSettings(keys=ring, chunk_tokens=16), model=shallow()) as url:
        for wrong in ({}, {"Authorization": "Bearer cb-wrong"}, {"Authorization": secret}):
            refused = httpx.get(f"{url}/v1/models", headers=wrong)
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        chunks = {"chunks": [{"text": text} for text in PASSAGES]}
        stored = httpx.post(f"{url}/v1/chunks", json=chunks, headers=mine, timeout=60).json()["data"]
        body = {"model": "nano", "messages": messages(), "max_tokens": 1}

        def missed(headers: dict[str, str], **more: Any) -> int:
            answer = httpx.post(f"{url}/v1/chat/completions", json=body | more, headers=headers, timeout=60)
            return int(answer.json()["cacheblend"]["missed_tokens"])

        assert missed(mine) == 0
        assert missed(mine, cacheblend={"salt": "another project"}) > 0
        assert missed(theirs) > 0
        assert httpx.get(f"{url}/v1/chunks", headers=theirs).json()["data"] != stored
        assert httpx.delete(f"{url}/v1/chunks/{stored[0]['id']}", headers=theirs).status_code == 404


def test_a_strangers_body_is_not_waited_for(tmp_path: Path) -> None:
    with running(ServeSettings(keys=keys_of(tmp_path, "one")[0]), model=shallow()) as url:
        with connected(url) as stranger:
            stranger.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n\r\n")
            assert stranger.recv(4096).startswith(b"HTTP/1.1 401")
        assert httpx.post(f"{url}/v1/completions", content=b"{", timeout=60).status_code == 401


def test_a_key_that_is_removed_or_added_is_so_in_a_running_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend.serve.keys.LOOK_S", 0.0)
    file, figures = tmp_path / "keys.json", tmp_path / "metrics.json"
    old, reader = add_key(file, "old"), add_key(figures, "prometheus")
    settings = ServeSettings(keys=KeyRing(read_keys(file), file), metrics_keys=KeyRing(read_keys(figures), figures))
    with running(settings, model=shallow()) as url:

        def status(key: str, path: str = "/v1/models") -> int:
            return httpx.get(url + path, headers={"Authorization": f"Bearer {key}"}).status_code

        assert status(old) == 200 and status(reader) == 401
        assert status(old, "/metrics") == 401 and status(reader, "/metrics") == 200
        new = add_key(file, "new")
        assert status(new) == 200
        remove_key(file, "old")
        assert status(old) == 401 and status(new) == 200
        file.write_text("{")
        assert status(new) == 200  # what cannot be read changes nothing
        file.unlink()
        assert status(new) == 401  # and no key lets nobody in
        remove_key(figures, "prometheus")
        assert [status(each, "/metrics") for each in (reader, new)] == [401, 401]


def test_quotas_of_a_key() -> None:
    chunks = {"chunks": [{"text": text} for text in PASSAGES]}
    with running(ServeSettings(store_bytes=1000, chunk_tokens=16), model=shallow()) as url:
        refused = httpx.post(f"{url}/v1/chunks", json=chunks, timeout=60)
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "quota"
        assert extras(ask(url))["missed_tokens"] > 0
        time.sleep(0.5)
        assert httpx.get(f"{url}/v1/chunks").json()["data"] == []  # nor is what a request missed
    with running(ServeSettings(pin_bytes=1000), model=shallow()) as url:
        assert httpx.post(f"{url}/v1/chunks", json=chunks, timeout=60).status_code == 200
        assert httpx.post(f"{url}/v1/chunks", json=chunks | {"pin": True}, timeout=60).status_code == 403


def test_evicted_chunks_that_are_pinned_count_for_the_quota() -> None:
    with BlendEngine.from_pretrained(shallow(), store="memory") as engine:
        one, two = ({"chunks": [{"text": text}]} for text in PASSAGES[:2])
        bound = max(Tenants(engine, None, None).size_of(len(engine.tokenizer.encode(text))) for text in PASSAGES[:2])
        with TestClient(create_app(engine, ServeSettings(pin_bytes=bound * 3 // 2))) as web:
            (listed,) = web.post("/v1/chunks", json=one).json()["data"]
            for manifest in engine.store.manifests():
                for name in manifest.block_names:
                    engine.store.delete(name)
            assert web.post(f"/v1/chunks/{listed['id']}/pin").status_code == 200
            refused = web.post("/v1/chunks", json=two | {"pin": True})
            assert refused.status_code == 403 and refused.json()["error"]["code"] == "quota"
            assert web.post("/v1/chunks", json=one).json()["data"][0]["pinned"]


def test_a_part_of_a_passage_counts_as_the_whole_which_is_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page stores counts against its key's quota before it is stored, and only once."""
    whole, part, chunks = 200, 10, 3
    ids = np.arange(chunks * whole) % 199 + 20
    parts = [part_of(each, 1, part, f"{number}") for number, each in enumerate(np.split(ids, chunks))]
    prompt = Prompt.of([text([20, 21, 22]), *parts, text([23, 24])])
    body = {"documents": [{"text": "a"}], "question": "b"}

    def refuse_more(tenants: Tenants, key: object, tokens: int, files: int = 1) -> bool:
        assert (tokens, files) == (0, 0), "what is stored is reserved again"
        return True

    with BlendEngine.from_pretrained(model_path(), store="memory", config={"capture": False}) as engine:
        monkeypatch.setattr(engine, "chat_prompt", lambda *_: prompt)

        def explained(store_bytes: int) -> dict[str, Any]:
            with TestClient(create_app(engine, ServeSettings(store_bytes=store_bytes))) as web:
                found: dict[str, Any] = web.post("/playground/explain", json=body).json()
                return found

        need = chunks * (Tenants(engine, None, None).size_of(whole) + SMALL_FILE_BYTES)
        assert explained(need - 1)["stored"] == 0 and not engine.store.manifests()
        assert explained(need)["stored"] == chunks
        monkeypatch.setattr(Tenants, "reserve", refuse_more)
        assert explained(need)["hit_tokens"]["memory"] == chunks * part


ODD = ["a/b", "../../etc/passwd", "ü n%2Fï?#&", ".", "..", "🦩", "x" * 1024, " ", "a\nb", "%00", "null"]


def put(http: httpx.Client, documents: dict[str, str], **more: Any) -> dict[str, Any]:
    body = {"documents": [{"id": name, "text": text} for name, text in documents.items()], **more}
    answer = http.post("/v1/documents", json=body)
    assert answer.status_code == 200, answer.text
    done: dict[str, Any] = answer.json()
    return done


def pages(http: httpx.Client, path: str, limit: int, **more: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    after = ""
    while True:
        page = http.get(path, params={"limit": limit, "after": after, **more}).json()
        assert len(page["data"]) <= limit
        found += page["data"]
        if not page["has_more"]:
            return found
        after = page["last_id"]


@pytest.fixture(scope="module")
def own() -> Iterator[httpx.Client]:
    with running(ServeSettings(drain_s=5), model=shallow()) as url, httpx.Client(base_url=url, timeout=600) as client:
        yield client


@pytest.fixture
def http(own: httpx.Client) -> Iterator[httpx.Client]:
    """A client of a server that has stored nothing; what a test stores is dropped behind it."""
    yield own
    for each in pages(own, "/v1/documents", 1000):
        own.delete("/v1/documents", params={"id": each["id"]})
    assert own.get("/v1/documents").json()["data"] == own.get("/v1/chunks").json()["data"] == []


def test_documents_of_any_id_are_stored_edited_and_dropped(http: httpx.Client) -> None:
    long = text_of(1, 150)
    first = put(http, {"a": long, "b": "One bell rings.", "empty": " "})
    assert (first["added"], first["empty"]) == (3, ["empty"]) and first["computed_tokens"] == first["tokens"]
    assert put(http, {"a": long, "b": "One bell rings."})["kept"] == 2
    edited = put(http, {"a": long + " A new end."})
    assert edited["changed"] == 1 and 0 < edited["computed_tokens"] < 0.6 * edited["tokens"]
    listed = {each["id"]: each for each in http.get("/v1/documents").json()["data"]}
    assert listed.keys() == {"a", "b", "empty"} and all(each["held"] for each in listed.values())
    chunks = {each["id"]: each for each in http.get("/v1/chunks").json()["data"]}
    assert chunks.keys() == {chunk for each in listed.values() for chunk in each["chunks"]}
    assert all(each["documents"] for each in chunks.values())
    put(http, {"copy": "One bell rings."})
    assert http.delete("/v1/documents/b").json()["dropped_chunks"] == 0
    assert http.delete("/v1/documents/copy").json()["dropped_chunks"] == 1
    assert http.delete("/v1/documents/a").json()["dropped_chunks"] == len(listed["a"]["chunks"])
    assert http.delete("/v1/documents/a").status_code == 404
    assert http.get("/v1/chunks").json()["data"] == []

    # ids of any characters
    assert http.delete("/v1/documents/empty").status_code == 200
    put(http, {name: f"Document {number} of the harbour." for number, name in enumerate(ODD)})
    assert {each["id"] for each in pages(http, "/v1/documents", 3)} == set(ODD)
    for name in ODD:
        if "\n" in name or set(name) == {"."}:
            gone = http.delete("/v1/documents", params={"id": name})
        else:
            gone = http.delete(f"/v1/documents/{quote(name, safe='')}")
        assert gone.status_code == 200 and gone.json()["id"] == name, name
    assert http.get("/v1/documents").json()["data"] == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": []}, "documents"),
        ({"documents": [{"id": "", "text": "a"}]}, "documents.0.id"),
        ({"documents": [{"id": "x" * 1025, "text": "a"}]}, "documents.0.id"),
        ({"documents": [{"id": "a"}]}, "documents.0.text"),
        ({"documents": [{"id": "a", "text": "\ud800"}]}, "documents.0.text"),
        ({"documents": [{"id": "a", "text": "a"}], "collection": ""}, "collection"),
        ({"documents": [{"id": "a", "text": "a"}, {"id": "a", "text": "b"}]}, None),
    ],
)
def test_wrong_documents_change_nothing(shallow_url: str, body: dict[str, Any], param: str | None) -> None:
    with httpx.Client(base_url=shallow_url, timeout=60) as http:
        headers = {"Content-Type": "application/json"}
        refused = http.post("/v1/documents", content=json.dumps(body), headers=headers)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
        assert http.get("/v1/documents").json()["data"] == []
        assert http.get("/v1/documents", params={"after": "zz"}).status_code == 400
        assert http.get("/v1/chunks", params={"limit": 0}).status_code == 400


def test_keys_and_salts_and_collections_keep_equal_ids_apart(tmp_path: Path) -> None:
    ring, headers = keys_of(tmp_path, "mine", "theirs")
    with (
        running(ServeSettings(keys=ring), model=shallow()) as url,
        httpx.Client(base_url=url, timeout=60, headers=headers["mine"]) as one,
        httpx.Client(base_url=url, timeout=60, headers=headers["theirs"]) as other,
    ):
        same = {"same": text_of(1, 60)}
        first = put(one, same)
        for again in (put(other, same), put(one, same, salt="s")):
            assert again["computed_tokens"] == first["computed_tokens"]  # nothing of another's is found
        assert put(one, same, collection="second")["computed_tokens"] == 0  # one tenant: the same chunks
        assert other.delete("/v1/documents/same").json()["dropped_chunks"] == first["chunks"]
        assert other.get("/v1/documents").json()["data"] == other.get("/v1/chunks").json()["data"] == []
        assert other.delete("/v1/documents/same").status_code == 404
        assert one.delete("/v1/documents/same", params={"collection": "second"}).json()["dropped_chunks"] == 0
        assert put(one, same)["kept"] == put(one, same, salt="s")["kept"] == 1
        assert len(one.get("/v1/documents").json()["data"]) == 1
        assert httpx.get(f"{url}/v1/documents").status_code == 401


def test_pages_hold_every_chunk_once(http: httpx.Client) -> None:
    put(http, {str(number): f"The bell {number} rings in harbour {number * 7}." for number in range(23)})
    chunks = pages(http, "/v1/chunks", 5)
    assert len({each["id"] for each in chunks}) == len(chunks) == 23
    assert [each["id"] for each in chunks] == sorted(each["id"] for each in chunks)
    documents = pages(http, "/v1/documents", 4)
    assert {each["id"] for each in documents} == {str(number) for number in range(23)}
    page = http.get("/v1/chunks", params={"limit": 5}).json()
    http.delete(f"/v1/chunks/{page['last_id']}")  # a cursor's own entry may go
    rest = http.get("/v1/chunks", params={"limit": 100, "after": page["last_id"]}).json()
    assert [each["id"] for each in rest["data"]] == [each["id"] for each in chunks[5:]] and not rest["has_more"]


def test_a_list_reads_nothing_of_other_tenants(tmp_path: Path) -> None:
    """What a page costs is counted in calls to the store: the same, however much the others have stored."""
    ring, headers = keys_of(tmp_path, "mine", "theirs")
    asked: list[str] = []

    class Counting(DiskStore):
        counts = False

        def __getattribute__(self, name: str) -> Any:
            look = super().__getattribute__
            if name in ("manifests", "pinned", "held", "are_pinned", "find") and look("counts"):
                asked.append(name)
            return look(name)

    with (
        Counting(tmp_path / "s", durable=False) as store,
        running(ServeSettings(keys=ring), store, model=shallow()) as url,
        httpx.Client(base_url=url, timeout=60, headers=headers["mine"]) as one,
        httpx.Client(base_url=url, timeout=60, headers=headers["theirs"]) as other,
    ):
        put(one, {"a": "The bell rings."})
        calls = []
        for _ in range(2):
            asked.clear()
            store.counts = True
            listed = [len(one.get(f"/v1/{kind}").json()["data"]) for kind in ("chunks", "documents")]
            store.counts = False
            assert listed == [len(calls) + 1] * 2
            calls.append(list(asked))
            put(other, {str(number): f"Ferry {number} leaves at {number}." for number in range(40)})
            put(one, {"a": "The bell rings.", "b": "The other bell rings."})
        assert calls[0] == calls[1] and "manifests" not in calls[0] and "pinned" not in calls[0]
        assert calls[0].count("held") == 2  # one a page
        asked.clear()
        store.counts = True
        new = one.post("/v1/chunks", json={"chunks": [{"text": f"Ferry {number}."} for number in range(20)]})
        store.counts = False
        assert len(new.json()["data"]) == 20 and asked.count("held") == 3  # before, in and after `warm`


def test_chunks_of_another_process_are_listed_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend.serve.tenants.LIST_REFRESH_S", 0.05)
    with (
        running(ServeSettings(), str(tmp_path / "s"), model=shallow()) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        assert http.get("/v1/chunks").json()["data"] == []
        with BlendEngine.from_pretrained(shallow(), store=tmp_path / "s") as other:
            other.warm(["The other bell rings."])
        found = next(each for _ in range(2000) if (each := http.get("/v1/chunks").json()["data"]))
        assert len(found) == 1


def test_a_quota_counts_manifests_and_records() -> None:
    body = {"documents": [{"id": str(number), "text": f"Bell {number}."} for number in range(40)]}
    with running(ServeSettings(store_bytes=40 * SMALL_FILE_BYTES), model=shallow()) as url:
        refused = httpx.post(f"{url}/v1/documents", json=body, timeout=60)
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "quota"
        assert httpx.get(f"{url}/v1/documents").json()["data"] == []


def test_a_post_whose_quota_cannot_be_counted_is_asked_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, count = threading.Event(), Tenants._held_by
    monkeypatch.setattr("cacheblend.serve.tenants._COUNT_S", 0.05)
    monkeypatch.setattr(Tenants, "_held_by", lambda tenants, key: gate.wait(60) and count(tenants, key))
    posts = {
        "chunks": {"chunks": [{"text": PASSAGES[0]}]},
        "documents": {"documents": [{"id": "a", "text": "A bell."}]},
    }
    with running(ServeSettings(store_bytes=1 << 30), model=shallow()) as url, httpx.Client(base_url=url) as http:
        for kind, body in posts.items():
            refused = http.post(f"/v1/{kind}", json=body, timeout=60)
            assert refused.status_code == 503 and int(refused.headers["Retry-After"]) >= 1, refused.text
            assert refused.json()["error"]["code"] == "store"
        assert extras(ask(url))["missed_tokens"] > 0  # answers need no store
        gate.set()
        monkeypatch.setattr("cacheblend.serve.tenants._COUNT_VALID_S", 0.0)
        wait_until(lambda: http.post("/v1/chunks", json=posts["chunks"]).status_code == 200)


def test_documents_posted_at_the_same_time_keep_what_they_share(http: httpx.Client) -> None:
    texts = [text_of(seed, 20) for seed in range(3)]

    def work(number: int) -> None:
        rng = random.Random(number)
        with httpx.Client(base_url=http.base_url, timeout=120) as own:
            for _ in range(6):
                if rng.random() < 0.6:
                    put(own, {f"d{number}": rng.choice(texts)})
                else:
                    assert own.delete(f"/v1/documents/d{number}").status_code in (200, 404)

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(work, range(5)))
    documents = http.get("/v1/documents").json()["data"]
    assert all(each["held"] for each in documents)
    listed = {each["id"] for each in http.get("/v1/chunks").json()["data"]}
    assert listed == {chunk for each in documents for chunk in each["chunks"]}


def test_a_post_whose_client_goes_is_completed_by_the_next(http: httpx.Client) -> None:
    documents = {str(number): text_of(number, 60) for number in range(80)}
    body = {"documents": [{"id": name, "text": text} for name, text in documents.items()]}
    with pytest.raises(httpx.TimeoutException):
        http.post("/v1/documents", json=body, timeout=httpx.Timeout(30, read=0.3))
    done = put(http, documents)
    assert done["documents"] == 80 and done["missing_documents"] == 0
    again = put(http, documents)
    assert again["kept"] == 80 and again["computed_tokens"] == 0


def test_an_edited_history_is_found_by_its_own_conversation_alone(tmp_path: Path) -> None:
    ring, headers = keys_of(tmp_path, "one", "two")
    thought, asked, told, more = (text_of(n, count) for n, count in enumerate((4, 12, 16, 2)))
    config = {"edits": True, "discover": False}
    with (
        BlendEngine.from_pretrained(shallow(), store="memory", config=config) as engine,
        TestClient(create_app(engine, ServeSettings(keys=ring))) as web,
    ):

        def moved(who: str, conversation: str, *said: str) -> int:
            roles = ["system", *["user", "assistant"] * len(said)]
            turns = zip(roles, ["Be brief.", *said], strict=False)
            history = [{"role": role, "content": content} for role, content in turns]
            body: dict[str, Any] = {"model": engine.name, "messages": history, "max_tokens": 1}
            body["cacheblend"] = {"conversation": conversation}
            answer = web.post("/v1/chat/completions", json=body, headers=headers[who])
            assert answer.status_code == 200, answer.text
            engine.flush()
            return int(answer.json()["cacheblend"]["hit_tokens"].get("moved", 0))

        assert moved("one", "a", asked, thought + told, more) == 0
        assert moved("one", "b", asked, told, more) == moved("two", "a", asked, told, more) == 0
        assert moved("one", "a", asked, told, more) > 64
        assert 'cacheblend_hit_tokens_total{source="moved"}' in web.get("/metrics", headers=headers["one"]).text


def test_a_chunk_that_another_process_stored_is_pinned_and_deleted_without_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend.serve.tenants.LIST_REFRESH_S", 0.05)
    one, other = (BlendEngine.from_pretrained(shallow(), store=f"{tmp_path}/store") for _ in range(2))
    with (
        one,
        other,
        TestClient(create_app(one, ServeSettings())) as here,
        TestClient(create_app(other, ServeSettings())) as there,
    ):
        wait_until(lambda: there.get("/v1/chunks").status_code == 200)
        stored = here.post("/v1/chunks", json={"chunks": [{"text": text_of(1, 9)}]}).json()["data"][0]["id"]
        wait_until(lambda: there.post(f"/v1/chunks/{stored}/pin").status_code == 200)
        assert there.delete(f"/v1/chunks/{stored}").status_code == 200
