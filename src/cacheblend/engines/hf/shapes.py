"""Random weights of known shapes: speed does not depend on the values of weights."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from cacheblend.core.errors import InvalidInputError

_ROPE = {"rope_type": "default", "rope_theta": 1000000.0}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_TIED = {"tie_word_embeddings": True}

_COLUMNS = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "max_position_embeddings")  # fmt: skip
_ROWS: dict[str, tuple[tuple[object, ...], dict[str, object]]] = {
    "tiny": (("llama", 4096, 256, 688, 8, 4, 2, 32768), {}),
    "qwen2.5-0.5b": (("qwen2", 151936, 896, 4864, 24, 14, 2, 32768), {"rope_parameters": _ROPE, **_TIED}),
    "qwen2.5-1.5b": (("qwen2", 151936, 1536, 8960, 28, 12, 2, 32768), {"rope_parameters": _ROPE, **_TIED}),
    "llama-3.2-1b": (
        ("llama", 128256, 2048, 8192, 16, 32, 8, 131072),
        {"head_dim": 64, "rope_parameters": {**_LLAMA3_ROPE, "factor": 32.0}, **_TIED},
    ),
    "llama-3.1-8b": (
        ("llama", 128256, 4096, 14336, 32, 32, 8, 131072),
        {"rope_parameters": {**_LLAMA3_ROPE, "factor": 8.0}},
    ),
    "qwen3-32b": (("qwen3", 151936, 5120, 25600, 64, 64, 8, 40960), {"head_dim": 128, "rope_parameters": _ROPE}),
}
SHAPES = {name: {**dict(zip(_COLUMNS, row, strict=True)), **others} for name, (row, others) in _ROWS.items()}
"""Fields of the models' published config files."""


def shape_config(name: str) -> PretrainedConfig:
    """The configuration of a shape; raises `InvalidInputError` if there is none of this name."""
    if name not in SHAPES:
        raise InvalidInputError(f"no shape is called {name!r}; there are {', '.join(SHAPES)}")
    fields = dict(SHAPES[name])
    return AutoConfig.for_model(str(fields.pop("model_type")), **fields)


def build_shape(
    name: str, *, dtype: torch.dtype = torch.bfloat16, device: str | None = None, seed: int = 0
) -> PreTrainedModel:
    """A model of a shape with random weights, on CUDA if present."""
    config = shape_config(name)
    torch.manual_seed(seed)
    with torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
