"""`cacheblend demo`: the main job on a small scale, with no model at hand."""

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend.cli.options import BLENDING, OUTPUT, AsJson
from cacheblend.cli.output import console, print_json, progress, seconds_text, share_text, status

if TYPE_CHECKING:
    from rich.table import Table

    from cacheblend.core.prompt import Prompt
    from cacheblend.data import Text
    from cacheblend.engines.hf import BlendEngine, WarmReport
    from cacheblend.engines.hf.arms import Agreement, FirstToken
    from cacheblend.engines.hf.live_check import Outcome

Ratio = Annotated[
    float, typer.Option("--ratio", "-r", help="Share of loaded tokens to recompute, 0..1.", rich_help_panel=BLENDING)
]
Keep = Annotated[
    Path | None,
    typer.Option("--keep", help="Keep model, passages and store in this new folder.", rich_help_panel=OUTPUT),
]
Seed = Annotated[int, typer.Option("--seed", help="Of the weights and the order.", rich_help_panel=OUTPUT)]

SYSTEM = "Answer from these passages about a town by the sea.\n\n"
QUESTION = "Question: Who repaired the clock of the station at the summit, and what else did she build?\nAnswer:"
ROUNDS = 3
ENOUGH_S = 10.0  # no further round is begun behind so many seconds


@dataclass
class Row:
    """One arm's results."""

    name: str
    first: "FirstToken"
    ttft_s: float
    close: "Agreement"


def demo(ratio: Ratio = 0.15, keep: Keep = None, seed: Seed = 0, json: AsJson = False) -> None:
    """Store eight passages once, ask with them in another order, and compare with what is done without this.

    Builds a small model with random weights, so that nothing has to be downloaded.
    """
    from cacheblend.core.selection import check_ratio

    check_ratio(ratio)
    if keep is not None:
        _make(keep)
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-demo-")))
        passages = _prepare(folder, seed, quiet=json)
        engine = stack.enter_context(_open(folder, ratio, quiet=json))
        warmed = _warm(engine, passages, quiet=json)
        prompt = _prompt(engine, passages, seed)
        with status("asking, each way in turn ...", quiet=json):
            rows = _measure(engine, prompt, ratio)
        with status("checking the exactness laws ...", quiet=json):
            from cacheblend.engines.hf.live_check import LiveCheck

            laws = list(LiveCheck(engine.model, engine.survey).run())
        if json:
            print_json(_facts(engine, prompt, warmed, rows, laws))
        else:
            _show(engine, prompt, warmed, rows, laws)
    if keep is not None and not json:
        _show_kept(keep)


# ---- the work ---------------------------------------------------------------------------------------------


def _make(folder: Path) -> None:
    """The folder that is kept; said before the work, not behind it."""
    from cacheblend.core.errors import InvalidInputError

    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise InvalidInputError(f"{folder} exists already; --keep makes a new folder") from error
    except OSError as error:
        raise InvalidInputError(f"--keep {folder}: the folder cannot be made: {error.strerror}") from error


def _prepare(folder: Path, seed: int, *, quiet: bool) -> list["Text"]:
    """Writes the model and the passages."""
    from cacheblend.data import read_passages

    with as_file(files("cacheblend.cli") / "demo_passages.txt") as file:
        source = file.read_text(encoding="utf-8")
    (folder / "passages.txt").write_text(source, encoding="utf-8")
    passages = read_passages(folder / "passages.txt")
    with status("building a small model with random weights ...", quiet=quiet):
        from cacheblend.cli.models import quiet_transformers
        from cacheblend.engines.hf.tiny import build_tiny

        quiet_transformers()
        build_tiny(folder / "model", [passage.text for passage in passages], seed=seed)
    return passages


def _open(folder: Path, ratio: float, *, quiet: bool) -> "BlendEngine":
    from cacheblend.cli.models import open_engine
    from cacheblend.core.config import BlendConfig

    config = BlendConfig(recompute_ratio=ratio, capture=False)
    return open_engine(folder / "model", str(folder / "store"), config, quiet=quiet)


def _warm(engine: "BlendEngine", passages: list["Text"], *, quiet: bool) -> "WarmReport":
    from cacheblend.engines.hf import Passage

    with progress("warming", "passages", quiet=quiet) as advance:
        return engine.warm([Passage(p.text, p.title) for p in passages], progress=advance)


def _prompt(engine: "BlendEngine", passages: list["Text"], seed: int) -> "Prompt":
    """System prompt, the passages in another order than the file's, question."""
    from cacheblend.engines.hf import Passage

    order = list(passages)
    draw = random.Random(seed)
    while order[0] == passages[0]:
        draw.shuffle(order)
    parts: list[str | Passage] = [SYSTEM]
    parts += [Passage(passage.text, passage.title) for passage in order]
    return engine.prompt([*parts, "\n\n", QUESTION])


def _measure(engine: "BlendEngine", prompt: "Prompt", ratio: float) -> list[Row]:
    """All arms in turns, a few rounds; the median of each."""
    from cacheblend.core.selection import NoRows
    from cacheblend.engines.hf.arms import agreement, full_recompute, fused, prefix_caching, touch

    arms: dict[str, Callable[[], FirstToken]] = {
        "full recompute": lambda: full_recompute(engine, prompt),
        "prefix caching": lambda: prefix_caching(engine, prompt),
        "full reuse (r = 0)": lambda: fused(engine, prompt, NoRows()),
        f"blend (r = {ratio:g})": lambda: fused(engine, prompt, engine.config.make_selector()),
    }
    touch(engine, prompt)
    firsts: dict[str, list[FirstToken]] = {name: [] for name in arms}
    started = time.perf_counter()
    for round_ in range(ROUNDS):
        if round_ and time.perf_counter() - started > ENOUGH_S:
            break
        for name, arm in arms.items():
            firsts[name].append(arm())
    wanted = firsts["full recompute"][-1].logits
    return [
        Row(name, of[-1], statistics.median(first.ttft_s for first in of), agreement(of[-1].logits, wanted))
        for name, of in firsts.items()
    ]


# ---- what is shown ----------------------------------------------------------------------------------------


def _show(
    engine: "BlendEngine", prompt: "Prompt", warmed: "WarmReport", rows: list[Row], laws: list["Outcome"]
) -> None:
    from rich.table import Table
    from rich.text import Text

    out = console()
    survey = engine.survey
    out.print(
        f"\n[bold]1.[/] {warmed.stored} passages ({warmed.tokens} tokens) were computed once, each alone, and "
        f"stored: {seconds_text(warmed.seconds)}.\n"
        f"[bold]2.[/] A prompt of {len(prompt)} tokens has them in another order, behind a system prompt that no "
        "cache has seen:\n",
        markup=True,
    )
    out.print(_arms_table(rows, len(prompt) * len(survey.layout.layers)))
    out.print("\n[bold]3.[/] What must be exact is exact, to rounding:", markup=True)
    checks = Table.grid(padding=(0, 2, 0, 0))
    for title, ok, detail in laws:
        checks.add_row(Text("  ✓", "green") if ok else Text("  ✗", "red"), title, detail)
    out.print(checks)
    layers, parameters = len(survey.layout.layers), sum(p.numel() for p in engine.model.parameters()) / 1e6
    out.print(
        f"\nThe model ({layers} layers, {parameters:.0f} M parameters) has random weights: its answers mean "
        "nothing, and are not shown. What carries over to a real model is the time, the share that is computed "
        "and the exactness; how near blend comes to full recompute depends on the trained weights.",
        style="dim",
    )


def _arms_table(rows: list[Row], whole: int) -> "Table":
    """A line an arm; `whole`: the row-layers of a full recompute."""
    from rich.table import Table

    table = Table()
    for column in ("", "first token", "faster", "computed", "KL to full", "same top"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for row in rows:
        style = "bold green" if row.name.startswith("blend") else ""
        table.add_row(
            row.name,
            seconds_text(row.ttft_s),
            f"{rows[0].ttft_s / row.ttft_s:.1f} x",
            share_text(row.first.row_layers, whole),
            "" if row is rows[0] else f"{row.close.kl:.2g}",
            "" if row is rows[0] else "yes" if row.close.top_1 else "no",
            style=style,
        )
    return table


def _show_kept(folder: Path) -> None:
    model, store = f"--model {folder}/model", f"--store {folder}/store"
    out = console()
    out.print("\nTry:")
    for command in (
        f"cacheblend store ls {folder}/store",
        f"cacheblend doctor {model}",
        f"cacheblend ask {model} {store} --data {folder}/passages.txt --question 'Who?' -n 16 --compare",
    ):
        out.print(f"  {command}", soft_wrap=True)


def _facts(
    engine: "BlendEngine", prompt: "Prompt", warmed: "WarmReport", rows: list[Row], laws: list["Outcome"]
) -> dict[str, Any]:
    whole = len(prompt) * len(engine.survey.layout.layers)
    return {
        "prompt_tokens": len(prompt),
        "weights": "random",
        "warm": {"passages": warmed.stored, "tokens": warmed.tokens, "seconds": warmed.seconds},
        "arms": [
            {
                "arm": row.name,
                "ttft_s": row.ttft_s,
                "speedup_vs_full": rows[0].ttft_s / row.ttft_s,
                "computed_share": row.first.row_layers / whole,
                **row.close.to_dict(),
            }
            for row in rows
        ],
        "laws": [{"law": title, "holds": ok, "detail": detail} for title, ok, detail in laws],
    }
