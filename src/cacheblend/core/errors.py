"""Every error that this package raises on purpose. A message names the value, the limit and the way out."""

from cacheblend.core.naming import BlockName


class CacheBlendError(Exception):
    """Base of all errors raised on purpose."""


class InvalidInputError(CacheBlendError, ValueError):
    """A prompt, a ratio or another argument that cannot be served as given."""


class PromptTooLongError(InvalidInputError):
    """A prompt with more tokens than the model's context; an evaluation of many rows may skip it."""


class ModelChangedError(InvalidInputError):
    """The model's weights or adapters were changed while passages were computed, which are not stored: ask again; or
    since the engine was opened, so that it cannot go on."""


class ModelNotBlendableError(CacheBlendError):
    """The model's keys cannot be re-positioned or its layers cannot be run one by one; the message says why."""


class BlockLostError(CacheBlendError):
    """Blocks that the store listed could not be read: gone, or damaged. Their rows must be recomputed.

    Attributes:
        names: of the lost blocks.
        reason: one line for the report.
    """

    def __init__(self, names: list[BlockName], reason: str) -> None:
        super().__init__(f"{len(names)} block(s) lost: {reason}")
        self.names = names
        self.reason = reason


class BlockDamagedError(BlockLostError):
    """The block is damaged; the store has reported it.

    Attributes:
        removed: the store has removed the block.
    """

    def __init__(self, name: BlockName, reason: str, removed: bool) -> None:
        super().__init__([name], reason)
        self.removed = removed


class StoreError(CacheBlendError):
    """The store cannot do what was asked."""


class StoreFormatError(StoreError):
    """The folder was written in a format that this version cannot read."""


class StoreReadOnlyError(StoreError):
    """The store cannot be written to."""


class StoreUnreachableError(StoreError):
    """A server or bucket did not answer in time."""


class StoreFullError(StoreError):
    """The store has no free capacity and no unpinned block to evict."""


def check_encodable(text: str, what: str) -> None:
    """Refuses a text that UTF-8 cannot encode: a lone surrogate, as JSON and a shell's invalid bytes bring it in.

    Args:
        text: any text.
        what: names it for the message.

    Raises:
        InvalidInputError: the text has a lone surrogate.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise InvalidInputError(
            f"{what} has a lone surrogate at character {error.start} (U+{code:04X}), which UTF-8 cannot encode; "
            "remove it, or repair the encoding of the input"
        ) from error
