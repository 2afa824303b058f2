"""`lab inspect`: where loaded KV deviates and attention goes in one prompt; and `lab train`: the model that ships."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend.cli.option_groups import option
from cacheblend.cli.options import (
    IN_MEMORY,
    MOST_SEED,
    MOST_TOKENS,
    OUTPUT,
    AsJson,
    ChunkOptions,
    DeviceOptions,
    ModelOptions,
    PromptOptions,
    SelectionOptions,
    StoreOptions,
)
from cacheblend.cli.output import INSTALL_PLOT, can_draw, check_folder, console, print_json, progress, share_text
from lab.bench import plain_table

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from lab.inspection.inspection import Inspection


def train(
    out: Path = option(..., "Folder of checkpoint, history and model.", panel=None),
    seed: int = option(1, "Of weights and draws.", least=0, most=MOST_SEED, panel=None),
    threads: int = option(0, "CPU threads; 0: one per core.", least=0, most=4096, panel=None),
    device: str | None = option(None, "Default: CUDA if available.", panel=None),
    shorten: int = option(1, "Divide all step counts by this, to try it.", least=1, most=1_000_000, panel=None),
) -> None:
    """Trains the model that ships, from scratch. The same command goes on from where it was interrupted.

    A stage that misses its goal is extended, then restarted once; if it misses it again, training fails: exit code 2.
    """
    from lab.nano.train import train

    train(out, seed, threads, device, shorten)


# ---- lab inspect ----------

KEY = (
    "All compared with full recompute. KV: deviation of the loaded tokens, relative to the norm of fresh KV; "
    "top 15 %: share of it in the 15 % of tokens that deviate most; next: rank correlation with the next layer; "
    "attention: deviation of the question's attention to the preceding tokens."
)


def inspect(
    model: ModelOptions,
    prompt: PromptOptions,
    selection: SelectionOptions,
    stored: ChunkOptions,
    device: DeviceOptions,
    store: StoreOptions = IN_MEMORY,
    max_prompt_tokens: int = option(
        4096, "Longest prompt: time grows with its square.", least=1, most=MOST_TOKENS, panel=OUTPUT
    ),
    curve: bool = option(True, "Also measure attention deviation by ratio: 14 more passes.", panel=OUTPUT),
    out: Path | None = option(None, "Draw the figures into this folder. Needs matplotlib.", "-o", panel=OUTPUT),
    json: AsJson = False,
) -> None:
    """Show what blending does to a prompt: KV deviation by token and layer, and where attention goes.

    Compares full recompute, full reuse and blend. The passages are stored first.
    """
    from cacheblend.core.errors import InvalidInputError

    texts, question = prompt.read()
    if not texts:
        raise InvalidInputError("there is no passage to inspect: give --passage or --data")
    from cacheblend.cli.models import PATIENT_S, open_engine
    from cacheblend.core.config import BlendConfig
    from cacheblend.core.fuse.prefill import check_selector
    from cacheblend.engines.folders import model_folder
    from cacheblend.engines.settings import layers_of
    from lab.inspection import inspect_prompt, ratio_curves
    from lab.inspection.inspection import summary

    chosen = selection.settings()
    known = layers_of(model_folder(model.model))  # wrong options are reported before the model is opened
    if chosen:
        selector = BlendConfig(**chosen).make_selector()
        if known is not None:
            check_selector(selector, known)
    if out is not None:  # before minutes of measuring, not after them
        check_folder("--out", out)
        if not can_draw():
            raise InvalidInputError(f"--out needs matplotlib: {INSTALL_PLOT}")
    config = chosen | stored.settings() | {"capture": False, "load_timeout_s": PATIENT_S}
    with open_engine(model.model, store.store, config, device, profile=selection.profile, quiet=json) as engine:
        asked = prompt.build(engine, texts, question)
        curves = ratio_curves(engine.config) if curve else None
        with progress("inspecting", "passes", quiet=json) as advance:
            found = inspect_prompt(engine, asked, curves=curves, max_tokens=max_prompt_tokens, advance=advance)
        facts = summary(found) | {"settings": engine.settings.source, "files": []}
    if out is not None:
        from lab.inspection.figures import draw_figures

        out.mkdir(parents=True, exist_ok=True)
        facts["files"] = list(map(str, draw_figures(found, out)))
    if json:
        print_json(facts)
        return
    console().print(_table(facts))
    console().print(KEY, style="dim")
    for line in _lines(found, facts):
        console().print(line, soft_wrap=True)
    if out is not None:
        console().print(f"\n{len(facts['files'])} figures in {out}", soft_wrap=True)


# ---- what is shown ------------------------------------------------------------------------------------------


def _table(facts: dict[str, Any]) -> "Table":
    """A line a layer."""
    from rich.text import Text

    columns = ("layer", "KV reuse", "KV blend", "top 15 %", "next", "attention reuse", "attention blend")
    table = plain_table(Text(f"What blending does to this prompt, {facts['model']}", "table.title"), (), columns)
    for layer in facts["layers"]:
        kv, attention = layer["mean_deviation"], layer["attention_deviation"]
        top = "" if layer["top_share"] is None else share_text(layer["top_share"], 1)
        numbers = (kv["reuse"], kv["blend"], layer["correlation_with_next"], attention["reuse"], attention["blend"])
        reuse, blend, *others = ("" if value is None else f"{value:.3f}" for value in numbers)
        table.add_row(str(layer["layer"]), reuse, blend, top, *others)
    return table


def _lines(found: "Inspection", facts: dict[str, Any]) -> "list[str | Text]":
    """Lines after the table: tokens, first tokens, notes on chunks not loaded at a new position, or only in part."""
    from rich.text import Text

    loaded, again = facts["loaded_tokens"], facts["recomputed_tokens"]
    lines: list[str | Text] = [
        f"\n{facts['prompt_tokens']} tokens, {loaded} of them loaded at a new position; blend recomputes {again} "
        f"({share_text(again, loaded)}) by {facts['selector']}; settings: {facts['settings']}"
    ]
    for name, method in (("full reuse", "reuse"), ("blend", "blend")):
        close = facts["first_token"][method]
        same = "as in full recompute" if close["top_1"] else "not as in full recompute"
        share = share_text(facts["compute"][method], 1)
        lines.append(f"{name}: first token {same}, KL {close['kl']:.2g} nats; {share} of full prefill's compute")
    reasons = {"prefix": "is an exact prefix of this prompt: nothing in it deviates", "miss": "is not in the store"}
    for part in (part for part in found.parts if part.is_chunk):
        start, stop = part.runs[0]
        for source, reason in reasons.items():
            if tokens := found.sources[start:stop].count(source):
                some = "" if tokens == len(part) else f" ({tokens} of {len(part)} tokens)"
                lines.append(Text.assemble(("note:", "yellow"), f" {part.label}{some} {reason}"))
    return lines
