"""Observes a pass over a prompt: its KV, the rows that it computes, and their attention.

Slow, for figures only: attention weights are computed explicitly, for one layer and a few rows at a time. The model's
own layers run, so scaling, soft-cap, sinks and windows are those of the model.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from cacheblend.core.fuse.runner import Attend
from cacheblend.core.kernels.attention import AttentionSpec, attention_weights
from cacheblend.core.kernels.latent import attended
from cacheblend.core.load.loader import LayerKV
from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.selectors import Recorded, Selector
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.layers import HfLayerRunner
from cacheblend.evaluation.compute import ComputeScale


@dataclass(frozen=True)
class Part:
    """Rows that are aggregated in tables and figures.

    Attributes:
        label: a name for people: ``"chunk 2: title"``, ``"front"``, ``"between"``, ``"question"``.
        is_chunk: whether the part is a chunk; otherwise it is plain text.
        runs: half-open intervals of positions; only ``between`` has several.
    """

    label: str
    is_chunk: bool
    runs: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.runs)


def parts_of(prompt: Prompt) -> list[Part]:
    """The parts of the prompt that are not empty; all text between chunks is one part."""
    stops = list(accumulate(len(segment) for segment in prompt.segments))
    chunks = [i for i, segment in enumerate(prompt.segments) if segment.is_chunk]
    first, last = (chunks[0], chunks[-1]) if chunks else (len(stops), len(stops))
    front, between, question = (list[tuple[int, int]]() for _ in range(3))
    of_chunks: list[Part] = []
    for index, segment in enumerate(prompt.segments):
        run = (stops[index] - len(segment), stops[index])
        if segment.is_chunk:
            title = f": {segment.label}" if segment.label else ""
            of_chunks.append(Part(f"chunk {len(of_chunks) + 1}{title}", True, (run,)))
        else:
            (front if index < first else between if index < last else question).append(run)
    texts = [Part(label, False, tuple(runs)) for label, runs in (("between", between), ("question", question)) if runs]
    first_token = list[Part]()  # a separate one (BOS) is a part of its own: it receives far more attention than others
    if len(front) > 1 and front[0] == (0, 1):
        first_token, front = [Part("first token", False, (front[0],))], front[1:]
    return [*first_token, *([Part("front", False, tuple(front))] if front else []), *of_chunks, *texts]


def part_of_row(parts: list[Part], length: int) -> npt.NDArray[np.int64]:
    """[length] index of the part of each row; -1 outside of all parts."""
    part = np.full(length, -1, dtype=np.int64)
    for index, found in enumerate(parts):
        for start, stop in found.runs:
            part[start:stop] = index
    return part


def context_length(prompt: Prompt) -> int:
    """Number of rows preceding the question; at least one row follows them."""
    stops = list(accumulate(len(segment) for segment in prompt.segments))
    chunk_stops = [stop for stop, segment in zip(stops, prompt.segments, strict=True) if segment.is_chunk]
    return min(max(chunk_stops, default=0), len(prompt) - 1)


SCORES_AT_ONCE = 1 << 24  # over all heads: 64 MB in fp32
LAST_ROWS = 16  # most rows of the question whose attention is kept per layer


@dataclass
class Observation:
    """One observed pass. Memory: a KV cache of the prompt, and heads x LAST_ROWS x tokens floats per layer.

    Attributes:
        plan: the executed plan.
        logits: [vocab] at the last position.
        kv: KV cache of all layers after the pass, each [kv_heads, tokens, head_dim].
        computed: [layers, tokens] whether the row was computed in that layer; the KV of other rows was loaded.
        mass: [layers, tokens, parts] fp32: share of a row's attention on each part (see `parts_of`), mean over heads.
            A row sums to 1 minus the share of sinks; NaN if the row was not computed.
        forward: for each layer, attention of the last rows of the question to everything preceding the question,
            [heads, rows, context] fp32 on the CPU.
        compute: compute of the pass itself as a share of a full prefill, see `ComputeScale`.
    """

    plan: BlendPlan
    logits: torch.Tensor
    kv: list[LayerKV]
    computed: npt.NDArray[np.bool_]
    mass: npt.NDArray[np.float32]
    forward: list[torch.Tensor]
    compute: float


@torch.no_grad()
def observe_full(engine: BlendEngine, prompt: Prompt) -> Observation:
    """Observes full recompute: nothing is loaded, every row is computed in every layer."""
    plan = engine.runtime.planner.plan(prompt, engine.store).without("all")
    computed = np.ones((_layers(engine), len(plan)), dtype=np.bool_)
    return _observe(engine, plan, computed, None, 1.0)


@torch.no_grad()
def observe_fused(engine: BlendEngine, prompt: Prompt, selector: Selector) -> Observation:
    """Runs the engine's fused prefill, then observes a second pass over its KV with the same rows."""
    recorder = Recorded(selector)
    result = engine.prefill(prompt, selector=recorder)
    computed = np.zeros((_layers(engine), len(result.plan)), dtype=np.bool_)
    computed[:, result.plan.prefix_length :] = True
    selections = zip(recorder.asked, recorder.keeps, strict=True)
    dropped = {asked.layer or 0: asked.positions[~keep].cpu().numpy() for asked, keep in selections}
    for layer, positions in dropped.items():  # after a restart there may be fewer candidates
        computed[layer:, np.intersect1d(positions, result.plan.candidate_rows)] = False
    compute = ComputeScale.of(engine).share(result.report.row_layers, result.report.projected_rows, len(result.plan))
    return _observe(engine, result.plan, computed, result.kv, compute)


@torch.no_grad()
def alone_mass(engine: BlendEngine, plan: BlendPlan) -> npt.NDArray[np.float32]:
    """Attention of loaded rows when their chunk was computed alone after its anchor.

    Returns:
        [layers, tokens, parts] as `Observation.mass`; NaN for rows that are not loaded. Attention to the anchor counts
        for no part if the prompt does not begin with it.
    """
    parts = parts_of(plan.prompt)
    part = part_of_row(parts, len(plan))
    mass = np.full((_layers(engine), len(plan), len(parts)), np.nan, dtype=np.float32)
    anchor = len(plan.anchor_ids)
    in_prompt = np.array_equal(plan.prompt.token_ids[:anchor], plan.anchor_ids)
    loaded = {span.segment for span in plan.spans if span.source is Source.LOADED}
    for segment in loaded:
        ids = np.concatenate([plan.anchor_ids, plan.prompt.segments[segment].token_ids])
        start = next(span.start for span in plan.spans if span.segment == segment)
        stop = start + len(ids) - anchor
        columns = np.concatenate([part[:anchor] if in_prompt else np.full(anchor, -1), part[start:stop]])
        observer = _Observer(_layers(engine), columns, len(parts), first_last_row=len(ids), context=0)
        _run(engine, ids, 0, observer, np.ones((_layers(engine), len(ids)), dtype=np.bool_))
        mass[:, start:stop] = observer.mass[:, anchor:]
    return mass


class _Observer:
    """Computes the attention of each layer and records its weights."""

    def __init__(
        self, layers: int, part: npt.NDArray[np.int64], parts: int, *, first_last_row: int, context: int
    ) -> None:
        self.kv: list[LayerKV] = []
        self.mass = np.full((layers, len(part), parts), np.nan, dtype=np.float32)
        self.forward: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        self._first_last_row, self._context = first_last_row, context
        members = torch.zeros(len(part), parts)
        inside = np.flatnonzero(part >= 0)
        members[inside, part[inside]] = 1
        self._members = members

    def attend(self, layer: int, positions: torch.Tensor) -> Attend:
        """Attention for rows at these positions: writes their KV, attends, records."""

        def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
            kv = self._buffers(layer, keys, values)
            kv.write(positions, keys, values)
            seen = int(positions[-1]) + 1
            step = max(1, SCORES_AT_ONCE // (len(query) * seen))
            fused = LayerKV(*attended(kv.keys[:, :seen].float(), kv.values[:, :seen].float(), spec))
            slices = [slice(start, start + step) for start in range(0, len(positions), step)]
            outputs = [self._attend(layer, query[:, part], fused, positions[part], spec) for part in slices]
            return torch.cat(outputs).to(query.dtype)

        return attend

    def _attend(
        self, layer: int, query: torch.Tensor, kv: LayerKV, positions: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        everything = torch.arange(kv.keys.shape[1], device=positions.device)
        weights = attention_weights(query, kv.keys, positions, everything, spec)
        heads, rows, seen = weights.shape
        at = positions.cpu()
        self.mass[layer, at.numpy()] = (weights.mean(dim=0).cpu() @ self._members[:seen]).numpy()
        last = at >= self._first_last_row
        if last.any():
            self.forward[layer].append(weights[:, last.to(weights.device), : self._context].cpu())
        out = weights.reshape(len(kv.values), -1, rows, seen) @ kv.values[:, None]
        return out.reshape(heads, rows, -1).transpose(0, 1)

    def _buffers(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> LayerKV:
        if layer == len(self.kv):  # nothing is loaded
            length = len(self._members)
            self.kv.append(LayerKV(*(part.new_zeros(part.shape[0], length, part.shape[2]) for part in (keys, values))))
        return self.kv[layer]


def _observe(
    engine: BlendEngine,
    plan: BlendPlan,
    computed: npt.NDArray[np.bool_],
    kv: list[LayerKV] | None,
    compute: float,
) -> Observation:
    parts = parts_of(plan.prompt)
    context = context_length(plan.prompt)
    first_last_row = max(context, len(plan) - LAST_ROWS)
    part = part_of_row(parts, len(plan))
    observer = _Observer(len(computed), part, len(parts), first_last_row=first_last_row, context=context)
    observer.kv = [] if kv is None else kv
    first = plan.prefix_length
    logits = _run(engine, plan.prompt.token_ids, first, observer, computed)
    forward = [torch.cat(rows, dim=1) for rows in observer.forward]
    return Observation(plan, logits, observer.kv, computed, observer.mass, forward, compute)


def _run(
    engine: BlendEngine,
    token_ids: npt.NDArray[np.uint32],
    first: int,
    observer: _Observer,
    computed: npt.NDArray[np.bool_],
) -> torch.Tensor:
    """Runs all layers over the rows from position `first` on that `computed` [layers, tokens] marks; last logits."""
    engine.runtime.survey.kinds.check_none("looking into a pass")
    ids = torch.from_numpy(token_ids.astype("i8")[first:]).to(engine.model.device)
    runner = HfLayerRunner(engine.runtime.view, ids, torch.arange(first, len(token_ids), device=ids.device))
    hidden = runner.embed()
    for layer in range(runner.num_layers):
        active = torch.from_numpy(np.flatnonzero(computed[layer, first:])).to(ids.device)
        for start in range(0, len(active), engine.config.tile_rows):
            rows = active[start : start + engine.config.tile_rows]
            hidden[rows] = runner.run(layer, hidden[rows], rows, observer.attend(layer, rows + first))
    return runner.logits(hidden[-1:])


def _layers(engine: BlendEngine) -> int:
    return engine.runtime.survey.num_layers
