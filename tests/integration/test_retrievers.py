"""Retrievers' adapters, each against the real package, with a running server; and the examples, as readers run them.

Without a server: what others answer at its address, and an id, a salt or a key that cannot be sent."""

import asyncio
import copy
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import random_words
from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.documents import Document
from cacheblend.retrievers import DocumentServer, DocumentServerError, text_id
from cacheblend.serve.keys import KeyRing, add_key, read_keys
from cacheblend.serve.settings import ServeSettings
from campaign import rotating
from lab.servers.processes import free_port
from serving import running

QUESTION = "Who has the boot?"


def text_of(seed: int, count: int = 20) -> str:
    return random_words.text_of(seed, count)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(ServeSettings()) as address:
        yield address


@pytest.fixture
def server(url: str, request: pytest.FixtureRequest) -> Iterator[DocumentServer]:
    """A collection and salt of the test's own."""
    with DocumentServer(url, collection=request.node.name[:200], salt=request.node.name[-200:]) as opened:
        yield opened


def reuse(server: DocumentServer, documents: list[dict[str, str]], key: str = "") -> dict[str, Any]:
    """The server's report of a request with these documents."""
    body: dict[str, Any] = {"model": "nano", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4}
    body |= {"documents": documents, "cacheblend": {"salt": server.salt}}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300, headers=headers)
    assert answer.status_code == 200, answer.text
    return stored(answer.json())


def stored(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer's report, of its hits only passages: a prompt's first tokens are an exact prefix soon."""
    report: dict[str, Any] = answer["cacheblend"]
    return report | {"hit_tokens": report["hit_tokens"]["memory"]}


class Adapter:
    """One library, as a user has it: index, what is retrieved to a request's documents, and remove."""

    def __init__(self, name: str, server: DocumentServer) -> None:
        self.name = name
        if name == "langchain":
            pytest.importorskip("langchain_core")
            from langchain_core.documents import Document as Passage
            from langchain_core.retrievers import BaseRetriever

            from cacheblend.retrievers.langchain import PassageRetriever, documents_of

            class Fixed(BaseRetriever):
                found: list[Passage] = []  # noqa: RUF012  # pydantic's

                def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Passage]:
                    if query == "raise":
                        raise RuntimeError("the index is gone")
                    return self.found

            self.inner = Fixed()
            self.adapter: Any = PassageRetriever(retriever=self.inner, server=server)
            self.make = lambda each, text: Passage(page_content=text, id=each)
            self.documents_of: Callable[[Any], list[dict[str, str]]] = documents_of
        else:
            pytest.importorskip("llama_index.core")
            from llama_index.core.schema import NodeWithScore, TextNode

            from cacheblend.retrievers.llamaindex import PassagePostprocessor, documents_of

            self.adapter, self.documents_of = PassagePostprocessor(server=server), documents_of
            self.make = lambda each, text: TextNode(text=text, **({"id_": each} if each else {}))
            self.scored = NodeWithScore

    def index(self, passages: dict[str, str]) -> Any:
        return self.adapter.index([self.make(each, text) for each, text in passages.items()])

    def retrieved(self, texts: list[str]) -> list[dict[str, str]]:
        made = [self.make(None, text) for text in texts]
        if self.name == "langchain":
            self.inner.found = made
            return self.documents_of(self.adapter.invoke(QUESTION))
        nodes = [self.scored(node=each, score=0.5) for each in made]
        return self.documents_of(self.adapter.postprocess_nodes(nodes, query_str=QUESTION))


@pytest.fixture(params=["langchain", "llamaindex"])
def adapter(request: pytest.FixtureRequest, server: DocumentServer) -> Adapter:
    return Adapter(request.param, server)


def test_indexed_passages_are_reused_wherever_they_stand(adapter: Adapter, server: DocumentServer) -> None:
    """Sent whole, they are stored whole: longer than the 512 tokens to which other documents are cut, too."""
    passages = {"a": text_of(1), "huge": text_of(2, 60), "tiny": "A bell.", "ü/ 🦩": "Der Fährmann 🦩 läutet. " * 4}
    report = adapter.index(passages)
    assert (report.added, report.computed_tokens) == (4, report.tokens) and report.tokens > 700
    again = adapter.index(passages)
    assert (again.kept, again.computed_tokens) == (4, 0)
    texts = list(passages.values())
    for order in (texts, texts[::-1]):
        found = reuse(server, adapter.retrieved(order))
        # The space at the end of the last one is part of the token of the word that follows it in the prompt.
        assert found["missed_tokens"] == 0 and report.tokens - 1 <= found["hit_tokens"] <= report.tokens
    assert sorted(server.ids()) == sorted(passages)
    assert adapter.retrieved([]) == adapter.retrieved([""]) == []
    assert reuse(server, [])["hit_tokens"] == 0
    nothing = adapter.index({})
    assert (nothing.added, nothing.tokens) == (0, 0)
    assert adapter.index({"empty": ""}).without_text == 1

    # An edited passage is computed with the request until it is indexed.
    before, after = text_of(1), text_of(1) + " A new end."
    found = reuse(server, adapter.retrieved([after, passages["huge"]]))
    assert found["missed_tokens"] > 0 and found["hit_tokens"] > 0  # the other one
    assert adapter.index(passages | {"a": after}).changed == 1
    assert reuse(server, adapter.retrieved([after, passages["huge"]]))["missed_tokens"] == 0
    assert reuse(server, adapter.retrieved([before]))["hit_tokens"] == 0  # dropped


def test_equal_texts_are_sent_once_and_stay_until_both_ids_are_gone(adapter: Adapter, server: DocumentServer) -> None:
    text = text_of(5)
    report = adapter.index({"one": text, "two": text})
    assert report.added == 2 and 0 < report.computed_tokens < report.tokens
    documents = adapter.retrieved([text, text, text_of(6), text])
    assert [each["text"] for each in documents] == [text, text_of(6)]
    assert adapter.adapter.remove(["one", "never there"]) == 1
    assert reuse(server, documents[:1])["missed_tokens"] == 0
    assert asyncio.run(adapter.adapter.aremove(["two", "two"])) == 1
    assert reuse(server, documents[:1])["hit_tokens"] == 0


def test_passages_without_text_go_through_a_pipeline_and_are_not_sent(adapter: Adapter) -> None:
    """Pictures, which the next step of the pipeline reads."""
    made = [adapter.make(None, text) for text in ("", "text", "", "text")]
    if adapter.name == "langchain":
        adapter.inner.found = made
        found = adapter.adapter.invoke(QUESTION)
    else:
        found = adapter.adapter.postprocess_nodes([adapter.scored(node=each) for each in made], query_str=QUESTION)
    assert len(found) == 3
    assert [each["text"] for each in adapter.documents_of(found)] == ["text"]


def test_what_cannot_be_kept_and_a_server_that_is_down_are_named(adapter: Adapter) -> None:
    passages = [adapter.make("same", text_of(7)), adapter.make("same", text_of(8))]
    with pytest.raises(InvalidInputError, match="'same' and different texts"):
        adapter.adapter.index(passages)
    with pytest.raises(InvalidInputError, match="at most 1024"):
        adapter.index({"x" * 1025: "text"})
    for wrong in (5, "a text", [5]):
        with pytest.raises(InvalidInputError, match=r"passage|document"):
            adapter.adapter.index(wrong)
    assert copy.deepcopy(adapter.adapter).server is adapter.adapter.server
    assert "server" not in adapter.adapter.model_dump(mode="json")
    adapter.adapter.server = None
    with pytest.raises(InvalidInputError, match="server=DocumentServer"):
        adapter.index({"a": "text"})
    adapter.adapter.server = DocumentServer(f"http://127.0.0.1:{free_port()}", timeout=5)
    with pytest.raises(DocumentServerError, match=r"127\.0\.0\.1.*`cacheblend serve` running"):
        adapter.index({"a": "text"})
    assert [each["text"] for each in adapter.retrieved(["text"])] == ["text"]


def test_langchain_without_ids_errors_and_async(server: DocumentServer) -> None:
    adapter = Adapter("langchain", server)
    from cacheblend.retrievers.langchain import chat_message, documents_of

    made = [adapter.make(None, text_of(seed)) for seed in (9, 9, 10)]
    made[2].metadata |= {"source": "a.txt", "title": 7}
    assert asyncio.run(adapter.adapter.aindex(made)).added == 2  # known by their texts
    assert sorted(server.ids()) == sorted(text_id(text_of(seed)) for seed in (9, 10))
    adapter.inner.found = made
    found = asyncio.run(adapter.adapter.ainvoke(QUESTION))
    assert found == [made[0], made[2]]
    assert reuse(server, documents_of(found))["missed_tokens"] == 0
    for ask in (adapter.adapter.invoke, lambda query: asyncio.run(adapter.adapter.ainvoke(query))):
        with pytest.raises(RuntimeError, match="the index is gone"):
            ask("raise")
    message = chat_message(QUESTION, found)
    assert [part["text"] for part in message.content] == [text_of(9), text_of(10), QUESTION]
    body = {"model": "nano", "messages": [{"role": "user", "content": message.content}], "max_tokens": 2}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body | {"cacheblend": {"salt": server.salt}})
    found = stored(answer.json())
    assert found["missed_tokens"] == 0 < found["hit_tokens"]
    assert [part["text"] for part in chat_message(QUESTION, []).content] == [QUESTION]


def test_keys_are_asked_for_and_keep_documents_apart(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    keys = [add_key(file, name) for name in ("one", "two")]
    with running(ServeSettings(keys=KeyRing(read_keys(file)))) as url:
        with DocumentServer(url) as nobody, pytest.raises(DocumentServerError, match=r"401.*key=") as refused:
            nobody.put([Document("a", text_of(1))])
        assert refused.value.status == 401 and not any(key in str(refused.value) for key in keys)
        with DocumentServer(url, key=keys[0]) as one, DocumentServer(url, key=keys[1]) as two:
            one.put([Document("a", text_of(1))])
            assert (one.ids(), two.ids(), two.drop(["a"])) == (["a"], [], 0)
            hits = [reuse(one, [{"text": text_of(1)}], key)["hit_tokens"] for key in keys]
            assert hits[0] > 0 == hits[1]


@pytest.fixture
def chroma(tmp_path: Path) -> Any:
    chromadb = pytest.importorskip("chromadb")
    return chromadb.PersistentClient(str(tmp_path), chromadb.Settings(anonymized_telemetry=False))


def add(collection: Any, texts: dict[str, str]) -> None:
    """Adds entries with embeddings of their own: Chroma's model would have to be downloaded."""
    vectors = [[float(len(text)), float(sum(map(ord, text)) % 97)] for text in texts.values()]
    collection.upsert(ids=list(texts), documents=list(texts.values()), embeddings=vectors)


def test_a_chroma_collection_is_followed_by_id(chroma: Any, server: DocumentServer) -> None:
    from cacheblend.retrievers.chroma import documents_of, sync_collection

    collection = chroma.create_collection("manuals")
    texts = {f"id {seed} ü/..": text_of(seed) for seed in range(20, 26)}
    add(collection, texts)
    collection.upsert(ids=["vector alone"], embeddings=[[1e6, 1e6]])
    first = sync_collection(collection, server)
    assert (first.added, first.without_text, first.computed_tokens) == (6, 1, first.tokens)
    found = documents_of(collection.query(query_embeddings=[[9.0, 9.0]], n_results=6))
    assert len(found) == 6 and {each["text"] for each in found} <= set(texts.values())
    assert reuse(server, found)["missed_tokens"] == 0
    assert documents_of(collection.query(query_embeddings=[[1e6, 1e6]], n_results=1)) == documents_of({}) == []

    names = list(texts)
    collection.delete(ids=names[:2])
    add(collection, {names[2]: text_of(40)})
    second = sync_collection(collection, server)
    assert (second.dropped, second.changed, second.kept) == (2, 1, 3)
    assert sorted(server.ids()) == sorted(names[2:])
    assert reuse(server, [{"text": texts[names[0]]}])["hit_tokens"] == 0
    again = sync_collection(collection, server)
    assert (again.kept, again.dropped, again.computed_tokens) == (4, 0, 0)

    collection.delete(ids=names)
    with pytest.raises(InvalidInputError, match=r"4 of the 4 documents .* max_drop=1"):
        sync_collection(collection, server)
    assert len(server.ids()) == 4
    assert sync_collection(collection, server, max_drop=1).dropped == 4


def test_chroma_collections_with_the_same_ids_are_kept_apart(chroma: Any, url: str) -> None:
    from cacheblend.retrievers.chroma import sync_collection

    both = [chroma.create_collection(name) for name in ("north", "south")]
    for seed, collection in enumerate(both):
        add(collection, {"1": text_of(50 + seed), "2": text_of(60)})  # the second is the same text in both
    with DocumentServer(url, collection="north") as north, DocumentServer(url, collection="south") as south:
        reports = [sync_collection(each, to) for each, to in zip(both, (north, south), strict=True)]
        assert [report.added for report in reports] == [2, 2]
        assert reports[1].computed_tokens < reports[1].tokens
        both[0].delete(ids=["1", "2"])
        sync_collection(both[0], north, max_drop=1)
        assert (north.ids(), sorted(south.ids())) == ([], ["1", "2"])
        found = reuse(south, [{"text": text_of(51)}, {"text": text_of(60)}])
        assert found["missed_tokens"] == 0 < found["hit_tokens"]


@pytest.mark.parametrize(
    "module, library", [("langchain", "langchain_core"), ("llamaindex", "llama_index"), ("chroma", "chromadb")]
)
def test_a_library_that_is_not_installed_is_named(module: str, library: str) -> None:
    code = f"import sys; sys.modules[{library!r}] = None; import cacheblend.retrievers.{module}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"pip install 'cacheblend[{module}]'" in ended.stderr.splitlines()[-1]


CALLS: list[Callable[[DocumentServer], Any]] = [
    lambda server: server.put([Document("a", "text")]),
    lambda server: server.ids(),
    lambda server: server.drop(["a"]),
    lambda server: server.drop_others(["a"]),
]


def answering(status: int, body: bytes) -> DocumentServer:
    server = DocumentServer("http://elsewhere")
    transport = httpx.MockTransport(lambda request: httpx.Response(status, content=body))
    server._http = httpx.Client(base_url=server.url, transport=transport)
    return server


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, b'{"detail": "Not Found"}', "404.*without /v1"),
        (200, b"<html>Welcome", "no `cacheblend serve` does: '<html>Welcome'"),
        (200, b"[]", "without /v1"),
        (200, b"{}", "without /v1"),
        (204, b"", "without /v1"),
        (200, b"[" * 100_000, "without /v1"),
        (302, b"", "302"),
        (429, json.dumps({"error": {"message": "busy", "code": "queue_full"}}).encode(), "429 busy"),
        (500, json.dumps({"error": "broken"}).encode(), "500.*broken"),
    ],
)
def test_another_servers_answer_is_no_success(
    call: Callable[[DocumentServer], Any], status: int, body: bytes, message: str
) -> None:
    """Neither "dropped" nor "there was none": a wrong url has dropped nothing."""
    with answering(status, body) as server, pytest.raises(DocumentServerError, match=message) as refused:
        call(server)
    assert refused.value.status == status and len(str(refused.value)) < 400


def test_a_document_that_is_not_there_is_no_error_and_what_cannot_be_sent_is_refused_without_the_key() -> None:
    body = json.dumps({"error": {"message": "there is none", "code": "document_not_found"}}).encode()
    with answering(404, body) as server:
        assert server.drop(["a", "b"]) == 0
        with pytest.raises(InvalidInputError, match="lone surrogate"):
            server.drop(["\ud800"])
    wrongs: list[dict[str, Any]] = [{"salt": "\ud800"}, {"collection": "\ud800"}, {"key": "schlüssel"}, {"key": "sk\n"}]
    wrongs += [{"url": "http://[::1"}]
    for wrong in wrongs:
        with pytest.raises(InvalidInputError) as refused:
            DocumentServer(**wrong)
        assert wrong.get("key", "-----") not in str(refused.value)


EXAMPLES = Path(__file__).parents[2] / "examples"
OPENAI = "serve_openai", "openai"
RETRIEVERS = [("langchain", "langchain_openai"), ("llamaindex", "llama_index"), ("chroma", "chromadb")]


@pytest.fixture
def fresh_url() -> Iterator[str]:
    with running(ServeSettings()) as address:
        yield address


def run_example(name: str, library: str, url: str) -> str:
    """What it prints; skips the test where its library is not installed."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--url", url]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize(
    "name, library",
    rotating([OPENAI, ("serve_langchain", "langchain_openai"), ("serve_llamaindex", "llama_index")], core=[OPENAI]),
)
def test_an_example_stores_passages_and_then_reuses_them(fresh_url: str, name: str, library: str) -> None:
    out = run_example(name, library, fresh_url)
    first, before, second, after = out.splitlines()
    assert first.startswith("Luden") and second.startswith("Luden")
    loaded = [re.search(r"from the store {'\w+': (\d+)|(\d+) tokens from the store", each) for each in (before, after)]
    counts = [0 if each is None else int(each[1] or each[2]) for each in loaded]
    assert counts[0] == 0 < counts[1], out  # the first answer stores, the second reuses
    assert len(httpx.get(f"{fresh_url}/v1/chunks").json()["data"]) >= 2  # both passages, each a chunk of its own


@pytest.mark.parametrize(("name", "library"), rotating([(f"retriever_{name}", module) for name, module in RETRIEVERS]))
def test_an_example_of_a_retriever_answers_whether_its_passages_are_stored_or_not(
    fresh_url: str, name: str, library: str
) -> None:
    for _ in range(2):
        assert "Luden" in run_example(name, library, fresh_url).split()
