"""What an engine knows of its model while the same adapters are in effect."""

from dataclasses import dataclass, replace

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import ModelChangedError
from cacheblend.core.plan.planner import Planner
from cacheblend.engines.hf.adapter_watch import Adapted, AdapterFollower
from cacheblend.engines.hf.prefiller import Prefiller
from cacheblend.engines.hf.survey import Survey, survey_model
from cacheblend.engines.hf.view import ModelView
from cacheblend.engines.identity import ModelIdentity


@dataclass(frozen=True)
class ModelState:
    """A model with certain adapters in effect, and the names of what it computes.

    It never changes: after a switch an engine has another one. Who keeps one for as long as a request takes computes
    with the adapters by which its blocks are named, whichever the model is switched to meanwhile.

    Attributes:
        adapted: a frozen copy of the caller's model, for plain forwards, and the version of its adapters.
        view: of that copy, for single layers.
        survey: of the model.
        identity: what blocks are named by.
        planner: of the tenant ``""``.
        prefiller: opens prefills on `view`.
        config: how to blend.
    """

    adapted: Adapted
    view: ModelView
    survey: Survey
    identity: ModelIdentity
    planner: Planner
    prefiller: Prefiller
    config: BlendConfig

    def planner_of(self, tenant: str) -> Planner:
        """The planner of a tenant; what one tenant stored no other finds."""
        return self.identity.planner(self.config, tenant) if tenant else self.planner

    def renewed(self, adapted: Adapted) -> "ModelState":
        """The same model with other adapters or weights, which are surveyed anew.

        Raises:
            ModelChangedError: its KV has another dtype or shape.
        """
        view = ModelView(adapted.model)
        survey = survey_model(adapted.model, view)
        if survey.layout != self.survey.layout:
            raise ModelChangedError(
                f"the model's KV is of {survey.layout.dtype} now, and was of {self.survey.layout.dtype} and "
                f"{self.survey.layout.block_bytes(1)} bytes a token when the engine was opened; open another one on it"
            )
        identity = replace(self.identity, adapters=adapted.digest)
        planner, prefiller = identity.planner(self.config), self.prefiller.of_view(view, survey)
        return ModelState(adapted, view, survey, identity, planner, prefiller, self.config)


class FollowedModel:
    """A model whose adapters may be switched at any time, in any thread: its state, renewed at each look.

    Args:
        adapters: of the model.
        state: of the model, as `adapters` last saw it.
    """

    def __init__(self, adapters: AdapterFollower, state: ModelState) -> None:
        self.adapters, self._state = adapters, state

    def follow(self) -> ModelState:
        """The model as it is now, after a look at its adapters; requests that have begun keep the state they have."""
        self.adapters.follow(self._renew)
        return self._state

    def _renew(self, adapted: Adapted) -> None:
        self._state = self._state.renewed(adapted)

    @property
    def view(self) -> ModelView:
        """Runs the model's layers one at a time; another one after a switch of adapters."""
        return self._state.view

    @property
    def survey(self) -> Survey:
        """What is known of the model."""
        return self._state.survey

    @property
    def planner(self) -> Planner:
        """Names and looks up the blocks of the tenant ``""``; another one after a switch of adapters."""
        return self._state.planner

    @property
    def prefiller(self) -> Prefiller:
        """Opens prefills on `view`."""
        return self._state.prefiller

    def planner_of(self, tenant: str) -> Planner:
        """The planner of a tenant: what one tenant stored no other finds. The engine's own is that of ``""``."""
        return self._state.planner_of(tenant)
