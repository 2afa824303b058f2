"""The embedded engine: prompts blended and answers decoded over a Hugging Face transformers model's own layers.

with BlendEngine.from_pretrained("path/to/model", store="file:///var/cache/cacheblend") as engine:
    engine.warm([Passage("..."), Passage("...")])
    answer = engine.generate(["Answer from the passages.", Passage("..."), "Who wrote it?"], max_new_tokens=64)
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Unpack

import torch
from transformers import PreTrainedModel

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError, check_encodable, check_type, shown
from cacheblend.core.fuse.prefill import PrefillResult
from cacheblend.core.plan.prompt import Prompt, Segment
from cacheblend.core.select.selectors import Selector, check_ratio
from cacheblend.engines.folders import model_folder
from cacheblend.engines.hf.ambient import without_ambient
from cacheblend.engines.hf.model_loader import open_folder
from cacheblend.engines.hf.prefiller import Mode
from cacheblend.engines.hf.prompts import PassageLike, PromptLike
from cacheblend.engines.hf.request import Answer, Delta, Request, answer_all, check_prompts
from cacheblend.engines.hf.runtime import EngineRuntime
from cacheblend.engines.hf.sampling import SamplingOptions, SamplingParams, check_params, sampling_of
from cacheblend.engines.hf.scheduler import Limits, Scheduler
from cacheblend.engines.hf.state import ModelState
from cacheblend.engines.hf.tickets import Ask
from cacheblend.engines.hf.warmup import Progress
from cacheblend.engines.keeper import WarmReport
from cacheblend.engines.settings import check_settings, resolve_settings
from cacheblend.engines.tokens import Message
from cacheblend.engines.tokens.detokenizer import TextStream
from cacheblend.store import KVStore, check_store_url


@without_ambient
class BlendEngine:
    """One model and one store. Requests may come from several threads.

    Args:
        model: a transformers causal language model, not changed here; its PEFT adapters may change between requests.
        tokenizer: its tokenizer; None if all prompts are token ids.
        store: where KV is kept, or its URL; a store object stays open after the engine is closed.
        config: how to blend, or a mapping of some fields.
        fingerprint: of the model's files; None computes it from the parameters.
        bos_id: for an engine without a tokenizer; otherwise the tokenizer says it.
        sentence_end_ids: ids of the tokens that end a sentence, likewise.
        name: of the model, for people.

    Attributes:
        model, tokenizer, store, config, name: as given; the store is open, and the config complete.
        fingerprint: of the model's files or parameters.
        runtime: what requests run on, for those who build on the engine.

    Raises:
        ModelNotBlendableError: the model's keys cannot be moved; the message says why.
        InvalidInputError: an argument of the wrong type, or a check layer that the model does not have.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        store: KVStore | str | Path | None = None,
        config: BlendConfig | Mapping[str, Any] | None = None,
        fingerprint: str | None = None,
        bos_id: int | None = None,
        sentence_end_ids: Sequence[int] | None = None,
        name: str = "",
    ) -> None:
        _check_model(model)
        if tokenizer is not None and not hasattr(tokenizer, "bos_token_id"):  # `PromptBuilder` checks its backend
            raise InvalidInputError(
                "tokenizer must be one of transformers, AutoTokenizer.from_pretrained(path), or None for prompts of "
                f"token ids, got {shown(tokenizer)}"
            )
        check_type(name, str, "name")
        check_type(fingerprint, str | None, "fingerprint")
        config = config if isinstance(config, BlendConfig) else BlendConfig.of({} if config is None else config)
        self.runtime = EngineRuntime(
            model, tokenizer, store, config, fingerprint, bos_id=bos_id, sentence_end_ids=sentence_end_ids, name=name
        )
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.store, self.config, self.fingerprint = self.runtime.store, self.runtime.config, self.runtime.fingerprint

    @staticmethod
    def from_pretrained(
        path: str | Path,
        *,
        store: KVStore | str | Path | None = None,
        config: BlendConfig | Mapping[str, Any] | None = None,
        profile: str | Path | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        with_tokenizer: bool = True,
        **model_options: Any,
    ) -> "BlendEngine":
        """Opens a model folder. What can be wrong is checked before weights are read, as far as possible.

        Args:
            path: a folder with config.json, weights and tokenizer; ``nano``, the model that ships; or a name on the hub
                (``org/name``) of which this machine has a snapshot. Nothing is downloaded.
            store: a store, or its URL: ``memory``, a folder, ``file:///folder?max_bytes=...``; see `open_store`.
            config: how to blend. None uses the model's profile, if it has one, or the defaults. A mapping of some
                fields overrides the profile's, or sets it aside (`resolve_settings`); a `BlendConfig` replaces it.
            profile: its file, if it is not ``blend-profile.json`` in the model's folder.
            dtype: of the weights; ``auto`` uses the folder's own.
            device: None uses CUDA if there is a GPU, or what `device_map` says.
            with_tokenizer: False if all prompts are token ids.
            **model_options: for transformers' own `from_pretrained`; those that may change keys and values become part
                of the blocks' names, and such a model has another profile.

        Raises:
            InvalidInputError: a wrong store URL or setting, not a model folder, no tokenizer in it, weights that are
                missing, damaged, or written to meanwhile, or a damaged profile.
            ModelNotBlendableError: the model cannot be blended.
        """
        way_out = "; BlendEngine(model, tokenizer) takes a model that is open"
        wanted = "the path of a model's folder" + (way_out if isinstance(path, PreTrainedModel) else "")
        check_type(path, str | Path, "path", wanted)
        check_type(profile, str | Path | None, "profile", "the path of a profile's file")
        check_type(with_tokenizer, bool, "with_tokenizer")
        if not isinstance(store, KVStore):
            check_store_url(store)
        folder = model_folder(path, revision=model_options.get("revision"), cache_dir=model_options.get("cache_dir"))
        check_settings(config, folder, profile)
        opened = open_folder(folder, dtype=dtype, device=device, with_tokenizer=with_tokenizer, **model_options)
        settings = resolve_settings(config, folder, opened.fingerprint, profile)
        engine = BlendEngine(
            opened.model,
            opened.tokenizer,
            store=store,
            config=settings.config,
            fingerprint=opened.fingerprint,
            name=opened.name,
        )
        engine.runtime.take_settings(settings)
        return engine

    # ---- prompts ----------------------------------------------------------------------------------------

    def prompt(self, parts: PromptLike) -> Prompt:
        """One prompt of texts and passages, of a message list, or one that is a prompt already.

        Texts without a passage are joined; `generate` refuses a list of them, which may as well be several prompts. For
        what a passage may be see `Passage.of`.

        Raises:
            InvalidInputError: it cannot be made, or ids or length are outside the model's limits.
        """
        return self.runtime.prompts.read(parts)

    def chat_prompt(self, messages: Sequence[Message], documents: Sequence[PassageLike] = (), **options: Any) -> Prompt:
        """A message list through the model's chat template; see `PromptReader.chat`."""
        return self.runtime.prompts.chat(messages, documents, **options)

    # ---- storing ----------------------------------------------------------------------------------------

    def warm(
        self,
        chunks: Iterable[PassageLike | Segment],
        *,
        system: PromptLike | None = None,
        progress: Progress | None = None,
        tenant: str = "",
        state: ModelState | None = None,
    ) -> WarmReport:
        """Stores the KV of passages ahead of their use, each computed alone behind its anchor.

        Args:
            chunks: passages, in whatever form `Passage.of` takes; those that the store holds are not computed again.
            system: the plain text in front of the first chunk, for the anchor rule ``system``.
            progress: called with (chunks done, chunks in all).
            tenant: for whom; what one tenant stored no other finds.
            state: the model with certain adapters (`EngineRuntime.follow`); None: as it is now.

        Raises:
            InvalidInputError: an empty chunk, one longer than the context, or ids outside the vocabulary.
            ModelChangedError: the model's adapters were switched meanwhile.
            StoreError: the store is full or cannot be written to; what was stored before stays.
        """
        self.runtime.background.check_open()
        if progress is not None and not callable(progress):
            raise InvalidInputError(f"progress must be a function or None, got {shown(progress)}")
        segments, state = self.runtime.prompts.segments(chunks), state or self.runtime.follow()
        anchor = state.planner.anchor.segments(None if system is None else self.prompt(system))
        return self.runtime.warmer.warm(state, tenant, anchor, segments, progress)

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until missed chunks are captured and stored; False if that took longer than `timeout` seconds."""
        check_type(timeout, float | None, "timeout")
        return self.runtime.warmer.flush(timeout)

    def close(self, *, wait: bool = True) -> None:
        """Ends background work; closes the store if the engine opened it. Idempotent: the first call says what is
        waited for. `wait`: for missed chunks to be captured and stored (`flush` waits with a bound, and for edited
        histories), but not for a store that has not answered the last requests in time; False gives them up."""
        self.runtime.close(wait=wait)

    def __enter__(self) -> "BlendEngine":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(wait=kind is None)

    # ---- answering --------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        ratio: float | None = None,
        conversation: str = "",
        **options: Unpack[SamplingOptions],
    ) -> Answer:
        """The whole answer to one prompt. Passages that are stored are loaded, others are computed, and stored when
        no request runs (`BlendConfig.capture`).

            answer = engine.generate([Passage(text) for text in found] + ["Who has the bowl?"], max_new_tokens=32)
            answer.text, answer.report.hit_tokens, answer.report.ttft_s

        Args:
            prompt: texts and passages in order, a message list, or what `prompt` and `chat_prompt` return.
            params: how the answer is drawn; None: greedy, at most 256 tokens, no stop texts.
            ratio: share of the loaded tokens that is recomputed, 0..1, for this request; 1 is exact. None: as
                configured (`BlendConfig.recompute_ratio`, or the model's profile).
            conversation: whose earlier prompts this one may continue, edited (`BlendConfig.edits`); empty: nobody's.
            **options: fields of `SamplingParams` one by one, instead of `params`: ``max_new_tokens=256``,
                ``temperature=0.0`` (greedy), ``top_k=0``, ``top_p=1.0``, ``min_p=0.0`` (off), ``seed=None``,
                ``stop=()`` and the others.

        Returns:
            `Answer`: its text, its token ids, why it ended, and a report of what was reused and the seconds it took.

        Raises:
            InvalidInputError: no prompt can be made of `prompt`; several texts without a passage, for which there is
                `generate_batch`; an option is unknown or out of range. Its subclass `PromptTooLongError`: more tokens
                than the model's context.
        """
        *_, last = self._stream(prompt, sampling_of(params, options), ratio, conversation)
        assert last.answer is not None
        return last.answer

    def chat(
        self,
        messages: Sequence[Message],
        documents: Sequence[PassageLike] = (),
        params: SamplingParams | None = None,
        *,
        ratio: float | None = None,
        conversation: str = "",
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Answer:
        """The whole answer to a message list; arguments as for `chat_prompt` and `generate`."""
        check_type(template_options, Mapping | None, "template_options", 'a mapping, {"enable_thinking": False}')
        prompt = self.chat_prompt(messages, documents, **(template_options or {}))
        return self.generate(prompt, params, ratio=ratio, conversation=conversation, **options)

    def stream(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        ratio: float | None = None,
        conversation: str = "",
        **options: Unpack[SamplingOptions],
    ) -> Iterator[Delta]:
        """The answer as it is generated; the last delta carries it whole. Arguments as for `generate`."""
        return self._stream(prompt, sampling_of(params, options), ratio, conversation)

    def _stream(
        self, prompt: PromptLike, params: SamplingParams, ratio: float | None, conversation: str
    ) -> Iterator[Delta]:
        builder = self.runtime.builder
        text = TextStream(builder.detokenizer() if builder else None, params.stop)
        with self._start(prompt, params, ratio, conversation) as request:  # finished also where the caller leaves early
            yield from request.stream(text)

    def start(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        ratio: float | None = None,
        conversation: str = "",
    ) -> Request:
        """Prefills a prompt, for callers that draw the tokens themselves; arguments as for `generate`.

        Until the request's `finish` no background work is started.
        """
        return self._start(prompt, SamplingParams() if params is None else check_params(params), ratio, conversation)

    def _start(self, prompt: PromptLike, params: SamplingParams, ratio: float | None, conversation: str) -> Request:
        started, runtime = time.perf_counter(), self.runtime
        ask = self._ask(prompt, params, ratio, conversation)
        runtime.background.begin_request()
        try:
            state = runtime.follow()
            origin = runtime.origin(state, own=ratio is None)
            with runtime.open_prefill(runtime.known_in(ask.prompt, state), ratio=ratio, state=state) as prefill:
                result = prefill.run()
            watched = None if runtime.shadow is None else runtime.shadow.begin(result, origin)
            return Request(runtime, state, ask, result, started, watched)
        except BaseException:
            runtime.background.end_request()
            raise

    def _ask(self, prompt: PromptLike, params: SamplingParams, ratio: float | None, conversation: str = "") -> Ask:
        read = self.runtime.prompts.read(prompt, is_one=False)
        if conversation:
            check_type(conversation, str, "conversation")
            check_encodable(conversation, "conversation")
            read = replace(read, conversation=conversation)
        if params.stop and self.runtime.builder is None:
            raise InvalidInputError("without a tokenizer the engine cannot find stop texts; use stop_token_ids")
        bad = chain.from_iterable(params.bad_words)
        for name, ids in (("logit_bias", (token for token, _ in params.logit_bias)), ("bad_words", bad)):
            for token in ids:
                if not 0 <= token < (vocabulary := self.runtime.survey.vocab_size):
                    raise InvalidInputError(f"{name} has token {token}; ids are in 0..{vocabulary - 1}")
        return Ask(read, params, grammar=self.runtime.grammars.compile(params.grammar), ratio=ratio)

    def generate_batch(
        self,
        prompts: Iterable[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        ratio: float | None = None,
        concurrency: int = 8,
        **options: Unpack[SamplingOptions],
    ) -> list[Answer]:
        """The whole answers to many prompts, in the prompts' order; several are prefilled and decoded together.

        Prompts are read as places become free, so an iterator may make them on the way. Passages that several prompts
        have are computed once if `warm` stores them first.

        Args:
            prompts: each as for `generate`.
            params: how all answers are drawn, or one for each prompt, as many as there are.
            ratio: overrides the configured recompute ratio for these requests.
            concurrency: prompts that run at a time; each has its own KV cache in memory.
            **options: the fields of `SamplingParams` one by one, instead of `params`.

        Raises:
            InvalidInputError: the options, `ratio` or `concurrency` are wrong, or `prompts` is a single prompt.
            BatchError: some prompts could not be answered, e.g. too long ones; it has the answers to all others.
        """
        check_prompts(prompts)
        self.runtime.background.check_open()
        check_type(concurrency, int, "concurrency")
        if concurrency < 1:
            raise InvalidInputError(f"concurrency must be at least 1, got {concurrency}")
        if ratio is not None:
            check_ratio(ratio)
        each = [sampling_of(one, options) for one in params] if isinstance(params, list | tuple) else []
        for_all = None if isinstance(params, list | tuple) else sampling_of(params, options)  # type: ignore[arg-type]
        if for_all is None:
            prompts = list(prompts)
            if len(each) != len(prompts):
                raise InvalidInputError(
                    f"{len(each)} sampling parameters for {len(prompts)} prompts; give one for each, or one for all"
                )

        def ask_of(prompt: PromptLike, place: int) -> Ask:
            return self._ask(prompt, for_all or each[place], ratio)

        scheduler = Scheduler(self.runtime, Limits(active=concurrency, waiting=concurrency), has_thread=False)
        return answer_all(scheduler, prompts, ask_of, concurrency)

    def prefill(
        self,
        prompt: Prompt,
        *,
        ratio: float | None = None,
        selector: Selector | None = None,
        mode: Mode = "blend",
        state: ModelState | None = None,
    ) -> PrefillResult:
        """First logits, KV cache and report of a prompt that `prompt` or `chat_prompt` made. Stores nothing.

        Args:
            prompt: the prompt.
            ratio: as for `generate`.
            selector: which rows are recomputed, instead of the configured one: `BlendConfig(...).make_selector()`.
            mode: ``blend``; ``reuse``: recomputes nothing; ``prefix``: loads what is exact; ``full``: nothing.
            state: the model with certain adapters (`EngineRuntime.follow`); None: as it is now.

        Raises:
            InvalidInputError: an argument of the wrong type, or a ratio outside 0..1.
        """
        with self.runtime.open_prefill(prompt, ratio=ratio, selector=selector, mode=mode, state=state) as prefill:
            return prefill.run()


def _check_model(model: object) -> None:
    if not (isinstance(model, torch.nn.Module) and hasattr(model, "config")):
        way_out = ", or a folder's path to BlendEngine.from_pretrained" if isinstance(model, str | Path) else ""
        raise InvalidInputError(f"model must be a model of transformers (PreTrainedModel){way_out}, got {shown(model)}")
