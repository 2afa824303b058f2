"""Options that several commands share: each is declared once, as a field of an option group (see `option_groups`).

Defaults are `BlendConfig`'s; they are written out here because importing it takes a second, and a test compares them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend.cli.selection_options import BLENDING, SelectionOptions

if TYPE_CHECKING:
    from cacheblend.core.config import BlendConfig

MODEL, PROMPT, OUTPUT = "Model", "Prompt", "Output"
MOST_TOKENS = 1 << 24
"""Upper bound of options that count tokens: far above any model's context, and small enough to allocate."""
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

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, nothing else.", rich_help_panel=OUTPUT)
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json-file", help="Write the whole result to this file as JSON.", rich_help_panel=OUTPUT),
]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", help="Draw the result here (.png, .svg, .pdf). Needs matplotlib.", rich_help_panel=OUTPUT),
]
Seed = Annotated[int, typer.Option("--seed", min=0, max=MOST_SEED, help="Seed of everything that is drawn at random.")]
Shadow = Annotated[
    float,
    typer.Option("--shadow", min=0, max=1, help="Share of blended answers to compute again in full, and compare."),
]
ToolCallParser = Annotated[
    str,
    typer.Option(
        "--tool-call-parser",
        help="How tool calls are read from answers: hermes, llama3, mistral, pythonic, none; auto: as the chat "
        "template writes them, if it is known.",
        rich_help_panel="Server",
    ),
]
Anchor = Annotated[
    str,
    typer.Option(
        "--anchor",
        help="What precedes a chunk when it is computed alone: auto, none, bos or system.",
        rich_help_panel=BLENDING,
    ),
]
Codec = Annotated[
    str,
    typer.Option("--codec", help="How stored passages are compressed: raw, fp8, int8, int4.", rich_help_panel=BLENDING),
]
CostModelFile = Annotated[
    Path | None,
    typer.Option(
        "--cost-model",
        help="Cost model of `calibrate`: load only what is faster loaded than computed.",
        rich_help_panel=BLENDING,
    ),
]
SyncedTokens = Annotated[
    int,
    typer.Option(
        "--chunk-tokens", min=16, max=MOST_TOKENS, help="Tokens of a document's chunk.", rich_help_panel=BLENDING
    ),
]
OneRatio = Annotated[
    float,
    typer.Option(
        "--ratio", "-r", min=0, max=1, help="Share of the loaded tokens to recompute.", rich_help_panel=BLENDING
    ),
]


# ---- model and store ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceOptions:
    """How a model is loaded."""

    dtype: Annotated[
        str,
        typer.Option("--dtype", help="auto (the folder's own), float32, bfloat16 or float16.", rich_help_panel=MODEL),
    ] = "auto"
    device: Annotated[
        str | None,
        typer.Option("--device", help="cpu, cuda, cuda:1, ... Default: CUDA if present.", rich_help_panel=MODEL),
    ] = None


@dataclass(frozen=True)
class ModelOptions:
    """The model folder of a command that always needs one."""

    model: Annotated[Path, MODEL_OPTION]


@dataclass(frozen=True)
class ModelOrShape:
    """A model folder, or random weights of a known shape."""

    model: Annotated[Path | None, MODEL_OPTION] = None
    shape: Annotated[str | None, SHAPE_OPTION] = None

    def chosen(self, default: str | None = None) -> "ModelOrShape":
        """The choice with `default` as the shape where the user named nothing, the model's folder resolved.

        Raises:
            InvalidInputError: both are given, or none and there is no default; or there is no such folder.
        """
        from cacheblend.cli.models import model_folder
        from cacheblend.core.errors import InvalidInputError

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

    store: Annotated[
        str,
        typer.Option(
            "--store",
            "-s",
            help="A folder, memory, or a URL: file:///folder?max_bytes=200GiB&ram_bytes=4GiB, redis://..., s3://...",
            rich_help_panel=MODEL,
        ),
    ]


IN_MEMORY = StoreOptions("memory")
"""The default of commands that need a store only while they run."""


# ---- how prompts are blended --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChunkOptions:
    """How chunks are computed, cut and stored; part of the names of their blocks."""

    anchor: Anchor = "auto"
    block_size: Annotated[
        int,
        typer.Option(
            "--block-size", min=1, max=MOST_TOKENS, help="Tokens of a block at most.", rich_help_panel=BLENDING
        ),
    ] = 256
    codec: Codec = "raw"
    salt: Annotated[
        str,
        typer.Option("--salt", help="Separates tenants who share a store.", rich_help_panel=BLENDING),
    ] = ""

    def settings(self) -> dict[str, Any]:
        """Fields of `BlendConfig`."""
        return {"anchor": self.anchor, "block_size": self.block_size, "codec": self.codec, "salt": self.salt}


@dataclass(frozen=True)
class BlendOptions(SelectionOptions, ChunkOptions):
    """Everything that a command which answers prompts lets a user set of blending."""

    cost_model: CostModelFile = None
    load_timeout: Annotated[
        float | None,
        typer.Option(
            "--load-timeout",
            help="Seconds that a request waits for the store; what comes later is computed. Without it: as long as "
            "computing takes, but half a second at least.",
            rich_help_panel=BLENDING,
        ),
    ] = None
    capture: Annotated[
        bool,
        typer.Option(
            "--capture/--no-capture",
            help="Store passages that were not in the store, after the answer.",
            rich_help_panel=BLENDING,
        ),
    ] = True
    discover: Annotated[
        bool,
        typer.Option(
            "--discover/--no-discover",
            help="Reuse text that recurs in prompts, also where nothing marks it.",
            rich_help_panel=BLENDING,
        ),
    ] = True

    def settings(self) -> dict[str, Any]:
        """Fields of `BlendConfig`: those that the user set, and those that no profile has.

        Raises:
            InvalidInputError: as `SelectionOptions.settings`.
        """
        file = None if self.cost_model is None else str(self.cost_model)
        chosen = SelectionOptions.settings(self) | ChunkOptions.settings(self)
        chosen |= {"cost_model": file, "load_timeout_s": self.load_timeout}
        return chosen | {"capture": self.capture, "discover": self.discover}


def check_settings(settings: dict[str, Any], layers: int | None) -> "BlendConfig | None":
    """Checks settings before a model is opened, which takes longer.

    Args:
        settings: fields of `BlendConfig`.
        layers: of the model; None if its config.json does not say.

    Raises:
        InvalidInputError: a value is out of range, or a check layer does not exist.
    """
    from cacheblend.core.config import BlendConfig
    from cacheblend.core.fuse.prefill import check_selector

    config = BlendConfig(**settings)
    if layers is not None:
        check_selector(config.make_selector(), layers)
    return config
