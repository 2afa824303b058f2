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
        help="Share of loaded tokens to recompute, 0..1. Several: one for each check layer, falling. Default: 0.15.",
        rich_help_panel=BLENDING,
        show_default=False,
    ),
]
SelectorName = Annotated[
    str,
    typer.Option("--selector", help="hkvd, threshold, head, random, none or all.", rich_help_panel=BLENDING),
]
CheckLayers = Annotated[
    list[int] | None,
    typer.Option(
        "--check-layer",
        help="Where deviation is measured. Several: gradual filtering. Default: 1.",
        rich_help_panel=BLENDING,
        show_default=False,
    ),
]
Measure = Annotated[
    Literal["kv", "k", "v"],
    typer.Option("--measure", help="Deviation over keys and values, or one of them.", rich_help_panel=BLENDING),
]
Threshold = Annotated[
    float | None, typer.Option("--threshold", help="Bound of the selector threshold.", rich_help_panel=BLENDING)
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Of the answer.", rich_help_panel=OUTPUT)]
Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy.", rich_help_panel=OUTPUT)]
Seed = Annotated[int | None, typer.Option("--seed", help="Of the drawing.", rich_help_panel=OUTPUT)]
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
    selector: SelectorName = "hkvd",
    check_layer: CheckLayers = None,
    measure: Measure = "kv",
    threshold: Threshold = None,
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
    from cacheblend.core.config import BlendConfig
    from cacheblend.engines.hf import Passage, SamplingParams

    ratios, layers = _levels(ratio or [0.15], check_layer or [1], selector)
    config = BlendConfig(
        recompute_ratio=ratios[-1],
        ratios=ratios if len(ratios) > 1 else None,
        selector=selector,
        check_layers=layers,
        measure=measure,
        threshold=threshold,
        anchor=anchor,  # type: ignore[arg-type]
        block_size=block_size,
        salt=salt,
        capture=capture and not compare,
    )
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    with open_engine(model, store, config, dtype=dtype, device=device, quiet=json) as engine:
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


def _levels(ratios: list[float], layers: list[int], selector: str) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Ratios and check layers: one ratio for all layers, or one for each (gradual filtering)."""
    from cacheblend.core.errors import InvalidInputError

    if len(ratios) > 1 and selector != "hkvd":
        raise InvalidInputError(f"several --ratio are for the selector hkvd; {selector} takes one")
    if len(ratios) > 1 and len(ratios) != len(layers):
        raise InvalidInputError(f"{len(ratios)} --ratio need as many --check-layer, one each, got {len(layers)}")
    return tuple(ratios), tuple(layers)


def _answer(engine: "BlendEngine", prompt: "Prompt", params: "SamplingParams", as_json: bool) -> None:
    """The answer, and what was missed into the store behind it."""
    answer = _stream(engine, prompt, params, quiet=as_json)
    _show(answer, len(engine.survey.layout.layers), as_json)
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


def _show(answer: "Answer", layers: int, as_json: bool) -> None:
    if as_json:
        print_json(_facts(answer))
        return
    from rich.text import Text

    from cacheblend.cli.reports import report_table

    out = console(stderr=True)
    out.print(report_table(answer.report, layers))
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
            _facts(blended)
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
    _show(blended, len(engine.survey.layout.layers), as_json=False)
    from cacheblend.cli.reports import comparison_line

    console(stderr=True).print(comparison_line(blended.report.ttft_s, full.ttft_s, close))


def _facts(answer: "Answer") -> dict[str, Any]:
    return {
        "answer": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "report": answer.report.to_dict(),
    }
