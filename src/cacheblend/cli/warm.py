"""`cacheblend warm`: stores the KV of passages before they are used."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from cacheblend.cli import options, output
from cacheblend.cli.models import open_engine
from cacheblend.cli.option_groups import option, refuse_unused
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.failures import failed_since, failures, in_words
from cacheblend.engines.folders import model_folder

if TYPE_CHECKING:
    from cacheblend.engines.tokens import PromptBuilder


def warm(
    *,
    model: options.ModelOptions,
    store: options.StoreOptions,
    data: list[Path] = option(
        ..., "Passages: .json, .jsonl, .txt or a folder of .txt. Several times.", "-d", panel=options.PROMPT
    ),
    stored: options.ChunkOptions,
    layout: options.LayoutOptions,
    device: options.DeviceOptions,
    limit: options.Limit = None,
    batch_tokens: int = option(
        4096,
        "Tokens that are computed at once; vLLM has its own bound.",
        least=1,
        most=options.MOST_TOKENS,
        panel=options.BLENDING,
    ),
    frame: str | None = option(
        None,
        "Tokenise each passage inside this text, in place of {passage}: for servers that tokenise whole prompts.",
        panel=options.PROMPT,
    ),
    engine: str = option("hf", "What computes them: hf (transformers), or vllm.", panel=options.BLENDING),
    json: options.AsJson = False,
) -> None:
    """Store the KV cache of passages, each computed alone after its anchor.

    Passages that the store has are not computed again, so the command may be repeated and interrupted.
    Exit code 1 if the store does not hold all of them in the end.
    """
    from cacheblend.data import read_passages
    from cacheblend.store import lasting_url, open_store
    from cacheblend.store.open import shown_url

    if engine not in ("hf", "vllm"):
        raise InvalidInputError(f"no engine is called {engine!r}; there are hf, vllm")
    if engine == "vllm":
        refuse_unused({"--device": device.device} | layout.given(), "with --engine vllm")
    layout.check_anchor(stored.anchor)
    if frame is not None and "{passage}" not in frame:
        raise InvalidInputError(f"--frame {frame!r}: {{passage}} must stand where the passage goes")
    lasting, before = lasting_url(store.store), failures()
    passages = [passage for file in data for passage in read_passages(file)][:limit]
    config = stored.settings()

    def encode(builder: "PromptBuilder") -> list[tuple[str, list[int]]]:
        """Title and token ids of each passage."""
        if frame is None:
            return [(passage.title, builder.encode(passage.text)) for passage in passages]
        return [(passage.title, builder.encode_in_frame(passage.text, frame)) for passage in passages]

    if engine == "vllm":
        from cacheblend.engines.vllm.warmup import warm_with_vllm

        folder = model_folder(model.model)
        with output.progress("warming", "passages", quiet=json) as advance:
            done = warm_with_vllm(folder, lasting, encode, settings=config, progress=advance, dtype=device.dtype)
    else:
        from cacheblend.core.config import BlendConfig
        from cacheblend.core.plan.prompt import chunk
        from cacheblend.engines.hf import Passage

        opened = BlendConfig(**config, capture_batch_tokens=batch_tokens)
        with open_engine(model.model, lasting, opened, device, quiet=json) as hf:
            texts = [(passage.text, passage.title) for passage in passages]
            system = layout.build(hf, texts[:1], "?") if stored.anchor == "system" else None
            wanted: list[Any] = [Passage(*text) for text in texts]
            if frame is not None:
                assert hf.runtime.builder is not None  # a model folder is opened with its tokenizer
                wanted = [chunk(ids, title) for title, ids in encode(hf.runtime.builder)]
            with output.progress("warming", "passages", quiet=json) as advance:
                done = hf.warm(wanted, system=system, progress=advance)
    with open_store(lasting) as filled:
        taken = filled.stats().bytes
    failed = failed_since(before)
    if json:
        told = {"passages": len(passages), **asdict(done), "store": shown_url(lasting), "store_bytes": taken}
        output.print_json(told | {"failed": failed})
    else:
        output.console().print(
            Text.assemble(
                (str(done.stored), "bold green"),
                f" passages stored ({done.tokens} tokens, {output.seconds_text(done.seconds)}), "
                f"{done.held} held already; {shown_url(lasting)} takes {output.size_text(taken)}",
            ),
            soft_wrap=True,
        )
    if failed or done.missing:
        small = f"{done.missing} passages are not held any more: the store is too small for all; raise max_bytes"
        output.say(f"not all is stored ({in_words(failed)}): warm again" if failed else small)
        raise typer.Exit(1)
