"""Refuses text that is not valid Unicode, which no tokenizer and no answer can encode; JSON can write it."""

from typing import Any

from cacheblend.serve.errors import ApiError

_Path = tuple[Any, str | int] | None
"""Where a value is in a body: the path of what contains it, and its key there; None: the body itself."""


def check_unicode(body: Any) -> None:
    """Looks at all texts of a body, keys included.

    Raises:
        ApiError: 400, one has a lone surrogate; names where.
    """
    waiting: list[tuple[_Path, Any]] = [(None, body)]  # no recursion: a body may be nested deeply
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, str):
            _check_text(path, value)
        elif isinstance(value, dict):
            for key, inner in value.items():
                _check_text(path, str(key))
                waiting.append(((path, key), inner))
        elif isinstance(value, list):
            texts = (pair for pair in enumerate(value) if isinstance(pair[1], str | dict | list))
            waiting += [((path, index), inner) for index, inner in texts]


def _check_text(path: _Path, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        keys: list[str] = []
        while path is not None:
            path, key = path
            keys.append(str(key))
        where, code = ".".join(reversed(keys)), ord(value[error.start])
        message = f"{where or 'the body'}: \\u{code:04x} is half of a surrogate pair and no character; remove it"
        raise ApiError(400, message, param=where or None) from None
