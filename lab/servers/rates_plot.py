"""Draws time to first token against the rate of requests. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw_rates(
    rates: Sequence[float], curves: Mapping[str, tuple[Sequence[float], float]], title: str, path: Path
) -> None:
    """Draws a curve for each server, and a line where it saturates.

    Args:
        rates: requests per second.
        curves: by label, median seconds at each rate, and requests per second at saturation.
        title: of the picture.
        path: of the file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for number, (label, (medians, saturation)) in enumerate(curves.items()):
        color = f"C{number}"
        axes.plot(rates, medians, marker="o", color=color, label=label)
        axes.axvline(saturation, linestyle="--", color=color, alpha=0.6, label=f"saturation, {saturation:.2f} a second")
    axes.set(xlabel="requests per second", ylabel="median time to first token, s", ylim=(0, None))
    axes.set_title(title, parse_math=False)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
