"""What blending does to one prompt, measured: where loaded KV deviates, where attention goes, what recomputing mends.

Three passes are held against each other: full recompute, full reuse and blend.

Deviation is counted in squares where rows are chosen by it (`core.select.deviation`). In tables and figures it is
*relative*: its root, over the layer's root mean square norm of the loaded rows' fresh KV. That keeps the order of rows
and makes layers comparable: 0 is exact, 1 is as far off as the KV itself is large.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cacheblend.engines.hf.baselines import Agreement
from cacheblend.evaluation.inspection.deviation import Array, relative_deviation
from cacheblend.evaluation.inspection.parts import Part, part_of_row

TOP_SHARE = 0.15
LOWEST_SCALE = 0.05  # of colours: below it deviation may be rounding


@dataclass(frozen=True)
class ArmView:
    """One pass against full recompute.

    Attributes:
        kv_deviation: [layers, tokens] squared L2 over keys and values.
        attention: [layers, parts, parts] share of a row's attention on each part, mean over heads and the part's
            rows. Rows that were not computed count with what they attended to when their chunk was alone.
        attention_deviation: [layers] see `attention_deviation_by_layer`.
        agreement: of the first token's distribution.
        computed: [layers, tokens] rows that were computed.
        compute: as a share of a full prefill, see `ComputeScale`.
    """

    kv_deviation: Array
    attention: Array
    attention_deviation: Array
    agreement: Agreement
    computed: npt.NDArray[np.bool_]
    compute: float


@dataclass(frozen=True)
class CurvePoint:
    """One recompute ratio: compute as a share of a full prefill, and [layers] attention deviation."""

    ratio: float
    compute: float
    attention_deviation: Array


@dataclass(frozen=True)
class Inspection:
    """All that the figures show.

    Attributes:
        model: its name.
        selector: of the blend arm.
        tokens: [tokens] text of each token; joined, the prompt.
        sources: [tokens] ``prefix``, ``loaded``, ``miss`` or ``text``.
        parts: rows and columns of the attention matrices.
        candidates: [n] positions of the loaded rows, among which a selector chooses.
        kv_norm: [layers] root mean square norm of the candidates' fresh KV.
        full, reuse, blend: the arms; full's deviations are zero.
        correlation: [layers, layers] Spearman's, between layers, of the candidates' deviation under full reuse;
            NaN for layer 0, whose deviation is rounding.
        curves: name of a selector -> its points, ascending by ratio.
    """

    model: str
    selector: str
    tokens: list[str]
    sources: list[str]
    parts: list[Part]
    candidates: npt.NDArray[np.int64]
    kv_norm: Array
    full: ArmView
    reuse: ArmView
    blend: ArmView
    correlation: Array
    curves: dict[str, list[CurvePoint]] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """Of the model."""
        return len(self.kv_norm)

    @property
    def part(self) -> npt.NDArray[np.int64]:
        """[tokens] index of each token's part."""
        return part_of_row(self.parts, len(self.tokens))

    @property
    def recomputed(self) -> npt.NDArray[np.int64]:
        """Positions of the loaded rows that blend still computes in the last layer."""
        rows: npt.NDArray[np.int64] = self.candidates[self.blend.computed[-1, self.candidates]]
        return rows

    def relative(self, arm: ArmView) -> Array:
        """[layers, tokens] relative deviation, see above."""
        return relative_deviation(arm.kv_deviation, self.kv_norm)

    def scale(self, layers: list[int]) -> float:
        """Where the colours of relative deviation end: at 99 % of the candidates of these layers, under full reuse."""
        values = self.relative(self.reuse)[layers][:, self.candidates]
        return max(LOWEST_SCALE, float(np.percentile(values, 99)))

    def mean_deviation(self, arm: ArmView) -> Array:
        """[layers] mean relative deviation of the candidates."""
        mean: Array = self.relative(arm)[:, self.candidates].mean(axis=1)
        return mean

    def top_share(self) -> Array:
        """[layers] share of the candidates' summed deviation under full reuse that the top 15 % of them hold."""
        ordered = np.sort(self.relative(self.reuse)[:, self.candidates], axis=1)[:, ::-1]
        top, whole = ordered[:, : max(1, round(TOP_SHARE * ordered.shape[1]))].sum(axis=1), ordered.sum(axis=1)
        share: Array = np.divide(top, whole, out=np.full(len(whole), np.nan), where=whole > 0)
        share[0] = np.nan  # rounding
        return share

    def next_correlation(self) -> Array:
        """[layers] rank correlation of each layer's deviation with the next layer's; NaN for the first and last."""
        return np.append(np.diagonal(self.correlation, offset=1), np.nan)

    def cross_chunk(self, arm: ArmView) -> Array:
        """[layers] share of their attention that rows of the second and later chunks give to other chunks."""
        chunks = [index for index, part in enumerate(self.parts) if part.is_chunk]
        later = chunks[1:]
        if not later:
            return np.full(self.num_layers, np.nan)
        to_others = [arm.attention[:, i, [c for c in chunks if c != i]].sum(axis=1) for i in later]
        share: Array = np.average(to_others, axis=0, weights=[len(self.parts[i]) for i in later])
        return share
