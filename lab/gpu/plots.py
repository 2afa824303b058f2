"""Pictures of a run of `lab cuda`. Needs matplotlib."""

from pathlib import Path
from typing import Any

from lab.gpu.report import points_of
from lab.gpu.timeline import LANES

_COLORS = dict(zip(LANES, ("C7", "C1", "C2", "C0"), strict=True))


def draw(result: dict[str, Any], path: Path) -> list[Path]:
    """Draws what the result has: ``…-ttft.png`` and ``…-timeline.png`` beside its file at `path`."""
    import matplotlib

    matplotlib.use("Agg")
    drawn = []
    parts = result["parts"]
    if points_of(result):
        drawn.append(path.with_name(f"{path.stem}-ttft.png"))
        _draw_ttft(result, drawn[-1])
    if parts.get("timeline", {}).get("slices"):
        drawn.append(path.with_name(f"{path.stem}-timeline.png"))
        _draw_timeline(result, drawn[-1])
    return drawn


def _draw_ttft(result: dict[str, Any], path: Path) -> None:
    """A panel for each shape: seconds by length, for full prefill and each blend."""
    from matplotlib import pyplot

    points = points_of(result)
    shapes = list(dict.fromkeys(point["shape"] for point in points))
    figure, panels = pyplot.subplots(1, len(shapes), figsize=(6 * len(shapes), 4.5), squeeze=False)
    for axes, shape in zip(panels[0], shapes, strict=True):
        own = sorted((point for point in points if point["shape"] == shape), key=lambda point: point["tokens"])
        curves: dict[str, list[tuple[int, float]]] = {}
        for point in own:
            for arm in point["arms"]:
                label = arm["arm"] if arm["ratio"] is None else f"r = {arm['ratio']:g}, {arm['store']}"
                curves.setdefault(label, []).append((point["tokens"], arm["ttft_s"]["median"]))
        for label, curve in curves.items():
            style = "-" if label.startswith("full") else "--"
            axes.plot(*zip(*curve, strict=True), style, marker="o", label=label)
        axes.set(xlabel="tokens of the prompt", ylabel="time to first token, s", ylim=(0, None))
        axes.set_title(f"{shape}, {result['device']}", parse_math=False)
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_timeline(result: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot

    timeline = result["parts"]["timeline"]
    figure, axes = pyplot.subplots(figsize=(10, 3))
    for row, lane in enumerate(reversed(LANES)):
        bars = [(1e3 * start, 1e3 * (end - start)) for name, start, end in timeline["slices"] if name == lane]
        axes.broken_barh(bars, (row - 0.4, 0.8), color=_COLORS[lane])
    labels = [f"{lane}\n{100 * timeline['busy'][lane]:.0f} %" for lane in reversed(LANES)]
    axes.set_yticks(range(len(LANES)), labels)
    axes.set(xlabel="ms since the pass began", xlim=(0, 1e3 * timeline["seconds"]))
    axes.set_title(f"One blend of {timeline['tokens']:,} tokens, r = 0.15, {result['device']}", parse_math=False)
    axes.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
