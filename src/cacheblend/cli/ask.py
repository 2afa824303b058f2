"""`cacheblend ask`: one answer, and what it cost."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cacheblend.cli.options import (
    BLENDING,
    MODEL,
    OUTPUT,
    PROMPT,
    AnchorRule,
    AsJson,
    BlockSize,
    Chat,
    Device,
    Dtype,
    ModelFolder,
    Salt,
    System,
)
from cacheblend.cli.output import console, print_json, status, write

if TYPE_CHECKING:
    from cacheblend.core.prompt import Prompt
    from cacheblend.engines.hf import Answer, BlendEngine, SamplingParams
    from cacheblend.engines.settings import Settings

Store = Annotated[
    str, typer.Option("--store", "-s", help="A folder, its file:// URL, or memory.", rich_help_panel=MODEL)
]
Question = Annotated[
    str | None,
    typer.Option("--question", "-q", help="Default: the one of --data's row.", rich_help_panel=PROMPT),
]
Passages = Annotated[
    list[str] | None,
    typer.Option("--passage", "-p", help="A passage, or @file. Several times, in order.", rich_help_panel=PROMPT),
]
Data = Annotated[
    Path | None, typer.Option("--data", "-d", help="Passages of a file, as for warm.", rich_help_panel=PROMPT)
]
RowNumber = Annotated[
    int, typer.Option("--row", min=0, help="Which row of a .json file, from 0.", rich_help_panel=PROMPT)
]
Ratios = Annotated[
    list[float] | None,
    typer.Option(
        "--ratio",
        "-r",
        help="Share of loaded tokens to recompute, 0..1. Several: one for each check layer, falling. "
        "Default: the model's profile, or 0.15.",
        rich_help_panel=BLENDING,
        show_default=False,
    ),
]
SelectorName = Annotated[
    str | None,
    typer.Option(
        "--selector",
        help="hkvd: rows whose KV deviates most; query: sentences that the question attends to; hybrid: both; "
        "or threshold, head, random, none, all. Default: the model's profile, or hkvd.",
        rich_help_panel=BLENDING,
        show_default=False,
    ),
]
CheckLayers = Annotated[
    list[int] | None,
    typer.Option(
        "--check-layer",
        help="Where deviation is measured. Several: gradual filtering. Default: the model's profile, or 1.",
        rich_help_panel=BLENDING,
        show_default=False,
    ),
]
Measure = Annotated[
    Literal["kv", "k", "v"] | None,
    typer.Option(
        "--measure",
        help="Deviation over keys and values, or one of them. Default: the model's profile, or kv.",
        rich_help_panel=BLENDING,
        show_default=False,
    ),
]
Threshold = Annotated[
    float | None, typer.Option("--threshold", help="Bound of the selector threshold.", rich_help_panel=BLENDING)
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Of the answer.", rich_help_panel=OUTPUT)]
Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy.", rich_help_panel=OUTPUT)]
Seed = Annotated[int | None, typer.Option("--seed", help="Of the drawing.", rich_help_panel=OUTPUT)]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        help="The model's profile, where it is not cacheblend.json in its folder.",
        rich_help_panel=BLENDING,
        show_default=False,
    ),
]
Capture = Annotated[
    bool,
    typer.Option(
        "--capture/--no-capture",
        help="Store the passages that were missed, behind the answer.",
        rich_help_panel=BLENDING,
    ),
]
Compare = Annotated[
    bool, typer.Option("--compare", help="Answer by full recompute, too; stores nothing.", rich_help_panel=OUTPUT)
]


def ask(
    model: ModelFolder,
    store: Store,
    question: Question = None,
    passage: Passages = None,
    data: Data = None,
    row: RowNumber = 0,
    system: System = None,
    chat: Chat = None,
    ratio: Ratios = None,
    selector: SelectorName = None,
    check_layer: CheckLayers = None,
    measure: Measure = None,
    threshold: Threshold = None,
    profile: ProfileFile = None,
    anchor: AnchorRule = "auto",
    block_size: BlockSize = 256,
    salt: Salt = "",
    capture: Capture = True,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    dtype: Dtype = "auto",
    device: Device = None,
    compare: Compare = False,
    json: AsJson = False,
) -> None:
    """Answer a question from passages, their KV cache loaded where the store has it.

    Passages that the store lacks are computed, and stored behind the answer.
    """
    texts, asked = _inputs(question, passage or [], data, row)

    from cacheblend.cli.models import open_engine
    from cacheblend.cli.prompts import build_prompt
    from cacheblend.engines.hf import Passage, SamplingParams

    config = _blending(ratio, selector, check_layer, measure, threshold) | {
        "anchor": anchor,
        "block_size": block_size,
        "salt": salt,
        "capture": capture and not compare,
    }
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    with open_engine(model, store, config, profile=profile, dtype=dtype, device=device, quiet=json) as engine:
        prompt = build_prompt(engine, [Passage(*text) for text in texts], asked, system, chat)
        (_compare if compare else _answer)(engine, prompt, params, json)


def _inputs(
    question: str | None, arguments: list[str], data: Path | None, row: int
) -> tuple[list[tuple[str, str]], str]:
    """The passages as (text, title), and the question."""
    from cacheblend.cli.prompts import passage_text
    from cacheblend.core.errors import InvalidInputError
    from cacheblend.data import read_row

    texts = [passage_text(argument) for argument in arguments]
    if data is not None:
        found = read_row(data, row)
        texts = [(text.text, text.title) for text in found.passages] + texts
        question = question or found.question
    if not question:
        raise InvalidInputError("there is no question: give --question, or --data with a row that has one")
    return texts, question


def _blending(
    ratio: list[float] | None,
    selector: str | None,
    check_layer: list[int] | None,
    measure: str | None,
    threshold: float | None,
) -> dict[str, Any]:
    """Fields of `BlendConfig` that the user set; none leaves them to the model's profile."""
    given = {"selector": selector, "measure": measure, "threshold": threshold}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if ratio or check_layer:
        ratios, layers = _levels(ratio or [0.15], check_layer or [1], selector or "hkvd")
        settings |= {"recompute_ratio": ratios[-1], "check_layers": layers}
        settings |= {"ratios": ratios} if len(ratios) > 1 else {}
    return settings


def _levels(ratios: list[float], layers: list[int], selector: str) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Ratios and check layers: one ratio for all layers, or one for each (gradual filtering)."""
    from cacheblend.core.errors import InvalidInputError

    if len(ratios) > 1 and selector not in ("hkvd", "hybrid"):
        raise InvalidInputError(f"several --ratio are for the selectors hkvd and hybrid; {selector} takes one")
    if len(ratios) > 1 and len(ratios) != len(layers):
        raise InvalidInputError(f"{len(ratios)} --ratio need as many --check-layer, one each, got {len(layers)}")
    return tuple(ratios), tuple(layers)


def _answer(engine: "BlendEngine", prompt: "Prompt", params: "SamplingParams", as_json: bool) -> None:
    """The answer, and what was missed into the store behind it."""
    answer = _stream(engine, prompt, params, quiet=as_json)
    _show(answer, len(engine.survey.layout.layers), engine.settings, as_json)
    with status("storing what was missed ...", quiet=as_json or not answer.report.missed_tokens):
        engine.flush()


def _stream(engine: "BlendEngine", prompt: "Prompt", params: "SamplingParams", *, quiet: bool) -> "Answer":
    """The answer, written to stdout as it comes unless `quiet`."""
    for delta in engine.stream(prompt, params):
        if not quiet:
            write(delta.text)
    assert delta.answer is not None
    if not quiet:
        write("\n")
    return delta.answer


def _show(answer: "Answer", layers: int, settings: "Settings", as_json: bool) -> None:
    if as_json:
        print_json(_facts(answer, settings))
        return
    from rich.text import Text

    from cacheblend.cli.reports import report_table, settings_line

    out = console(stderr=True)
    out.print(report_table(answer.report, layers))
    out.print(settings_line(settings), soft_wrap=True)
    for line in answer.report.fallbacks:
        out.print(Text.assemble(("fallback:", "yellow"), f" {line}"))


def _compare(engine: "BlendEngine", prompt: "Prompt", params: "SamplingParams", as_json: bool) -> None:
    """Blend and full recompute on the same ids, the weights touched before either is timed."""
    from cacheblend.engines.hf.arms import agreement, finish, full_recompute, touch

    touch(engine, prompt)
    if not as_json:
        console().print("blend", style="bold")
    blended = _stream(engine, prompt, params, quiet=as_json)
    full = full_recompute(engine, prompt)
    text, ids = finish(engine, prompt, full, params)
    close = agreement(engine.prefill(prompt)[0].logits, full.logits)
    if as_json:
        speedup = full.ttft_s / blended.report.ttft_s
        print_json(
            _facts(blended, engine.settings)
            | {
                "full_recompute": {
                    "answer": text,
                    "token_ids": ids,
                    "ttft_s": full.ttft_s,
                    "speedup": speedup,
                    "first_token": close.to_dict(),
                }
            }
        )
        return
    console().print("full recompute", style="bold")
    write(f"{text}\n")
    _show(blended, len(engine.survey.layout.layers), engine.settings, as_json=False)
    from cacheblend.cli.reports import comparison_line

    console(stderr=True).print(comparison_line(blended.report.ttft_s, full.ttft_s, close))


def _facts(answer: "Answer", settings: "Settings") -> dict[str, Any]:
    from cacheblend.core.profile import quality_settings

    return {
        "answer": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "report": answer.report.to_dict(),
        "settings": {"source": settings.source, **quality_settings(settings.config)},
    }
