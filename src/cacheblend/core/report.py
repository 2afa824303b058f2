"""What a request did and what it cost: every answer carries one."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class BlendReport:
    """All times in seconds, by a monotonic clock.

    Attributes:
        prompt_tokens: length of the prompt.
        hit_tokens: tokens whose KV came from the store, by source: ``prefix`` (exact), or the tier
            (``memory``, ``disk``, ``redis``, ``s3``).
        missed_tokens: tokens of chunks that the store did not hold.
        text_tokens: plain tokens that were computed.
        recomputed_tokens: loaded tokens that were recomputed behind the last check layer.
        row_layers: rows times layers computed; `prompt_tokens` times the model's layers is a full prefill.
        question_row_layers: those of them that went into the question's pass.
        projected_rows: rows that went through a layer's norm and projections only.
        plan_s: names, look-ups and plan.
        load_s: time the host spent reading and re-positioning, much of it beside the computing.
        wait_s: time the computing waited for the loader.
        compute_s: the pass without that wait.
        ttft_s: from the call to the first logits.
        total_s: from the call to the last token.
        generated_tokens: tokens of the answer.
        left_out_tokens: stored tokens that were computed all the same: the loading controller, or the request's mode,
            left them where they lie.
        decision: the loading controller's, for people; empty without one.
        fallbacks: why less was reused than planned, a line each.
    """

    prompt_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=dict)
    missed_tokens: int = 0
    text_tokens: int = 0
    recomputed_tokens: int = 0
    row_layers: int = 0
    question_row_layers: int = 0
    projected_rows: int = 0
    plan_s: float = 0.0
    load_s: float = 0.0
    wait_s: float = 0.0
    compute_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    generated_tokens: int = 0
    left_out_tokens: int = 0
    decision: str = ""
    fallbacks: list[str] = field(default_factory=list)

    @property
    def loaded_tokens(self) -> int:
        """Tokens whose KV came from the store."""
        return sum(self.hit_tokens.values())

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"loaded_tokens": self.loaded_tokens}
