"""Answers id by id: the text is that of the whole answer, whatever the tokenizer, at constant work an id."""

import random
from collections.abc import Callable, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from cacheblend.engines.tokens import PromptBuilder
from cacheblend.engines.tokens.detokenizer import Detokenizer, TextStream
from campaign import share
from tests.tokenizers_for_tests import byte_level, sentencepiece, unigram, word_level

REPLACEMENT = "\ufffd"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", "▁▁", "▁▁▁▁", "a", "▁a", "▁dog", "é", "你", "😀", "\ufffd", "a▁b", ".", "▁.", "n't"]


def made(decoder: decoders.Decoder | None, words: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of these words that is used to decode; with a special token, and an added one that is not special."""
    words = ["<unk>", *dict.fromkeys(words)]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["</s>"])
    backend.add_tokens(["<think>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


def cleaning_word_level() -> PreTrainedTokenizerFast:
    tokenizer = made(None, ["a", ".", ",", "n't", "do", "'s"])
    tokenizer.clean_up_tokenization_spaces = True
    return tokenizer


FALLBACK = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "unigram": unigram,
    "word_level": word_level,
    "cleaning_word_level": cleaning_word_level,
    "gemma": lambda: made(decoders.Sequence(FALLBACK), [*PIECES, *BYTES]),
    "llama": lambda: made(decoders.Sequence([*FALLBACK, decoders.Strip(" ", 1, 0)]), [*PIECES, *BYTES]),
    "metaspace": lambda: made(decoders.Metaspace(), PIECES),
    "word_piece": lambda: made(decoders.WordPiece(cleanup=True), ["do", "##ing", "##", ".", "n't", "'s", "ab", "你"]),
    "suffixes": lambda: made(decoders.BPEDecoder(), ["a</w>", "b", "</w>", "dog</w>", "你</w>"]),
}


@cache
def builder_of(name: str) -> PromptBuilder:
    return PromptBuilder(TOKENIZERS[name]())


@cache
def ids_of(name: str) -> tuple[list[int], list[int]]:
    """All ids, and those of which a text's characters consist in part, so that a draw has many of them."""
    tokenizer = builder_of(name)._tokenizer
    tokens = {number: token for token, number in tokenizer.get_vocab().items()}
    parts = [i for i, token in tokens.items() if token in BYTES or len(token) == 1 or i in tokenizer.all_special_ids]
    return [*tokens, max(tokens) + 1, max(tokens) + 1000], parts


@st.composite
def answers(draw: st.DrawFn, name: str) -> list[int]:
    """Random ids; runs of one, or of a few; the ids of a text, some of them lost."""
    every, parts = ids_of(name)
    ids: list[int] = []
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(["any", "parts", "repeated", "text"]))
        if kind == "any":
            ids += draw(st.lists(st.sampled_from(every), max_size=30))
        elif kind == "parts":
            ids += draw(st.lists(st.sampled_from(parts), max_size=40))
        elif kind == "repeated":
            ids += draw(st.lists(st.sampled_from(every), min_size=1, max_size=3)) * draw(st.integers(1, 70))
        else:
            text = draw(st.text("a é你😀\u0928\u093f.\n", max_size=20))
            ids += [i for i in builder_of(name).encode(text) if draw(st.integers(0, 9))]
    return ids


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=share(60), deadline=None)
@given(data=st.data())
def test_what_is_returned_is_the_text_of_all_ids(name: str, data: st.DataObject) -> None:
    builder, ids = builder_of(name), data.draw(answers(name))
    shown = data.draw(st.sampled_from([frozenset(), frozenset(builder._special)]))
    one_by_one, stream = builder.detokenizer(shown), TextStream(builder.detokenizer(shown))
    returned = ""
    for count, number in enumerate(ids, 1):
        returned += one_by_one.push(number)
        stream.push(number)
        text = builder.decode(ids[:count], shown)
        if not one_by_one._in_bytes:  # what is settled leaves at once
            assert returned == text.removesuffix(REPLACEMENT)
        if not one_by_one._in_bytes or count <= 16:  # in longer runs of bytes the tail is out of date
            assert returned + one_by_one.tail == text
    assert returned + one_by_one.finish() == builder.decode(ids, shown)
    stream.finish()
    assert stream.text == builder.decode(ids, shown)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_work_for_an_id_does_not_grow_with_the_answer(name: str) -> None:
    """Decoded ids of 16,000: of any, of parts of characters, and of one."""
    builder, draw = builder_of(name), random.Random(3)
    every, parts = ids_of(name)
    cases = [draw.choices(every, k=16_000), draw.choices(parts, k=16_000), [draw.choice(parts)] * 16_000]
    for ids in cases:
        decoded = 0

        def decode(part: Sequence[int], builder: PromptBuilder = builder) -> str:
            nonlocal decoded
            decoded += len(part)
            return builder.decode(part)

        detokenizer = builder.detokenizer()
        detokenizer._decode = decode
        text = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
        assert text == builder.decode(ids)
        assert decoded < 64 * len(ids)


def test_incomplete_bytes_without_end_and_ids_without_a_text_do_not_hold_up_the_answer() -> None:
    """Each id ends inside of a character, and the next one begins another."""
    pieces, decoded = [b"ab\xe4", "你".encode(), b"\xe4", b"\x80", b"", b"", b"a"], 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return b"".join(pieces[i] for i in ids).decode(errors="replace")

    for ids in ([0] * 16_000, [2] * 16_000, [3] * 16_000, [0, 3] * 8_000, [2, 2, 1] * 5_000):
        decoded, detokenizer = 0, Detokenizer(decode)
        returned = [detokenizer.push(i) for i in ids]
        assert decoded < 64 * len(ids)
        assert "".join(returned) + detokenizer.finish() == decode(ids)
        for count in range(1, 100):  # all but what may become one character leaves at once
            assert "".join(returned[:count]) == decode(ids[:count]).removesuffix(REPLACEMENT)

    decoded, detokenizer = 0, Detokenizer(decode)
    ids = [*[4, 5] * 400, 6, 6]
    assert [at for at, i in enumerate(ids) if detokenizer.push(i)] == [800, 801]
    assert decoded < 64 * len(ids)


def test_a_stop_text_of_byte_tokens_ends_the_answer_at_once_and_a_long_one_may_be_nearly_there() -> None:
    """Llama 2's line break is a byte token: what it is may change, but the answer ends here."""
    builder = builder_of("llama")
    a, line = builder._tokenizer.convert_tokens_to_ids(["a", "<0x0A>"])
    stream = TextStream(builder.detokenizer(), ("\n\n",))
    assert [stream.push(i) for i in (a, line)] == ["a", ""]
    assert not stream.stopped
    assert (stream.push(line), stream.stopped, stream.text) == ("", True, "a")

    builder = builder_of("gemma")
    a = builder._tokenizer.convert_tokens_to_ids("a")
    stream = TextStream(builder.detokenizer(), ("a" * 500 + ".", "b"))
    sent = "".join(stream.push(a) for _ in range(700)) + stream.finish()
    assert sent == stream.text == "a" * 700
