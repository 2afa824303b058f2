"""The demo: an evaluation of the shipped model, with passages stored once and asked about in many orders.

The order of the passages decides whom a pronoun refers to, and so the correct answers. Knows nothing of the terminal.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.select.selectors import NoRows
from cacheblend.data import QuestionRow, Text
from cacheblend.engines.hf import BlendEngine, Passage, WarmReport
from cacheblend.engines.hf.live_check import LiveCheck
from cacheblend.engines.hf.live_check import Outcome as Check
from cacheblend.evaluation.methods import FullRecompute, Fused, Label, Method, PrefixCaching
from cacheblend.evaluation.records import Cell, RowResult
from cacheblend.evaluation.run_config import Settings
from cacheblend.evaluation.runner import Evaluation, Progress, evaluate
from cacheblend.evaluation.scorers import ExactMatch, best
from cacheblend.evaluation.summary import summarise
from cacheblend.nano.reading import read_scene
from cacheblend.nano.scenes import Question, Scene, Style, draw_scene, spell

CATEGORIES = {
    "direct": "stated in one sentence",
    "local": "pronoun, same passage",
    "cross": "pronoun, earlier passage",
    "cross-hard": "the same, harder to read",
    "chain": "with an earlier thing",
    "comparison": "of two passages",
    "unanswerable": "stated nowhere",
}
"""The categories of questions, and where the answer is found."""

STYLE = Style(passages=8, tokens=232, dense=0.3, hard=0.3, chains=0.6)
SEED_OFFSET = 2_000_000  # neither the draws of training nor those of `nano.questions`
ORDERS_TRIED = 40
MAX_TOKENS = 8  # of an answer; the longest correct one has six


@dataclass(frozen=True)
class DemoQuestion:
    """A question over the passages in one order.

    Attributes:
        order: indices of the stored passages, in the order of the prompt.
        scene: the scene that they form in this order.
        question: a question of that scene.
    """

    order: tuple[int, ...]
    scene: Scene
    question: Question


@dataclass(frozen=True)
class Demo:
    """Passages to store, and questions, each over an order of its own; categories take turns."""

    scene: Scene
    questions: tuple[DemoQuestion, ...]

    def passages(self) -> list[Text]:
        """The passages in the order in which they were drawn."""
        return [Text(text, f"passage {number}") for number, text in enumerate(self.scene.texts(), start=1)]

    def rows(self) -> list[QuestionRow]:
        """The questions as rows for `evaluate`."""
        stored = self.passages()
        return [
            QuestionRow(
                question=spell(each.question.words),
                passages=tuple(stored[index] for index in each.order),
                answers=(spell(each.question.answer),),
                category=each.question.category,
                id=str(number),
            )
            for number, each in enumerate(self.questions)
        ]


def draw_demo(seed: int, per_category: int = 4) -> Demo:
    """Draws the demo of a seed, with `per_category` questions of each of `CATEGORIES`.

    Raises:
        InvalidInputError: `per_category` below 1.
    """
    if per_category < 1:
        raise InvalidInputError(f"a demo needs at least 1 question of each category, got {per_category}")
    rng = random.Random(SEED_OFFSET + seed)
    while True:  # a few scenes have no chain or no comparison
        scene = draw_scene(rng, STYLE)
        questions: list[DemoQuestion] = []
        for category in list(CATEGORIES) * per_category:
            found = next(_candidates(scene, rng, category, {each.question.words for each in questions}), None)
            if found is None:
                break
            questions.append(found)
        else:
            return Demo(scene, tuple(questions))


def _candidates(scene: Scene, rng: random.Random, category: str, known: set[tuple[str, ...]]) -> Iterator[DemoQuestion]:
    """Questions of a category, each over a random order; those already in `known` come last."""
    repeated = []
    for _ in range(ORDERS_TRIED):
        order = tuple(rng.sample(range(len(scene.passages)), len(scene.passages)))
        read = read_scene([scene.passages[index] for index in order])
        for question in read.questions(rng, (category,))[category][:1]:
            if question.words in known:
                repeated.append(DemoQuestion(order, read, question))
            else:
                yield DemoQuestion(order, read, question)
    yield from repeated


# ---- the evaluation ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MethodResult:
    """How a method did.

    Attributes:
        title: its name, for people.
        kind: ``full``, ``prefix``, ``reuse``, ``blend`` (the model's own settings) or ``hkvd``.
        right: for each category, whether each of its questions was answered correctly, in order.
        ttft_s: median.
        speedup: median over questions of the time of full recompute divided by that of this method.
        compute: total compute as a share of a full prefill.
        recomputed: share of the loaded tokens; None if nothing but a prefix is loaded.
    """

    title: str
    kind: str
    right: dict[str, list[bool]]
    ttft_s: float
    speedup: float
    compute: float
    recomputed: float | None

    @property
    def score(self) -> tuple[int, int]:
        """(correct answers, questions)."""
        answers = [right for of_category in self.right.values() for right in of_category]
        return sum(answers), len(answers)


@dataclass(frozen=True)
class DemoResult:
    """The result of `run_demo`.

    Attributes:
        demo: passages and questions.
        warmed: report of storing the passages.
        found: all answers.
        summary: of the answers, see `summarise`.
        methods: the summary by method, for people.
        checks: outcomes of the exactness invariants.
    """

    demo: Demo
    warmed: WarmReport
    found: Evaluation
    summary: dict[str, Any]
    methods: list[MethodResult]
    checks: list[Check]


def run_demo(engine: BlendEngine, demo: Demo, ratio: float, progress: Progress) -> DemoResult:
    """Stores the passages, answers all questions by all methods, and checks the exactness invariants.

    Args:
        engine: engine with the shipped model; it must not capture missed chunks.
        demo: passages and questions.
        ratio: recompute ratio of the blend by HKVD.
        progress: called with (``warming``, ``answering`` or ``checking``, done, total).
    """
    passages = [Passage(text.text, text.title) for text in demo.passages()]
    warmed = engine.warm(passages, progress=lambda done, total: progress("warming", done, total))
    methods, settings = demo_methods(engine.settings.config, ratio), Settings(max_tokens=MAX_TOKENS)

    def answered(stage: str, done: int, total: int) -> None:
        if stage == "answering":  # the passages are stored already
            progress(stage, done, total)

    found = evaluate(engine, demo.rows(), methods, settings=settings, progress=answered)
    summary = summarise(found, [ExactMatch()])
    checks = list(LiveCheck(engine.model, engine.survey).run())
    return DemoResult(demo, warmed, found, summary, method_results(found, summary), checks)


def demo_methods(profile: BlendConfig, ratio: float) -> list[Method]:
    """Full recompute, prefix caching, full reuse, blend with the model's own settings, and HKVD at check layer 1.

    The last two are one method if their selectors are equal.
    """
    own, hkvd = profile.make_selector(), BlendConfig(recompute_ratio=ratio).make_selector()
    return [
        FullRecompute(Label("full recompute", "full", "full")),
        PrefixCaching(Label("prefix caching", "prefix", "prefix")),
        Fused(Label("full reuse", "reuse", "reuse"), NoRows()),
        *([Fused(Label("blend", "blend", "blend"), own)] if own != hkvd else []),
        Fused(Label(f"blend, HKVD r = {ratio:g}", "blend", "hkvd", "hkvd", ratio, hkvd.check_layers), hkvd),
    ]


def method_results(found: Evaluation, summary: dict[str, Any]) -> list[MethodResult]:
    """The results of all methods of `demo_methods`, in order; `summary` is that of `summarise`."""
    results = []
    for number, method in enumerate(summary["methods"]):
        right: dict[str, list[bool]] = {category: [] for category in CATEGORIES}
        for row in found.rows:
            right[row.category].append(is_right(row, row.cells[number]))
        loads = method["kind"] in ("reuse", "blend")
        results.append(
            MethodResult(
                title=method["method"],
                kind=method["family"],
                right=right,
                ttft_s=method["ttft_s"]["median"],
                speedup=method["speedup"],
                compute=method["total_compute"],
                recomputed=method["recomputed_tokens"] / method["loaded_tokens"] if loads else None,
            )
        )
    return results


def is_right(row: RowResult, cell: Cell) -> bool:
    """Whether the answer is one of the gold answers."""
    return best(ExactMatch(), cell.answer, row.answers) == 1.0


def sample_rows(found: Evaluation, count: int = 4) -> list[RowResult]:
    """Rows to show, of different categories where possible.

    First come rows that full recompute answers correctly and full reuse does not; among these, the rows that all blends
    answer correctly.
    """
    kinds = [label.kind for label in found.methods]

    def rank(row: RowResult) -> tuple[bool, bool, int]:
        right = [is_right(row, cell) for cell in row.cells]
        lost = right[kinds.index("full")] and not right[kinds.index("reuse")]
        return not lost, not all(ok for ok, kind in zip(right, kinds, strict=True) if kind == "blend"), row.number

    seen: Counter[tuple[bool, str]] = Counter()
    ranked: list[tuple[bool, int, RowResult]] = []
    for row in sorted(found.rows, key=rank):
        ordinary = rank(row)[0]
        ranked.append((ordinary, seen[ordinary, row.category], row))
        seen[ordinary, row.category] += 1
    return [row for *_, row in sorted(ranked, key=lambda each: (each[0], each[1], each[2].number))[:count]]
