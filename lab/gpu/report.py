"""What a run of `lab cuda` found, for people: figures beside their bars, what failed or was skipped; and pictures."""

from pathlib import Path
from typing import Any

from rich.table import Table

from lab.bench import draw_curves, markdown_table, picture, plain_table
from lab.gpu.attention_ways import OURS
from lab.gpu.timeline import LANES
from lab.gpu.ttft import label

BARS: dict[str, tuple[str, float]] = {
    "ttft_speedup_4k": ("full prefill / blend, llama-3.1-8b, r = 0.15, 4,096 tokens", 4.0),
    "ttft_speedup_16k": ("the same, 16,384 tokens", 4.7),
    "ttft_speedup_32k": ("the same, 32,768 tokens", 4.7),
    "of_limit_16k": ("the same / what its rows and layers allow; .88 of that with the checks' projections", 0.82),
    "ttft_speedup_16k_r05": ("full prefill / blend, r = 0.05, 16,384 tokens", 9.0),
    "attention_of_flash": ("attention of 2,458 rows of 16,384 / flash attention, equal FLOPs", 0.6),
    "place_of_bandwidth": ("bytes placed / bytes copied a second", 0.6),
    "vllm_ttft_speedup_16k": ("vLLM's prefix caching / the plug-in, 16,384 tokens", 4.0),
}
"""What each figure is, and the least that it should be."""


def points_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The lengths at which first tokens were timed."""
    found: list[dict[str, Any]] = result["parts"].get("ttft", {}).get("points", [])
    return found


def failures(result: dict[str, Any]) -> dict[str, str]:
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
    skipped = "\n".join(f"{what} was skipped: {why}" for what, why in result["skipped"].items())
    out = plain_table(title(result), ("",), ("measured", "at least", ""), skipped)
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
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    parts = [
        f"# CUDA: {title(result)}",
        f"`python -m lab cuda`, commit {result['commit']}, {result['took_s']:.0f} s. {versions}.",
        *(f"## {name} failed\n\n```\n{error}\n```" for name, error in failures(result).items()),
        "## Figures",
        markdown_table(
            ("figure", "what"),
            ("measured", "at least", ""),
            [(f"`{key}`", BARS[key][0], *rest) for key, *rest in _figures(result)],
        ),
        *_first_tokens(result),
        *_kernels(result["parts"].get("kernels", {})),
        *_tiles(result["parts"].get("tiles", {}).get("cases", {})),
        *_passes(result["parts"].get("profile", {})),
    ]
    if tests := result["parts"].get("tests"):
        parts += ["## Tests", ", ".join(f"{tests[key]} {key}" for key in ("passed", "failed", "errors", "skipped"))]
    if result["skipped"]:
        parts += ["## Skipped", "\n".join(f"- {what}: {why}" for what, why in result["skipped"].items())]
    return "\n\n".join(parts) + "\n"


def _first_tokens(result: dict[str, Any]) -> list[str]:
    rows = [
        (
            point["shape"],
            f"{point['tokens']:,}",
            _label(arm),
            f"{1e3 * arm['ttft_s']['median']:.1f}",
            f"{1e3 * arm['ttft_s']['min']:.1f} to {1e3 * arm['ttft_s']['max']:.1f}",
            str(arm["runs"]),
            "" if arm["speedup_vs_full"] is None else f"{arm['speedup_vs_full']:.2f}",
        )
        for point in points_of(result)
        for arm in point["arms"]
    ]
    columns = ("shape", "tokens", "how"), ("median, ms", "from, to", "rounds", "full / this")
    unchecked = "Whether cold reads were cold is not known: the file system does not tell what it keeps in memory."
    notes = [] if all(point["cold_is_checked"] for point in points_of(result)) else [unchecked]
    decoded = result["parts"].get("ttft", {}).get("decoded_per_s", {})
    notes += [f"Decoded by llama-3.1-8b, {how}: {per_s:.1f} tokens a second." for how, per_s in decoded.items()]
    return ["## Time to first token", markdown_table(*columns, rows), *notes] if rows else []


def _label(arm: dict[str, Any]) -> str:
    return str(arm["arm"]) if arm["ratio"] is None else label(arm["arm"], arm["ratio"], arm["store"])


def _kernels(found: dict[str, Any]) -> list[str]:
    parts: list[str] = []
    if "served" in found:
        parts += ["## Kernels", "\n".join(f"- {name}: {what}" for name, what in found["served"].items())]
    if ceilings := found.get("ceilings"):
        told = [f"{value / 1e12:.2f}e12 {name}" for name, value in ceilings.items() if name != "sdpa"]
        parts.append(f"Ceilings: {', '.join(told)}. PyTorch's attention of a full prefill: {ceilings['sdpa']}.")
    copies = [*found.get("placing", {}).items(), ("deviation", found["deviation"])] if "deviation" in found else []
    rows = [
        (name, f"{1e6 * each['s']:.0f}", f"{each['bytes_per_s'] / 1e9:.0f}", f"{each['of_copy']:.2f}")
        for name, each in copies
    ]
    if rows:
        parts.append(markdown_table(("bytes moved",), ("us", "GB/s", "of a copy"), rows))
    for layout, of in found.get("attention", {}).items():
        columns = ("attention by",), ("ms", "once a pass, ms", "TFLOP/s", "of flash attention")
        ways: list[tuple[str, ...]] = []
        for name, way in of["ways"].items():
            cells = [f"skipped: {way.get('skipped')}", "", "", ""]
            if "skipped" not in way:
                cells = [f"{1e3 * way['s']:.3f}", f"{1e3 * way['setup_s']:.2f}"]
                cells += [f"{way['flops_per_s'] / 1e12:.1f}", f"{way['of_flash']:.2f}"]
            ways.append((f"**{name}**" if name == OURS else name, *cells))
        parts += [f"Attention of rows, {layout}:", markdown_table(*columns, ways)]
    return parts


def _tiles(cases: dict[str, list[dict[str, Any]]]) -> list[str]:
    """TFLOP/s of each case by (slots, keys, warps, stages), the fastest three and the one in use."""
    rows = []
    for name, shapes in cases.items():
        timed = sorted((each for each in shapes if "s" in each), key=lambda each: float(each["s"]))
        told = [
            f"{tuple(each['shape'])} {each['flops_per_s'] / 1e12:.0f}{', in use' if each['own'] else ''}"
            for number, each in enumerate(timed)
            if number < 3 or each["own"]
        ]
        rows.append((name, "; ".join(told) or "none could be timed"))
    return ["## Tiles of the attention kernel", markdown_table(("rows",), ("TFLOP/s",), rows)] if rows else []


def _passes(profile: dict[str, Any]) -> list[str]:
    passes, first = profile.get("passes", {}), profile.get("first", {})
    rows = [
        (
            name,
            f"{1e3 * each['s']:.1f}",
            f"{1e3 * each['device_s']:.1f}",
            f"{100 * each['idle']:.0f} %",
            str(each["launches"]),
            "; ".join(f"{kernel[:40]} x{count} {1e3 * taken:.1f}" for kernel, count, taken in each["kernels"][:5]),
        )
        for name, each in passes.items()
    ]
    columns = ("pass", "ms", "profiled, ms", "idle", "launches"), ("kernels, ms",)
    opened = (
        "With no compiled kernel at hand the engine was opened in {open_s:.1f} s, in which {compiled} were compiled, "
    )
    opened += (
        "and {compiled_by_requests} by requests; a first blend took {first_s:.3f} s, a second one {second_s:.3f} s."
    )
    told = [opened.format(**first)] if "compiled_by_requests" in first else []
    return ["## Where a pass's time goes", markdown_table(*columns, rows), *told] if rows else []


# ---- pictures -----------------------------------------------------------------------------------------------


def draw(result: dict[str, Any], path: Path) -> list[Path]:
    """Draws what the result has: ``…-ttft.png`` and ``…-timeline.png`` beside its file at `path`."""
    drawn = []
    if points_of(result):
        drawn.append(path.with_name(f"{path.stem}-ttft.png"))
        _draw_ttft(result, drawn[-1])
    if result["parts"].get("timeline", {}).get("slices"):
        drawn.append(path.with_name(f"{path.stem}-timeline.png"))
        _draw_timeline(result, drawn[-1])
    return drawn


def _draw_ttft(result: dict[str, Any], path: Path) -> None:
    """Seconds by length, for full prefill and each blend."""
    points = sorted(points_of(result), key=lambda point: int(point["tokens"]))
    found: dict[str, list[tuple[int, float]]] = {}
    for point in points:
        for arm in point["arms"]:
            found.setdefault(_label(arm), []).append((point["tokens"], arm["ttft_s"]["median"]))
    curves = {label: ([x for x, _ in curve], [y for _, y in curve]) for label, curve in found.items()}
    with picture(path, width=6) as (axes,):
        draw_curves(
            axes,
            curves,
            f"{points[0]['shape']}, {result['device']}",
            dashed=[label for label in curves if not label.startswith("full")],
            xlabel="tokens of the prompt",
            ylabel="time to first token, s",
            ylim=(0, None),
        )


def _draw_timeline(result: dict[str, Any], path: Path) -> None:
    timeline = result["parts"]["timeline"]
    with picture(path, width=10, height=3) as (axes,):
        for row, lane in enumerate(reversed(LANES)):
            bars = [(1e3 * start, 1e3 * (end - start)) for name, start, end in timeline["slices"] if name == lane]
            axes.broken_barh(bars, (row - 0.4, 0.8), color=LANES[lane])
        labels = [f"{lane}\n{100 * timeline['busy'][lane]:.0f} %" for lane in reversed(LANES)]
        axes.set_yticks(range(len(LANES)), labels)
        axes.set(xlabel="ms since the pass began", xlim=(0, 1e3 * timeline["seconds"]))
        title = f"One blend of {timeline['tokens']:,} tokens, r = 0.15, {result['device']}"
        axes.set_title(title, parse_math=False)
        axes.grid(visible=False, axis="y")
