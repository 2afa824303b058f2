"""Plots of a summary: quality against ratio, time to first token, total compute, chunks. Needs matplotlib."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from textwrap import fill
from typing import Any

from cacheblend.evaluation.report import TITLES

INSTALL = "pip install 'cacheblend[evaluate]'"
AGREEMENT = "top_1"
FIXED = {"full": "black", "prefix": "tab:gray", "reuse": "tab:red", "map-reduce": "tab:olive", "map-rerank": "tab:cyan"}
CYCLE = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:pink", "navy", "goldenrod", "teal")
MARKERS = "osD^v<>PX"
WIDTH, HEIGHT = 8.5, 4.8  # inches; a long legend makes a plot taller
PAPERS_RATIO = 0.15
Arms = list[dict[str, Any]]


@dataclass(frozen=True)
class _Axis:
    """What a plot is over."""

    key: str
    label: str
    value: Callable[[dict[str, Any]], float | None]


_AXES = (
    _Axis("ttft", "time to first token, s (median)", lambda arm: arm["ttft_s"]["median"]),
    _Axis("compute", "total compute, % of a full prefill", lambda arm: _percent(arm["total_compute"])),
)


def draw(summary: dict[str, Any], folder: Path, *, data: str = "") -> list[Path]:
    """Draws what there is to draw; a file for each quality and axis, ``<quality>-<axis>.png``.

    Quality is each scorer that scored something; where none did, the first token's agreement with full recompute.

    Args:
        summary: of `summarise`.
        folder: where the files go; it is there.
        data: name of the data, for the titles.
    """
    import matplotlib

    matplotlib.use("Agg")
    scored = [name for name in summary["scorers"] if any(arm["scores"][name]["all"] for arm in summary["arms"])]
    files = []
    for quality in scored or [AGREEMENT]:
        sheet = _Sheet(summary, quality, data)
        if not sheet.largest:
            continue
        if any(arm["ratio"] is not None and arm["kind"] == "blend" for arm in sheet.largest):
            files.append(sheet.over_ratio(folder / f"{quality}-ratio.png"))
        files += [sheet.over(axis, folder / f"{quality}-{axis.key}.png") for axis in _AXES]
        if len({arm["top_k"] for arm in summary["arms"]}) > 1:
            files.append(sheet.over_chunks(folder / f"{quality}-chunks.png"))
    return files


class _Sheet:
    """The plots of one quality; a family of arms has the same colour and marker in all of them."""

    def __init__(self, summary: dict[str, Any], quality: str, data: str) -> None:
        self._summary, self._quality, self._data = summary, quality, data
        self._families = list(dict.fromkeys(arm["family"] for arm in summary["arms"]))
        blends = list(dict.fromkeys(arm["family"] for arm in summary["arms"] if arm["kind"] == "blend"))
        self._colours = {
            family: FIXED.get(family) or CYCLE[blends.index(family) % len(CYCLE)] for family in self._families
        }
        self._markers = {family: MARKERS[i % len(MARKERS)] for i, family in enumerate(self._families)}
        # All passages, or most of them: the other numbers are for `over_chunks`.
        known = [arm for arm in summary["arms"] if self._figure(arm)]
        widest = max((arm["top_k"] for arm in known), key=lambda k: inf if k is None else k, default=None)
        self.largest: Arms = [arm for arm in known if arm["top_k"] == widest]

    def over_ratio(self, file: Path) -> Path:
        """Blends are curves, the other arms, which have no ratio, lines across."""
        figure, axes = self._open("recompute ratio r, % of the loaded tokens", self._passages())
        for family in self._families:
            arms = [arm for arm in self.largest if arm["family"] == family]
            curve = [arm for arm in arms if arm["kind"] == "blend" and arm["ratio"] is not None]
            if curve:
                self._curve(axes, family, curve, [100 * arm["ratio"] for arm in curve])
            elif arms and arms[0]["kind"] != "prefix":  # its answers are those of full
                self._across(axes, family, arms[0])
        return self._save(figure, axes, file)

    def over(self, axis: _Axis, file: Path) -> Path:
        """Every arm a point; those of a family joined, ratio rising."""
        figure, axes = self._open(axis.label, self._passages())
        for family in self._families:
            placed = [(arm, axis.value(arm)) for arm in self.largest if arm["family"] == family]
            curve = [(arm, x) for arm, x in placed if x is not None]
            if curve:
                self._curve(axes, family, [arm for arm, _ in curve], [x for _, x in curve])
        axes.set_xlim(left=0)
        return self._save(figure, axes, file)

    def over_chunks(self, file: Path) -> Path:
        """A family a curve, of blends the ratio nearest to the paper's."""
        figure, axes = self._open("chunks retrieved (mean over the rows)", "")
        for family in self._families:
            arms = [arm for arm in self._summary["arms"] if arm["family"] == family and self._figure(arm)]
            if arms and arms[0]["kind"] != "prefix":  # its answers are those of full
                shown = min((arm["ratio"] for arm in arms if arm["ratio"] is not None), key=_from_paper, default=None)
                curve = [arm for arm in arms if arm["ratio"] == shown]
                self._curve(axes, family, curve, [arm["chunks"] for arm in curve])
        axes.set_xlim(left=0)
        return self._save(figure, axes, file)

    # ---- inside -----------------------------------------------------------------------------------------

    def _figure(self, arm: dict[str, Any]) -> dict[str, Any] | None:
        if self._quality == AGREEMENT and arm["kind"] == "full" and arm["rows"]:
            return {"mean": 1.0, "low": 1.0, "high": 1.0}
        found: dict[str, Any] | None = (arm["scores"].get(self._quality) or arm["agreement"][self._quality])["all"]
        return found

    def _open(self, label: str, remark: str) -> tuple[Any, Any]:
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(WIDTH, HEIGHT), layout="constrained")
        quality = "first token as full recompute's" if self._quality == AGREEMENT else TITLES[self._quality]
        axes.set(xlabel=label, ylabel=f"{quality}, %" + (" of rows" if self._quality in (AGREEMENT, "em") else ""))
        parts = [self._summary["model"], self._data, f"{self._summary['rows']} rows", remark]
        axes.set_title(fill(", ".join(filter(None, parts)), 80), parse_math=False, fontsize=11)
        return figure, axes

    def _passages(self) -> str:
        k = self.largest[0]["top_k"] if self.largest else None
        return "" if k is None else f"{k} passages"

    def _curve(self, axes: Any, family: str, arms: Arms, xs: Sequence[float]) -> None:
        """Points joined by rising ratio; where all have the same, by rising x."""
        order = sorted(range(len(arms)), key=lambda i: (arms[i]["ratio"] or 0, xs[i]))
        figures = [self._percents(arms[i]) for i in order]
        axes.errorbar(
            [xs[i] for i in order],
            [mean for mean, _, _ in figures],
            yerr=[[mean - low for mean, low, _ in figures], [high - mean for mean, _, high in figures]],
            color=self._colours[family],
            marker=self._markers[family],
            markersize=5,
            linewidth=1.5,
            elinewidth=1,
            capsize=3,
            label=self._legend(family, arms),
        )

    def _across(self, axes: Any, family: str, arm: dict[str, Any]) -> None:
        mean, low, high = self._percents(arm)
        colour = self._colours[family]
        axes.axhline(mean, color=colour, linestyle="--", linewidth=1.5, label=family)
        axes.axhspan(low, high, color=colour, alpha=0.08, linewidth=0)

    def _percents(self, arm: dict[str, Any]) -> tuple[float, float, float]:
        figure = self._figure(arm)
        assert figure is not None
        return 100 * figure["mean"], 100 * figure["low"], 100 * figure["high"]

    def _legend(self, family: str, arms: Arms) -> str:
        ratios = sorted({100 * arm["ratio"] for arm in arms if arm["ratio"] is not None and arm["kind"] == "blend"})
        if not ratios:
            return family
        if len(ratios) > 4:
            return f"{family}\nr = {ratios[0]:g} to {ratios[-1]:g} %"
        return f"{family}\nr = {', '.join(f'{ratio:g}' for ratio in ratios)} %"

    def _save(self, figure: Any, axes: Any, file: Path) -> Path:
        from matplotlib import pyplot

        axes.set_ylim(*_padded(axes.get_ylim()))
        axes.grid(alpha=0.3)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        level = self._summary["bootstrap"]["level"]
        legend = figure.legend(
            loc="outside right upper",
            fontsize=9,
            frameon=False,
            title=f"bars, bands: {level:.0%} intervals\n(bootstrap)",
            title_fontsize=8,
            alignment="left",
        )
        tallest = legend.get_window_extent(figure.canvas.get_renderer()).height / figure.dpi
        figure.set_figheight(max(HEIGHT, tallest + 0.2))
        figure.savefig(file, dpi=150)
        pyplot.close(figure)
        return file


def _padded(limits: tuple[float, float]) -> tuple[float, float]:
    """Within 0..100 and a little beyond, so that no bar is cut off."""
    return max(limits[0], -3.0), min(limits[1], 103.0)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _from_paper(ratio: float) -> float:
    return abs(ratio - PAPERS_RATIO)
