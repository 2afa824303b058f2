"""`cacheblend ask`: one answer, and what it cost."""

from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from cacheblend.cli import options, output
from cacheblend.cli.option_groups import option

if TYPE_CHECKING:
    from cacheblend.core.plan.prompt import Prompt
    from cacheblend.core.report import BlendReport
    from cacheblend.engines.hf import Answer, BlendEngine, SamplingParams
    from cacheblend.engines.settings import BlendSettings

_SOURCES = {
    "prefix": "loaded, exact prefix",
    "moved": "loaded, moved behind an edit",
    "memory": "loaded from memory",
    "disk": "loaded from disk",
    "redis": "loaded from Redis",
    "s3": "loaded from the bucket",
}


def ask(
    model: options.ModelOptions,
    store: options.StoreOptions,
    prompt: options.PromptOptions,
    blend: options.BlendOptions,
    sampling: options.AnswerOptions,
    device: options.DeviceOptions,
    compare: bool = option(False, "Answer by full recompute, too; stores nothing.", panel=options.OUTPUT),
    json: options.AsJson = False,
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
    with open_engine(model.model, store.store, config, device, profile=blend.profile, quiet=json) as engine:
        asked = prompt.build(engine, texts, question)
        if compare:
            _compare(engine, asked, params, json)
            return
        answer = _stream(engine, asked, params, quiet=json)
        _show(answer, engine.runtime.survey.num_layers, engine.runtime.settings, json)
        with output.status("storing the missed passages ...", quiet=json or not answer.report.missed_tokens):
            engine.flush()


def _stream(engine: "BlendEngine", prompt: "Prompt", params: "SamplingParams", *, quiet: bool) -> "Answer":
    """The answer, written to stdout as it comes unless `quiet`."""
    for delta in engine.stream(prompt, params):
        if not quiet:
            output.write(delta.text)
    assert delta.answer is not None
    if not quiet:
        output.write("\n")
    return delta.answer


def _compare(engine: "BlendEngine", prompt: "Prompt", params: "SamplingParams", as_json: bool) -> None:
    """Blend and full recompute on the same ids; the weights are read once before either is timed."""
    from cacheblend.core.names import as_token_ids, equal_length
    from cacheblend.engines.hf.baselines import finish, full_recompute, touch
    from cacheblend.engines.shadow import agreement

    touch(engine, prompt)
    if not as_json:
        output.console().print("blend", style="bold")
    blended = _stream(engine, prompt, params, quiet=as_json)
    full = full_recompute(engine, prompt)
    text, ids = finish(engine, prompt, full, params)
    logits, wanted = engine.prefill(prompt).logits.double().cpu(), full.logits.double().cpu()
    close, error = agreement(logits, wanted), float((logits - wanted).abs().max() / wanted.std().clamp(min=1e-12))
    speedup = full.ttft_s / blended.report.ttft_s
    recomputed = {"answer": text, "token_ids": ids, "ttft_s": full.ttft_s, "speedup": speedup}
    recomputed["first_token"] = {"kl": close.kl, "top_1": close.first, "max_logit_error": error}
    if not as_json:
        output.console().print("full recompute", style="bold")
        output.write(f"{text}\n")
    _show(blended, engine.runtime.survey.num_layers, engine.runtime.settings, as_json, {"full_recompute": recomputed})
    if not as_json:
        same = "the same first token" if close.first else "another first token"
        alike = equal_length(as_token_ids(blended.token_ids), as_token_ids(ids))
        is_equal = alike == len(blended.token_ids) == len(ids)
        answers = "the answers are the same" if is_equal else f"the answers differ from token {alike + 1} on"
        times = f"blend {output.seconds_text(blended.report.ttft_s)}, full recompute {output.seconds_text(full.ttft_s)}"
        faster = (f"{speedup:.1f} x", "bold green")
        line = Text.assemble(f"first token: {times}: ", faster, f"; {same}, KL {close.kl:.2g} nats; {answers}")
        output.console(stderr=True).print(line)


def _show(
    answer: "Answer", layers: int, settings: "BlendSettings", as_json: bool, further: dict[str, Any] | None = None
) -> None:
    from cacheblend.core.profile import quality_settings

    report = answer.report
    if as_json:
        facts = {
            "answer": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "report": report.to_dict(),
            "settings": {"source": settings.source, **quality_settings(settings.config)},
        }
        output.print_json(facts | (further or {}))
        return
    out = output.console(stderr=True)
    out.print(_table(report, layers))
    if report.decision:
        out.print(f"loading controller: {report.decision}", soft_wrap=True)
    off = settings.profile is not None and not settings.profile.blend
    out.print(Text.assemble("settings: ", (settings.source, "yellow" if off else "")), soft_wrap=True)
    if report.changed_contents:
        out.print(f"{report.changed_contents} texts were changed by the chat template", soft_wrap=True)
    if report.missed_tokens and not report.loaded_tokens:
        stores = settings.config.capture
        how = "they are being stored" if stores else "`cacheblend warm` stores them; this request stores nothing"
        out.print(f"no passage was stored: {how}", soft_wrap=True)
    if report.near_miss_tokens:
        out.print(
            f"{report.near_miss_tokens} of the missed tokens are stored with another beginning or end: a title in "
            "front of a passage, or a blank stripped from it, makes another passage of it",
            soft_wrap=True,
        )
    for line in (*report.fallbacks, *report.load_timeouts):
        out.print(Text.assemble(("fallback:", "yellow"), f" {line}"))


def _table(report: "BlendReport", layers: int) -> Table:
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
    left = [(name, str(count), output.share_text(count, whole)) for name, count, whole in tokens]
    right = [(name, output.seconds_text(seconds)) for name, seconds in times]
    for one, other in zip_longest(left, right, fillvalue=("", "", "")):
        table.add_row(*one, *other[:2])
    return table
