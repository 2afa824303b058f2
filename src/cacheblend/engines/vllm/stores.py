"""The stores of an engine's processes, from the URL that is configured: which of its tiers lie in which process.

    scheduler's process   looks blocks up             memory ── folder ── bucket
    a rank's process      reads its heads   device ── memory ── folder ── bucket      of the rank's own device

A device tier (``cuda://`` in front) is a cache of the stores behind it, which look-ups do not need. Where both sides
share a process, they share all of the store.
"""

import threading
import weakref

from cacheblend.core.errors import InvalidInputError
from cacheblend.store import KVStore
from cacheblend.store.open import DevicePlace, MemoryPlace, StorePlace, TieredPlace, parse_store_url, shown_url

_stores: "weakref.WeakValueDictionary[tuple[str, StorePlace], KVStore]" = weakref.WeakValueDictionary()
_stores_lock = threading.Lock()


def device_bytes(url: str) -> int:
    """Bytes of each rank's device that the store's tier there may take; 0: it has no such tier. Raises
    InvalidInputError: the URL is wrong, or names a device, or nothing behind it."""
    front, _ = _parts(url)
    return 0 if front is None else front.max_bytes


def check_device(url: str, device: str) -> None:
    """Checks that a rank on this kind of device (``"cuda"``) can hold the store's tiers. Raises InvalidInputError: a
    device tier, and no GPU; or as `device_bytes`."""
    if _parts(url)[0] is not None and device == "cpu":
        raise InvalidInputError(
            f"the store {shown_url(url)} keeps records in a GPU's memory, and this vLLM computes on a CPU: leave "
            "cuda:// out; ram_bytes=4GiB of the folder, or memory://?max_bytes=4GiB in front of it, is memory instead"
        )


def shared_store(url: str, engine: str, *, is_one_process: bool, looks_up: bool) -> KVStore:
    """The store of one side of an engine; both sides get the same object if they share a process. `looks_up`: of the
    scheduler's side; False: of a rank, whose device is the current one. Raises InvalidInputError: a store in memory,
    with processes that would each have a store of their own; there is no GPU; or as `device_bytes`."""
    front, place = _parts(url)
    if isinstance(place, MemoryPlace) and not is_one_process:
        raise InvalidInputError(
            f"the store {shown_url(url)} is in the memory of one process, and scheduler and workers run in several; "
            'use a folder: "file:///var/cache/cacheblend"'
        )
    if front is not None and (is_one_process or not looks_up):
        # Of several ranks one stores the heads of all: kept as written, they would take the room of other blocks.
        place = TieredPlace(front, place, keeps_written=is_one_process)
    with _stores_lock:
        store = _stores.get((engine, place))
        if store is None:
            store = _stores[engine, place] = place.open()
        return store


def _parts(url: str) -> tuple[DevicePlace | None, StorePlace]:
    place = parse_store_url(url)
    front = place.front if isinstance(place, TieredPlace) else place
    if not isinstance(front, DevicePlace):
        return None, place
    if not isinstance(place, TieredPlace):
        raise InvalidInputError(
            f"the store {shown_url(url)} has nothing behind the GPU's memory, which in vLLM only keeps copies: add "
            'a store, "cuda://?max_bytes=4GiB, file:///var/cache/cacheblend"'
        )
    if front.index is not None:
        raise InvalidInputError(
            f"the store {shown_url(url)} names the GPU {front.index}, and in vLLM each rank keeps records on its own: "
            "write cuda://?max_bytes=..., without a number"
        )
    return front, place.back
