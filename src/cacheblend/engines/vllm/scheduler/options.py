"""What a client asks of the plug-in for one request: the object `cacheblend` of its `kv_transfer_params`.

    {"cacheblend": {"mode": "blend", "recompute_ratio": 0.2, "selector": "hkvd", "chunks": [[12, 268], [270, 512]]}}

Knows settings and selectors. Does not know vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.settings import BlendSettings
from cacheblend.engines.vllm.scheduler.chunks import Span, read_spans

KEY = "cacheblend"
"""The key of this project's object in a request's and an answer's `kv_transfer_params`."""

Mode = Literal["blend", "prefix", "full"]
"""What is reused: all that is stored; only what is exact in this prompt; nothing from the store."""


@dataclass(frozen=True)
class RequestOptions:
    """The settings of one request; None: the engine's.

    Attributes:
        mode: see `Mode`.
        recompute_ratio: share of the loaded tokens that are recomputed, 0..1.
        selector: the name of a selector.
        spans: the prompt's chunks, [start, stop) each, ascending without overlap.
    """

    mode: Mode = "blend"
    recompute_ratio: float | None = None
    selector: str | None = None
    spans: tuple[Span, ...] | None = None

    @property
    def sets_selection(self) -> bool:
        """The request chooses itself what is recomputed, so that no controller does."""
        return self.recompute_ratio is not None or self.selector is not None

    @property
    def follows_floor(self) -> bool:
        """The request names nothing that decides what is recomputed, so that the floor of the shadow check does."""
        return self.mode == "blend" and not self.sets_selection

    def until(self, end: int) -> "RequestOptions":
        """Without the chunks that end behind position `end`."""
        if self.spans is None or all(stop <= end for _, stop in self.spans):
            return self
        return replace(self, spans=tuple(span for span in self.spans if span[1] <= end))

    def selector_of(self, settings: BlendSettings) -> Selector:
        """The selector of this request in an engine with these settings.

        Raises:
            InvalidInputError: no such selector, or a ratio that it cannot have.
        """
        return settings.selector(self.recompute_ratio, self.selector)


def read_options(params: Any, tokens: int) -> RequestOptions:
    """The options that a request's `kv_transfer_params` hold.

    Args:
        params: as the client sent them; None or without `KEY`: the engine's settings.
        tokens: the length of the prompt.

    Raises:
        InvalidInputError: another form, an unknown key or a wrong value; the message names it.
    """
    if params is not None and not isinstance(params, Mapping):
        raise InvalidInputError(f"kv_transfer_params must be an object, got {params!r}")
    mine = (params or {}).get(KEY)
    if mine is None:
        return RequestOptions()
    if not isinstance(mine, Mapping):
        raise InvalidInputError(f'kv_transfer_params["{KEY}"] must be an object, got {mine!r}')
    known = ("mode", "recompute_ratio", "selector", "chunks")
    unknown = sorted(str(key) for key in mine if key not in known)
    if unknown:
        raise InvalidInputError(
            f'kv_transfer_params["{KEY}"] has the unknown key {unknown[0]!r}; it has {", ".join(known)}'
        )
    spans = mine.get("chunks")
    return RequestOptions(
        _mode(mine.get("mode", "blend")),
        _ratio(mine.get("recompute_ratio")),
        _selector(mine.get("selector")),
        None if "chunks" not in mine else tuple(read_spans(spans, tokens)),
    )


def _mode(given: Any) -> Mode:
    if given not in get_args(Mode):
        raise InvalidInputError(f"mode must be one of {', '.join(get_args(Mode))}, got {given!r}")
    mode: Mode = given
    return mode


def _ratio(given: Any) -> float | None:
    if given is None:
        return None
    if not isinstance(given, int | float) or isinstance(given, bool) or not 0 <= given <= 1:
        raise InvalidInputError(f"recompute_ratio must be in 0..1, got {given!r}")
    return float(given)


def _selector(given: Any) -> str | None:
    if given is not None and not isinstance(given, str):
        raise InvalidInputError(f"selector must be a selector's name, got {given!r}")
    return given
