"""`cacheblend warm`: stores the KV of passages ahead of their use."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend.cli.options import (
    BLENDING,
    PROMPT,
    AnchorRule,
    AsJson,
    BlockSize,
    Chat,
    Device,
    Dtype,
    ModelFolder,
    Salt,
    StoreUrl,
    System,
)
from cacheblend.cli.output import console, print_json, progress, seconds_text, size_text

if TYPE_CHECKING:
    from cacheblend.data import Text
    from cacheblend.engines.hf import WarmReport

Data = Annotated[
    list[Path],
    typer.Option(
        "--data", "-d", help="Passages: .json, .jsonl, .txt or a folder of .txt. Several times.", rich_help_panel=PROMPT
    ),
]
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, help="Only the first so many passages.", rich_help_panel=PROMPT)
]
BatchTokens = Annotated[
    int, typer.Option("--batch-tokens", help="Tokens that are computed at once.", rich_help_panel=BLENDING)
]


def warm(
    model: ModelFolder,
    store: StoreUrl,
    data: Data,
    limit: Limit = None,
    dtype: Dtype = "auto",
    device: Device = None,
    anchor: AnchorRule = "auto",
    block_size: BlockSize = 256,
    salt: Salt = "",
    batch_tokens: BatchTokens = 4096,
    system: System = None,
    chat: Chat = None,
    json: AsJson = False,
) -> None:
    """Store the KV cache of passages, each computed alone behind its anchor.

    Passages that the store holds already are not computed again, so this may be repeated and interrupted.
    """
    passages = _passages(store, data, limit)

    from cacheblend.cli.models import open_engine
    from cacheblend.cli.prompts import build_prompt
    from cacheblend.core.config import BlendConfig
    from cacheblend.engines.hf import Passage

    config = BlendConfig(
        anchor=anchor,  # type: ignore[arg-type]
        block_size=block_size,
        salt=salt,
        capture_batch_tokens=batch_tokens,
    )
    with open_engine(model, store, config, dtype=dtype, device=device, quiet=json) as engine:
        chunks = [Passage(passage.text, passage.title) for passage in passages]
        behind = build_prompt(engine, chunks[:1], "?", system, chat) if anchor == "system" else None
        with progress("warming", "passages", quiet=json) as advance:
            done = engine.warm(chunks, behind=behind, progress=advance)
        taken = engine.store.stats().bytes
    if json:
        print_json({"passages": len(chunks), **asdict(done), "store": store, "store_bytes": taken})
    else:
        _show(done, store, taken)


def _passages(store: str, files: list[Path], limit: int | None) -> "list[Text]":
    """What is to be stored; `InvalidInputError` also for a store that would not keep it."""
    from cacheblend.core.errors import InvalidInputError
    from cacheblend.data import read_passages

    if store.split("?")[0] in ("memory", "memory://"):
        raise InvalidInputError("a store in memory ends with this command; give --store a folder")
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
