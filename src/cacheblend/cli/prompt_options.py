"""Options of prompts, questions and answers that several commands share; see `options`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend.cli.options import MOST_SEED, MOST_TOKENS, OUTPUT, PROMPT

if TYPE_CHECKING:
    from cacheblend.core.plan.prompt import Prompt
    from cacheblend.data import QuestionRow
    from cacheblend.engines.hf import BlendEngine, SamplingParams

DATA_HELP = "Questions with passages: JSON or JSONL, formats as for --format."
Limit = Annotated[
    int | None,
    typer.Option("--limit", min=1, help="Use only the first so many rows or passages.", rich_help_panel=PROMPT),
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Use the model's chat template. Default: where the tokenizer has one.",
        rich_help_panel=PROMPT,
        show_default=False,
    ),
]
MaxTokens = Annotated[
    int,
    typer.Option("--max-tokens", "-n", min=1, max=MOST_TOKENS, help="Tokens of an answer.", rich_help_panel=OUTPUT),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--methods",
        "--arms",
        "-a",
        help="Methods to compare, with commas: full, prefix, reuse, blend, map-reduce, map-rerank. Default: the first "
        "four.",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class LayoutOptions:
    """What stands around the passages of a prompt."""

    system: Annotated[
        str | None, typer.Option("--system", help="System prompt, in front of the passages.", rich_help_panel=PROMPT)
    ] = None
    chat: Chat = None


@dataclass(frozen=True)
class PromptOptions(LayoutOptions):
    """One prompt: passages and a question."""

    question: Annotated[
        str | None,
        typer.Option("--question", "-q", help="Default: the one of --data's row.", rich_help_panel=PROMPT),
    ] = None
    passage: Annotated[
        list[str] | None,
        typer.Option("--passage", "-p", help="A passage, or @file. Several times, in order.", rich_help_panel=PROMPT),
    ] = None
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            "-d",
            help="Passages of a file, as for warm; rows as for evaluate bring their question.",
            rich_help_panel=PROMPT,
        ),
    ] = None
    row: Annotated[int, typer.Option("--row", min=0, help="Which row of --data, from 0.", rich_help_panel=PROMPT)] = 0

    def read(self) -> tuple[list[tuple[str, str]], str]:
        """The passages as (text, title), and the question.

        Raises:
            InvalidInputError: a file cannot be read, there is no such row, or no question.
        """
        from cacheblend.cli.prompts import read_inputs

        return read_inputs(self.question, self.passage or [], self.data, self.row)

    def build(self, engine: "BlendEngine", texts: Sequence[tuple[str, str]], question: str) -> "Prompt":
        """The prompt of what `read` returned.

        Raises:
            InvalidInputError: no prompt can be made of it.
        """
        from cacheblend.cli.prompts import build_prompt
        from cacheblend.engines.hf import Passage

        return build_prompt(engine, [Passage(*text) for text in texts], question, self.system, self.chat)


@dataclass(frozen=True)
class AnswerOptions:
    """How an answer is drawn."""

    max_tokens: MaxTokens = 256
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="0 is greedy.", rich_help_panel=OUTPUT)] = (
        0.0
    )
    seed: Annotated[
        int | None,
        typer.Option("--seed", min=0, max=MOST_SEED, help="Seed of the sampling.", rich_help_panel=OUTPUT),
    ] = None

    def params(self) -> "SamplingParams":
        """For an engine."""
        from cacheblend.engines.hf import SamplingParams

        return SamplingParams(max_new_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed)


@dataclass(frozen=True)
class QuestionOptions:
    """Questions with passages from files, and the layout of their prompts."""

    data: Annotated[
        list[Path] | None, typer.Option("--data", "-d", help=DATA_HELP, rich_help_panel=PROMPT, show_default=False)
    ] = None
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="auto, cacheblend, ctxs (the CacheBlend authors') or longbench; auto goes by the first row's fields.",
            rich_help_panel=PROMPT,
        ),
    ] = "auto"
    limit: Limit = None
    skip_bad: Annotated[
        bool,
        typer.Option(
            "--skip-bad",
            help="Leave out rows that cannot be used (no passages, an empty text, a wrong field) and count them. "
            "Default: the first one is an error.",
            rich_help_panel=PROMPT,
        ),
    ] = False
    chunk_tokens: Annotated[
        int,
        typer.Option(
            "--chunk-tokens",
            min=1,
            max=MOST_TOKENS,
            help="LongBench contexts: tokens of a passage at most, cut at sentence ends.",
            rich_help_panel=PROMPT,
        ),
    ] = 512
    template: Annotated[
        str, typer.Option("--template", help="Template of the prompts: bare, qa, summary.", rich_help_panel=PROMPT)
    ] = "bare"
    templates: Annotated[
        Path | None,
        typer.Option(
            "--templates", help="TOML file of prompt templates. Default: the shipped ones.", rich_help_panel=PROMPT
        ),
    ] = None
    chat: Chat = None

    @property
    def file(self) -> Path | None:
        """The file; None if none is given.

        Raises:
            InvalidInputError: there are several.
        """
        from cacheblend.core.errors import InvalidInputError

        if self.data and len(self.data) > 1:
            raise InvalidInputError(f"--data is given {len(self.data)} times; give one")
        return self.data[0] if self.data else None

    def read(self, file: Path) -> "tuple[list[QuestionRow], list[str]]":
        """The first rows of a file that can be used, at most `limit`, and the reasons for those that cannot.

        Raises:
            InvalidInputError: see `read_questions`.
        """
        from cacheblend.data import read_questions

        bad: list[str] = []
        rows = read_questions(file, self.form, bad=bad if self.skip_bad else None)
        return rows[: self.limit], bad
