"""Keeps the chunks of documents in step with their source: computes what is new, drops what vanished.

sync = DocumentSync(engine, collection="manuals")
vanished = sync.vanished({document.id for document in documents})
sync.put(documents)
report = sync.finish(vanished)

Knows the embedded engine and documents; does not know where these come from.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cacheblend.core.errors import InvalidInputError, check_type
from cacheblend.core.names import BlockName, join_ids
from cacheblend.core.plan.prompt import Segment
from cacheblend.engines.documents import (
    COLLECTION,
    Document,
    DocumentBook,
    DocumentLike,
    Dropped,
    PlannedDocument,
    check_document_ids,
    check_name,
    each_document,
)
from cacheblend.engines.hf.document_chunks import cutter, is_long
from cacheblend.engines.hf.state import FollowedModel
from cacheblend.engines.tokens.chunker import Cutting
from cacheblend.store.documents import DamagedRecord, DocumentRecord, document_name

if TYPE_CHECKING:
    from cacheblend.engines.hf.engine import BlendEngine
    from cacheblend.engines.hf.prompts import PromptLike
    from cacheblend.engines.hf.state import ModelState

Progress = Callable[[int], None]
"""Called with the number of documents done."""

MOST_DROPPED = 0.5
"""Share of a collection's documents that one sync drops without being asked: a source may be empty by mistake."""

_BATCH_DOCUMENTS, _BATCH_TOKENS = 256, 1 << 16  # of which the records are put, and the chunks computed, together
_FEW_RELEASES = 256  # all records are read to release stale chunks, so not for every batch


@dataclass
class SyncReport:
    """What a sync did.

    Attributes:
        kept: documents of which nothing had to be computed or dropped.
        added, changed, dropped: documents that were new, had another text, or are gone.
        restored: unchanged documents of which chunks were missing, e.g. evicted, and a sync that was cut short.
        chunks, tokens: of the documents given, repeats included.
        computed_chunks, computed_tokens: of these, what was computed.
        dropped_chunks: chunks that no document has any more.
        pinned_chunks: such chunks that stay, since they are pinned.
        missing_documents: documents of which the store does not hold all chunks at the end: it is too small for them.
        empty: ids of documents without a token; they have no chunks.
        damaged: records that could not be read; a document that is given again gets a new one.
        seconds: in all.
    """

    kept: int = 0
    added: int = 0
    changed: int = 0
    restored: int = 0
    dropped: int = 0
    chunks: int = 0
    tokens: int = 0
    computed_chunks: int = 0
    computed_tokens: int = 0
    dropped_chunks: int = 0
    pinned_chunks: int = 0
    missing_documents: int = 0
    empty: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def documents(self) -> int:
        """Documents that were given."""
        return self.kept + self.added + self.changed + self.restored


class DocumentSync:
    """One sync of one collection. Used by one thread; others, and other processes, may sync the same collection.

    Args:
        engine: with a tokenizer.
        tenant: whose documents, see `BlendEngine.planner_of`.
        collection: documents of different collections may have the same id, and are dropped apart.
        cutting: how documents are cut.
        system: the plain text in front of the first chunk, for the anchor rule ``system``.
        state: the model; None: as it is now.
        dry_run: change nothing; the report says what would be done.
        reads_all: read all records of the collection first; False: those of the documents given.

    Attributes:
        book: the documents' records.
        report: so far.
        dropped_chunks: ids of the chunks dropped so far.

    Raises:
        InvalidInputError: no tokenizer, a wrong name of a collection, or a system prompt is missing.
        StoreError: the store cannot be read, or not be written to.
    """

    def __init__(
        self,
        engine: "BlendEngine",
        *,
        tenant: str = "",
        collection: str = COLLECTION,
        cutting: Cutting | None = None,
        system: "PromptLike | None" = None,
        state: "ModelState | None" = None,
        dry_run: bool = False,
        reads_all: bool = True,
    ) -> None:
        check_type(engine, FollowedModel, "engine", "a BlendEngine")
        check_type(cutting, Cutting | None, "cutting", "Cutting(most=512) or None")
        check_name(collection, "the collection's name")
        self._engine, self._tenant, self._system, self._dry_run = engine, tenant, system, dry_run
        self._state = state or engine.follow()
        prompt = None if system is None else engine.prompt(system)
        anchor = self._state.planner.anchor.segments(prompt)
        self._cut, rules = cutter(engine, cutting or Cutting(), len(join_ids(anchor)))
        self.book = DocumentBook(engine.store, self._state.planner_of(tenant), anchor, collection, rules)
        self.report, self.dropped_chunks = SyncReport(), list[BlockName]()
        self._reads_all, self._began = reads_all, time.perf_counter()
        self._batch, self._batch_tokens = list[PlannedDocument](), 0
        self._release: list[DocumentRecord] = []
        self._would_compute: set[BlockName] = set()
        if reads_all:
            self.report.damaged = [each.reason for each in self.book.read()]

    def put(self, documents: Iterable[DocumentLike], progress: Progress | None = None) -> None:
        """Stores documents, or what changed of them.

        Args:
            documents: in whatever form `Document.of` takes.
            progress: see `Progress`.

        Raises:
            InvalidInputError: two documents with one id, or one without.
            ModelChangedError: the model's adapters were switched meanwhile.
            StoreError: the store is full or cannot be written to; what was stored before stays, and is not computed
                again by the next sync.
        """
        for done in self.steps(documents, _BATCH_TOKENS):
            if progress is not None and done is not None:
                progress(done)

    def steps(self, documents: Iterable[DocumentLike], tokens: int) -> Iterator[int | None]:
        """As `put`, in steps between which others may have their turn, a sync of the same documents included.

        Args:
            documents: to be stored.
            tokens: computed in a step, about.

        Yields:
            The number of documents done, behind each; None between two steps of computing, or of tokenising.
        """
        seen: set[str] = set()
        for number, document in enumerate(each_document(documents), 1):
            if document.id in seen:
                raise InvalidInputError(f"two documents have the id {document.id[:80]!r}; give each its own")
            seen.add(document.id)
            yield from self._add(document)
            if len(self._batch) >= _BATCH_DOCUMENTS or self._batch_tokens >= _BATCH_TOKENS:
                yield from self._flush(tokens)
            yield number
        yield from self._flush(tokens)

    def drop(self, ids: Iterable[str]) -> None:
        """Drops documents by their ids; those that are not there are ignored. Raises `StoreError`."""
        check_document_ids(ids)
        root, ids = self.book.planner.root, list(ids)
        for each in ids:
            check_name(each, "a document's id")
        self._forget([document_name(root, self.book.collection, each) for each in ids])

    def vanished(self, ids: Collection[str], most: float = MOST_DROPPED) -> list[BlockName]:
        """Names of the collection's documents that are not among `ids`, a set.

        Raises:
            InvalidInputError: they are more than the share `most` of all.
        """
        check_document_ids(ids)
        records = [each for each in self.book.known.values() if isinstance(each, DocumentRecord)]
        gone = [each.name for each in records if each.id not in ids]
        if len(gone) > most * len(records):
            raise InvalidInputError(
                f"{len(gone)} of the {len(records)} documents in the collection {self.book.collection!r} are not in "
                f"the source and would be dropped, more than the share {most:g}: is it the right source? --max-drop 1 "
                "drops them, another --collection keeps these apart"
            )
        return gone

    def finish(self, vanished: Iterable[BlockName] = ()) -> SyncReport:
        """Drops what vanished and what is stale; the report. Raises `StoreError`."""
        self._forget(list(vanished))
        self._do_release()
        if not self._dry_run:
            self.report.missing_documents = self._count_missing()
        self.report.seconds = time.perf_counter() - self._began
        return self.report

    # ---- one batch --------------------------------------------------------------------------------------

    def _add(self, document: Document) -> Iterator[None]:
        """Notes what is to be done for a document."""
        book, report, digest = self.book, self.report, self.book.digest(document)
        name = document_name(book.planner.root, book.collection, document.id)
        before = self._known(name)
        if isinstance(before, DocumentRecord) and book.is_current(before, digest):
            report.kept += 1
            self._count(before)
            return
        pieces = yield from self._cut.steps(document)
        if is_long(document):  # others had their turn: it may have another record now
            before = self._known(name)
        if isinstance(before, DamagedRecord):
            report.damaged += [] if self._reads_all else [before.reason]
            before = None
        planned = book.plan(document, pieces, digest, before)
        if before is None:
            report.added += 1
        elif before.digest != digest:
            report.changed += 1
        else:
            report.restored += 1
        self._count(planned.record)
        self._batch.append(planned)
        self._batch_tokens += planned.record.tokens

    def _known(self, name: BlockName) -> DocumentRecord | DamagedRecord | None:
        found = None if self._reads_all else self.book.store.documents.get(self.book.planner.root, name)
        if found is not None:
            self.book.known[name] = found
        return self.book.known.get(name)

    def _count(self, record: DocumentRecord) -> None:
        self.report.chunks += len(record.chunks)
        self.report.tokens += record.tokens
        if not record.chunks:
            self.report.empty.append(record.id)

    def _flush(self, tokens: int) -> Iterator[None]:
        """Puts the batch's records, then computes its chunks, so many tokens in a step."""
        batch, self._batch, self._batch_tokens = self._batch, [], 0
        if self._dry_run:
            self._note_missing(batch)
        elif batch:
            records = self.book.put(planned.record for planned in batch)
            self._release += [record for record in records if record.stale]
            for some in slices([segment for planned in batch for segment in planned.segments], tokens):
                yield
                warmed = self._engine.warm(some, system=self._system, tenant=self._tenant, state=self._state)
                self.report.computed_chunks += warmed.stored
                self.report.computed_tokens += warmed.tokens
            self._count_dropped(self.book.settle(records))
        if len(self._release) >= max(_FEW_RELEASES, len(self.book.known) // 8):
            self._do_release()

    def _note_missing(self, batch: list[PlannedDocument]) -> None:
        for planned in batch:
            for blocks, segment in zip(planned.record.chunks, planned.segments, strict=True):
                held = all(self.book.store.held(blocks)) and self.book.store.has_manifest(blocks[-1])
                if not held and blocks[-1] not in self._would_compute:
                    self._would_compute.add(blocks[-1])
                    self.report.computed_chunks += 1
                    self.report.computed_tokens += len(segment)

    # ---- dropping ---------------------------------------------------------------------------------------

    def _do_release(self) -> None:
        release, self._release = self._release, []
        if release and not self._dry_run:
            self._count_dropped(self.book.release(release))

    def _forget(self, names: list[BlockName]) -> None:
        if self._dry_run:
            self.report.dropped += len(names)
            return
        step = max(_FEW_RELEASES, -(-len(names) // 8))
        for at in range(0, len(names), step):
            documents, dropped = self.book.forget(names[at : at + step])
            self.report.dropped += documents
            self._count_dropped(dropped)

    def _count_dropped(self, dropped: Dropped) -> None:
        self.dropped_chunks += dropped.chunks
        self.report.dropped_chunks += len(dropped.chunks)
        self.report.pinned_chunks += dropped.pinned

    def _count_missing(self) -> int:
        records = [each for each in self.book.known.values() if isinstance(each, DocumentRecord)]
        return sum(not self.book.is_current(record, record.digest) for record in records)


def slices(segments: Iterable[Segment], tokens: int) -> Iterator[list[Segment]]:
    """The segments in groups of about so many tokens."""
    group: list[Segment] = []
    for segment in segments:
        if group and sum(map(len, group)) + len(segment) > tokens:
            yield group
            group = []
        group.append(segment)
    if group:
        yield group
