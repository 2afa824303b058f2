"""What the engine hands out: a request in progress, pieces of its answer, and the answer."""

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
    """A prompt after its prefill; `BlendEngine.step` gives its tokens.

    Attributes:
        decoding: draws them.
        report: of the request so far.
        started: when it came, by `time.perf_counter`.
        to_store: the prefill, until what is stored of it has been taken.
        token_ids: the answer so far.
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
        """The last token has been drawn."""
        return self.decoding.sampler.finish_reason is not None

    def answer(self, stream: TextStream) -> Answer:
        """The answer as it stands; completes the report."""
        self.report.total_s = time.perf_counter() - self.started
        self.report.generated_tokens = len(self.token_ids)
        reason = "stop" if stream.stopped else self.decoding.sampler.finish_reason or "stop"
        return Answer(stream.text, list(self.token_ids), reason, self.report)
