"""What the engine returns: a request in progress, pieces of its answer, and the finished answer."""

import time
from dataclasses import dataclass, field

from cacheblend.core.fuse.result import PrefillResult
from cacheblend.core.report import BlendReport
from cacheblend.engines.hf.decode import Decoding
from cacheblend.engines.hf.text_stream import TextStream


@dataclass(frozen=True)
class Answer:
    """A finished answer.

    Attributes:
        text: without stop texts and special tokens; empty if the engine has no tokenizer.
        token_ids: all generated tokens.
        finish_reason: ``stop`` or ``length``.
        report: what was reused, and the times measured.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    report: BlendReport


@dataclass(frozen=True)
class Delta:
    """A piece of an answer: text that will not change any more; the last piece has the finished `answer`."""

    text: str
    answer: Answer | None = None


@dataclass
class Request:
    """A prompt after its prefill; `BlendEngine.step` generates its tokens.

    Attributes:
        decoding: decoding state of the answer.
        report: report of the request so far.
        started: start time, by `time.perf_counter`.
        to_store: result of the prefill, until its missed chunks have been passed on for storing.
        token_ids: tokens of the answer so far.
        finished: `BlendEngine.finish` has been called.
    """

    decoding: Decoding
    report: BlendReport
    started: float
    to_store: PrefillResult | None = None
    token_ids: list[int] = field(default_factory=list)
    finished: bool = False

    @property
    def done(self) -> bool:
        """True once the last token has been generated."""
        return self.decoding.sampler.finish_reason is not None

    def answer(self, stream: TextStream) -> Answer:
        """The answer as generated so far; completes the report."""
        self.report.total_s = time.perf_counter() - self.started
        self.report.generated_tokens = len(self.token_ids)
        reason = "stop" if stream.stopped else self.decoding.sampler.finish_reason or "stop"
        return Answer(stream.text, list(self.token_ids), reason, self.report)
