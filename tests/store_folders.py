"""Stores in folders without fsync, what lies in their folders, and calls to the system that fail."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cacheblend.core.plan.blocks import Block
from cacheblend.store import DiskStore
from cacheblend.store.format.block_file import encode_chain


def disk(path: Path, **options: Any) -> DiskStore:
    """Without fsync, which takes long here and changes nothing that these tests see."""
    return DiskStore(path, durable=False, **options)


def block_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("blocks/*/*.safetensors"))


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def inodes(store: DiskStore, blocks: list[Block]) -> set[int]:
    return {Path(store.file_of(block.name)).stat().st_ino for block in blocks}


def occupied(folder: Path) -> int:
    """Bytes of the block files that are there, each once."""
    found = {path.stat().st_ino: path.stat().st_size for path in (folder / "blocks").rglob("*.safetensors")}
    return sum(found.values())


def file_bytes(chain: list[Block]) -> int:
    return sum(len(part) for part in encode_chain(chain))


def failing(number: int, when: Callable[..., bool], real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if when(*args, **kwargs):
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    return call
