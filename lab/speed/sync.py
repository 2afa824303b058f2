"""How much of a collection of documents is computed again when each of them is edited in one place.

Documents are real passages, joined; a sentence of each is replaced, inserted or removed, at its start, in its middle or
at its end. What is counted are tokens that the engine computed, not tokens that should have been.
"""

import random
import re
from dataclasses import asdict
from itertools import cycle, product
from pathlib import Path
from typing import Any

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import TokenIds
from cacheblend.data import read_passages
from cacheblend.engines.documents import Document
from cacheblend.engines.hf import BlendEngine, DocumentSync
from cacheblend.engines.hf.document_sync import Cutter
from cacheblend.engines.provenance import stamp
from cacheblend.engines.tokens.chunker import Cutting
from lab.bench import Advance, silent

EDITS = tuple(product(("replaced", "inserted", "deleted"), ("start", "middle", "end")))
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


def run(
    engine: BlendEngine,
    data: Path,
    documents: int,
    tokens: int,
    cutting: Cutting,
    seed: int = 0,
    advance: Advance = silent,
) -> dict[str, Any]:
    """Stores documents of so many tokens in an empty store, edits each (all kinds equally often), synchronises them.

    ``figures`` has ``sync_recomputed``: tokens computed after the edits, by those of a full re-index; ``by_edit`` the
    share of its document's tokens that each kind of edit changes, by how the documents are cut.
    """
    pool = [sentence for passage in read_passages(data) for sentence in _SENTENCE.split(passage.text) if sentence]
    pool = list(dict.fromkeys(pool))
    texts, rng = _texts(engine, pool, documents, tokens), random.Random(seed)
    edits = [kind for kind, _ in zip(cycle(EDITS), texts, strict=False)]
    edited = [_edit(text, *kind, rng.choice(pool)) for text, kind in zip(texts, edits, strict=True)]
    dry: dict[str, Any] = {"tenant": "full re-index", "dry_run": True}
    passes: list[tuple[list[list[str]], dict[str, Any]]] = [(texts, {}), (edited, {}), (edited, {}), (edited, dry)]
    reports = []
    for number, (of, options) in enumerate(passes, 1):
        sync = DocumentSync(engine, cutting=cutting, **options)
        sync.put(Document(f"document {at}", " ".join(text)) for at, text in enumerate(of))
        reports.append(sync.finish())
        advance(number, len(passes))
    first, again, unchanged, full = reports
    cut, by_edit = Cutter.of(engine, cutting, 0), dict[str, list[float]]()
    for before, after, kind in zip(texts, edited, edits, strict=True):
        held = {piece.tobytes() for piece in cut_whole(cut, Document("before", " ".join(before)))}
        pieces = cut_whole(cut, Document("after", " ".join(after)))
        new = sum(len(piece) for piece in pieces if piece.tobytes() not in held)
        by_edit.setdefault(" ".join(kind), []).append(new / sum(map(len, pieces)))
    return {
        "figures": {"sync_recomputed": again.computed_tokens / full.computed_tokens},
        "by_edit": {kind: sum(each) / len(each) for kind, each in by_edit.items()},
        "documents": documents,
        "document_tokens": full.tokens / documents,
        "cutting": asdict(cutting),
        "full_reindex_tokens": full.computed_tokens,
        "first": asdict(first),
        "after_edits": asdict(again),
        "without_edits": asdict(unchanged),
        "seed": seed,
        **stamp(),
    }


def _texts(engine: BlendEngine, pool: list[str], documents: int, tokens: int) -> list[list[str]]:
    """Documents as their sentences, each of at least so many tokens."""
    if engine.runtime.builder is None:
        raise InvalidInputError("documents are texts: name a model with a tokenizer")
    texts: list[list[str]] = []
    text, count = list[str](), 0
    for sentence in pool:
        text.append(sentence)
        count += len(engine.runtime.builder.encode(f" {sentence}"))
        if count >= tokens:
            texts.append(text)
            text, count = [], 0
        if len(texts) == documents:
            return texts
    raise InvalidInputError(f"the passages give {len(texts)} documents of {tokens} tokens, {documents} are needed")


def _edit(text: list[str], how: str, where: str, other: str) -> list[str]:
    at = {"start": 0, "middle": len(text) // 2, "end": len(text) - 1}[where]
    stop = at if how == "inserted" else at + 1
    if how == "inserted" and where == "end":
        at = stop = len(text)
    return [*text[:at], *([] if how == "deleted" else [other]), *text[stop:]]


def cut_whole(cutter: Cutter, document: Document) -> list[TokenIds]:
    """A document's chunks."""
    steps = cutter.steps(document)
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            pieces: list[TokenIds] = ended.value
            return pieces
