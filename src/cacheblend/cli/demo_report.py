"""What `cacheblend demo` prints: a passage, the tables, some answers, the laws, and what it does not show."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cacheblend.cli.output import console, seconds_text, visible
from cacheblend.evaluation.demo import CATEGORIES, Excerpt, find_example
from cacheblend.evaluation.demo_results import is_right, telling_rows
from cacheblend.nano.scenes import spell

if TYPE_CHECKING:
    from cacheblend.cli.demo import DemoResult
    from cacheblend.engines.hf import BlendEngine
    from cacheblend.evaluation.demo import Demo
    from cacheblend.evaluation.demo_results import Standing

RIGHT, WRONG = ("✓", "green"), ("✗", "red")
MARKED = {"blend": "bold green"}
SHORT = {"full": "full", "prefix": "prefix", "reuse": "reuse", "blend": "blend", "hkvd": "HKVD"}


def show(engine: "BlendEngine", told: "DemoResult") -> None:
    """The demo in six steps."""
    out = console()
    for number, (heading, part) in enumerate(
        (
            ("A small world, in which a pronoun means who was named last", _passages(told)),
            (_stored(told), None),
            (_asked(told), _costs(told.standings, engine)),
            ("Right answers", _categories(told.standings)),
            ("Some of the answers", _samples(told)),
            ("What must be exact is exact, to rounding" if _all_hold(told) else "NOT exact", _invariants(told)),
        ),
        start=1,
    ):
        out.print(Text.assemble("\n", (f"{number}. {heading}", "bold")))
        if part is not None:
            out.print(part)
    out.print(Text(f"\n{_honest(engine)}", "dim"))
    if told.plot is not None:
        out.print(f"\nAll of it in one picture: {told.plot}", soft_wrap=True)


def show_kept(folder: Path, demo: "Demo") -> None:
    """Which commands take what was kept."""
    kept = {name: shlex.quote(str(folder / name)) for name in ("model", "store", "passages.jsonl", "questions.jsonl")}
    model = f"--model {kept['model']} --dtype float32"
    asked = find_example(demo)
    question = f"--data {kept['passages.jsonl']} --question 'Who has the {asked.thing}?'"
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
    """Size of the model, and what it runs on."""
    import torch

    parameters = sum(parameter.numel() for parameter in engine.model.parameters()) / 1e6
    device = engine.model.device.type
    threads = torch.get_num_threads()
    where = f"CPU, {threads} thread{'s' if threads > 1 else ''}" if device == "cpu" else device
    return f"{len(engine.survey.layout.layers)} layers, {parameters:.1f} M parameters; {where}"


# ---- the parts --------------------------------------------------------------------------------------------


def _passages(told: "DemoResult") -> Text:
    """A pronoun, and its antecedent in a passage in front of it."""
    example = find_example(told.demo)
    order = " ".join(str(index + 1) for index in example.asked.order)
    text = Text()
    for excerpt in (example.named, example.told):
        text.append_text(_excerpt(excerpt))
    text.append(f"\nWith the passages in the order {order}, ")
    text.append(example.told.word, "bold").append(f" in {example.told.title} is ")
    text.append(example.owner, "bold green")
    text.append(f", named last in front of it, in {example.named.title}.")
    if example.elsewhere:
        text.append(" In another order it is ").append(example.elsewhere, "bold green").append(".")
    text.append("\nA cache of the passage alone has seen neither.")
    return text


def _excerpt(of: Excerpt) -> Text:
    text = Text(f"{of.title}   ... {of.before} ".replace("...  ", "... "))
    front, word, behind = of.sentence.rpartition(of.word)
    text.append(front).append(f"[{word}]", "bold").append(f"{behind} {of.behind} ...\n")
    return text


def _stored(told: "DemoResult") -> str:
    warmed = told.warmed
    return (
        f"{warmed.stored} passages, {warmed.tokens} tokens, computed once, each alone, and stored: "
        f"{seconds_text(warmed.seconds)}"
    )


def _asked(told: "DemoResult") -> str:
    longest = max(cell.prompt_tokens for row in told.found.rows for cell in row.cells)
    return f"{len(told.found.rows)} questions, each over all passages in another order ({longest} tokens at most)"


def _costs(methods: "list[Standing]", engine: "BlendEngine") -> Group:
    """A line a method."""
    table = _table("", "right", "first token", "faster", "computed", "again")
    for method in methods:
        right, questions = method.score
        table.add_row(
            method.title,
            f"{right} of {questions}",
            seconds_text(method.ttft_s),
            f"{method.speedup:.1f} x",
            f"{100 * method.compute:.0f} %",
            "" if method.recomputed is None else f"{100 * method.recomputed:.0f} %",
            style=MARKED.get(method.kind, ""),
        )
    return Group(table, Text("\n".join(_notes(methods, engine)), "dim"))


def _notes(methods: "list[Standing]", engine: "BlendEngine") -> list[str]:
    from cacheblend.core.profile import quality_settings
    from cacheblend.engines.settings import describe

    lines = [
        "first token: median. computed: all work until then, 100 % is a full prefill.",
        "again: share of the loaded tokens that were recomputed.",
        "prefix caching: in another order no stored prefix fits.",
    ]
    settings = engine.settings
    if any(method.kind == "blend" for method in methods):
        whose = "the model's profile" if settings.profile is not None else "the defaults"
        lines.append(f"blend: as {whose} has it ({describe(quality_settings(settings.config))}).")
    return lines


def _categories(methods: "list[Standing]") -> Table:
    """A line a category, a column a method."""
    table = _table("", "", *(SHORT[method.kind] for method in methods))
    table.columns[1].justify = "left"
    for category, meaning in CATEGORIES.items():
        cells = []
        for method in methods:
            answers = method.right[category]
            style = "red" if 2 * sum(answers) <= len(answers) else ""
            cells.append(Text(f"{sum(answers)}/{len(answers)}", style))
        table.add_row(category, Text(meaning, "dim"), *cells)
    return table


def _samples(told: "DemoResult") -> Text:
    """Some questions, and who answered what."""
    asked = {str(number): each for number, each in enumerate(told.demo.asked)}
    text = Text()
    for row in telling_rows(told.found):
        order = " ".join(str(index + 1) for index in asked[row.id].order)
        text.append(f"{spell(asked[row.id].question.words)} ", "italic").append(row.answers[0], "bold")
        text.append(f"   ({row.category}; order {order})\n", "dim")
        given: dict[tuple[bool, str], list[str]] = {}
        for method, cell in zip(told.standings, row.cells, strict=True):
            given.setdefault((is_right(row, cell), cell.answer), []).append(method.title)
        for (right, answer), methods in given.items():
            text.append("  ").append(*(RIGHT if right else WRONG))
            text.append(f" {visible(answer) or '(nothing)'}").append(f"   {'; '.join(methods)}\n", "dim")
    text.rstrip()
    return text


def _invariants(told: "DemoResult") -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for title, ok, detail in told.laws:
        table.add_row(Text(*RIGHT) if ok else Text(*WRONG), title, detail)
    return table


def _all_hold(told: "DemoResult") -> bool:
    return all(ok for _, ok, _ in told.laws)


def _honest(engine: "BlendEngine") -> str:
    return (
        f"The model ({model_text(engine)}) ships with cacheblend and knows this small world only. The text is built so "
        "that few tokens carry what one passage needs of another, and a handful of questions is no measurement: this "
        "shows the mechanism, on this model. For yours there is `cacheblend evaluate`."
    )


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, caption_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table
