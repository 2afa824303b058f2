"""`cacheblend demo`: runs `evaluation.demo` on the model that ships, and prints an example and one table."""

import shlex
import shutil
import sys
import tempfile
from json import dumps
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cacheblend.cli import output
from cacheblend.cli.evaluate import progress_bars
from cacheblend.cli.models import PATIENT_S, open_engine
from cacheblend.cli.option_groups import option
from cacheblend.cli.options import BLENDING, OUTPUT, AsJson, DeviceOptions
from cacheblend.core.errors import CacheBlendError, InvalidInputError
from cacheblend.nano import model_path

# In full prefill the model has 27 of 28 answers of seed 1 right, as of most seeds, and 21 of those of seed 0.
# Whoever sees the demo first should see what blending changes, not what the model cannot do.
FIRST_SEED = 1
KEPT_FILES = ("model", "store", "passages.jsonl", "questions.jsonl", "evaluations")
DTYPE = "float32"  # the weights are bf16, in which many CPUs compute slowly
LIMITS = """ships with cacheblend and knows this kind of text only, in which few tokens carry what one passage needs \
from another. A few questions are no measurement: the demo shows the mechanism. `cacheblend evaluate` measures it on \
your model and data."""
LEFT: Any = {"title_justify": "left", "title_style": "", "caption_justify": "left", "caption_style": "dim"}
TABLE: Any = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False, "show_edge": False, **LEFT}
PICTURE = Path("cacheblend-demo.png")
MARK = {True: ("✓", "green"), False: ("✗", "red")}


def demo(
    ratio: float = option(
        0.15, "Share of loaded tokens that the blends by HKVD recompute.", "-r", least=0, most=1, panel=BLENDING
    ),
    questions: int = option(3, "Questions of each category.", "-n", least=1, most=12, panel=OUTPUT),
    seed: int = option(FIRST_SEED, "Which passages, orders and questions, 0 to 9.", least=0, most=9, panel=OUTPUT),
    plot: Path | None = option(
        None, f"File of the picture: .png, .svg or .pdf. Default: {PICTURE}, where it can be drawn.", panel=OUTPUT
    ),
    keep: Path | None = option(None, "Keep model, passages, questions and store in this new folder.", panel=OUTPUT),
    json: AsJson = False,
) -> None:
    """Store eight passages once, ask questions over them in many orders, and compare answers and times.

    Runs on the small model that ships, so nothing is downloaded; takes about half a minute on two CPU cores. Where
    SmolLM2-135M-Instruct is at hand (`make pretrained` in a checkout), it answers six questions, too.
    """
    picture = None
    try:
        picture = output.picture_file(plot or PICTURE)
    except InvalidInputError as error:
        if plot is not None and output.can_draw():
            raise
        output.say(f"no picture is drawn: {error}")
    try:
        if keep is not None:
            keep.mkdir(parents=True)
            shutil.copytree(model_path(), keep / "model")
    except OSError as error:
        reason = "it exists already; name a new one" if isinstance(error, FileExistsError) else error.strerror
        raise InvalidInputError(f"--keep {keep}: the folder cannot be made: {reason}") from error

    from cacheblend.core.profile import quality_settings
    from cacheblend.data.questions import question_lines
    from cacheblend.evaluation.demo import BUDGET_S, by_difference, demo_questions, find_example, run_demo

    rows = demo_questions(seed, questions)
    with tempfile.TemporaryDirectory(prefix="cacheblend-demo-") as folder:
        model, store = keep / "model" if keep else model_path(), str((keep or Path(folder)) / "store")
        config = {"capture": False, "load_timeout_s": PATIENT_S}
        with open_engine(model, store, config, DeviceOptions(DTYPE), quiet=json) as engine:
            settings = {"source": engine.runtime.settings.source, **quality_settings(engine.runtime.settings.config)}
            size = f"{engine.runtime.survey.num_layers} layers, {engine.model.num_parameters() / 1e6:.1f} M parameters"
            with progress_bars(quiet=json) as advance:
                result = run_demo(engine, rows, ratio, advance)
    if keep is not None:
        for name, lines in (("passages", map(dumps, result["passages"])), ("questions", question_lines(rows))):
            (keep / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    result["pretrained"] = _pretrained(json)
    count, about = len(result["passages"]), f"{size}; {result['evaluation']['cells'][0]['machine']}"
    result = {"seed": seed, "settings": settings, **result, "plot": None if picture is None else str(picture)}
    if picture is not None:
        from cacheblend.evaluation.demo import draw_demo_plot

        asked = len(result["questions"])
        title = f"{count} passages stored once; {asked} questions, each over the passages in another order"
        draw_demo_plot(result["methods"], picture, title=title, remark=f"The small model that ships: {about}")
    if json:
        output.print_json(result)
        return
    if len(result["questions"]) < len(rows):
        output.say(
            f"asked {len(result['questions'])} of {len(rows)} questions: after {BUDGET_S:g} s the demo begins no more. "
            "Other programs may be using this machine"
        )
    example = find_example([rows[number] for number in by_difference(result["evaluation"])])
    _show(result, example, about, keep)


def _pretrained(is_json: bool) -> dict[str, Any] | None:
    """What a pretrained model answers; None: there is none."""
    from cacheblend.evaluation.demo import ask_about_notes, pretrained_folder

    folder = pretrained_folder()
    if not (folder / "config.json").exists():  # the demo's help says how to have one
        return None
    config = {"capture": False, "load_timeout_s": PATIENT_S}
    try:
        with open_engine(folder, "memory", config, DeviceOptions(DTYPE), quiet=is_json) as engine:
            size = f"{engine.runtime.survey.num_layers} layers, {engine.model.num_parameters() / 1e6:.0f} M parameters"
            with progress_bars(quiet=is_json) as advance:
                return ask_about_notes(engine, advance) | {"model": f"{engine.name}, {size}"}
    except CacheBlendError as error:  # half a download, say
        output.say(f"the pretrained model is left out: {error}")
        return None


def _show(result: dict[str, Any], example: dict[str, Any], about: str, keep: Path | None) -> None:
    """Prints the demo in four steps, its limits, and commands to try; with --keep, such that use its folder."""
    warm, cells = result["warm"], [cell for row in result["evaluation"]["cells"] for cell in row["cells"]]
    stored = f"{warm['passages']} passages, {warm['tokens']} tokens, stored in {output.seconds_text(warm['seconds'])}"
    row = example["row"]
    answers = result["evaluation"]["cells"][int(row.id)]["cells"]
    longest, count = max(cell["prompt_tokens"] for cell in cells), len(result["questions"])
    holds, checks = all(each["holds"] for each in result["invariants"]), Table.grid(padding=(0, 2, 0, 0))
    for each in result["invariants"]:
        checks.add_row(Text(*MARK[each["holds"]]), each["invariant"], each["detail"])
    steps: list[tuple[str, RenderableType]] = [
        (stored, _passages(example, result)),
        ("One of the questions, answered by each method", _cells(row.question, row.answers[0], answers, "em")),
        (f"{count} questions, each over all passages in another order (at most {longest} tokens)", _table(result)),
        (f"The exactness invariants {'hold, up to' if holds else 'are VIOLATED beyond'} rounding", checks),
    ]
    if (pretrained := result["pretrained"]) is not None:
        rows = zip(pretrained["questions"], pretrained["cells"], strict=True)
        tables = [_cells(question, row["answers"][0], row["cells"], "contains") for question, row in rows]
        heading = f"A pretrained model ({pretrained['model']}) about six notes, with the default settings"
        steps.append((heading, Group(*tables)))
    out = output.console()
    for number, (heading, part) in enumerate(steps, start=1):
        out.print(Text(f"\n{number}. {heading}", "bold"), part, sep="\n")
    out.print(Text(f"\nThe model ({about}) {LIMITS}", "dim"))
    if result["plot"] is not None:
        out.print(f"\nAll results in one picture: {result['plot']}", soft_wrap=True)
    title = "Next, on your own model in a folder DIR (demo --keep NEW keeps what was shown here):"
    own = "--data FILE --question TEXT --compare"
    commands = [
        "doctor --model DIR",
        f"ask --model DIR {own}",
        "serve --model DIR --store file:///var/cache/cacheblend",
    ]
    if keep is not None:
        model, store, passages, questions, to = (shlex.quote(f"{keep}/{name}") for name in KEPT_FILES)
        opened = f"--model {model} --dtype {DTYPE}"
        asked = f"--store {store} --data {passages} --question {shlex.quote(row.question)}"
        title, commands = "Try:", [f"store ls {store}", f"ask {opened} {asked} --compare"]
        commands.append(f"evaluate {opened} --data {questions} --selector profile --selector hkvd --out {to}")
    program = "cacheblend" if shutil.which("cacheblend") else shlex.quote(sys.argv[0])
    out.print(f"\n{title}", *(f"  {program} {command}" for command in commands), sep="\n", soft_wrap=True)


def _passages(example: dict[str, Any], result: dict[str, Any]) -> Text:
    """A pronoun, and its antecedent in an earlier passage."""
    (above, _), (below, _), row = example["antecedent"], example["stated"], example["row"]
    order = " ".join(map(str, result["questions"][int(row.id)]["order"]))
    text = Text("In the passages, a pronoun refers to the person or firm named last:\n")
    text.append("".join(f"{title}   ... {line} ...\n" for title, line in (example["antecedent"], example["stated"])))
    text.append(f"With the passages in the order {order}, the pronoun in {below} is ")
    text.append(row.answers[0], "bold green").append(f", the last one named before, in {above}.")
    if example["elsewhere"]:
        text.append(" In another order it is ").append(example["elsewhere"], "bold green").append(".")
    text.highlight_regex(r"\[.+?\]", "bold")
    return text.append(f"\nThe KV cache of {below} alone contains neither name.")


def _cells(question: str, right: str, cells: list[dict[str, Any]], scorer: str) -> Table:
    """A question, and the answers of all methods side by side."""
    table = Table("", "", "answer", **TABLE)
    table.title = Text.assemble((f"{question} ", "italic"), (right, "bold"))
    for name in ("first token", "computed"):
        table.add_column(name, justify="right")
    for cell in cells:
        mark, answer = Text(*MARK[cell["scores"][scorer] == 1]), Text(output.visible(cell["answer"]) or "(nothing)")
        share = f"{100 * cell['total_compute']:.0f} %"
        table.add_row(mark, cell["method"], answer, output.seconds_text(cell["ttft_s"]), share)
    return table


def _table(result: dict[str, Any]) -> Table:
    """One column per method: right answers by category, then in all, then time and compute. Fits 80 columns."""
    from cacheblend.evaluation.demo import CATEGORIES

    table, methods = Table("", "", **TABLE), result["methods"]
    for method in methods:
        style = "bold green" if method["kind"] == "blend" else ""
        table.add_column(method["kind"], justify="right", no_wrap=True, style=style, header_style=style)
    for category, (meaning, _) in CATEGORIES.items():
        answers = [method["right"][category] for method in methods]
        cells = [Text(f"{sum(each)}/{len(each)}", "red" if 2 * sum(each) <= len(each) else "") for each in answers]
        table.add_row(category, Text(meaning, "dim"), *cells)
    table.add_section()
    shares = ["" if method["recomputed"] is None else f"{100 * method['recomputed']:.0f} %" for method in methods]
    for name, meaning, figures in (
        ("all", "right answers", ["{}/{}".format(*method["score"]) for method in methods]),
        ("first token", "median", [output.seconds_text(method["ttft_s"]) for method in methods]),
        ("faster", "median by question", [f"{method['speedup']:.1f} x" for method in methods]),
        ("computed", "of a full prefill", [f"{100 * method['compute']:.0f} %" for method in methods]),
        ("recomputed", "of the loaded tokens", shares),
    ):
        table.add_row(name, Text(meaning, "dim"), *figures)
    table.caption = (
        "full: what the model itself answers; where it is wrong, so are the others, mostly.\n"
        "prefix: in another order no stored prefix matches.\n"
        "blend: stored KV at its new places, and what deviates most computed anew.\n"
        f"gradual: {methods[-2]['title']}, as the paper describes it.\n"
        f"one check: {methods[-1]['title']}, of values at layer 1, as in the authors' code."
    )
    return table
