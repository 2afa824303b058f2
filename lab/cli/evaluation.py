"""`lab inspect`: where loaded KV deviates and attention goes in one prompt; and `lab train`: the model that ships."""

from pathlib import Path

from cacheblend.cli.bench import ResultOptions
from cacheblend.cli.option_groups import option
from cacheblend.cli.options import (
    IN_MEMORY,
    MOST_SEED,
    MOST_TOKENS,
    OUTPUT,
    ChunkOptions,
    DeviceOptions,
    ModelOptions,
    PromptOptions,
    SelectionOptions,
    StoreOptions,
)
from cacheblend.cli.output import INSTALL_PLOT, can_draw, check_folder, progress
from lab.bench import plain_table


def train(
    out: Path = option(..., "Folder of checkpoint, history and model.", panel=None),
    seed: int = option(1, "Of weights and draws.", least=0, most=MOST_SEED, panel=None),
    threads: int = option(0, "CPU threads; 0: one per core.", least=0, most=4096, panel=None),
    device: str | None = option(None, "Default: CUDA if available.", panel=None),
) -> None:
    """Trains the model that ships, from scratch. The same command goes on from where it was interrupted.

    A stage that misses its goal is extended, then restarted once; if it misses it again, training fails: exit code 2.
    """
    from lab.nano.train import train

    train(out, seed, threads, device)


def inspect(
    model: ModelOptions,
    prompt: PromptOptions,
    selection: SelectionOptions,
    stored: ChunkOptions,
    device: DeviceOptions,
    result: ResultOptions,
    store: StoreOptions = IN_MEMORY,
    max_prompt_tokens: int = option(
        4096, "Longest prompt: time grows with its square.", least=1, most=MOST_TOKENS, panel=OUTPUT
    ),
    curve: bool = option(True, "Also measure attention deviation by ratio: 14 more passes.", panel=OUTPUT),
    out: Path | None = option(None, "Draw the figures into this folder. Needs matplotlib.", "-o", panel=OUTPUT),
) -> None:
    """Show what blending does to a prompt: KV deviation by token and layer, and where attention goes.

    Compares full recompute, full reuse and blend. The passages are stored first.
    """
    from cacheblend.core.errors import InvalidInputError

    result.check()
    texts, question = prompt.read()
    if not texts:
        raise InvalidInputError("there is no passage to inspect: give --passage or --data")
    from rich.text import Text

    from cacheblend.cli.models import PATIENT_S, open_engine
    from cacheblend.core.config import BlendConfig
    from cacheblend.core.fuse.prefill import check_selector
    from cacheblend.engines.folders import model_folder
    from cacheblend.engines.settings import layers_of
    from lab.inspection.inspection import inspect_prompt, ratio_curves, summary

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
    with open_engine(model.model, store.store, config, device, profile=selection.profile, quiet=result.json) as engine:
        asked = prompt.build(engine, texts, question)
        curves = ratio_curves(engine.config) if curve else None
        with progress("inspecting", "passes", quiet=result.json) as advance:
            found = inspect_prompt(engine, asked, curves=curves, max_tokens=max_prompt_tokens, advance=advance)
        facts = summary(found) | {"settings": engine.runtime.settings.source, "files": []}
    if out is not None:
        from lab.inspection.figures import draw_figures

        out.mkdir(parents=True, exist_ok=True)
        facts["files"] = list(map(str, draw_figures(found, out)))
    columns = {
        "layer": "{layer}",
        "KV reuse": "{mean_deviation[reuse]}",
        "KV blend": "{mean_deviation[blend]}",
        "top 15 %": "{top_share}",
        "next": "{correlation_with_next}",
        "attention reuse": "{attention_deviation[reuse]}",
        "attention blend": "{attention_deviation[blend]}",
    }
    caption = (
        f"{facts['prompt_tokens']} tokens, {facts['loaded_tokens']} of them loaded at a new position, of which "
        f"{facts['recomputed_tokens']} are recomputed; first token, KL and compute: --json"
    )
    result.show(
        plain_table(Text(f"Deviation from full recompute, {facts['model']}"), (), columns, caption, facts["layers"]),
        facts,
    )
