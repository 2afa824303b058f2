"""What clients send. Fields that are not known are ignored, as OpenAI's clients expect; wrong values are refused."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from cacheblend.engines.hf.prefiller import Mode

SEED_MAX = 2**63 - 1
Name = Annotated[str, StringConstraints(max_length=256)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]  # lists may be long, and a body's errors longer than the body
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class Extras(BaseModel):
    """The key ``cacheblend`` of a request.

    Attributes:
        recompute_ratio: overrides the server's.
        selector: overrides the server's; with its own default settings.
        salt: of the client; only requests of the same salt (and key) find what is stored under it.
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
    """A passage that is handed to the chat template."""

    title: Name = ""
    text: str


class ContentPart(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(extra="ignore")
    type: str
    text: str | None = None


class Message(BaseModel):
    """A message; fields that a chat template may read go on to it."""

    model_config = ConfigDict(extra="allow")
    role: Name
    content: str | Annotated[list[ContentPart], Field(max_length=4096, fail_fast=True)] | None = None


class StreamOptions(BaseModel):
    """What a stream tells besides."""

    include_usage: bool = False


class Sampling(BaseModel):
    """What both kinds of request have."""

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
    """What is to be stored: a text, or token ids as a prompt of ids will have them."""

    text: Annotated[str, StringConstraints(min_length=1)] | None = None
    token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    title: Name = ""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.text is None) == (self.token_ids is None):
            raise ValueError("give either text or token_ids")
        return self


class WarmRequest(BaseModel):
    """``POST /v1/chunks``."""

    chunks: Annotated[list[ChunkText], Field(min_length=1, max_length=4096, fail_fast=True)]
    pin: bool = False
    salt: Name = ""


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of an error, as OpenAI's clients know it."""

    error: ErrorDetail
