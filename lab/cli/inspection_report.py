"""An inspection for people."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from cacheblend.cli.output import share_text
from lab.inspection import Inspection

KEY = (
    "All compared with full recompute. KV: deviation of the loaded tokens, relative to the norm of fresh KV; "
    "top 15 %: share of it in the 15 % of tokens that deviate most; next: rank correlation with the next layer; "
    "attention: deviation of the question's attention to the preceding tokens."
)


def table(facts: dict[str, Any]) -> Table:
    """A line a layer."""
    table = Table(
        title=Text(f"What blending does to this prompt, {facts['model']}", "table.title"),
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    columns = ("layer", "KV reuse", "KV blend", "top 15 %", "next", "attention reuse", "attention blend")
    for column in columns:
        table.add_column(column, justify="right")
    for layer in facts["layers"]:
        attention = layer["attention_deviation"]
        table.add_row(
            str(layer["layer"]),
            _number(layer["mean_deviation"]["reuse"]),
            _number(layer["mean_deviation"]["blend"]),
            "" if layer["top_share"] is None else share_text(layer["top_share"], 1),
            _number(layer["correlation_with_next"]),
            _number(attention["reuse"]),
            _number(attention["blend"]),
        )
    return table


def lines(found: Inspection, facts: dict[str, Any]) -> list[str | Text]:
    """Lines after the table: tokens, first tokens, notes."""
    loaded, again = facts["loaded_tokens"], facts["recomputed_tokens"]
    found_lines: list[str | Text] = [
        f"\n{facts['prompt_tokens']} tokens, {loaded} of them loaded at a new position; blend recomputes {again} "
        f"({share_text(again, loaded)}) by {facts['selector']}; settings: {facts['settings']}"
    ]
    for name, method in (("full reuse", "reuse"), ("blend", "blend")):
        close = facts["first_token"][method]
        same = "as in full recompute" if close["top_1"] else "not as in full recompute"
        share = share_text(facts["compute"][method], 1)
        found_lines.append(f"{name}: first token {same}, KL {close['kl']:.2g} nats; {share} of full prefill's compute")
    return [*found_lines, *(Text.assemble(("note:", "yellow"), f" {note}") for note in _notes(found))]


def _notes(found: Inspection) -> list[str]:
    """Chunks that are not loaded at a new position, or only in part."""
    reasons = {"prefix": "is an exact prefix of this prompt: nothing in it deviates", "miss": "is not in the store"}
    notes = []
    for part in (part for part in found.parts if part.is_chunk):
        start, stop = part.runs[0]
        for source, reason in reasons.items():
            count = found.sources[start:stop].count(source)
            some = "" if count == len(part) else f" ({count} of {len(part)} tokens)"
            notes += [f"{part.label}{some} {reason}"] if count else []
    return notes


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
