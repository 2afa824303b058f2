"""Damages the files of a store's folder: what disks, crashes and people do to them."""

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WAYS = ("flip a bit", "truncate", "empty", "zeros", "delete")


def damage(store: Path, rng: random.Random, *, every: bool) -> int:
    """Damages one file of blocks or all of them, each in a random way; returns how many."""
    files = sorted(path for path in (store / "blocks").rglob("*") if path.is_file())
    chosen = files if every else rng.sample(files, min(1, len(files)))
    for path in chosen:
        _damage(path, rng)
    return len(chosen)


@contextmanager
def removed(store: Path) -> Iterator[None]:
    """Inside, the folder is gone; what was written to its place meanwhile is lost afterwards."""
    away = store.with_name(f"{store.name}-away")
    store.rename(away)
    try:
        yield
    finally:
        shutil.rmtree(store, ignore_errors=True)
        away.rename(store)


def restore(kept: Path, store: Path) -> None:
    """Puts back what a copy of the folder has, whatever became of it: later trials find the same blocks."""
    for path in (path for folder in ("blocks", "chunks", "manifests") for path in (kept / folder).rglob("*")):
        if path.is_file():
            to = store / path.relative_to(kept)
            to.parent.mkdir(parents=True, exist_ok=True)
            fresh = to.with_name(f".{to.name}.restored")
            shutil.copyfile(path, fresh)
            fresh.rename(to)


def _damage(path: Path, rng: random.Random) -> None:
    way, held = rng.choice(WAYS), path.read_bytes()
    if way == "delete":
        path.unlink()
        return
    at = rng.randrange(len(held)) if held else 0
    changed = {
        "flip a bit": held[:at] + bytes([held[at] ^ (1 << rng.randrange(8))]) + held[at + 1 :] if held else b"",
        "truncate": held[:at],
        "empty": b"",
        "zeros": bytes(len(held)),
    }[way]
    fresh = path.with_name(f".{path.name}.damaged")  # not in place: a reader may have mapped the old file
    fresh.write_bytes(changed)
    fresh.rename(path)
