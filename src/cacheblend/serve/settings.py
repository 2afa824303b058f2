"""Settings of a server, given when it starts."""

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, ClassVar

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.options import MOST_TOKENS, Shadow, option
from cacheblend.serve.keys import KeyRing
from cacheblend.serve.tool_calls import AUTO, format_of

if TYPE_CHECKING:
    from cacheblend.engines.shadow import ShadowSettings

SERVER, BOUNDS = "Server", "Bounds"
LONGEST_S = 1e6  # upper bound of options that are seconds: eleven days


@dataclass(frozen=True)
class ServeSettings:
    """Limits and features of a server, which are options of `cacheblend serve`, but for `no_options`. Raises
    `InvalidInputError` for a value that is out of range."""

    panel: ClassVar = BOUNDS
    no_options: ClassVar = (
        *("keys", "metrics_keys", "hosts", "store_bytes", "pin_bytes"),  # there they are files and texts
        *("max_body_bytes", "max_chunks", "max_choices"),
    )
    playground: bool = option(True, "Serve the page at /.", panel=SERVER)
    ready_needs_store: bool = option(
        False,
        "/ready is 503 while a tier of the store does not answer.",
        "--ready-needs-store/--ready-without-store",
        panel=SERVER,
    )
    chunk_tokens: int = option(
        64, "Least tokens of a text that is a chunk of its own.", least=1, most=MOST_TOKENS, panel="Blending"
    )
    tool_call_parser: str = option(
        AUTO,
        "How tool calls are read from answers: hermes, llama3, mistral, pythonic, none; auto: as the chat template "
        "writes them, if it is known.",
        panel=SERVER,
    )
    shadow: Shadow = 0.0
    shadow_floor: float | None = option(
        None,
        "Least agreement of checked answers; below it the recompute ratio is raised. Needs --shadow.",
        least=0,
        most=1,
        panel=SERVER,
    )
    active: int = option(8, "Requests served at once.", least=1, most=10_000)
    waiting: int = option(64, "Requests in the queue; more get 429.", least=1, most=1_000_000)
    timeout_s: float = option(600.0, "Seconds of a request at most.", "--timeout", least=0.001, most=LONGEST_S)
    connections: int = option(1000, "Open at once at most.", least=1, most=1_000_000)
    headers_s: float = option(
        30.0,
        "Seconds that a connection may be open without a request.",
        "--header-timeout",
        least=0.001,
        most=LONGEST_S,
    )
    body_s: float = option(
        60.0, "Seconds of a client to send a body, or to go on reading.", "--body-timeout", least=0.001, most=LONGEST_S
    )
    drain_s: float = option(30.0, "Seconds to finish requests in at shutdown.", "--drain", least=0, most=LONGEST_S)
    max_prompt_tokens: int | None = option(
        None, "Longest prompt. Default: the model's context.", least=1, most=MOST_TOKENS
    )
    max_tokens: int = option(
        512, "Most tokens of an answer that says none; of completions 16.", "-n", least=1, most=MOST_TOKENS
    )
    keys: KeyRing = field(default_factory=KeyRing)  # empty: no key is needed
    metrics_keys: KeyRing = field(default_factory=KeyRing)  # empty: /metrics has none of its own
    hosts: tuple[str, ...] | None = None  # the server's names, where no key is needed; None: ``Host`` is not checked
    store_bytes: int | None = None  # that each key may store
    pin_bytes: int | None = None
    max_body_bytes: int = 16 << 20  # of a request
    max_chunks: int = 512  # of a prompt
    max_choices: int = 8  # largest ``n``

    def __post_init__(self) -> None:
        least = {each.name: each.metadata["option"][2]["min"] for each in fields(self) if each.metadata}
        least |= {"store_bytes": 0, "pin_bytes": 0, "max_body_bytes": 1, "max_chunks": 1, "max_choices": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if bound is not None and value is not None and not bound <= value < math.inf:
                what = "a number of seconds above 0" if 0 < bound < 1 and not 0 < value < 1 else f"{bound} or more"
                raise InvalidInputError(f"{name} must be {what}, got {value}")
        if self.shadow_floor is not None and not self.shadow:
            raise InvalidInputError(
                f"a shadow floor of {self.shadow_floor} is held by comparing answers, and none is compared; also give "
                "shadow, the share of the requests to compare (0.02)"
            )
        _ = self.shadow_settings  # refuses wrong values
        format_of(self.tool_call_parser, None)

    @property
    def shadow_settings(self) -> "ShadowSettings | None":
        """How answers are checked; None: they are not."""
        if not self.shadow:
            return None
        from cacheblend.engines.shadow import ShadowSettings  # which takes torch along

        return ShadowSettings(self.shadow, self.shadow_floor)
