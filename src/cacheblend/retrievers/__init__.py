"""Adapters for retrievers: their passages as documents of a server, stored when they are indexed.

    index time     passages with ids ──▶ POST /v1/documents       stored, each a chunk
    request time   retrieved passages ──▶ documents of a request  found, wherever they stand

Each adapter imports its library in its own module: `cacheblend.retrievers.langchain`, `.llamaindex`, `.chroma`.
"""

from cacheblend.retrievers.client import DocumentServer, DocumentServerError, IndexReport, text_id

__all__ = ["DocumentServer", "DocumentServerError", "IndexReport", "text_id"]
