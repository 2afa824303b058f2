"""Schemas of requests. Wrong values are refused, and so are fields that nothing would come of (`fields`)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StringConstraints, field_validator, model_validator

from cacheblend.engines.documents import COLLECTION, LONGEST_ID
from cacheblend.engines.hf.prefiller import Mode
from cacheblend.serve.errors import ApiError
from cacheblend.serve.fields import REFUSED, REFUSED_RESPONSES, Biases, Closed, Refused, check_fields
from cacheblend.serve.forms import ResponseFormat, StructuredOutputs, TextOptions
from cacheblend.serve.tools.requests import ToolChoice, Tools

_Path = tuple[Any, str | int] | None
"""Where a value is in a body: the path of what contains it, and its key there; None: the body itself."""


def check_unicode(body: Any) -> None:
    """Looks at all texts of a body, keys included.

    Raises:
        ApiError: 400, one has a lone surrogate; names where.
    """
    waiting: list[tuple[_Path, Any]] = [(None, body)]  # no recursion: a body may be nested deeply
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


SEED_MAX = 2**63 - 1
Name = Annotated[str, StringConstraints(max_length=256)]
TokenIds = Annotated[list[StrictInt], Field(fail_fast=True)]  # one error per element could be longer than the body
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class Body(Closed):
    """The body of a request; refuses text that is not valid Unicode, which no tokenizer and no answer can encode.

    Raises:
        ApiError: some text, a key included, has a lone surrogate (JSON can write one, e.g. ``"\\ud800"``).
    """

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _check_unicode(cls, data: Any) -> Any:
        check_unicode(data)
        return data


class Extras(Closed):
    """The field ``cacheblend`` of a request.

    Attributes:
        recompute_ratio: overrides the server's ratio.
        selector: overrides the server's selector; another one than the server's has its default settings.
        salt: chosen by the client; only requests with the same salt and key find the chunks stored under it.
        mode: see `Mode`.
        chunks: spans [start, stop) of a prompt that is given as token ids.
    """

    recompute_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    selector: Name | None = None
    salt: Name = ""
    mode: Mode = "blend"
    chunks: Annotated[list[tuple[int, int]], Field(max_length=4096, fail_fast=True)] | None = None


class RequestDocument(Closed):
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


class StreamOptions(Closed):
    """Options of a stream.

    Attributes:
        include_usage: the last event has the usage, and no choice.
        continuous_usage_stats: with it, each event has the usage so far, as vLLM has it.
        include_obfuscation: events are not padded.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] | None = None


class Sampling(Body):
    """Fields that all kinds of request have.

    Attributes:
        refused: fields that nothing would come of.
    """

    model_config = ConfigDict(extra="ignore")
    refused: ClassVar[Mapping[str, Refused]] = REFUSED

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, data: Any) -> Any:
        check_fields(data, cls.model_fields, cls.refused)
        if isinstance(data, dict):  # null is "not said", as OpenAI has it
            data = {name: value for name, value in data.items() if value is not None}
        return data

    model: Name = ""
    max_tokens: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 20)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Biases | None = None
    bad_words: Annotated[list[Stop], Field(max_length=256, fail_fast=True)] | None = None
    seed: Annotated[int, Field(ge=-SEED_MAX, le=SEED_MAX)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=256)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    ignore_eos: bool = False
    structured_outputs: StructuredOutputs | None = None
    cache_salt: Name | None = None
    n: Annotated[int, Field(ge=1)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    cacheblend: Extras | None = None

    @property
    def wanted_tokens(self) -> int | None:
        """Tokens of an answer, at most; None: not said."""
        return self.max_tokens

    @property
    def may_call_tools(self) -> bool:
        """Whether the answer may call tools."""
        return False

    def wanted_logprobs(self) -> int | None:
        """Number of most likely tokens to report with each token; None: no log-probabilities. Raises `ApiError`."""
        return None


class ChatRequest(Sampling):
    """``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    documents: Annotated[list[RequestDocument], Field(max_length=4096, fail_fast=True)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Name | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wanted_tokens(self) -> int | None:
        """See `Sampling`."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def may_call_tools(self) -> bool:
        """See `Sampling`."""
        return bool(self.tools) and self.tool_choice != "none"

    def wanted_logprobs(self) -> int | None:
        """See `Sampling`."""
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Sampling):
    """``/v1/completions``; one prompt, as text or token ids, or a list of one."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=1)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _is_one(cls, prompt: Any) -> Any:
        if isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list):
            message = f"prompt has {len(prompt):,} prompts; one is answered in a request: send several"
            raise ApiError(400, message, param="prompt")
        return prompt

    def wanted_logprobs(self) -> int | None:
        """See `Sampling`."""
        return self.logprobs


class InputPart(BaseModel):
    """A part of an `InputMessage`."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputMessage(BaseModel):
    """A message of ``/v1/responses``; those that the server answered with have further fields."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputPart], Field(max_length=4096, fail_fast=True)]


class ResponsesRequest(Sampling):
    """``/v1/responses``: text in, text out."""

    refused: ClassVar[Mapping[str, Refused]] = REFUSED_RESPONSES
    input: str | Annotated[list[InputMessage], Field(min_length=1, max_length=4096, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    text: TextOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wanted_tokens(self) -> int | None:
        """See `Sampling`."""
        return self.max_output_tokens


class TokenizeRequest(Body):
    """``POST /tokenize``, as vLLM has it: a text or a chat."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, data: Any) -> Any:
        known = cls.model_fields
        check_fields(data, known, {name: refused for name, refused in REFUSED.items() if name not in known}, {})
        return data

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self

    model: Name = ""
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)] | None = None
    documents: Annotated[list[RequestDocument], Field(max_length=4096, fail_fast=True)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """``POST /detokenize``, as vLLM has it."""

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, data: Any) -> Any:
        check_fields(data, cls.model_fields, {}, {})
        return data

    model: Name = ""
    tokens: TokenIds


class ChunkText(Closed):
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

    model_config = ConfigDict(extra="forbid")
    chunks: Annotated[list[ChunkText], Field(min_length=1, max_length=4096, fail_fast=True)]
    pin: bool = False
    salt: Name = ""


class DocumentText(Closed):
    """A document to store: with the same id it is the same document."""

    id: Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_ID)]
    text: str
    title: Name = ""


class DocumentsRequest(Body):
    """``POST /v1/documents``."""

    model_config = ConfigDict(extra="forbid")
    documents: Annotated[list[DocumentText], Field(min_length=1, max_length=4096, fail_fast=True)]
    collection: Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_ID)] = COLLECTION
    salt: Name = ""
    chunk_tokens: Annotated[int, Field(ge=2, le=1 << 20)] = 512


class ErrorDetail(BaseModel):
    """The field ``error`` of an `ErrorAnswer`."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of an error, in the form that OpenAI's clients expect."""

    error: ErrorDetail
