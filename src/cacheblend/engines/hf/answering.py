"""Whole answers and streams, for whatever starts a request.

Knows prompts, sampling and requests; does not know how a prompt is prefilled.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Unpack

from cacheblend.core.errors import check_type
from cacheblend.core.plan.prompt import Prompt
from cacheblend.engines.hf.prompts import PassageLike, PromptLike
from cacheblend.engines.hf.request import Answer, Delta, Request
from cacheblend.engines.hf.sampling import SamplingOptions, SamplingParams, sampling_of
from cacheblend.engines.hf.text_stream import TextStream
from cacheblend.engines.tokens import Message, PromptBuilder


class Answering(ABC):
    """Answers of an engine.

    Attributes:
        builder: turns token ids into text; None: answers have none.
    """

    builder: PromptBuilder | None

    @abstractmethod
    def start(self, prompt: PromptLike, params: SamplingParams | None = None, *, ratio: float | None = None) -> Request:
        """Prefills a prompt; see `BlendEngine.start`."""

    @abstractmethod
    def chat_prompt(self, messages: Sequence[Message], documents: Sequence[PassageLike] = (), **options: Any) -> Prompt:
        """A message list through the model's chat template; see `PromptReader.chat`."""

    def generate(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        ratio: float | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Answer:
        """The whole answer.

        Args:
            prompt: see `prompt`.
            params: how the answer is drawn.
            ratio: overrides the configured recompute ratio for this request.
            **options: the fields of `SamplingParams` one by one, instead of `params`.

        Raises:
            InvalidInputError: as for `prompt`; several texts without a passage, for which there is `generate_batch`;
                or an option is unknown or out of range.
        """
        *_, last = self._stream(prompt, sampling_of(params, options), ratio)
        assert last.answer is not None
        return last.answer

    def chat(
        self,
        messages: Sequence[Message],
        documents: Sequence[PassageLike] = (),
        params: SamplingParams | None = None,
        *,
        ratio: float | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Answer:
        """The whole answer to a message list; arguments as for `chat_prompt` and `generate`."""
        sampling = sampling_of(params, options)
        check_type(template_options, Mapping | None, "template_options", 'a mapping, {"enable_thinking": False}')
        prompt = self.chat_prompt(messages, documents, **(template_options or {}))
        *_, last = self._stream(prompt, sampling, ratio)
        assert last.answer is not None
        return last.answer

    def stream(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        ratio: float | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Iterator[Delta]:
        """The answer as it is generated; the last delta carries it whole. Arguments as for `generate`."""
        return self._stream(prompt, sampling_of(params, options), ratio)

    def _stream(self, prompt: PromptLike, params: SamplingParams, ratio: float | None) -> Iterator[Delta]:
        text = TextStream(self.builder.detokenizer() if self.builder else None, params.stop)
        with self.start(prompt, params, ratio=ratio) as request:  # finished also where the caller leaves early
            yield from request.stream(text)
