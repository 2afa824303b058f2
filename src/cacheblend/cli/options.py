"""Options that several commands share, and what their values stand for. Importing this takes no engine along.

Defaults are `BlendConfig`'s; they are written out here because importing it takes a second, and a test compares them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from cacheblend.cli.option_groups import names_in, numbers, option, refuse_unused
from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.folders import model_folder
from cacheblend.engines.options import MOST_TOKENS as MOST_TOKENS
from cacheblend.engines.options import Shadow as Shadow

if TYPE_CHECKING:
    from cacheblend.core.plan.prompt import Prompt
    from cacheblend.data import QuestionRow
    from cacheblend.engines.hf import BlendEngine, SamplingParams
    from cacheblend.evaluation import Settings
    from cacheblend.evaluation.runner import Case

MODEL, PROMPT, BLENDING, OUTPUT = "Model", "Prompt", "Blending", "Output"
METHODS, SCORES = "Methods", "Scores"
MOST_SEED = (1 << 63) - 1

MODEL_OPTION: Any = typer.Option(
    "--model",
    "-m",
    help="Model folder (config.json, weights, tokenizer), or nano: the small model that ships.",
    rich_help_panel=MODEL,
    show_default=False,
)
SHAPE_OPTION: Any = typer.Option(
    "--shape",
    help="Random weights of a known shape: tiny, qwen2.5-0.5b, qwen2.5-1.5b, llama-3.2-1b or llama-3.1-8b.",
    rich_help_panel=MODEL,
)
OptionalModel = Annotated[Path | None, MODEL_OPTION]

AsJson = Annotated[bool, option(..., "Print one JSON object on stdout, nothing else.", panel=OUTPUT)]
JsonFile = Annotated[Path | None, option(..., "Write the whole result to this file as JSON.", panel=OUTPUT)]
Out = Annotated[Path, option(..., "Folder in which the folder of results is made.", "--out", "-o", panel=OUTPUT)]
MaxTokens = Annotated[int, option(..., "Tokens of an answer.", "-n", least=1, most=MOST_TOKENS, panel=OUTPUT)]
Seed = Annotated[int, option(..., "Seed of everything that is drawn at random.", least=0, most=MOST_SEED)]
Limit = Annotated[int | None, option(..., "Use only the first so many rows or passages.", least=1, panel=PROMPT)]
_CHAT = "Use the model's chat template. Default: where the tokenizer has one."
Chat = Annotated[bool | None, option(..., _CHAT, "--chat/--no-chat", panel=PROMPT)]
_TOP_K = "Only the first so many passages of a row; several times: each method at each. Default: all."
TopK = Annotated[list[int] | None, option(..., _TOP_K, least=1, panel=PROMPT)]
Scorers = Annotated[
    list[str] | None,
    option(..., "em, contains, f1, f1-tokens or rouge-l; several times. Default: em and f1.", panel=SCORES),
]
_ANSWERS = "gold: those of the rows; model: compare token by token over the model's own answer, too."
Answers = Annotated[str, option(..., _ANSWERS, panel=SCORES)]
Anchor = Annotated[
    str,
    option(..., "What precedes a chunk when it is computed alone: auto, none, bos, system or text.", panel=BLENDING),
]
AnchorText = Annotated[str | None, option(..., "The text of --anchor text. Default: one that ships.", panel=BLENDING)]
Codec = Annotated[str, option(..., "How stored passages are compressed: raw, fp8, int8, int4.", panel=BLENDING)]
SyncedTokens = Annotated[int, option(..., "Tokens of a document's chunk.", least=16, most=MOST_TOKENS, panel=BLENDING)]
OneRatio = Annotated[
    float, option(..., "Share of the loaded tokens to recompute.", "-r", least=0, most=1, panel=BLENDING)
]
Ratios = Annotated[
    list[str] | None,
    option(
        ...,
        "Share of the loaded tokens to recompute, 0..1; falling ones with commas for several --check-layers. Default: "
        "the model's profile, or 0.15. Commands that compare settings take it several times.",
        "-r",
        panel=BLENDING,
    ),
]


# ---- model and store ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceOptions:
    """How a model is loaded."""

    panel: ClassVar = MODEL
    dtype: str = option("auto", "auto (the folder's own), float32, bfloat16 or float16.")
    device: str | None = option(None, "cpu, cuda, cuda:1, ... Default: CUDA if present.")


@dataclass(frozen=True)
class ModelOptions:
    """The model folder of a command that always needs one."""

    model: Annotated[Path, MODEL_OPTION]


@dataclass(frozen=True)
class ModelOrShape:
    """A model folder, or random weights of a known shape."""

    model: OptionalModel = None
    shape: Annotated[str | None, SHAPE_OPTION] = None

    def chosen(self, default: str | None = None) -> "ModelOrShape":
        """The choice with `default` as the shape where the user named nothing, the model's folder resolved."""
        if self.model is not None and self.shape is not None:
            raise InvalidInputError("--model and --shape exclude each other; give one of the two")
        if self.model is None and self.shape is None:
            if default is None:
                raise InvalidInputError("name a model folder with --model, or a shape with --shape")
            return ModelOrShape(shape=default)
        return ModelOrShape(None if self.model is None else model_folder(self.model), self.shape)


@dataclass(frozen=True)
class StoreOptions:
    """Where KV is stored."""

    panel: ClassVar = MODEL
    store: str = option(
        ..., "A folder, memory, or a URL: file:///folder?max_bytes=200GiB&ram_bytes=4GiB, redis://..., s3://...", "-s"
    )


IN_MEMORY = StoreOptions("memory")  # the default of commands that need a store only while they run


# ---- how prompts are blended --------------------------------------------------------------------------------


@dataclass(frozen=True)
class SelectionOptions:
    """Which loaded rows are recomputed. What is not given is taken from the model's profile, or `BlendConfig`."""

    panel: ClassVar = BLENDING
    ratio: Ratios = None
    selector: str | None = option(
        None,
        "hkvd: rows whose KV deviates most; head: first rows of each passage; query: sentences that the question "
        "attends to; hybrid: both; or threshold, random, none, all. Default: the model's profile, or auto: head with "
        "corrected keys, or hkvd. Further settings follow a colon: query:pool=16,hops=1, or threshold:threshold=0.5.",
    )
    check_layers: str | None = option(
        None,
        "Layers before which deviation is measured: 1, or 1,2,3 with as many ratios. Default: the model's profile, or "
        "the selector's own: 1 to 4 with falling ratios for hkvd (gradual filtering), 1 for others.",
    )
    measure: Literal["kv", "k", "v"] | None = option(
        None, "kv, k or v: deviation over keys and values, or one of them. Default: the model's profile, or kv."
    )
    profile: Path | None = option(None, "The model's profile, where it is not blend-profile.json in its folder.")

    def settings(self) -> dict[str, Any]:
        """Fields of `BlendConfig` that the user set; the others are left to the model's profile."""
        from cacheblend.core.select.selection import SelectorChoice, unused_by

        settings = {} if self.selector is None else dict(SelectorChoice.parse(self.selector).settings)
        named = settings.get("selector", "hkvd")
        unused = {f"--{name.replace('_', '-')}": getattr(self, name) or None for name in sorted(unused_by(named))}
        refuse_unused(unused, f"with --selector {named}")
        settings |= {} if self.measure is None else {"measure": self.measure}
        if not (self.ratio or self.check_layers):
            return settings
        # One ratio for all check layers, or one for each; no layers: the selector's own.
        texts = self.ratio or ["0.15"]
        if len(texts) > 1:
            raise InvalidInputError(
                f"--ratio is given {len(texts)} times, this command takes one; several check layers' ratios are "
                f"written with commas: --ratio {','.join(texts)}"
            )
        ratios = numbers("--ratio", texts[0], float)
        layers = numbers("--check-layers", self.check_layers, int) if self.check_layers else ()
        if len(ratios) > 1 and named not in ("hkvd", "hybrid"):
            raise InvalidInputError(f"--ratio {texts[0]}: only hkvd and hybrid take several; {named} takes one")
        if len(ratios) > 1 and len(ratios) != len(layers):
            needed = f"{len(ratios)} ratios need as many --check-layers, got {len(layers)}"
            raise InvalidInputError(f"--ratio {texts[0]}: {needed}")
        settings |= {"recompute_ratio": ratios[-1]} | ({"check_layers": layers} if layers else {})
        return settings | ({"ratios": ratios} if len(ratios) > 1 else {})


@dataclass(frozen=True)
class PassageOptions:
    """How passages are computed and compressed, which changes answers."""

    panel: ClassVar = BLENDING
    anchor: Anchor = "auto"
    anchor_text: AnchorText = None
    codec: Codec = "raw"

    def settings(self) -> dict[str, Any]:
        """Fields of `BlendConfig`."""
        return {f.name: getattr(self, f.name) for f in fields(PassageOptions)}


@dataclass(frozen=True)
class ChunkOptions(PassageOptions):
    """How chunks are computed, cut and stored; part of the names of their blocks."""

    block_size: int = option(256, "Tokens of a block at most.", least=1, most=MOST_TOKENS)
    salt: str = option("", "Separates tenants who share a store.")

    def settings(self) -> dict[str, Any]:
        """Fields of `BlendConfig`."""
        return {f.name: getattr(self, f.name) for f in fields(ChunkOptions)}


@dataclass(frozen=True)
class BlendOptions(SelectionOptions, ChunkOptions):
    """Everything that a command which answers prompts lets a user set of blending."""

    cost_model: Path | None = option(None, "Cost model of `calibrate`: load only what is faster loaded than computed.")
    load_timeout: float | None = option(
        None,
        "Seconds that a request waits for the store; what comes later is computed. Without it: as long as computing "
        "takes, but half a second at least.",
    )
    capture: bool = option(True, "Store passages that were not in the store, after the answer.")
    discover: bool = option(True, "Reuse text that recurs in prompts, also where nothing marks it.")
    edits: bool = option(False, "Reuse what a conversation's earlier prompts computed behind an edit of its history.")

    def settings(self) -> dict[str, Any]:
        """Fields of `BlendConfig`: those that the user set, and those that no profile has."""
        file = None if self.cost_model is None else str(self.cost_model)
        chosen = SelectionOptions.settings(self) | ChunkOptions.settings(self)
        chosen |= {"cost_model": file, "load_timeout_s": self.load_timeout}
        return chosen | {"capture": self.capture, "discover": self.discover, "edits": self.edits}


@dataclass(frozen=True)
class MethodOptions:
    """The methods that are compared: blend stands for each combination of selectors, ratios and check layers."""

    panel: ClassVar = METHODS
    methods: list[str] | None = option(
        None,
        "Methods to compare, with commas: full, prefix, reuse, blend, map-reduce, map-rerank. Default: the first four.",
        "--methods",
        "--arms",
        "-a",
        panel=None,
    )
    selector: list[str] | None = option(
        None,
        "Selectors of blend, as for ask; profile: what serve takes for this model. Further settings follow a colon: "
        "hkvd:measure=v. Several times. Default: profile, or hkvd with --check-layers.",
    )
    ratio: Ratios = None
    check_layers: list[str] | None = option(
        None,
        "Check layers of blend: 1, or 1,2,3 with as many ratios; several times. Default: the selector's own, which are "
        "1 to 4 with falling ratios for hkvd (gradual filtering) and 1 for hybrid.",
    )

    def choices(self) -> dict[str, Any]:
        """Arguments of `make_methods`."""
        return {
            "names": names_in(self.methods) if self.methods else ("full", "prefix", "reuse", "blend"),
            "selectors": tuple(self.selector or ()),
            "ratios": [numbers("--ratio", text, float) for text in self.ratio or ()],
            "check_layers": [numbers("--check-layers", text, int) for text in self.check_layers or ()] or [None],
        }


# ---- prompts and answers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayoutOptions:
    """What stands around the passages of a prompt."""

    panel: ClassVar = PROMPT
    system: str | None = option(None, "System prompt, in front of the passages.")
    chat: Chat = None

    def given(self) -> dict[str, object]:
        """The options by their names, None where the user gave none."""
        return {"--system": self.system, "--chat": self.chat}

    def check_anchor(self, anchor: str) -> None:
        """Refuses what has no effect on passages that are stored alone behind this anchor."""
        if anchor != "system":
            refuse_unused(self.given(), "without --anchor system")

    def build(self, engine: "BlendEngine", texts: Sequence[tuple[str, str]], question: str) -> "Prompt":
        """The prompt; passages, as (text, title), are chunks, the text between them is plain."""
        from cacheblend.engines.hf import Passage
        from cacheblend.evaluation.templates import PromptLayout

        layout = PromptLayout(system=self.system or "", chat=self.chat)
        return layout.prompt(engine, [Passage(*text) for text in texts], question)


@dataclass(frozen=True)
class PromptOptions(LayoutOptions):
    """One prompt: passages and a question."""

    question: str | None = option(None, "Default: the one of --data's row.", "-q")
    passage: list[str] | None = option(None, "A passage, or @file. Several times, in order.", "-p")
    data: Path | None = option(
        None, "Passages of a file, as for warm; rows as for evaluate bring their question.", "-d"
    )
    row: int = option(0, "Which row of --data, from 0.", least=0)

    def read(self) -> tuple[list[tuple[str, str]], str]:
        """The passages as (text, title), those of the row first, and the question."""
        from cacheblend.data import read_row

        texts, question = [], self.question
        for argument in self.passage or ():
            if not argument.startswith("@"):
                texts.append((argument, ""))
                continue
            path = Path(argument[1:])
            try:
                texts.append((path.read_text(encoding="utf-8-sig").strip(), path.name))
            except (OSError, ValueError) as error:  # a name may also hold a NUL byte
                raise InvalidInputError(f"--passage {argument}: the file cannot be read: {error}") from error
        if self.data is not None:
            found = read_row(self.data, self.row)
            texts = [(text.text, text.title) for text in found.passages] + texts
            question = question or found.question
        elif self.row:
            refuse_unused({f"--row {self.row}": self.row}, "without --data")
        if not question:
            raise InvalidInputError("there is no question: give --question, or --data with a row that has one")
        return texts, question


@dataclass(frozen=True)
class AnswerOptions:
    """How an answer is drawn."""

    panel: ClassVar = OUTPUT
    max_tokens: MaxTokens = 256
    temperature: float = option(0.0, "0 is greedy.", least=0)
    seed: int | None = option(None, "Seed of the sampling.", least=0, most=MOST_SEED)

    def params(self) -> "SamplingParams":
        """For an engine."""
        from cacheblend.engines.hf import SamplingParams

        return SamplingParams(max_new_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed)


@dataclass(frozen=True)
class QuestionOptions:
    """Questions with passages from files, and the layout of their prompts."""

    panel: ClassVar = PROMPT
    data: list[Path] | None = option(None, "Questions with passages: JSON or JSONL, formats as for --format.", "-d")
    form: str = option(
        "auto",
        "auto, cacheblend, ctxs (the CacheBlend authors') or longbench; auto goes by the first row's fields.",
        "--format",
    )
    limit: Limit = None
    skip_bad: bool = option(
        False,
        "Leave out rows that cannot be used (no passages, an empty text, a wrong field) and count them. Default: the "
        "first one is an error.",
    )
    chunk_tokens: int = option(
        512, "LongBench contexts: tokens of a passage at most, cut at sentence ends.", least=1, most=MOST_TOKENS
    )
    template: str = option("bare", "Template of the prompts: bare, qa, summary.")
    templates: Path | None = option(None, "TOML file of prompt templates. Default: the shipped ones.")
    chat: Chat = None

    @property
    def file(self) -> Path | None:
        """The file; None if none is given."""
        if self.data and len(self.data) > 1:
            raise InvalidInputError(f"--data is given {len(self.data)} times; give one")
        return self.data[0] if self.data else None

    def read(self, file: Path) -> "tuple[list[QuestionRow], list[str], str]":
        """The first rows that can be used, at most `limit`; why others cannot; the SHA-256 of what was read."""
        from cacheblend.data import read_questions

        bad, digest = list[str](), sha256()
        skipped = bad if self.skip_bad else None
        rows = read_questions(file, self.form, bad=skipped, limit=self.limit, seen=digest.update)
        return rows, bad, digest.hexdigest()

    def settings(self, top_k: Sequence[int] | None, tokens: int) -> "Settings":
        """Settings of an evaluation, with so many tokens of an answer."""
        from dataclasses import replace

        from cacheblend.evaluation import Settings, read_template

        chosen = read_template(self.template, self.templates)
        if self.chat is not None:
            chosen = replace(chosen, chat=self.chat)
        return Settings(chosen, tuple(dict.fromkeys(top_k)) if top_k else (None,), tokens)

    def cases(
        self, engine: "BlendEngine", rows: "Sequence[QuestionRow]", settings: "Settings", bad: list[str]
    ) -> "list[Case]":
        """The rows with their prompts, LongBench contexts cut into passages; with ``--skip-bad`` without those noted in
        `bad`. Raises `BadRowError`: a row that makes no valid prompt."""
        from cacheblend.data.questions import split_contexts
        from cacheblend.evaluation import make_cases

        builder = engine.runtime.builder
        assert builder is not None  # a model folder is opened with its tokenizer
        split = split_contexts(rows, lambda text: len(builder.encode(text)), self.chunk_tokens)
        return make_cases(engine, settings, split, bad if self.skip_bad else None)
