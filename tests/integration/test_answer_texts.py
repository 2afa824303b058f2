"""What an answer says is what the tokenizer makes of all its tokens, up to a stop text, and it ends for that reason."""

import random
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from cacheblend.engines.hf import Answer, BlendEngine, SamplingParams
from cacheblend.engines.hf.sampling import Sampler
from cacheblend.store import MemoryStore
from tokenizers_for_tests import byte_level, sentencepiece

SNIPPETS = ["The dog", "\n\n", "ÿ" * 15, "你好世界", "😀", "\ue000\U000f0000\U0010fffd", "\ufffd", "déjà </s> vu"]
TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "sentencepiece": sentencepiece,
    "metaspace": lambda: sentencepiece(dummy_prefix="metaspace"),
    "byte_level": byte_level,
}


def drawn(draw: random.Random, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Ids of texts, cut anywhere; ids of any kind."""
    ids: list[int] = []
    for _ in range(draw.randint(1, 4)):
        if draw.random() < 0.8:
            ids += tokenizer(draw.choice(SNIPPETS), add_special_tokens=False)["input_ids"]
            ids = ids[: len(ids) - draw.choice([0, 0, 0, 1, 2])]
        else:
            ids += draw.choices(range(len(tokenizer)), k=draw.randint(1, 6))
    return ids or [5]


def check(tokenizer: PreTrainedTokenizerFast, answer: Answer, ids: list[int], stops: tuple[str, ...]) -> None:
    text = tokenizer.decode(answer.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    found = [text.index(stop) for stop in stops if stop in text]
    assert answer.finish_reason == ("stop" if found else "length")
    assert answer.text == text[: min(found, default=len(text))]
    assert answer.token_ids == ids[: len(answer.token_ids)]
    assert found or answer.token_ids == ids


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_answers_text_is_that_of_its_tokens(name: str, loaded: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, tokenizer = random.Random(name), TOKENIZERS[name]()
    ids: list[int] = []
    sample = Sampler.sample

    def forced(self: Sampler) -> int:
        self.logits = torch.full_like(self.logits, -1e9)
        self.logits[ids[self.count]] = 0.0
        return sample(self)

    monkeypatch.setattr(Sampler, "sample", forced)
    with BlendEngine(loaded.model, tokenizer, store=MemoryStore(), fingerprint="tiny") as engine:
        for number in range(12):
            ids[:] = drawn(draw, tokenizer) if number else tokenizer("ÿ" * 15, add_special_tokens=False)["input_ids"]
            text = tokenizer.decode(ids, skip_special_tokens=True)
            at = draw.randrange(len(text) + 1)
            cases = [(), (text[at : at + 3],), ("ÿ" * 9,), (text[-1:], "never"), (text[-20:],)]
            stops = tuple(stop for stop in (draw.choice(cases) if number else ("ÿ" * 9,)) if stop)
            params = SamplingParams(max_new_tokens=len(ids), ignore_eos=True, stop=stops)
            check(tokenizer, engine.generate("Who?", params), ids, stops)
            check(tokenizer, engine.generate_batch(["Who?"], params)[0], ids, stops)
            *deltas, last = engine.stream("Who?", params)
            assert last.answer is not None and all(delta.answer is None for delta in deltas)
            assert "".join(delta.text for delta in (*deltas, last)) == last.answer.text
            check(tokenizer, last.answer, ids, stops)
