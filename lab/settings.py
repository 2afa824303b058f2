"""What is measured, and how: option groups (see `cacheblend.cli.option_groups`), which benchmarks take as they are.

Imports nothing that takes long, since every command's help needs it.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from cacheblend.cli.bench import HOW, WHAT, PromptSizeOptions, RoundOptions
from cacheblend.cli.option_groups import option
from cacheblend.cli.options import MOST_SEED, MOST_TOKENS, OUTPUT, ModelOrShape, OneRatio, Shadow

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DEFAULT_SHAPE = "qwen2.5-0.5b"
MOST = 10_000  # of most things that are counted
PROMPT_SIZES = [field.name for field in fields(PromptSizeOptions)]

Requests = Annotated[int, option(..., "Requests replayed.", least=1, most=1_000_000, panel=WHAT)]
Clients = Annotated[int, option(..., "Requests under way at once.", least=1, most=MOST, panel=HOW)]
Discover = Annotated[bool, option(..., "Also replay a trace with nothing marked.", panel=WHAT)]
Plot = Annotated[Path | None, option(..., "Draw the result here (.png, .svg, .pdf). Needs matplotlib.", panel=OUTPUT)]
ReplayedTrace = Annotated[Path, option(..., "Folder of a RAGPulse trace.", "--trace", panel=WHAT)]


def seeded(text: str = "Seed of all that is drawn.") -> Any:
    return option(0, text, least=0, most=MOST_SEED, panel=HOW)


@dataclass(frozen=True)
class PromptShape:
    """A prompt: plain text that no cache holds, stored chunks in shuffled order, a question; all in tokens."""

    chunks: int = 8
    chunk_tokens: int = 512
    question_tokens: int = 32
    plain_tokens: int = 32

    @property
    def tokens(self) -> int:
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
        return str(self.model or self.shape)

    @property
    def config(self) -> "PretrainedConfig":
        """Of the model; `InvalidInputError`: an unknown shape."""
        from transformers import AutoConfig

        from cacheblend.engines.hf.shapes import shape_config

        return shape_config(self.shape) if self.shape else AutoConfig.from_pretrained(self.model)

    def described(self, **more: Any) -> dict[str, Any]:
        """As a result has it: its own settings, and those of its prompts by themselves."""
        own = {name: value for name, value in vars(self).items() if name not in PROMPT_SIZES}
        return own | {"model": self.model and str(self.model), "prompt": vars(self.prompt)} | more

    @property
    def prompt(self) -> PromptShape:
        """By those of its options that are sizes."""
        return PromptShape(**{name: getattr(self, name) for name in PROMPT_SIZES if hasattr(self, name)})


# ---- servers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Serving(RoundOptions, PromptSizeOptions, ModelSettings):
    """`lab serve`."""

    trace: Path | None = option(None, "Folder of a RAGPulse trace: replay its requests.", panel=None)
    ratio: OneRatio = 0.15
    requests: Requests = 100
    clients: Clients = 8
    shadow: Shadow = 0.0
    discover: Discover = False


@dataclass(frozen=True)
class Routing(PromptSizeOptions, ModelSettings):
    """`lab routing`."""

    panel: ClassVar = WHAT
    topics: int = option(12, "Topics, each with a prompt's chunks.", least=1, most=MOST)
    memory_share: float = option(0.6, "Share of all chunks that a server's memory holds.", least=0.01, most=1)
    servers: int = option(2, "Servers.", least=2, most=64, panel=HOW)
    ratio: OneRatio = 0.15
    requests: Requests = 100
    clients: Clients = 2
    seed: int = seeded("Seed of weights, tokens, requests.")


@dataclass(frozen=True)
class Sizes:
    """Of an agent's conversations: what each turn reads, and how much of it stays."""

    panel: ClassVar = WHAT
    sessions: int = option(3, "Sessions, one after the other.", least=1, most=MOST)
    turns: int = option(6, "Requests of a session.", least=3, most=MOST)
    results: int = option(10, "Different tool results, re-read across sessions.", least=1, most=MOST)
    result_tokens: int = option(384, "Tokens of a tool result.", least=1, most=MOST_TOKENS)
    first_reads: int = option(4, "Tool results of the first turn's search.", least=1, most=MOST)
    reads: int = option(1, "Tool results that each further turn adds.", least=1, most=MOST)
    kept: int = option(6, "Tool results of a request at most; the oldest are dropped.", least=1, most=MOST)
    reorder: float = option(0.5, "Share of the turns that order tool results anew.", least=0, most=1)

    def __post_init__(self) -> None:
        from cacheblend.core.errors import InvalidInputError

        if self.results <= self.kept:
            raise InvalidInputError(f"{self.results} tool results, {self.kept} kept: there must be more than are kept")
        if (most := max(self.first_reads, self.reads)) > self.kept:
            raise InvalidInputError(f"a turn reads {most} tool results, of which only {self.kept} are kept; keep more")


@dataclass(frozen=True, kw_only=True)
class Agent(ModelSettings):
    """`lab agent`, beside `Sizes`."""

    data: Path = option(..., "Passages: the tools' results.", panel=WHAT)
    pause: float = option(4.0, "Seconds between turns: the agent runs its tools.", least=0, most=3600, panel=WHAT)
    ratio: OneRatio = 0.15
    seed: int = seeded("Seed of weights, reads, orders.")


@dataclass(frozen=True)
class VllmOptions(ModelSettings):
    """Two vLLM servers on one model."""

    panel: ClassVar = HOW
    ratio: OneRatio = 0.15
    batched_tokens: int = option(2048, "vLLM's max_num_batched_tokens.", least=1, most=MOST_TOKENS)
    dtype: str = option(
        "auto", "float32, bfloat16 or float16. auto: bfloat16, or float32 on a CPU that only emulates it."
    )


@dataclass(frozen=True, kw_only=True)
class Replay:
    """`lab vllm replay`, beside `VllmOptions`. Requests are sampled from the last third of the trace."""

    trace: ReplayedTrace
    requests: Requests = 100
    clients: Clients = 16
    rate: list[float] | None = option(
        None,
        "Rates of requests, as shares of the plug-in's saturation; several times. Default: 0.2 0.4 0.6 0.8.",
        least=0.001,
        most=100,
        panel=HOW,
    )
    whole: bool = option(True, "Also with whole system prompts, history, web search.", panel=WHAT)
    discover: Discover = False
    seed: int = seeded("Seed of sample and times.")


# ---- prefills -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Peers(RoundOptions, PromptSizeOptions, ModelSettings):
    """`lab peers`."""

    data: Path = option(..., "Passages of the requests.", panel=WHAT)
    ratio: list[float] | None = option(
        None, "Recompute ratios of blending. Default: 0.15 0.05.", "-r", least=0, most=1, panel=HOW
    )


# ---- answers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AnsweredRows:
    """Rows of questions that a pretrained model answers."""

    panel: ClassVar = WHAT
    data: list[Path] = option(..., "Questions with passages and answers; several times.")
    model: Path | None = option(None, "Model folder. Default: SmolLM2-135M-Instruct, made by `make pretrained`.")
    rows: int = option(200, "Most rows of each file.", least=1, most=MOST)
    answer_tokens: int = option(24, "Most tokens of an answer.", least=1, most=MOST_TOKENS)


@dataclass(frozen=True, kw_only=True)
class Real(AnsweredRows):
    """`lab real`."""

    panel: ClassVar = WHAT
    part: str = option("test", "test, or tune: the rows that settings may be chosen by.")
    way: list[str] | None = option(
        None, 'Anchor, selector and ratio: "text head:recency=1,correction=0.5 0.055"; several times.', panel=HOW
    )

    def __post_init__(self) -> None:
        from cacheblend.core.errors import InvalidInputError

        if self.part not in ("tune", "test"):
            raise InvalidInputError(f"--part is tune or test, got {self.part!r}")


@dataclass(frozen=True, kw_only=True)
class Adapt(AnsweredRows):
    """`lab adapt`."""

    panel: ClassVar = WHAT
    steps: int = option(180, "Steps of the training.", least=1, most=MOST, panel=HOW)
    questions: int = option(8, "Most questions of a step, all on the same passages.", least=1, most=MOST, panel=HOW)
    rank: int = option(8, "Rank of the adapter's matrices.", least=1, most=MOST, panel=HOW)
    out: Path | None = option(None, "Folder for the adapter, as PEFT reads it.", panel=HOW)


@dataclass(frozen=True, kw_only=True)
class Edits(ModelSettings):
    """`lab edits`."""

    panel: ClassVar = WHAT
    data: list[Path] = option(..., "Questions with passages and answers; several times.")
    scene: list[str] | None = option(None, "thinking, clearing, compaction or clock; several times. Default: all.")
    conversations: int = option(3, "Conversations of each scene.", least=1, most=MOST)
    turns: int = option(20, "Turns of a conversation.", least=5, most=MOST)
    steps: int = option(2, "Tool calls of a turn.", least=1, most=MOST)
    passages: int = option(2, "Passages that a tool call returns.", least=1, most=MOST)
    tokens: int = option(7168, "Most tokens of a prompt with its answer; longer ones end a conversation.", least=256)
    answer_tokens: int = option(24, "Tokens of the answer that KL is of; 0: random weights have none.", least=0)
    way: list[str] | None = option(
        None, 'Selector and ratio: "head 0.05", the first one is timed; several times.', panel=HOW
    )
    runs: int = option(2, "Prefills of each arm.", least=1, most=MOST, panel=HOW)
    seed: int = seeded("Seed of weights and conversations.")
    vllm: bool = option(False, "Time to first token of vLLM's server, with the plug-in and without.", panel=HOW)

    def __post_init__(self) -> None:
        from cacheblend.core.errors import InvalidInputError

        known = ("thinking", "clearing", "compaction", "clock")
        for scene in self.scene or ():
            if scene not in known:
                raise InvalidInputError(f"--scene is one of {', '.join(known)}, got {scene!r}")
