"""How many layers are read at once: as many as are read in a moment, or as take a round trip to be transferred.

Small records read one by one cost calls, not bytes. But a layer that is read together with others is ready when all of
them are, so a read of several layers may take no longer than a moment: a slow store is read layer by layer, and
computing overlaps with reading. Where each read is a round trip that takes longer than that, layers are read together
as long as their bytes take no longer than the round trip: of small records, all layers of a request in one.
"""

import math

from cacheblend.core.plan.blocks import KVLayout

AT_ONCE = 1 << 20
"""Bytes of a block in one read; with more of them a byte costs no less."""

AT_ONCE_TO_DEVICE = 8 << 20
"""The same where a block's records are then copied to a device at once: asking takes longer than copying a MiB."""

MOMENT_S = 0.002
"""Layers are read together while that takes no longer."""

BYTES_PER_S = 1e8
"""Of a store behind a round trip, before anything has been read: a slower one is read in smaller parts from then on."""


class ReadSize:
    """Learns from each read how many layers the next one takes.

    Args:
        layout: of the records.
        block_tokens: of a block.
        tokens: of all blocks that are read.
        at_once: bytes of a block in one read, at most, but always one layer's. Where reads are round trips, all layers
            may be one.
    """

    def __init__(self, layout: KVLayout, block_tokens: int, tokens: int, at_once: int = AT_ONCE) -> None:
        self._most = -(-at_once * len(layout.layers) // max(1, layout.block_bytes(block_tokens)))
        self._layers, self._all = 1, max(1, len(layout.layers))
        self._layer_s = layout.block_bytes(tokens) / self._all / BYTES_PER_S  # of a layer's bytes, all blocks

    def of(self, round_trip_s: float = 0.0) -> int:
        """Layers that the next read takes, at least 1.

        Args:
            round_trip_s: that a read takes however little is read.
        """
        if round_trip_s <= MOMENT_S:
            return self._layers
        return min(self._all, math.ceil(round_trip_s / self._layer_s))

    def learn(self, layers: int, seconds: float, round_trip_s: float = 0.0) -> None:
        """A read of so many layers took so long."""
        if round_trip_s > MOMENT_S:
            self._layer_s = max(1e-9, seconds - round_trip_s) / layers
        else:
            self._layers = max(1, layers // 2) if seconds > MOMENT_S else min(self._most, 2 * layers)
