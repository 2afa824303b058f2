"""The manifests in an `Objects`: those that did not change are not read again, damaged ones are removed.

Knows the bytes of manifests; does not know blocks.
"""

import contextlib
import logging
import threading

from cacheblend.core.errors import StoreError
from cacheblend.core.naming import BlockName
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.store.base import LOGGER_NAME, Damage
from cacheblend.store.format.checksum import DamagedError
from cacheblend.store.format.manifest_file import decode_manifest
from cacheblend.store.remote.breaker import CircuitBreaker
from cacheblend.store.remote.objects import Objects

logger = logging.getLogger(LOGGER_NAME)


class RemoteManifests:
    """The manifests of one place; safe to call from several threads.

    Args:
        objects: the place.
        breaker: around every call to it.
        read_only: damaged manifests are reported but not removed.

    Attributes:
        damaged: manifests found damaged so far.
    """

    def __init__(self, objects: Objects, breaker: CircuitBreaker, read_only: bool) -> None:
        self._objects, self._breaker, self._read_only = objects, breaker, read_only
        self._known: dict[BlockName, tuple[str, ChunkManifest]] = {}  # with the mark at which each was read
        self._lock = threading.Lock()
        self.damaged = 0

    def all(self) -> list[ChunkManifest]:
        """All manifests, ordered by chunk; see `KVStore.manifests`."""
        return self._read(self._known, [])

    def verify(self, found: list[Damage]) -> None:
        """Reads all manifests again and appends damage to `found`."""
        self._read({}, found)

    def _read(self, known: dict[BlockName, tuple[str, ChunkManifest]], found: list[Damage]) -> list[ChunkManifest]:
        with self._breaker.asking():
            marks = self._objects.manifests()
            changed = [name for name, mark in marks.items() if name not in known or known[name][0] != mark]
            data = self._objects.read_manifests(changed)
        listed = {name: known[name] for name in marks if name in known and name not in set(changed)}
        for name, part in zip(changed, data, strict=True):
            if part is None:
                continue
            try:
                listed[name] = (marks[name], decode_manifest(bytes(part), name))
            except DamagedError as error:
                found.append(Damage("manifest", name, str(error), self._remove(name, error)))
        with self._lock:
            self._known = listed
        return [listed[name][1] for name in sorted(listed)]

    def _remove(self, name: BlockName, error: DamagedError) -> bool:
        """Reports a damaged manifest and removes it; whether that succeeded."""
        removed = False
        if not self._read_only:
            with contextlib.suppress(StoreError), self._breaker.asking():
                removed = self._objects.delete_manifest(name)
        with self._lock:
            self.damaged += 1
        outcome = "removed" if removed else "could not be removed"
        logger.warning("damaged manifest %s in %s: %s; %s", name.hex(), self._objects.place, error, outcome)
        return removed
