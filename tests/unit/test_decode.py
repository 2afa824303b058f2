"""PlainDecoding compared with transformers' own `generate`, and the text stream with the whole text."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.load.loader import LayerKV
from cacheblend.engines.hf.baselines import PlainDecoding, fill_cache
from cacheblend.engines.hf.sampling import Sampler, SamplingParams
from cacheblend.engines.tokens import PromptBuilder
from cacheblend.engines.tokens.detokenizer import Detokenizer, TextStream
from campaign import share
from families import VOCAB, tiny_model
from tokenizers_for_tests import sentencepiece

PROMPT = torch.arange(10, 30)


@pytest.mark.parametrize(
    ("settings", "message"),
    [  # see also tests/integration/test_engine_api
        ({"temperature": math.inf}, "temperature .*at least 0.*inf"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty must be in 0.01\.\.100, got 0.0"),
        ({"repetition_penalty": math.nan}, "repetition_penalty must be in .*nan"),
        ({"top_p": 0.0}, "top_p .*0.0"),
        ({"top_p": math.nan}, "top_p .*nan"),
        ({"min_p": -0.1}, "min_p .*-0.1"),
        ({"min_p": math.nan}, "min_p .*nan"),
        ({"stop": ("a", "")}, "stop text must not be empty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"logit_bias": ((1, 101),)}, "logit_bias"),
        ({"logit_bias": (1,)}, "logit_bias"),
        ({"bad_words": ((),)}, "bad_words"),
        ({"min_new_tokens": 257}, "min_new_tokens"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        SamplingParams(**settings)


def test_disabled_options_add_no_processors() -> None:
    greedy = SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.1)
    assert not any(params.processors(0, []) for params in (SamplingParams(), greedy, SamplingParams(temperature=1)))
    on = SamplingParams(temperature=2, repetition_penalty=2, min_p=1, top_p=1)  # JSON has no difference of 2 and 2.0
    assert len(on.processors(0, [])) == 3


@torch.no_grad()
def answer(params: SamplingParams, eos_ids: Sequence[int] = ()) -> Sampler:
    model = tiny_model("llama")
    cache = DynamicCache(config=model.config)
    logits = model(input_ids=PROMPT[None], past_key_values=cache, use_cache=True).logits[0, -1]
    running = PlainDecoding(model, cache, PROMPT, logits, params, eos_ids)
    while running.sampler.finish_reason is None:
        running.step()
    return running.sampler


def generated(params: SamplingParams) -> list[int]:
    """transformers' own answer with the same settings."""
    torch.manual_seed(params.seed or 0)
    names = ("top_k", "top_p", "min_p", "temperature") if params.temperature else ()
    options = {name: getattr(params, name) for name in (*names, "repetition_penalty")}
    out = tiny_model("llama").generate(
        PROMPT[None],
        attention_mask=torch.ones_like(PROMPT[None]),
        max_new_tokens=params.max_new_tokens,
        do_sample=params.temperature > 0,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )
    return out[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repetition_penalty": 1.8},
        {"temperature": 1.0},
        {"temperature": 0.4, "repetition_penalty": 1.3},
        {"temperature": 3.0, "top_k": 4},
        {"temperature": 3.0, "top_p": 0.3},
        {"temperature": 3.0, "min_p": 0.2},
        {"temperature": 2.0, "top_k": 50, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.1},
    ],
    ids=str,
)
def test_samples_the_tokens_that_generate_samples(settings: dict[str, Any]) -> None:
    params = SamplingParams(max_new_tokens=12, seed=3, **settings)
    got = answer(params)
    assert got.token_ids == generated(params)
    assert got.finish_reason == "length"


def test_greedy_is_the_argmax_at_every_step() -> None:
    ids = answer(SamplingParams(max_new_tokens=6)).token_ids
    with torch.no_grad():
        logits = tiny_model("llama")(torch.cat([PROMPT, torch.tensor(ids)])[None]).logits[0]
    assert ids == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()


def test_equal_seeds_give_equal_answers_and_leave_the_global_generator_alone() -> None:
    hot = {"max_new_tokens": 10, "temperature": 5.0}
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    one, same, other = (answer(SamplingParams(seed=seed, **hot)).token_ids for seed in (1, 1, 2))
    assert torch.equal(torch.rand(4), expected)
    assert one == same != other
    assert answer(SamplingParams(**hot)).token_ids != answer(SamplingParams(**hot)).token_ids


@pytest.mark.parametrize(
    ("settings", "support"), [({"top_k": 3}, 3), ({"min_p": 1.0}, 1), ({"top_k": VOCAB * 2}, None)]
)
def test_the_set_of_tokens_that_can_be_sampled(settings: dict[str, Any], support: int | None) -> None:
    seen = {
        answer(SamplingParams(max_new_tokens=1, temperature=50.0, seed=i, **settings)).token_ids[0] for i in range(40)
    }
    assert len(seen) == support if support else len(seen) > 10


def test_an_answer_ends_at_eos_unless_it_is_ignored() -> None:
    ids = answer(SamplingParams(max_new_tokens=8)).token_ids
    cut = ids.index(ids[3]) + 1
    ended = answer(SamplingParams(max_new_tokens=8), eos_ids=[ids[3]])
    assert (ended.token_ids, ended.finish_reason) == (ids[:cut], "stop")
    assert answer(SamplingParams(max_new_tokens=8, ignore_eos=True), eos_ids=[ids[3]]).token_ids == ids
    also = answer(SamplingParams(max_new_tokens=8, ignore_eos=True, stop_token_ids=(ids[3],)))
    assert (also.token_ids, also.finish_reason) == (ids[:cut], "stop")
    last = answer(SamplingParams(max_new_tokens=cut), eos_ids=[ids[3]])
    assert last.finish_reason == "stop"


@torch.no_grad()
def test_decoding_from_a_filled_cache_equals_transformers() -> None:
    model = tiny_model("llama")
    cache = DynamicCache(config=model.config)
    out = model(input_ids=PROMPT[None], past_key_values=cache, use_cache=True)
    kv = [LayerKV(layer.keys[0].clone(), layer.values[0].clone()) for layer in cache.layers]
    filled = fill_cache(model, kv)
    assert all(keys.shape[1] == values.shape[1] == 0 for keys, values in kv)
    params = SamplingParams(max_new_tokens=5)
    one = PlainDecoding(model, filled, PROMPT, out.logits[0, -1], params, [])
    assert [one.step() for _ in range(5)] == answer(params).token_ids


# ---- text ------------------------------------------------------------------------------------------------


def decoder(pieces: Sequence[bytes]) -> Any:
    """Ids are indices into `pieces`; invalid UTF-8 is decoded as the replacement character."""
    return lambda ids: b"".join(pieces[i] for i in ids).decode("utf-8", errors="replace")


@st.composite
def streams(draw: st.DrawFn) -> tuple[str, list[bytes], tuple[str, ...]]:
    """A text, its bytes split at random places, and stop texts that may or may not occur in it."""
    letters = st.text("abé好😀", max_size=12)
    text = draw(letters)
    data = text.encode()
    cuts = sorted(draw(st.sets(st.integers(0, len(data)))) | {0, len(data)})
    stops = draw(st.lists(st.text("abé好😀", min_size=1, max_size=4), max_size=3))
    if text and draw(st.booleans()):
        start = draw(st.integers(0, len(text) - 1))
        stops.append(text[start : start + draw(st.integers(1, 4))])
    return text, [data[a:b] for a, b in pairwise(cuts)], tuple(stops)


@given(streams())
@example(("aé", [b"a\xc3", b"\xa9"], ("aé",)))
@example(("abab", [b"a", b"ba", b"b"], ("bab",)))
def test_deltas_never_change_and_add_up_to_the_text(case: tuple[str, list[bytes], tuple[str, ...]]) -> None:
    text, pieces, stops = case
    stream = TextStream(Detokenizer(decoder(pieces)), stops)
    expected = text
    for count in range(1, len(pieces) + 1):
        so_far = decoder(pieces)(range(count))
        places = [so_far.find(stop) for stop in stops if stop in so_far]
        if places:
            expected = so_far[: min(places)]
            break
    sent = ""
    for i in range(len(pieces)):
        sent += stream.push(i)
        assert expected.startswith(sent)
        if not stops:
            assert sent == decoder(pieces)(range(i + 1)).rstrip("\ufffd")
    sent += stream.finish()
    assert sent == stream.text == expected
    assert stream.stopped == (expected != text or any(stop in text for stop in stops))
    assert not any(stop in sent for stop in stops)
    assert stream.finish() == ""


def test_text_is_held_back_while_it_may_change() -> None:
    stream = TextStream(Detokenizer(decoder([b"answer", b" </", b"s", b"> more"])), ("</s>",))
    assert [stream.push(i) for i in range(3)] == ["answer", " ", ""]  # it may begin the stop text
    assert not stream.stopped
    assert stream.push(3) == ""
    assert (stream.text, stream.stopped, stream.finish()) == ("answer ", True, "")
    stream = TextStream(Detokenizer(decoder([b"x</", b"s", b"\xe5\xa5"])), ("</s>",))
    assert [stream.push(i) for i in range(3)] == ["x", "", ""]
    assert stream.finish() == "</s\ufffd"  # sent at the end
    stream = TextStream(Detokenizer(decoder([b"a\xff", b"b"])))
    assert [stream.push(i) for i in range(2)] == ["a", "\ufffdb"]  # not for ever


@settings(max_examples=share(80))
@given(st.lists(st.sampled_from([*"a \u00e9\u4f60", "😀", "dog"]), max_size=8).map("".join), st.integers(0, 30))
def test_byte_fallback_never_changes_sent_text(text: str, cut: int) -> None:
    """One invalid byte makes a whole run of byte tokens undecodable, including characters that were already sent."""
    builder = PromptBuilder(sentencepiece())
    ids = builder.encode("x" + text)
    stream = TextStream(builder.detokenizer())
    sent = "".join(stream.push(i) for i in ids[:cut]) + stream.finish()
    assert sent == stream.text
    assert ("x" + text).startswith(sent.rstrip("\ufffd"))
    if cut >= len(ids):
        assert sent == "x" + text


VOCABULARY = 20


def drawn(steps: int = 8, prompt: Sequence[int] = (3, 3, 3), eos: Sequence[int] = (0,), **options: Any) -> list[int]:
    """A greedy answer where the model wants token 3 most, then 4, then 0, then 5."""
    logits = torch.zeros(VOCABULARY)
    logits[torch.tensor([3, 4, 0, 5])] = torch.tensor([3.0, 2.5, 2.0, 1.5])
    params = SamplingParams(max_new_tokens=steps, temperature=0, **options)
    sampler = Sampler(torch.tensor(prompt), logits, params, eos)
    while sampler.finish_reason is None:
        sampler.sample()
    return sampler.token_ids


def test_penalties_count_the_answer_and_not_the_prompt_and_biases_are_added() -> None:
    assert drawn(4) == [3, 3, 3, 3]
    assert drawn(4, frequency_penalty=0.4, eos=()) == [3, 3, 4, 3]  # 3, 2.6, then 2.2 against 2.5
    assert drawn(3, presence_penalty=0.75, eos=()) == [3, 4, 3]  # 2.25 and 1.75, as often as they come
    assert drawn(4, presence_penalty=-1.0) == [3, 3, 3, 3]
    # A bias is added, and a bad word never drawn.
    assert drawn(2, logit_bias=((7, 100),)) == [7, 7]
    assert drawn(2, logit_bias=((3, -100),)) == [4, 4]
    assert drawn(3, bad_words=((3,),)) == [4, 4, 4]
    assert drawn(4, prompt=[5], bad_words=((3, 3),)) == [3, 4, 3, 4]


def test_nothing_ends_an_answer_before_its_least_length() -> None:
    ends = {"bad_words": ((3,), (4,))}
    assert drawn(8, **ends) == [0]
    assert drawn(8, **ends, min_new_tokens=3) == [5, 5, 5, 0]
    assert drawn(8, **ends, min_new_tokens=3, stop_token_ids=(5,))[:3] == [1, 1, 1]
    assert drawn(4, **ends, min_new_tokens=2, ignore_eos=True) == [0, 0, 0, 0]
