"""An engine's answers on a tiny llama: those of transformers, streams, stops, chats, and of several threads at once."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.core.select.selectors import NoRows
from cacheblend.engines.hf import SamplingParams
from small_llama import (
    CONTEXT,
    GREEDY,
    LAYERS,
    PARTS,
    PASSAGES,
    QUESTION,
    Open,
    check_sums,
    plain,
)

# ---- one at a time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("warmed", [False, True])
def test_full_recompute_gives_the_answer_of_transformers(open_engine: Open, warmed: bool) -> None:
    engine = open_engine()
    if warmed:
        engine.warm(PASSAGES)
    prompt = engine.prompt(PARTS)
    answer = engine.generate(prompt, GREEDY, ratio=1.0)
    assert answer.token_ids == plain(engine, prompt)
    assert answer.finish_reason == "length"
    assert (answer.report.missed_tokens == 0) == warmed
    check_sums(answer)
    if warmed:  # an exact prefix gives it at any ratio
        parts = [PASSAGES[0], QUESTION]
        answer = engine.generate(parts, GREEDY, ratio=0.0)
        assert answer.token_ids == plain(engine, engine.prompt(parts))
        assert answer.report.hit_tokens["prefix"] == answer.report.loaded_tokens > 1
        check_sums(answer)


def test_the_ratio_sets_the_number_of_recomputed_rows(open_engine: Open) -> None:
    engine = open_engine(check_layers=(1,))
    engine.warm(PASSAGES)
    prompt = engine.prompt(PARTS)
    chunks = sum(len(s) for s in prompt.chunks)
    for ratio in (0.0, 0.15, 0.5, 1.0):
        answer = engine.generate(PARTS, GREEDY, ratio=ratio)
        assert answer.report.recomputed_tokens == round(ratio * chunks)
        check_sums(answer)
    result = engine.prefill(prompt, selector=NoRows())
    assert (result.report.recomputed_tokens, len(result.kv)) == (0, LAYERS)
    assert result.kv[0].keys.shape[1] == len(prompt)


def test_an_answer_ends_at_eos_of_the_model_or_the_tokenizer(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fine-tuned models ship with a generation config that names another token than the tokenizer, or none."""
    engine = open_engine(capture=False)
    whole, end = engine.generate(PARTS, GREEDY), engine.tokenizer.eos_token_id
    monkeypatch.setattr(engine.model.generation_config, "eos_token_id", [whole.token_ids[2], 0])
    ended = engine.generate(PARTS, SamplingParams(max_new_tokens=8))
    assert ended.finish_reason == "stop"
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(whole.token_ids[2]) + 1]
    drawn = SamplingParams(max_new_tokens=8, temperature=0.0, logit_bias=((end, 90.0),))
    for configured, ids in (([3, 4], [3, 4, end]), (5, [5, end]), (None, [end]), (end, [end])):
        monkeypatch.setattr(engine.model.generation_config, "eos_token_id", configured)
        assert engine.eos_ids == ids
        answer = engine.generate(PARTS, drawn)
        assert (answer.token_ids, answer.finish_reason) == ([end], "stop")


def test_chat_messages_as_a_prompt(open_engine: Open) -> None:
    engine = open_engine()
    engine.warm(PASSAGES)
    parts = [{"type": "chunk", "text": p.text, "title": p.title} for p in PASSAGES[:2]]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
    answer = engine.generate(messages, GREEDY, ratio=1.0)
    assert answer.token_ids == plain(engine, engine.prompt(messages))
    assert answer.report.missed_tokens == 0
    assert answer.report.hit_tokens["memory"] == sum(len(s) for s in engine.prompt(messages).chunks)
    check_sums(answer)


def test_documents_are_placed_by_the_template_or_in_the_last_message(open_engine: Open) -> None:
    engine = open_engine()
    engine.warm(PASSAGES)
    if not engine.tokenizer.chat_template:
        pytest.skip("this tokenizer has no chat template")
    prompt = engine.chat_prompt([{"role": "user", "content": QUESTION}], documents=PASSAGES)
    assert [segment.label for segment in prompt.chunks] == ["fox", "stored", "who"]
    assert engine.generate(prompt, GREEDY).report.missed_tokens == 0


@pytest.mark.parametrize("parts", [[""], [{"role": "user", "content": "a"}, "b"]])
def test_invalid_prompts_are_refused(open_engine: Open, parts: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"prompt is empty|part 1 of the prompt: .* not a message"):
        open_engine().generate(parts)
    with pytest.raises(InvalidInputError, match=rf"check layer {LAYERS} does not exist: .*0\.\.{LAYERS - 1}"):
        open_engine(check_layers=(1, LAYERS))


def test_the_context_limits_prompt_and_answer(open_engine: Open) -> None:
    engine = open_engine(capture=False)
    ids = [5 + i % 200 for i in range(CONTEXT + 1)]
    with pytest.raises(InvalidInputError, match=f"{CONTEXT + 1} tokens, the model's context {CONTEXT}"):
        engine.generate(Prompt.of([text(ids)]), GREEDY)
    with pytest.raises(InvalidInputError, match="token id 512 at index 1"):
        engine.generate(Prompt.of([text([1, 512])]), GREEDY)
    for left, tokens in ((0, 1), (3, 4), (7, 8), (50, 8)):
        answer = engine.generate(Prompt.of([text(ids[: CONTEXT - left])]), GREEDY)
        assert (len(answer.token_ids), answer.finish_reason) == (tokens, "length")
        assert answer.token_ids == plain(engine, Prompt.of([text(ids[: CONTEXT - left])]), tokens)


# ---- threads ----------------------------------------------------------------------------------------------


def test_four_threads_give_the_answers_of_one(open_engine: Open) -> None:
    """Also where they capture and hit meanwhile: at r = 1 the answer does not depend on what the store holds."""
    engine, capturing = open_engine(capture=False), open_engine()
    engine.warm(PASSAGES)
    prompts = [[f"Prompt {i}. ", *PASSAGES[i % 3 :], *PASSAGES[: i % 3], QUESTION] for i in range(8)]
    in_turn = [engine.generate(prompt, GREEDY).token_ids for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        at_once = list(pool.map(lambda prompt: engine.generate(prompt, GREEDY).token_ids, prompts))
        answers = list(pool.map(lambda prompt: capturing.generate(prompt, GREEDY, ratio=1.0), prompts[:6] * 2))
    assert at_once == in_turn
    assert [a.token_ids for a in answers] == [plain(engine, engine.prompt(prompt)) for prompt in prompts[:6]] * 2
    for answer in answers:
        check_sums(answer)
