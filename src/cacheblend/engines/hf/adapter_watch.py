"""Keeps an engine in step with its model's adapters. Knows when; the engine knows how."""

import threading
from collections.abc import Callable
from typing import NamedTuple

from transformers import PreTrainedModel

from cacheblend.engines.adapters import AdapterWatch
from cacheblend.engines.hf.view import frozen_copy


class Adapted(NamedTuple):
    """A model as it was at a look.

    Attributes:
        model: a copy of its modules, which keeps the adapters in effect.
        digest: of these adapters (`AdapterWatch`).
        version: another number than at any other change.
    """

    model: PreTrainedModel
    digest: str
    version: int


class AdapterFollower:
    """Notices that the model's adapters have changed. Safe to call from several threads.

    Args:
        model: the engine's.

    Attributes:
        followed: the version that the engine is in step with.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._watch, self._lock = AdapterWatch(model), threading.Lock()
        self.followed = self._watch.version

    def version(self) -> int:
        """Looks; another number says that the adapters are not those of the last one."""
        with self._lock:
            self._watch.look()
            return self._watch.version

    def has_changed(self) -> bool:
        """Looks; True if the engine does not know yet what it saw."""
        return self.version() != self.followed

    def adapted(self) -> Adapted:
        """The model as it is now."""
        with self._lock:
            return self._adapted()

    def follow(self, renew: Callable[[Adapted], None]) -> None:
        """Looks; after a change calls `renew` with what it found, and again if that fails."""
        with self._lock:
            self._watch.look()
            if self._watch.version != self.followed:
                adapted = self._adapted()
                renew(adapted)
                self.followed = adapted.version

    def _adapted(self) -> Adapted:
        model = frozen_copy(self._model)
        while not self._watch.describes(model):  # they were switched between the look and the copy
            self._watch.look(anew=True)
            model = frozen_copy(self._model)
        # Of the copy: so what it computes is named by what it is, however often the model is switched.
        return Adapted(model, self._watch.digest_of_copy(model), self._watch.version)
