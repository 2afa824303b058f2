"""`cacheblend ask`: one answer, and what it cost."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend.cli.options import OUTPUT, AsJson, BlendOptions, DeviceOptions, ModelOptions, StoreOptions
from cacheblend.cli.output import console, print_json, status, write
from cacheblend.cli.prompt_options import AnswerOptions, PromptOptions

if TYPE_CHECKING:
    from cacheblend.core.plan.prompt import Prompt
    from cacheblend.engines.hf import Answer, BlendEngine, SamplingParams
    from cacheblend.engines.settings import BlendSettings

Compare = Annotated[
    bool, typer.Option("--compare", help="Answer by full recompute, too; stores nothing.", rich_help_panel=OUTPUT)
]


def ask(
    model: ModelOptions,
    store: StoreOptions,
    prompt: PromptOptions,
    blend: BlendOptions,
    sampling: AnswerOptions,
    device: DeviceOptions,
    compare: Compare = False,
    json: AsJson = False,
) -> None:
    """Answer a question from passages; their KV cache is loaded where the store has it.

    Passages that the store lacks are computed, and stored after the answer.
    """
    texts, question = prompt.read()
    config = blend.settings()
    if compare:
        config["capture"] = False

    from cacheblend.cli.models import open_engine

    params = sampling.params()
    with open_engine(
        model.model, store.store, config, profile=blend.profile, dtype=device.dtype, device=device.device, quiet=json
    ) as engine:
        asked = prompt.build(engine, texts, question)
        (_compare if compare else _answer)(engine, asked, params, json)


def _answer(engine: "BlendEngine", prompt: "Prompt", params: "SamplingParams", as_json: bool) -> None:
    """The answer; then passages that were not in the store are stored."""
    answer = _stream(engine, prompt, params, quiet=as_json)
    _show(answer, engine.survey.num_layers, engine.settings, as_json)
    with status("storing the missed passages ...", quiet=as_json or not answer.report.missed_tokens):
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


def _show(answer: "Answer", layers: int, settings: "BlendSettings", as_json: bool) -> None:
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
    if answer.report.changed_contents:
        out.print(f"{answer.report.changed_contents} texts were changed by the chat template", soft_wrap=True)
    for line in (*answer.report.fallbacks, *answer.report.load_timeouts):
        out.print(Text.assemble(("fallback:", "yellow"), f" {line}"))


def _compare(engine: "BlendEngine", prompt: "Prompt", params: "SamplingParams", as_json: bool) -> None:
    """Blend and full recompute on the same ids; the weights are read once before either is timed."""
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
    _show(blended, engine.survey.num_layers, engine.settings, as_json=False)
    from cacheblend.cli.reports import comparison_line

    console(stderr=True).print(comparison_line(blended.report.ttft_s, full.ttft_s, close))


def _facts(answer: "Answer", settings: "BlendSettings") -> dict[str, Any]:
    from cacheblend.core.profile import quality_settings

    return {
        "answer": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "report": answer.report.to_dict(),
        "settings": {"source": settings.source, **quality_settings(settings.config)},
    }
