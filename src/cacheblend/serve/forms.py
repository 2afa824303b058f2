"""The form that a request wants its answer in: OpenAI's `response_format`, its Responses' `text`, vLLM's own field."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.hf.grammar import Grammar, check_depth
from cacheblend.serve.errors import ApiError
from cacheblend.serve.fields import Closed

Name = Annotated[str, StringConstraints(max_length=256)]
Schema = dict[str, Any] | bool
_JSON_OBJECT = Grammar("json_object")


class Form(Closed):
    """An object that says a form; null is "not said", and a field that it does not have is refused."""

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class JsonSchema(Form):
    """The schema of a `ResponseFormat`.

    Attributes:
        schema_: the schema; ``schema`` in JSON.
        strict: nothing comes of it: every answer has the schema's form.
        name, description: nothing comes of them.
    """

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
        """See `ResponseFormat`."""
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
        """See `ResponseFormat`."""
        if self.json_ is not None:
            is_text = isinstance(self.json_, str)
            return Grammar("json_schema", self.json_) if is_text else grammar_of_schema(self.json_)  # type: ignore
        if self.choice is not None:
            return Grammar.of_choices(self.choice)
        if self.regex is not None:
            return Grammar("regex", self.regex)
        return _JSON_OBJECT if self.grammar_ is None else Grammar("ebnf", self.grammar_)


def grammar_of_schema(schema: Schema) -> Grammar:
    """The grammar of a schema. Raises `InvalidInputError`."""
    check_depth(schema)  # before it is written as JSON, which is recursive
    return Grammar.of_schema(schema)


def grammar_of(**said: ResponseFormat | TextOptions | StructuredOutputs | None) -> tuple[Grammar | None, str | None]:
    """The grammar that a request's fields say, and the field.

    Raises:
        ApiError: several say one, or one is wrong.
    """
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
