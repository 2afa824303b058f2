"""Stores in folders without fsync, what lies in their folders, and calls to the system that fail."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cacheblend.store import DiskStore


def disk(path: Path, **options: Any) -> DiskStore:
    """Without fsync, which takes long here and changes nothing that these tests see."""
    return DiskStore(path, durable=False, **options)


def block_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("blocks/*/*.safetensors"))


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def failing(number: int, when: Callable[..., bool], real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if when(*args, **kwargs):
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    return call
