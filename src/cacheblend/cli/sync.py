"""`cacheblend sync`: keeps the stored KV of documents in step with their source."""

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from cacheblend.cli import options, output
from cacheblend.cli.models import open_engine
from cacheblend.cli.option_groups import option
from cacheblend.core.failures import failed_since, failures, in_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cacheblend.engines.documents import Document


def sync(
    *,
    model: options.ModelOptions,
    store: options.StoreOptions,
    source: str = option(
        ...,
        'A folder of .txt and .md files, JSON lines of {"id", "text", "title"?}, or - for these on stdin.',
        panel=options.PROMPT,
    ),
    stored: options.ChunkOptions,
    layout: options.LayoutOptions,
    device: options.DeviceOptions,
    collection: str = option(
        "documents", "Name of the source: what another one stored is not dropped.", panel=options.PROMPT
    ),
    chunk_tokens: options.SyncedTokens = 512,
    max_drop: float = option(
        0.5, "Refuse to drop more than this share of the stored documents; 1: drop all.", least=0, most=1
    ),
    dry_run: bool = option(False, "Change nothing, and say what would be done."),
    json: options.AsJson = False,
) -> None:
    """Store the documents of a source, recompute what changed of them, and drop those that are gone.

    Of an edited document only the chunks around the edit are computed. The command may be repeated and interrupted.
    Exit code 1 if a document could not be read, of which what is stored stays, or the store does not hold all chunks.
    """
    from cacheblend.core.config import BlendConfig
    from cacheblend.data import Unreadable, read_documents
    from cacheblend.engines.hf import DocumentSync
    from cacheblend.engines.tokens.chunker import Cutting
    from cacheblend.store import lasting_url
    from cacheblend.store.open import existing_url, shown_url

    def readable() -> "Iterator[Document]":
        for document in found.documents():
            if isinstance(document, Unreadable):
                failed[document.id] = document.reason
            else:
                yield document

    layout.check_anchor(stored.anchor)
    cutting = Cutting(chunk_tokens, min(64, chunk_tokens // 2))
    found = read_documents(source, getattr(sys.stdin, "buffer", None))  # which may be closed
    config = BlendConfig(**stored.settings(), discover=False)
    lasting, before = lasting_url(store.store), failures()
    with open_engine(model.model, existing_url(lasting) if dry_run else lasting, config, device, quiet=json) as engine:
        system = layout.build(engine, [("?", "")], "?") if config.anchor == "system" else None
        work = DocumentSync(engine, collection=collection, cutting=cutting, system=system, dry_run=dry_run)
        vanished, failed = work.vanished(found.ids, max_drop), dict[str, str]()
        with output.progress("synchronising", "documents", quiet=json) as advance:
            work.put(readable(), lambda done: advance(done + len(failed), len(found.ids)))
        report = work.finish(vanished)
        records = engine.store.documents
        others = sum(len(records.names(root)) for root in records.roots() if root != work.root)
    unwritten = failed_since(before)
    if json:
        extra = {"failed": failed, "skipped": found.skipped, "other_models": others, "dry_run": dry_run}
        extra["failed_writes"] = unwritten
        output.print_json({"documents": report.documents} | asdict(report) | extra | {"store": shown_url(lasting)})
    else:
        out, would = output.console(), "would be " if dry_run else ""
        out.print(
            f"{report.kept} documents kept, {report.added} {would}added, {report.changed} {would}changed, "
            f"{report.restored} {would}restored, {report.dropped} {would}dropped\n"
            f"{report.computed_tokens} of {report.tokens} tokens {would}computed, in {report.computed_chunks} of "
            f"{report.chunks} chunks; {report.dropped_chunks} chunks dropped; {output.seconds_text(report.seconds)}",
            soft_wrap=True,
        )
        small = "documents are not held completely: the store is too small for all of them; raise max_bytes"
        missing, unread = report.missing_documents, f"{len(failed)} documents could not be read, what is stored of them"
        notes: list[tuple[Any, str]] = [
            (report.pinned_chunks, f"{report.pinned_chunks} chunks of no document stay, since they are pinned"),
            (report.empty, f"without any text: {_some(report.empty)}"),
            (found.skipped, f"not read: {_some(found.skipped)}"),
            (others, f"{others} documents of other models, settings or salts are left as they are"),
            (report.damaged, f"damaged records: {_some(report.damaged)}"),
            (missing, f"{missing} {small}"),
            (failed, f"{unread} stays: {_some(failed.values())}"),
        ]
        for is_so, note in notes:
            if is_so:
                out.print(output.visible(note), style="yellow", soft_wrap=True)
    if unwritten:
        output.say(f"not all is stored ({in_words(unwritten)}): sync again")
    if failed or unwritten or report.missing_documents:
        raise typer.Exit(1)


def _some(texts: Any) -> str:
    """The first texts, and how many more there are."""
    listed = list(texts)
    more = f", and {len(listed) - 10} more (--json names all)" if len(listed) > 10 else ""
    return ", ".join(listed[:10]) + more
