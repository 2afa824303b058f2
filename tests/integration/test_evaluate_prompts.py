"""The prompts of an evaluation, the room that they need in the store, and rows and settings that cannot be asked."""

from pathlib import Path
from typing import Any

import pytest

from cacheblend.cli.options import LayoutOptions
from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.data import QuestionRow, Text
from cacheblend.engines.hf import BlendEngine, Passage
from cacheblend.engines.hf.layout import PromptLayout
from cacheblend.evaluation import Settings, Template, evaluate, make_methods
from cacheblend.store import MemoryStore
from evaluation_rows import ROWS, cells_of, engine, make_row, model
from tokenizers_for_tests import CHATML, byte_level

__all__ = ["engine", "model"]  # fixtures


# ---- what stands in front of the passages, and room in the store ----------------------------------------------


def test_a_system_prompt_is_an_exact_prefix_of_every_row(model: Path) -> None:
    template = Template(system="You answer questions from passages, and you do so in very few words.")
    with BlendEngine.from_pretrained(model, device="cpu") as engine:
        assert engine.builder is not None
        found = evaluate(
            engine, ROWS, make_methods(["full", "prefix", "reuse"]), settings=Settings(template, max_tokens=1)
        )
        system = 1 + len(engine.builder.encode(template.system + "\n\n"))
    assert {cell.loaded_tokens for cell in cells_of(found, "prefix")} == {system}
    assert {cell.missed_tokens for cell in cells_of(found, "reuse")} == {0}


def test_the_anchor_system_stores_passages_behind_it(model: Path) -> None:
    template = Template(system="You answer questions from passages.", chat=False)
    with BlendEngine.from_pretrained(model, device="cpu", config=BlendConfig(anchor="system")) as engine:
        found = evaluate(engine, ROWS, make_methods(["full", "reuse"]), settings=Settings(template, max_tokens=1))
    assert {cell.missed_tokens for cell in cells_of(found, "reuse")} == {0}


def test_a_small_store_is_filled_again_and_again(model: Path) -> None:
    texts = [f"Passage {number} tells of the year {1800 + 7 * number}, and of nothing else." for number in range(12)]
    rows = [QuestionRow("When?", tuple(Text(text, "") for text in texts[i : i + 2])) for i in range(0, 12, 2)]
    with BlendEngine.from_pretrained(model, device="cpu") as engine:
        needed = max(len(PromptLayout().prompt(engine, [Passage(t.text) for t in r.passages], "When?")) for r in rows)
        bytes_per_token = engine.survey.layout.block_bytes(1)
    with (
        MemoryStore(5 * needed * bytes_per_token) as store,
        BlendEngine.from_pretrained(model, device="cpu", store=store) as engine,
    ):
        found = evaluate(engine, rows, make_methods(["full", "reuse"]), settings=Settings(max_tokens=1))
        assert store.stats().evictions > 0
    assert {cell.missed_tokens for cell in cells_of(found, "reuse")} == {0}


# ---- prompts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", [None, "Be brief. {question}"])
@pytest.mark.parametrize("template", [None, CHATML])
def test_the_default_layout_is_that_of_ask(model: Path, template: str | None, system: str | None) -> None:
    with BlendEngine.from_pretrained(model, device="cpu") as opened:
        weights = opened.model
    weights.resize_token_embeddings(800)
    with BlendEngine(weights, byte_level(template), fingerprint="x") as engine:
        texts = [("The fox jumps.", ""), ("The dog sleeps.", "Dogs")]
        prompt = LayoutOptions(system).build(engine, texts, "Who {question}?")
        parts: list[Any] = ["The fox jumps.", "\n\n", "The dog sleeps.", "\n\n", "Who {question}?"]
        if template is None:
            expected = engine.prompt([f"{system}\n\n", *_with_passages(parts)] if system else _with_passages(parts))
        else:
            content = [{"type": ("chunk", "text")[i % 2 if i < 4 else 1], "text": text} for i, text in enumerate(parts)]
            messages: list[Any] = [{"role": "system", "content": system}] if system else []
            expected = engine.prompt([*messages, {"role": "user", "content": content}])
        assert [(s.token_ids.tolist(), s.is_chunk) for s in prompt.segments] == [
            (s.token_ids.tolist(), s.is_chunk) for s in expected.segments
        ]


def _with_passages(parts: list[str]) -> list[Any]:
    return [Passage(text) if i in (0, 2) else text for i, text in enumerate(parts)]


def test_headings_and_a_text_in_front_are_plain_text_around_the_chunks(engine: BlendEngine) -> None:
    assert engine.builder is not None
    layout = PromptLayout(before="Read:\n", heading="{number}) {title}: ", separator="\n", question="Q: {question}")
    prompt = layout.prompt(engine, [Passage("The fox.", "Fox"), Passage("The dog.", "Dog")], "Who?")
    texts = [engine.builder.decode(segment.token_ids.tolist()) for segment in prompt.segments]
    assert texts[1:] == ["Read:\n", "1) Fox: ", "The fox.", "\n", "2) Dog: ", "The dog.", "\n", "Q: Who?"]
    assert [segment.label for segment in prompt.chunks] == ["Fox", "Dog"]


def test_prompts_over_the_context_are_skipped_and_counted(engine: BlendEngine) -> None:
    long = make_row(0, passages=30)
    found = evaluate(
        engine, [long, ROWS[1]], make_methods(["full", "reuse"]), settings=Settings(top_k=(2, None), max_tokens=2)
    )
    assert [cell.top_k for cell in found.rows[0].cells] == [2, 2]
    ((k, reason),) = found.rows[0].too_long
    assert k is None and "tokens, the model's context 256" in reason
    assert found.rows[1].too_long == []
    with pytest.raises(InvalidInputError, match=r"none of the 1 prompts fits the model's context 256"):
        evaluate(engine, [long], make_methods(["full"]))


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([], Settings(), "there are no rows"),
        ([ROWS[0], make_row(1, passages=0)], Settings(), "row 1: it has no passage"),
        ([make_row(0, question="", id="q7")], Settings(), r"row 0 \(id q7\): the question is empty"),
        ([make_row(0, passages=1)], Settings(Template(chat=True)), "row 0: the tokenizer has no chat template"),
    ],
)
def test_rows_that_cannot_be_asked(
    engine: BlendEngine, rows: list[QuestionRow], settings: Settings, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        evaluate(engine, rows, make_methods(["full"]), settings=settings)


def test_settings_and_methods_that_cannot_be(engine: BlendEngine) -> None:
    with pytest.raises(InvalidInputError, match="top_k must be at least 1, got 0"):
        Settings(top_k=(0,))
    with pytest.raises(InvalidInputError, match="max_tokens must be at least 1, got 0"):
        Settings(max_tokens=0)
    with pytest.raises(InvalidInputError, match=r"check layer 3 does not exist: the model has layers 0..2"):
        evaluate(engine, ROWS, make_methods(["blend"], check_layers=[(3,)]))
    with pytest.raises(InvalidInputError, match="two methods have the same name: full"):
        evaluate(engine, ROWS, make_methods(["full"]) * 2)
