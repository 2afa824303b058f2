"""Files that are replaced whole."""

import os
import re
import shutil
import threading
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a file atomically, as UTF-8: on failure, an `OSError`, it keeps its previous content, and else its
    permissions. A link stays one; a pipe, a device or an open file (`/dev/stdout`) is just written to."""
    if (number := _open_file(path)) is not None:
        with open(number, "w", encoding="utf-8", closefd=False) as file:
            file.write(text)
        return
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = target_of(path)
    fresh = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        if path.exists():
            shutil.copymode(path, fresh)
        fresh.replace(path)
    except BaseException:
        with suppress(OSError):
            fresh.unlink()
        raise


def target_of(path: Path) -> Path:
    """Where links lead, be it there yet or not. Raises `OSError` for a loop of them."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        target.stat()  # raises
    return target


def _open_file(path: Path) -> int | None:
    """The number of this process's open file that a path leads to; None: it leads to none."""
    for _ in range(40):  # links, as many as Linux follows
        if found := re.fullmatch(r"/(?:proc/self|dev)/fd/(\d+)", str(path)):
            return int(found[1])
        if not path.is_symlink():
            return None
        path = path.parent / path.readlink()
    return None
