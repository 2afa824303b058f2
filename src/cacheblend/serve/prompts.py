"""From a request to a prompt of text and chunks, and how long its texts may be.

chat         documents are chunks, and so are text parts of a message's content list and tool messages that are long
             enough; the last text of the last user message is the question, which is never stored
completions  chunks are given as spans of a prompt of token ids
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.prompt import Prompt, Segment, chunk, text
from cacheblend.engines.hf import BlendEngine, Passage
from cacheblend.engines.tokens.chat import strings_in
from cacheblend.serve.errors import ApiError
from cacheblend.serve.schemas import ChatRequest, Message, RequestDocument, wrong_value

_TEMPLATE_OPTIONS = frozenset({"tools", "enable_thinking", "thinking", "reasoning_effort"})
"""The ``chat_template_kwargs`` that are passed to the template: others might replace it, or name files."""
_SAYS_NOTHING = frozenset({"annotations", "cache_control", "prompt_cache_breakpoint", "tool_call_id"})
"""Fields of messages and parts that no template has to read: `with_results_in_order` reads the ids of calls."""
PARTS = 4096  # of all messages together
USUAL = 8  # characters of a token, usually: text with more is counted before it is tokenised as a whole
PIECE = 1 << 16  # characters that are counted at a time
CUT = 16  # tokens that a cut between two pieces may add
ESCAPED = 6  # bytes of a character in JSON at most: ``\u00e9``
BESIDE = 1 << 20  # bytes of a body for all that is not part of a text


class ParsedPrompt(NamedTuple):
    """A request's prompt."""

    prompt: Prompt
    keep_text: bool  # text in front of its first chunk may be stored: not if it has the question
    shown: frozenset[int] = frozenset()  # special tokens that are part of the answer's text


def chat_prompt(engine: BlendEngine, request: ChatRequest, chunk_tokens: int) -> ParsedPrompt:
    """The prompt of a chat request, where a text of at least `chunk_tokens` tokens is a chunk of its own. Raises
    `ApiError` for a part that is not text, calls of another form, or a template option that is not allowed, and
    `InvalidInputError` if the template rejects the messages, or the prompt is too long."""
    parts = sum(len(message.content) for message in request.messages if isinstance(message.content, list))
    if parts > PARTS:
        message = f"the messages have {parts:,} content parts; at most {PARTS:,} are read; join some"
        raise ApiError(400, message, param="messages")
    question = max((i for i, m in enumerate(request.messages) if m.role == "user"), default=-1)
    messages = [
        _message(engine, message, chunk_tokens, number, is_last_user=number == question)
        for number, message in enumerate(request.messages)
    ]
    documents = [Passage(each.text, each.title) for each in request.documents or ()]
    given = {name: value for name, value in (request.chat_template_kwargs or {}).items() if value is not None}
    said = {"reasoning_effort": request.reasoning_effort, "tools": request.tools or None}
    options: dict[str, Any] = given | {name: value for name, value in said.items() if value is not None}
    if request.tool_choice == "none":
        options.pop("tools", None)
    for name, value in options.items():
        param = name if said.get(name) else "chat_template_kwargs"
        if name not in _TEMPLATE_OPTIONS:
            message = f"{param} has {name[:80]!r}; allowed are {', '.join(sorted(_TEMPLATE_OPTIONS))}"
            raise ApiError(400, message, param=param)
        if given.get(name, value) != value:
            raise ApiError(400, f"{name} and chat_template_kwargs.{name} differ; give one", param=name)
        _check_read(engine, name, param)
    is_last = bool(documents) or any(
        part["type"] == "chunk"
        for message in messages[: question + 1]
        if isinstance(message["content"], list)
        for part in message["content"]
    )
    # The arguments of earlier calls are objects, or texts where the template takes no objects.
    as_objects = with_results_in_order(with_argument_objects(messages))
    messages = with_results_in_order(messages)
    try:
        prompt = engine.chat_prompt(as_objects, documents, **options)
    except InvalidInputError as error:  # about the objects: most templates take them
        if as_objects == messages:
            raise
        try:
            prompt = engine.chat_prompt(messages, documents, **options)
        except InvalidInputError:
            raise error from None
    return ParsedPrompt(prompt, keep_text=is_last)


def completion_prompt(
    engine: BlendEngine, given: str | list[int], spans: Sequence[tuple[int, int]], what: str
) -> ParsedPrompt:
    """A prompt of a completion request. Raises `ApiError` if it is empty, for ids outside of the vocabulary, or spans
    that are not ascending spans of it, and `InvalidInputError` if it is too long."""
    if not given:
        raise ApiError(400, f"{what} is empty", param="prompt")
    if isinstance(given, str):
        if spans:
            raise ApiError(400, "chunks are spans of token ids: give the prompt as token ids", param="cacheblend")
        return ParsedPrompt(engine.prompt([given]), keep_text=False)
    ids = given
    if min(ids) < 0 or max(ids) >= engine.runtime.survey.vocab_size:
        raise ApiError(400, f"{what}: token ids must be in 0..{engine.runtime.survey.vocab_size - 1}", param="prompt")
    segments, at = list[Segment](), 0
    for start, stop in spans:
        if not at <= start < stop <= len(ids):
            found = f"the span [{start}, {stop}) of a prompt of {len(ids)} tokens"
            raise ApiError(400, f"{found}: spans lie in it, ascend and do not overlap", param="cacheblend")
        segments += [text(ids[at:start]), chunk(ids[start:stop])]
        at = stop
    prompt = engine.prompt(Prompt.of([*segments, text(ids[at:])]))
    return ParsedPrompt(prompt, keep_text=True)


def _check_read(engine: BlendEngine, name: str, param: str) -> None:
    """Raises `ApiError` for what this model's chat template has no place for."""
    if engine.runtime.builder is not None and name not in engine.runtime.builder.source.words:
        message = (
            f"{param[:80]}: the model's chat template does not read {name[:80]!r}; leave it out, or say it as text"
        )
        raise ApiError(400, message, param=param, code="unsupported_field")


def _message(
    engine: BlendEngine, message: Message, chunk_tokens: int, at: int, *, is_last_user: bool
) -> dict[str, Any]:
    """The message in the form of `PromptBuilder.chat`, where parts of type ``chunk`` are chunks."""
    # Null and empty values say nothing, and not every template knows them.
    extra = {name: value for name, value in (message.model_extra or {}).items() if value not in (None, "", [], {})}
    for name in extra:
        if name not in _SAYS_NOTHING and (name != "name" or message.role not in ("tool", "function")):
            _check_read(engine, name, f"messages.{at}.{name}")
    # None beside tool calls: some templates read it without checking.
    content: Any = "" if message.content is None else message.content
    if isinstance(content, str):
        if message.role == "tool" and _is_long(engine, content, chunk_tokens):
            content = [{"type": "chunk", "text": content}]
        return {"role": message.role, "content": content, **extra}
    parts = []
    for number, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise ApiError(400, f"a content part of type {part.type[:80]!r}: only text is read", param="messages")
        for name, value in (part.model_extra or {}).items():
            if value is not None and name not in _SAYS_NOTHING:
                where = f"messages.{at}.content.{number}.{name[:80]}"
                raise ApiError(400, f"{where}: a part has type and text", param=where, code="unknown_field")
        is_question = is_last_user and number == len(content) - 1
        is_chunk = not is_question and _is_long(engine, part.text, chunk_tokens)
        parts.append({"type": "chunk" if is_chunk else "text", "text": part.text})
    return {"role": message.role, "content": parts, **extra}


def _is_long(engine: BlendEngine, content: str, tokens: int) -> bool:
    """Whether a text has at least so many tokens. A token has at least one byte and at most the characters of the
    longest one, so that few texts are tokenised for this."""
    if engine.runtime.builder is None or len(content.encode()) < tokens:
        return False
    if len(content) >= tokens * (engine.runtime.builder.longest_token + 1):
        return True
    return len(engine.runtime.builder.encode(content)) >= tokens


def with_argument_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the arguments of their calls as objects, which transformers' templates expect; clients send
    them as JSON. Copies what it changes; raises `ApiError`, with the place, for calls of another form."""
    changed = []
    for at, message in enumerate(messages):
        if "tool_calls" not in message:
            changed.append(message)
            continue
        where, calls, read = f"messages.{at}.tool_calls", message["tool_calls"], []
        if not isinstance(calls, list):
            raise wrong_value(where, calls, "must be a list of calls")
        for number, call in enumerate(calls):
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict):
                raise wrong_value(f"{where}.{number}", call, 'must be {"id", "type": "function", "function": {...}}')
            place = f"{where}.{number}.function"
            if not isinstance(function.get("name"), str):
                raise wrong_value(f"{place}.name", function.get("name"), "must be a text")
            given = function.get("arguments")
            try:
                arguments = json.loads(given or "{}") if given is None or isinstance(given, str) else given
            except (ValueError, RecursionError):
                arguments = None
            if not isinstance(arguments, dict):
                raise wrong_value(f"{place}.arguments", given, "must be a JSON object, as text")
            read.append({**call, "function": {**function, "arguments": arguments}})
        changed.append({**message, "tool_calls": read})
    return changed


def with_results_in_order(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, the results that follow calls in the order of these, as templates that show no ids expect; clients
    send them as they come. They stay as they are where a call or a result has no id. Raises `ApiError`, with the place,
    for a result of none of the calls."""
    ordered = list[dict[str, Any]]()
    for are_results, run in groupby(messages, lambda message: message["role"] == "tool"):
        found, calls = list(run), (ordered[-1].get("tool_calls") or () if are_results and ordered else ())
        places = {str(call["id"]): number for number, call in enumerate(calls) if call.get("id")}
        if calls and len(places) == len(calls):
            given = [message.get("tool_call_id") for message in found]
            for at, each in enumerate(given, len(ordered)):
                if each is not None and str(each) not in places:
                    what = f"must be the id of a call of messages.{len(ordered) - 1}"
                    raise wrong_value(f"messages.{at}.tool_call_id", each, what)
            if None not in given:
                found.sort(key=lambda message: places[str(message["tool_call_id"])])
        ordered += found
    return ordered


class TextLimit:
    """The longest texts that fit a model's context: what is too long is refused before it is tokenised. A token stands
    for at most as many characters as the tokenizer's longest one has. Long text within that bound is counted piece by
    piece, and refused at the piece with which it exceeds the context: tokenising 16 MB takes seconds and 1.5 GB."""

    def __init__(self, engine: BlendEngine, max_tokens: int | None = None) -> None:
        self._builder = engine.runtime.builder
        bounds = [bound for bound in (max_tokens, engine.runtime.survey.max_length) if bound is not None]
        self._tokens = min(bounds, default=0)
        self.characters: int | None = None  # of the longest text that may fit; None: there is no bound
        self.body_bytes: int | None = None  # of a body with such a text as JSON
        if bounds and engine.runtime.builder is not None:
            self.characters = self._tokens * (engine.runtime.builder.longest_token + 1)
            self.body_bytes = ESCAPED * self.characters + BESIDE

    def check(self, texts: Iterable[str], what: str = "the prompt") -> None:
        """Raises `ApiError` if texts together exceed the context for certain; others may, once they are tokenised."""
        found, most = list(texts), self._tokens
        length = sum(map(len, found))
        if self.characters is None or self._builder is None:
            return
        if length > self.characters:
            limit = f"{most:,} tokens are read at most, which are never more than {self.characters:,} characters"
            raise ApiError(400, f"{what} has {length:,} characters; {limit}; shorten it", code="too_long")
        if length <= USUAL * most:
            return
        tokens = characters = 0
        for parts in _pieces(found):
            joined = " ".join(parts)  # without it they would be one word, which takes long to tokenise
            tokens += max(0, self._builder.count(joined) - len(parts) - CUT)
            characters += sum(map(len, parts))
            if tokens > most:
                counted = f"{what} has more than {tokens:,} tokens in its first {characters:,} characters"
                raise ApiError(400, f"{counted}; {most:,} are read at most; shorten it", code="too_long")


def _pieces(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts of about `PIECE` characters together: long ones are cut, and short ones put together."""
    parts: list[str] = []
    length = 0
    for each in texts:
        for start in range(0, len(each), PIECE):
            parts.append(each[start : start + PIECE])
            length += len(parts[-1])
            if length >= PIECE:
                yield parts
                parts, length = [], 0
    if parts:
        yield parts


def texts_of_chat(messages: list[Message], documents: Iterable[RequestDocument] | None = None) -> Iterator[str]:
    """The texts of messages, of documents for them, and what is passed to the template with the messages."""
    for message in messages:
        content = message.content or ()
        yield from [content] if isinstance(content, str) else (part.text or "" for part in content)
    yield from (document.text for document in documents or ())
    yield from strings_in([message.model_extra for message in messages])
