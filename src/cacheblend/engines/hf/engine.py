"""The embedded engine: Hugging Face transformers, blending in front, transformers' own decoding behind.

engine = BlendEngine.from_pretrained("path/to/model", store="file:///var/cache/cacheblend")
engine.warm([Passage("..."), Passage("...")])
answer = engine.generate(["You answer from the passages.", Passage("..."), Passage("..."), "Who wrote it?"])
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.fusor import Prefill, check_selector, prefill
from cacheblend.core.loader import LayerLoader
from cacheblend.core.naming import TokenIds, root_name
from cacheblend.core.plan import Anchor, BlendPlan, Planner, cut_bos
from cacheblend.core.prompt import Prompt, Segment, check_ids, chunk
from cacheblend.core.report import BlendReport
from cacheblend.core.selection import Selector
from cacheblend.engines.hf.background import Background
from cacheblend.engines.hf.capture import ChunkJob, batches, compute_chunks, manifest_of, publish
from cacheblend.engines.hf.decode import Decoding, SamplingParams, TextStream, fill_cache
from cacheblend.engines.hf.fingerprint import fingerprint_folder, fingerprint_model
from cacheblend.engines.hf.survey import check_config, survey_model
from cacheblend.engines.hf.tokens import Content, Message, Passage, PromptBuilder
from cacheblend.engines.hf.view import ModelView
from cacheblend.engines.hf.walk import HfWalk
from cacheblend.store import KVStore, WriteBehind, open_store

PromptLike = Prompt | Sequence[Content] | Sequence[Message]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Answer:
    """A finished answer.

    Attributes:
        text: stop texts cut off, special tokens left out; empty where the engine has no tokenizer.
        token_ids: as generated.
        finish_reason: ``stop`` or ``length``.
        report: what was reused and what it cost.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    report: BlendReport


@dataclass(frozen=True)
class Delta:
    """A piece of an answer: text that is certain; the last one carries the answer."""

    text: str
    answer: Answer | None = None


@dataclass(frozen=True)
class WarmReport:
    """What `warm` did: chunks stored, chunks that were held already, their tokens, seconds."""

    stored: int
    held: int
    tokens: int
    seconds: float


@dataclass
class Request:
    """A prompt behind its prefill: `decoding.step()` gives its tokens."""

    decoding: Decoding
    params: SamplingParams
    report: BlendReport
    started: float
    token_ids: list[int] = field(default_factory=list)


class BlendEngine:
    """One model and one store. Requests may come from several threads.

    Args:
        model: a transformers causal language model; it is not changed.
        tokenizer: its tokenizer; None if all prompts are token ids.
        store: where KV is kept, or its URL; a store that is handed in stays open behind the engine.
        config: how to blend.
        fingerprint: of the model's files; None computes it from the parameters.
        name: of the model, for people.

    Raises:
        ModelNotBlendableError: the model's keys cannot be moved; the message says why.
        InvalidInputError: a check layer that the model does not have.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        store: KVStore | str | Path | None = None,
        config: BlendConfig | None = None,
        fingerprint: str | None = None,
        name: str = "",
    ) -> None:
        self.model, self.config, self.name = model, config or BlendConfig(), name
        self.view = ModelView(model)
        self.survey = survey_model(model, self.view)
        check_selector(self.config.make_selector(), len(self.survey.layout.layers))
        self.tokenizer = tokenizer
        self.builder = None if tokenizer is None else PromptBuilder(tokenizer)
        dtype = str(self.survey.layout.dtype).removeprefix("torch.")
        root = root_name(fingerprint or fingerprint_model(model), dtype, salt=self.config.salt)
        self.planner = Planner(root, self._anchor(), self.config.block_size)
        self._owns_store = not isinstance(store, KVStore)
        self.store = store if isinstance(store, KVStore) else open_store(store)
        self._writer = WriteBehind(self.store)
        self._background = Background(self.config.capture_queue)

    @staticmethod
    def from_pretrained(
        path: str | Path,
        *,
        store: KVStore | str | Path | None = None,
        config: BlendConfig | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        **model_options: Any,
    ) -> "BlendEngine":
        """Opens a model folder.

        Args:
            path: a folder with config.json, weights and tokenizer.
            store: a store, or its URL: ``memory``, a folder, ``file:///folder?max_bytes=...&ram_bytes=...``.
            config: how to blend.
            dtype: of the weights; ``auto`` takes the folder's own.
            device: None takes CUDA where there is one.
            **model_options: for transformers' own `from_pretrained`.

        Raises:
            InvalidInputError: not a model folder.
            ModelNotBlendableError: the model cannot be blended; said before its weights are read where possible.
        """
        from transformers import AutoConfig

        folder = Path(path)
        fingerprint = fingerprint_folder(folder)
        check_config(AutoConfig.from_pretrained(folder))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **model_options).eval()
        model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return BlendEngine(
            model, tokenizer, store=store, config=config, fingerprint=fingerprint, name=folder.resolve().name
        )

    # ---- prompts ----------------------------------------------------------------------------------------

    def prompt(self, parts: PromptLike) -> Prompt:
        """A prompt of texts and passages, of a message list, or one that is a prompt already.

        Raises:
            InvalidInputError: it cannot be made, or ids or length are outside the model's limits.
        """
        if not isinstance(parts, Prompt):
            if self.builder is None:
                raise InvalidInputError("this engine has no tokenizer: build the prompt from token ids")
            is_chat = bool(parts) and all(isinstance(part, dict) for part in parts)
            parts = self.builder.chat(parts) if is_chat else self.builder.prompt(parts)  # type: ignore[arg-type]
        parts.check(self.survey.vocab_size, self.survey.context_length)
        return parts

    # ---- storing ----------------------------------------------------------------------------------------

    def warm(
        self,
        chunks: Iterable[Passage | str | Segment],
        *,
        behind: PromptLike | None = None,
        progress: Progress | None = None,
    ) -> WarmReport:
        """Stores the KV of passages ahead of their use, each computed alone behind its anchor.

        Args:
            chunks: passages; those that the store holds are not computed again.
            behind: the plain text in front of the first chunk, for the anchor rule ``system``.
            progress: called with (chunks done, chunks in all).

        Raises:
            InvalidInputError: an empty chunk, one longer than the context, or ids outside the vocabulary.
            StoreError: the store is full or cannot be written to; what was stored before stays.
        """
        started = time.perf_counter()
        jobs = self._jobs([self._segment(part) for part in chunks], behind)
        missing = [job for job in jobs if not self._is_held(job)]
        done = len(jobs) - len(missing)
        for batch in batches(missing, self.config.capture_batch_tokens):
            self._compute_and_store(batch)
            done += len(batch)
            if progress is not None:
                progress(done, len(jobs))
        self.store.flush()
        tokens = sum(len(job.token_ids) for job in missing)
        return WarmReport(len(missing), len(jobs) - len(missing), tokens, time.perf_counter() - started)

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until missed chunks are captured and stored; False if that took longer than `timeout` seconds."""
        done = self._background.flush(timeout)
        return self._writer.flush(timeout) and done

    def close(self) -> None:
        """Ends background work; closes the store if the engine opened it."""
        self._background.close()
        self._writer.close()
        if self._owns_store:
            self.store.close()

    def __enter__(self) -> "BlendEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- answering --------------------------------------------------------------------------------------

    def generate(
        self, prompt: PromptLike, params: SamplingParams | None = None, *, ratio: float | None = None
    ) -> Answer:
        """The whole answer. `ratio` overrides the configured recompute ratio for this request."""
        *_, last = self.stream(prompt, params, ratio=ratio)
        assert last.answer is not None
        return last.answer

    def stream(
        self, prompt: PromptLike, params: SamplingParams | None = None, *, ratio: float | None = None
    ) -> Iterator[Delta]:
        """The answer as it comes; the last delta carries it whole."""
        params = params or SamplingParams()
        with self._background.request():
            request = self.start(prompt, params, ratio=ratio)
            stream = TextStream(self.builder.decode if self.builder else lambda ids: "", params.stop)
            while request.decoding.finish_reason is None and not stream.stopped:
                token = request.decoding.step()
                if not request.token_ids:
                    request.report.ttft_s = time.perf_counter() - request.started
                request.token_ids.append(token)
                text = stream.push(token)
                if text:
                    yield Delta(text)
            tail = stream.finish()
            yield Delta(tail, self._finished(request, stream))

    def start(
        self, prompt: PromptLike, params: SamplingParams | None = None, *, ratio: float | None = None
    ) -> Request:
        """Prefills a prompt; the caller steps its decoding."""
        started = time.perf_counter()
        prompt, params = self.prompt(prompt), params or SamplingParams()
        result, report = self.prefill(prompt, ratio=ratio)
        ids = _as_tensor(prompt.token_ids, self.model)
        cache = fill_cache(self.model, result.kv)
        decoding = Decoding(
            self.model, cache, ids, result.logits, self._within_context(prompt, params), self._eos()
        )
        report.ttft_s = time.perf_counter() - started
        return Request(decoding, params, report, started)

    @torch.no_grad()
    def prefill(
        self, prompt: Prompt, *, ratio: float | None = None, selector: Selector | None = None
    ) -> tuple[Prefill, BlendReport]:
        """Plan, load, fuse: first logits, KV cache and report. Missed chunks are captured in the background.

        Args:
            prompt: checked by `prompt`.
            ratio: overrides the configured recompute ratio.
            selector: overrides the configured selector.
        """
        started = time.perf_counter()
        selector = selector or self.config.make_selector(ratio)
        check_selector(selector, len(self.survey.layout.layers))
        plan = self.planner.plan(prompt, self.store)
        limit = self.survey.length_limit
        fallbacks = []
        if limit is not None and len(prompt) > limit:
            plan = plan.without("all")
            fallbacks.append(
                f"{len(prompt)} tokens: this model's RoPE changes behind {limit}, so nothing is reused"
            )
        planned = time.perf_counter()
        result = prefill(plan, self._walk, self._loader, selector, tile_rows=self.config.tile_rows)
        self._synchronize()
        finished = time.perf_counter()
        if self.config.capture and not fallbacks:
            self._capture(result)
        report = _report(result, planned - started, finished - planned, fallbacks)
        report.ttft_s = finished - started
        return result, report

    # ---- inside -----------------------------------------------------------------------------------------

    def _walk(self, plan: BlendPlan) -> HfWalk:
        first = plan.prefix_length
        ids = _as_tensor(plan.prompt.token_ids[first:], self.model)
        return HfWalk(self.view, ids, torch.arange(first, len(plan), device=ids.device))

    def _loader(self, plan: BlendPlan, first_reused_layer: int) -> LayerLoader:
        return LayerLoader(
            plan,
            self.store,
            self.survey.layout,
            self.survey.rotations,
            first_reused_layer=first_reused_layer,
            device=self.model.device,
            read_ahead=self.config.read_ahead,
        )

    def _anchor(self) -> Anchor:
        bos = self.builder.bos_id if self.builder else None
        rule = self.config.anchor
        if rule == "auto":
            rule = "none" if bos is None else "bos"
        return Anchor(rule, bos)

    def _segment(self, part: Passage | str | Segment) -> Segment:
        if isinstance(part, Segment):
            return chunk(part.token_ids, part.label)
        if self.builder is None:
            raise InvalidInputError("this engine has no tokenizer: pass chunks as segments of token ids")
        passage = Passage(part) if isinstance(part, str) else part
        return chunk(self.builder.encode(passage.text), passage.title)

    def _jobs(self, segments: Sequence[Segment], behind: PromptLike | None) -> list[ChunkJob]:
        """One job a distinct chunk, checked against the model's limits."""
        anchor = self._anchor_segments(behind)
        limit = min((n for n in (self.survey.context_length, self.survey.length_limit) if n), default=None)
        jobs: dict[bytes, ChunkJob] = {}
        for segment in segments:
            job = ChunkJob(tuple(anchor), segment.token_ids, segment.label)
            check_ids(segment.token_ids, self.survey.vocab_size, f"chunk {segment.label or len(jobs) + 1!r}")
            if limit is not None and len(job) > limit:
                raise InvalidInputError(
                    f"chunk {segment.label or len(jobs) + 1!r} has {len(job)} tokens with its anchor, the model's "
                    f"context {limit}; split it"
                )
            jobs.setdefault(segment.token_ids.tobytes(), job)
        return list(jobs.values())

    def _anchor_segments(self, behind: PromptLike | None) -> list[TokenIds]:
        if behind is not None:
            return self.planner.anchor.segments(cut_bos(self.prompt(behind), self.planner.anchor.bos_id))
        if self.planner.anchor.rule == "system":
            raise InvalidInputError(
                "the anchor 'system' needs the text in front of the chunks: warm(..., behind=...)"
            )
        return [] if self.planner.anchor.bos_id is None else [_one(self.planner.anchor.bos_id)]

    def _is_held(self, job: ChunkJob) -> bool:
        manifest = manifest_of(job, self.planner, self.name)
        return all(entry is not None for entry in self.store.find(manifest.block_names))

    def _compute_and_store(self, batch: Sequence[ChunkJob]) -> None:
        for captured in compute_chunks(self.model, batch, self.planner, self.name):
            for block in captured.blocks:
                self.store.write(block)
            self.store.put_manifest(captured.manifest)

    def _capture(self, result: Prefill) -> None:
        """Behind the request: publishes what is exact as it stands, computes missed chunks alone."""
        plan = result.plan
        for block in publish(plan, result.kv):
            self._writer.submit(block)
        anchor = tuple(self.planner.anchor.segments(plan.prompt))
        for segment in plan.missed_chunks():
            job = ChunkJob(anchor, segment.token_ids, segment.label)
            self._background.submit(
                segment.token_ids.tobytes(), lambda job=job: self._compute_and_store([job])
            )

    def _within_context(self, prompt: Prompt, params: SamplingParams) -> SamplingParams:
        from dataclasses import replace

        context = self.survey.context_length
        room = params.max_tokens if context is None else context - len(prompt) + 1
        return replace(params, max_tokens=min(params.max_tokens, room))

    def _eos(self) -> list[int]:
        eos = self.model.generation_config.eos_token_id
        return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)

    def _finished(self, request: Request, stream: TextStream) -> Answer:
        request.report.total_s = time.perf_counter() - request.started
        request.report.generated_tokens = len(request.token_ids)
        reason = "stop" if stream.stopped else request.decoding.finish_reason or "stop"
        return Answer(stream.text, request.token_ids, reason, request.report)

    def _synchronize(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)


def _report(result: Prefill, plan_s: float, pass_s: float, fallbacks: list[str]) -> BlendReport:
    tokens = result.plan.tokens_by_source()
    return BlendReport(
        prompt_tokens=len(result.plan),
        hit_tokens={source: tokens[source] for source in ("prefix", "memory", "disk")},
        missed_tokens=tokens["miss"],
        text_tokens=tokens["text"],
        recomputed_tokens=result.recomputed_tokens,
        row_layers=result.row_layers,
        plan_s=plan_s,
        load_s=result.load_s,
        wait_s=result.wait_s,
        compute_s=pass_s - result.wait_s,
        fallbacks=[*fallbacks, *result.fallbacks],
    )


def _as_tensor(ids: TokenIds, model: nn.Module) -> torch.Tensor:
    return torch.from_numpy(ids.astype("i8")).to(model.device)


def _one(token_id: int) -> TokenIds:
    import numpy as np

    return np.array([token_id], dtype="<u4")
