"""A small model folder with random weights and a tokenizer of its own, for tests.

The weights say nothing, so neither do its answers; times and agreement with full recompute are what can be shown.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<s>", "</s>")


@dataclass(frozen=True)
class TinyShape:
    """Of the model: Llama's architecture.

    Attributes:
        layers, width, mlp_width, heads, kv_heads: as their names say.
        vocab_size: of the tokenizer at most.
        gain: factor on all weight matrices. At 1 random attention is almost even, and no token matters more
            than another; larger gains make it sharp, as training does.
        context_length: of the model.
    """

    layers: int = 12
    width: int = 384
    mlp_width: int = 1024
    heads: int = 6
    kv_heads: int = 2
    vocab_size: int = 1024
    gain: float = 2.0
    context_length: int = 8192


def build_tiny(folder: Path, texts: Iterable[str], shape: TinyShape | None = None, seed: int = 0) -> None:
    """Writes config, weights (fp32) and a tokenizer trained on `texts` to `folder`."""
    shape = shape or TinyShape()
    tokenizer = train_tokenizer(texts, shape.vocab_size)
    save_llama(folder, tokenizer, replace(shape, vocab_size=len(tokenizer)), seed)


def save_llama(folder: Path, tokenizer: PreTrainedTokenizerFast, shape: TinyShape, seed: int = 0) -> None:
    """Writes config, weights (fp32) and this tokenizer."""
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.mlp_width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context_length,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(shape.gain)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that puts BOS in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
