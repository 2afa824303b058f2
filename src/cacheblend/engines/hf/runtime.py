"""What an engine's requests run on: a model as its adapters are now, where its KV is kept, the work beside requests."""

import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import PreTrainedModel

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError, check_type, shown
from cacheblend.core.failures import count_failure
from cacheblend.core.fuse.prefill import BlendedPrefill, PrefillResult
from cacheblend.core.names import BlockName, as_token_ids
from cacheblend.core.openmp import end_team
from cacheblend.core.plan.planner import Anchor, Planner
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.discovery import open_discovery
from cacheblend.engines.fingerprint import ModelIdentity, fingerprint_model
from cacheblend.engines.hf.adapter_watch import Adapted, AdapterWatch
from cacheblend.engines.hf.ambient import without_ambient
from cacheblend.engines.hf.background import CLOSE_S, Background
from cacheblend.engines.hf.decode import Decoding
from cacheblend.engines.hf.grammar import CompiledGrammar, Grammars
from cacheblend.engines.hf.prefiller import HfPrefill, Mode, Prefiller
from cacheblend.engines.hf.prompts import PromptReader
from cacheblend.engines.hf.recurrent import LayerKinds, copy_of
from cacheblend.engines.hf.sampling import Sampler, SamplingParams
from cacheblend.engines.hf.shadow_check import Origin, ShadowCheck
from cacheblend.engines.hf.state import ModelState
from cacheblend.engines.hf.survey import Survey, survey_model
from cacheblend.engines.hf.view import ModelView
from cacheblend.engines.hf.warmup import ChunkWarmer
from cacheblend.engines.histories import Histories
from cacheblend.engines.settings import BlendSettings, controller_of, load_cost_model
from cacheblend.engines.shadow import ShadowSettings, ShadowWatch
from cacheblend.store import KVStore, open_store

logger = logging.getLogger("cacheblend.engine")


@without_ambient
class EngineRuntime:
    """A model whose adapters may be switched at any time, with the parts of its engine that serve a request. Safe to
    call from several threads. Arguments as for `BlendEngine`.

    Attributes:
        prompts: reads prompts for this model; `builder` is its part that knows the tokenizer, None without one.
        settings: how to blend and where that comes from; `config` is what it says without a raised ratio.
        stored_layout: of the blocks that are stored.
        background: work for when no request runs.
        warmer: computes chunks alone and stores them.
        shadow: compares answers with full prefill; set by `watch`.
        grammars, discovery, histories: of structured answers, of text that recurs, of edited conversations.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        store: KVStore | str | Path | None,
        config: BlendConfig,
        fingerprint: str | None,
        *,
        bos_id: int | None,
        sentence_end_ids: Sequence[int] | None,
        name: str,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.adapters = AdapterWatch(model)
        adapted = self.adapters.adapted()
        survey = survey_model(adapted.model)
        _check_ids(bos_id, sentence_end_ids, survey.vocab_size)
        self.prompts = PromptReader(tokenizer, survey, sentence_end_ids)
        self.builder = self.prompts.builder
        self.fingerprint = fingerprint or fingerprint_model(model)
        bos_id = self.builder.bos_id if self.builder else bos_id
        dtype = str(survey.layout.dtype).removeprefix("torch.")
        in_front = self.builder.in_front if self.builder else None
        named = self.fingerprint, dtype, bos_id, name, adapted.digest
        identity = ModelIdentity(None, *named, in_front=in_front, room=survey.room)
        self.settings = BlendSettings(config.on(model.device.type)).on(identity)
        self.config = self.settings.config
        if survey.fit_selector(self.config.make_selector()).question_rows:
            self.prompts.sentence_end_ids()  # takes up to a second, which no request should wait for
        planner = identity.planner(self.config)
        self.stored_layout = replace(survey.layout, codec=self.config.codec)
        controller = None
        if self.config.cost_model is not None:
            survey.kinds.check_none("the loading controller (cost_model)")
            measured = {"model": self.fingerprint, "codec": self.config.codec, "device": model.device.type}
            cost_model = load_cost_model(self.config.cost_model, **measured)
            controller = controller_of(cost_model, self.config, self.stored_layout)
        self.histories = _open_histories(self.config, planner.anchor, survey.kinds)  # the last that may refuse
        self._owns_store, on_gpu = not isinstance(store, KVStore), model.device.type == "cuda"
        self.store = store if isinstance(store, KVStore) else open_store(store, page_locked=on_gpu)
        ends = self.prompts.sentence_end_ids
        prefiller = Prefiller(survey, self.store, self.config, controller, model.device, ends)
        self._state = ModelState(adapted, survey, identity, planner, prefiller, self.config)
        self.background = Background(self.config.capture_queue)
        self.shadow: ShadowCheck | None = None
        self._is_closed = False
        self.grammars = Grammars(tokenizer, survey.vocab_size, self.eos_ids)
        self.discovery = open_discovery(self.store, self.config, planner.anchor)
        learners = self.discovery, self.histories
        self.warmer = ChunkWarmer(model, self.store, self.config, self.background, name, self.adapters, *learners)
        end_team()  # a server computes in another thread

    def follow(self) -> ModelState:
        """The model as it is now, after a look at its adapters; requests that have begun keep the state they have."""
        self.adapters.follow(self._renew)
        return self._state

    def _renew(self, adapted: Adapted) -> None:
        self._state = self._state.renewed(adapted)

    def take_settings(self, settings: BlendSettings) -> None:
        """Blends by settings that were resolved for this model from now on, which warns if a profile does not fit."""
        self.settings = settings.on(self._state.identity)
        settings.compare(self.planner)

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
        after the first token has been drawn: the answer is not affected by what goes wrong here."""
        try:
            if self.discovery is not None and result.report.missed_tokens:
                root = self.planner_of(tenant).root
                result.report.near_miss_tokens = self.discovery.listing.near_misses(root, result.plan)
            self.warmer.after_request(self._state, tenant, result, text=text, may_keep=may_keep)
        except Exception as error:
            logger.warning("what a request missed is not stored", exc_info=True)
            count_failure(type(error).__name__)

    def watch(self, settings: ShadowSettings, *, seed: int | None = None) -> ShadowWatch:
        """Compares a share of the blended answers with full prefill from now on, when there is time.

        Without a scheduler that is when no request has been under way for a moment (`background.QUIET_S`); under a
        scheduler that is never idle, the check takes as large a share of the time as of the requests. With a floor, the
        ratio may be raised for requests that name none.

        `seed`: of what is drawn; None: another one each time. Returns what is found: figures, history, and the ratio in
        force. Raises `InvalidInputError`: answers are checked already."""
        check_type(settings, ShadowSettings, "settings")
        name = self._state.identity.name
        if self.shadow is not None:
            raise InvalidInputError(f"the answers of {name or 'this engine'} are checked already; open another engine")

        def raise_by(factor: float) -> None:
            self.settings = replace(self.settings, raised_by=factor)

        def open_full(prompt: Prompt, last_rows: int) -> BlendedPrefill:
            return self.prefiller.open_full(prompt, self.planner, last_rows)

        made = ShadowWatch(settings, name, self.settings.selector().share, raise_by, seed)
        self.shadow = ShadowCheck(made, open_full, self.adapters.latest_version, self.background.wake)
        self.background.idle_work = self.shadow
        return made

    def close(self, *, wait: bool) -> None:
        """Ends background work; see `BlendEngine.close`."""
        wait, self._is_closed = wait and not self._is_closed, True
        with contextlib.ExitStack() as ends:  # all of them, also where one fails or the wait is interrupted
            if self._owns_store:
                ends.callback(self.store.close)
            ends.callback(self.prefiller.close)
            ends.callback(self.grammars.close)
            ends.callback(self.warmer.close)
            if self.shadow is not None:
                ends.callback(self.shadow.close)
            ends.callback(self.background.close)
            self.warmer.give_up_edited()  # many would take hours
            if wait:
                while not self.warmer.flush(CLOSE_S):  # looked at again: the store may begin to hang meanwhile
                    if self.prefiller.late_tiers.silent or self.warmer.is_stuck:
                        break


def _open_histories(config: BlendConfig, anchor: Anchor, kinds: LayerKinds) -> Histories | None:
    if not config.edits:
        return None
    kinds.check_none("edits")
    if anchor.rule == "system":
        raise InvalidInputError("edits moves text in front of the first passage, of which the anchor 'system' consists")
    return Histories(config.min_run_tokens, config.watch_tokens)


def _check_ids(bos_id: Any, sentence_end_ids: Any, vocabulary: int) -> None:
    for name, given, what in (("bos_id", bos_id, "a token id"), ("sentence_end_ids", sentence_end_ids, "token ids")):
        if given is None:
            continue
        try:
            found = as_token_ids([given] if name == "bos_id" else given)
            is_known = len(found) == 0 or int(found.max()) < vocabulary
        except (TypeError, ValueError, OverflowError):
            is_known = False
        if not is_known:
            raise InvalidInputError(f"{name} must be {what} in 0..{vocabulary - 1} or None, got {shown(given)}")
