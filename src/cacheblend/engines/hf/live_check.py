"""Checks on the loaded model that blending is exact where it must be: two exactness invariants, and re-positioning.
Equal means equal up to rounding. In fp32 the bound is fixed. In half precision it depends on the model: the same prompt
is also computed without blending in two parts, split at two different places. The difference between these results is
the model's own noise; blending may differ from the plain computation by at most a few times that noise."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.core.kernels.rope import reposition_keys, turn_by
from cacheblend.core.load.loader import LayerKV
from cacheblend.core.plan.prompt import Prompt, Segment, chunk, text
from cacheblend.core.select.selectors import AllRows, Hkvd, NoRows, Selector
from cacheblend.engines.hf.engine import BlendEngine
from cacheblend.engines.hf.recurrent import cache_argument, kv_of_cache, whole_cache
from cacheblend.engines.hf.survey import Survey
from cacheblend.store import MemoryStore

TEXT_TOKENS, CHUNK_TOKENS, CHUNKS = 8, 40, 3
LONGEST = 1100  # tokens, limit when a prompt is lengthened to exceed a sliding window
SHIFT = 256  # positions
FULL_PRECISION = (torch.float32, torch.float64)
FULL_BOUND = 1e-4
NOISE_FACTOR, LOWEST_HALF_BOUND, HIGHEST_HALF_BOUND = 5.0, 0.02, 0.25

Outcome = tuple[str, bool, str]  # (what was checked, whether it passed, what was measured)


@dataclass
class Plain:
    """The result of a plain forward: last logits [vocab], and the KV cache of all layers."""

    logits: torch.Tensor
    kv: list[LayerKV]


class LiveCheck:
    """Runs a few small prompts of random ids through a loaded model, with and without blending, and compares."""

    def __init__(self, model: PreTrainedModel, survey: Survey) -> None:
        self._model, self._survey = model, survey
        self._random = torch.Generator().manual_seed(0)
        limits = [n for n in (survey.context_length, survey.length_limit) if n is not None]
        longest = min([LONGEST, *limits])
        windows = [window for window in survey.windows if window is not None and window < longest]
        wanted = max(CHUNKS * CHUNK_TOKENS, min(windows, default=0) + CHUNK_TOKENS)
        self._chunk_tokens = max(2, min(wanted, longest - 2 * TEXT_TOKENS) // CHUNKS)
        self._is_half = survey.layout.dtype not in FULL_PRECISION
        self._prompts = 3 if self._is_half and wanted == CHUNKS * CHUNK_TOKENS else 1
        self._shift = min([SHIFT, *(max(1, n - self._chunk_tokens) for n in limits)])

    def run(self) -> Iterator[Outcome]:
        """Runs each check in turn; stops early if the model cannot be run at all."""
        checks: list[tuple[str, Callable[[], tuple[bool, str]]]] = [
            ("re-positioned keys", self._repositioning),
            ("r = 1 is full prefill", self._everything_recomputed),
            ("lone chunk, r = 0", self._lone_chunk),
        ]
        for title, check in checks:
            try:
                ok, detail = check()
            except ModelNotBlendableError as error:
                yield title, False, " ".join(str(error).split())
                return
            except Exception as error:
                ok, detail = False, f"failed: {' '.join(str(error).split())} ({type(error).__name__})"
            yield title, ok, detail

    @torch.no_grad()
    def _repositioning(self) -> tuple[bool, str]:
        """Compares the re-positioned keys of a chunk with the keys that the model computes at the target position."""
        ids = self._ids(self._chunk_tokens)
        here, there = self._plain(ids), self._plain(ids, first=self._shift)
        moved = []
        for rotation, (keys, values) in zip(self._survey.rotations, here.kv, strict=True):
            if rotation is not None:
                offsets = torch.full((keys.shape[1],), self._shift)
                keys = reposition_keys(keys, turn_by(rotation, offsets, keys.device))
            moved.append(LayerKV(keys, values))
        distance, what = _row_distance(moved, there.kv), f"{len(ids)} tokens moved by {self._shift}"
        return self._judge(distance, self._noise(ids, here), what)

    def _everything_recomputed(self) -> tuple[bool, str]:
        """First exactness invariant, on the fused path: with all rows recomputed, blending equals full prefill."""
        deep = self._survey.num_layers > 1
        selector: Selector = Hkvd(check_layers=(1,), ratios=(1.0,)) if deep else AllRows()
        chunks = [chunk(self._ids(self._chunk_tokens).tolist()) for _ in range(CHUNKS)]
        prompts = [Prompt.of([self._text(), *chunks, self._text()]) for _ in range(self._prompts)]
        kinds = self._survey.kinds
        return self._invariant(chunks, prompts, selector, loads=not kinds.states or len(kinds.blended_layers) > 0)

    def _lone_chunk(self) -> tuple[bool, str]:
        """Second exactness invariant: a chunk directly after its anchor is an exact prefix at any ratio."""
        chunks = [chunk(self._ids(self._chunk_tokens).tolist())]
        prompts = [Prompt.of([*chunks, self._text()]) for _ in range(self._prompts)]
        return self._invariant(chunks, prompts, NoRows(), loads=not self._survey.kinds.stepped)

    @torch.no_grad()
    def _invariant(
        self, chunks: list[Segment], prompts: list[Prompt], selector: Selector, *, loads: bool
    ) -> tuple[bool, str]:
        """Compares blended and plain results of each prompt by their median distance; `loads`: chunks are loaded. The
        median, because rounding alone may send a row of a mixture-of-experts model to another expert."""
        config = BlendConfig(selector="all", capture=False)
        distances, noises = [], []
        with (
            MemoryStore() as store,
            BlendEngine(self._model, store=store, config=config, fingerprint="doctor") as engine,
        ):
            engine.warm(chunks)
            for prompt in prompts:
                ids = torch.from_numpy(prompt.token_ids.astype("i8")).to(self._model.device)
                plain = self._plain(ids)
                noises.append(self._noise(ids, plain))
                blended = engine.prefill(prompt, selector=selector)
                report, kv = blended.report, [blended.kv[layer] for layer in self._survey.kinds.kv_layers]
                if loads and report.loaded_tokens != sum(map(len, chunks)):
                    return False, f"only {report.loaded_tokens} of {sum(map(len, chunks))} stored tokens were loaded"
                distances.append(_distance(Plain(blended.logits, kv), plain))
        return self._judge(statistics.median(distances), statistics.median(noises), f"{len(prompts[0])} tokens")

    def _judge(self, distance: float, noise: float, what: str) -> tuple[bool, str]:
        allowed = FULL_BOUND
        if self._is_half:
            allowed = min(max(LOWEST_HALF_BOUND, NOISE_FACTOR * noise), HIGHEST_HALF_BOUND)
        return distance <= allowed, f"off by {distance:.1e} (allowed {allowed:.1e}), {what}"

    def _plain(self, ids: torch.Tensor, *, first: int = 0, split: int | None = None) -> Plain:
        """transformers' own forward of `ids` [n] at positions from `first` on; in two calls if `split` is given."""
        cache = whole_cache(self._model, self._survey.kinds)  # all tokens, so that all can be compared
        parts = [(0, len(ids))] if split is None else [(0, split), (split, len(ids))]
        for start, stop in parts:
            positions = torch.arange(first + start, first + stop, device=ids.device)[None]
            try:
                named = cache_argument(self._model, cache)
                out = self._model(input_ids=ids[None, start:stop], position_ids=positions, use_cache=True, **named)
            except Exception as error:
                raise ModelNotBlendableError(
                    f"{type(self._model).__name__} cannot be run with a cache of only keys and values "
                    f"(it may keep other state): {error}"
                ) from error
        kept, layers = kv_of_cache(self._model, cache), len(self._survey.layout.layers)
        if len(kept) != layers:
            raise ModelNotBlendableError(
                f"{type(self._model).__name__} caches the keys and values of {len(kept)} layers, and {layers} have "
                "attention; the others keep something that blending does not know"
            )
        return Plain(out.logits[0, -1], kept)

    def _noise(self, ids: torch.Tensor, plain: Plain) -> float:
        """The model's own noise: largest distance of two other plain computations from `plain`; 0 in full precision."""
        if not self._is_half:
            return 0.0
        return max(_distance(self._plain(ids, split=len(ids) // part), plain) for part in (2, 3))

    def _ids(self, count: int) -> torch.Tensor:
        drawn = torch.randint(self._survey.vocab_size, (count,), generator=self._random)
        return drawn.to(self._model.device)

    def _text(self) -> Segment:
        return text(self._ids(TEXT_TOKENS).tolist())


def _distance(one: Plain, other: Plain) -> float:
    """Relative distance of two results: of their last logits, or of KV of the median row if that is larger."""
    wanted = other.logits.float()
    spread = (wanted - wanted.mean()).norm().clamp(min=1e-12)
    return max(float((one.logits.float() - wanted).norm() / spread), _row_distance(one.kv, other.kv))


def _row_distance(one: list[LayerKV], other: list[LayerKV]) -> float:
    """Relative distance of the median row, in the layer where it is largest."""
    worst = 0.0
    for mine, theirs in zip(one, other, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            error = (a.float() - b.float()).norm(dim=(0, 2))
            size = b.float().norm(dim=(0, 2)).clamp(min=1e-12)
            worst = max(worst, float((error / size).median()))
    return worst
