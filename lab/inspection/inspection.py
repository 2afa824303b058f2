"""The measurements of one prompt: deviation of loaded KV, attention between parts, and the effect of recomputing.

Three passes are compared: full recompute, full reuse and blend.

Selectors use squared deviation (`core.kernels.deviation`). Tables and figures show *relative* deviation: its square
root, divided by the root mean square norm of the fresh KV of the layer's loaded rows. This keeps the order of rows and
makes layers comparable: 0 is exact, 1 is as large as the KV itself.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cacheblend.engines.hf.baselines import Agreement
from lab.inspection.deviation import Array, relative_deviation
from lab.inspection.parts import Part, part_of_row

TOP_SHARE = 0.15
LOWEST_SCALE = 0.05  # smallest end of the colour scale: deviation below it may be rounding


@dataclass(frozen=True)
class MethodView:
    """One pass, compared with full recompute.

    Attributes:
        kv_deviation: [layers, tokens] squared L2 over keys and values.
        attention: [layers, parts, parts] share of a row's attention on each part, mean over heads and rows of a part.
            Rows that were not computed count with their attention when their chunk was computed alone.
        attention_deviation: [layers] see `attention_deviation_by_layer`.
        agreement: agreement of the first token's distribution.
        computed: [layers, tokens] whether a row was computed.
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
    """Measurements at one recompute ratio: share of a full prefill's compute, and [layers] attention deviation."""

    ratio: float
    compute: float
    attention_deviation: Array


@dataclass(frozen=True)
class Inspection:
    """All measurements of one prompt.

    Attributes:
        model: name of the model.
        selector: selector of the blend.
        tokens: [tokens] text of each token; joined, they are the prompt.
        sources: [tokens] ``prefix``, ``loaded``, ``miss`` or ``text``.
        parts: rows and columns of the attention matrices.
        candidates: [n] positions of the loaded rows, from which a selector selects.
        kv_norm: [layers] root mean square norm of the candidates' fresh KV.
        full, reuse, blend: the three passes; the deviations of full are zero.
        correlation: [layers, layers] Spearman's rank correlation of the candidates' deviation under full reuse; NaN
            for layer 0, which deviates by rounding only.
        curves: name of a selector -> its points, by increasing ratio.
    """

    model: str
    selector: str
    tokens: list[str]
    sources: list[str]
    parts: list[Part]
    candidates: npt.NDArray[np.int64]
    kv_norm: Array
    full: MethodView
    reuse: MethodView
    blend: MethodView
    correlation: Array
    curves: dict[str, list[CurvePoint]] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""
        return len(self.kv_norm)

    @property
    def part(self) -> npt.NDArray[np.int64]:
        """[tokens] index of each token's part."""
        return part_of_row(self.parts, len(self.tokens))

    @property
    def recomputed(self) -> npt.NDArray[np.int64]:
        """Positions of the loaded rows that blend computes in the last layer."""
        rows: npt.NDArray[np.int64] = self.candidates[self.blend.computed[-1, self.candidates]]
        return rows

    def relative(self, method: MethodView) -> Array:
        """[layers, tokens] relative deviation, see the module's docstring."""
        return relative_deviation(method.kv_deviation, self.kv_norm)

    def scale(self, layers: list[int]) -> float:
        """End of the colour scale: 99th percentile of the candidates' relative deviation under full reuse."""
        values = self.relative(self.reuse)[layers][:, self.candidates]
        return max(LOWEST_SCALE, float(np.percentile(values, 99)))

    def mean_deviation(self, method: MethodView) -> Array:
        """[layers] mean relative deviation of the candidates."""
        mean: Array = self.relative(method)[:, self.candidates].mean(axis=1)
        return mean

    def top_share(self) -> Array:
        """[layers] share of the summed deviation under full reuse that the top 15 % of the candidates hold."""
        ordered = np.sort(self.relative(self.reuse)[:, self.candidates], axis=1)[:, ::-1]
        top, whole = ordered[:, : max(1, round(TOP_SHARE * ordered.shape[1]))].sum(axis=1), ordered.sum(axis=1)
        share: Array = np.divide(top, whole, out=np.full(len(whole), np.nan), where=whole > 0)
        share[0] = np.nan  # layer 0 deviates by rounding only
        return share

    def next_correlation(self) -> Array:
        """[layers] rank correlation of the deviation with that of the next layer; NaN for the first and last layer."""
        return np.append(np.diagonal(self.correlation, offset=1), np.nan)

    def cross_chunk(self, method: MethodView) -> Array:
        """[layers] share of attention from rows of the second and later chunks to other chunks."""
        chunks = [index for index, part in enumerate(self.parts) if part.is_chunk]
        later = chunks[1:]
        if not later:
            return np.full(self.num_layers, np.nan)
        to_others = [method.attention[:, i, [c for c in chunks if c != i]].sum(axis=1) for i in later]
        share: Array = np.average(to_others, axis=0, weights=[len(self.parts[i]) for i in later])
        return share
