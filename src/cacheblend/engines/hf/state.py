"""A model whose adapters may be switched meanwhile, and what its engine and schedulers do for a request on it."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from transformers import PreTrainedModel

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError, ModelChangedError, check_type, shown
from cacheblend.core.fuse.prefill import PrefillResult
from cacheblend.core.names import BlockName
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.discovery import Discovery
from cacheblend.engines.fingerprint import ModelIdentity
from cacheblend.engines.hf.adapter_watch import Adapted, AdapterWatch
from cacheblend.engines.hf.background import Background
from cacheblend.engines.hf.decode import Decoding
from cacheblend.engines.hf.grammar import CompiledGrammar
from cacheblend.engines.hf.prefiller import HfPrefill, Mode, Prefiller
from cacheblend.engines.hf.recurrent import copy_of
from cacheblend.engines.hf.sampling import Sampler, SamplingParams
from cacheblend.engines.hf.shadow_check import Origin, ShadowCheck
from cacheblend.engines.hf.survey import Survey, survey_model
from cacheblend.engines.hf.view import ModelView
from cacheblend.engines.histories import Histories
from cacheblend.engines.settings import BlendSettings
from cacheblend.engines.tokens import PromptBuilder


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


class FollowedModel:
    """A model whose adapters may be switched at any time, and the parts of its engine that serve a request. Safe to
    call from several threads. Attributes are set by the engine."""

    config: BlendConfig
    settings: BlendSettings
    model: PreTrainedModel
    tokenizer: Any
    builder: PromptBuilder | None
    background: Background
    shadow: ShadowCheck | None = None  # set by `shadow_start.watch`
    adapters: AdapterWatch
    _state: ModelState
    discovery: Discovery[Any] | None
    histories: Histories | None
    _after_request: Callable[..., None]  # of `ChunkWarmer`

    def follow(self) -> ModelState:
        """The model as it is now, after a look at its adapters; requests that have begun keep the state they have."""
        self.adapters.follow(self._renew)
        return self._state

    def _renew(self, adapted: Adapted) -> None:
        self._state = self._state.renewed(adapted)

    @property
    def view(self) -> ModelView:
        """Runs the model's layers one at a time; another one after a switch of adapters."""
        return self._state.survey.view

    @property
    def survey(self) -> Survey:
        return self._state.survey

    @property
    def planner(self) -> Planner:
        """Names and looks up the blocks of the tenant ``""``; another one after a switch of adapters."""
        return self._state.planner

    @property
    def prefiller(self) -> Prefiller:
        return self._state.prefiller

    def planner_of(self, tenant: str) -> Planner:
        """The planner of a tenant: what one tenant stored no other finds. The engine's own is that of ``""``."""
        return self._state.planner_of(tenant)

    @property
    def eos_ids(self) -> list[int]:
        """Ids that end the model's answers, as in vLLM: those of its generation config, and its tokenizer's EOS, unless
        that is larger than the model can draw."""
        eos = self.model.generation_config.eos_token_id
        ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        own = getattr(self.tokenizer, "eos_token_id", None)
        return ids if own is None or own in ids or own >= self.survey.vocab_size else [*ids, int(own)]

    def ids_of(self, prompt: Prompt) -> torch.Tensor:
        """The prompt's ids, [tokens] int64 on the model's device."""
        return torch.from_numpy(prompt.token_ids.astype("i8")).to(self.model.device)

    def decoding(
        self, prompt: Prompt, params: SamplingParams, grammar: CompiledGrammar | None, result: PrefillResult
    ) -> Decoding:
        """An answer to a prefilled prompt, no longer than the context has room for; there may be several to one."""
        params = params.within(self.survey.max_length, len(prompt))
        sampler = Sampler(self.ids_of(prompt), result.logits, params, self.eos_ids, grammar)
        return Decoding(sampler, list(result.kv), None if result.states is None else copy_of(result.states.last))

    def origin(self, state: ModelState, *, own: bool, tenant: str = "") -> Origin:
        """What a prefill that was just opened is computed with; see `Origin`."""
        return Origin(state.adapted.version, self.shadow.watch.step if own and self.shadow else None, tenant)

    def known_in(self, prompt: Prompt, state: ModelState, tenant: str = "", lost: Collection[BlockName] = ()) -> Prompt:
        """The prompt whose plain text is cut at what its conversation had computed elsewhere (`BlendConfig.edits`), but
        in `lost` blocks, and at a tenant's stored chunks (`BlendConfig.discover`)."""
        root = state.planner_of(tenant).root
        if self.histories is not None:
            prompt = self.histories.match(root, prompt, lost)
        return prompt if self.discovery is None else self.discovery.listing.match_now(root, prompt)

    def open_prefill(
        self,
        prompt: Prompt,
        *,
        ratio: float | None = None,
        selector: Selector | None = None,
        mode: Mode = "blend",
        tenant: str = "",
        state: ModelState | None = None,
    ) -> HfPrefill:
        """The prefill of a prompt of `BlendEngine.prompt`, planned and not begun; close it, or use `with`. `ratio` and
        `selector` override what is configured; `tenant`: whose chunks, see `planner_of`; `state`: the model; None: as
        it is now (`follow`). Raises `InvalidInputError`: an argument of the wrong type, or a ratio outside 0..1."""
        check_type(prompt, Prompt, "prompt", "a Prompt, engine.prompt(parts)")
        if selector is not None and not callable(getattr(selector, "select", None)):
            raise InvalidInputError(
                f"selector must be a selector object, BlendConfig(...).make_selector(), or None, got {shown(selector)}"
            )
        if mode not in get_args(Mode):
            raise InvalidInputError(f"mode must be one of {', '.join(get_args(Mode))}, got {shown(mode)}")
        current, settings, is_own = state or self.follow(), self.settings, ratio is None and selector is None
        raised = settings.at_least if is_own else None  # None: the caller has decided
        chosen = selector or settings.selector(ratio)
        if is_own and settings.is_full and mode == "blend":
            mode = "prefix"
        moved = settings.of_moved if is_own and self.histories is not None else None
        planner, match = current.planner_of(tenant), lambda asked, lost: self.known_in(asked, current, tenant, lost)
        return current.prefiller.open(prompt, planner, chosen, mode, raised=raised, moved=moved, match=match)

    def store_missed(
        self,
        result: PrefillResult,
        tenant: str = "",
        *,
        text: bool = True,
        may_keep: Callable[[int], bool] = lambda tokens: True,
    ) -> None:
        """Queues what a prefill missed to be captured and stored; arguments as for `ChunkWarmer.after_request`. Call it
        after the first token has been drawn."""
        self._after_request(self._state, tenant, result, text=text, may_keep=may_keep)
