"""What is done about files that are not what was written: reported once, and removed if the folder can be written."""

# System calls on strings, since this is the hot path:
# ruff: noqa: PTH116

import errno
import logging
import os
import threading
from collections.abc import Callable

from cacheblend.core.errors import BlockDamagedError, BlockLostError
from cacheblend.core.names import BlockName
from cacheblend.store.base import LOGGER_NAME
from cacheblend.store.disk.block_reader import Stamp
from cacheblend.store.disk.entries import remove_entry
from cacheblend.store.disk.folder import Folder
from cacheblend.store.format.checksum import DamagedError

logger = logging.getLogger(LOGGER_NAME)


class DamagedFiles:
    """The damaged block files of a folder; safe to call from several threads.

    Args:
        folder: the store's folder.
        forget: drops what is cached of a block.

    Attributes:
        count: blocks found damaged so far.
    """

    def __init__(self, folder: Folder, forget: Callable[[BlockName], None]) -> None:
        self._folder, self._forget = folder, forget
        self._lock = threading.Lock()
        self._known: dict[BlockName, Stamp] = {}
        self.count = 0

    def is_known(self, name: BlockName, stamp: Stamp) -> bool:
        """Whether this file was reported before, and could not be removed."""
        return self._known.get(name) == stamp

    def lost(self, name: BlockName, path: str, stamp: Stamp, error: DamagedError | OSError) -> BlockLostError:
        """The error for a failed read; reports damage, including I/O errors of the disk."""
        if isinstance(error, OSError) and error.errno != errno.EIO:
            return BlockLostError([name], f"{path} cannot be read: {error.strerror}")
        removed = self._report(name, path, stamp, str(error))
        return BlockDamagedError(name, f"{path} is damaged: {error}", removed)

    def _report(self, name: BlockName, path: str, stamp: Stamp, reason: str) -> bool:
        """Reports a damaged block once and removes its file, unless it has been replaced meanwhile.

        Returns:
            Whether the damaged file is gone.
        """
        self._forget(name)
        with self._lock:
            if self._known.get(name) == stamp:
                return not _is_there(path, stamp)
            self._known[name] = stamp
            self.count += 1
        outcome = "left (the store is read-only)"
        if not self._folder.read_only:
            outcome = "removed"
            try:
                if _is_there(path, stamp):
                    remove_entry(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                outcome = f"could not be removed ({error.strerror})"
        logger.warning("damaged block %s: %s; %s", path, reason, outcome)
        return outcome == "removed"


def _is_there(path: str, stamp: Stamp) -> bool:
    """Whether the file at `path` is still the one with this stamp."""
    try:
        return os.stat(path).st_ino == stamp[0]
    except FileNotFoundError:
        return False
    except OSError:  # unknown, so it does not count as gone
        return True
