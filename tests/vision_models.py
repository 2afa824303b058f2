"""Tiny random models of text and images, with the processors that vLLM needs: one of each way to see; and one of sound.

LLaVA: features in place of tokens. Qwen2.5-VL: positions of three parts. Gemma 3: windows, and image tokens that see
each other. Qwen3-VL: features that are added behind the first layers, too.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import vision

if __name__ == "__main__":
    vision.make_importable()
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    LlavaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2AudioConfig,
    Qwen2AudioEncoderConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    Qwen2Config,
    Qwen3VLConfig,
    WhisperFeatureExtractor,
)

from vllm_models import SHAPE

IMAGE, BEGIN, END, VIDEO = 2047, 2046, 2045, 2044
SOUND = IMAGE
_TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN: dict[str, Any] = {"image_token_id": IMAGE, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
_QWEN |= {"video_token_id": VIDEO}


@dataclass(frozen=True)
class Seeing:
    """A family: the tiny model's config, its processor of a tokenizer, names of its special tokens by id."""

    config: PretrainedConfig
    processor: Callable[[Any], Any]
    names: dict[int, str]


def _llava() -> Seeing:
    from transformers import CLIPImageProcessor, LlavaProcessor

    tower = {**_TOWER, "model_type": "clip_vision_model", "image_size": 56, "patch_size": 14, "projection_dim": 32}
    config = LlavaConfig(
        vision_config={**tower, "num_hidden_layers": 2},
        text_config={**SHAPE, "model_type": "llama"},
        image_token_index=IMAGE,
    )
    size = {"shortest_edge": 56}
    images = CLIPImageProcessor(size=size, crop_size={"height": 56, "width": 56})
    return Seeing(
        config,
        lambda tokenizer: LlavaProcessor(
            images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
        ),
        {IMAGE: "<image>", BEGIN: "<begin>", END: "<end>"},
    )


def _qwen2_5_vl() -> Seeing:
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 256}
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10_000.0}
    text = {**SHAPE, "model_type": "qwen2_5_vl_text", "rope_parameters": rope}
    config = Qwen2_5_VLConfig(
        vision_config={**tower, "fullatt_block_indexes": [1], "window_size": 56}, text_config=text, **_QWEN
    )
    size = {"shortest_edge": 56 * 56, "longest_edge": 56 * 56}
    return Seeing(
        config,
        lambda tokenizer: Qwen2_5_VLProcessor(
            Qwen2VLImageProcessor(size=size), tokenizer, Qwen2VLVideoProcessor(size=size)
        ),
        {IMAGE: "<|image_pad|>", BEGIN: "<|vision_start|>", END: "<|vision_end|>", VIDEO: "<|video_pad|>"},
    )


def _qwen3_vl() -> Seeing:
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    tower = {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 256}
    rope = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True, "rope_theta": 10_000.0}
    config = Qwen3VLConfig(
        vision_config={**tower, "deepstack_visual_indexes": [0, 1], "patch_size": 14, "num_position_embeddings": 16},
        text_config={**SHAPE, "model_type": "qwen3_vl_text", "rope_parameters": rope},
        **_QWEN,
    )
    size = {"shortest_edge": 56 * 56, "longest_edge": 56 * 56}
    return Seeing(
        config,
        lambda tokenizer: Qwen3VLProcessor(
            Qwen2VLImageProcessor(size=size, patch_size=14), tokenizer, Qwen3VLVideoProcessor(size=size, patch_size=14)
        ),
        {IMAGE: "<|image_pad|>", BEGIN: "<|vision_start|>", END: "<|vision_end|>", VIDEO: "<|video_pad|>"},
    )


def _gemma3() -> Seeing:
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    tower = {**_TOWER, "model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14}
    layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = Gemma3Config(
        vision_config=tower,
        text_config={**SHAPE, "sliding_window": 64, "layer_types": layers, "query_pre_attn_scalar": 32},
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=BEGIN,
        eoi_token_index=END,
    )
    return Seeing(
        config,
        lambda tokenizer: Gemma3Processor(
            Gemma3ImageProcessor(size={"height": 56, "width": 56}, do_pan_and_scan=False), tokenizer, image_seq_length=4
        ),
        {IMAGE: "<image_soft_token>", BEGIN: "<start_of_image>", END: "<end_of_image>"},
    )


def words_tokenizer(names: dict[int, str], **tokens: str) -> PreTrainedTokenizerFast:
    """A tokenizer of as many words as the tests' models know, of which these are special, by id; `tokens` are those by
    the attributes that a processor asks for."""
    breaks = {4 + count: "\n" * count for count in (1, 2, 3, 4)}  # Gemma's processor looks them up
    vocab = {{**breaks, **names}.get(number, f"w{number}"): number for number in range(SHAPE["vocab_size"])}
    words = Tokenizer(WordLevel(vocab, unk_token="w2"))
    words.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="w3",
        extra_special_tokens=tokens or list(names.values()),
    )


FAMILIES = {"llava": _llava, "qwen2.5-vl": _qwen2_5_vl, "qwen3-vl": _qwen3_vl, "gemma3": _gemma3}

SHOWN = {"llava": (IMAGE,), "qwen2.5-vl": (BEGIN, IMAGE, END), "qwen3-vl": (BEGIN, IMAGE, END), "gemma3": (BEGIN,)}
"""What stands for an image in a prompt."""


def make_vision_model(name: str, folder: Path) -> Path:
    """Saves the tiny model of a family, whose tokens depend on far context, and on images."""
    family = FAMILIES[name]()
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(family.config, dtype=torch.float32)
    for label, weight in model.named_parameters():
        if weight.dim() == 2 and ("language_model" in label or "lm_head" in label):
            embedded = 0.5 if name != "gemma3" else 0.5 * SHAPE["hidden_size"] ** -0.5  # which multiplies them
            scale = embedded if "embed" in label or "lm_head" in label else weight.shape[1] ** -0.5
            scale *= 1.8 if "q_proj" in label or "k_proj" in label else 1
            torch.nn.init.normal_(weight, 0, scale)
        elif weight.dim() >= 2:
            seen = 3 if "proj" in label or "merger" in label else 1
            torch.nn.init.normal_(weight, 0, weight[0].numel() ** -0.5 * seen)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    published = {  # as published checkpoints have it
        name if "vision_model" in name else name.replace("vision_tower.", "vision_tower.vision_model."): weight
        for name, weight in weights.items()
    }
    save_file(published, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = {"image_token": family.names[IMAGE], "boi_token": family.names[BEGIN], "eoi_token": family.names[END]}
    tokenizer = words_tokenizer(family.names, **(tokens if name == "gemma3" else {}))
    family.processor(tokenizer).save_pretrained(folder)
    return folder


def make_qwen2_audio(folder: Path) -> Path:
    """Around the shape of the tests' Qwen2, whose tokens depend on far context."""
    tokenizer = words_tokenizer({SOUND: "<|AUDIO|>", BEGIN: "<|audio_bos|>", END: "<|audio_eos|>"})
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


def main(folder: Path) -> None:
    """`python vision_models.py FOLDER`: a process of its own, in which torchvision is there before transformers."""
    for name in FAMILIES:
        make_vision_model(name, folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
