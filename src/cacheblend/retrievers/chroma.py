"""Chroma: keeps a server's documents in step with a collection, by the ids that it has there.

collection = chromadb.PersistentClient("db").get_collection("manuals")
sync_collection(collection, DocumentServer("http://127.0.0.1:8000", collection=collection.name))
"""

from collections.abc import Iterator
from typing import Any

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.documents import MOST_DROPPED, Document
from cacheblend.retrievers.client import DocumentServer, IndexReport

try:
    from chromadb.api.models.Collection import Collection
except ImportError as error:
    raise InvalidInputError("the adapter for Chroma needs it: pip install 'cacheblend[chroma]'") from error

_AT_ONCE = 1000  # ids of one question to Chroma; SQLite takes some thousand variables


def sync_collection(collection: Collection, server: DocumentServer, *, max_drop: float = MOST_DROPPED) -> IndexReport:
    """Stores the collection's documents on the server, what changed of them, and drops those that are gone.

    Idempotent, and may be cut short and called again. Two Chroma collections need two of the server's, or the second
    drops what the first one stored. Entries of embeddings alone have no text, and are counted.

    `collection`: embedded or remote. `max_drop`: share of the server's documents that may be dropped; 1: all. Raises
    `InvalidInputError`: more would be dropped, or an id cannot be kept; `DocumentServerError`: the server does not
    answer or refuses; what was stored before stays."""
    ids, without_text = list[str](), 0

    def documents() -> Iterator[Document]:
        nonlocal without_text
        names = collection.get(include=[])["ids"]  # all, since places in a list move while somebody else adds
        for start in range(0, len(names), _AT_ONCE):
            part = collection.get(ids=names[start : start + _AT_ONCE], include=["documents"])
            for entry_id, text in zip(part["ids"], part["documents"] or [None] * len(part["ids"]), strict=True):
                if text is None:
                    without_text += 1
                else:
                    ids.append(entry_id)
                    yield Document(entry_id, text)

    report = server.put(documents())
    report.without_text += without_text
    report.dropped += server.drop_others(ids, max_drop)
    return report


def documents_of(found: Any) -> list[dict[str, str]]:
    """The field ``documents`` of a chat request, of what `Collection.query` returns: each text once, best first."""
    texts = dict.fromkeys(text for row in found.get("documents") or () for text in row or () if text)
    return [{"text": text, "title": ""} for text in texts]
