"""Whether each tier of a store answers, and how often it did not."""

import threading
from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cacheblend.core.load.breaker import LateTiers
from cacheblend.core.load.budget import LOOK_UP
from cacheblend.store import KVStore, StoreStats
from cacheblend.store.speed import tiers_of


class StoreWatch(Collector):  # type: ignore[misc, unused-ignore]
    """Bytes, blocks and errors of each tier; asks the store when Prometheus does. Safe to call from several threads.

    Args:
        store: the server's.
        late_tiers: those that requests pass over, which are not asked; None: there are none.
    """

    def __init__(self, store: KVStore, late_tiers: LateTiers | None = None) -> None:
        self._late_tiers = late_tiers or LateTiers()
        self._tiers = dict(zip(store.tier_names, tiers_of(store), strict=True))
        self._lock = threading.Lock()
        self._no_answer = dict.fromkeys(self._tiers, 0)

    def stats(self) -> Mapping[str, StoreStats | None]:
        """By tier; None for one that does not answer, or answered requests too late, which is counted."""
        found: dict[str, StoreStats | None] = {}
        for name, tier in self._tiers.items():
            try:
                found[name] = tier.stats() if tier.is_reachable and not self._is_late(name) else None
            except Exception:  # whatever it is, this tier is of no use now
                found[name] = None
            if found[name] is None:
                with self._lock:
                    self._no_answer[name] += 1
        return found

    def _is_late(self, tier: str) -> bool:
        return max(self._late_tiers.left_s(tier), self._late_tiers.left_s(LOOK_UP)) > 0

    def down(self) -> list[str]:
        """Tiers that do not answer."""
        return [name for name, stats in self.stats().items() if stats is None]

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client."""
        nbytes = GaugeMetricFamily("cacheblend_store_bytes", "Bytes of stored blocks.", labels=["tier"])
        blocks = GaugeMetricFamily("cacheblend_store_blocks", "Stored blocks.", labels=["tier"])
        up = GaugeMetricFamily("cacheblend_store_up", "1 if the tier answers, else 0.", labels=["tier"])
        what = "What a store failed to do: answer when asked for its state, write a block, keep it undamaged."
        errors = CounterMetricFamily("cacheblend_store_errors", what, labels=["tier", "what"])
        for name, stats in self.stats().items():
            up.add_metric([name], stats is not None)
            errors.add_metric([name, "answer"], self._no_answer[name])
            if stats is not None:
                nbytes.add_metric([name], stats.bytes)
                blocks.add_metric([name], stats.blocks)
                errors.add_metric([name, "write"], stats.write_failures)
                errors.add_metric([name, "damage"], stats.damaged)
        return [nbytes, blocks, up, errors]
