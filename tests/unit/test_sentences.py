"""Which tokens of a tokenizer end a sentence."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from cacheblend.engines.tokens import find_sentence_end_ids
from tokenizers_for_tests import byte_level, sentencepiece, unigram, word_level


@pytest.mark.parametrize(
    ("make", "some", "none"),
    [
        (byte_level, [".", "?", "!", "Ċ"], ["a", ",", "<|im_end|>", "<think>"]),
        (sentencepiece, [".", "?", "es.", "<0x0A>", "<0x21>"], ["▁", ",", "<0x2C>", "</s>"]),
        (unigram, [".", "?"], [",", "▁", "</s>", "<unk>"]),
        (word_level, ["knows.", "it?"], ["dog,", "The", "[SEP]"]),
    ],
    ids=["byte level", "sentencepiece", "unigram", "word level"],
)
def test_every_kind_of_tokenizer(make, some: list[str], none: list[str]) -> None:
    tokenizer = make()
    ids = find_sentence_end_ids(tokenizer)
    assert ids.dtype == np.int64 and list(ids) == sorted(set(ids))
    tokens = set(tokenizer.convert_ids_to_tokens(ids.tolist()))
    assert set(some) <= tokens
    assert not set(none) & tokens and all(token in tokenizer.get_vocab() for token in none)


def test_stops_of_other_scripts_and_what_stands_behind_a_stop() -> None:
    ends = ["。", "\uff1f", "行。", "है।", '."', ".)", "!”", "end. ", "?」", "\n\n", "\r\n", "\n    ", "…"]
    others = ["", " ", ")", '"', "a.b", "\uff0c", "、", ".a", "\t"]
    vocab = {token: i for i, token in enumerate([*ends, *others, "[UNK]"])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    ids = find_sentence_end_ids(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))
    assert [token for token, i in vocab.items() if i in ids] == ends
