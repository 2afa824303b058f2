"""Keeps the chunks of documents in step with their source: computes what is new, drops what vanished.

    sync = DocumentSync(engine, collection="manuals")
    vanished = sync.vanished({document.id for document in documents})
    sync.put(documents)
    report = sync.finish(vanished)

A document's record in the store names its chunks. It is put before they are computed, so that no other process drops
one of them meanwhile; a chunk is dropped when no document has it any more.
"""

import hashlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy.typing as npt

from cacheblend.core.errors import InvalidInputError, check_type
from cacheblend.core.load.capture import ChunkJob, manifest_of
from cacheblend.core.names import BlockName, TokenIds, as_token_ids, grouped, join_ids
from cacheblend.core.plan.prompt import Segment, chunk
from cacheblend.engines.documents import (
    COLLECTION,
    MOST_DROPPED,
    Document,
    DocumentLike,
    check_document_ids,
    check_name,
    each_document,
)
from cacheblend.engines.hf.engine import BlendEngine
from cacheblend.engines.hf.prompts import PromptLike
from cacheblend.engines.hf.state import ModelState
from cacheblend.engines.tokens.chunker import Cutting
from cacheblend.store.documents import Blocks, DamagedRecord, DocumentRecord, document_name

Progress = Callable[[int], None]  # called with the number of documents done
ENCODED_AT_ONCE = 1 << 17
"""Characters of a part of a document that are tokenised together, which takes about a tenth of a second; a tokenizer
keeps 400 bytes for each of its tokens."""

_BATCH_DOCUMENTS, _BATCH_TOKENS = 256, 1 << 16  # of which the records are put, and the chunks computed, together
_FEW_RELEASES = 256  # all records are read to release stale chunks, so not for every batch


@dataclass(frozen=True)
class Cutter:
    """Tokenises documents and cuts them into chunks; `encode`, `cutting` and sentence `ends`: of their model;
    `tokenizer`: a digest of it, since the same weights may get another one."""

    encode: Callable[[str], list[int]]
    cutting: Cutting
    ends: npt.NDArray[Any] | None
    tokenizer: str = ""

    @staticmethod
    def of(engine: BlendEngine, cutting: Cutting, anchor_tokens: int) -> "Cutter":
        """What cuts an engine's documents, so that a chunk fits behind its anchor. Raises `InvalidInputError`: the
        engine has no tokenizer, or no chunk fits."""
        builder = engine.runtime.builder
        if builder is None:
            raise InvalidInputError("documents are texts, and this engine has no tokenizer: open it with one")
        longest = engine.runtime.survey.max_length
        most = cutting.most if longest is None else min(cutting.most, longest - anchor_tokens)
        if most < 1:
            raise InvalidInputError(f"an anchor of {anchor_tokens} tokens is too long for a context of {longest}")
        fitted = Cutting(most, min(cutting.least, max(1, most // 2)))
        return Cutter(builder.encode, fitted, engine.runtime.prompts.sentence_end_ids(), builder.digest)

    def steps(self, document: Document) -> Generator[None, None, list[TokenIds]]:
        """Returns a document's chunks; yields between the parts of a long one, which are cut in front of a space."""
        text, at, ids = document.text, 0, list[TokenIds]()
        if not text.strip():
            return []
        while len(text) - at > ENCODED_AT_ONCE:
            stop = text.rfind(" ", at + 1, at + ENCODED_AT_ONCE)
            stop = stop if stop > at else at + ENCODED_AT_ONCE
            ids.append(as_token_ids(self.encode(text[at:stop])))
            at = stop
            yield
        ids.append(as_token_ids(self.encode(text[at:])))
        return self.cutting.cut(join_ids(ids), self.ends)


@dataclass
class SyncReport:
    """What a sync did: numbers of documents, chunks and tokens."""

    kept: int = 0  # documents of which nothing had to be computed or dropped
    added: int = 0  # documents that were new
    changed: int = 0  # documents that had another text
    restored: int = 0  # unchanged documents of which chunks were missing, e.g. evicted, and a sync that was cut short
    dropped: int = 0  # documents that are gone
    chunks: int = 0  # of the documents given, repeats included
    tokens: int = 0
    computed_chunks: int = 0  # of these
    computed_tokens: int = 0
    dropped_chunks: int = 0  # that no document has any more
    pinned_chunks: int = 0  # such chunks that stay, since they are pinned
    missing_documents: int = 0  # documents whose chunks the store does not all hold at the end: it is too small
    empty: list[str] = field(default_factory=list)  # ids of documents without a token; they have no chunks
    damaged: list[str] = field(default_factory=list)  # records that could not be read; given again, one gets a new one
    seconds: float = 0.0  # in all

    @property
    def documents(self) -> int:
        return self.kept + self.added + self.changed + self.restored


class DocumentSync:
    """One sync of one collection. Used by one thread; others, and other processes, may sync the same collection.

    Args:
        engine: with a tokenizer.
        tenant: whose documents, see `EngineRuntime.planner_of`.
        collection: documents of different collections may have the same id, and are dropped apart.
        cutting: how documents are cut.
        system: the plain text in front of the first chunk, for the anchor rule ``system``.
        state: the model; None: as it is now.
        dry_run: change nothing; the report says what would be done.
        reads_all: read all records of the collection first; False: those of the documents given.

    Attributes:
        root: of the names of chunks and records.
        report: so far.
        dropped_chunks: ids of the chunks dropped so far.

    Raises:
        InvalidInputError: no tokenizer, a wrong name of a collection, or a system prompt is missing.
        StoreError: the store cannot be read, or not be written to.
    """

    def __init__(
        self,
        engine: BlendEngine,
        *,
        tenant: str = "",
        collection: str = COLLECTION,
        cutting: Cutting | None = None,
        system: PromptLike | None = None,
        state: ModelState | None = None,
        dry_run: bool = False,
        reads_all: bool = True,
    ) -> None:
        check_type(engine, BlendEngine, "engine")
        check_type(cutting, Cutting | None, "cutting", "Cutting(most=512) or None")
        check_name(collection, "the collection's name")
        self._engine, self._tenant, self._system, self._dry_run = engine, tenant, system, dry_run
        self._collection, self._reads_all, self._began = collection, reads_all, time.perf_counter()
        self._state = state or engine.runtime.follow()
        self._planner, self._store = self._state.planner_of(tenant), engine.store
        self.root = self._planner.root
        prompt = None if system is None else engine.prompt(system)
        self._anchor = tuple(self._state.planner.anchor.segments(prompt))
        self._cutter = Cutter.of(engine, cutting or Cutting(), len(join_ids(self._anchor)))
        self._known: dict[BlockName, DocumentRecord | DamagedRecord] = {}  # records that were read, by name
        self.report, self.dropped_chunks = SyncReport(), list[BlockName]()
        self._batch, self._batch_tokens = list[tuple[DocumentRecord, list[Segment]]](), 0
        self._stale: list[BlockName] = []  # names of records that have stale chunks
        self._would_compute: set[BlockName] = set()
        for each in self._store.documents.all(self.root) if reads_all else ():
            if isinstance(each, DamagedRecord):
                self.report.damaged.append(each.reason)
            if isinstance(each, DamagedRecord) or each.collection == collection:
                self._known[each.name] = each

    def put(self, documents: Iterable[DocumentLike], progress: Progress | None = None) -> None:
        """Stores documents, or what changed of them. Raises `InvalidInputError`: two documents with one id, or one
        without; `ModelChangedError`: the model's adapters were switched meanwhile; `StoreError`: the store is full or
        cannot be written to; what was stored before stays, and is not computed again by the next sync."""
        for done in self.steps(documents, _BATCH_TOKENS):
            if progress is not None and done is not None:
                progress(done)

    def steps(self, documents: Iterable[DocumentLike], tokens: int) -> Iterator[int | None]:
        """As `put`, in steps of so many computed tokens, between which others have their turn, also a sync of the same
        documents. Yields the number of documents done, behind each; None between steps of computing or tokenising."""
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
        ids = list(ids)
        for each in ids:
            check_name(each, "a document's id")
        self._forget([document_name(self.root, self._collection, each) for each in ids])

    def vanished(self, ids: Iterable[str], most: float = MOST_DROPPED) -> list[BlockName]:
        """Names of the collection's documents that are not among `ids`. Raises `InvalidInputError` if they are more
        than the share `most` of all."""
        check_document_ids(ids)
        ids, records = set(ids), self._known_records()
        gone = [each.name for each in records if each.id not in ids]
        if len(gone) > most * len(records):
            raise InvalidInputError(
                f"{len(gone)} of the {len(records)} documents in the collection {self._collection!r} are not in "
                f"the source and would be dropped, more than the share {most:g}: is it the right source? --max-drop 1 "
                "drops them, another --collection keeps these apart"
            )
        return gone

    def finish(self, vanished: Iterable[BlockName] = ()) -> SyncReport:
        """Drops what vanished and what is stale; the report. Raises `StoreError`."""
        self._forget(list(vanished))
        self._release()
        if not self._dry_run:
            self.report.missing_documents = sum(not self._is_current(r, r.digest) for r in self._known_records())
        self.report.seconds = time.perf_counter() - self._began
        return self.report

    def _known_records(self) -> list[DocumentRecord]:
        return [each for each in self._known.values() if isinstance(each, DocumentRecord)]

    # ---- one batch --------------------------------------------------------------------------------------

    def _add(self, document: Document) -> Iterator[None]:
        # Another digest means that the document has to be cut again; its title is in no chunk.
        rules = f"1 {self._cutter.cutting.most} {self._cutter.cutting.least} {self._cutter.tokenizer}"
        chain = self._planner.chain_of(self._anchor).hex()
        parts = (rules, str(self._planner.block_size), chain, document.text)
        framed = b"".join(len(part.encode()).to_bytes(8, "little") + part.encode() for part in parts)
        report, digest = self.report, hashlib.sha256(framed).hexdigest()
        name = document_name(self.root, self._collection, document.id)
        before = self._record(name)
        if isinstance(before, DocumentRecord) and self._is_current(before, digest):
            report.kept += 1
            self._count(before)
            return
        pieces = yield from self._cutter.steps(document)
        if len(document.text) > ENCODED_AT_ONCE:  # others had their turn: it may have another record now
            before = self._record(name)
        if isinstance(before, DamagedRecord):
            report.damaged += [] if self._reads_all else [before.reason]
            before = None
        if before is None:
            report.added += 1
        elif before.digest != digest:
            report.changed += 1
        else:
            report.restored += 1
        chunks = tuple(manifest_of(ChunkJob(self._anchor, ids), self._planner, "").block_names for ids in pieces)
        gone = dict.fromkeys((*before.chunks, *before.stale)) if before else {}
        stale = tuple(each for each in gone if each not in set(chunks))
        tokens = sum(map(len, pieces))
        record = DocumentRecord(self.root, self._collection, document.id, digest, tokens, chunks, stale)
        label = document.title or document.id
        labels = [f"{label} #{number}" if len(pieces) > 1 else label for number in range(1, len(pieces) + 1)]
        self._count(record)
        self._batch.append((record, [chunk(ids, each) for ids, each in zip(pieces, labels, strict=True)]))
        self._batch_tokens += tokens

    def _record(self, name: BlockName) -> DocumentRecord | DamagedRecord | None:
        found = None if self._reads_all else self._store.documents.get(self.root, name)
        if found is not None:
            self._known[name] = found
        return self._known.get(name)

    def _is_current(self, record: DocumentRecord, digest: str) -> bool:
        """Whether the document is unchanged, and its chunks are held."""
        return record.digest == digest and not record.stale and self._are_held(record.chunks)

    def _are_held(self, chunks: Sequence[Blocks]) -> bool:
        """Whether the store holds and lists all of them."""
        store = self._store.lasting
        held = all(store.held([name for blocks in chunks for name in blocks]))
        return held and all(store.has_manifest(blocks[-1]) for blocks in chunks)

    def _count(self, record: DocumentRecord) -> None:
        self.report.chunks += len(record.chunks)
        self.report.tokens += record.tokens
        if not record.chunks:
            self.report.empty.append(record.id)

    def _flush(self, tokens: int) -> Iterator[None]:
        """Puts the batch's records, then computes its chunks, so many tokens in a step."""
        batch, self._batch, self._batch_tokens = self._batch, [], 0
        if self._dry_run:
            for blocks, segment in (pair for record, of in batch for pair in zip(record.chunks, of, strict=True)):
                if blocks[-1] not in self._would_compute and not self._are_held([blocks]):
                    self._would_compute.add(blocks[-1])
                    self.report.computed_chunks += 1
                    self.report.computed_tokens += len(segment)
        elif batch:
            records = self._put([record for record, _ in batch])
            for some in slices([segment for _, segments in batch for segment in segments], tokens):
                yield
                warmed = self._engine.warm(some, system=self._system, tenant=self._tenant, state=self._state)
                self.report.computed_chunks += warmed.stored
                self.report.computed_tokens += warmed.tokens
            self._settle(records)
        if len(self._stale) >= max(_FEW_RELEASES, len(self._known) // 8):
            self._release()

    def _put(self, planned: Iterable[DocumentRecord]) -> list[DocumentRecord]:
        """Writes records before their chunks are computed; returns them with the chunks added to `stale` that another
        sync has put since they were planned."""
        put, kept = list[DocumentRecord](), self._store.documents
        with kept.changing(self.root):
            for record in planned:
                now, before = kept.get(self.root, record.name), dict.fromkeys(record.stale)
                if isinstance(now, DocumentRecord):
                    before |= dict.fromkeys((*now.chunks, *now.stale))
                record = replace(record, stale=tuple(each for each in before if each not in set(record.chunks)))
                kept.put(record)
                self._known[record.name] = record
                self._stale += [record.name] if record.stale else []
                put.append(record)
        return put

    # ---- dropping ---------------------------------------------------------------------------------------

    def _settle(self, records: Iterable[DocumentRecord]) -> None:
        """Drops the chunks of records that another sync dropped or replaced meanwhile, except those of a document."""
        with self._store.documents.changing(self.root):
            gone = list[Blocks]()
            for record in records:
                now = self._store.documents.get(self.root, record.name)
                if now is None or (isinstance(now, DocumentRecord) and now.chunks != record.chunks):
                    gone += record.chunks
                    self._known.pop(record.name, None)
            self._drop(gone)

    def _release(self) -> None:
        names, self._stale = self._stale, []
        if names and not self._dry_run:
            with self._store.documents.changing(self.root):
                now = self._stored(names)
                self._drop([blocks for record in now for blocks in record.stale])
                for record in (replace(each, stale=()) for each in now):
                    self._known[record.name] = record
                    self._store.documents.put(record)

    def _forget(self, names: list[BlockName]) -> None:
        """Drops documents and the chunks that no other has. Leaves damaged records, whose chunks are unknown."""
        if self._dry_run:
            self.report.dropped += len(names)
            return
        step = max(_FEW_RELEASES, -(-len(names) // 8))
        for at in range(0, len(names), step):
            with self._store.documents.changing(self.root):
                now = self._stored(names[at : at + step])
                gone = frozenset(record.name for record in now)
                self._drop([blocks for record in now for blocks in (*record.chunks, *record.stale)], gone)
                for name in gone:  # last, so that what a killed process leaves is dropped again
                    self._store.documents.delete(self.root, name)
                    self._known.pop(name, None)
            self.report.dropped += len(gone)

    def _stored(self, names: Iterable[BlockName]) -> list[DocumentRecord]:
        found = (self._store.documents.get(self.root, name) for name in names)
        return [each for each in found if isinstance(each, DocumentRecord)]

    def _drop(self, chunks: list[Blocks], without: frozenset[BlockName] = frozenset()) -> None:
        """Drops chunks that no document has, except those in `without`. Within `changing`. Blocks that a document's
        chunk shares stay. A chunk that belongs to no document may lose a block that it shares, and misses it then."""
        if not chunks:
            return
        records = self._store.documents.all(self.root)
        used = {
            blocks
            for record in records
            if isinstance(record, DocumentRecord) and record.name not in without
            for blocks in record.chunks
        }
        shared = {name for blocks in used for name in blocks}
        unused = [blocks for blocks in dict.fromkeys(chunks) if blocks not in used]
        pinned = self._store.are_pinned([blocks[-1] for blocks in unused])
        for blocks, is_pinned in zip(unused, pinned, strict=True):
            if is_pinned:
                self.report.pinned_chunks += 1
                continue
            self._store.delete_chunk(blocks, shared)
            self.dropped_chunks.append(blocks[-1])
            self.report.dropped_chunks += 1


def slices(segments: Iterable[Segment], tokens: int) -> Iterator[list[Segment]]:
    """The segments in groups of about so many tokens."""
    return grouped(segments, lambda group, segment: sum(map(len, group)) + len(segment) <= tokens)
