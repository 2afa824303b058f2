"""Every error that this package raises on purpose, and checks of types. A message names the value, the limit and the
way out."""

from collections.abc import Iterable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:  # which imports numpy: a command that only refuses an option needs none
    from cacheblend.core.names import BlockName

_SHOWN = 80  # characters of a value in a message


class CacheBlendError(Exception):
    """Base of all errors raised on purpose."""


class InvalidInputError(CacheBlendError, ValueError):
    """A prompt, a ratio or another argument that cannot be served as given."""


class PromptTooLongError(InvalidInputError):
    """A prompt with more tokens than the model's context; an evaluation of many rows may skip it."""


class ModelChangedError(InvalidInputError):
    """The model's weights or adapters were changed while passages were computed, which are not stored: ask again; or
    since the engine was opened, so that it cannot go on."""


class ModelOverflowError(CacheBlendError):
    """The model computed infinities or NaN: values beyond its dtype's range, or of damaged weights. No token can be
    drawn from them, and they are not stored. `found`: what has them; `dtype`: in which it was computed."""

    def __init__(self, found: str, dtype: object) -> None:
        super().__init__(
            f"{found}: the model's values exceed the range of {str(dtype).removeprefix('torch.')}, or its weights or "
            "the KV it loaded are damaged; float16 has the least range: open the model in bfloat16 or float32, with "
            "another store if that was filled before"
        )


class ModelNotBlendableError(CacheBlendError):
    """The model's keys cannot be re-positioned or its layers cannot be run one by one; the message says why."""


class BlockLostError(CacheBlendError):
    """Blocks that the store listed could not be read: gone, or damaged. Their rows must be recomputed.

    Attributes:
        names: of the lost blocks.
        reason: one line for the report.
    """

    def __init__(self, names: "list[BlockName]", reason: str) -> None:
        super().__init__(f"{len(names)} block(s) lost: {reason}")
        self.names = names
        self.reason = reason


class LoadTimeoutError(BlockLostError):
    """Blocks that the store did not give in the time that a request waits for it. They are held, and computed."""


class BlockDamagedError(BlockLostError):
    """The block is damaged; the store has reported it.

    Attributes:
        removed: the store has removed the block.
    """

    def __init__(self, name: "BlockName", reason: str, removed: bool) -> None:
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

    Raises:
        InvalidInputError: the text, called `what`, has a lone surrogate, or is none.
    """
    check_type(text, str, what)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise InvalidInputError(
            f"{what} has a lone surrogate at character {error.start} (U+{code:04X}), which UTF-8 cannot encode; "
            "remove it, or repair the encoding of the input"
        ) from error


def shown(value: object) -> str:
    """A value for a message: in one line, cut where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def check_type(value: object, hint: Any, what: str, wanted: str = "") -> None:
    """Refuses a value of another type than was asked for, before it fails inside or means something else.

    Args:
        hint: a type as in an annotation. A whole number is a number; True is neither.
        what: names the value for the message.
        wanted: what to give, for the message; empty: derived from `hint`.

    Raises:
        InvalidInputError: the value is not of this type.
    """
    if not fits_type(value, hint):
        raise InvalidInputError(f"{what} must be {wanted or type_in_words(hint)}, got {shown(value)}")


def check_fields(settings: Any, names: Iterable[str] = ()) -> None:
    """Raises `InvalidInputError`, naming field, type and value, where a dataclass's value is not of its field's type.

    `names`: of the fields to look at; empty: all.
    """
    kind: Any = type(settings)
    hints = _hints(kind)
    for name in names or hints:
        check_type(getattr(settings, name), hints[name], name)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {name: hints[name] for name in kind.__dataclass_fields__}


def fits_type(value: object, hint: Any) -> bool:
    """Whether a value is of a type, as in an annotation; see `check_type`."""
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(fits_type(value, option) for option in options)
    if origin is Literal:
        return isinstance(value, str) and value in options
    if origin is tuple and options[1:] == (...,):
        return isinstance(value, tuple) and all(fits_type(item, options[0]) for item in value)
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(options) and all(map(fits_type, value, options))
    if origin is Mapping:
        return isinstance(value, Mapping) and all(fits_type(item, options[1]) for item in value.values())
    if hint in (int, float):
        return isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
    return hint is Any or isinstance(value, origin or hint)


def type_in_words(hint: Any) -> str:
    """A type, for messages."""
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(type_in_words(option) for option in options)
    if origin is Literal:
        return f"one of {', '.join(options)}" if len(options) > 1 else repr(options[0])
    if origin is tuple:
        return f"a tuple of {_plural(options[0])}" if options[1:] == (...,) else f"({', '.join(map(_plural, options))})"
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", NoneType: "None"}
    return names.get(hint) or f"a {(origin or hint).__name__}"


def _plural(hint: Any) -> str:
    options = get_args(hint)
    if get_origin(hint) is tuple:
        return f"tuples of {' and '.join(map(_plural, (option for option in options if option is not ...)))}"
    return {int: "whole numbers", float: "numbers", str: "texts"}.get(hint) or f"{hint.__name__}s"
