"""What a pretrained model, SmolLM2-135M-Instruct, answers about six notes that are stored once."""

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from cacheblend.core.select.selectors import NoRows
from cacheblend.data import QuestionRow
from cacheblend.engines.hf import BlendEngine, Passage
from cacheblend.evaluation.methods import FullRecompute, Fused, Label, Method
from cacheblend.evaluation.runner import Progress, Settings, evaluate
from cacheblend.evaluation.scorers import Contains
from cacheblend.evaluation.summary import summarise, with_cells
from cacheblend.evaluation.templates import read_template

NAME = "smollm2-135m-instruct"
MAX_TOKENS = 24  # of an answer: a sentence
NOTES = Path(str(files("cacheblend.data"))) / "examples.json"
QUESTIONS = (
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
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cacheblend" / NAME


def ask_about_notes(engine: BlendEngine, progress: Progress) -> dict[str, Any]:
    """Answers of full recompute, full reuse and the engine's own blend to `QUESTIONS` about the notes of the server's
    page, in turn in their order and turned round: in the form of `with_cells`, with the ``questions``. The notes are
    stored first."""
    notes = [Passage(each["text"], each["title"]) for each in json.loads(NOTES.read_text(encoding="utf-8"))["passages"]]
    rows = [
        QuestionRow(question, tuple(notes[:: -1 if number % 2 else 1]), answers, "", str(number))
        for number, (question, answers) in enumerate(QUESTIONS)
    ]
    engine.warm(notes)
    methods: list[Method] = [
        FullRecompute(Label("full recompute", "full", "full")),
        Fused(Label("full reuse", "reuse", "reuse"), NoRows()),
        Fused(Label("blend", "blend", "blend"), engine.runtime.settings.config.make_selector()),
    ]
    settings = Settings(read_template("qa"), max_tokens=MAX_TOKENS)
    found = evaluate(engine, rows, methods, settings=settings, progress=progress)
    questions = [row.question for row in rows]
    return {"questions": questions, **with_cells(summarise(found, [Contains()]), found, [Contains()])}
