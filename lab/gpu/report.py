"""What a run of `lab cuda` found, for people: figures beside their bars, what fell short, failed or was skipped."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lab.gpu.attention_ways import OURS

BARS: dict[str, tuple[str, float]] = {
    "ttft_speedup_4k": ("full prefill / blend, llama-3.1-8b, r = 0.15, 4,096 tokens", 4.0),
    "ttft_speedup_16k": ("the same, 16,384 tokens", 5.0),
    "ttft_speedup_32k": ("the same, 32,768 tokens", 5.0),
    "of_limit_16k": ("the same at 16,384 tokens / what its rows and layers allow", 0.8),
    "ttft_speedup_16k_r05": ("full prefill / blend, r = 0.05, 16,384 tokens", 8.0),
    "attention_of_peak": ("attention of 2,458 rows of 16,384 / flash attention, equal FLOPs", 0.6),
    "place_of_bandwidth": ("bytes placed / bytes copied a second", 0.6),
    "vllm_ttft_speedup_16k": ("vLLM's prefix caching / the plug-in, 16,384 tokens", 4.0),
}
"""What each figure is, and the least that it should be."""


def points_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The lengths at which first tokens were timed, of all shapes."""
    return [point for part in ("ttft", "large") for point in result["parts"].get(part, {}).get("points", [])]


def failures(result: dict[str, Any]) -> dict[str, str]:
    """What went wrong, by part."""
    return {name: found["error"] for name, found in result["parts"].items() if "error" in found}


def title(result: dict[str, Any]) -> str:
    """The device, and what is to be known before a number is read."""
    if result["dry_run"]:
        return f"{result['device']}, a dry run: the numbers mean nothing"
    if "tests" in failures(result):
        return f"{result['device']}: TESTS FAIL ON THIS DEVICE, so believe no number before they are understood"
    return str(result["device"])


def table(result: dict[str, Any]) -> Table:
    """Every figure beside its bar; what was not measured says why."""
    out = Table(
        title=title(result),
        caption="\n".join(f"{what} was skipped: {why}" for what, why in result["skipped"].items()),
        box=SIMPLE_HEAD,
        show_edge=False,
    )
    out.add_column("", no_wrap=True)
    for column in ("measured", "at least"):
        out.add_column(column, justify="right", no_wrap=True)
    out.add_column("")
    for row in _figures(result):
        out.add_row(*row)
    return out


def _figures(result: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """(name, measured, bar, verdict) of every figure."""
    rows = []
    for key, (_, bar) in BARS.items():
        value = result["figures"].get(key)
        is_short = value is not None and value < bar and not result["dry_run"]
        measured = "not measured" if value is None else f"{value:.2f}"
        rows.append((key, measured, f"{bar:g}", "falls short" if is_short else ""))
    return rows


# ---- a page -------------------------------------------------------------------------------------------------


def page(result: dict[str, Any]) -> str:
    """The whole result in Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    parts = [
        f"# CUDA: {title(result)}",
        f"`python -m lab cuda`, commit {result['commit']}, {result['took_s']:.0f} s. {versions}.",
        *(f"## {name} failed\n\n```\n{error}\n```" for name, error in failures(result).items()),
        "## Figures",
        _grid(
            ("figure", "what", "measured", "at least", ""),
            [(f"`{key}`", BARS[key][0], *rest) for key, *rest in _figures(result)],
        ),
        *_first_tokens(result),
        *_kernels(result["parts"].get("kernels", {})),
        *_tests(result["parts"].get("tests", {})),
        *_skipped(result),
    ]
    return "\n\n".join(parts) + "\n"


def _first_tokens(result: dict[str, Any]) -> list[str]:
    rows = [
        (
            point["shape"],
            f"{point['tokens']:,}",
            arm["arm"] if arm["ratio"] is None else f"r = {arm['ratio']:g}, {arm['store']}",
            f"{1e3 * arm['ttft_s']['median']:.1f}",
            f"{1e3 * arm['ttft_s']['min']:.1f} to {1e3 * arm['ttft_s']['max']:.1f}",
            str(arm["runs"]),
            "" if arm["speedup_vs_full"] is None else f"{arm['speedup_vs_full']:.2f}",
        )
        for point in points_of(result)
        for arm in point["arms"]
    ]
    columns = ("shape", "tokens", "how", "median, ms", "from, to", "rounds", "full / this")
    notes = [] if all(point["cold_is_checked"] for point in points_of(result)) else [_UNCHECKED]
    return ["## Time to first token", _grid(columns, rows), *notes] if rows else []


_UNCHECKED = "Whether cold reads were cold is not known: the file system does not tell what it keeps in memory."


def _kernels(found: dict[str, Any]) -> list[str]:
    parts: list[str] = []
    if "served" in found:
        parts += ["## Kernels", "\n".join(f"- {name}: {what}" for name, what in found["served"].items())]
    copies = [*found.get("placing", {}).items(), ("deviation", found["deviation"])] if "deviation" in found else []
    rows = [
        (name, f"{1e6 * each['s']:.0f}", f"{each['bytes_per_s'] / 1e9:.0f}", f"{each['of_copy']:.2f}")
        for name, each in copies
    ]
    if rows:
        parts.append(_grid(("bytes moved", "us", "GB/s", "of a copy"), rows))
    for layout, of in found.get("attention", {}).items():
        parts += [f"Attention of rows, {layout}:", _grid(_WAY_COLUMNS, [_way(*each) for each in of["ways"].items()])]
    return parts


_WAY_COLUMNS = ("attention by", "ms", "once a pass, ms", "TFLOP/s", "of flash attention")


def _way(name: str, found: dict[str, Any]) -> tuple[str, ...]:
    name = f"**{name}**" if name == OURS else name
    if "skipped" in found:
        return name, f"skipped: {found['skipped']}", "", "", ""
    times = f"{1e3 * found['s']:.3f}", f"{1e3 * found['setup_s']:.2f}"
    return name, *times, f"{found['flops_per_s'] / 1e12:.1f}", f"{found['of_flash']:.2f}"


def _tests(found: dict[str, Any]) -> list[str]:
    if not found:
        return []
    return ["## Tests", ", ".join(f"{found[key]} {key}" for key in ("passed", "failed", "errors", "skipped"))]


def _skipped(result: dict[str, Any]) -> list[str]:
    lines = [f"- {what}: {why}" for what, why in result["skipped"].items()]
    return ["## Skipped", "\n".join(lines)] if lines else []


def _grid(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
