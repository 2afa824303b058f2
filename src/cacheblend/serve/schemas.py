"""Schemas of requests. Unknown fields are ignored, as OpenAI's clients expect; wrong values are refused."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from cacheblend.engines.hf.prefiller import Mode
from cacheblend.serve.errors import ApiError

SEED_MAX = 2**63 - 1
Name = Annotated[str, StringConstraints(max_length=256)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]  # one error per element could be longer than the body
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class Body(BaseModel):
    """The body of a request; refuses text that is not valid Unicode, which no tokenizer and no answer can encode.

    Raises:
        ApiError: some text, a key included, has a lone surrogate (JSON can write one, e.g. ``"\\ud800"``).
    """

    @model_validator(mode="before")
    @classmethod
    def _check_unicode(cls, data: Any) -> Any:
        waiting: list[tuple[_Path, Any]] = [(None, data)]  # no recursion: a body may be nested deeply
        while waiting:
            path, value = waiting.pop()
            if isinstance(value, str):
                _check_text(path, value)
            elif isinstance(value, dict):
                for key, inner in value.items():
                    _check_text(path, str(key))
                    waiting.append(((path, key), inner))
            elif isinstance(value, list):
                texts = (pair for pair in enumerate(value) if isinstance(pair[1], str | dict | list))
                waiting += [((path, index), inner) for index, inner in texts]
        return data


_Path = tuple[Any, str | int] | None
"""Where a value is in a body: the path of what contains it, and its key there; None: the body itself."""


def _check_text(path: _Path, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        keys: list[str] = []
        while path is not None:
            path, key = path
            keys.append(str(key))
        where, code = ".".join(reversed(keys)), ord(value[error.start])
        message = f"{where or 'the body'}: \\u{code:04x} is half of a surrogate pair and no character; remove it"
        raise ApiError(400, message, param=where or None) from None


class Extras(BaseModel):
    """The field ``cacheblend`` of a request.

    Attributes:
        recompute_ratio: overrides the server's ratio.
        selector: overrides the server's selector; uses the selector's default settings.
        salt: chosen by the client; only requests with the same salt and key find the chunks stored under it.
        mode: see `Mode`.
        chunks: spans [start, stop) of a prompt that is given as token ids.
    """

    model_config = ConfigDict(extra="forbid")
    recompute_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    selector: Name | None = None
    salt: Name = ""
    mode: Mode = "blend"
    chunks: Annotated[list[tuple[int, int]], Field(max_length=4096, fail_fast=True)] | None = None


class Document(BaseModel):
    """A passage that is passed to the chat template."""

    title: Name = ""
    text: str


class ContentPart(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(extra="ignore")
    type: str
    text: str | None = None


class Message(BaseModel):
    """A message; further fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow")
    role: Name
    content: str | Annotated[list[ContentPart], Field(max_length=4096, fail_fast=True)] | None = None


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: bool = False


class Sampling(Body):
    """Fields that both kinds of request have."""

    model_config = ConfigDict(extra="ignore")
    model: Name = ""
    max_tokens: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 20)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-SEED_MAX, le=SEED_MAX)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = None
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    cacheblend: Extras | None = None


class ChatRequest(Sampling):
    """``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    documents: Annotated[list[Document], Field(max_length=4096, fail_fast=True)] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(Sampling):
    """``/v1/completions``; one prompt, as text or token ids."""

    prompt: str | TokenIds | Annotated[list[str], Field(min_length=1, max_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] = False


class ChunkText(BaseModel):
    """A chunk to store: a text, or token ids exactly as they will occur in prompts."""

    text: Annotated[str, StringConstraints(min_length=1)] | None = None
    token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    title: Name = ""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.text is None) == (self.token_ids is None):
            raise ValueError("give either text or token_ids")
        return self


class WarmRequest(Body):
    """``POST /v1/chunks``."""

    chunks: Annotated[list[ChunkText], Field(min_length=1, max_length=4096, fail_fast=True)]
    pin: bool = False
    salt: Name = ""


class ErrorDetail(BaseModel):
    """The field ``error`` of an `ErrorAnswer`."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of an error, in the form that OpenAI's clients expect."""

    error: ErrorDetail
