"""Opens the prefill of a worker's job: which rows it runs, what it loads, where its KV goes. Opening reads
neither the store nor the paged cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cacheblend.core.errors import BlockLostError
from cacheblend.core.fuse.prefill import BlendedPrefill, PrefillOptions
from cacheblend.core.kernels.attention import AttentionSpec
from cacheblend.core.kernels.operations import attend_rows, serve
from cacheblend.core.kernels.upload import upload_together
from cacheblend.core.load.layer_kv import LayerCache, LayerKV
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.load.threads import DaemonPool
from cacheblend.core.plan.blocks import BlockSource, EmptySource
from cacheblend.core.plan.plan import RESIDENT, BlendPlan
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.core.select.selectors import NoRows, Selector
from cacheblend.engines.vllm.internals.attention_shim import NO_ADAPTER
from cacheblend.engines.vllm.jobs import BlendJob, CaptureJob, CheckJob
from cacheblend.engines.vllm.worker.layers import CheckRunner, VllmLayerRunner
from cacheblend.engines.vllm.worker.model import BlendModel
from cacheblend.engines.vllm.worker.paged_cache import LayerGroups, PagedLayer, RequestRows
from cacheblend.engines.vllm.worker.paged_kv import PagedAttention, PagedKV, open_pages
from cacheblend.engines.vllm.worker.ranks import FINE, LOST, Ranks
from cacheblend.engines.vllm.workspace import READ_AHEAD, READ_AHEAD_BYTES
from cacheblend.store import KVStore

READ_THREADS = 16  # a prompt reads in one; when all hang in the store, further prompts wait, and fall back


class AgreedLoader(LayerLoader):
    """A loader that gives a layer on all ranks or on none: a rank that continued alone would wait for the others."""

    def __init__(self, ranks: Ranks, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ranks = ranks

    def layer(self, index: int) -> LayerCache:
        """See `LayerLoader.layer`; where one rank lost a block, every rank loses all of them. Raises RankFailedError:
        another rank failed."""
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


class Opener:
    """Opens prefills for one rank. `planner`: any tenant's; `groups`: of the model's KV cache; `builders`: of attention
    metadata for the backend's own kernel (`PagedAttention`), for each group, None: attend by `core.kernels`;
    `sentence_end_ids` is asked when a selector needs them (`PrefillOptions`)."""

    def __init__(
        self,
        model: BlendModel,
        store: KVStore,
        planner: Planner,
        ranks: Ranks,
        groups: LayerGroups,
        *,
        block_size: int,
        tile_rows: int,
        builders: Sequence[Any] | None = None,
        in_pages: bool | None = None,
        sentence_end_ids: Callable[[], npt.NDArray[np.int64] | None] = lambda: None,
    ) -> None:
        self.model, self.store, self.ranks, self.block_size, self.tile_rows = model, store, ranks, block_size, tile_rows
        self._planner, self._groups, self._builders = planner, groups, builders
        self._sentence_end_ids = sentence_end_ids
        self._options = PrefillOptions(tile_rows=tile_rows, over_ranks=ranks.combine if ranks.size > 1 else None)
        self._paged = [
            PagedLayer(layer, shape.kv_heads, shape.head_dim, block_size, model.layout.dtype)
            for layer, shape in zip(model.attention, model.layout.layers, strict=True)
        ]
        self._threads = DaemonPool(READ_THREADS, "cacheblend-reader")
        self._float8 = [layer.float8 for layer in self._paged]  # one that cannot be read is found here
        where, layers = (model.device, model.layout.dtype), zip(model.head_shapes, model.rotations, strict=True)
        serve(*where, layers, page=block_size, float8=any(self._float8))
        self._pages = open_pages(self._paged, model.head_shapes, *where, ranks, in_pages)

    def close(self) -> None:
        self._threads.close()

    def blend(self, job: BlendJob) -> BlendedPrefill:
        device, layout, pages = self.model.device, self.model.layout, self._pages
        rows = RequestRows(job, self._groups, self.block_size, device)
        # Held rows that cannot be read any more are computed again here, and not written.
        plan = job.plan.with_resident(job.local_tokens) if rows.is_held else job.plan
        ends = self._sentence_end_ids() if job.selector.question_rows else None

        def held(layer: int) -> torch.Tensor:
            return rows.of(layer).read(self._paged[layer], job.local_tokens)

        def copy_to_pages(layer: int, kv: LayerCache) -> None:
            own = rows.of(layer)
            if own.is_whole and (pages is not None or self._builders is not None):
                return  # its layers are written there as they are computed
            first = own.blocks.first
            self._paged[layer].write(kv.keys[:, first:], kv.values[:, first:], own.blocks.slots[first:])

        options = replace(self._options, sentence_end_ids=ends, on_layer=copy_to_pages)
        if pages is not None:

            def cache_of(layer: int) -> LayerCache:
                """The request's blocks, or buffers where they do not hold all that is seen."""
                own = rows.of(layer)
                if own.is_whole:
                    return PagedKV(self._paged[layer], pages[layer], own.blocks)
                kv = LayerKV.unwritten(layout.layers[layer], len(plan), layout.dtype, device)
                if rows.is_held:
                    LayerLoader.put_resident(kv, held(layer))
                return kv

            options = replace(options, stays=rows.is_whole)
            return self._open(job, plan, self.store, job.selector, options, caches=cache_of)
        if self._builders is not None:
            kernels = [  # in the groups whose blocks hold all that is seen
                PagedAttention(self._paged, builder, own.blocks) if own.is_whole and builder is not None else None
                for own, builder in zip(rows.groups, self._builders, strict=True)
            ]

            def attend(
                layer: int, query: torch.Tensor, kv: LayerCache, positions: torch.Tensor, spec: AttentionSpec
            ) -> torch.Tensor:
                own = kernels[self._groups.of_layer[layer]]
                return kv.attend(query, positions, spec) if own is None else own(layer, query, kv, positions, spec)

            options = replace(options, attention=attend)
        return self._open(job, plan, self.store, job.selector, options, resident=held)

    def capture(self, job: CaptureJob, kv: list[LayerKV]) -> BlendedPrefill:
        """A prefill of a chunk behind its anchor alone, or of text behind what the store holds of it, which gives `kv`
        each layer; of text without the rows that are loaded."""
        if job.exact is not None:
            first = job.exact.prefix_length

            def keep(layer: int, found: LayerCache) -> None:
                kv[layer:] = [LayerKV(found.keys[:, first:].clone(), found.values[:, first:].clone())]  # may restart

            return self._open(job, job.exact, self.store, NoRows(), replace(self._options, on_layer=keep))
        prompt = Prompt.of([text(part) for part in (*job.chunk.anchor, job.chunk.token_ids)])
        plan = job.planner.plan(prompt, EmptySource())
        options = replace(self._options, on_layer=lambda layer, found: kv.append(LayerKV(found.keys, found.values)))
        return self._open(job, plan, EmptySource(), NoRows(), options)

    def read_pages(self, job: CaptureJob) -> list[LayerKV]:
        """The rows of a text that are copied from the paged cache."""
        assert job.exact is not None and job.pages is not None
        first = job.exact.prefix_length
        skipped = first % self.block_size  # in the first block
        tables = upload_together([np.array(table) for table in job.pages], self.model.device)
        found = []
        for layer, paged in enumerate(self._paged):
            rows = paged.read(tables[self._groups.of_layer[layer]], len(job.exact) - first + skipped)
            found.append(LayerKV(*(part.contiguous() for part in rows[:, :, skipped:].unbind(1))))
        return found

    def full(self, job: CheckJob) -> BlendedPrefill:
        """A prefill of a prompt and its answer in full, for the logits of the answer's rows; it leaves no KV."""
        prompt = Prompt.of([text(job.prompt_ids), text(job.token_ids[:-1])])
        options = replace(self._options, on_layer=lambda layer, kv: None, last_rows=len(job.token_ids))
        plan = self._planner.plan(prompt, EmptySource())
        return self._open(job, plan, EmptySource(), NoRows(), options, partial(CheckRunner, float8=self._float8))

    def read_answer(self, job: CheckJob) -> torch.Tensor:
        """[n, vocab] logits that an answer's tokens were drawn from: its rows over the prompt's KV in the paged cache.
        The rows' own KV is computed again, since blocks behind the prompt are not named. Empty on ranks that do not
        sample."""
        first, model = len(job.prompt_ids) - 1, self.model
        asked = np.array([job.prompt_ids[-1], *job.token_ids[:-1]])
        ids, *tables = upload_together([asked, *map(np.array, job.block_ids)], model.device)
        rows = torch.arange(len(ids), device=model.device)
        positions = rows + first
        adapter = NO_ADAPTER if job.adapter is None else job.adapter.number
        runner = CheckRunner(model, ids, positions, adapter=adapter, float8=self._float8)

        def behind(
            held: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec
        ) -> torch.Tensor:
            """Attention over a record [kv_heads, 2, n, head_dim] and, behind it, the rows' own KV."""
            keys, values = torch.cat([held[:, 0], keys], dim=1), torch.cat([held[:, 1], values], dim=1)
            return attend_rows(query, keys, values, positions, spec)

        hidden = runner.embed()
        for layer, paged in enumerate(self._paged):
            held = paged.read(tables[self._groups.of_layer[layer]], first)
            hidden = runner.run(layer, hidden, rows, partial(behind, held))
        return runner.logits(hidden)

    def _open(
        self,
        job: BlendJob | CaptureJob | CheckJob,
        plan: BlendPlan,
        source: BlockSource,
        selector: Selector,
        options: PrefillOptions,
        make_runner: Callable[..., VllmLayerRunner] = VllmLayerRunner,
        **where: Any,
    ) -> BlendedPrefill:
        """`where`: the loader's `resident` or `caches`."""
        model, adapter = self.model, NO_ADAPTER if job.adapter is None else job.adapter.number

        def open_runner(plan: BlendPlan) -> VllmLayerRunner:
            arrays = plan.prompt.token_ids[plan.prefix_length :], np.arange(plan.prefix_length, len(plan))
            return make_runner(model, *upload_together(arrays, model.device), adapter=adapter)

        def open_loader(plan: BlendPlan, first_reused_layer: int) -> LayerLoader:
            what: Sequence[Any] = (plan, source, model.layout, model.rotations)
            how: dict[str, Any] = {
                "first_reused_layer": first_reused_layer,
                "device": model.device,
                "read_ahead": READ_AHEAD,
                "heads": model.heads,
                "codec": self._planner.codec,
                **where,
                "threads": self._threads,
                "ahead_bytes": READ_AHEAD_BYTES,
            }
            return LayerLoader(*what, **how) if self.ranks.size == 1 else AgreedLoader(self.ranks, *what, **how)

        return BlendedPrefill(plan, open_runner, open_loader, selector, options)
