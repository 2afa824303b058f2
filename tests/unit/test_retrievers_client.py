"""The client of a server's documents, without a server: what others answer at its address, and what cannot be sent.

Situations: a wrong url, where everything is a 404; a page of a proxy; JSON that is not the server's; a server that is
busy; an id, a salt or a key that cannot be sent.
"""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.documents import Document
from cacheblend.retrievers import DocumentServer, DocumentServerError

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


def test_a_document_that_is_not_there_is_no_error() -> None:
    body = json.dumps({"error": {"message": "there is none", "code": "document_not_found"}}).encode()
    with answering(404, body) as server:
        assert server.drop(["a", "b"]) == 0


@pytest.mark.parametrize("wrong", [{"salt": "\ud800"}, {"collection": "\ud800"}, {"key": "schlüssel"}, {"key": "sk\n"}])
def test_what_cannot_be_sent_is_refused_without_the_key(wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidInputError) as refused:
        DocumentServer(**wrong)
    assert wrong.get("key", "-----") not in str(refused.value)


def test_an_id_that_is_no_text_is_refused() -> None:
    with answering(200, b"{}") as server, pytest.raises(InvalidInputError, match="lone surrogate"):
        server.drop(["\ud800"])
