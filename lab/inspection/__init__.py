"""Measures and draws what blending does to one prompt."""

from lab.inspection.deviation import attention_deviation_by_layer, kv_deviation_by_layer
from lab.inspection.inspection import MAX_TOKENS, Inspection, inspect_prompt, ratio_curves
from lab.inspection.observation import Observation, observe_full, observe_fused

__all__ = [
    "MAX_TOKENS",
    "Inspection",
    "Observation",
    "attention_deviation_by_layer",
    "inspect_prompt",
    "kv_deviation_by_layer",
    "observe_full",
    "observe_fused",
    "ratio_curves",
]
