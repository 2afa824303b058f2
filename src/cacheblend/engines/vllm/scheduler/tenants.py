"""The planner of each tenant: a request's `cache_salt` is part of the names of its chunks.

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
        self._made: OrderedDict[str, Planner] = OrderedDict()
        self.of()  # a wrong anchor shows at the start

    def of(self, cache_salt: str | None = None) -> Planner:
        """The planner of the requests with this salt; None: of those without one."""
        tenant = cache_salt or ""
        if tenant not in self._made:
            self._made[tenant] = self._identity.planner(self._config, tenant)
            while len(self._made) > _MOST:
                self._made.popitem(last=False)
        return self._made[tenant]

    def renew(self) -> None:
        """Changes all roots for the rest of this process: what was stored so far is not found any more."""
        self._config = replace(self._config, salt=f"{self._config.salt}\x1freset {secrets.token_hex(8)}")
        self._made.clear()
