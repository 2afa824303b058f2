"""Why stored KV was not reused, or missed chunks were not stored: reasons of `fallbacks`. Imports no vLLM. An error
that nobody expected has its type's name as the reason."""

from cacheblend.core.failures import LOST_BLOCK as LOST_BLOCK
from cacheblend.core.failures import NOT_WRITTEN as NOT_WRITTEN
from cacheblend.core.load.budget import LOAD_TIMEOUT as LOAD_TIMEOUT

BAD_SPANS = "bad spans"
RESET = "cache reset"
QUEUE_FULL = "capture queue full"
TOO_LARGE = "capture too large"
ADAPTER_CHANGED = "LoRA changed"

SLOW_STORE = "slow store"
UNREADABLE = "store"
NO_SLOT = "no LoRA slot"
ADAPTER_UNUSABLE = "LoRA not loaded"
ADAPTER_SLOW = "LoRA not loaded in time"
RANK_FAILED = "another rank failed"
OTHER_WEIGHTS = "other weights"

DECISIONS = frozenset({BAD_SPANS, RESET, QUEUE_FULL, TOO_LARGE, ADAPTER_CHANGED, LOAD_TIMEOUT})
"""A client's or an operator's doing, or a limit that was set. Every other reason is a failure."""
