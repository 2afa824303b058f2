"""From what a caller passes to an engine to a checked prompt."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cacheblend.core.errors import InvalidInputError, check_encodable, shown
from cacheblend.core.plan.prompt import Prompt, Segment, chunk
from cacheblend.engines.hf.survey import Survey
from cacheblend.engines.tokens import Content, Message, Passage, PromptBuilder, find_sentence_end_ids

PassageLike = Passage | str | Mapping[str, Any] | Any
"""What `Passage.of` makes a passage of: a dict with a ``text``, documents of LangChain, LlamaIndex and Haystack."""

PromptLike = Prompt | str | Sequence[PassageLike] | Sequence[Message]
"""A prompt of token ids, a text, texts and passages in order, or a message list for the chat template."""


class PromptReader:
    """Makes prompts for one model, whose limits every prompt is checked against. Without a `tokenizer` prompts and
    chunks are token ids only, and there is no `builder`. `sentence_end_ids`: None: the tokenizer says it."""

    def __init__(self, tokenizer: Any, survey: Survey, sentence_end_ids: Sequence[int] | None = None) -> None:
        self.builder = None if tokenizer is None else PromptBuilder(tokenizer)
        self._tokenizer, self._survey = tokenizer, survey
        self._sentence_end_ids = None if sentence_end_ids is None else np.array(sentence_end_ids, dtype=np.int64)

    def sentence_end_ids(self) -> npt.NDArray[np.int64] | None:
        if self._sentence_end_ids is None and self._tokenizer is not None:
            self._sentence_end_ids = find_sentence_end_ids(self._tokenizer)
        return self._sentence_end_ids

    def read(self, parts: PromptLike, *, is_one: bool = True) -> Prompt:
        """A prompt of `parts`, as `BlendEngine.prompt` takes them. `is_one`: several texts without a passage are one
        prompt; False: they may as well be several prompts, and are refused."""
        if not isinstance(parts, Prompt):
            builder = self._needed_builder()
            if _is_message(parts):
                raise InvalidInputError(f"a message list has the messages in a list, [message], got {shown(parts)}")
            is_list = isinstance(parts, Iterable) and not isinstance(parts, Mapping | bytes)
            if not is_list and not Passage.is_like(parts):
                raise InvalidInputError(
                    f"a prompt is a text, a list of texts and passages, a message list or a Prompt, got {shown(parts)}"
                )
            given: list[Any] = [parts] if Passage.is_like(parts) else list(parts)
            if given and all(_is_message(part) for part in given):
                parts = builder.chat(_messages(given))
            else:
                contents = [_content(part, f"part {number} of the prompt") for number, part in enumerate(given, 1)]
                if not is_one and len(contents) > 1 and all(isinstance(part, str) for part in contents):
                    raise InvalidInputError(
                        f"a list of {len(contents)} texts without a passage may be one prompt or several: pass it to "
                        "generate_batch for an answer to each, or to engine.prompt for one prompt of all"
                    )
                parts = builder.prompt(contents)
        parts.check(self._survey.vocab_size, self._survey.max_length, self._survey.max_length_reason)
        return parts

    def chat(self, messages: Sequence[Message], documents: Sequence[PassageLike] = (), **options: Any) -> Prompt:
        """A message list through the model's chat template; passages are content parts of type ``chunk``, or documents.
        A message is ``{"role", "content"}``; its content is a text, or a list of parts, ``{"type": "text" or "chunk",
        "text"}``, texts, or whatever else `Passage.of` takes. Documents, in such a form too, go to the template, or, if
        it does not use them, before the last user message; options are the template's, e.g. ``tools``. Raises as
        `read`, or where the template does not accept the messages."""
        passages = [Passage.of(each, f"document {number}") for number, each in enumerate(_as_list(documents), 1)]
        return self.read(self._needed_builder().chat(_messages(messages), passages, **options))

    def segments(self, chunks: Iterable[PassageLike | Segment]) -> list[Segment]:
        """Chunks of passages, texts, or token ids; a single one is a list of it."""
        found = []
        for number, part in enumerate(_as_list(chunks), 1):
            where = f"chunk {number}"
            if isinstance(part, Segment):
                check_encodable(part.label, f"{where}: the label")
                found.append(chunk(part.stored_ids, part.label))  # of a part, the whole chunk is what is stored
            elif self.builder is None:
                raise InvalidInputError("this engine has no tokenizer: pass chunks as segments of token ids")
            else:
                found.append(self.builder.passage(Passage.of(part, where), where))
        return found

    def _needed_builder(self) -> PromptBuilder:
        if self.builder is None:
            raise InvalidInputError("this engine has no tokenizer: build the prompt from token ids")
        return self.builder


def _as_list(values: Any) -> list[Any]:
    """A list of what callers pass as one: a single passage in any form is a list of it, None is empty."""
    if values is None:
        return []
    if isinstance(values, Segment) or Passage.is_like(values):
        return [values]
    if isinstance(values, Mapping | bytes) or not isinstance(values, Iterable):
        Passage.of(values)  # says what a passage is
    return list(values)


def _content(part: object, where: str) -> Content:
    if isinstance(part, str):
        return part
    if isinstance(part, Segment | int | np.integer) or hasattr(part, "dtype"):
        raise InvalidInputError(
            f"{where} is {shown(part)}: a prompt of token ids is Prompt.of([text(ids), chunk(ids)]) and has no texts"
        )
    return Passage.of(part, where)


def _is_message(part: object) -> bool:
    return isinstance(part, Mapping) and "role" in part


def _messages(messages: Any) -> list[Message]:
    wanted = 'messages are a list of {"role": ..., "content": ...}'
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise InvalidInputError(f"{wanted}, got {shown(messages)}")
    given = list(messages)
    if given and all(isinstance(each, list | tuple) for each in given):
        raise InvalidInputError(f"{wanted}, got {len(given)} lists: make a prompt of each, for generate_batch")
    read: list[Message] = []
    for number, message in enumerate(given, 1):
        where = f"message {number}"
        if not isinstance(message, Mapping):
            raise InvalidInputError(f"{wanted}, {where} is {shown(message)}")
        if not isinstance(message.get("role"), str):
            raise InvalidInputError(f"{where} has no role, user, assistant or system: {shown(message)}")
        if len(message) == 1:
            raise InvalidInputError(f"{where} has no content: {shown(message)}")
        content = message.get("content")
        if isinstance(content, list | tuple):
            read.append({**message, "content": [_content_part(part) for part in content]})
        elif content is None or isinstance(content, str):
            read.append(dict(message))
        else:
            raise InvalidInputError(f"the content of {where} must be a text or a list of parts, got {shown(content)}")
    return read


def _content_part(part: object) -> object:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    has_type = isinstance(part, Mapping) and "type" in part and "page_content" not in part
    if has_type or not Passage.is_like(part):
        return part
    passage = Passage.of(part)
    return {"type": "chunk", "text": passage.text, "title": passage.title}
