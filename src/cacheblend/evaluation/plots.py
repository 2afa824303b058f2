"""Plots of a summary: quality over ratio, TTFT, total compute and chunks; and the look of figures. Needs matplotlib."""

from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from textwrap import fill
from typing import Any

from cacheblend.evaluation.report import TITLES

AGREEMENT = "top_1"
FIXED = {"full": "black", "prefix": "tab:gray", "reuse": "tab:red", "map-reduce": "tab:olive", "map-rerank": "tab:cyan"}
CYCLE = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:pink", "navy", "goldenrod", "teal")
MARKERS = "osD^v<>PX"
WIDTH, HEIGHT = 8.5, 4.8  # inches; a long legend increases the height
PAPERS_RATIO = 0.15
Methods = list[dict[str, Any]]
STYLE = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "figure.dpi": 100,
    "savefig.dpi": 150,
    "legend.frameon": False,
}


def new_figure(width: float, height: float) -> Any:
    """A figure outside of pyplot's registry, which need not be closed."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


_AXES: dict[str, tuple[str, Callable[[dict[str, Any]], float | None]]] = {
    "ttft": ("time to first token, s (median)", lambda method: method["ttft_s"]["median"]),
    "compute": (
        "total compute, % of a full prefill",
        lambda method: None if method["total_compute"] is None else 100 * method["total_compute"],
    ),
}
"""What may be on the x axis: label, value."""


def draw(summary: dict[str, Any], folder: Path, *, data: str = "") -> list[Path]:
    """Draws a file for each quality and axis with data into the folder, ``<quality>-<axis>.png``; `data`: for titles.
    Qualities are the scorers with scores; without any, the agreement of the first token with full recompute."""
    import matplotlib

    scored = [
        name for name in summary["scorers"] if any(method["scores"][name]["all"] for method in summary["methods"])
    ]
    files = []
    with matplotlib.rc_context(STYLE):
        for quality in scored or [AGREEMENT]:
            sheet = _Sheet(summary, quality, data)
            if not sheet.largest:
                continue
            if any(method["ratio"] is not None and method["kind"] == "blend" for method in sheet.largest):
                files.append(sheet.over_ratio(folder / f"{quality}-ratio.png"))
            files += [sheet.over(*axis, folder / f"{quality}-{key}.png") for key, axis in _AXES.items()]
            if len({method["top_k"] for method in summary["methods"]}) > 1:
                files.append(sheet.over_chunks(folder / f"{quality}-chunks.png"))
    return files


class _Sheet:
    """The plots of one quality; a family of methods has the same colour and marker in all plots."""

    def __init__(self, summary: dict[str, Any], quality: str, data: str) -> None:
        self._summary, self._quality, self._data = summary, quality, data
        self._families = list(dict.fromkeys(method["family"] for method in summary["methods"]))
        blends = list(dict.fromkeys(method["family"] for method in summary["methods"] if method["kind"] == "blend"))
        self._colours = {
            family: FIXED.get(family) or CYCLE[blends.index(family) % len(CYCLE)] for family in self._families
        }
        self._markers = {family: MARKERS[i % len(MARKERS)] for i, family in enumerate(self._families)}
        # The largest number of passages; the others are drawn by `over_chunks`.
        known = [method for method in summary["methods"] if self._figure(method)]
        widest = max((method["top_k"] for method in known), key=lambda k: inf if k is None else k, default=None)
        self.largest: Methods = [method for method in known if method["top_k"] == widest]

    def over_ratio(self, file: Path) -> Path:
        """Blends as curves; methods without a ratio as horizontal lines."""
        figure, axes = self._open("recompute ratio r, % of the loaded tokens", self._passages())
        for family in self._families:
            methods = [method for method in self.largest if method["family"] == family]
            curve = [method for method in methods if method["kind"] == "blend" and method["ratio"] is not None]
            if curve:
                self._curve(axes, family, curve, [100 * method["ratio"] for method in curve])
            elif methods and methods[0]["kind"] != "prefix":  # same answers as full recompute
                mean, low, high = self._percents(methods[0])
                axes.axhline(mean, color=self._colours[family], linestyle="--", linewidth=1.5, label=family)
                axes.axhspan(low, high, color=self._colours[family], alpha=0.08, linewidth=0)
        return self._save(figure, axes, file)

    def over(self, label: str, value: Callable[[dict[str, Any]], float | None], file: Path) -> Path:
        """Every method as a point; the points of a family joined by increasing ratio."""
        figure, axes = self._open(label, self._passages())
        for family in self._families:
            placed = [(method, value(method)) for method in self.largest if method["family"] == family]
            curve = [(method, x) for method, x in placed if x is not None]
            if curve:
                self._curve(axes, family, [method for method, _ in curve], [x for _, x in curve])
        axes.set_xlim(left=0)
        return self._save(figure, axes, file)

    def over_chunks(self, file: Path) -> Path:
        """Every family as a curve; of blends, the ratio closest to that of the paper."""
        figure, axes = self._open("chunks retrieved (mean over the rows)", "")
        for family in self._families:
            methods = [
                method for method in self._summary["methods"] if method["family"] == family and self._figure(method)
            ]
            if methods and methods[0]["kind"] != "prefix":  # same answers as full recompute
                shown = min(
                    (method["ratio"] for method in methods if method["ratio"] is not None),
                    key=lambda ratio: abs(ratio - PAPERS_RATIO),
                    default=None,
                )
                curve = [method for method in methods if method["ratio"] == shown]
                self._curve(axes, family, curve, [method["chunks"] for method in curve])
        axes.set_xlim(left=0)
        return self._save(figure, axes, file)

    def _figure(self, method: dict[str, Any]) -> dict[str, Any] | None:
        if self._quality == AGREEMENT and method["kind"] == "full" and method["rows"]:
            return {"mean": 1.0, "low": 1.0, "high": 1.0}
        found: dict[str, Any] | None = (method["agreement"] | method["scores"])[self._quality]["all"]
        return found

    def _open(self, label: str, remark: str) -> tuple[Any, Any]:
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        figure = new_figure(WIDTH, HEIGHT)
        FigureCanvasAgg(figure)  # its renderer measures the legend
        axes = figure.subplots()
        quality = "first token same as full recompute" if self._quality == AGREEMENT else TITLES[self._quality]
        axes.set(xlabel=label, ylabel=f"{quality}, %" + (" of rows" if self._quality in (AGREEMENT, "em") else ""))
        parts = [self._summary["model"], self._data, f"{self._summary['rows']} rows", remark]
        axes.set_title(fill(", ".join(filter(None, parts)), 80), parse_math=False, fontsize=11)
        return figure, axes

    def _passages(self) -> str:
        k = self.largest[0]["top_k"] if self.largest else None
        return "" if k is None else f"{k} passages"

    def _curve(self, axes: Any, family: str, methods: Methods, xs: Sequence[float]) -> None:
        """Points joined by increasing ratio; with equal ratios by increasing x."""
        order = sorted(range(len(methods)), key=lambda i: (methods[i]["ratio"] or 0, xs[i]))
        figures = [self._percents(methods[i]) for i in order]
        ratios = sorted(
            {100 * method["ratio"] for method in methods if method["ratio"] is not None and method["kind"] == "blend"}
        )
        several = f"{ratios[0]:g} to {ratios[-1]:g}" if len(ratios) > 4 else ", ".join(f"{ratio:g}" for ratio in ratios)
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
            label=f"{family}\nr = {several} %" if ratios else family,
        )

    def _percents(self, method: dict[str, Any]) -> tuple[float, ...]:
        """Mean and the interval's ends, which are the mean where there is no interval."""
        figure = self._figure(method)
        assert figure is not None
        return tuple(100 * (figure["mean"] if figure[at] is None else figure[at]) for at in ("mean", "low", "high"))

    def _save(self, figure: Any, axes: Any, file: Path) -> Path:
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -3.0), min(high, 103.0))  # a small margin, so that no marker is cut off
        level = self._summary["bootstrap"]["level"]
        legend = figure.legend(
            loc="outside right upper",
            fontsize=9,
            title=f"bars, bands: {level:.0%} intervals\n(bootstrap)",
            title_fontsize=8,
            alignment="left",
        )
        tallest = legend.get_window_extent(figure.canvas.get_renderer()).height / figure.dpi
        figure.set_figheight(max(HEIGHT, tallest + 0.2))
        figure.savefig(file)
        return file
