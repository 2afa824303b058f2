"""The page: passages in an order and a question, answered in three ways, and each token's KV by where it came from.

GET  /                       the page and its files
GET  /playground/passages    the model, its settings, a small library of passages, and examples that ask about them
GET  /playground/shadow      the shadow check: agreement with full prefill over time, of all requests together
POST /playground/explain     stores what is missing of a prompt; its tokens by source, with the deviation of loaded
                             ones, the distance between the first token's distributions with blending and with full
                             recompute, and what is right, where that is known
"""

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import torch
from fastapi import Depends, FastAPI, Request
from fastapi.responses import FileResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles
from pydantic import Field

from cacheblend.core.fuse.result import PrefillResult
from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.recorder import Recorded
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.hf import BlendEngine, Passage
from cacheblend.engines.hf.baselines import agreement, full_recompute
from cacheblend.engines.hf.prefiller import Mode
from cacheblend.engines.hf.shadow_check import ShadowCheck
from cacheblend.engines.hf.state import ModelState
from cacheblend.engines.settings import PROFILE_NAME, read_profile
from cacheblend.nano import model_path
from cacheblend.nano.examples import EXAMPLES, answer_of, notes
from cacheblend.serve.errors import ApiError
from cacheblend.serve.keys import ApiKey
from cacheblend.serve.routes.chunks import manifest_for
from cacheblend.serve.schemas import Body, Name, RequestDocument
from cacheblend.serve.state import ServerState
from cacheblend.serve.tenants import tenant_of

STATIC = Path(str(files("cacheblend.serve"))) / "static"
PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}
"""Of the page: nothing is loaded from elsewhere, and no script or style stands in it."""


class Explain(Body):
    """A prompt to explain, and how it is blended.

    Attributes:
        documents: the passages, each a chunk.
        question: asked about them.
        recompute_ratio: overrides the engine's ratio.
        selector: overrides the engine's selector; uses the selector's default settings.
    """

    documents: Annotated[list[RequestDocument], Field(min_length=1, max_length=64)]
    question: str
    recompute_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    selector: Name | None = None


def add_routes(app: FastAPI, state: ServerState) -> None:
    """Adds the routes of this module to the app."""
    Key = Annotated[ApiKey, Depends(state.authenticate)]  # noqa: N806

    @app.get("/", include_in_schema=False)
    async def page() -> Any:
        return FileResponse(STATIC / "index.html", headers=PAGE_HEADERS)

    @app.get("/playground", include_in_schema=False)
    async def moved() -> Any:
        return RedirectResponse("/")

    library = _library() | {"model": _model(state.engine), "needs_key": bool(state.settings.keys.keys)}

    @app.get("/playground/passages", include_in_schema=False)
    async def passages() -> Any:
        return library | {"settings": _model_settings(state.engine)}

    @app.get("/playground/shadow", include_in_schema=False)
    async def shadow(key: Key) -> dict[str, Any]:
        return _shadow(state.engine.shadow)

    @app.post("/playground/explain", include_in_schema=False)
    async def explain(request: Request, asked: Explain, key: Key) -> dict[str, Any]:
        return await state.run_serially(request, lambda: _explain(state, asked, key))

    app.mount("/static", StaticFiles(directory=STATIC), name="static")


def _library() -> dict[str, Any]:
    """Passages of the kind that the shipped model was trained on, and examples: questions about them in an order."""
    texts = notes()
    questions = []
    for each in EXAMPLES:
        question = {"title": each.title, "about": each.about, "text": each.question, "passages": each.order}
        questions.append(question | (_expected(each.question, [texts[index] for index in each.order]) or {}))
    passages = [{"title": f"Note {number}", "text": text} for number, text in enumerate(texts, 1)]
    return {"passages": passages, "questions": questions}


def _expected(question: str, texts: list[str]) -> dict[str, Any] | None:
    """What is right, and the sentences that the answer needs; None if that is not known."""
    found = answer_of(question, texts)
    return found and {"answer": found.text, "places": [place._asdict() for place in found.places]}


def _model(engine: BlendEngine) -> dict[str, Any]:
    """What the page says of the model."""
    return {
        "name": engine.name,
        "parameters": sum(weights.numel() for weights in engine.model.parameters()),
        "layers": len(engine.survey.layout.layers),
        "dtype": str(engine.survey.layout.dtype).removeprefix("torch."),
        "device": engine.model.device.type,
        "is_shipped": engine.fingerprint == read_profile(model_path() / PROFILE_NAME).fingerprint,
    }


def _model_settings(engine: BlendEngine) -> dict[str, Any]:
    """The selector that the engine uses by itself, and its ratio at present; None if it has no fixed one."""
    settings = engine.settings
    ratio = 1.0 if settings.is_full else settings.selector().share
    shadow = engine.shadow is not None
    return {"selector": settings.config.selector, "recompute_ratio": ratio, "shadow": shadow}


def _shadow(shadow: ShadowCheck | None) -> dict[str, Any]:
    """What the page draws; ``on`` is false without a check."""
    if shadow is None:
        return {"on": False}
    figures, settings = shadow.watch.figures(), shadow.watch.settings
    return {
        "on": True,
        "share": settings.share,
        "floor": settings.floor,
        "window": settings.rows,
        "ratio": figures.ratio,
        "compared": sum(series.compared for series in figures.series),
        "dropped": sum(figures.dropped.values()),
        "waiting": shadow.waiting,
        "moments": [moment._asdict() for moment in shadow.watch.history()],
    }


def _explain(state: ServerState, asked: Explain, key: ApiKey) -> dict[str, Any]:
    engine = state.engine
    if engine.builder is None:
        raise ApiError(400, "this server has no tokenizer")
    state.text_limit.check([asked.question, *(each.text for each in asked.documents)])
    documents = [Passage(each.text, each.title) for each in asked.documents]
    prompt = engine.chat_prompt([{"role": "user", "content": asked.question}], documents)
    state.check_size(prompt)
    tenant, model = tenant_of(key, ""), engine.follow()
    stored, planner = 0, model.planner_of(tenant)
    if state.tenants.reserve_missing(key, [manifest_for(engine, planner, chunk) for chunk in prompt.chunks]):
        stored = engine.warm(prompt.chunks, tenant=tenant, state=model).stored
    result, watched = _recorded_prefill(engine, model, prompt, asked, tenant)
    report = result.report
    full = full_recompute(engine, prompt)
    close = agreement(result.logits, full.logits)
    return {
        "segments": _segments(state, result.plan, watched),
        "strength": _measured(watched),
        "kl": close.kl,
        "top_1": close.top_1,
        "first_token": state.token_text(int(result.logits.argmax())),
        "full_first_token": state.token_text(int(full.logits.argmax())),
        "prompt_tokens": report.prompt_tokens,
        "hit_tokens": report.hit_tokens,
        "recomputed_tokens": report.recomputed_tokens,
        "stored": stored,
        "expected": _expected(asked.question, [each.text for each in asked.documents]),
    }


def _recorded_prefill(
    engine: BlendEngine, model: ModelState, prompt: Prompt, asked: Explain, tenant: str
) -> tuple[PrefillResult, Recorded]:
    """The prefill as a request with the same settings runs it, and what its selector decided."""
    watched = Recorded(engine.settings.selector(asked.recompute_ratio, asked.selector))

    def raised(ratio: float) -> Selector:
        watched.inner = engine.settings.at_least(ratio)
        return watched

    own = asked.selector is None and asked.recompute_ratio is None  # then loading controller and floor decide, too
    planner, raises = model.planner_of(tenant), raised if own else None
    mode: Mode = "prefix" if own and engine.settings.is_full else "blend"
    with torch.no_grad(), model.prefiller.open(prompt, planner, watched, mode, raised=raises) as prefill:
        while not prefill.advance():
            pass
        return prefill.result(), watched


def _segments(state: ServerState, plan: BlendPlan, watched: Recorded) -> list[dict[str, Any]]:
    """The prompt by segment: each token's text and source, and for loaded tokens a strength 0..1."""
    strengths, kept = _strengths(watched), set(watched.kept)
    highest = max(strengths.values(), default=0.0) or 1.0
    ids = plan.prompt.token_ids.tolist()
    found: list[dict[str, Any]] = []
    for span in plan.spans:
        if not found or found[-1]["segment"] != span.segment:
            segment = plan.prompt.segments[span.segment]
            found.append({"segment": span.segment, "is_chunk": segment.is_chunk, "title": segment.label, "tokens": []})
        for position in range(span.start, span.stop):
            source = {Source.PREFIX: "prefix", Source.LOADED: "loaded"}.get(span.source, "fresh")
            if source == "loaded" and position in kept:
                source = "recomputed"
            strength = strengths.get(position, 0.0) / highest
            found[-1]["tokens"].append(
                {"text": state.token_label(ids[position]), "source": source, "strength": round(strength, 3)}
            )
    return found


def _measured(watched: Recorded) -> str:
    """What strengths measure: ``deviation``, the question's ``attention``, or "" if the selector uses neither."""
    if any(asked.deviation is not None for asked in watched.asked):
        return "deviation"
    return "attention" if any(asked.attention is not None for asked in watched.asked) else ""


def _strengths(watched: Recorded) -> dict[int, float]:
    """By position what `_measured` names: the deviation at the last layer that measured it, or the attention."""
    found: dict[int, float] = {}
    by_deviation = _measured(watched) == "deviation"  # hybrid has both, on scales that cannot be compared
    for asked in watched.asked:
        values = asked.deviation if by_deviation else asked.attention
        if values is not None:
            found |= dict(zip(asked.positions.tolist(), values.float().tolist(), strict=True))
    return found
