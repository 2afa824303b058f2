"""The model's tokenizer: byte-level BPE, which takes any text; every word of `lexicon` is one token."""

from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from lab.nano.words import every_word

BOS, END, USER, ASSISTANT, SYSTEM, PAD = "<s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|pad|>"
SEPARATOR = "\n\n"  # between passages, and before the question
SYSTEM_PROMPT = "Answer from the passages."  # the only one seen in training
MAX_POSITIONS = 2048

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message.role == "user" -%}{{- "<|user|>" + message.content -}}
  {%- elif message.role == "system" -%}{{- "<|system|>" + message.content -}}
  {%- else -%}{{- "<|assistant|>" + message.content + "<|end|>" -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|assistant|>" -}}{%- endif -%}
"""


def build_tokenizer() -> Tokenizer:
    """A tokenizer trained on the lexicon; always the same."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\n\n"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        min_frequency=1,
        special_tokens=[BOS, END, USER, ASSISTANT, SYSTEM, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = sorted(every_word())  # at the start of a passage or an answer, and inside
    tokenizer.train_from_iterator([*(text for word in words for text in (word, f" {word}")), SEPARATOR], trainer)
    return tokenizer


def save_tokenizer(folder: Path) -> Any:
    """Writes the tokenizer files of transformers to a folder; returns transformers' tokenizer."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(),
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer
