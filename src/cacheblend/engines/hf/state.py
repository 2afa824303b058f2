"""A model as its adapters are at one moment."""

from dataclasses import dataclass, replace

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import ModelChangedError
from cacheblend.core.plan.planner import Planner
from cacheblend.engines.fingerprint import ModelIdentity
from cacheblend.engines.hf.adapter_watch import Adapted
from cacheblend.engines.hf.prefiller import Prefiller
from cacheblend.engines.hf.survey import Survey, survey_model


@dataclass(frozen=True)
class ModelState:
    """A model with certain adapters in effect, and the names of what it computes. It never changes: after a switch an
    engine has another one. Who keeps one for as long as a request takes computes with the adapters by which its blocks
    are named, whichever the model is switched to meanwhile."""

    adapted: Adapted  # a frozen copy of the caller's model, for plain forwards, and the version of its adapters
    survey: Survey  # of that copy
    identity: ModelIdentity  # what blocks are named by
    planner: Planner  # of the tenant ``""``
    prefiller: Prefiller  # opens prefills on the survey's view
    config: BlendConfig  # how to blend

    def planner_of(self, tenant: str) -> Planner:
        """The planner of a tenant; what one tenant stored no other finds."""
        return self.identity.planner(self.config, tenant) if tenant else self.planner

    def renewed(self, adapted: Adapted) -> "ModelState":
        """The same model with other adapters or weights, which are surveyed anew. Raises `ModelChangedError`: its KV
        has another dtype or shape."""
        survey = survey_model(adapted.model)
        if survey.layout != self.survey.layout:
            raise ModelChangedError(
                f"the model's KV is of {survey.layout.dtype} now, and was of {self.survey.layout.dtype} and "
                f"{self.survey.layout.block_bytes(1)} bytes a token when the engine was opened; open another one on it"
            )
        identity, prefiller = replace(self.identity, adapters=adapted.digest), self.prefiller.of(survey)
        planner = identity.planner(self.config)
        return ModelState(adapted, survey, identity, planner, prefiller, self.config)
