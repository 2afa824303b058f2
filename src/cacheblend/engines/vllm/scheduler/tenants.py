"""The planner of each tenant and LoRA adapter: a request's `cache_salt` and adapter are part of its chunks' names.

Knows names. Does not know requests.
"""

import secrets
from collections import OrderedDict
from dataclasses import replace

from cacheblend.core.config import BlendConfig
from cacheblend.core.plan.planner import Planner
from cacheblend.engines.identity import ModelIdentity

_MOST = 4096  # planners kept; one more is made in microseconds


class TenantPlanners:
    """Planners of one model. The embedded engine gives a tenant of the same name the same one.

    Args:
        identity: of the model.
        config: how prompts are blended.
    """

    def __init__(self, identity: ModelIdentity, config: BlendConfig) -> None:
        self._identity, self._config = identity, config
        self._made: OrderedDict[tuple[str, str], Planner] = OrderedDict()
        self.of()  # a wrong anchor shows at the start

    def of(self, cache_salt: str | None = None, adapter: str = "") -> Planner:
        """The planner of the requests with this salt and this adapter.

        Args:
            cache_salt: None: they have none.
            adapter: see `adapters.named`.
        """
        key = cache_salt or "", adapter
        if key not in self._made:
            self._made[key] = replace(self._identity, adapters=adapter).planner(self._config, key[0])
            while len(self._made) > _MOST:
                self._made.popitem(last=False)
        return self._made[key]

    def renew(self) -> None:
        """Changes all roots for the rest of this process: what was stored so far is not found any more."""
        self._config = replace(self._config, salt=f"{self._config.salt}\x1freset {secrets.token_hex(8)}")
        self._made.clear()
