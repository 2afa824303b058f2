"""Small tokenizers, trained here, with the traps of the large ones (added tokens, dummy prefixes, literals)."""

import json
from collections.abc import Iterable
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "A passage is stored once and reused at any position of a prompt.",
    "Who wrote it? The answer is in the second passage: nobody knows.",
    "user assistant system think im start end 0 1 2 3 4 5 6 7 8 9 < > | / [ ] s INST",
    "Größe, déjà vu, 你好世界, emoji 😀 and\ttabs\nand lines.",
] * 4

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n{% endif %}{% endif %}"
)
CHATML_WITH_DOCUMENTS = (
    "{% if documents %}<|im_start|>documents\n{% for d in documents %}[{{ loop.index }}] {{ d.text }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}" + CHATML
)
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
LLAMA2_WITHOUT_BOS = LLAMA2.removeprefix("{{ bos_token }}")
REFUSES = "{{ raise_exception('roles must alternate') }}"


def byte_level(chat_template: str | None = CHATML, *, bos: bool = False) -> PreTrainedTokenizerFast:
    """As Qwen's: no BOS, ChatML's special tokens, and ``<think>``, an added token that is not special.

    `bos`: as Llama 3's instead, ``<|im_start|>`` being set in front of every text.
    """
    backend = Tokenizer.from_str(_byte_level_spec())
    if bos:
        start = ("<|im_start|>", backend.token_to_id("<|im_start|>"))
        backend.post_processor = processors.TemplateProcessing(single=f"{start[0]} $A", special_tokens=[start])
    return _fast(backend, chat_template, eos_token="<|im_end|>", **({"bos_token": "<|im_start|>"} if bos else {}))


def smollm(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """As SmolLM2's: ``<|im_start|>``, which begins each turn, is called BOS, and a text's end the unknown token."""
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    return _fast(Tokenizer.from_str(_byte_level_spec()), chat_template, **special)


def sentencepiece(
    chat_template: str | None = LLAMA2, *, dummy_prefix: str = "prepend", add_bos: bool = True
) -> PreTrainedTokenizerFast:
    """As Llama 2's: byte fallback, BOS in front, and a dummy prefix made by a normalizer (``prepend``) or by a
    pre-tokenizer (``metaspace``)."""
    backend = Tokenizer.from_str(_sentencepiece_spec())
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    if dummy_prefix == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="first", split=False)])
    if add_bos:
        bos = ("<s>", backend.token_to_id("<s>"))
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    return _fast(backend, chat_template, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def word_level(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Whole words, ``[UNK]`` for the others; the vocabulary itself holds ``[SEP]``, so that the literal reads as it."""
    words = sorted({word for line in CORPUS for word in line.split()})
    vocab = {word: i for i, word in enumerate(["[UNK]", "[SEP]", *words])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["[UNK]", "[SEP]"])
    return _fast(backend, chat_template, unk_token="[UNK]", sep_token="[SEP]")


def unigram(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """As T5's and XGLM's: NFKC, and pieces ``<s>`` and ``</s>`` that the model itself would find in a text."""
    letters = sorted({c for line in CORPUS for c in line} | set("<>/s▁"))
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((c, -4.0) for c in letters)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _fast(backend, chat_template, eos_token="</s>", unk_token="<unk>")


def gemma(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """As Gemma's: spaces become ``▁`` and none is set in front; line breaks, runs of spaces and HTML tags are text, and
    added tokens nevertheless."""
    runs = ["\n\n", "\n\n\n", "▁▁", "▁▁▁▁", "<table>", "<td>", "</td>", "<h1>", "</h1>", "<code>"]
    spec = json.loads(_sentencepiece_spec())
    vocab = spec["model"]["vocab"]
    for token in runs:
        vocab.setdefault(token, len(vocab))
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    spec["added_tokens"] += [{"id": vocab[token], "content": token} | plain for token in runs]
    backend = Tokenizer.from_str(json.dumps(spec))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return _fast(backend, chat_template, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def neox(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """As GPT-NeoX's, OLMo's and Phi-2's: byte-level, with runs of spaces and of tabs as added tokens."""
    backend = Tokenizer.from_str(_byte_level_spec())
    runs = [" " * count for count in range(2, 9)] + ["\t\t", "|||EMAIL_ADDRESS|||"]
    backend.normalizer = normalizers.NFC()
    backend.add_tokens([AddedToken(run, special=False, normalized=True) for run in runs])
    return _fast(backend, chat_template, eos_token="<|im_end|>")


def normalised(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Byte-level, of texts in lower case with compatibility forms resolved, and spaces at the ends stripped."""
    backend = Tokenizer.from_str(_byte_level_spec())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()])
    return _fast(backend, chat_template, eos_token="<|im_end|>")


def with_tokens(
    tokenizer: PreTrainedTokenizerFast, special: Iterable[str] = (), added: Iterable[str] = ()
) -> PreTrainedTokenizerFast:
    """The tokenizer with more special tokens and other added ones; those with ``~`` behind them take in the spaces that
    follow, as Phi-3's do."""
    for tokens, is_special in ((special, True), (added, False)):
        tokenizer.add_tokens(
            [
                AddedToken(token.rstrip("~"), special=is_special, normalized=False, rstrip=token.endswith("~"))
                for token in tokens
            ]
        )
    return tokenizer


def _fast(backend: Tokenizer, chat_template: str | None, **special: Any) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.chat_template = chat_template
    return tokenizer


@cache
def _byte_level_spec() -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return backend.to_str()


@cache
def _sentencepiece_spec() -> str:
    """Vocabulary and merges; byte pieces stay pieces of the model, and are no added tokens."""
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=special + [f"<0x{i:02X}>" for i in range(256)])
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.train_from_iterator(["▁" + line.replace(" ", "▁") for line in CORPUS], trainer)
    spec = json.loads(backend.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in special]
    return json.dumps(spec)
