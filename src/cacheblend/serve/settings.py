"""Settings of a server, given when it starts."""

import math
from dataclasses import dataclass, field

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.hf.scheduler import Limits
from cacheblend.engines.shadow import ShadowSettings
from cacheblend.serve.keys import KeyRing
from cacheblend.serve.tool_calls import AUTO, format_of


@dataclass(frozen=True)
class ServeSettings:
    """Limits and features of a server; raises `InvalidInputError` for a value that is out of range.

    What the options of `cacheblend serve` have, too, is called as there (`ServerOptions`, `BoundOptions`).
    """

    keys: KeyRing = field(default_factory=KeyRing)  # empty: no key is needed
    chunk_tokens: int = 64
    limits: Limits = field(default_factory=Limits)  # numbers of active and waiting requests
    max_body_bytes: int = 16 << 20  # of a request
    connections: int = 1000
    headers_s: float = 30.0
    body_s: float = 60.0
    max_prompt_tokens: int | None = None
    max_chunks: int = 512  # of a prompt
    max_choices: int = 8  # largest ``n``
    max_tokens: int = 512
    timeout_s: float = 600.0
    drain_s: float = 30.0
    store_bytes: int | None = None
    pin_bytes: int | None = None
    playground: bool = True
    hosts: tuple[str, ...] | None = None  # the server's names, where no key is needed; None: ``Host`` is not checked
    ready_needs_store: bool = False
    metrics_keys: KeyRing = field(default_factory=KeyRing)  # empty: /metrics has none of its own
    shadow: float = 0.0
    shadow_floor: float | None = None
    tool_call_parser: str = AUTO

    def __post_init__(self) -> None:
        names = "chunk_tokens max_body_bytes connections max_prompt_tokens max_chunks max_choices max_tokens"
        least: dict[str, float] = dict.fromkeys(names.split(), 1)
        least |= {"drain_s": 0, "store_bytes": 0, "pin_bytes": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and not bound <= value < math.inf:
                raise InvalidInputError(f"{name} must be {bound} or more, got {value}")
        for name in ("headers_s", "body_s", "timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidInputError(f"{name} must be a number of seconds above 0, got {getattr(self, name)}")
        active, waiting = self.limits.active, self.limits.waiting
        if active < 1 or waiting < 0:
            raise InvalidInputError(f"at least 1 active and 0 waiting requests are needed, got {active} and {waiting}")
        if self.shadow_floor is not None and not self.shadow:
            raise InvalidInputError(
                f"a shadow floor of {self.shadow_floor} is held by comparing answers, and none is compared; also give "
                "shadow, the share of the requests to compare (0.02)"
            )
        _ = self.shadow_settings  # refuses wrong values
        format_of(self.tool_call_parser, None)

    @property
    def shadow_settings(self) -> ShadowSettings | None:
        """How answers are checked; None: they are not."""
        return ShadowSettings(self.shadow, self.shadow_floor) if self.shadow else None
