"""A request's report for people."""

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from cacheblend.cli.output import seconds_text, share_text
from cacheblend.core.report import BlendReport

if TYPE_CHECKING:
    from cacheblend.engines.hf.baselines import Agreement
    from cacheblend.engines.settings import BlendSettings


def report_table(report: BlendReport, layers: int) -> Table:
    """Tokens by source on the left, seconds on the right."""
    table = Table(title=f"{report.prompt_tokens} prompt tokens", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("tokens", "", "", "time", ""):
        table.add_column(column, justify="right" if not column else "left", no_wrap=True)
    hits = report.hit_tokens
    chunks = report.loaded_tokens - hits.get("prefix", 0)
    tokens = [
        *((_SOURCES.get(tier, f"loaded from {tier}"), hits[tier], report.prompt_tokens) for tier in hits if hits[tier]),
        *([("left out", report.left_out_tokens, report.prompt_tokens)] if report.left_out_tokens else []),
        ("missed", report.missed_tokens, report.prompt_tokens),
        ("plain text", report.text_tokens, report.prompt_tokens),
        ("recomputed of the loaded", report.recomputed_tokens, chunks),
        ("row-layers computed", report.row_layers, report.prompt_tokens * layers),
    ]
    if report.saveable_share is not None:
        behind = (report.prompt_tokens - hits.get("prefix", 0)) * layers
        tokens.append(("  could be left out behind the prefix", round(report.saveable_share * behind), behind))
    times = [
        ("first token", report.ttft_s),
        ("  planning", report.plan_s),
        ("  computing", report.compute_s),
        ("  waiting for loads", report.wait_s),
        ("loading, in parallel", report.load_s),
        (f"all {report.generated_tokens} tokens", report.total_s),
    ]
    rows = max(len(tokens), len(times))
    left = [(name, str(count), share_text(count, whole)) for name, count, whole in tokens]
    right = [(name, seconds_text(seconds)) for name, seconds in times]
    for row in range(rows):
        table.add_row(*(left[row : row + 1] or [("", "", "")])[0], *(right[row : row + 1] or [("", "")])[0])
    return table


_SOURCES = {
    "prefix": "loaded, exact prefix",
    "memory": "loaded from memory",
    "disk": "loaded from disk",
    "redis": "loaded from Redis",
    "s3": "loaded from the bucket",
}


def comparison_line(blend_s: float, full_s: float, close: "Agreement") -> Text:
    """Blend against full recompute."""
    same = "the same first token" if close.top_1 else "another first token"
    return Text.assemble(
        f"first token: blend {seconds_text(blend_s)}, full recompute {seconds_text(full_s)}: ",
        (f"{full_s / blend_s:.1f} x", "bold green"),
        f"; {same}, KL {close.kl:.2g} nats",
    )


def settings_line(settings: "BlendSettings") -> Text:
    """Where a request's settings come from; coloured where the profile says not to blend."""
    off = settings.profile is not None and not settings.profile.blend
    return Text.assemble("settings: ", (settings.source, "yellow" if off else ""))
