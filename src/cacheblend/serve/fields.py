"""What becomes of each field of OpenAI's and vLLM's requests that the schemas do not have (``fields.toml``): nothing is
dropped silently.

A field that asks for what this server does not do is refused, unless its value asks for what is done anyway. A few say
nothing about the answer, and are accepted. Any other field is refused as unknown.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any, NamedTuple

from cacheblend.serve.errors import ApiError


class Refused(NamedTuple):
    """A refused field: what is missing, or what to use; `neutral` values, as None, ask for what is done anyway."""

    what: str
    neutral: tuple[Any, ...] = ()


_TABLES = tomllib.loads(files("cacheblend.serve").joinpath("fields.toml").read_text(encoding="utf-8"))
REFUSED, _RESPONSES = (
    {name: Refused(what, tuple(neutral)) for name, (what, *neutral) in _TABLES[table].items()}
    for table in ("refused", "responses")
)
REFUSED_RESPONSES: Mapping[str, Refused] = REFUSED | _RESPONSES
"""Of `/v1/responses`."""
ACCEPTED: Mapping[str, str] = _TABLES["accepted"]
"""Fields that say nothing about the answer."""


def check_fields(
    body: Any, known: Iterable[str], refused: Mapping[str, Refused] = REFUSED, accepted: Mapping[str, str] = ACCEPTED
) -> None:
    """Raises `ApiError`, with what to do, for a field of a client's body that nothing would come of. `known` are the
    schema's fields, `accepted` say nothing about the answer, `refused` go whether the schema has them or not."""
    if not isinstance(body, dict):
        return
    known = set(known)
    for name, value in body.items():
        if value is None or (name not in refused and (name in known or name in accepted)):
            continue
        if name not in refused:
            near = difflib.get_close_matches(name[:80], [*known, *refused], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            shown = name[:80].encode(errors="replace").decode()  # half of a surrogate pair is no text to answer with
            raise ApiError(400, f"there is no field {shown!r}{hint}", param=shown, code="unknown_field")
        what, neutral = refused[name]
        if not any(value == each and type(value) is type(each) for each in neutral):
            raise ApiError(400, f"{name} is not supported: {what}", param=name, code="unsupported_field")
