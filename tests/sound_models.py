"""A tiny random model of text and sound, with the processor that vLLM needs."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2AudioConfig,
    Qwen2AudioEncoderConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    Qwen2Config,
    WhisperFeatureExtractor,
)

from vllm_models import SHAPE

SOUND, BEGIN, END = 2047, 2046, 2045
_NAMES = {SOUND: "<|AUDIO|>", BEGIN: "<|audio_bos|>", END: "<|audio_eos|>"}


def words_tokenizer(names: dict[int, str], **tokens: str) -> PreTrainedTokenizerFast:
    """A tokenizer of as many words as the tests' models know, of which these are special.

    Args:
        names: of special tokens, by id.
        tokens: the special tokens by the attributes that a processor asks for; none: they need no attributes.
    """
    breaks = {4 + count: "\n" * count for count in (1, 2, 3, 4)}  # Gemma's processor looks them up
    vocab = {{**breaks, **names}.get(number, f"w{number}"): number for number in range(SHAPE["vocab_size"])}
    words = Tokenizer(WordLevel(vocab, unk_token="w2"))
    words.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="w3",
        extra_special_tokens=tokens or list(names.values()),
    )


def make_qwen2_audio(folder: Path) -> Path:
    """Around the shape of the tests' Qwen2, whose tokens depend on far context."""
    tokenizer = words_tokenizer(_NAMES)
    text: dict[str, Any] = Qwen2Config(**SHAPE, architectures=["Qwen2ForCausalLM"]).to_dict()
    sound = Qwen2AudioEncoderConfig(d_model=32, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=64)
    config = Qwen2AudioConfig(audio_config=sound.to_dict(), text_config=text, audio_token_index=SOUND)
    torch.manual_seed(1)
    model = Qwen2AudioForConditionalGeneration(config).to(torch.float32)
    for label, weight in model.named_parameters():
        if weight.dim() == 2 and ("language_model" in label or "lm_head" in label):
            scale = 0.5 if "embed" in label or "lm_head" in label else weight.shape[1] ** -0.5
            scale *= 1.8 if "q_proj" in label or "k_proj" in label else 1
            torch.nn.init.normal_(weight, 0, scale)
        elif "projector" in label:
            torch.nn.init.normal_(weight, 0, 0.5)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    published = {name.replace("model.model.", "model."): weight for name, weight in weights.items()}
    save_file(published, folder / "model.safetensors", metadata={"format": "pt"})
    Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=128), tokenizer).save_pretrained(folder)
    return folder
