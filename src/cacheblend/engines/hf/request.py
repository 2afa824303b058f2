"""What the engine hands out: a request under way, pieces of its answer, and the answer."""

import time
from dataclasses import dataclass, field

from cacheblend.core.fuse.prefill import Prefill
from cacheblend.core.plan.plan import Source
from cacheblend.core.report import BlendReport
from cacheblend.engines.hf.decode import Decoding, TextStream


@dataclass(frozen=True)
class Answer:
    """A finished answer.

    Attributes:
        text: stop texts cut off, special tokens left out; empty where the engine has no tokenizer.
        token_ids: as generated.
        finish_reason: ``stop`` or ``length``.
        report: what was reused and what it cost.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    report: BlendReport


@dataclass(frozen=True)
class Delta:
    """A piece of an answer: text that is certain; the last one carries the answer."""

    text: str
    answer: Answer | None = None


@dataclass
class Request:
    """A prompt behind its prefill; `BlendEngine.step` gives its tokens.

    Attributes:
        decoding: draws them.
        report: of the request so far.
        started: when it came, by `time.perf_counter`.
        to_capture: the prefill's KV, until what is to be stored of it has been taken.
        token_ids: the answer so far.
        finished: `BlendEngine.finish` has been called.
    """

    decoding: Decoding
    report: BlendReport
    started: float
    to_capture: Prefill | None = None
    token_ids: list[int] = field(default_factory=list)
    finished: bool = False

    @property
    def done(self) -> bool:
        """The last token has been drawn."""
        return self.decoding.finish_reason is not None

    def answer(self, stream: TextStream) -> Answer:
        """The answer as it stands; completes the report."""
        self.report.total_s = time.perf_counter() - self.started
        self.report.generated_tokens = len(self.token_ids)
        reason = "stop" if stream.stopped else self.decoding.finish_reason or "stop"
        return Answer(stream.text, list(self.token_ids), reason, self.report)


def report_of(result: Prefill, plan_s: float, pass_s: float) -> BlendReport:
    """The report of a prefill.

    Args:
        result: of the pass.
        plan_s: seconds of names, look-ups and plan.
        pass_s: seconds of the pass.
    """
    plan, tokens = result.plan, result.plan.tokens_by_source()
    left_out = sum(len(span) for span in plan.spans if span.source is Source.MISS and span.name in plan.left_out)
    return BlendReport(
        prompt_tokens=len(result.plan),
        hit_tokens=result.plan.hit_tokens(),
        missed_tokens=tokens["miss"] - left_out,
        left_out_tokens=left_out,
        text_tokens=tokens["text"],
        recomputed_tokens=result.recomputed_tokens,
        row_layers=result.row_layers,
        question_row_layers=result.question_row_layers,
        projected_rows=result.projected_rows,
        plan_s=plan_s,
        load_s=result.load_s,
        wait_s=result.wait_s,
        compute_s=pass_s - result.wait_s,
        ttft_s=plan_s + pass_s,
        fallbacks=list(result.fallbacks),
    )
