"""What a request did and how long it took; every answer has one."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class BlendReport:
    """One request's token counts, work and times. Times are in seconds of a monotonic clock.

    Attributes:
        prompt_tokens: length of the prompt.
        hit_tokens: tokens whose KV came from the store, by source: ``prefix`` (exact), or the tier
            (``memory``, ``disk``, ``redis``, ``s3``), or ``moved`` (in context, by an earlier prompt of the
            conversation).
        missed_tokens: tokens of chunks that the store did not hold.
        near_miss_tokens: those of them that a listed chunk has, too, with another beginning or end: a title in front of
            a passage, or a blank stripped from it, makes another chunk of it.
        text_tokens: tokens of plain text that were computed.
        recomputed_tokens: loaded tokens that were still recomputed after the last check layer.
        selector: the name of the selector that chose them; empty if nothing but an exact prefix was loaded.
        recompute_ratio: its ratio, as the settings name it; None if nothing but an exact prefix was loaded, or if its
            share depends on what it finds (``threshold``).
        row_layers: rows times layers computed; a full prefill has `prompt_tokens` times the model's layers.
        question_row_layers: the part of `row_layers` that the question's pass computed.
        projected_rows: rows that only went through a layer's norm and projections.
        plan_s: naming, look-ups and planning.
        load_s: time that the host spent reading and re-positioning, most of it while layers computed.
        wait_s: time that computing waited for the loader, in passes that were given up too.
        compute_s: the passes without `wait_s`, and without what passed between two steps of whoever has the prefill.
        ttft_s: from the call to the first logits.
        total_s: from the call to the last token.
        generated_tokens: tokens of the answer.
        left_out_tokens: stored tokens that were computed nevertheless, because the loading controller or the request's
            mode decided so, or because loading them took too long.
        decision: the loading controller's reason, for display; empty without a controller.
        fallbacks: reasons why less was reused than planned, one line each.
        load_timeouts: what was computed because the store took too long (`BlendConfig.load_timeout_s`), one line each;
            for this request, or for one shortly before.
        changed_contents: texts of a chat that its template trimmed, escaped, repeated, dropped or else changed: the
            prompt has what they became.
        saveable_share: of a model with recurrent layers, the share of its layers in which rows behind the exact prefix
            can be left out at all; the others compute every row. None: it has no such layers.
    """

    prompt_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=dict)
    missed_tokens: int = 0
    near_miss_tokens: int = 0
    text_tokens: int = 0
    recomputed_tokens: int = 0
    selector: str = ""
    recompute_ratio: float | None = None
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
    load_timeouts: list[str] = field(default_factory=list)
    saveable_share: float | None = None
    changed_contents: int = 0

    @property
    def loaded_tokens(self) -> int:
        """Tokens whose KV came from the store."""
        return sum(self.hit_tokens.values())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"loaded_tokens": self.loaded_tokens}
