"""Documents with ids, of which a store keeps the chunks that they are cut into."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cacheblend.core.errors import InvalidInputError, check_encodable, check_type, shown
from cacheblend.core.names import BlockName
from cacheblend.engines.tokens.passage import Passage
from cacheblend.store import KVStore
from cacheblend.store.documents import DocumentRecord

LONGEST_ID = 1024  # characters of a document's id, or of a collection's name, at most
COLLECTION = "documents"  # the collection of documents for which none is named
MOST_DROPPED = 0.5  # share of a collection's documents that is dropped unasked: a source may be empty by mistake


@dataclass(frozen=True)
class Document:
    """A document as its source has it. Equal ids are the same document; without text it has no chunks; the title is for
    people. Raises `InvalidInputError`: an id that is empty or too long, or a lone surrogate in any text."""

    id: str
    text: str
    title: str = ""

    def __post_init__(self) -> None:
        check_name(self.id, "a document's id")
        check_encodable(self.title, f"document {self.id[:80]!r}: the title")
        check_encodable(self.text, f"document {self.id[:80]!r}: the text")

    @staticmethod
    def of(value: object, where: str = "a document") -> "Document":
        """A document of what callers have: one, a mapping with an ``id``, or another library's document that has an
        `id` (LangChain) or a `node_id` (LlamaIndex), and what `Passage.of` takes. `where` names its place for messages.
        Raises `InvalidInputError`: it is none of these, or has no id."""
        if isinstance(value, Document):
            return value
        names = ("id", "node_id", "id_")
        found = map(value.get, names) if isinstance(value, Mapping) else (getattr(value, name, None) for name in names)
        document_id = next((each for each in found if each is not None), None)
        if document_id is None or isinstance(value, str):
            raise InvalidInputError(
                f"{where} has no id, by which it is found again: {shown(value)}; pass Document(id, text) or "
                '{"id": ..., "text": ...}'
            )
        passage = Passage.of(value, where)
        return Document(document_id, passage.text, passage.title)


DocumentLike = Document | Mapping[str, Any] | Any  # what `Document.of` makes a document of


def check_name(name: str, what: str) -> None:
    """Raises `InvalidInputError` for a document's id, or a collection's name, that is empty, too long, or has a lone
    surrogate."""
    check_encodable(name, what)
    if not name:
        raise InvalidInputError(f"{what} is empty; give each document one of its own")
    if len(name) > LONGEST_ID:
        raise InvalidInputError(f"{what} has {len(name)} characters, at most {LONGEST_ID} are kept: {name[:40]!r}...")


def each_document(documents: Iterable[DocumentLike]) -> Iterator[Document]:
    """Documents of what callers have, see `Document.of`; raises as it does, naming the place, from 1."""
    if isinstance(documents, str | bytes | Mapping | Document) or not isinstance(documents, Iterable):
        raise InvalidInputError(f"documents must be a list or another iterable of documents, got {shown(documents)}")
    return (Document.of(each, f"document {number}") for number, each in enumerate(documents, 1))


def check_document_ids(ids: object) -> None:
    """Raises `InvalidInputError` for a single id, whose characters would be taken for ids, and for anything but a
    list."""
    if isinstance(ids, str | bytes):
        raise InvalidInputError(f"ids must be a list of ids, [{shown(ids)}], got one: {shown(ids)}")
    check_type(ids, Iterable, "ids", "a list of ids")


def referring(store: KVStore, root: BlockName) -> dict[BlockName, list[DocumentRecord]]:
    """The documents of a root that have each chunk, by the chunk's id. Raises `StoreError`."""
    found: dict[BlockName, list[DocumentRecord]] = {}
    records = [record for record in store.documents.all(root) if isinstance(record, DocumentRecord)]
    for record in records:
        for blocks in dict.fromkeys(record.chunks):
            found.setdefault(blocks[-1], []).append(record)
    return found
