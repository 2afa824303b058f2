"""From what a caller passes to an engine to a checked prompt."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cacheblend.core.errors import InvalidInputError, check_encodable
from cacheblend.core.plan.prompt import Prompt, Segment, chunk
from cacheblend.engines.hf.survey import Survey
from cacheblend.engines.tokens import Content, Message, Passage, PromptBuilder, find_sentence_end_ids

PromptLike = Prompt | Sequence[Content] | Sequence[Message]
"""A prompt of token ids, texts and passages in order, or a message list for the chat template."""


class PromptReader:
    """Makes prompts for one model.

    Args:
        tokenizer: the model's; None: prompts and chunks are token ids only.
        survey: of the model, whose limits every prompt is checked against.
        sentence_end_ids: ids of the tokens that end a sentence; None: the tokenizer says it.

    Attributes:
        builder: turns texts into token ids; None without a tokenizer.
    """

    def __init__(self, tokenizer: Any, survey: Survey, sentence_end_ids: Sequence[int] | None = None) -> None:
        self.builder = None if tokenizer is None else PromptBuilder(tokenizer)
        self._tokenizer, self._survey = tokenizer, survey
        self._sentence_end_ids = None if sentence_end_ids is None else np.array(sentence_end_ids, dtype=np.int64)

    def sentence_end_ids(self) -> npt.NDArray[np.int64] | None:
        """Ids of the tokens that end a sentence, [n], found once; None if they are unknown."""
        if self._sentence_end_ids is None and self._tokenizer is not None:
            self._sentence_end_ids = find_sentence_end_ids(self._tokenizer)
        return self._sentence_end_ids

    def read(self, parts: PromptLike) -> Prompt:
        """A prompt of texts and passages, of a message list, or one that is a prompt already.

        Raises:
            InvalidInputError: it cannot be made, or ids or length are outside the model's limits.
        """
        if not isinstance(parts, Prompt):
            builder = self._needed_builder()
            parts = _as_list(parts)
            is_chat = bool(parts) and all(isinstance(part, dict) for part in parts)
            parts = builder.chat(parts) if is_chat else builder.prompt(parts)
        parts.check(self._survey.vocab_size, self._survey.max_length, self._survey.max_length_reason)
        return parts

    def chat(self, messages: Sequence[Message], documents: Sequence[Passage | str] = (), **options: Any) -> Prompt:
        """A message list through the model's chat template; passages are content parts of type ``chunk``, or documents.

        Args:
            messages: ``{"role", "content"}`` each.
            documents: passages, texts or ``{"text", "title"}``; passed to the template, or, if it does not use them,
                placed before the last user message.
            **options: for the template, e.g. ``tools`` or ``enable_thinking``.

        Raises:
            InvalidInputError: as for `read`, or the template does not accept the messages.
        """
        if isinstance(messages, str) or not all(isinstance(message, dict) for message in messages):
            raise InvalidInputError('messages are a list of {"role": ..., "content": ...}')
        passages = [Passage.of(each) for each in _as_list(documents)]
        return self.read(self._needed_builder().chat(messages, passages, **options))

    def segments(self, chunks: Iterable[Passage | str | Segment]) -> list[Segment]:
        """Chunks of passages, texts, or token ids; a single text is one chunk.

        Raises:
            InvalidInputError: texts without a tokenizer, or a lone surrogate in a text or title.
        """
        return [self._segment(part, f"chunk {number}") for number, part in enumerate(_as_list(chunks), 1)]

    def check_stop(self, stop: Sequence[str]) -> None:
        """Raises `InvalidInputError` for stop texts that nobody could find."""
        if stop and self.builder is None:
            raise InvalidInputError("without a tokenizer the engine cannot find stop texts; use stop_token_ids")

    def _segment(self, part: Passage | str | Segment, where: str) -> Segment:
        if isinstance(part, Segment):
            check_encodable(part.label, f"{where}: the label")
            return chunk(part.token_ids, part.label)
        if self.builder is None:
            raise InvalidInputError("this engine has no tokenizer: pass chunks as segments of token ids")
        return self.builder.passage(Passage.of(part), where)

    def _needed_builder(self) -> PromptBuilder:
        if self.builder is None:
            raise InvalidInputError("this engine has no tokenizer: build the prompt from token ids")
        return self.builder


def _as_list(values: Any) -> list[Any]:
    """A list of what callers pass as one: a single text or passage is a list of it, None is empty."""
    if values is None:
        return []
    return [values] if isinstance(values, str | Passage | Segment) else list(values)
