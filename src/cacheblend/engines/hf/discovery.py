"""Whether an engine finds and learns text that nobody marked, by its configuration."""

from typing import NamedTuple

from cacheblend.core.config import BlendConfig
from cacheblend.core.names import join_ids
from cacheblend.core.plan.planner import Anchor
from cacheblend.engines.chunk_index import ChunkListing
from cacheblend.engines.discovery import Discovery
from cacheblend.engines.hf.warmup import Asker
from cacheblend.store import KVStore

REFRESH_S = 30.0
"""Seconds after which the store's list is read again: others may have stored chunks."""


class Unmarked(NamedTuple):
    """What finds chunks in plain text, and what learns new ones; both None: text is text."""

    listing: ChunkListing | None = None
    discovery: Discovery[Asker] | None = None


def open_unmarked(store: KVStore, config: BlendConfig, anchor: Anchor) -> Unmarked:
    """What `BlendConfig.discover` asks for.

    Args:
        store: where chunks are found.
        config: of the engine.
        anchor: of the chunks; one that depends on the prompt gives a run another KV in each.
    """
    if not config.discover or anchor.rule == "system":
        return Unmarked()
    listing = ChunkListing(store, join_ids(anchor.segments(None)), config.min_run_tokens, REFRESH_S)
    return Unmarked(listing, Discovery(store, listing, config.min_run_tokens, config.watch_tokens))
