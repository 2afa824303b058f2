"""What is measured, and how: frozen dataclasses whose fields are options (see `cacheblend.cli.option_groups`).

Benchmarks take them as they are. Imports nothing that takes long, since every command's help needs it.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from cacheblend.cli.bench import HOW, MOST_CHUNKS, WHAT, ChunkTokens, PromptSizeOptions, RoundOptions
from cacheblend.cli.options import MOST_SEED, MOST_TOKENS, SHAPE_OPTION, ModelOrShape, OneRatio, Shadow

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DEFAULT_SHAPE = "qwen2.5-0.5b"


def count(name: str, text: str, least: float = 1, most: float | None = 10_000, panel: str | None = WHAT) -> Any:
    """An option that is a number."""
    return typer.Option(name, min=least, max=most, help=text, rich_help_panel=panel)


def several(name: str, text: str, least: float | None = None, most: float | None = None, panel: str = WHAT) -> Any:
    """An option that may be given several times."""
    return typer.Option(name, min=least, max=most, help=text, rich_help_panel=panel, show_default=False)


def named(name: str, text: str, panel: str | None = WHAT) -> Any:
    """An option that is a text, a file or a switch."""
    return typer.Option(name, help=text, rich_help_panel=panel)


def needed(*names: str, text: str, panel: str | None = WHAT) -> Any:
    """An option that has to be given."""
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False)


def seeded(text: str = "Seed of all that is drawn.") -> Any:
    """The option ``--seed``."""
    return count("--seed", text, 0, MOST_SEED, HOW)


Requests = Annotated[int, count("--requests", "Requests replayed.", most=1_000_000)]
Clients = Annotated[int, count("--clients", "Requests under way at once.", panel=HOW)]
Discover = Annotated[bool, named("--discover", "Also replay a trace with nothing marked.")]
ReplayedTrace = Annotated[Path, needed("--trace", text="Folder of a RAGPulse trace.")]


@dataclass(frozen=True)
class PromptShape:
    """A prompt: plain text that no cache holds, stored chunks in shuffled order, a question; all in tokens."""

    chunks: int = 8
    chunk_tokens: int = 512
    question_tokens: int = 32
    plain_tokens: int = 32

    @property
    def tokens(self) -> int:
        """Length of a prompt."""
        return self.plain_tokens + self.chunks * self.chunk_tokens + self.question_tokens


@dataclass(frozen=True)
class ModelSettings(ModelOrShape):
    """A model folder, or random weights of a known shape; `DEFAULT_SHAPE` where neither is given."""

    def resolved(self) -> Self:
        """With the folder that a model's name stands for, or the default."""
        chosen = self.chosen(DEFAULT_SHAPE)
        return replace(self, model=chosen.model, shape=chosen.shape)

    @property
    def called(self) -> str:
        """What a result names it."""
        return str(self.model or self.shape)

    @property
    def config(self) -> "PretrainedConfig":
        """Of the model; `InvalidInputError`: an unknown shape."""
        from cacheblend.engines.hf.shapes import config_of

        return config_of(None if self.model is None else str(self.model), self.shape)

    def described(self, **more: Any) -> dict[str, Any]:
        """As a result has it: its own settings, and those of its prompts by themselves."""
        sizes = [field.name for field in fields(PromptSizeOptions)]
        own = {name: value for name, value in vars(self).items() if name not in sizes}
        prompt = PromptShape(**{name: getattr(self, name) for name in sizes if hasattr(self, name)})
        return own | {"model": self.model and str(self.model), "prompt": vars(prompt)} | more


# ---- servers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Serving(RoundOptions, PromptSizeOptions, ModelSettings):
    """`lab serve`."""

    trace: Annotated[
        Path | None, needed("--trace", text="Folder of a RAGPulse trace: replay its requests.", panel=None)
    ] = None
    ratio: OneRatio = 0.15
    requests: Requests = 100
    clients: Clients = 8
    shadow: Shadow = 0.0
    discover: Discover = False

    @property
    def prompt(self) -> PromptShape:
        """Of the first part."""
        return PromptShape(self.chunks, self.chunk_tokens, self.question_tokens)


@dataclass(frozen=True)
class Routing(PromptSizeOptions, ModelSettings):
    """`lab routing`."""

    topics: Annotated[int, count("--topics", "Topics, each with a prompt's chunks.")] = 12
    memory_share: Annotated[
        float, count("--memory-share", "Share of all chunks that a server's memory holds.", 0.01, 1)
    ] = 0.6
    servers: Annotated[int, count("--servers", "Servers.", 2, 64, HOW)] = 2
    ratio: OneRatio = 0.15
    requests: Requests = 100
    clients: Clients = 2
    seed: Annotated[int, seeded("Seed of weights, tokens, requests.")] = 0

    @property
    def prompt(self) -> PromptShape:
        return PromptShape(self.chunks, self.chunk_tokens, self.question_tokens)


@dataclass(frozen=True)
class Sizes:
    """Of an agent's conversations: what each turn reads, and how much of it stays."""

    sessions: Annotated[int, count("--sessions", "Sessions, one after the other.")] = 3
    turns: Annotated[int, count("--turns", "Requests of a session.", 3)] = 6
    results: Annotated[int, count("--results", "Different tool results, re-read across sessions.")] = 10
    result_tokens: Annotated[int, count("--result-tokens", "Tokens of a tool result.", most=MOST_TOKENS)] = 384
    first_reads: Annotated[int, count("--first-reads", "Tool results of the first turn's search.")] = 4
    reads: Annotated[int, count("--reads", "Tool results that each further turn adds.")] = 1
    kept: Annotated[int, count("--kept", "Tool results of a request at most; the oldest are dropped.")] = 6
    reorder: Annotated[float, count("--reorder", "Share of the turns that order tool results anew.", 0, 1)] = 0.5

    def __post_init__(self) -> None:
        from cacheblend.core.errors import InvalidInputError

        if self.results <= self.kept:
            raise InvalidInputError(f"{self.results} tool results, {self.kept} kept: there must be more than are kept")
        if max(self.first_reads, self.reads) > self.kept:
            most = max(self.first_reads, self.reads)
            raise InvalidInputError(f"a turn reads {most} tool results, of which only {self.kept} are kept; keep more")


@dataclass(frozen=True, kw_only=True)
class Agent(ModelSettings):
    """`lab agent`, beside `Sizes`."""

    data: Annotated[Path, needed("--data", text="Passages: the tools' results.")]
    pause: Annotated[float, count("--pause", "Seconds between turns: the agent runs its tools.", 0, 3600)] = 4.0
    ratio: OneRatio = 0.15
    seed: Annotated[int, seeded("Seed of weights, reads, orders.")] = 0


@dataclass(frozen=True)
class VllmOptions(ModelSettings):
    """Two vLLM servers on one model."""

    ratio: OneRatio = 0.15
    batched_tokens: Annotated[
        int, count("--batched-tokens", "vLLM's max_num_batched_tokens.", most=MOST_TOKENS, panel=HOW)
    ] = 2048
    dtype: Annotated[
        str,
        named(
            "--dtype", "float32, bfloat16 or float16. auto: bfloat16, or float32 on a CPU that only emulates it.", HOW
        ),
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class Replay:
    """`lab vllm replay`, beside `VllmOptions`. Requests are sampled from the last third of the trace."""

    trace: ReplayedTrace
    requests: Requests = 100
    clients: Clients = 16
    rate: Annotated[
        list[float] | None,
        several(
            "--rate",
            "Rates of requests, as shares of the plug-in's saturation; several times. Default: 0.2 0.4 0.6 0.8.",
            *(0.001, 100, HOW),
        ),
    ] = None
    whole: Annotated[bool, named("--whole/--no-whole", "Also with whole system prompts, history, web search.")] = True
    discover: Discover = False
    seed: Annotated[int, seeded("Seed of sample and times.")] = 0


# ---- prefills -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Peers(RoundOptions, PromptSizeOptions, ModelSettings):
    """`lab peers`."""

    data: Annotated[Path, needed("--data", text="Passages of the requests.")]
    ratio: Annotated[
        list[float] | None,
        typer.Option(
            "--ratio", "-r", min=0, max=1, help="Recompute ratios of blending. Default: 0.15 0.05.", rich_help_panel=HOW
        ),
    ] = None


@dataclass(frozen=True)
class RandomShapes:
    """`lab random-shapes`; plain text precedes the chunks."""

    shape: Annotated[str, SHAPE_OPTION] = "tiny"
    prompts: Annotated[int, count("--prompts", "Prompts, each of its own chunks.", most=100_000, panel=HOW)] = 4
    chunks: Annotated[int, count("--chunks", "Chunks of a prompt.", most=MOST_CHUNKS)] = 6
    chunk_tokens: ChunkTokens = 128
    plain_tokens: Annotated[int, count("--plain-tokens", "Plain tokens before the chunks.", most=MOST_TOKENS)] = 32
    question_tokens: Annotated[int, count("--question-tokens", "Tokens after the chunks.", most=MOST_TOKENS)] = 32
    dtype: Annotated[str, named("--dtype", "float32, bfloat16 or float16.", HOW)] = "float32"
    gain: Annotated[
        float, count("--gain", "Factor on all weight matrices; above 1 attention is sharper.", 0.001, 1000)
    ] = 1.0
    seed: Annotated[int, seeded("Seed of weights, ids and bootstrap.")] = 0
