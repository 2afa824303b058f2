"""`cacheblend doctor`: can this model be blended, and how much must be recomputed to keep its answers."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import typer
from rich.table import Table
from rich.text import Text

from cacheblend.cli import models, options, output
from cacheblend.cli.option_groups import changed, option, refuse_unused
from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.folders import name_of, shipped_folder

if TYPE_CHECKING:
    from cacheblend.evaluation.gate import Bar, GateResult, Tried

MARKS = {True: ("✓", "green"), False: ("✗", "red"), None: ("·", "dim")}


@dataclass(frozen=True)
class QualityOptions:
    """What the quality gate tries, and what it demands."""

    panel: ClassVar = "Quality gate"
    quality: bool = option(False, "Find the cheapest setting that agrees with full recompute.")
    selector: list[str] | None = option(
        None,
        "Selectors to try, as for evaluate; several times. Default, of those that the model can have: head that "
        "corrects other keys, hkvd, gradual, query, query that follows the words of what it finds, hybrid, and "
        "narrowing (hybrid, most rows in the first layers).",
    )
    ratio: list[float] | None = option(
        None, "Ratios to try; several times. Default: 0.05 to 0.5.", "-r", least=0, most=1
    )
    threshold: float = option(0.99, "Share of first tokens that must agree, 0..1.")
    confidence: float = option(0.95, "Confidence of the one-sided bounds, 0..1.")
    max_tokens: int = option(16, "Tokens of an answer.", "-n", least=1, most=4096)
    seed: int = option(0, "Seed of the split of the rows.", least=0, most=options.MOST_SEED)
    profile: Path | None = option(
        None, "File to write the profile to. Default: blend-profile.json in the model's folder."
    )
    dry_run: bool = option(False, "Write no profile.")


def doctor(
    model: options.ModelOrShape,
    device: options.DeviceOptions,
    questions: options.QuestionOptions,
    gate: QualityOptions,
    stored: options.PassageOptions,
    store: options.StoreOptions = options.IN_MEMORY,
    json: options.AsJson = False,
) -> None:
    """Check whether a model can be blended, including a live run of both exactness invariants. Exit code 1 means no.

    With --quality, on your own prompts (598 rows or more for the defaults): find the cheapest setting that is shown to
    agree with full recompute, and write it as the model's profile. Exit code 1: no setting was shown to.
    """
    chosen = model.chosen()
    if not gate.quality:
        of_gate = (gate, QualityOptions()), (questions, options.QuestionOptions())
        of_store = (stored, options.PassageOptions()), (store, options.IN_MEMORY)
        refuse_unused(changed(*of_gate, *of_store), "without --quality")
        if not _examine(chosen, device, json):
            raise typer.Exit(1)
        return
    if chosen.model is None or questions.file is None:
        raise InvalidInputError("--quality needs a model folder (--model) and questions with passages (--data)")

    from cacheblend.core.config import BlendConfig
    from cacheblend.engines.settings import PROFILE_NAME, check_writable, layers_of, write_profile
    from cacheblend.evaluation.candidates import grid
    from cacheblend.evaluation.gate import Bar, GateRow, attempts_for, profile_of, run_gate
    from cacheblend.evaluation.scorers import WordF1

    folder, file = chosen.model, questions.file
    profile = None if gate.dry_run else gate.profile or folder / PROFILE_NAME
    if profile is not None and gate.profile is None and folder.resolve() == shipped_folder():
        raise InvalidInputError("the profile of the model that ships stays as it is; give --profile FILE, or --dry-run")
    settings = questions.settings(None, gate.max_tokens)
    bar = Bar(
        gate.threshold, gate.confidence, answer_tokens=gate.max_tokens, stop=settings.template.stop, scorer=WordF1()
    )
    asked, bad, digest = questions.read(file)
    if profile is not None:
        check_writable(profile)
    config = BlendConfig.of(stored.settings() | {"capture": False, "load_timeout_s": models.PATIENT_S})
    tried = gate.selector or (), gate.ratio or ()
    if (layers := layers_of(folder)) is not None:
        grid(layers, *tried)  # refuses unknown selectors before the model is opened
    if not attempts_for(len(asked) - len(asked) // 2, bar):  # said at once: asking takes minutes
        output.say(
            f"note: {len(asked)} rows cannot decide: {100 * bar.threshold:g} % agreement at {100 * bar.confidence:g} % "
            f"needs {2 * bar.needed_rows} with different passages. Settings are compared on these, and no profile is "
            "written"
        )
    with models.open_engine(folder, store.store, config, device, quiet=json) as engine:
        candidates, rows = grid(engine.runtime.survey.num_layers, *tried, engine.runtime.survey.fit_selector), []
        for case in questions.cases(engine, asked, settings, bad):  # without a prompt: it is too long, which is counted
            prompt = case.prompts.get(None) or settings.template.parts(engine, case.row.passages, case.row.question)
            rows.append(GateRow(prompt, case.row.answers))
        with output.progress("asking", "rows", quiet=json) as advance:
            result = run_gate(engine, rows, candidates, bar, seed=gate.seed, progress=advance)
        written, failed = profile if result.verdict != "too few rows" else None, None
        if written is not None:
            try:
                write_profile(written, profile_of(engine, result, file.name, digest))
            except InvalidInputError as error:  # what hours of measuring found is shown nevertheless
                written, failed = None, error
    if json:
        output.print_json(result.to_dict() | {"profile": None if written is None else str(written), "bad_rows": bad})
    else:
        _show(result, folder, written, bad)
    if failed is not None:
        raise failed
    if result.verdict != "passed":
        raise typer.Exit(1)


def _examine(model: options.ModelOrShape, device: options.DeviceOptions, as_json: bool) -> bool:
    """Examines the model and prints what was found; whether it can be blended."""
    with output.status("examining ...", quiet=as_json) as say:
        models.quiet_transformers()
        from cacheblend.engines.hf.doctor import Check, diagnose

        dtype, place = models.checked(device)
        if model.model is not None:
            found = diagnose(model.model, name=name_of(model.model), dtype=dtype, device=place, on_check=say)
        else:
            import torch

            from cacheblend.engines.hf.shapes import build_shape

            assert model.shape is not None  # one of the two is given
            wanted = torch.bfloat16 if dtype == "auto" else dtype
            built = build_shape(model.shape, dtype=wanted, device=str(place))
            found = diagnose(built, name=f"{model.shape} (random weights)", on_check=say)
        if model.model is not None and found.blendable:
            from cacheblend.engines.settings import resolve_settings

            try:
                settings = resolve_settings(None, model.model, found.fingerprint)
            except InvalidInputError as error:  # a damaged profile
                found.checks.append(Check("profile", False, str(error).removeprefix("the profile ")))
            else:
                blends = settings.profile is not None and settings.profile.blend
                said = settings.source.removeprefix("the profile ")
                found.checks.append(Check("profile", True if blends else None, said))
    if as_json:
        output.print_json(found.to_dict())
        return found.blendable
    table = Table(title=found.model, title_justify="left", box=None, padding=(0, 1), show_header=False)
    for overflow in ("ellipsis", "ellipsis", "fold"):  # wrap a long path instead of cutting it
        table.add_column(overflow=overflow)
    for check in found.checks:
        table.add_row(Text(*MARKS[check.ok]), check.name, check.detail)
    out = output.console()
    out.print(table)
    if found.blendable:
        out.print(Text.assemble("\n", ("yes", "bold green"), ", this model can be blended"))
    else:
        out.print(Text.assemble("\n", ("no", "bold red"), ": ", found.reason))
    return found.blendable


def _show(result: "GateResult", model: Path, written: Path | None, bad: list[str]) -> None:
    out, bar = output.console(), result.bar
    if bad:
        out.print(f"note: {len(bad)} rows cannot be used and were left out; the first: {bad[0]}", soft_wrap=True)
    out.print(_table("search: all settings, on rows that are used for nothing else", result.searched, bar))
    if result.confirmed:
        part = f", each held to {100 * bar.part(result.attempts).confidence:.3g} %" if result.attempts > 1 else ""
        out.print(_table(f"confirmation: on fresh rows{part}", result.confirmed, bar))
    skipped, chosen = result.skipped, result.chosen
    counts = (
        (skipped.too_long, "are longer than the model's context"),
        (skipped.repeated, "repeat an earlier one"),
        (skipped.nothing_to_blend, "have nothing to blend"),
        (skipped.same_passages, "have the passages of another row of the confirmation"),
    )
    notes = [f"{count} rows {why}, and were left out" for count, why in counts if count]
    labelled = max((one.found.f1_rows for one in result.confirmed if one.found), default=0)
    if 0 < labelled < bar.needed_f1_rows:
        notes.append(
            f"{labelled} confirmed rows have gold answers: the F1 bound decides with them, but with fewer than "
            f"{bar.needed_f1_rows} F1 is not shown: a rare, large loss may not have occurred at all"
        )
    wanted = f"{100 * bar.threshold:g} % agreement of first tokens with full recompute, at {100 * bar.confidence:g} %"
    if chosen is not None and chosen.found is not None:
        verdict = f"{chosen.candidate.name}: {output.share_text(chosen.found.compute, 1)} of the compute holds {wanted}"
        if chosen.found.ttft_ratio <= 1:
            notes.append(
                f"on this machine the chosen setting is not faster than full recompute ({chosen.found.ttft_ratio:.2f} "
                "x its speed to the first token): it saves compute, not time"
            )
    elif result.verdict == "too few rows":
        verdict = (
            f"too few rows to decide: {result.passage_sets} rows have different passages, {wanted} needs "
            f"{2 * bar.needed_rows} in which something is blended, without an error (half to search, half to confirm)"
        )
    else:
        verdict = f"no setting was shown to hold {wanted}"
        verdict += ": this model is not blended unless a request asks for it" if written is not None else ""
    for line in notes:
        out.print(f"note: {line}", style="yellow", soft_wrap=True)
    out.print(verdict, style="bold green" if chosen else "bold red", soft_wrap=True)
    kept = f"no profile written; {name_of(model)} stays as it is"
    out.print(kept if written is None else f"profile written to {written}", soft_wrap=True)


def _table(title: str, tried: list["Tried"], bar: "Bar") -> Table:
    table = Table(title=f"\n{title}", title_justify="left", box=None, padding=(0, 1, 0, 0))
    with_f1 = any(one.found and one.found.f1_rows for one in tried)
    columns = ["compute", "agree", "bound", "KL", *(["F1 - full", "bound"] if with_f1 else []), "faster"]
    table.add_column("setting", overflow="fold", ratio=1)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True, min_width=6)
    table.add_column("", no_wrap=True)
    for one in tried:
        found = one.found
        if found is None:
            table.add_row(one.candidate.name, *[""] * len(columns), "no row")
            continue
        f1 = ["" if value is None else f"{value:+.3f}" for value in (found.f1_difference, found.f1_bound)]
        if one.passes or one.stopped:
            outcome = "passes" if one.passes else "given up"
        elif found.compute >= 1:
            outcome = "saves nothing"
        else:
            outcome = "fails" if found.agreement < bar.threshold else "not shown"
        table.add_row(
            one.candidate.name,
            output.share_text(found.compute, 1),
            f"{found.agreed}/{found.rows}",
            output.share_text(found.bound, 1),
            f"{found.kl:.2g}",
            *(f1 if with_f1 else ()),
            f"{found.ttft_ratio:.1f} x",
            outcome,
            style="green" if one.passes else "",
        )
    return table
