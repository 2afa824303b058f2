"""`cacheblend ask`: one answer, and what it cost."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend.cli.blending import (
    CheckLayers,
    Measure,
    ProfileFile,
    Ratios,
    SelectorName,
    Threshold,
    blending_settings,
)
from cacheblend.cli.options import (
    MODEL,
    OUTPUT,
    AnchorRule,
    AsJson,
    BlockSize,
    Capture,
    Chat,
    Codec,
    CostModelFile,
    Device,
    Dtype,
    ModelFolder,
    Salt,
    System,
)
from cacheblend.cli.output import console, print_json, status, write
from cacheblend.cli.prompts import Data, Passages, Question, RowNumber, build_prompt, read_inputs

if TYPE_CHECKING:
    from cacheblend.core.plan.prompt import Prompt
    from cacheblend.engines.hf import Answer, BlendEngine, SamplingParams
    from cacheblend.engines.settings import Settings

Store = Annotated[
    str, typer.Option("--store", "-s", help="A folder, its file:// URL, or memory.", rich_help_panel=MODEL)
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Of the answer.", rich_help_panel=OUTPUT)]
Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy.", rich_help_panel=OUTPUT)]
Seed = Annotated[int | None, typer.Option("--seed", help="Of the drawing.", rich_help_panel=OUTPUT)]
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
    codec: Codec = "raw",
    salt: Salt = "",
    cost_model: CostModelFile = None,
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
    texts, asked = read_inputs(question, passage or [], data, row)

    from cacheblend.cli.models import open_engine
    from cacheblend.engines.hf import Passage, SamplingParams

    config = blending_settings(ratio, selector, check_layer, measure, threshold) | {
        "anchor": anchor,
        "block_size": block_size,
        "codec": codec,
        "salt": salt,
        "cost_model": None if cost_model is None else str(cost_model),
        "capture": capture and not compare,
    }
    params = SamplingParams(max_new_tokens=max_tokens, temperature=temperature, seed=seed)
    with open_engine(model, store, config, profile=profile, dtype=dtype, device=device, quiet=json) as engine:
        prompt = build_prompt(engine, [Passage(*text) for text in texts], asked, system, chat)
        (_compare if compare else _answer)(engine, prompt, params, json)


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
    if answer.report.decision:
        out.print(f"loading controller: {answer.report.decision}", soft_wrap=True)
    out.print(settings_line(settings), soft_wrap=True)
    for line in answer.report.fallbacks:
        out.print(Text.assemble(("fallback:", "yellow"), f" {line}"))


def _compare(engine: "BlendEngine", prompt: "Prompt", params: "SamplingParams", as_json: bool) -> None:
    """Blend and full recompute on the same ids, the weights touched before either is timed."""
    from cacheblend.engines.hf.baselines import agreement, finish, full_recompute, touch

    touch(engine, prompt)
    if not as_json:
        console().print("blend", style="bold")
    blended = _stream(engine, prompt, params, quiet=as_json)
    full = full_recompute(engine, prompt)
    text, ids = finish(engine, prompt, full, params)
    close = agreement(engine.prefill(prompt).logits, full.logits)
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
