"""What `cacheblend demo` prints: an example, one table, some answers, the exactness invariants, and the limits."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cacheblend.cli.output import console, seconds_text, visible
from cacheblend.core.profile import quality_settings
from cacheblend.engines.settings import describe
from cacheblend.evaluation.demo import CATEGORIES, Demo, DemoResult, is_right, sample_rows
from cacheblend.evaluation.demo_example import find_example

if TYPE_CHECKING:
    from cacheblend.engines.hf import BlendEngine

RIGHT, WRONG = ("✓", "green"), ("✗", "red")


def show(engine: "BlendEngine", result: DemoResult, plot: Path | None) -> None:
    """Prints the demo in five steps."""
    out, warmed = console(), result.warmed
    longest = max(cell.prompt_tokens for row in result.found.rows for cell in row.cells)
    holds = all(ok for _, ok, _ in result.checks)
    steps = (
        ("Passages in which a pronoun refers to the person or firm named last", _example(result.demo)),
        (f"{warmed.stored} passages, {warmed.tokens} tokens, stored in {seconds_text(warmed.seconds)}", None),
        (
            f"{len(result.found.rows)} questions, each over all passages in another order (at most {longest} tokens)",
            Group(_table(result), _notes(engine, result)),
        ),
        ("Some of the answers", _samples(result)),
        (f"The exactness invariants {'hold, up to' if holds else 'are VIOLATED beyond'} rounding", _checks(result)),
    )
    for number, (heading, part) in enumerate(steps, start=1):
        out.print(Text.assemble("\n", (f"{number}. {heading}", "bold")))
        if part is not None:
            out.print(part)
    limits = (
        f"The model ({model_text(engine)}) ships with cacheblend and knows this kind of text only, in which few tokens "
        "carry what one passage needs from another. A few questions are no measurement: the demo shows the mechanism. "
        "`cacheblend evaluate` measures it on your model and data."
    )
    out.print(Text(f"\n{limits}", "dim"))
    if plot is not None:
        out.print(f"\nAll results in one picture: {plot}", soft_wrap=True)


def show_kept(folder: Path, demo: Demo) -> None:
    """Prints commands that use the folder of --keep."""
    kept = {name: shlex.quote(str(folder / name)) for name in ("model", "store", "passages.jsonl", "questions.jsonl")}
    model = f"--model {kept['model']} --dtype float32"
    question = f"--data {kept['passages.jsonl']} --question 'Who has the {find_example(demo).thing}?'"
    out = console()
    out.print("\nTry:")
    for command in (
        f"store ls {kept['store']}",
        f"ask {model} --store {kept['store']} {question} --compare",
        f"inspect {model} --store {kept['store']} {question} --out {shlex.quote(str(folder / 'inspection'))}",
        f"evaluate {model} --data {kept['questions.jsonl']} --selector profile --selector hkvd "
        f"--out {shlex.quote(str(folder / 'evaluations'))}",
    ):
        out.print(f"  cacheblend {command}", soft_wrap=True)


def model_text(engine: "BlendEngine") -> str:
    """Size of the model, and the device it runs on."""
    import torch

    parameters = sum(parameter.numel() for parameter in engine.model.parameters()) / 1e6
    device, threads = engine.model.device.type, torch.get_num_threads()
    where = f"CPU, {threads} thread{'s' if threads > 1 else ''}" if device == "cpu" else device
    return f"{len(engine.survey.layout.layers)} layers, {parameters:.1f} M parameters; {where}"


def _example(demo: Demo) -> Text:
    """A pronoun, and its antecedent in an earlier passage."""
    example = find_example(demo)
    text = Text("".join(f"{title}   ... {words} ...\n" for title, words in (example.antecedent, example.stated)))
    text.highlight_regex(r"\[.+?\]", "bold")
    text.append(f"\nWith the passages in the order {_order(example.asked.order)}, ").append(example.pronoun, "bold")
    text.append(f" in {example.stated[0]} is ").append(example.owner, "bold green")
    text.append(f", the last one named before, in {example.antecedent[0]}.")
    if example.elsewhere:
        text.append(" In another order it is ").append(example.elsewhere, "bold green").append(".")
    return text.append("\nThe KV cache of the passage alone contains neither name.")


def _order(order: tuple[int, ...]) -> str:
    return " ".join(str(index + 1) for index in order)


def _table(result: DemoResult) -> Table:
    """One column per method: right answers by category, then in all, then time and compute. Fits 80 columns."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for _ in range(2):
        table.add_column("", no_wrap=True)
    for method in result.methods:
        style = "bold green" if method.kind == "blend" else ""
        heading = method.kind.replace("hkvd", "HKVD")
        table.add_column(heading, justify="right", no_wrap=True, style=style, header_style=style)
    for category, meaning in CATEGORIES.items():
        answers = [method.right[category] for method in result.methods]
        cells = [Text(f"{sum(each)}/{len(each)}", "red" if 2 * sum(each) <= len(each) else "") for each in answers]
        table.add_row(category, Text(meaning, "dim"), *cells, end_section=category == list(CATEGORIES)[-1])
    figures = {
        ("all", "right answers"): ["{}/{}".format(*method.score) for method in result.methods],
        ("first token", "median"): [seconds_text(method.ttft_s) for method in result.methods],
        ("faster", ""): [f"{method.speedup:.1f} x" for method in result.methods],
        ("computed", "of a full prefill"): [f"{100 * method.compute:.0f} %" for method in result.methods],
        ("recomputed", "of the loaded tokens"): [
            "" if method.recomputed is None else f"{100 * method.recomputed:.0f} %" for method in result.methods
        ],
    }
    for (name, meaning), figure in figures.items():
        table.add_row(name, Text(meaning, "dim"), *figure)
    return table


def _notes(engine: "BlendEngine", result: DemoResult) -> Text:
    lines = ["prefix: in another order no stored prefix matches."]
    if any(method.kind == "blend" for method in result.methods):
        source = "the model's profile" if engine.settings.profile is not None else "the defaults"
        lines.append(f"blend: with {source} ({describe(quality_settings(engine.settings.config))}).")
    lines.append(f"HKVD: the paper's selector, {result.methods[-1].title.removeprefix('blend, HKVD ')}, check layer 1.")
    return Text("\n".join(lines), "dim")


def _samples(result: DemoResult) -> Text:
    """Some questions, and the answers of all methods."""
    text = Text()
    for row in sample_rows(result.found):
        order = _order(result.demo.questions[row.number].order)
        text.append(f"{result.demo.rows()[row.number].question} ", "italic").append(row.answers[0], "bold")
        text.append(f"   ({row.category}; order {order})\n", "dim")
        given: dict[tuple[bool, str], list[str]] = {}
        for method, cell in zip(result.methods, row.cells, strict=True):
            given.setdefault((is_right(row, cell), cell.answer), []).append(method.title)
        for (right, answer), methods in given.items():
            text.append("  ").append(*(RIGHT if right else WRONG))
            text.append(f" {visible(answer) or '(nothing)'}").append(f"   {'; '.join(methods)}\n", "dim")
    text.rstrip()
    return text


def _checks(result: DemoResult) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for title, ok, detail in result.checks:
        table.add_row(Text(*RIGHT) if ok else Text(*WRONG), title, detail)
    return table
