"""How many layers are read at once: as many as are read in a moment.

Small records read one by one cost calls, not bytes. But a layer that is read together with others is ready when all of
them are, so a read of several layers may take no longer than a moment: a slow store is read layer by layer, and
computing overlaps with reading.
"""

from cacheblend.core.plan.blocks import KVLayout

AT_ONCE = 1 << 20
"""Bytes of a block in one read; with more of them a byte costs no less."""

AT_ONCE_TO_DEVICE = 8 << 20
"""The same where a block's records are then copied to a device at once: asking takes longer than copying a MiB."""

MOMENT_S = 0.002
"""Layers are read together while that takes no longer."""


class ReadSize:
    """Learns from each read how many layers the next one takes.

    Args:
        layout: of the records.
        tokens: of a block.
        at_once: bytes of a block in one read, at most, but always one layer's.

    Attributes:
        layers: that the next read takes, at least 1.
    """

    def __init__(self, layout: KVLayout, tokens: int, at_once: int = AT_ONCE) -> None:
        self.layers = 1
        self._most = -(-at_once * len(layout.layers) // max(1, layout.block_bytes(tokens)))

    def learn(self, layers: int, seconds: float) -> None:
        """A read of so many layers took so long."""
        self.layers = max(1, layers // 2) if seconds > MOMENT_S else min(self._most, 2 * layers)
