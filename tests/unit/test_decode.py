"""Plain decoding compared with transformers' own `generate`, the text stream with the whole text, and grammars with
every token tried one by one.
"""

import json
import math
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import DynamicCache

from cacheblend.core.errors import InvalidInputError, ModelOverflowError
from cacheblend.core.load.loader import LayerKV
from cacheblend.engines.hf import Grammar
from cacheblend.engines.hf import grammar as grammars_module
from cacheblend.engines.hf.baselines import fill_cache, plain_tokens
from cacheblend.engines.hf.grammar import MOST_BYTES, Grammars, check_repetitions
from cacheblend.engines.hf.sampling import Sampler, SamplingParams
from cacheblend.engines.tokens.detokenizer import Detokenizer, TextStream
from families import VOCAB, tiny_model
from pretended_device import DEVICE, PretendedDevice
from tokenizers_for_tests import byte_level, sentencepiece

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


def test_penalties_count_the_answer_biases_are_added_and_disabled_options_add_nothing() -> None:
    # disabled options add no processors
    greedy = SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.1)
    assert not any(params.processors(0, []) for params in (SamplingParams(), greedy, SamplingParams(temperature=1)))
    on = SamplingParams(temperature=2, repetition_penalty=2, min_p=1, top_p=1)  # JSON has no difference of 2 and 2.0
    assert len(on.processors(0, [])) == 3
    # penalties count the answer and not the prompt
    assert drawn(4) == [3, 3, 3, 3]
    assert drawn(4, frequency_penalty=0.4, eos=()) == [3, 3, 4, 3]  # 3, 2.6, then 2.2 against 2.5
    assert drawn(3, presence_penalty=0.75, eos=()) == [3, 4, 3]  # 2.25 and 1.75, as often as they come
    assert drawn(4, presence_penalty=-1.0) == [3, 3, 3, 3]
    # A bias is added, and a bad word never drawn.
    assert drawn(2, logit_bias=((7, 100),)) == [7, 7]
    assert drawn(2, logit_bias=((3, -100),)) == [4, 4]
    assert drawn(3, bad_words=((3,),)) == [4, 4, 4]
    assert drawn(4, prompt=[5], bad_words=((3, 3),)) == [3, 4, 3, 4]
    assert drawn(2, prompt=[3], bad_words=((3, 3),)) == [3, 4]  # what begins in the prompt is none of the answer's
    # the least length
    ends = {"bad_words": ((3,), (4,))}
    assert drawn(8, **ends) == [0]
    assert drawn(8, **ends, min_new_tokens=3) == [5, 5, 5, 0]
    assert drawn(8, **ends, min_new_tokens=3, stop_token_ids=(5,))[:3] == [1, 1, 1]
    assert drawn(4, **ends, min_new_tokens=2, ignore_eos=True) == [0, 0, 0, 0]


def test_the_least_length_is_held_where_the_logits_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device refuses stop ids on the host beside its own."""
    generator = torch.Generator()
    monkeypatch.setattr(torch, "Generator", lambda device: generator)
    with PretendedDevice():
        logits = torch.arange(4.0).flip(0).to(DEVICE)
        sampler = Sampler(torch.tensor([1]).to(DEVICE), logits, SamplingParams(8, min_new_tokens=2), [0])
        while sampler.finish_reason is None:
            sampler.sample()
        assert sampler.token_ids == [1, 1, 0]


@torch.no_grad()
def answer(params: SamplingParams, eos_ids: Sequence[int] = ()) -> Sampler:
    model = tiny_model("llama")
    cache = DynamicCache(config=model.config)
    logits = model(input_ids=PROMPT[None], past_key_values=cache, use_cache=True).logits[0, -1]
    sampler = Sampler(PROMPT, logits, params, eos_ids)
    assert list(plain_tokens(model, cache, sampler)) == sampler.token_ids
    return sampler


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
        {"temperature": 50.0, "top_k": VOCAB * 2},
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


def test_greedy_is_the_argmax_and_equal_seeds_give_equal_answers() -> None:
    ids = answer(SamplingParams(max_new_tokens=6)).token_ids
    with torch.no_grad():
        logits = tiny_model("llama")(torch.cat([PROMPT, torch.tensor(ids)])[None]).logits[0]
    assert ids == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    # and leave the global generator alone
    hot = {"max_new_tokens": 10, "temperature": 5.0}
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    one, same, other = (answer(SamplingParams(seed=seed, **hot)).token_ids for seed in (1, 1, 2))
    assert torch.equal(torch.rand(4), expected)
    assert one == same != other
    assert answer(SamplingParams(**hot)).token_ids != answer(SamplingParams(**hot)).token_ids


@torch.no_grad()
def test_decoding_from_a_filled_cache_and_up_to_eos_unless_it_is_ignored() -> None:
    model = tiny_model("llama")
    cache = DynamicCache(config=model.config)
    out = model(input_ids=PROMPT[None], past_key_values=cache, use_cache=True)
    kv = [LayerKV(layer.keys[0].clone(), layer.values[0].clone()) for layer in cache.layers]
    filled = fill_cache(model, kv)
    assert all(keys.shape[1] == values.shape[1] == 0 for keys, values in kv)
    params = SamplingParams(max_new_tokens=5)
    one = plain_tokens(model, filled, Sampler(PROMPT, out.logits[0, -1], params, []))
    assert list(one) == answer(params).token_ids
    # an answer ends at EOS
    ids = answer(SamplingParams(max_new_tokens=8)).token_ids
    cut = ids.index(ids[3]) + 1
    ended = answer(SamplingParams(max_new_tokens=8), eos_ids=[ids[3]])
    assert (ended.token_ids, ended.finish_reason) == (ids[:cut], "stop")
    assert answer(SamplingParams(max_new_tokens=8, ignore_eos=True), eos_ids=[ids[3]]).token_ids == ids
    also = answer(SamplingParams(max_new_tokens=8, ignore_eos=True, stop_token_ids=(ids[3],)))
    assert (also.token_ids, also.finish_reason) == (ids[:cut], "stop")
    last = answer(SamplingParams(max_new_tokens=cut), eos_ids=[ids[3]])
    assert last.finish_reason == "stop"


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


# ---- answers of a given form: what is refused, and which tokens may come next, against all tokens tried -------


TOKENIZERS: dict[str, Callable[[], Any]] = {"byte_level": byte_level, "sentencepiece": sentencepiece}
CHOICES = ["dog", "dogs and fox", "Größe", '日本 "q"', "a\\b\n\tc", "<|im_start|>", "<s>x"]
PADDED = 37  # logits beyond the tokenizer


@pytest.fixture(scope="module", params=TOKENIZERS)
def opened(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Grammars]]:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed here")
    tokenizer = TOKENIZERS[request.param]()
    grammars = Grammars(tokenizer, len(tokenizer) + PADDED, [tokenizer.eos_token_id])
    yield tokenizer, grammars
    grammars.close()


@cache
def pieces(tokenizer: Any) -> list[bytes]:
    """Each token's bytes, by the definition of the two kinds of tokenizer; special tokens have none."""
    byte_of = {chr(c): c for c in [*range(33, 127), *range(161, 173), *range(174, 256)]}
    byte_of |= {chr(256 + n): c for n, c in enumerate(c for c in range(256) if chr(c) not in byte_of)}
    special, has_marks = {*tokenizer.all_special_ids}, "▁" in "".join(tokenizer.get_vocab())
    found = []
    for token in range(len(tokenizer)):
        text = tokenizer.convert_ids_to_tokens(token)
        if token in special:
            found.append(b"")
        elif re.fullmatch("<0x[0-9A-F]{2}>", text):
            found.append(bytes([int(text[3:5], 16)]))
        elif has_marks:
            found.append(text.replace("▁", " ").encode())
        else:
            found.append(bytes(byte_of[c] for c in text) if all(c in byte_of for c in text) else text.encode())
    return found


LANGUAGES: dict[str, tuple[Grammar, set[str]]] = {
    "choice": (Grammar.of_choices(CHOICES), {*CHOICES}),
    "regex": (
        Grammar("regex", "(d|ü|fo)o{1,4}[g你]?"),
        {f"{a}{'o' * n}{b}" for a in ("d", "ü", "fo") for n in range(1, 5) for b in ("g", "你", "")},
    ),
}


@pytest.mark.parametrize(
    ("kind", "seed"), [*(("choice", seed) for seed in range(12)), *(("regex", seed) for seed in range(6))]
)
def test_a_grammar_allows_what_trying_every_token_allows(opened: tuple[Any, Grammars], kind: str, seed: int) -> None:
    """In each step of an answer by chance: every token behind which the text can still become one of the language."""
    tokenizer, grammars = opened
    grammar, language = LANGUAGES[kind][0], {text.encode() for text in LANGUAGES[kind][1]}
    compiled, chance, done = grammars.compile(grammar), random.Random(seed), b""
    assert compiled is not None
    matcher, known = compiled.matcher(), pieces(tokenizer)
    for _ in range(64):
        expected = {n for n, piece in enumerate(known) if piece and any(x.startswith(done + piece) for x in language)}
        expected |= {tokenizer.eos_token_id} if done in language else set()
        assert {int(n) for n in matcher.allowed().nonzero()} == expected, done
        token = chance.choice(sorted(expected))
        if token == tokenizer.eos_token_id:
            break
        matcher.accept(token)
        done += known[token]
    assert done in language


def draw(opened: tuple[Any, Grammars], params: SamplingParams) -> tuple[str, str | None]:
    """An answer of random logits, a new draw at each token."""
    tokenizer, grammars = opened
    width = len(tokenizer) + PADDED + 3  # logits may be wider than what the grammar was compiled for
    noise = torch.Generator().manual_seed(params.seed or 0)
    sampler = Sampler(
        torch.tensor([1, 2]),
        torch.randn(width, generator=noise) * 3,
        params,
        [tokenizer.eos_token_id],
        grammars.compile(params.grammar),
    )
    while sampler.finish_reason is None:
        sampler.sample()
        sampler.logits = torch.randn(width, generator=noise) * 3
    ids = [token for token in sampler.token_ids if token != tokenizer.eos_token_id]
    return b"".join(pieces(tokenizer)[token] for token in ids).decode(errors="replace"), sampler.finish_reason


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 12}, "t": {"enum": ["ü", "日", None]}},
    "required": ["n", "t"],
    "x-order": ["t", "n"],  # an annotation of somebody's own
}
TREE = {"type": "object", "properties": {"c": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["c"]}


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 5.0}, {"temperature": 1.0, "top_k": 1}])
@pytest.mark.parametrize("seed", range(4))
def test_answers_parse_by_their_schema(opened: tuple[Any, Grammars], seed: int, options: dict[str, Any]) -> None:
    params = SamplingParams(400, seed=seed, grammar=Grammar.of_schema(SCHEMA), **options)
    text, reason = draw(opened, params)
    assert reason == "stop", text
    answer = json.loads(text)
    assert answer.keys() == {"n", "t"} and 3 <= answer["n"] <= 12 and answer["t"] in ("ü", "日", None)


def test_penalties_biases_and_lengths_leave_the_form_of_recursive_schemas_too(opened: tuple[Any, Grammars]) -> None:
    tokenizer, _ = opened
    text, reason = draw(opened, SamplingParams(400, temperature=1.0, seed=5, grammar=Grammar.of_schema(TREE)))
    assert reason == "length" or json.loads(text).keys() == {"c"}
    grammar = Grammar("regex", "(ab|cd){8}")
    bias = tuple((token, 100.0) for token in range(0, len(tokenizer), 2))
    for options in ({"logit_bias": bias}, {"frequency_penalty": 2.0}, {"repetition_penalty": 100.0}, {"top_p": 0.01}):
        text, reason = draw(opened, SamplingParams(64, temperature=1.0, seed=3, grammar=grammar, **options))
        assert re.fullmatch("(ab|cd){8}", text) and reason == "stop"
    text, reason = draw(opened, SamplingParams(5, seed=3, grammar=grammar))
    assert len(text) >= 5 and reason == "length" and re.fullmatch("(ab|cd)*[ac]?", text)


def test_what_cannot_hold_beside_a_grammar_and_which_braces_are_counted() -> None:
    beside: tuple[tuple[str, dict[str, Any]], ...] = (
        ("ignore_eos", {"grammar": Grammar("regex", "a"), "ignore_eos": True}),
        ("min_new_tokens", {"grammar": Grammar("regex", "a"), "min_new_tokens": 3}),
        ("a Grammar or None", {"grammar": "a"}),
    )
    for message, options in beside:
        with pytest.raises(InvalidInputError, match=message):
            SamplingParams(**options)
    # those that are no repetition are not
    for text in (r"\{99999,\}", "[{99999}]", 'root ::= "{99999}" "a"', "a{2}b{5000}", "(a{100}){100}"):
        check_repetitions(text)
    with pytest.raises(InvalidInputError, match="1,000,000"):
        check_repetitions(r"((a|\)){100}[)]b{3}){100}c(x(y{10}z{1000}|w)*){ 1 , 1000 }")


# ---- hostile grammars ---------------------------------------------------------------------------------------
def nested(depth: int) -> Any:
    schema: Any = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


AT_ONCE: dict[str, tuple[Callable[[], Grammar], str]] = {
    "long schema": (lambda: Grammar.of_schema({"enum": ["x" * 1_000_000]}), f"at most {MOST_BYTES:,}"),
    "long regex": (lambda: Grammar("regex", "a" * 1_000_000), "1,000,000 bytes"),
    "deep": (lambda: Grammar.of_schema(nested(400)), "nested deeper than 100"),
    "very deep": (lambda: Grammar("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000), "nested"),
    "no JSON": (lambda: Grammar("json_schema", "{"), "not JSON"),
    "a list": (lambda: Grammar.of_schema([1]), "must be an object"),
    "a number inside": (lambda: Grammar.of_schema({"properties": {"a": 5}, "type": "object"}), "schema.properties.a"),
    "no type": (lambda: Grammar.of_schema({"type": "text"}), "'text' is not one of"),
    "types": (lambda: Grammar.of_schema({"type": []}), "is not one of"),
    "not": (lambda: Grammar.of_schema({"not": {}}), "'not' is not held"),
    "if": (lambda: Grammar.of_schema({"type": "string", "if": {}}), "'if' is not held"),
    "beside": (lambda: Grammar.of_schema({"anyOf": [{"type": "null"}], "maxLength": 1}), "beside anyOf"),
    "without type": (lambda: Grammar.of_schema({"maxLength": 1}), "without a type"),
    "lengths": (lambda: Grammar.of_schema({"type": "string", "pattern": "a", "maxLength": 1}), "keep one"),
    "format": (lambda: Grammar.of_schema({"type": "string", "format": "poem"}), "'poem' is not one of"),
    "required": (lambda: Grammar.of_schema({"type": "object", "required": ["a"]}), "required names 'a'"),
    "enum's type": (lambda: Grammar.of_schema({"type": "integer", "enum": ["a"]}), "'a' is not of type"),
    "enum's infinity": (lambda: Grammar("json_schema", '{"type": "integer", "enum": [Infinity]}'), "is not of type"),
    "constant's infinity": (lambda: Grammar.of_schema({"type": "integer", "const": -math.inf}), "is not of type"),
    "no number": (lambda: Grammar.of_schema({"type": "integer", "const": math.nan}), "is not of type"),
    "choices": (lambda: Grammar.of_choices([]), "empty list"),
    "kind": (lambda: Grammar("poem"), "kind is one of"),  # type: ignore[arg-type]
    "surrogate": (lambda: Grammar("regex", "\ud800"), "regex"),
    "repetitions": (lambda: Grammar("regex", "(a{1,1000}){1,1000}"), "makes 1,000,000"),
    "repeated pattern": (lambda: Grammar.of_schema({"type": "string", "pattern": "(a{1,1000}){1,1000}"}), "1,000,000"),
    "repetition": (lambda: Grammar("regex", "a{99999999999999999999999}"), "at most 10,000"),
    "repetitions of GBNF": (lambda: Grammar("ebnf", 'root ::= ("a"{1,1000}){1,1000}'), "makes 1,000,000"),
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_refused_before_it_is_compiled(name: str) -> None:
    make, message = AT_ONCE[name]
    began = time.perf_counter()
    with pytest.raises(InvalidInputError, match=re.escape(message)):
        make()
    assert time.perf_counter() - began < 5


TRIED: dict[str, tuple[Callable[[], Grammar], str]] = {
    "regex": (lambda: Grammar("regex", "(a"), "parenthesis is not closed"),
    "look-ahead": (lambda: Grammar("regex", "(?=a)b"), "not supported"),
    "grammar": (lambda: Grammar("ebnf", "foo"), "root"),
    "rule": (lambda: Grammar("ebnf", "root ::= foo"), "not defined"),
    "empty": (lambda: Grammar("ebnf", ""), "root"),
    "endless": (lambda: Grammar("ebnf", "root ::= root"), "nothing satisfies it"),
    "$ref to itself": (lambda: Grammar.of_schema({"$ref": "#"}), "nothing satisfies it"),
    "$ref": (lambda: Grammar.of_schema({"$ref": "#/$defs/x"}), "$defs"),
    "$ref elsewhere": (lambda: Grammar.of_schema({"$ref": "http://127.0.0.1/x"}), "not be held whole"),
    "allOf": (lambda: Grammar.of_schema({"allOf": [{"type": "string"}, {"type": "null"}]}), "not be held whole"),
    "oneOf": (lambda: Grammar.of_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "not be held whole"),
    "range": (lambda: Grammar.of_schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
    "enum": (lambda: Grammar.of_schema({"enum": []}), "empty"),
    "false": (lambda: Grammar.of_schema(False), "false"),
    "large": (lambda: Grammar("regex", "a?" * 20_000), "make it simpler"),
}


@pytest.mark.parametrize("name", TRIED)
def test_refused_by_a_trial(opened: tuple[Any, Grammars], name: str) -> None:
    make, message = TRIED[name]
    with pytest.raises(InvalidInputError, match=re.escape(message)):
        opened[1].compile(make())


def test_grammars_are_kept_within_bounds_and_nothing_left_and_slow_masks_are_errors(
    opened: tuple[Any, Grammars], monkeypatch: pytest.MonkeyPatch
) -> None:
    # kept grammars
    _, grammars = opened
    first = Grammar("regex", "kept")
    found = grammars.compile(first)
    assert grammars.compile(Grammar("regex", "kept")) is found and grammars.compile(None) is None
    monkeypatch.setattr(grammars_module, "KEPT", 2)
    for number in range(3):
        grammars.compile(Grammar("regex", f"other{number}"))
    assert grammars.compile(first) is not found
    # nothing left, and masks that take too long
    tokenizer, _ = opened
    every_a = tuple((n,) for n, piece in enumerate(pieces(tokenizer)) if piece == b"q")
    with pytest.raises(InvalidInputError, match="after 0 tokens none is left"):
        draw(opened, SamplingParams(8, grammar=Grammar("regex", "q+"), bad_words=every_a))
    with pytest.raises(InvalidInputError, match="after 1 tokens none is left"):
        draw(opened, SamplingParams(8, grammar=Grammar("ebnf", 'root ::= "q" x\nx ::= x "y"')))
    monkeypatch.setattr(grammars_module, "FREE_S", 0.0)
    monkeypatch.setattr(grammars_module, "TOKEN_S", 0.0)
    with pytest.raises(InvalidInputError, match="make it simpler"):
        draw(opened, SamplingParams(400, grammar=Grammar("regex", "[ab]+")))


def test_behind_an_interrupt_each_grammar_has_its_own_verdict(
    opened: tuple[Any, Grammars], monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = opened[1]
    grammars.compile(Grammar("regex", "in time"))
    assert grammars._trial is not None
    monkeypatch.setattr(grammars._trial._process, "stdout", Mock(readline=Mock(side_effect=KeyboardInterrupt)))
    with pytest.raises(KeyboardInterrupt):
        grammars.compile(Grammar("regex", "interrupted"))
    monkeypatch.undo()
    with pytest.raises(InvalidInputError, match="parenthesis is not closed"):
        grammars.compile(Grammar("regex", "(a"))


def test_an_overflow_is_no_mistake_of_the_grammar(opened: tuple[Any, Grammars]) -> None:
    tokenizer, grammars = opened
    params = SamplingParams(grammar=Grammar("regex", "q+"))
    logits = torch.full((len(tokenizer),), math.nan)
    with pytest.raises(ModelOverflowError, match="behind token 2"):
        Sampler(torch.tensor([1, 2]), logits, params, [0], grammars.compile(params.grammar)).sample()


def test_without_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Grammar("regex", "a")
    with pytest.raises(InvalidInputError, match="compiled before"):
        Sampler(torch.tensor([1]), torch.zeros(8), SamplingParams(grammar=grammar), [0])
    monkeypatch.setitem(__import__("sys").modules, "xgrammar", None)
    with pytest.raises(InvalidInputError, match=re.escape("pip install 'cacheblend[structured]'")):
        Grammars(byte_level(), 500, [0]).compile(grammar)
    monkeypatch.undo()
    pytest.importorskip("xgrammar", reason="xgrammar is not installed here")
    for tokenizer, eos, message in ((None, [0], "tokenizer"), (byte_level(), [], "no EOS id")):
        with pytest.raises(InvalidInputError, match=message):
            Grammars(tokenizer, 500, eos).compile(grammar)
