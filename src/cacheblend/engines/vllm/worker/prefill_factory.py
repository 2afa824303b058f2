"""Opens the prefill of a worker's job: which rows it runs, what it loads, where its KV goes.

Knows the model, the paged cache and the store. Does not know when a job is computed, nor what happens if it fails.
Opening reads neither the store nor the paged cache.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cacheblend.core.errors import BlockLostError
from cacheblend.core.fuse.prefill import BlendedPrefill, PrefillOptions, RowAttention
from cacheblend.core.fuse.runner import Attend
from cacheblend.core.kernels.attention_spec import AttentionSpec
from cacheblend.core.kernels.operations import attend_rows, serve
from cacheblend.core.load.layer_kv import LayerCache, LayerKV
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.load.threads import DaemonPool
from cacheblend.core.plan.blocks import BlockSource, EmptySource
from cacheblend.core.plan.plan import RESIDENT, BlendPlan
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.core.select.selectors import NoRows, Selector
from cacheblend.engines.vllm.internals.attention_shim import AttentionAnswer
from cacheblend.engines.vllm.internals.lora import NO_ADAPTER, LoadedAdapters
from cacheblend.engines.vllm.jobs import BlendJob, CaptureJob, CheckJob
from cacheblend.engines.vllm.worker.groups import GroupRows, LayerGroups, RequestRows
from cacheblend.engines.vllm.worker.layers import CheckRunner, DecoderModel, VllmLayerRunner
from cacheblend.engines.vllm.worker.model import BlendModel
from cacheblend.engines.vllm.worker.paged_attention import PagedAttention
from cacheblend.engines.vllm.worker.paged_cache import PagedLayer
from cacheblend.engines.vllm.worker.paged_kv import PagedKV, open_pages
from cacheblend.engines.vllm.worker.ranks import FINE, LOST, Ranks
from cacheblend.engines.vllm.workspace import READ_AHEAD, READ_AHEAD_BYTES


class AdaptedModels:
    """One model with each of its adapters.

    Args:
        model: without any.
        loaded: its adapters; None: vLLM was started without LoRA.
        tile_rows: tokens that are embedded at once.
    """

    def __init__(self, model: DecoderModel, loaded: LoadedAdapters | None, tile_rows: int) -> None:
        self._model, self._loaded, self._tile_rows = model, loaded, tile_rows
        self._inside = [loaded.modules_of(layer.module) for layer in model.layers] if loaded else []
        self._beside = loaded.modules_beside([layer.module for layer in model.layers]) if loaded else []

    def of(self, adapter: int = NO_ADAPTER) -> DecoderModel:
        """The model with an adapter, which has to be in a slot when its rows are computed."""
        if self._loaded is None:
            return self._model
        return AdaptedModel(self._model, self._loaded, adapter, self._inside, self._beside, self._tile_rows)


class AdaptedModel:
    """See the module; made by `AdaptedModels`."""

    def __init__(
        self,
        model: DecoderModel,
        loaded: LoadedAdapters,
        adapter: int,
        inside: Sequence[Sequence[Any]],
        beside: Sequence[Any],
        tile_rows: int,
    ) -> None:
        self._model, self._loaded, self._adapter = model, loaded, adapter
        self._beside, self._tile_rows = beside, tile_rows
        self.layers = [partial(self._run, *each) for each in zip(model.layers, inside, strict=True)]
        self.specs = model.specs

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `DecoderModel.embed`; some rows at a time, as vLLM's LoRA layers take memory by rows."""
        parts = []
        for tile in torch.split(token_ids, self._tile_rows):
            with self._loaded.applied(self._adapter, len(tile), self._beside):
                parts.append(self._model.embed(tile))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def row_inputs(self, token_ids: torch.Tensor, positions: torch.Tensor) -> Sequence[tuple[torch.Tensor, ...]]:
        """See `DecoderModel.row_inputs`."""
        with self._loaded.applied(self._adapter, len(token_ids), self._beside):
            return self._model.row_inputs(token_ids, positions)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `DecoderModel.logits`."""
        with self._loaded.applied(self._adapter, len(hidden), self._beside):
            return self._model.logits(hidden)

    def answering(self, layer: int, answer: AttentionAnswer) -> AbstractContextManager[None]:
        """See `DecoderModel.answering`."""
        return self._model.answering(layer, answer)

    def _run(self, layer: Callable[..., Any], modules: Sequence[Any], positions: torch.Tensor, *rest: Any) -> Any:
        with self._loaded.applied(self._adapter, positions.shape[-1], modules):
            return layer(positions, *rest)


class AgreedLoader(LayerLoader):
    """A loader that gives a layer on all ranks or on none: a rank that continued alone would wait for the others.

    Args:
        ranks: that must agree.
        args, options: see `LayerLoader`.
    """

    def __init__(self, ranks: Ranks, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ranks = ranks

    def layer(self, index: int) -> LayerCache:
        """See `LayerLoader.layer`; where one rank lost a block, every rank loses all of them.

        Raises:
            RankFailedError: another rank failed.
        """
        if index in self._given:
            return super().layer(index)
        kv, reason = None, "another rank lost a block"
        try:
            kv = super().layer(index)
        except BlockLostError as error:
            reason = error.reason
        if self._ranks.agree(LOST if kv is None else FINE, f"layer {index} is loaded") == LOST or kv is None:
            names = list({span.name for span in self._plan.spans if span.name != RESIDENT})
            raise BlockLostError(names, reason)
        return kv


SentenceEnds = Callable[[], npt.NDArray[np.int64] | None]

READ_THREADS = 16
"""A prompt reads in one of them; when all hang in the store, further prompts wait for one, and fall back."""


class Opener:
    """Opens prefills for one rank.

    Args:
        model: this rank's part.
        store: where stored chunks are read.
        codec: of the stored chunks.
        block_size: of the paged cache, in tokens.
        options: of all prefills.
        sentence_end_ids: the ids of the tokens that end a sentence, for selectors that ask the question.
        groups, builders, in_pages: see `Worker`.
        ranks: that compute together.
    """

    def __init__(
        self,
        model: BlendModel,
        store: BlockSource,
        codec: str,
        *,
        block_size: int,
        options: PrefillOptions,
        sentence_end_ids: SentenceEnds,
        groups: LayerGroups,
        builders: Sequence[Any] | None,
        in_pages: bool | None,
        ranks: Ranks,
    ) -> None:
        self._model, self._store, self._codec, self._ranks = model, store, codec, ranks
        self._block_size, self._groups, self._builders = block_size, groups, builders
        self._sentence_end_ids = sentence_end_ids
        self._options = replace(options, over_ranks=ranks.combine if ranks.size > 1 else None)
        self.tile_rows = options.tile_rows
        self._adapted = AdaptedModels(model, model.adapters, options.tile_rows)
        self._paged = [
            PagedLayer(layer, shape.kv_heads, shape.head_dim, block_size, model.layout.dtype)
            for layer, shape in zip(model.attention, model.layout.layers, strict=True)
        ]
        self._threads = DaemonPool(READ_THREADS, "cacheblend-reader")
        self._float8 = [layer.float8 for layer in self._paged]  # one that cannot be read is found here
        serve(model.device, model.layout.dtype, model.head_shapes, float8=any(self._float8))
        where = model.device, model.layout.dtype
        self._pages = open_pages(self._paged, model.head_shapes, *where, ranks, in_pages)

    def close(self) -> None:
        """Ends the threads that read; waits for none of them."""
        self._threads.close()

    def blend(self, job: BlendJob) -> BlendedPrefill:
        """A prefill that writes to the job's blocks of the paged cache."""
        rows = RequestRows(job, self._groups, self._block_size, self._model.device)
        # Held rows that cannot be read any more are computed again here, and not written.
        plan = job.plan.with_resident(job.local_tokens) if rows.is_held else job.plan
        ends = self._sentence_end_ids() if job.selector.question_rows else None

        def copy_to_pages(layer: int, kv: LayerCache) -> None:
            own = rows.of(layer)
            if self._is_in_place(own):
                return
            first = own.blocks.first
            self._paged[layer].write(kv.keys[:, first:], kv.values[:, first:], own.blocks.slots[first:])

        options = replace(self._options, sentence_end_ids=ends, on_layer=copy_to_pages)
        if self._pages is not None:
            options = replace(options, stays=rows.is_whole)
            return self._open(job, plan, self._store, job.selector, options, caches=self._caches_of(rows, plan))
        if self._builders is not None:
            options = replace(options, attention=self._attention_of(rows, self._builders))
        held = partial(self._held, rows, job.local_tokens)
        return self._open(job, plan, self._store, job.selector, options, resident=held)

    def _is_in_place(self, rows: GroupRows) -> bool:
        """Whether the layers of a group are written to the paged cache as they are computed."""
        return rows.is_whole and (self._pages is not None or self._builders is not None)

    def _held(self, rows: RequestRows, stop: int, layer: int) -> torch.Tensor:
        return rows.of(layer).read(self._paged[layer], stop)

    def _caches_of(self, rows: RequestRows, plan: BlendPlan) -> Callable[[int], LayerCache]:
        """Each layer's place: the request's blocks, or buffers where they do not hold all that is seen."""
        pages, layout = self._pages, self._model.layout
        assert pages is not None

        def cache_of(layer: int) -> LayerCache:
            own, shape = rows.of(layer), layout.layers[layer]
            if own.is_whole:
                return PagedKV(self._paged[layer], pages[layer], own.blocks)
            size = (shape.kv_heads, len(plan), shape.head_dim)
            kv = LayerKV(*(torch.zeros(size, dtype=layout.dtype, device=self._model.device) for _ in range(2)))
            if rows.is_held:
                LayerLoader.put_resident(kv, own.read(self._paged[layer], rows.held_tokens))
            return kv

        return cache_of

    def _attention_of(self, rows: RequestRows, builders: Sequence[Any]) -> RowAttention:
        """By the backend's kernel, in the groups whose blocks hold all that is seen."""
        found = [
            PagedAttention(self._paged, builder, own.blocks) if own.is_whole and builder is not None else None
            for own, builder in zip(rows.groups, builders, strict=True)
        ]

        def attend(
            layer: int, query: torch.Tensor, kv: LayerCache, positions: torch.Tensor, spec: AttentionSpec
        ) -> torch.Tensor:
            own = found[self._groups.of_layer[layer]]
            return kv.attend(query, positions, spec) if own is None else own(layer, query, kv, positions, spec)

        return attend

    def capture(self, job: CaptureJob, kv: list[LayerKV]) -> BlendedPrefill:
        """A prefill of a chunk behind its anchor alone, which appends each layer to `kv`."""
        prompt = Prompt.of([text(part) for part in (*job.chunk.anchor, job.chunk.token_ids)])
        plan = job.planner.plan(prompt, EmptySource())
        options = replace(self._options, on_layer=lambda layer, found: kv.append(LayerKV(found.keys, found.values)))
        return self._open(job, plan, EmptySource(), NoRows(), options)

    def full(self, job: CheckJob, planner: Planner) -> BlendedPrefill:
        """A prefill of a prompt and its answer in full, for the logits of the answer's rows; it leaves no KV."""
        prompt = Prompt.of([text(job.prompt_ids), text(job.token_ids[:-1])])
        options = replace(self._options, on_layer=_nothing, last_rows=len(job.token_ids))
        plan = planner.plan(prompt, EmptySource())
        return self._open(job, plan, EmptySource(), NoRows(), options, self._check_runner)

    def read_answer(self, job: CheckJob) -> torch.Tensor:
        """[n, vocab] logits that an answer's tokens were drawn from: its rows over the prompt's KV in the paged cache.

        The rows' own KV is computed again, since blocks behind the prompt are not named. Empty on ranks that do not
        sample.
        """
        first, model = len(job.prompt_ids) - 1, self._model
        ids = torch.tensor([int(job.prompt_ids[-1]), *job.token_ids[:-1]]).to(model.device)
        rows = torch.arange(len(ids), device=model.device)
        tables = [torch.tensor(table).to(model.device) for table in job.block_ids]
        positions = rows + first
        runner = self._check_runner(self._model_of(job), ids, positions)
        hidden = runner.embed()
        for layer, paged in enumerate(self._paged):
            held = paged.read(tables[self._groups.of_layer[layer]], first)
            hidden = runner.run(layer, hidden, rows, _behind(held, positions))
        return runner.logits(hidden)

    def _check_runner(self, model: DecoderModel, token_ids: torch.Tensor, positions: torch.Tensor) -> CheckRunner:
        return CheckRunner(model, token_ids, positions, self._float8)

    def _model_of(self, job: BlendJob | CaptureJob | CheckJob) -> DecoderModel:
        return self._adapted.of() if job.adapter is None else self._adapted.of(job.adapter.number)

    def _open(
        self,
        job: BlendJob | CaptureJob | CheckJob,
        plan: BlendPlan,
        source: BlockSource,
        selector: Selector,
        options: PrefillOptions,
        make_runner: Callable[[DecoderModel, torch.Tensor, torch.Tensor], VllmLayerRunner] = VllmLayerRunner,
        **where: Any,
    ) -> BlendedPrefill:
        """`where`: the loader's `resident` or `caches`."""
        model, adapted = self._model, self._model_of(job)

        def open_runner(plan: BlendPlan) -> VllmLayerRunner:
            ids = torch.from_numpy(plan.prompt.token_ids.astype("i8"))[plan.prefix_length :]
            positions = torch.arange(plan.prefix_length, len(plan))
            return make_runner(adapted, ids.to(model.device), positions.to(model.device))

        def open_loader(plan: BlendPlan, first_reused_layer: int) -> LayerLoader:
            what: Sequence[Any] = (plan, source, model.layout, model.rotations)
            how: dict[str, Any] = {
                "first_reused_layer": first_reused_layer,
                "device": model.device,
                "read_ahead": READ_AHEAD,
                "heads": model.heads,
                "codec": self._codec,
                **where,
                "threads": self._threads,
                "ahead_bytes": READ_AHEAD_BYTES,
            }
            return LayerLoader(*what, **how) if self._ranks.size == 1 else AgreedLoader(self._ranks, *what, **how)

        return BlendedPrefill(plan, open_runner, open_loader, selector, options)


def _behind(held: torch.Tensor, positions: torch.Tensor) -> Attend:
    """Attention of rows at these positions over a record [kv_heads, 2, n, head_dim] and, behind it, their own KV."""

    def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        keys, values = torch.cat([held[:, 0], keys], dim=1), torch.cat([held[:, 1], values], dim=1)
        return attend_rows(query, keys, values, positions, spec)

    return attend


def no_sentence_ends() -> None:
    """None: nobody knows where a sentence ends."""


def _nothing(layer: int, kv: LayerCache) -> None:
    """Does nothing: the layer is in the paged cache already."""
