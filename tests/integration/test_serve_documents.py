"""The server's documents: stored by id, edited, listed in pages, dropped; each key its own."""

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from cacheblend.engines.hf import BlendEngine
from cacheblend.serve.settings import ServeSettings
from cacheblend.store import DiskStore
from cacheblend.store.base import SMALL_FILE_BYTES
from campaign import rotating
from serving import free_port, is_ready, keys_of, running, shallow

ODD = ["a/b", "../../etc/passwd", "ü n%2Fï?#&", ".", "..", "🦩", "x" * 1024, " ", "a\nb", "%00", "null"]


def text_of(seed: int, count: int = 60) -> str:
    rng = random.Random(seed)
    words = ["lamp", "ferry", "keeper", "tower", "salt", "rope", "winter", "bell", "harbour", "stone", "letter"]
    return " ".join(f"The {rng.choice(words)} of the {rng.choice(words)} is {rng.randrange(99)}." for _ in range(count))


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


def test_documents_are_stored_edited_and_dropped(http: httpx.Client) -> None:
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


def test_ids_of_any_characters(http: httpx.Client) -> None:
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
        same = {"same": text_of(1)}
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
            assert len(one.get("/v1/chunks").json()["data"]) == 1
            assert len(one.get("/v1/documents").json()["data"]) == 1
            store.counts = False
            calls.append(list(asked))
            put(other, {str(number): f"Ferry {number} leaves at {number}." for number in range(40)})
        assert calls[0] == calls[1] and "manifests" not in calls[0] and "pinned" not in calls[0]


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


def test_documents_posted_at_the_same_time_keep_what_they_share(http: httpx.Client) -> None:
    texts, errors = [text_of(seed, 20) for seed in range(3)], list[int]()

    def work(number: int) -> None:
        rng = random.Random(number)
        with httpx.Client(base_url=http.base_url, timeout=120) as own:
            for _ in range(6):
                if rng.random() < 0.6:
                    put(own, {f"d{number}": rng.choice(texts)})
                elif own.delete(f"/v1/documents/d{number}").status_code not in (200, 404):
                    errors.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    documents = http.get("/v1/documents").json()["data"]
    assert errors == [] and all(each["held"] for each in documents)
    listed = {each["id"] for each in http.get("/v1/chunks").json()["data"]}
    assert listed == {chunk for each in documents for chunk in each["chunks"]}


def test_a_post_whose_client_goes_is_completed_by_the_next(http: httpx.Client) -> None:
    documents = {str(number): text_of(number) for number in range(80)}
    body = {"documents": [{"id": name, "text": text} for name, text in documents.items()]}
    with pytest.raises(httpx.TimeoutException):
        http.post("/v1/documents", json=body, timeout=httpx.Timeout(30, read=0.3))
    done = put(http, documents)
    assert done["documents"] == 80 and done["missing_documents"] == 0
    again = put(http, documents)
    assert again["kept"] == 80 and again["computed_tokens"] == 0


@pytest.mark.parametrize("share", rotating([0.05, 0.5]))
def test_a_server_that_is_killed_leaves_a_store_that_the_next_post_completes(tmp_path: Path, share: float) -> None:
    folder, port = tmp_path / "store", free_port()
    documents = {str(number): text_of(number) for number in range(60)}
    body = {"documents": [{"id": name, "text": text} for name, text in documents.items()]}
    arguments = ["serve", "-m", str(shallow()), "--port", str(port), "--store", str(folder)]
    command = [sys.executable, "-c", "from cacheblend.cli import main; main()", *arguments]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while not is_ready(url):
                assert server.poll() is None
                time.sleep(0.1)
            refused = list[str]()
            post = threading.Thread(target=lambda: refused.append(posted(url, body)))
            post.start()
            while post.is_alive() and len(list((folder / "blocks").rglob("*.safetensors"))) < share * len(documents):
                time.sleep(0.002)
        finally:
            server.kill()
        post.join(60)
    assert refused and refused != ["200"]  # it was killed in the middle
    with DiskStore(folder) as store:
        assert store.verify() == [] and store.stats().blocks > 0
    with running(ServeSettings(), str(folder), model=shallow()) as url, httpx.Client(base_url=url, timeout=600) as http:
        done = put(http, documents)
        assert done["documents"] == 60 and done["missing_documents"] == done["damaged"] == 0
        assert 0 < done["computed_tokens"] < done["tokens"]
        again = put(http, documents)
        assert again["kept"] == 60 and again["computed_tokens"] == 0
        assert all(each["held"] for each in pages(http, "/v1/documents", 100))


def posted(url: str, body: dict[str, Any]) -> str:
    try:
        return str(httpx.post(f"{url}/v1/documents", json=body, timeout=600).status_code)
    except httpx.TransportError as error:
        return type(error).__name__
