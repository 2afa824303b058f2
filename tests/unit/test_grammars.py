"""Answers of a given form: what is refused, and which tokens may come next, against all tokens tried one by one.

Situations: byte-level pieces and pieces with byte fallback, texts outside ASCII, special tokens whose names the
form has, logits wider than the tokenizer; schemas that the library holds in part only; text that takes minutes.
"""

import json
import random
import re
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

import tokenizers_for_tests as made
from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.hf import Grammar, SamplingParams
from cacheblend.engines.hf import grammar as grammars_module
from cacheblend.engines.hf.grammar import MOST_BYTES, Grammars, check_repetitions
from cacheblend.engines.hf.sampling import Sampler

TOKENIZERS: dict[str, Callable[[], Any]] = {"byte_level": made.byte_level, "sentencepiece": made.sentencepiece}
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


def oracle(
    tokenizer: Any, done: bytes, can_go_on: Callable[[bytes], bool], is_whole: Callable[[bytes], bool]
) -> set[int]:
    """Tokens behind which the text can still become one of the form: every token is tried."""
    allowed = {n for n, piece in enumerate(pieces(tokenizer)) if piece and can_go_on(done + piece)}
    return allowed | ({tokenizer.eos_token_id} if is_whole(done) else set())


def walk(opened: tuple[Any, Grammars], grammar: Grammar, *checks: Callable[[bytes], bool], seed: int) -> bytes:
    """An answer by chance, of which each mask is compared with `oracle`."""
    tokenizer, grammars = opened
    compiled, chance, done = grammars.compile(grammar), random.Random(seed), b""
    assert compiled is not None
    matcher, known = compiled.matcher(), pieces(tokenizer)
    for _ in range(64):
        allowed = {int(n) for n in matcher.allowed().nonzero()}
        assert allowed == oracle(tokenizer, done, *checks), done
        token = chance.choice(sorted(allowed))
        if token == tokenizer.eos_token_id:
            break
        matcher.accept(token)
        done += known[token]
    return done


@pytest.mark.parametrize("seed", range(12))
def test_a_choice_allows_what_trying_every_token_allows(opened: tuple[Any, Grammars], seed: int) -> None:
    texts = [each.encode() for each in CHOICES]
    answer = walk(
        opened,
        Grammar.of_choices(CHOICES),
        lambda done: any(each.startswith(done) for each in texts),
        lambda done: done in texts,
        seed=seed,
    )
    assert answer in texts


@pytest.mark.parametrize("seed", range(6))
def test_a_regular_expression_allows_what_trying_every_token_allows(opened: tuple[Any, Grammars], seed: int) -> None:
    language = {f"{a}{'o' * n}{b}".encode() for a in ("d", "ü", "fo") for n in range(1, 5) for b in ("g", "你", "")}
    answer = walk(
        opened,
        Grammar("regex", "(d|ü|fo)o{1,4}[g你]?"),
        lambda done: any(each.startswith(done) for each in language),
        lambda done: done in language,
        seed=seed,
    )
    assert answer in language


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


def test_nothing_left_and_masks_that_take_too_long_are_errors(
    opened: tuple[Any, Grammars], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_what_cannot_hold_beside_a_grammar_is_refused() -> None:
    beside: tuple[tuple[str, dict[str, Any]], ...] = (
        ("ignore_eos", {"grammar": Grammar("regex", "a"), "ignore_eos": True}),
        ("min_new_tokens", {"grammar": Grammar("regex", "a"), "min_new_tokens": 3}),
        ("a Grammar or None", {"grammar": "a"}),
    )
    for message, options in beside:
        with pytest.raises(InvalidInputError, match=message):
            SamplingParams(**options)


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


def test_braces_that_are_no_repetition_are_not_counted() -> None:
    for text in (r"\{99999,\}", "[{99999}]", 'root ::= "{99999}" "a"', "a{2}b{5000}", "(a{100}){100}"):
        check_repetitions(text)
    with pytest.raises(InvalidInputError, match="1,000,000"):
        check_repetitions(r"((a|\)){100}[)]b{3}){100}c(x(y{10}z{1000}|w)*){ 1 , 1000 }")


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


def test_grammars_are_kept_within_bounds(opened: tuple[Any, Grammars], monkeypatch: pytest.MonkeyPatch) -> None:
    _, grammars = opened
    first = Grammar("regex", "kept")
    found = grammars.compile(first)
    assert grammars.compile(Grammar("regex", "kept")) is found and grammars.compile(None) is None
    monkeypatch.setattr(grammars_module, "KEPT", 2)
    for number in range(3):
        grammars.compile(Grammar("regex", f"other{number}"))
    assert grammars.compile(first) is not found


def test_without_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Grammar("regex", "a")
    with pytest.raises(InvalidInputError, match="compiled before"):
        Sampler(torch.tensor([1]), torch.zeros(8), SamplingParams(grammar=grammar), [0])
    monkeypatch.setitem(__import__("sys").modules, "xgrammar", None)
    with pytest.raises(InvalidInputError, match=re.escape("pip install 'cacheblend[structured]'")):
        Grammars(made.byte_level(), 500, [0]).compile(grammar)
    monkeypatch.undo()
    pytest.importorskip("xgrammar", reason="xgrammar is not installed here")
    for tokenizer, eos, message in ((None, [0], "tokenizer"), (made.byte_level(), [], "no EOS id")):
        with pytest.raises(InvalidInputError, match=message):
            Grammars(tokenizer, 500, eos).compile(grammar)
