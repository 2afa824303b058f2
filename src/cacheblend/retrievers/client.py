"""The documents of a running server, over HTTP: put, listed and dropped by id.

Knows the server's API (docs/documents.md); knows no retriever and no engine.
"""

import asyncio
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from cacheblend.core.closable import Closable
from cacheblend.core.errors import CacheBlendError, InvalidInputError, check_encodable, check_type, shown
from cacheblend.engines.documents import (
    COLLECTION,
    MOST_DROPPED,
    Document,
    DocumentLike,
    check_document_ids,
    each_document,
)
from cacheblend.engines.tokens import Passage

_BATCH_DOCUMENTS, _BATCH_BYTES = 256, 1 << 20  # of a request; one document may be larger
_HINTS = {
    401: ": give the key of the server as key=...",
    404: ": is the url right, without /v1?",
    413: ": cut the passages smaller",
}
_WHOLE = 1 << 20  # tokens: a passage is sent whole, so it is stored whole, as long as the model's context


class DocumentServerError(CacheBlendError):
    """A server of documents does not answer (`status` is None), or refuses; `code`: its own name of what is wrong."""

    def __init__(self, message: str, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class IndexReport:
    """What storing passages came to: numbers of passages and tokens."""

    kept: int = 0  # passages that were there
    added: int = 0  # that were new
    changed: int = 0  # that had another text
    restored: int = 0  # that had lost chunks
    dropped: int = 0
    tokens: int = 0  # of the passages
    computed_tokens: int = 0  # of these
    without_text: int = 0  # passages that have no text to store


class DocumentServer(Closable):
    """One collection of documents on one server. Safe to call from several threads; use as a context manager or close.

    `url`: of `cacheblend serve`, without ``/v1``. `key`: an API key, where the server has keys. `collection`: documents
    of different ones may have the same id, and are dropped apart. `salt`: as in the requests that are to find the
    passages. `timeout`: seconds that a request may take; storing computes the passages first. Raises
    `InvalidInputError`: httpx is not installed, the url is none, or the key or the salt cannot be sent."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        key: str | None = None,
        collection: str = COLLECTION,
        salt: str = "",
        timeout: float = 600.0,
    ) -> None:
        try:
            import httpx
        except ImportError as error:
            raise InvalidInputError("a server of documents needs httpx: pip install httpx") from error
        check_type(url, str, "url", "the url of a `cacheblend serve`, http://127.0.0.1:8000")
        check_type(key, str | None, "key")
        check_encodable(collection, "the collection's name")
        check_encodable(salt, "the salt")
        self.url, self.collection, self.salt = url.rstrip("/"), collection, salt
        if key and not (key.isascii() and key.isprintable()):
            raise InvalidInputError("the key has characters that no key of a server has; is it the right one?")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout)
        except httpx.InvalidURL as error:
            raise InvalidInputError(f"url {url!r}: {error}; give it as http://127.0.0.1:8000") from error
        self._failed = (httpx.HTTPError, httpx.InvalidURL)

    def put(self, documents: Iterable[DocumentLike]) -> IndexReport:
        """Stores documents, in whatever form `Document.of` takes, each as one chunk; of those that the server has, what
        changed. Raises `InvalidInputError`: two documents have one id and different texts, or one has none;
        `DocumentServerError`: the server does not answer or refuses; what was stored before stays."""
        report = IndexReport()
        for batch in _batches(each_document(documents)):
            body = {
                "documents": [{"id": each.id, "text": each.text, "title": each.title[:256]} for each in batch],
                "collection": self.collection,
                "salt": self.salt,
                "chunk_tokens": _WHOLE,
            }
            answer = self._ask("POST", "/v1/documents", "documents", json=body)
            for name in {field.name for field in fields(report)} & answer.keys():
                setattr(report, name, getattr(report, name) + int(answer[name]))
            report.without_text += len(answer.get("empty", ()))
        return report

    def drop(self, ids: Iterable[str]) -> int:
        """Drops documents; how many there were. Raises `DocumentServerError`, `InvalidInputError`: an id is no text."""
        check_document_ids(ids)
        dropped = 0
        for each in dict.fromkeys(ids):
            check_encodable(each, "a document's id")
            place = {"id": each, "collection": self.collection, "salt": self.salt}
            try:
                self._ask("DELETE", "/v1/documents", "deleted", params=place)
                dropped += 1
            except DocumentServerError as error:
                if error.code != "document_not_found":  # not any 404: a wrong url has dropped nothing
                    raise
        return dropped

    def ids(self) -> list[str]:
        """Ids of all documents in the collection. Raises `DocumentServerError`."""
        found, after = list[str](), ""
        while True:
            place = {"collection": self.collection, "salt": self.salt, "limit": 1000, "after": after}
            page = self._ask("GET", "/v1/documents", "data", params=place)
            found += [each["id"] for each in page["data"] if each["id"] is not None]  # a damaged one has none
            if not page["has_more"]:
                return found
            after = page["last_id"]

    def drop_others(self, ids: Iterable[str], most: float = MOST_DROPPED) -> int:
        """Drops what is not among `ids`; how many these were. Raises `InvalidInputError`: they are more than the share
        `most` of all; nothing is dropped; `DocumentServerError`: the server does not answer or refuses."""
        check_document_ids(ids)
        there, kept = self.ids(), set(ids)
        gone = [each for each in there if each not in kept]
        if len(gone) > most * len(there):
            raise InvalidInputError(
                f"{len(gone)} of the {len(there)} documents in the collection {self.collection!r} would be dropped, "
                f"more than the share {most:g}: is it the right source? max_drop=1 drops them"
            )
        return self.drop(gone)

    def __deepcopy__(self, memo: object) -> "DocumentServer":
        return self  # copies of an adapter have one server, as its connections cannot be copied

    def close(self) -> None:
        """Closes connections."""
        self._http.close()

    def _ask(self, method: str, path: str, has: str, **what: Any) -> dict[str, Any]:
        """The server's answer, an object that `has` a field."""
        try:
            answer = self._http.request(method, path, **what)
        except self._failed as error:
            raise DocumentServerError(
                f"{self.url} does not answer ({type(error).__name__}: {error}): is `cacheblend serve` running there?"
            ) from error
        try:
            found = answer.json()
        except (ValueError, RecursionError):
            found = {}
        found = found if isinstance(found, dict) else {}
        if answer.is_success and has in found:
            return found
        if answer.is_success:
            raise DocumentServerError(
                f"{self.url} answers {method} {path} as no `cacheblend serve` does: {answer.text[:80]!r}; is the url "
                "right, without /v1?",
                answer.status_code,
            )
        refusal = found.get("error")
        told: dict[str, Any] = refusal if isinstance(refusal, dict) else {}
        raise DocumentServerError(
            f"{self.url} refused {method} {path}: {answer.status_code} {told.get('message') or answer.text[:200]}"
            f"{_HINTS.get(answer.status_code, '')}",
            answer.status_code,
            told.get("code"),
        )


class PassageIndex:
    """What all adapters have in common: passages are stored by a server when they are indexed. Their field `server` is
    asked for nothing while a query is answered: a passage that is not stored is computed with the request."""

    server: Any

    @staticmethod
    def document_of(passage: Any) -> Document:
        """A library's passage as the server stores it."""
        raise NotImplementedError

    def index(self, passages: Iterable[Any]) -> IndexReport:
        """Stores passages; with ids of their own, edited ones are replaced. To be called when they are indexed. Raises
        `InvalidInputError`: no server was given, one is no passage, an id cannot be kept, or has two texts;
        `DocumentServerError`: the server does not answer or refuses."""
        if isinstance(passages, str | bytes) or not isinstance(passages, Iterable):
            raise InvalidInputError(f"passages must be a list or another iterable of them, got {shown(passages)}")
        return self._server().put(map(self.document_of, passages))

    async def aindex(self, passages: Iterable[Any]) -> IndexReport:
        return await asyncio.to_thread(self.index, passages)

    def remove(self, ids: Iterable[str]) -> int:
        """Drops passages; how many there were. Raises as `index`."""
        return self._server().drop(ids)

    async def aremove(self, ids: Iterable[str]) -> int:
        return await asyncio.to_thread(self.remove, ids)

    def _server(self) -> DocumentServer:
        if not isinstance(self.server, DocumentServer):
            raise InvalidInputError(
                f"this {type(self).__name__} has no server to store passages: give it server=DocumentServer(...)"
            )
        return self.server


def text_id(text: str) -> str:
    """The id of a passage that has none of its own: equal texts are one passage, an edited one is another."""
    return f"text-{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:32]}"


def distinct(passages: Iterable[Any], *, empty: bool = False) -> list[Any]:
    """Passages in order, of equal texts the first: a model needs a text once. Those without any text (pictures) are
    left out, unless `empty`: a step of a pipeline leaves them to the next."""
    found: dict[str | int, Any] = {}
    for number, each in enumerate(passages):
        if (text := Passage.of(each).text) or empty:
            found.setdefault(text or number, each)
    return list(found.values())


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """The documents in groups of a request's size, each id once."""
    batch, nbytes, known = list[Document](), 0, dict[str, str]()
    for each in documents:
        digest, size, before = text_id(each.text), len(each.text.encode()), known.get(each.id)
        if before == digest:
            continue
        if before is not None:
            raise InvalidInputError(
                f"two documents have the id {each.id[:80]!r} and different texts; give each its own"
            )
        known[each.id] = digest
        if batch and (len(batch) == _BATCH_DOCUMENTS or nbytes + size > _BATCH_BYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append(each)
        nbytes += size
    if batch:
        yield batch
