"""Measures and draws what blending does to one prompt."""

from cacheblend.evaluation.inspection.deviation import attention_deviation_by_layer, kv_deviation_by_layer
from cacheblend.evaluation.inspection.inspection import Inspection
from cacheblend.evaluation.inspection.measuring import MAX_TOKENS, inspect_prompt, ratio_curves
from cacheblend.evaluation.inspection.observation import Observation, observe_full, observe_fused

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
