"""`cacheblend doctor --quality`: from a user's file to the gate, and from its result to a table and a profile."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cacheblend.cli.models import PATIENT_S, model_name, open_engine
from cacheblend.cli.options import DeviceOptions
from cacheblend.cli.output import console, print_json, progress, share_text
from cacheblend.cli.prompt_options import QuestionOptions
from cacheblend.cli.question_files import settings_of, split_rows

if TYPE_CHECKING:
    from rich.table import Table

    from cacheblend.core.config import AnchorKind
    from cacheblend.data import QuestionRow
    from cacheblend.engines.hf import BlendEngine
    from cacheblend.evaluation import Settings
    from cacheblend.evaluation.gate import Bar, GateResult, GateRow, Tried


@dataclass(frozen=True)
class GateOptions:
    """What a user set.

    Attributes:
        model: folder, or ``nano``.
        questions: their file and the layout of their prompts; a file is given.
        anchor: of the passages.
        selectors, ratios: to try; empty for all.
        seed: of the split of the rows.
        store: URL.
        profile: file to write; None writes none.
        device: of the model.
    """

    model: Path
    questions: QuestionOptions
    anchor: str = "auto"
    selectors: tuple[str, ...] = ()
    ratios: tuple[float, ...] = ()
    seed: int = 0
    store: str = "memory"
    profile: Path | None = None
    device: DeviceOptions = field(default_factory=DeviceOptions)


def run_quality(options: GateOptions, bar: "Bar", *, as_json: bool) -> bool:
    """Runs the gate, prints what it found, writes the profile. True if a setting passed."""
    from cacheblend.core.config import BlendConfig
    from cacheblend.engines.settings import check_writable, write_profile
    from cacheblend.evaluation.candidates import grid
    from cacheblend.evaluation.gate import profile_of, run_gate
    from cacheblend.evaluation.scorers import WordF1

    asked, device = options.questions, options.device
    assert asked.file is not None  # the command has checked that
    settings = settings_of(asked, None, bar.answer_tokens)
    questions, bad = asked.read(asked.file)
    if options.profile is not None:
        check_writable(options.profile)
    bar = replace(bar, stop=settings.template.stop, scorer=WordF1())
    anchor = cast("AnchorKind", options.anchor)  # which is checked here
    config = BlendConfig(capture=False, anchor=anchor, load_timeout_s=PATIENT_S)
    _check_grid(options)
    with open_engine(
        options.model, options.store, config, dtype=device.dtype, device=device.device, quiet=as_json
    ) as engine:
        candidates = grid(engine.survey.num_layers, options.selectors, options.ratios)
        rows = _rows(engine, split_rows(engine, questions, asked, settings, bad), settings)
        with progress("asking", "rows", quiet=as_json) as advance:
            result = run_gate(engine, rows, candidates, bar, seed=options.seed, progress=advance)
        written = options.profile if result.verdict != "too few rows" else None
        if written is not None:
            write_profile(written, profile_of(engine, result, asked.file))
    if as_json:
        print_json(result.to_dict() | {"profile": None if written is None else str(written), "bad_rows": bad})
    else:
        _show(result, options, written, bad)
    return result.verdict == "passed"


def _check_grid(options: GateOptions) -> None:
    """Refuses unknown selectors and wrong ratios before the model is opened."""
    from cacheblend.cli.models import model_folder
    from cacheblend.engines.settings import layers_of
    from cacheblend.evaluation.candidates import grid

    layers = layers_of(model_folder(options.model))
    if layers is not None:
        grid(layers, options.selectors, options.ratios)


def _rows(engine: "BlendEngine", questions: "list[QuestionRow]", settings: "Settings") -> list["GateRow"]:
    """Prompts of any length; the gate counts those that are too long and leaves them out."""
    from cacheblend.engines.hf import Passage
    from cacheblend.evaluation.gate import GateRow

    rows = []
    for question in questions:
        passages = [Passage(text.text, text.title) for text in question.passages]
        parts = settings.template.layout.parts(engine, passages, question.question)
        rows.append(GateRow(parts, question.answers))
    return rows


# ---- what is shown ----------------------------------------------------------------------------------------


def _show(result: "GateResult", options: GateOptions, written: Path | None, bad: list[str]) -> None:
    out = console()
    if bad:
        out.print(f"note: {len(bad)} rows cannot be used and were left out; the first: {bad[0]}", soft_wrap=True)
    searched = "search: all settings, on rows that are used for nothing else"
    out.print(_table(searched, result.searched, result.bar))
    if result.confirmed:
        part = (
            f", each held to {100 * result.bar.part(result.attempts).confidence:.3g} %" if result.attempts > 1 else ""
        )
        out.print(_table(f"confirmation: on fresh rows{part}", result.confirmed, result.bar))
    for line in _notes(result):
        out.print(f"note: {line}", style="yellow", soft_wrap=True)
    out.print(_verdict(result), style="bold green" if result.chosen else "bold red", soft_wrap=True)
    if written is not None:
        out.print(f"profile written to {written}", soft_wrap=True)
    elif result.verdict != "too few rows":
        out.print("no profile written (--dry-run)")
    else:
        out.print(f"no profile written; {model_name(options.model)} stays as it is", soft_wrap=True)


def _table(title: str, tried: list["Tried"], bar: "Bar") -> "Table":
    from rich.table import Table

    table = Table(title=f"\n{title}", title_justify="left", box=None, padding=(0, 1, 0, 0))
    with_f1 = any(one.found and one.found.f1_rows for one in tried)
    columns = ["compute", "agree", "bound", "KL", *(["F1 - full", "bound"] if with_f1 else []), "faster"]
    table.add_column("setting", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for one in tried:
        found = one.found
        if found is None:
            table.add_row(one.candidate.name, *[""] * len(columns), "no row")
            continue
        f1 = [_signed(found.f1_difference), _signed(found.f1_bound)] if with_f1 else []
        table.add_row(
            one.candidate.name,
            share_text(found.compute, 1),
            f"{found.agreed}/{found.rows}",
            share_text(found.bound, 1),
            f"{found.kl:.2g}",
            *f1,
            f"{found.ttft_ratio:.1f} x",
            _outcome(one, bar),
            style="green" if one.passes else "",
        )
    return table


def _outcome(one: "Tried", bar: "Bar") -> str:
    if one.passes:
        return "passes"
    if one.stopped:
        return "given up"
    assert one.found is not None
    if one.found.compute >= 1:
        return "saves nothing"
    return "fails" if one.found.agreement < bar.threshold else "not shown"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.3f}"


def _notes(result: "GateResult") -> list[str]:
    """What limits the verdict."""
    skipped, bar = result.skipped, result.bar
    counts = (
        (skipped.too_long, "are longer than the model's context"),
        (skipped.repeated, "repeat an earlier one"),
        (skipped.nothing_to_blend, "have nothing to blend"),
        (skipped.same_passages, "have the passages of another row of the confirmation"),
    )
    lines = [f"{count} rows {why}, and were left out" for count, why in counts if count]
    labelled = max((one.found.f1_rows for one in result.confirmed if one.found), default=0)
    if 0 < labelled < bar.needed_f1_rows:
        lines.append(
            f"{labelled} confirmed rows have gold answers: the F1 bound decides with them, but with fewer than "
            f"{bar.needed_f1_rows} a rare, large loss may not have occurred at all"
        )
    chosen = result.chosen.found if result.chosen else None
    if chosen is not None and chosen.ttft_ratio <= 1:
        lines.append(
            f"on this machine the chosen setting is not faster than full recompute ({chosen.ttft_ratio:.2f} x its "
            "speed to the first token): it saves compute, not time"
        )
    return lines


def _verdict(result: "GateResult") -> str:
    bar, chosen = result.bar, result.chosen
    wanted = f"{100 * bar.threshold:g} % agreement of first tokens with full recompute, at {100 * bar.confidence:g} %"
    if chosen is not None and chosen.found is not None:
        return f"{chosen.candidate.name}: {share_text(chosen.found.compute, 1)} of the compute holds {wanted}"
    if result.verdict == "too few rows":
        return (
            f"too few rows to decide: {result.passage_sets} rows have different passages, {wanted} needs "
            f"{2 * bar.needed_rows} without an error (half to search, half to confirm); nothing was confirmed"
        )
    return f"no setting was shown to hold {wanted}: this model is not blended unless a request asks for it"
