"""Random weights of known shapes: speed does not depend on the values of weights.

Sizes are from the models' published config files.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from cacheblend.core.errors import InvalidInputError

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def check_choice(model: str | None, shape: str | None) -> None:
    """Raises `InvalidInputError` unless exactly one of the two is given."""
    if (model is None) == (shape is None):
        raise InvalidInputError("give either a model folder or a shape, not both and not none")


def config_of(model: str | None, shape: str | None) -> PretrainedConfig:
    """Configuration of a model folder or a known shape; `InvalidInputError` for an unknown shape."""
    return shape_config(shape) if shape else AutoConfig.from_pretrained(model)


SHAPES: dict[str, dict[str, object]] = {
    "tiny": {
        "model_type": "llama",
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_parameters": {**_LLAMA3_ROPE, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_parameters": {**_LLAMA3_ROPE, "factor": 8.0},
    },
    "qwen3-32b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}


def shape_config(name: str) -> PretrainedConfig:
    """The configuration of a shape.

    Raises:
        InvalidInputError: no such shape.
    """
    if name not in SHAPES:
        raise InvalidInputError(f"no shape is called {name!r}; there are {', '.join(SHAPES)}")
    fields = dict(SHAPES[name])
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def build_shape(
    name: str, *, dtype: torch.dtype = torch.bfloat16, device: str | None = None, seed: int = 0
) -> PreTrainedModel:
    """A model of a shape with random weights, on CUDA if present.

    Raises:
        InvalidInputError: no such shape.
    """
    config = shape_config(name)
    torch.manual_seed(seed)
    with torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
