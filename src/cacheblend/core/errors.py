"""Every error this package raises on purpose. A message names the value, the limit and the way out."""

from cacheblend.core.naming import BlockName


class CacheBlendError(Exception):
    """Base of all errors raised on purpose."""


class InvalidInputError(CacheBlendError, ValueError):
    """A prompt, a ratio or another argument that cannot be served as given."""


class PromptTooLongError(InvalidInputError):
    """A prompt with more tokens than the model's context; whoever asks many rows may skip it."""


class ModelNotBlendableError(CacheBlendError):
    """The model's keys cannot be moved or its layers cannot be walked; the message says which and why."""


class BlockLostError(CacheBlendError):
    """Blocks that the store listed could not be read: gone, or damaged. Their rows must be recomputed.

    Attributes:
        names: the blocks that are lost.
        reason: one line for the report.
    """

    def __init__(self, names: list[BlockName], reason: str) -> None:
        super().__init__(f"{len(names)} block(s) lost: {reason}")
        self.names = names
        self.reason = reason


class BlockDamagedError(BlockLostError):
    """The block is damaged; it has been reported.

    Attributes:
        removed: it is gone now.
    """

    def __init__(self, name: BlockName, reason: str, removed: bool) -> None:
        super().__init__([name], reason)
        self.removed = removed


class StoreError(CacheBlendError):
    """The store cannot do what was asked."""


class StoreFormatError(StoreError):
    """The folder was written in a format that this version does not read."""


class StoreReadOnlyError(StoreError):
    """The store cannot be written to."""


class StoreUnreachableError(StoreError):
    """A server or bucket does not answer, or not in time."""


class StoreFullError(StoreError):
    """No room, and nothing unpinned left to evict."""
