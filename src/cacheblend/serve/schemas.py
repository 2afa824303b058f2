"""Schemas of requests. Wrong values are refused, and so are fields that nothing would come of (`fields`)."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    StringConstraints,
    model_validator,
)

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.documents import COLLECTION, LONGEST_ID
from cacheblend.engines.hf.grammar import Grammar, check_depth
from cacheblend.engines.hf.prefiller import Mode
from cacheblend.serve.errors import ApiError
from cacheblend.serve.fields import ACCEPTED, REFUSED, REFUSED_RESPONSES, Refused, check_fields

SEED_MAX = 2**63 - 1
Name = Annotated[str, StringConstraints(max_length=256)]
Count = Annotated[int, Field(ge=1, le=1 << 20)]
Ratio = Annotated[float, Field(ge=0, le=1)]
TokenIds = Annotated[list[StrictInt], Field(fail_fast=True)]  # one error per element could be longer than the body
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Schema = dict[str, Any] | bool
_Path = tuple[Any, str | int] | None
"""Where a value is in a body: the path of what contains it, and its key there; None: the body itself."""
_LONGEST_TOOL_NAME = 256


def check_unicode(body: Any) -> None:
    """Raises `ApiError` for a text of a body, keys included, that has a lone surrogate; it names where."""
    waiting: list[tuple[_Path, Any]] = [(None, body)]  # no recursion: a body may be nested deeply
    path: _Path
    while waiting:
        path, value = waiting.pop()
        try:
            if isinstance(value, str):
                value.encode()
            elif isinstance(value, dict):
                for key, inner in value.items():
                    str(key).encode()
                    waiting.append(((path, key), inner))
            elif isinstance(value, list):
                texts = (pair for pair in enumerate(value) if isinstance(pair[1], str | dict | list))
                waiting += [((path, index), inner) for index, inner in texts]
        except UnicodeEncodeError as error:
            keys: list[str] = []
            while path is not None:
                path, key = path
                keys.append(str(key))
            where, code = ".".join(reversed(keys)), ord(error.object[error.start])
            message = f"{where or 'the body'}: \\u{code:04x} is half of a surrogate pair and no character; remove it"
            raise ApiError(400, message, param=where or None) from None


class Closed(BaseModel):
    """An object that refuses fields that it does not have: one by one, or all of them by the first, if there are many.
    Each would be an error of its own, made on the server's loop: 260,000 take seconds and a gigabyte."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _has_few_unknown(cls, data: Any) -> Any:
        if cls.model_config.get("extra") == "forbid" and isinstance(data, dict):
            known = {*cls.model_fields} | {field.alias for field in cls.model_fields.values()}
            if len(data) > 2 * len(known):
                name = next(name for name in data if name not in known)
                raise ValueError(f"there is no field {name[:80]!r}")
        return data


class Body(Closed):
    """The body of a request; refuses text that is not valid Unicode, which no tokenizer and no answer can encode.
    `refused` and `accepted` as of `check_fields`; None: pydantic refuses unknown fields, or ignores them."""

    model_config = ConfigDict(extra="ignore")
    refused: ClassVar[Mapping[str, Refused] | None] = None
    accepted: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        if cls.refused is not None:
            check_fields(data, cls.model_fields, cls.refused, cls.accepted)
        check_unicode(data)
        return data


# ---- the form of an answer: OpenAI's response_format, its Responses' text, vLLM's structured_outputs ----

_JSON_OBJECT = Grammar("json_object")


def _without_null(cls: Any, data: Any) -> Any:
    return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class Form(Closed):
    """An object that says the form of an answer; null is "not said"."""

    _without_null = model_validator(mode="before")(_without_null)


class JsonSchema(Form):
    """The schema of a `ResponseFormat`. Nothing comes of the other fields; every answer has the schema's form."""

    schema_: Schema = Field(alias="schema")
    strict: bool = False
    name: Name = ""
    description: str = ""


class ResponseFormat(Form):
    """`response_format` of chats and completions."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_due(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("json_schema belongs to the type json_schema, which needs it")
        return self

    def grammar(self) -> Grammar | None:
        """The grammar; None: any text. Raises `InvalidInputError`."""
        if self.json_schema is not None:
            return grammar_of_schema(self.json_schema.schema_)
        return _JSON_OBJECT if self.type == "json_object" else None


class TextFormat(JsonSchema):
    """`format` of `TextOptions`: the fields of a schema beside its type."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: Schema | None = Field(alias="schema", default=None)  # type: ignore[assignment]

    @model_validator(mode="after")
    def _schema_where_due(self) -> Self:
        if (self.schema_ is not None) != (self.type == "json_schema"):
            raise ValueError("schema belongs to the type json_schema, which needs it")
        return self


class TextOptions(Form):
    """`text` of ``/v1/responses``; a `verbosity` other than the default is said in the prompt."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] = "medium"

    def grammar(self) -> Grammar | None:
        if self.format is None or self.format.type == "text":
            return None
        return _JSON_OBJECT if self.format.schema_ is None else grammar_of_schema(self.format.schema_)


class StructuredOutputs(Form):
    """vLLM's `structured_outputs`: one of its fields."""

    json_: Schema | str | None = Field(alias="json", default=None)
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=4096, fail_fast=True)] | None = None
    grammar_: str | None = Field(alias="grammar", default=None)
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        said = [name.rstrip("_") for name in type(self).model_fields if getattr(self, name) is not None]
        if len(said) != 1:
            raise ValueError(f"give one of json, regex, choice, grammar, json_object; got {', '.join(said) or 'none'}")
        return self

    def grammar(self) -> Grammar:
        if self.json_ is not None:
            is_text = isinstance(self.json_, str)
            return Grammar("json_schema", self.json_) if is_text else grammar_of_schema(self.json_)  # type: ignore
        if self.choice is not None:
            return Grammar.of_choices(self.choice)
        if self.regex is not None:
            return Grammar("regex", self.regex)
        return _JSON_OBJECT if self.grammar_ is None else Grammar("ebnf", self.grammar_)


def grammar_of_schema(schema: Schema) -> Grammar:
    """Raises `InvalidInputError`."""
    check_depth(schema)  # before it is written as JSON, which is recursive
    return Grammar.of_schema(schema)


def grammar_of(**said: ResponseFormat | TextOptions | StructuredOutputs | None) -> tuple[Grammar | None, str | None]:
    """The grammar that a request's fields say, and the field. Raises `ApiError` if several say one, or one is wrong."""
    found: tuple[Grammar | None, str | None] = None, None
    for name, form in said.items():
        try:
            grammar = None if form is None else form.grammar()
        except InvalidInputError as error:
            raise ApiError(400, f"{name}: {error}", param=name) from None
        if grammar is not None and found[0] is not None:
            raise ApiError(400, f"{found[1]} and {name} both say the form of the answer; give one", param=name)
        found = found if grammar is None else (grammar, name)
    return found


# ---- tools ----


def check_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Raises `ApiError`, with the place, for a tool that is no function, or asks for what is not done."""
    for number, tool in enumerate(tools):
        where = f"tools.{number}"
        if (kind := tool.get("type")) != "function":
            raise wrong_value(f"{where}.type", kind, 'must be "function"; other tools are not called')
        function = tool.get("function")
        if not isinstance(function, dict):
            raise wrong_value(f"{where}.function", function, "must be an object with a name")
        name = function.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_TOOL_NAME:
            raise wrong_value(f"{where}.function.name", name, f"must be a text of 1 to {_LONGEST_TOOL_NAME} characters")
        for key, kinds, what in (
            ("description", str, "a text"),
            ("parameters", dict, "a JSON schema, which is an object"),
            ("strict", bool, "true or false"),
        ):
            if (value := function.get(key)) is not None and not isinstance(value, kinds):
                raise wrong_value(f"{where}.function.{key}", value, f"must be {what}")
        if function.get("strict"):
            message = "is not supported: arguments are as the model writes them; leave it out and check them"
            raise wrong_value(f"{where}.function.strict", True, message)
    return tools


Tools = Annotated[list[dict[str, Any]], Field(fail_fast=True), AfterValidator(check_tools)]
ToolChoice = Literal["none", "auto"]


def wrong_value(where: str, value: Any, what: str) -> ApiError:
    """400 for a value within a list or object that no schema describes, with its place."""
    shown = value if isinstance(value, bool | int | float | str) or value is None else type(value).__name__
    return ApiError(400, f"{where} {what}; got {str(shown)[:80]!r}", param=where)


# ---- requests ----


class Extras(Closed):
    """The field ``cacheblend`` of a request. `recompute_ratio` and `selector` override the server's; another selector
    than the server's has its default settings. `salt`: chosen by the client; only requests with the same salt and key
    find the chunks stored under it. `conversation`: of this key and salt, whose earlier prompts this one may continue,
    edited. `chunks`: spans [start, stop) of a prompt that is given as token ids."""

    recompute_ratio: Ratio | None = None
    selector: Name | None = None
    salt: Name = ""
    conversation: Name = ""
    mode: Mode = "blend"
    chunks: Annotated[list[tuple[int, int]], Field(max_length=4096, fail_fast=True)] | None = None


class RequestDocument(Closed):
    """A passage that is passed to the chat template."""

    title: Name = ""
    text: Annotated[str, StringConstraints(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _check_form(cls, given: Any) -> Any:
        if not isinstance(given, dict):  # a plain text, as other APIs take it; of any length, so it is not shown
            raise ValueError('must be an object with "text", and "title" if it has one')
        return given


class ContentPart(BaseModel):
    """A part of a message's content; what becomes of further fields is in `prompts`."""

    model_config = ConfigDict(extra="allow")
    type: str
    text: str | None = None


class Message(BaseModel):
    """A message; further fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow")
    role: Name
    content: str | Annotated[list[ContentPart], Field(max_length=4096, fail_fast=True)] | None = None


class StreamOptions(Closed):
    """Options of a stream. `include_usage`: the last event has the usage, and no choice. `continuous_usage_stats`: with
    it, each event has the usage so far, as vLLM has it. `include_obfuscation`: events are not padded."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] | None = None


def _few(biases: Any) -> Any:
    if isinstance(biases, dict) and len(biases) > 1024:  # before each is looked at, as each could be two errors
        raise ValueError(f"it has {len(biases)} tokens; at most 1024 are taken")
    return biases


Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[dict[int, Bias], Field(max_length=1024), BeforeValidator(_few)]


class Sampling(Body):
    """Fields that all kinds of request have."""

    refused: ClassVar[Mapping[str, Refused]] = REFUSED
    accepted: ClassVar[Mapping[str, str]] = ACCEPTED

    _without_null = model_validator(mode="before")(_without_null)  # null is "not said", as OpenAI has it
    model: Name = ""
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 20)] | None = None
    min_p: Ratio | None = None
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
    lengths: ClassVar[tuple[str, ...]] = ("max_tokens",)
    """The fields that say how many tokens an answer has at most."""
    usual_tokens: ClassVar[float] = math.inf
    """Of an answer whose request does not say, unless the server's settings have fewer."""

    @property
    def wanted_tokens(self) -> int | None:
        """Tokens of an answer, at most; None: not said."""
        return next((value for name in self.lengths if (value := getattr(self, name)) is not None), None)

    @model_validator(mode="after")
    def _beside_others(self) -> Self:
        if (options := self.stream_options) is not None and "stream_options" not in self.refused:
            is_whole = options.include_usage or not options.continuous_usage_stats
            if not self.stream or not is_whole:
                needed = "continuous_usage_stats needs include_usage" if self.stream else "stream_options needs stream"
                raise ApiError(400, f"{needed}: true", param="stream_options")
        if self.cacheblend and self.cacheblend.chunks and len(getattr(self, "prompts", ())) != 1:
            message = "cacheblend.chunks are spans of the token ids of one prompt, which /v1/completions takes"
            raise ApiError(400, message, param="cacheblend.chunks")
        said = {name: value for name in self.lengths if (value := getattr(self, name)) is not None}
        if len(set(said.values())) > 1:
            raise ApiError(400, f"{' and '.join(said)} differ; give one", param=next(iter(said)))
        return self

    @property
    def may_call_tools(self) -> bool:
        return False

    def wanted_logprobs(self) -> int | None:
        """Number of most likely tokens to report with each token; None: no log-probabilities. Raises `ApiError`."""
        return None


class ChatRequest(Sampling):
    """``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    documents: Annotated[list[RequestDocument], Field(max_length=4096, fail_fast=True)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Name | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    lengths: ClassVar = ("max_tokens", "max_completion_tokens")

    @property
    def may_call_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    def wanted_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Sampling):
    """``/v1/completions``; a prompt, as text or token ids, or a list of them."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    usual_tokens: ClassVar = 16

    @property
    def prompts(self) -> list[Any]:
        given: Any = self.prompt
        return given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]

    def wanted_logprobs(self) -> int | None:
        return self.logprobs


class InputPart(Closed):
    """A part of an `InputMessage`; those that the server answered with have the last two fields."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = None
    logprobs: Any = None


class InputMessage(Closed):
    """A message of ``/v1/responses``; those that the server answered with have the last two fields."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputPart], Field(max_length=4096, fail_fast=True)]
    id: Any = None
    status: Any = None


class ResponsesRequest(Sampling):
    """``/v1/responses``: text in, text out."""

    refused: ClassVar[Mapping[str, Refused]] = REFUSED_RESPONSES
    input: str | Annotated[list[InputMessage], Field(min_length=1, max_length=4096, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: TextOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    lengths: ClassVar = ("max_output_tokens",)


class TokenizeRequest(Body):
    """``POST /tokenize``, as vLLM has it: a text or a chat."""

    refused: ClassVar[Mapping[str, Refused]] = {
        name: what for name, what in REFUSED.items() if name not in ("add_special_tokens", "tool_choice")
    }

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

    refused: ClassVar[Mapping[str, Refused]] = {}
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


class ErrorAnswer(BaseModel):
    """The body of an error, in the form that OpenAI's clients expect: `message`, `type`, `param` and `code`."""

    error: dict[str, str | None]
