"""The slow, obvious reference of a blended prefill, using only transformers.

Everything here follows the definition, not the implementation:

- a chunk's stored KV: the KV that the model's own forward computes for anchor + chunk;
- re-positioned keys: the keys of the same forward with shifted `position_ids`, so that the model itself rotates them;
- the blended pass: the model's own forward over ALL rows in every layer; the attention function replaces K and V of
  the rows that are not recomputed by the stored ones and attends densely under transformers' own mask. The output of
  a dropped row has no effect: its K and V are replaced in every later layer;
- the question's attention: the same forward with all stored rows replaced, and rows masked that are neither stored
  nor the question's; the attention weights of the question's rows are recorded;
- a hop: the rare words of the best spans are looked for in front of the question.

Only the fields of a selector are read; the rows are chosen by the code here. The one exception are the random numbers
of `RandomRows`, which come from the package. What was computed of a model that tests share is kept.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask

from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.question_selectors import SPAN_WITHOUT_SENTENCES, Hybrid, Pool, Query
from cacheblend.core.select.selectors import (
    AllRows,
    Candidates,
    Corrected,
    Head,
    Hkvd,
    NoRows,
    RandomRows,
    Selector,
    Threshold,
)
from families import SHARED

ATTENTION = "reference_blend"
KV = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, each [kv_heads, rows, head_dim]."""


@dataclass(frozen=True)
class Rounding:
    """What a cache makes of keys and values: of rows just computed, of stored ones, and of both where they are
    compared."""

    fresh: Callable[[torch.Tensor], torch.Tensor] = lambda numbers: numbers
    stored: Callable[[torch.Tensor], torch.Tensor] = lambda numbers: numbers
    compared: Callable[[torch.Tensor], torch.Tensor] = lambda numbers: numbers


@dataclass
class Reference:
    """The result of the reference.

    Attributes:
        kv: fused KV, one entry per layer.
        candidates: positions that a selector may drop.
        recomputed: those that were computed in the last layer.
        deviations: check layer -> position -> squared deviation.
        attention: candidate -> how much more the question attends to it than a generic row; if the selector needs it.
        question: positions of the question's rows.
        hops: for each hop the spans that it followed.
    """

    logits: torch.Tensor
    kv: list[KV]
    candidates: list[int]
    recomputed: list[int]
    deviations: dict[int, dict[int, float]] = field(default_factory=dict)
    attention: dict[int, float] = field(default_factory=dict)
    question: list[int] = field(default_factory=list)
    hops: list[list[int]] = field(default_factory=list)


def plain_kv(model: torch.nn.Module, ids: Sequence[int], shift: int = 0) -> tuple[torch.Tensor, list[KV]]:
    """The model's own forward of `ids` at positions shift, shift + 1, ..: last logits, and attention layers' KV."""
    forward = _kept_forward if id(model) in SHARED else _own_forward
    return forward(model, tuple(int(i) for i in ids), shift)


@torch.no_grad()
def _own_forward(model: torch.nn.Module, ids: tuple[int, ...], shift: int) -> tuple[torch.Tensor, list[KV]]:
    cache = _FusingCache(model)
    device = model.device
    tokens = torch.tensor([ids], device=device)
    positions = torch.arange(tokens.shape[1], device=device)[None] + shift
    out = model(input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True)
    kept = {i: (layer.keys[0], layer.values[0]) for i, layer in enumerate(cache.layers) if hasattr(layer, "keys")}
    return out.logits[0, -1], [_halves(*each) if index in cache.latent else each for index, each in kept.items()]


_kept_forward = lru_cache(1000)(_own_forward)


def blend(
    model: torch.nn.Module,
    prompt: Prompt,
    selector: Selector,
    *,
    anchor: Sequence[int] = (),
    missing: Iterable[int] = (),
    sentence_ends: Iterable[int] | None = None,
    rounding: Rounding | None = None,
) -> Reference:
    """Computes a blended prefill by definition.

    Args:
        prompt: all its chunks are stored, except for the positions in `missing`.
        anchor: tokens in front of each chunk when its KV was computed.
        sentence_ends: ids of tokens that end a sentence; None if unknown.
        rounding: of the cache; None: it keeps numbers as they are.
    """
    segments = tuple((segment.is_chunk, segment.token_ids.tobytes()) for segment in prompt.segments)
    ends = None if sentence_ends is None else frozenset(sentence_ends)
    given = tuple(anchor), frozenset(missing), ends, rounding
    if id(model) not in SHARED:
        return _blend(model, prompt, selector, *given)
    key = id(model), segments, selector, *given
    if key not in _KNOWN:
        _KNOWN[key] = _blend(model, prompt, selector, *given)
    return _KNOWN[key]


_KNOWN: dict[Any, Reference] = {}


def _blend(
    model: torch.nn.Module,
    prompt: Prompt,
    selector: Selector,
    anchor: tuple[int, ...],
    missing: frozenset[int],
    sentence_ends: frozenset[int] | None,
    rounding: Rounding | None,
) -> Reference:
    stored, exact = _stored_rows(model, prompt, anchor, missing)
    last = len(prompt) - 1
    candidates = [p for p in sorted(stored) if p not in exact and p != last]
    attention: dict[int, float] = {}
    question: list[int] = []
    most = max(2, len(prompt) // 20)

    if selector.question_rows and candidates:
        question = _question(prompt, min(selector.question_rows, most))
        seen = set(stored) | set(_anchor_rows(prompt, anchor)) - missing
        asking = _Asking(stored, question, set(range(last + 1)) - seen - set(question))
        _forward(model, prompt, asking)
        attention = {p: asking.received[p] for p in candidates}
    weight = getattr(selector, "words", 0.0)
    wanted = {p: attention[p] + _word_cue(prompt, p, question) * weight for p in attention}
    spans = _spans(prompt, selector, sentence_ends)
    hops = Hops(prompt, spans, candidates, question)
    for _ in range(selector.hops if candidates else 0):
        wanted = hops.follow(wanted, selector.hop_spans, weight)

    run = _Pass(prompt, selector, stored, candidates, wanted, spans, rounding or Rounding())
    logits = _forward(model, prompt, run)
    recomputed = sorted(run.active & set(candidates))
    return Reference(logits, run.kv, candidates, recomputed, run.deviations, attention, question, hops.followed)


def _forward(model: torch.nn.Module, prompt: Prompt, pass_: "_Pass | _Asking") -> torch.Tensor:
    _PASSES.append(pass_)
    try:
        return plain_kv(_with_reference_attention(model), prompt.token_ids)[0]
    finally:
        _PASSES.pop()


def _question(prompt: Prompt, limit: int) -> list[int]:
    """Rows after the last chunk, or else the last row; of a suffix over `limit`, the first and the last rows."""
    suffix, start = [], 0
    for segment in prompt.segments:
        suffix = [] if segment.is_chunk else suffix + list(range(start, start + len(segment)))
        start += len(segment)
    rows = suffix or [start - 1]
    return rows if len(rows) <= limit else [rows[0], *rows[-(limit - 1) :]]


def _word_cue(prompt: Prompt, position: int, question: list[int]) -> float:
    """1 / (occurrences before the question) of a token that the question contains, else 0."""
    ids = prompt.token_ids.tolist()
    front = ids[: question[0]]
    return 1 / front.count(ids[position]) if ids[position] in {ids[q] for q in question} else 0.0


def _anchor_rows(prompt: Prompt, anchor: tuple[int, ...]) -> range:
    """The rows of the anchor at the prompt's start: stored together with the chunks that were computed after it."""
    return range(len(anchor) if tuple(int(i) for i in prompt.token_ids[: len(anchor)]) == anchor else 0)


def _spans(prompt: Prompt, selector: Selector, sentence_ends: Iterable[int] | None) -> list[int]:
    """For each row, the number of the span that it is pooled with."""
    pool: Pool = getattr(selector, "pool", 1)
    if pool == "sentence":
        if sentence_ends is not None:
            return _sentences(prompt, set(sentence_ends))
        pool = SPAN_WITHOUT_SENTENCES
    spans: list[int] = []
    for segment in prompt.segments:
        first = max(spans, default=-1) + 1
        spans += [first + offset // pool for offset in range(len(segment))]
    return spans


def _sentences(prompt: Prompt, ends: set[int]) -> list[int]:
    sentences: list[int] = []
    for segment in prompt.segments:
        sentence = max(sentences, default=-1) + 1
        length, ended = 0, False
        for token in segment.token_ids.tolist():
            if (ended and token not in ends) or length == 64:
                sentence, length = sentence + 1, 0
            sentences.append(sentence)
            length, ended = length + 1, token in ends
    return sentences


def _stored_rows(
    model: torch.nn.Module, prompt: Prompt, anchor: tuple[int, ...], missing: frozenset[int]
) -> tuple[dict[int, list[KV]], set[int]]:
    """Each stored row's re-positioned KV (one entry per layer), and the rows whose stored KV is exact.

    Exact are the rows of the chain at the prompt's start: the anchor and the chunk directly after it, up to the first
    missing row.
    """
    rows: dict[int, list[KV]] = {}
    exact: set[int] = set()
    start = 0
    for segment in prompt.segments:
        stop = start + len(segment)
        if segment.is_chunk:
            kv = _moved_chunk(model, anchor, tuple(int(i) for i in segment.token_ids), start)
            for offset, position in enumerate(range(start, stop)):
                rows[position] = [(k[:, offset], v[:, offset]) for k, v in kv]
            if tuple(int(i) for i in prompt.token_ids[:start]) == anchor:
                whole = next((p for p in range(stop) if p in missing), stop)
                exact |= set(range(start, whole))
        start = stop
    return {p: kv for p, kv in rows.items() if p not in missing}, exact


def _moved_chunk(model: torch.nn.Module, anchor: tuple[int, ...], ids: tuple[int, ...], start: int) -> list[KV]:
    """The chunk's KV with its first token at position `start`, computed there by the model itself."""
    first = len(anchor)
    _, at_home = plain_kv(model, anchor + ids)
    _, moved = plain_kv(model, anchor + ids, shift=start - first)
    for (_, values), (_, moved_values) in zip(at_home, moved, strict=True):
        # Values carry no position: if they differ, moving is not a rotation and the definition does not apply.
        torch.testing.assert_close(moved_values, values, rtol=0, atol=1e-4 * float(values.abs().max()))
    return [(keys[:, first:], values[:, first:]) for (keys, _), (_, values) in zip(moved, at_home, strict=True)]


class Hops:
    """Which spans are followed in turn, and what counts of it: the best ones that were not followed yet."""

    def __init__(self, prompt: Prompt, spans: list[int], candidates: list[int], question: list[int]) -> None:
        self.ids, self.spans, self.candidates = prompt.token_ids.tolist(), spans, candidates
        self.question, self.followed = question, list[list[int]]()

    def follow(self, wanted: dict[int, float], most: int, weight: float) -> dict[int, float]:
        """How much each candidate is wanted after one more hop of at most `most` spans."""
        best: dict[int, float] = {}
        for position in self.candidates:
            best[self.spans[position]] = max(best.get(self.spans[position], 0.0), wanted[position])
        done = {span for hop in self.followed for span in hop}
        open_spans = [span for span in sorted(best) if best[span] > 0 and span not in done]
        chosen = sorted(open_spans, key=lambda span: -best[span])[:most]
        self.followed.append(chosen)
        cues = [self._words(span, weight * min(1.0, best[span])) for span in chosen]
        return {p: max(wanted[p], *(cue.get(p, 0.0) for cue in cues)) if cues else wanted[p] for p in wanted}

    def _words(self, span: int, weight: float) -> dict[int, float]:
        mine = [p for p in self.candidates if self.spans[p] == span]
        others = [p for p in range(self.question[0]) if p not in mine]
        words, ids_of_others = {self.ids[p] for p in mine}, [self.ids[p] for p in others]
        return {p: weight / ids_of_others.count(self.ids[p]) for p in others if self.ids[p] in words}


class _Asking:
    """A pass of the rows that ask, the first generic, over the stored rows; each `hidden` row is visible only to
    itself."""

    def __init__(self, stored: Mapping[int, list[KV]], asking: Sequence[int], hidden: set[int]) -> None:
        self.stored, self.asking, self.hidden = stored, asking, hidden
        self.received: dict[int, float] = dict.fromkeys(stored, 0.0)
        self.layers = 0

    def layer(self, keys: torch.Tensor, values: torch.Tensor) -> KV:
        keys, values = keys.clone(), values.clone()
        for position, layers in self.stored.items():
            if position not in self.asking:
                keys[:, position], values[:, position] = layers[self.layers]
        self.layers += 1
        return keys, values

    def look(self, weights: torch.Tensor) -> None:
        """[heads, rows, keys]."""
        generic, *others = self.asking
        for position in self.received:
            if others:
                more = (weights[:, others, position] - weights[:, generic, position, None]).clamp(min=0)
            else:
                more = weights[:, generic, position]
            self.received[position] = max(self.received[position], float(more.max()))


class _Pass:
    """One blended pass; the attention function calls `layer` for each layer in order."""

    def __init__(
        self,
        prompt: Prompt,
        selector: Selector,
        stored: Mapping[int, list[KV]],
        candidates: list[int],
        attention: Mapping[int, float],
        spans: list[int],
        rounding: Rounding,
    ) -> None:
        self.rounding, self.correction = rounding, selector.correction
        selector = selector.inner if isinstance(selector, Corrected) else selector
        self.selector, self.stored, self.candidates = selector, stored, candidates
        self.attention, self.spans, self.hidden = attention, spans, set[int]()
        self.offset_in_chunk = [offset for segment in prompt.segments for offset in range(len(segment))]
        self.segments = [number for number, segment in enumerate(prompt.segments) for _ in range(len(segment))]
        rows = range(len(prompt))
        exact = {p for p in stored if p not in candidates} - {rows[-1]}
        self.active = set(rows) - exact
        self.kv: list[KV] = []
        self.deviations: dict[int, dict[int, float]] = {}
        if selector.at_start:
            self._keep(self._choose_at_once())

    def layer(self, keys: torch.Tensor, values: torch.Tensor) -> KV:
        """Fused K and V [kv_heads, length, head_dim] of the next layer, given the fresh ones of all rows."""
        index = len(self.kv)
        if index in self.selector.check_layers:
            self.deviations[index] = self._deviation(index, keys, values)
            self._keep(self._choose(index, self.deviations[index]))
        keys, values = self.rounding.fresh(keys.clone()), self.rounding.fresh(values.clone())
        off: dict[int, list[torch.Tensor]] = {}  # by segment, how far the recomputed candidates' keys were off
        for position in set(self.candidates) & self.active:
            off.setdefault(self.segments[position], []).append(keys[:, position] - self.stored[position][index][0])
        for position, layers in self.stored.items():
            if position not in self.active:
                key, values[:, position] = map(self.rounding.stored, layers[index])
                others = off.get(self.segments[position]) if position in self.candidates else None
                keys[:, position] = key + self.correction * torch.stack(others).mean(0) if others else key
        self.kv.append((keys, values))
        return keys, values

    def look(self, weights: torch.Tensor) -> None:
        pass

    def _keep(self, chosen: set[int]) -> None:
        self.active -= set(self.candidates) - chosen

    def _deviation(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> dict[int, float]:
        deviation, compared = dict[int, float](), self.rounding.compared
        for position in sorted(self.active & set(self.candidates)):
            loaded_key, loaded_value = self.stored[position][layer]
            of_key = (compared(keys[:, position]).float() - compared(loaded_key).float()).pow(2).sum()
            of_value = (compared(values[:, position]).float() - compared(loaded_value).float()).pow(2).sum()
            parts = {"kv": of_key + of_value, "k": of_key, "v": of_value}
            deviation[position] = float(parts[self.selector.measure])
        return deviation

    def _choose(self, layer: int, deviation: dict[int, float]) -> set[int]:
        match self.selector:
            case Threshold():
                return {position for position in deviation if deviation[position] > self.selector.bound}
            case Hkvd() | Hybrid():
                ratio = dict(zip(self.selector.check_layers, self.selector.ratios, strict=True))[layer]
                ranked = sorted(deviation, key=lambda position: -deviation[position])
                if getattr(self.selector, "rank", "") == "either":  # alternately by deviation and by attention
                    pairs = zip(ranked, self._by_attention(sorted(deviation)), strict=True)
                    ranked = list(dict.fromkeys(position for pair in pairs for position in pair))
                return set(ranked[: round(ratio * len(self.candidates))])
        raise NotImplementedError(self.selector)

    def _by_attention(self, positions: list[int]) -> list[int]:
        """Sorts spans by the attention of their best row, and rows within a span by their own attention."""
        best: dict[int, float] = {}
        for position in positions:
            span = self.spans[position]
            best[span] = max(best.get(span, 0.0), self.attention[position])
        segment_of = dict(zip(self.spans, self.segments, strict=True))
        own = dict(best)
        present = sorted(best)
        for place, span in enumerate(present):
            for later in present[place + 1 : place + 1 + getattr(self.selector, "lead", 0)]:
                if segment_of[later] == segment_of[span]:
                    best[span] = max(best[span], own[later])
        heads = getattr(self.selector, "head_rows", 0)
        most: dict[int, float] = {}
        for position in positions:
            segment = self.segments[position]
            most[segment] = max(most.get(segment, 0.0), self.attention[position])

        def wanted(p: int) -> float:
            own = best[self.spans[p]]
            return max(own, most[self.segments[p]] / 2) if self.offset_in_chunk[p] < heads else own

        return sorted(
            positions,
            key=lambda p: (-wanted(p), -best[self.spans[p]], self.spans[p], -self.attention[p], p),
        )

    def _choose_at_once(self) -> set[int]:
        total = len(self.candidates)
        match self.selector:
            case AllRows():
                return set(self.candidates)
            case NoRows():
                return set()
            case Head():
                recency, chunks = (
                    self.selector.recency,
                    sorted({self.segments[position] for position in self.candidates}),
                )

                def rank(position: int) -> tuple[float, int]:
                    place = (1 + chunks.index(self.segments[position])) / len(chunks)
                    return (self.offset_in_chunk[position] + 1) / (1 - recency + recency * place), position

                return set(sorted(self.candidates, key=rank)[: round(self.selector.ratio * total)])
            case Query():
                return set(self._by_attention(self.candidates)[: round(self.selector.ratio * total)])
            case Hybrid():
                return set(self._by_attention(self.candidates)[: round(self.selector.early * total)])
            case RandomRows():
                positions = torch.tensor(self.candidates, dtype=torch.int64)
                drawn = self.selector.select(Candidates(positions, torch.zeros_like(positions), total))
                return set(positions[drawn].tolist())
        raise NotImplementedError(self.selector)


_PASSES: list[_Pass | _Asking] = []


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Fuse, then attend densely in fp32. [1, heads, rows, head_dim] -> [1, rows, heads, head_dim]."""
    run = _PASSES[-1]
    keys, values = (key[0], value[0]) if hasattr(module, "expand_kv") else run.layer(key[0], value[0])
    repeats = query.shape[1] // keys.shape[0]
    keys, values = (part.float().repeat_interleave(repeats, dim=0) for part in (keys, values))
    scores = query[0].float() @ keys.transpose(1, 2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + attention_mask[0].float()
    for position in run.hidden:  # visible only to itself: a row must see at least one key
        own = scores[:, position, position].clone()
        scores[:, :, position] = float("-inf")
        scores[:, position, position] = own
    if s_aux is not None:
        sinks = s_aux.float().reshape(-1, 1, 1).expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[1]]
    run.look(weights)
    return (weights @ values).transpose(0, 1)[None].to(query.dtype).contiguous(), None


class _FusingCache(DynamicCache):
    """Where a model caches latents, they are fused there: its own forward then expands and attends to what it is given.

    Within `_forward` only; elsewhere it is transformers' own cache.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        kinds = set(getattr(model.config, "layer_types", None) or ())
        is_recurrent = bool(kinds & {"conv", "mamba", "hybrid", "linear_attention"})  # in some layers: it is told which
        super().__init__(config=model.config if is_recurrent else None)
        self.latent = {module.layer_idx for module in model.modules() if hasattr(module, "expand_kv")}

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *rest: object, **named: object) -> KV:
        keys, values = super().update(keys, values, layer, *rest, **named)
        if not _PASSES or layer not in self.latent:
            return keys, values
        fused = torch.cat(_PASSES[-1].layer(*_halves(keys[0], values[0])), dim=-1)[None]
        return fused[..., values.shape[-1] :], fused[..., : values.shape[-1]]


def _halves(latent: torch.Tensor, rotated: torch.Tensor) -> KV:
    """A latent and its rotated key part as the package keeps them: the latter first, cut into keys and values."""
    return torch.cat([rotated, latent], dim=-1).chunk(2, dim=-1)


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, eager_mask)


_COPIES: dict[int, tuple[torch.nn.Module, torch.nn.Module]] = {}


def _with_reference_attention(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model with the attention above; stored with the model, so that its `id` is not reused."""
    if id(model) not in _COPIES:
        twin = copy.deepcopy(model)
        twin.config._attn_implementation = ATTENTION
        _COPIES[id(model)] = (model, twin)
    return _COPIES[id(model)][1]
