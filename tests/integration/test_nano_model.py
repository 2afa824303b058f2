"""The model that ships: what transformers finds in the folder, and that it answers as its card says."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheblend.core.select.selectors import AllRows, NoRows, Selector
from cacheblend.data import QuestionRow
from cacheblend.engines.hf import BlendEngine, Passage, SamplingParams
from cacheblend.engines.hf.baselines import finish, fused
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
    answer, _ = finish(engine, prompt, fused(engine, prompt, selector), SamplingParams(max_new_tokens=8))
    return answer == row.answers[0]


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
    assert tokenizer.backend_tokenizer.get_vocab() == build_tokenizer().get_vocab(), "the one that training uses"
    files = {file.name: file.stat().st_size for file in model_path().iterdir()}
    assert {"README.md", "blend-profile.json", "model.safetensors"} <= set(files) and sum(files.values()) < 16_000_000


@pytest.mark.parametrize(
    ("how", "category", "least", "most"),
    [
        *(("full recompute", each, 0.75, 1) for each in ("direct", "local", "cross", "chain", "unanswerable")),
        *(("full reuse", each, 0.75, 1) for each in ("direct", "local")),
        *(("full reuse", each, 0, 0.25) for each in ("cross", "cross-hard", "chain")),  # they need two passages
        *(("its profile", each, 0.7, 1) for each in ("cross", "chain")),
    ],
)
def test_it_answers_as_its_card_says(engine: BlendEngine, how: str, category: str, least: float, most: float) -> None:
    assert engine.settings.profile is not None
    selectors = {"full recompute": AllRows(), "full reuse": NoRows(), "its profile": engine.settings.selector()}
    rows = draw_questions(SEED, ROWS, [category], SHORT)
    assert least <= sum(right(engine, row, selectors[how]) for row in rows) / len(rows) <= most
