"""From a request to a prompt of text and chunks.

chat         documents are chunks, and so are text parts of a message's content list and tool messages that are long
             enough; the last text of the last user message is the question, which is never stored
completions  chunks are given as spans of a prompt of token ids
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.prompt import Prompt, Segment, chunk, text
from cacheblend.engines.hf import BlendEngine, Passage
from cacheblend.serve.errors import ApiError
from cacheblend.serve.schemas import ChatRequest, CompletionRequest, Message
from cacheblend.serve.tools.requests import with_argument_objects

_TEMPLATE_OPTIONS = frozenset({"tools", "enable_thinking", "thinking", "reasoning_effort"})
"""The ``chat_template_kwargs`` that are passed to the template: others might replace it, or name files."""


class ParsedPrompt(NamedTuple):
    """A request's prompt.

    Attributes:
        prompt: the prompt.
        keep_text: whether text in front of its first chunk may be stored: not if it has the question.
        shown: special tokens that are part of the answer's text.
    """

    prompt: Prompt
    keep_text: bool
    shown: frozenset[int] = frozenset()


def chat_prompt(engine: BlendEngine, request: ChatRequest, chunk_tokens: int) -> ParsedPrompt:
    """The prompt of a chat request.

    Args:
        engine: whose chat template is used.
        request: checked by its schema.
        chunk_tokens: smallest number of tokens of a text that becomes a chunk of its own.

    Raises:
        InvalidInputError: the template rejects the messages, or the prompt is too long.
        ApiError: a part that is not text, or a template option that is not allowed.
    """
    question = max((i for i, m in enumerate(request.messages) if m.role == "user"), default=-1)
    messages = [
        _message(engine, message, chunk_tokens, is_last_user=number == question)
        for number, message in enumerate(request.messages)
    ]
    documents = [Passage(each.text, each.title) for each in request.documents or () if each.text]
    options: dict[str, Any] = dict(request.chat_template_kwargs or {})
    unknown = sorted(set(options) - _TEMPLATE_OPTIONS)
    if unknown:
        raise ApiError(400, f"chat_template_kwargs has {unknown[0]!r}; allowed are {sorted(_TEMPLATE_OPTIONS)}")
    if request.reasoning_effort is not None:
        options.setdefault("reasoning_effort", request.reasoning_effort)
    if request.tool_choice == "none":
        options.pop("tools", None)
    elif request.tools:
        options["tools"] = request.tools
    is_last = bool(documents) or any(_has_chunk(message) for message in messages[: question + 1])
    return ParsedPrompt(_rendered(engine, messages, documents, options), keep_text=is_last)


def _rendered(
    engine: BlendEngine, messages: list[dict[str, Any]], documents: list[Passage], options: dict[str, Any]
) -> Prompt:
    """The prompt; with the arguments of earlier calls as objects, or as texts where the template takes no objects."""
    as_objects = with_argument_objects(messages)
    try:
        return engine.chat_prompt(as_objects, documents, **options)
    except InvalidInputError:
        if as_objects == messages:
            raise
        try:
            return engine.chat_prompt(messages, documents, **options)
        except InvalidInputError:
            pass
        raise  # about the objects: most templates take them


def completion_prompt(engine: BlendEngine, request: CompletionRequest) -> ParsedPrompt:
    """The prompt of a completion request.

    Raises:
        InvalidInputError: the prompt is empty or too long.
        ApiError: token ids outside of the vocabulary, or spans that are not ascending spans of the prompt.
    """
    spans = request.cacheblend.chunks if request.cacheblend and request.cacheblend.chunks else []
    given = request.prompt
    if isinstance(given, list) and given and isinstance(given[0], str | list):
        given = given[0]
    if isinstance(given, str):
        if spans:
            raise ApiError(400, "chunks are spans of token ids: give the prompt as token ids", param="cacheblend")
        return ParsedPrompt(engine.prompt([given]), keep_text=False)
    ids = [token for token in given if isinstance(token, int)]
    if not ids:
        raise ApiError(400, "the prompt is empty", param="prompt")
    if min(ids) < 0 or max(ids) >= engine.survey.vocab_size:
        raise ApiError(400, f"token ids must be in 0..{engine.survey.vocab_size - 1}", param="prompt")
    return ParsedPrompt(engine.prompt(Prompt.of(_segments(ids, spans))), keep_text=True)


def _segments(ids: list[int], spans: Sequence[tuple[int, int]]) -> list[Segment]:
    segments, at = [], 0
    for start, stop in spans:
        if not at <= start < stop <= len(ids):
            raise ApiError(
                400,
                f"the span [{start}, {stop}) of a prompt of {len(ids)} tokens: spans lie in it, ascend and do not "
                "overlap",
                param="cacheblend",
            )
        segments += [text(ids[at:start]), chunk(ids[start:stop])]
        at = stop
    return [*segments, text(ids[at:])]


def _message(engine: BlendEngine, message: Message, chunk_tokens: int, *, is_last_user: bool) -> dict[str, Any]:
    """The message in the form of `PromptBuilder.chat`, where parts of type ``chunk`` are chunks."""
    extra = dict(message.model_extra or {})
    if not extra.get("tool_calls"):  # null and an empty list are no calls, which not every template knows
        extra.pop("tool_calls", None)
    content = message.content
    if content is None:  # a message with tool calls; some templates read the content without checking for None
        return {"role": message.role, "content": "", **extra}
    if isinstance(content, str):
        is_chunk = message.role == "tool" and _is_long(engine, content, chunk_tokens)
        return {"role": message.role, "content": [_part(content, is_chunk=is_chunk)] if is_chunk else content, **extra}
    parts = []
    for number, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise ApiError(400, f"a content part of type {part.type!r}: only text is read", param="messages")
        is_question = is_last_user and number == len(content) - 1
        parts.append(_part(part.text, is_chunk=not is_question and _is_long(engine, part.text, chunk_tokens)))
    return {"role": message.role, "content": parts, **extra}


def _has_chunk(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(part["type"] == "chunk" for part in content)


def _part(content: str, *, is_chunk: bool) -> dict[str, str]:
    return {"type": "chunk" if is_chunk else "text", "text": content}


def _is_long(engine: BlendEngine, content: str, tokens: int) -> bool:
    """Whether a text has at least so many tokens. A token has at least one byte and at most the characters of the
    longest one, so that few texts are tokenised for this."""
    if engine.builder is None or len(content.encode()) < tokens:
        return False
    if len(content) >= tokens * (engine.builder.longest_token + 1):
        return True
    return len(engine.builder.encode(content)) >= tokens
