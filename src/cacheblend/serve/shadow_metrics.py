"""The shadow check's figures for Prometheus; read when Prometheus asks. Their names are part of the interface."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cacheblend.engines.shadow import ShadowFigures
from cacheblend.engines.shadow.watch import KL_BUCKETS, SeriesFigures

LABELS = ("model", "tenant", "selector", "settings")


class ShadowCollector(Collector):  # type: ignore[misc, unused-ignore]
    """Figures of the shadow check of one engine.

    Args:
        figures: gives the present ones.
        waiting: number of answers that wait to be compared.
    """

    def __init__(self, figures: Callable[[], ShadowFigures], waiting: Callable[[], int]) -> None:
        self._figures, self._waiting = figures, waiting

    def collect(self) -> Iterable[Metric]:
        """All metrics."""
        figures = self._figures()
        yield from _of_series(figures)
        model = [figures.model]
        dropped = CounterMetricFamily(
            "cacheblend_shadow_dropped", "Answers that were drawn and not compared.", labels=["model", "reason"]
        )
        for reason, count in figures.dropped.items():
            dropped.add_metric([*model, reason], count)
        changes = CounterMetricFamily(
            "cacheblend_shadow_changes", "Steps of the recompute ratio.", labels=["model", "direction"]
        )
        changes.add_metric([*model, "raised"], figures.raised)
        changes.add_metric([*model, "lowered"], figures.lowered)
        waiting = GaugeMetricFamily("cacheblend_shadow_waiting", "Answers that wait to be compared.", labels=["model"])
        waiting.add_metric(model, self._waiting())
        ratio = GaugeMetricFamily(
            "cacheblend_shadow_ratio", "Recompute ratio of requests that name none; 1: full.", labels=["model"]
        )
        if figures.ratio is not None:
            ratio.add_metric(model, figures.ratio)
        yield from (dropped, changes, waiting, ratio)


def _of_series(figures: ShadowFigures) -> Iterator[Metric]:
    total = CounterMetricFamily("cacheblend_shadow", "Answers compared with full prefill.", labels=LABELS)
    tokens = CounterMetricFamily(
        "cacheblend_shadow_tokens", "Answer tokens compared with full prefill.", labels=[*LABELS, "agreed"]
    )
    kl = HistogramMetricFamily(
        "cacheblend_shadow_kl", "KL(full || blended) of the first token, in nats.", labels=LABELS
    )
    share = GaugeMetricFamily(
        "cacheblend_shadow_agreement", "Agreement with full prefill in the window.", labels=[*LABELS, "of"]
    )
    bound = GaugeMetricFamily("cacheblend_shadow_agreement_bound", "Its exact lower bound.", labels=[*LABELS, "of"])
    for series in figures.series:
        labels = [figures.model, *series.labels]
        total.add_metric(labels, series.compared)
        tokens.add_metric([*labels, "yes"], series.agreed)
        tokens.add_metric([*labels, "no"], series.differed)
        kl.add_metric(labels, _buckets(series), series.kl_sum)
        for of, (agreement, least, rows) in series.agreement.items():
            if rows:
                share.add_metric([*labels, of], agreement)
                bound.add_metric([*labels, of], least)
    yield from (total, tokens, kl, share, bound)


def _buckets(series: SeriesFigures) -> list[tuple[str, float]]:
    """Cumulated counts by upper end."""
    ends = [*map(str, KL_BUCKETS), "+Inf"]
    counts = [sum(series.kl_counts[: number + 1]) for number in range(len(ends))]
    return list(zip(ends, map(float, counts), strict=True))
