"""The demo: an evaluation of the shipped model, with passages stored once and asked about in many orders.

The order of the passages decides whom a pronoun refers to, and so the correct answers. Where a pretrained model is at
hand, it answers questions about six notes, too. Knows nothing of the terminal.
"""

import json
import os
import time
from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.select.selectors import Gradual, Hkvd, NoRows
from cacheblend.data import QuestionRow
from cacheblend.engines.hf import BlendEngine, Passage
from cacheblend.engines.hf.live_check import LiveCheck
from cacheblend.evaluation.methods import FullRecompute, Fused, Label, Method, PrefixCaching
from cacheblend.evaluation.plots import STYLE, new_figure
from cacheblend.evaluation.runner import Progress, Settings, evaluate
from cacheblend.evaluation.scorers import Contains, ExactMatch
from cacheblend.evaluation.summary import summarise, with_cells
from cacheblend.evaluation.templates import read_template
from cacheblend.nano import lexicon

CATEGORIES = {
    "direct": ("stated in one sentence", "stated"),
    "local": ("pronoun, same passage", "same\npassage"),
    "cross": ("pronoun, earlier passage", "earlier\npassage"),
    "cross-hard": ("the same, harder to read", "earlier,\nharder"),
    "chain": ("with an earlier thing", "chain"),
    "comparison": ("of two passages", "compare"),
    "unanswerable": ("stated nowhere", "stated\nnowhere"),
}
"""The categories of questions, and where the answer is found: in a table, and as a heading."""

DATA = Path(str(files("cacheblend.nano"))) / "demo.jsonl"
"""A line for each seed: its passages, and questions in rounds of all categories; drawn by the lab's `nano.data`."""
MAX_TOKENS = 8  # of an answer; the longest correct one has six
BUDGET_S = 90.0
"""After this none is begun, but one of each category: 21 take 20 s on two free cores, minutes on busy ones."""


def demo_questions(seed: int, per_category: int = 4) -> list[QuestionRow]:
    """Questions over the same passages, each over an order of its own; the `CATEGORIES` take turns. Raises
    `InvalidInputError`: no such seed, or `per_category` below 1 or above what there is."""
    drawn = {each["seed"]: each for each in map(json.loads, DATA.read_text(encoding="utf-8").splitlines())}
    if seed not in drawn:
        raise InvalidInputError(f"the demo has questions of the seeds {min(drawn)} to {max(drawn)}, not {seed}")
    texts = [Passage(text, f"passage {number}") for number, text in enumerate(drawn[seed]["passages"], start=1)]
    asked = drawn[seed]["questions"]
    most = len(asked) // len(CATEGORIES)
    if not 1 <= per_category <= most:
        raise InvalidInputError(f"a demo asks 1 to {most} questions of each category, not {per_category}")
    return [
        QuestionRow(
            each["question"],
            tuple(texts[place - 1] for place in each["order"]),
            (each["answer"],),
            each["category"],
            str(number),
        )
        for number, each in enumerate(asked[: per_category * len(CATEGORIES)])
    ]


def find_example(rows: Sequence[QuestionRow]) -> dict[str, Any]:
    """The first question of category cross whose pronoun refers to someone else in another order, if there is one, as
    ``row``: the question's; ``antecedent``, ``stated``: (title of the passage, sentence) of the antecedent and of the
    pronoun, these words in brackets; ``elsewhere``: the antecedent in another order, empty if it is the same."""
    examples = [_example(row, rows) for row in rows if row.category == "cross"]
    return next((example for example in examples if example["elsewhere"]), examples[0])


def _example(row: QuestionRow, rows: Sequence[QuestionRow]) -> dict[str, Any]:
    owner, start = row.answers[0], f"The {row.question.rstrip('?').split()[-1]} "
    kind = lexicon.KIND_OF[owner]
    sentences = [(each.title, f"{text}.") for each in row.passages for text in each.text.rstrip(".").split(". ")]
    stated = next(at for at, (_, text) in enumerate(sentences) if text.startswith(start))
    named = max(at for at in range(stated) if f" {owner}" in sentences[at][1])
    elsewhere = ""
    for other in reversed(rows):
        words = " ".join(each.text for each in other.passages).split(start)[0].replace(".", "").split()
        last = next((word for word in reversed(words) if lexicon.KIND_OF.get(word) == kind), owner)
        elsewhere = elsewhere if last == owner else last
    found: dict[str, Any] = {"row": row, "elsewhere": elsewhere}
    for key, at, word in (("antecedent", named, owner), ("stated", stated, " ".join(lexicon.OBJECT_CASE[kind]))):
        found[key] = (sentences[at][0], sentences[at][1].replace(f" {word}", f" [{word}]"))
    return found


def run_demo(engine: BlendEngine, rows: Sequence[QuestionRow], ratio: float, progress: Progress) -> dict[str, Any]:
    """Stores the passages, answers the questions begun within `BUDGET_S` by all methods, checks the invariants. The
    engine has the shipped model and captures no missed chunks; `ratio`: of the blends by HKVD. Returns the results in
    the form in which they are written to JSON; ``evaluation`` is that of `with_cells`."""
    passages = sorted(rows[0].passages, key=lambda each: each.title)
    warmed = engine.warm(passages, progress=partial(progress, "warming"))
    methods, settings = demo_methods(engine.runtime.settings.config, ratio), Settings(max_tokens=MAX_TOKENS)
    ends = time.monotonic() + BUDGET_S
    found = evaluate(
        engine,
        rows,
        methods,
        settings=settings,
        progress=progress,
        enough=lambda answered: answered >= len(CATEGORIES) and time.monotonic() > ends,
    )
    asked = rows[: len(found.rows)]
    evaluation = with_cells(summarise(found, [ExactMatch()]), found, [ExactMatch()])
    orders = [[int(passage.title.split()[1]) for passage in row.passages] for row in asked]
    checks = LiveCheck(engine.model, engine.runtime.survey).run()
    return {
        "warm": {"passages": warmed.stored, "tokens": warmed.tokens, "seconds": warmed.seconds},
        "passages": [{"title": each.title, "text": each.text} for each in passages],
        "questions": [
            {"order": order, "question": row.question, "category": row.category, "answer": row.answers[0]}
            for order, row in zip(orders, asked, strict=True)
        ],
        "methods": method_figures(evaluation),
        "evaluation": evaluation,
        "invariants": [{"invariant": title, "holds": ok, "detail": detail} for title, ok, detail in checks],
    }


def demo_methods(profile: BlendConfig, ratio: float) -> list[Method]:
    """Full recompute, prefix caching, full reuse, blends: with the model's settings (unless those are one of the
    others), by HKVD as the paper describes it, by HKVD as in the authors' code."""
    own, gradual, one_check = profile.make_selector(), Gradual(ratio), Hkvd((1,), (ratio,), "v")
    return [
        FullRecompute(Label("full recompute", "full", "full")),
        PrefixCaching(Label("prefix caching", "prefix", "prefix")),
        Fused(Label("full reuse", "reuse", "reuse"), NoRows()),
        *([Fused(Label("blend", "blend", "blend"), own)] if own not in (gradual, one_check) else []),
        Fused(Label(f"HKVD, gradual, r = {ratio:g}", "blend", "gradual", "hkvd", ratio, gradual.check_layers), gradual),
        Fused(Label(f"HKVD, one check, r = {ratio:g}", "blend", "one check", "hkvd", ratio, (1,)), one_check),
    ]


def method_figures(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """What is shown of each method of an evaluation by `with_cells`: ``kind``: the family; ``right``: by category,
    which answers are correct; ``score``: correct answers, questions; ``recomputed``: share of the loaded tokens, None
    if only a prefix is loaded; all others as of `summarise`."""
    figures = []
    for number, method in enumerate(evaluation["methods"]):
        answers = [(row["category"], row["cells"][number]["scores"]["em"] == 1) for row in evaluation["cells"]]
        share = method["recomputed_tokens"] / max(1, method["loaded_tokens"])
        figures.append(
            {
                "title": method["method"],
                "kind": method["family"],
                "right": {category: [right for at, right in answers if at == category] for category in CATEGORIES},
                "score": (sum(right for _, right in answers), len(answers)),
                "ttft_s": method["ttft_s"]["median"],
                "speedup": method["speedup"],
                "compute": method["total_compute"],
                "recomputed": share if method["kind"] in ("reuse", "blend") else None,
            }
        )
    return figures


def by_difference(evaluation: dict[str, Any]) -> list[int]:
    """The numbers of the rows: first where full recompute is right and full reuse wrong, and blends are right first."""
    families = [method["family"] for method in evaluation["methods"]]

    def rank(row: dict[str, Any]) -> tuple[bool, bool, int]:
        right = {family: cell["scores"]["em"] == 1 for family, cell in zip(families, row["cells"], strict=True)}
        return right["reuse"] or not right["full"], not (right["gradual"] and right.get("blend", True)), row["number"]

    return [row["number"] for row in sorted(evaluation["cells"], key=rank)]


# Okabe and Ito's colours, which colour-blind readers can distinguish.
COLOURS = {"full": "#3b3b3b", "prefix": "#8c8c8c", "reuse": "#d55e00", "blend": "#0072b2"}
COLOURS |= {"gradual": "#56b4e9", "one check": "#009e73"}
WRONG, QUIET = "#bdbdbd", "#666666"
ACROSS, NOTE = ("cross", "cross-hard", "chain", "comparison"), "the answer needs another passage"
DOTS_PER_LINE = 4


def draw_demo_plot(methods: Sequence[dict[str, Any]], file: Path, *, title: str, remark: str) -> None:
    """Writes a dot for every answer, and times to first token, in the format of the file's ending. Needs matplotlib.
    `methods`: see `method_figures`; a row each, full recompute first. `title` stands above, `remark` below."""
    import matplotlib

    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = new_figure(12, 2.4 + 0.62 * len(methods))
        answers, times = figure.subplots(1, 2, sharey=True, width_ratios=(2.5, 1))
        for y, method in enumerate(methods):
            for x, category in enumerate(CATEGORIES):  # a dot a question, filled if right, in lines around `y`
                found, colour = method["right"][category], COLOURS[method["kind"]]
                lines, width = -(-len(found) // DOTS_PER_LINE), min(len(found), DOTS_PER_LINE)
                for i, right in enumerate(found):
                    place = x + 0.2 * (i % width - (width - 1) / 2), y + 0.24 * (i // width - (lines - 1) / 2)
                    colours = {"color": colour if right else "none", "markeredgecolor": colour if right else WRONG}
                    answers.plot(*place, marker="o", markersize=8, markeredgewidth=1.3, clip_on=False, **colours)
            end, (score, asked) = len(CATEGORIES), method["score"]
            answers.text(end - 0.05, y, f"{score}", ha="right", va="center", fontsize=13, fontweight="bold")
            answers.text(end + 0.01, y, f"/ {asked}", va="center", color=QUIET)
            seconds, is_full = method["ttft_s"], method["kind"] == "full"
            times.barh(y, seconds, height=0.46, color=COLOURS[method["kind"]])
            at: dict[str, Any] = {"xy": (seconds, y), "textcoords": "offset points", "va": "center"}
            times.annotate(f"{1e3 * seconds:.0f} ms", xytext=(5, 0 if is_full else 7), fontweight="bold", **at)
            if not is_full:
                text = f"{method['speedup']:.1f} x faster, {100 * method['compute']:.0f} % computed"
                times.annotate(text, xytext=(5, -8), fontsize=9, color=QUIET, **at)
        # Names of methods and categories; those across passages stand on a coloured ground.
        answers.set(xlim=(-0.5, len(CATEGORIES) + 0.45), ylim=(len(methods) - 0.5, -0.5))
        answers.set_yticks(range(len(methods)), [method["title"] for method in methods])
        for label, method in zip(answers.get_yticklabels(), methods, strict=True):
            label.set_fontweight("bold" if method["kind"] == "blend" else "normal")
        answers.set_xticks(range(len(CATEGORIES)), [heading for _, heading in CATEGORIES.values()])
        answers.tick_params(labeltop=True, labelbottom=False)
        across = [x for x, category in enumerate(CATEGORIES) if category in ACROSS]
        answers.axvspan(across[0] - 0.5, across[-1] + 0.5, color="#fbf3e4", linewidth=0, zorder=-1)
        answers.text(sum(across) / len(across), len(methods) - 0.52, NOTE, ha="center", fontsize=9, color=QUIET)
        answers.spines[:].set_visible(False)
        times.set(xlim=(0, 1.85 * max(method["ttft_s"] for method in methods)), xticks=[])
        times.spines[["top", "right", "bottom"]].set_visible(False)
        times.spines["left"].set_color("#cccccc")
        for axes, heading in ((answers, "Right answers (filled)"), (times, "Time to first token (median)")):
            axes.set_title(heading, y=1.16, pad=0, fontsize=11.5, color=QUIET)
            axes.tick_params(length=0)
        figure.suptitle(title, x=0.006, ha="left", fontsize=14, fontweight="bold")
        figure.supxlabel(remark, x=0.006, ha="left", fontsize=9, color=QUIET)
        figure.savefig(file)


# ---- a pretrained model, about six notes ----

PRETRAINED = "smollm2-135m-instruct"
NOTE_TOKENS = 24  # of an answer: a sentence
NOTES = Path(str(files("cacheblend.data"))) / "examples.json"
NOTE_QUESTIONS = (
    ("Who was the first keeper of the lighthouse?", ("Edith Calloway",)),
    ("Of what is the tower made?", ("granite",)),
    ("Where is the weather book kept today?", ("Marleigh Institute",)),
    ("How long does the crossing take?", ("50 minutes", "fifty minutes")),
    ("When was the institute founded?", ("1902",)),
    ("Who founded the Marleigh Institute?", ("Tomas Rehl",)),
)
"""Of sixteen that were tried, those which the model answers right where it computes the whole prompt; the others would
say what the model cannot do, not what blending changes."""


def pretrained_folder() -> Path:
    """Where the lab makes it (`make pretrained`), in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cacheblend" / PRETRAINED


def ask_about_notes(engine: BlendEngine, progress: Progress) -> dict[str, Any]:
    """Answers of full recompute, full reuse and the engine's own blend to `NOTE_QUESTIONS` about the notes of the
    server's page, in turn in their order and turned round: in the form of `with_cells`, with the ``questions``. The
    notes are stored first."""
    notes = [Passage(each["text"], each["title"]) for each in json.loads(NOTES.read_text(encoding="utf-8"))["passages"]]
    rows = [
        QuestionRow(question, tuple(notes[:: -1 if number % 2 else 1]), answers, "", str(number))
        for number, (question, answers) in enumerate(NOTE_QUESTIONS)
    ]
    engine.warm(notes)
    methods: list[Method] = [
        FullRecompute(Label("full recompute", "full", "full")),
        Fused(Label("full reuse", "reuse", "reuse"), NoRows()),
        Fused(Label("blend", "blend", "blend"), engine.runtime.settings.config.make_selector()),
    ]
    settings = Settings(read_template("qa"), max_tokens=NOTE_TOKENS)
    found = evaluate(engine, rows, methods, settings=settings, progress=progress)
    questions = [row.question for row in rows]
    return {"questions": questions, **with_cells(summarise(found, [Contains()]), found, [Contains()])}
