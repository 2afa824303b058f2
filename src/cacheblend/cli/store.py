"""`cacheblend store`: list, check and shrink a store."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from cacheblend.cli.help import App
from cacheblend.cli.option_groups import option
from cacheblend.cli.options import AsJson
from cacheblend.cli.output import console, print_json, progress, size_text, visible
from cacheblend.core.errors import InvalidInputError

if TYPE_CHECKING:
    from cacheblend.core.names import BlockName
    from cacheblend.core.plan.blocks import ChunkManifest
    from cacheblend.store import KVStore, StoreStats

app = App(help="List, check and shrink a store.")

Url = Annotated[str, typer.Argument(help="A folder, or a store's URL.")]
Chunks = Annotated[
    list[str] | None, typer.Argument(help="Chunks: the id that `ls` shows, the start of an id, or a label.")
]
All = Annotated[bool, option(..., "Every chunk of the store.", "--all")]

SHORT = 12


@app.command("ls")
def list_chunks(
    url: Url, model: str | None = option(None, "Only chunks of the model with this name.", "-m"), json: AsJson = False
) -> None:
    """List the chunks."""
    from cacheblend.store.open import shown_url

    with _open(url, read_only=True) as store:
        pinned = store.pinned()
        rows = [_row(store, chunk, pinned) for chunk in store.manifests() if model in (None, chunk.model)]
    if json:
        print_json({"chunks": rows})
        return
    table = Table()
    for column in ("chunk", "label", "model", "tokens", "blocks held", "size", "pinned"):
        is_number, is_name = column in ("tokens", "blocks held", "size"), column == "chunk"  # which commands take whole
        table.add_column(column, justify="right" if is_number else "left", no_wrap=is_name)
    for row in rows:
        held = f"{row['blocks_held']} of {row['blocks']}"
        table.add_row(
            row["chunk"][:SHORT],
            visible(row["label"]),
            visible(row["model"]),
            str(row["tokens"]),
            Text(held, "" if row["blocks_held"] == row["blocks"] else "yellow"),
            size_text(row["bytes"]),
            "yes" if row["pinned"] else "",
        )
    console().print(table if rows else f"{shown_url(url)} lists no chunk")


@app.command("stat")
def show_stats(url: Url, json: AsJson = False) -> None:
    """Show how much is stored."""
    from cacheblend.store.open import shown_url

    with _open(url, read_only=True) as store:
        stats = store.stats()
    if json:
        print_json(_stats(stats))
        return
    bound = "no bound" if stats.max_bytes is None else f"of {size_text(stats.max_bytes)}"
    held = f"{stats.chunks} chunks, {stats.blocks} blocks ({stats.pinned} pinned), {size_text(stats.bytes)}"
    console().print(f"{shown_url(url)}: {held} {bound}")


@app.command()
def verify(url: Url, json: AsJson = False) -> None:
    """Read and check everything; damaged blocks are removed if possible. Exit code 1 if anything was damaged."""
    with _open(url) as store, progress("verifying", "blocks", quiet=json) as advance:
        damage = store.verify(advance)
        blocks = store.stats().blocks - sum(d.kind == "block" and not d.removed for d in damage)
    if json:
        found = [{"kind": d.kind, "name": d.name.hex(), "reason": d.reason, "removed": d.removed} for d in damage]
        print_json({"intact_blocks": blocks, "damaged": found})
    else:
        out = console()
        for d in damage:
            what = "removed" if d.removed else "damaged"
            out.print(Text.assemble((what, "red"), f" {d.kind} {d.name.hex()[:SHORT]}: {d.reason}"))
        left = sum(not d.removed for d in damage)
        out.print(f"{blocks} blocks are intact, {len(damage) - left} damaged things were removed")
        if left:
            out.print(
                f"{left} damaged things are left: the store cannot be written to, or they cannot be read",
                style="yellow",
            )
    if damage:
        raise typer.Exit(1)


@app.command()
def prune(url: Url, max_bytes: str = option(..., "Size to shrink it to: 10GiB."), json: AsJson = False) -> None:
    """Evict the least recently used chunks until the store is small enough. Pinned chunks stay."""
    from cacheblend.store.open import parse_bytes

    limit = parse_bytes(max_bytes)
    with _open(url) as store:
        with progress("pruning", "bytes", quiet=json) as advance:
            freed = store.prune(limit, advance)
        stats = store.stats()
    if json:
        print_json({"freed_bytes": freed} | _stats(stats))
        return
    console().print(f"{size_text(freed)} freed, {size_text(stats.bytes)} in {stats.blocks} blocks stay")
    if stats.bytes > limit:
        rest = "pinned" if stats.pinned else "records of documents, which `sync` and `store rm --all` remove"
        console(stderr=True).print(
            f"more than {size_text(limit)} stay: the rest is {rest}", style="yellow", soft_wrap=True
        )


@app.command()
def pin(url: Url, chunks: Chunks = None, everything: All = False, json: AsJson = False) -> None:
    """Keep chunks from eviction."""
    with _chosen(url, chunks, everything, json, "pinned") as (store, chosen):
        for manifest in chosen:
            store.pin(manifest.block_names)


@app.command()
def unpin(url: Url, chunks: Chunks = None, everything: All = False, json: AsJson = False) -> None:
    """Let chunks be evicted again. Blocks that another pinned chunk shares stay pinned."""
    with _chosen(url, chunks, everything, json, "unpinned") as (store, chosen):
        gone, pinned = {manifest.chunk_id for manifest in chosen}, store.pinned()
        others = (each for each in store.manifests() if each.chunk_id not in gone)
        shared = {name for each in others if pinned.issuperset(each.block_names) for name in each.block_names}
        for manifest in chosen:
            store.unpin([name for name in manifest.block_names if name not in shared])


@app.command("rm")
def remove(url: Url, chunks: Chunks = None, everything: All = False, json: AsJson = False) -> None:
    """Delete chunks, pinned or not. Blocks that another chunk shares stay. --all also deletes records of documents."""
    with _chosen(url, chunks, everything, json, "removed") as (store, chosen):
        gone = {manifest.chunk_id for manifest in chosen}
        shared = {
            name for manifest in store.manifests() if manifest.chunk_id not in gone for name in manifest.block_names
        }
        for manifest in chosen:
            store.delete_chunk(manifest.block_names, shared)
        roots = set(store.documents.roots()) - {each.root for each in store.manifests()} if everything else ()
        for root in roots:  # also of models and salts of which no sync comes any more
            with store.documents.changing(root):
                for name in store.documents.names(root):
                    store.documents.delete(root, name)


def _open(url: str, *, read_only: bool = False) -> "KVStore":
    """The store of an existing folder: inspecting a store must not create one."""
    from cacheblend.store.open import lasting_url, open_store

    url = lasting_url(url)
    store = open_store(url, ram_bytes=0, read_only=True)
    if read_only:
        return store
    store.close()
    return open_store(url, ram_bytes=0)


@contextmanager
def _chosen(
    url: str, wanted: list[str] | None, everything: bool, as_json: bool, verb: str
) -> Iterator[tuple["KVStore", list["ChunkManifest"]]]:
    """A store and the chunks that the arguments name; says in the end what was done to them."""
    with _open(url) as store:
        manifests = store.manifests()
        if everything == bool(wanted):
            raise InvalidInputError("name the chunks (see `cacheblend store ls`), or give --all; not both")
        chosen = {m.chunk_id: m for m in manifests} if everything else {}
        for text in wanted or ():
            by_id = [m for m in manifests if text and m.chunk_id.hex().startswith(text.lower())]
            found = [m for m in manifests if m.label == text] or by_id
            if not found:
                raise InvalidInputError(f"no chunk has the label {text!r}, or an id that begins with it")
            if found is by_id and len(found) > 1:
                raise InvalidInputError(f"the ids of {len(found)} chunks begin with {text!r}; give more characters")
            chosen |= {m.chunk_id: m for m in found}
        yield store, list(chosen.values())
    if as_json:
        print_json({verb: [chunk_id.hex() for chunk_id in chosen]})
        return
    for manifest in chosen.values():
        console().print(f"{verb} {manifest.chunk_id.hex()[:SHORT]} {visible(manifest.label)}", soft_wrap=True)


def _row(store: "KVStore", manifest: "ChunkManifest", pinned: set["BlockName"]) -> dict[str, Any]:
    entries = [entry for entry in store.find(manifest.block_names) if entry is not None]
    return {
        "chunk": manifest.chunk_id.hex(),
        "label": manifest.label,
        "model": manifest.model,
        "tokens": len(manifest.token_ids),
        "anchor_tokens": len(manifest.anchor_ids),
        "blocks": len(manifest.block_names),
        "blocks_held": len(entries),
        "bytes": sum(entry.layout.block_bytes(len(entry.token_ids)) for entry in entries),
        "pinned": pinned.issuperset(manifest.block_names),
    }


def _stats(stats: "StoreStats") -> dict[str, Any]:
    names = ("tier", "chunks", "blocks", "pinned", "bytes", "max_bytes")
    return {name: getattr(stats, name) for name in names}
