"""The model that ships: what transformers finds in the folder, and that it answers as its card says."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheblend.core.select.selectors import AllRows, NoRows, Selector
from cacheblend.data import QuestionRow
from cacheblend.engines.hf import BlendEngine, Passage, SamplingParams
from cacheblend.evaluation.templates import Template
from cacheblend.nano import model_path
from lab.nano.questions import Prompts, draw_questions
from lab.nano.tokenizer import MAX_POSITIONS, build_tokenizer

SHORT = Prompts(passages=(4, 6), tokens=(64, 96))
ROWS = 12
SEED = 70


@pytest.fixture(scope="module")
def engine() -> BlendEngine:
    return BlendEngine.from_pretrained(model_path(), store="memory", device="cpu")


def right(engine: BlendEngine, row: QuestionRow, selector: Selector) -> bool:
    prompt = Template().layout.prompt(engine, [Passage(text.text) for text in row.passages], row.question)
    engine.warm(prompt.chunks)
    result = engine.prefill(prompt, selector=selector)
    from cacheblend.engines.hf.baselines import PlainDecoding

    params = SamplingParams(max_new_tokens=8)
    decoding = PlainDecoding(engine.model, result.kv, engine.ids_of(prompt), result.logits, params, engine.eos_ids)
    while decoding.sampler.finish_reason is None:
        decoding.step()
    assert engine.builder is not None
    return engine.builder.decode(decoding.sampler.token_ids) == row.answers[0]


def share(engine: BlendEngine, category: str, selector: Selector) -> float:
    rows = draw_questions(SEED, ROWS, [category], SHORT)
    return sum(right(engine, row, selector) for row in rows) / len(rows)


def test_transformers_opens_it_without_this_package() -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path())
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    assert model.dtype == torch.bfloat16
    assert model.config.num_hidden_layers >= 12 and model.config.max_position_embeddings == MAX_POSITIONS
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "The boot belongs to Alban.\n\nWho has the boot?"}],
        add_generation_prompt=True,
        return_dict=False,
        return_tensors="pt",
    )
    found = model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]
    assert found[-1] == tokenizer.eos_token_id


def test_it_is_small_enough_to_ship() -> None:
    assert sum(file.stat().st_size for file in model_path().iterdir()) < 16_000_000


def test_its_tokenizer_is_the_one_that_training_uses() -> None:
    shipped = AutoTokenizer.from_pretrained(model_path()).backend_tokenizer
    assert shipped.get_vocab() == build_tokenizer().get_vocab()


@pytest.mark.parametrize("category", ["direct", "local", "cross", "chain", "unanswerable"])
def test_full_recompute_answers(engine: BlendEngine, category: str) -> None:
    assert share(engine, category, AllRows()) >= 0.75


@pytest.mark.parametrize("category", ["direct", "local"])
def test_full_reuse_answers_what_needs_one_passage(engine: BlendEngine, category: str) -> None:
    assert share(engine, category, NoRows()) >= 0.75


@pytest.mark.parametrize("category", ["cross", "cross-hard", "chain"])
def test_full_reuse_does_not_answer_what_needs_two(engine: BlendEngine, category: str) -> None:
    assert share(engine, category, NoRows()) <= 0.25


@pytest.mark.parametrize("category", ["cross", "chain"])
def test_its_profile_answers_what_needs_two(engine: BlendEngine, category: str) -> None:
    assert engine.settings.profile is not None
    assert share(engine, category, engine.settings.selector()) >= 0.7


def test_its_card_and_profile_ship(tmp_path: Path) -> None:
    assert {"README.md", "blend-profile.json", "model.safetensors"} <= {file.name for file in model_path().iterdir()}
