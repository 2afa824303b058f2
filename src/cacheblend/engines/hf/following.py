"""Keeps an engine in step with its model's adapters. Knows when; the engine knows how."""

import threading
from collections.abc import Callable

from torch import nn

from cacheblend.engines.adapters import AdapterWatch


class AdapterFollower:
    """Notices that the model's adapters have changed. Safe to call from several threads.

    Args:
        model: the engine's.

    Attributes:
        followed: the version that the engine is in step with.
    """

    def __init__(self, model: nn.Module) -> None:
        self._watch, self._lock = AdapterWatch(model), threading.Lock()
        self.followed = self._watch.version

    @property
    def digest(self) -> str:
        """Of the adapters in effect at the last look."""
        return self._watch.digest

    def version(self) -> int:
        """Looks; another number says that the adapters are not those of the last one."""
        with self._lock:
            self._watch.look()
            return self._watch.version

    def has_changed(self) -> bool:
        """Looks; True if the engine does not know yet what it saw."""
        return self.version() != self.followed

    def follow(self, renew: Callable[[str], None]) -> None:
        """Looks; after a change calls `renew` with the digest (`AdapterWatch`), and again if that fails."""
        with self._lock:
            self._watch.look()
            if self._watch.version != self.followed:
                renew(self._watch.digest)
                self.followed = self._watch.version
