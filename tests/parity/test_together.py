"""Batched decoding gives the tokens of the model's own `generate`, whenever answers join or leave the batch."""

from collections.abc import Sequence

import pytest
import torch

from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.selectors import AllRows
from cacheblend.engines.hf import SamplingParams
from cacheblend.engines.hf.decode import GROW_ROWS, Decoding, Sampler, compute_logits
from cacheblend.engines.hf.view import ModelView
from families import tiny_model
from parity.scenes import EVERY, QUESTION, RAG, SYSTEM, A, B, C, greedy, warm_engine

PROMPTS = (RAG, Prompt.of([SYSTEM, C, QUESTION]), Prompt.of([B, QUESTION, A, QUESTION]))


def answering(family: str, prompt: Prompt, params: SamplingParams) -> Decoding:
    engine = warm_engine(family)
    result = engine.prefill(prompt, selector=AllRows())
    return Decoding(Sampler(engine.ids_of(prompt), result.logits, params, []), list(result.kv))


def step(view: ModelView, answers: Sequence[Decoding]) -> None:
    compute_logits(view, answers)
    for answer in answers:
        answer.sampler.sample()


@pytest.mark.parametrize("family", EVERY)
def test_each_answer_equals_generate(family: str) -> None:
    params = SamplingParams(max_new_tokens=6)
    answers = [answering(family, prompt, params) for prompt in PROMPTS]
    for round_ in range(8):  # each answer starts one step after the previous one
        going = [a for number, a in enumerate(answers) if number <= round_ and a.sampler.finish_reason is None]
        step(warm_engine(family).view, going)
    for answer, prompt in zip(answers, PROMPTS, strict=True):
        assert answer.sampler.token_ids == greedy(tiny_model(family), prompt, 6)


def test_a_kv_cache_grows_when_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend.engines.hf.decode.GROW_ROWS", 3)
    answer = answering("llama", RAG, SamplingParams(max_new_tokens=20))
    while answer.sampler.finish_reason is None:
        step(warm_engine("llama").view, [answer])
    assert GROW_ROWS > 3 and answer.sampler.token_ids == greedy(tiny_model("llama"), RAG, 20)


def test_answers_of_one_prompt_share_only_the_prompts_kv() -> None:
    engine = warm_engine("llama")
    result = engine.prefill(RAG, selector=AllRows())
    params = [SamplingParams(max_new_tokens=8, temperature=2.0, seed=seed) for seed in (1, 2, 1)]
    answers = [Decoding(Sampler(engine.ids_of(RAG), result.logits, each, []), list(result.kv)) for each in params]
    while answers[0].sampler.finish_reason is None:
        step(engine.view, answers)
    first, second, third = (answer.sampler.token_ids for answer in answers)
    assert first == third != second
    torch.manual_seed(0)
    single = Sampler(engine.ids_of(RAG), result.logits, params[1], [])
    alone = Decoding(single, list(result.kv))
    while single.finish_reason is None:
        step(engine.view, [alone])
    assert single.token_ids == second
