"""The shadow check: a share of the blended requests is computed once more in full and compared, and the recompute ratio
is held to a floor of agreement. Shared by both engines, which compute; nothing here does.

    request ──> draw ──> answered ──> engine: full prefill, when there is time ──> compare ──> watch ──> floor
                                                                                   (metrics, history)   (ratio)
"""

from cacheblend.engines.shadow.comparison import ANSWER_TOKENS, Compared, compare, kl_divergence
from cacheblend.engines.shadow.floor import Change, Floor, factors_from
from cacheblend.engines.shadow.settings import ShadowSettings
from cacheblend.engines.shadow.watch import (
    CLOSED,
    FAILED,
    MOST_WAITING,
    NO_ANSWER,
    QUEUE_FULL,
    Labels,
    ShadowFigures,
    ShadowWatch,
)

__all__ = [
    "ANSWER_TOKENS",
    "CLOSED",
    "FAILED",
    "MOST_WAITING",
    "NO_ANSWER",
    "QUEUE_FULL",
    "Change",
    "Compared",
    "Floor",
    "Labels",
    "ShadowFigures",
    "ShadowSettings",
    "ShadowWatch",
    "compare",
    "factors_from",
    "kl_divergence",
]
