"""What a server is told at its start."""

from dataclasses import dataclass, field

from cacheblend.engines.hf.tickets import Limits
from cacheblend.serve.keys import KeyRing


@dataclass(frozen=True)
class ServeSettings:
    """How a server serves.

    Attributes:
        keys: who may ask; none: anyone.
        chunk_tokens: least tokens of a text that is a chunk of its own.
        limits: requests under way at once, and waiting.
        max_body_bytes: of a request.
        body_s: that a client may take to send a request.
        max_prompt_tokens: of a prompt; None: the model's context.
        max_chunks: of a prompt.
        max_choices: ``n`` at most.
        max_tokens: of an answer, where a client does not say.
        timeout_s: that a request may take, its time in the queue included.
        drain_s: that requests under way may take when the server is stopped.
        store_bytes: that a key's chunks may take; None: no bound but the store's.
        pin_bytes: that a key may pin.
        playground: whether the page is there; it is told nothing of anyone's chunks.
    """

    keys: KeyRing = field(default_factory=KeyRing)
    chunk_tokens: int = 64
    limits: Limits = field(default_factory=Limits)
    max_body_bytes: int = 16 << 20
    body_s: float = 60.0
    max_prompt_tokens: int | None = None
    max_chunks: int = 512
    max_choices: int = 8
    max_tokens: int = 512
    timeout_s: float = 600.0
    drain_s: float = 30.0
    store_bytes: int | None = None
    pin_bytes: int | None = None
    playground: bool = True
