"""`cacheblend warm`: stores the KV of passages before they are used."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend.cli.options import (
    MOST_TOKENS,
    PROMPT,
    AsJson,
    ChunkOptions,
    DeviceOptions,
    ModelOptions,
    StoreOptions,
)
from cacheblend.cli.output import console, print_json, progress, seconds_text, size_text
from cacheblend.cli.prompt_options import LayoutOptions, Limit
from cacheblend.cli.selection_options import BLENDING

if TYPE_CHECKING:
    from cacheblend.data import Text
    from cacheblend.engines.keeper import WarmReport

Data = Annotated[
    list[Path],
    typer.Option(
        "--data",
        "-d",
        help="Passages: .json, .jsonl, .txt or a folder of .txt. Several times.",
        rich_help_panel=PROMPT,
        show_default=False,
    ),
]
BatchTokens = Annotated[
    int,
    typer.Option(
        "--batch-tokens", min=1, max=MOST_TOKENS, help="Tokens that are computed at once.", rich_help_panel=BLENDING
    ),
]
Engine = Annotated[
    str,
    typer.Option("--engine", help="What computes them: hf (transformers), or vllm.", rich_help_panel=BLENDING),
]
Frame = Annotated[
    str | None,
    typer.Option(
        "--frame",
        help="Tokenise each passage inside this text, in place of {passage}: for servers that tokenise whole prompts.",
        rich_help_panel=PROMPT,
        show_default=False,
    ),
]


def warm(
    model: ModelOptions,
    store: StoreOptions,
    data: Data,
    stored: ChunkOptions,
    layout: LayoutOptions,
    device: DeviceOptions,
    limit: Limit = None,
    batch_tokens: BatchTokens = 4096,
    frame: Frame = None,
    engine: Engine = "hf",
    json: AsJson = False,
) -> None:
    """Store the KV cache of passages, each computed alone after its anchor.

    Passages that the store has are not computed again, so the command may be repeated and interrupted.
    """
    from cacheblend.core.errors import InvalidInputError
    from cacheblend.store import lasting_url, open_store

    if engine not in ("hf", "vllm"):
        raise InvalidInputError(f"no engine is called {engine!r}; there are hf, vllm")
    if frame is not None and "{passage}" not in frame:
        raise InvalidInputError(f"--frame {frame!r}: {{passage}} must stand where the passage goes")
    lasting = lasting_url(store.store)
    passages = _passages(data, limit)
    if engine == "vllm":
        done = _warm_vllm(model.model, lasting, passages, stored.settings(), frame, device.dtype, json)
    else:
        config = stored.settings() | {"capture_batch_tokens": batch_tokens}
        done = _warm_hf(model.model, lasting, passages, config, frame, device, layout, json)
    with open_store(lasting) as filled:
        taken = filled.stats().bytes
    if json:
        print_json({"passages": len(passages), **asdict(done), "store": lasting, "store_bytes": taken})
    else:
        _show(done, lasting, taken)


def _warm_hf(
    model: Path,
    store: str,
    passages: "list[Text]",
    config: dict[str, Any],
    frame: str | None,
    device: DeviceOptions,
    layout: LayoutOptions,
    quiet: bool,
) -> "WarmReport":
    from cacheblend.cli.models import open_engine
    from cacheblend.cli.prompts import build_prompt
    from cacheblend.core.config import BlendConfig
    from cacheblend.core.plan.prompt import chunk
    from cacheblend.engines.hf import Passage

    opened = BlendConfig(**config)
    with open_engine(model, store, opened, dtype=device.dtype, device=device.device, quiet=quiet) as engine:
        chunks = [Passage(passage.text, passage.title) for passage in passages]
        in_front = config["anchor"] == "system"
        system = build_prompt(engine, chunks[:1], "?", layout.system, layout.chat) if in_front else None
        wanted: list[Any] = chunks
        if frame is not None:
            assert engine.builder is not None  # a model folder is opened with its tokenizer
            encode = engine.builder.encode_in_frame
            wanted = [chunk(encode(passage.text, frame), passage.title) for passage in passages]
        with progress("warming", "passages", quiet=quiet) as advance:
            return engine.warm(wanted, system=system, progress=advance)


def _warm_vllm(
    model: Path,
    store: str,
    passages: "list[Text]",
    settings: dict[str, Any],
    frame: str | None,
    dtype: str,
    quiet: bool,
) -> "WarmReport":
    from cacheblend.cli.models import model_folder
    from cacheblend.engines.tokens import PromptBuilder
    from cacheblend.engines.vllm.warmup import warm_with_vllm

    def encode(builder: PromptBuilder) -> list[tuple[str, list[int]]]:
        if frame is None:
            return [(passage.title, builder.encode(passage.text)) for passage in passages]
        return [(passage.title, builder.encode_in_frame(passage.text, frame)) for passage in passages]

    with progress("warming", "passages", quiet=quiet) as advance:
        return warm_with_vllm(model_folder(model), store, encode, settings=settings, progress=advance, dtype=dtype)


def _passages(files: list[Path], limit: int | None) -> "list[Text]":
    """What is to be stored."""
    from cacheblend.data import read_passages

    return [passage for file in files for passage in read_passages(file)][:limit]


def _show(done: "WarmReport", store: str, taken: int) -> None:
    from rich.text import Text

    console().print(
        Text.assemble(
            (str(done.stored), "bold green"),
            f" passages stored ({done.tokens} tokens, {seconds_text(done.seconds)}), "
            f"{done.held} held already; {store} takes {size_text(taken)}",
        )
    )
