"""Which of vLLM's model classes can be blended. Imports no vLLM."""

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""Architectures that can be blended: decoders whose layers are called with (positions, hidden, residual)."""
