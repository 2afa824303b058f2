"""Documents with ids, the chunks that they are cut into, and which of these are dropped when no document has them.

    text ── tokens ── chunks, cut by content ── record (in the store) of the chunks' names
                                                 put before the chunks are computed, so that
                                                 no other process drops one of them meanwhile

Does not know how a chunk is computed.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cacheblend.core.errors import InvalidInputError, check_encodable, check_type, shown
from cacheblend.core.load.capture import ChunkJob, manifest_of
from cacheblend.core.names import BlockName, TokenIds, state_name
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Segment, chunk
from cacheblend.engines.tokens.passage import Passage
from cacheblend.store import KVStore
from cacheblend.store.documents import Blocks, DamagedRecord, DocumentRecord

LONGEST_ID = 1024
"""Characters of a document's id, or of a collection's name, at most."""

COLLECTION = "documents"
"""The collection of documents for which none is named."""

MOST_DROPPED = 0.5
"""Share of a collection's documents that is dropped without being asked: a source may be empty by mistake."""


@dataclass(frozen=True)
class Document:
    """A document as its source has it.

    Attributes:
        id: any text; equal ids are the same document.
        text: may be empty: then the document has no chunks.
        title: for people.

    Raises:
        InvalidInputError: an id that is empty or too long, or a lone surrogate in any text.
    """

    id: str
    text: str
    title: str = ""

    def __post_init__(self) -> None:
        check_name(self.id, "a document's id")
        check_encodable(self.title, f"document {self.id[:80]!r}: the title")
        check_encodable(self.text, f"document {self.id[:80]!r}: the text")

    @staticmethod
    def of(value: object, where: str = "a document") -> "Document":
        """A document of what callers have.

        Args:
            value: a document; a mapping with an ``id`` and what `Passage.of` takes; or another library's document that
                has an `id` (LangChain) or a `node_id` (LlamaIndex), and what `Passage.of` takes.
            where: names its place for messages.

        Raises:
            InvalidInputError: it is none of these, or has no id.
        """
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


DocumentLike = Document | Mapping[str, Any] | Any
"""What `Document.of` makes a document of."""


@dataclass(frozen=True, eq=False)
class PlannedDocument:
    """A document's intended record, and the chunks that it names, as `BlendEngine.warm` takes them."""

    record: DocumentRecord
    segments: list[Segment]


@dataclass
class Dropped:
    """Ids of dropped chunks, and how many were kept because they are pinned."""

    chunks: list[BlockName] = field(default_factory=list)
    pinned: int = 0


@dataclass(frozen=True, eq=False)
class DocumentBook:
    """The documents of one model and tenant in one store, in one collection. Every method raises `StoreError`.

    Attributes:
        planner: names the chunks.
        anchor: in front of each chunk, segment by segment.
        collection: the documents' own name space.
        rules: how documents are cut; they are cut again when it changes.
        known: records that were read, by name.
    """

    store: KVStore
    planner: Planner
    anchor: Sequence[TokenIds]
    collection: str
    rules: str
    known: dict[BlockName, DocumentRecord | DamagedRecord] = field(default_factory=dict)

    def read(self) -> list[DamagedRecord]:
        """Reads the collection's records into `known`; returns the root's damaged records."""
        records = self.store.documents.all(self.planner.root)
        damaged = [each for each in records if isinstance(each, DamagedRecord)]
        intact = [each for each in records if isinstance(each, DocumentRecord) and each.collection == self.collection]
        self.known.update({each.name: each for each in damaged})
        self.known.update({each.name: each for each in intact})
        return damaged

    def digest(self, document: Document) -> str:
        """Hexadecimal hash; a different one means that the document has to be cut again."""
        chain = self.planner.chain_of(self.anchor).hex()
        parts = (self.rules, str(self.planner.block_size), chain, document.title, document.text)
        framed = b"".join(len(part.encode()).to_bytes(8, "little") + part.encode() for part in parts)
        return hashlib.sha256(framed).hexdigest()

    def is_current(self, record: DocumentRecord, digest: str) -> bool:
        """Whether the document is unchanged, and the store holds and lists all its chunks."""
        if record.digest != digest or record.stale:
            return False
        held = all(self.store.held([name for blocks in record.chunks for name in blocks]))
        return held and all(self.store.has_manifest(blocks[-1]) for blocks in record.chunks)

    def plan(
        self, document: Document, pieces: list[TokenIds], digest: str, before: DocumentRecord | None
    ) -> PlannedDocument:
        """The record and chunks of a document that was cut into `pieces`, [tokens] each; chunks of `before`, its known
        record, that it no longer has become stale."""
        label = document.title or document.id
        labels = [f"{label} #{number}" if len(pieces) > 1 else label for number in range(1, len(pieces) + 1)]
        anchor = tuple(self.anchor)
        manifests = [manifest_of(ChunkJob(anchor, ids), self.planner, "") for ids in pieces]
        chunks = tuple(manifest.block_names for manifest in manifests)
        gone, kept = dict.fromkeys((*before.chunks, *before.stale)) if before else {}, set(chunks)
        stale = tuple(each for each in gone if each not in kept)
        tokens = sum(map(len, pieces))
        record = DocumentRecord(self.planner.root, self.collection, document.id, digest, tokens, chunks, stale)
        segments = [chunk(ids, label) for ids, label in zip(pieces, labels, strict=True)]
        return PlannedDocument(record, segments)

    def put(self, records: Iterable[DocumentRecord]) -> list[DocumentRecord]:
        """Writes records before their chunks are computed; returns them with the chunks added to `stale` that another
        sync has put since they were planned."""
        put, root, kept = list[DocumentRecord](), self.planner.root, self.store.documents
        with kept.changing(root):
            for record in records:
                now, before = kept.get(root, record.name), dict.fromkeys(record.stale)
                if isinstance(now, DocumentRecord):
                    before |= dict.fromkeys((*now.chunks, *now.stale))
                record = replace(record, stale=tuple(each for each in before if each not in set(record.chunks)))
                kept.put(record)
                self.known[record.name] = record
                put.append(record)
        return put

    def settle(self, records: Iterable[DocumentRecord]) -> Dropped:
        """Drops the chunks of records that another sync has dropped or replaced while these chunks were computed,
        except those of a document."""
        root, kept = self.planner.root, self.store.documents
        with kept.changing(root):
            gone = []
            for record in records:
                now = kept.get(root, record.name)
                if now is None or (isinstance(now, DocumentRecord) and now.chunks != record.chunks):
                    gone.append(record)
                    self.known.pop(record.name, None)
            return self._drop([blocks for record in gone for blocks in record.chunks], frozenset())

    def release(self, records: Iterable[DocumentRecord]) -> Dropped:
        """Drops the stale chunks of records, except those of another document."""
        root, kept = self.planner.root, self.store.documents
        with kept.changing(root):
            now = [found for each in records if isinstance(found := kept.get(root, each.name), DocumentRecord)]
            dropped = self._drop([blocks for record in now for blocks in record.stale], frozenset())
            for record in now:
                kept.put(replace(record, stale=()))
                self.known[record.name] = replace(record, stale=())
        return dropped

    def forget(self, names: Iterable[BlockName]) -> tuple[int, Dropped]:
        """Drops documents and the chunks that no other document has: (documents, chunks). Leaves damaged records, whose
        chunks are unknown."""
        root, kept = self.planner.root, self.store.documents
        with kept.changing(root):
            now = [found for name in names if isinstance(found := kept.get(root, name), DocumentRecord)]
            gone = frozenset(record.name for record in now)
            dropped = self._drop([blocks for record in now for blocks in (*record.chunks, *record.stale)], gone)
            for name in gone:  # last, so that what a killed process leaves is dropped again
                kept.delete(root, name)
                self.known.pop(name, None)
        return len(gone), dropped

    def _drop(self, chunks: list[Blocks], without: frozenset[BlockName]) -> Dropped:
        """Drops chunks that no document has, except those in `without`. Within `changing`.

        Blocks that a document's chunk shares stay. A chunk that belongs to no document may lose a block that it shares,
        and misses it then.
        """
        if not chunks:
            return Dropped()
        records = self.store.documents.all(self.planner.root)
        used = {
            blocks
            for record in records
            if isinstance(record, DocumentRecord) and record.name not in without
            for blocks in record.chunks
        }
        shared, dropped = {name for blocks in used for name in blocks}, Dropped()
        unused = [blocks for blocks in dict.fromkeys(chunks) if blocks not in used]
        pinned = self.store.are_pinned([blocks[-1] for blocks in unused])
        for blocks, is_pinned in zip(unused, pinned, strict=True):
            if is_pinned:
                dropped.pinned += 1
                continue
            self.store.delete_manifest(blocks[-1])
            for name in blocks:
                if name not in shared:
                    self.store.delete(name)
                    self.store.delete(state_name(name))
            dropped.chunks.append(blocks[-1])
        return dropped


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
