"""The page: passages in an order and a question, answered in three ways, and each token's KV by where it came from.

GET  /                       the page and its files
GET  /playground/passages    the model, its settings, a small library of passages, and examples that ask about them
GET  /playground/shadow      the shadow check: agreement with full prefill over time, of all requests together
POST /playground/explain     stores what is missing of a prompt; its tokens by source, the deviation of loaded ones, how
                             far the first token is from full recompute's, and what is right, where that is known
"""

import codecs
import json
from collections.abc import Generator, Iterable
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from pydantic import Field

from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.core.select.selectors import Recorded, Selector
from cacheblend.engines.hf import Passage
from cacheblend.engines.hf.document_sync import slices
from cacheblend.engines.hf.prefiller import Mode
from cacheblend.engines.settings import PROFILE_NAME, read_profile
from cacheblend.engines.shadow import agreement
from cacheblend.nano import model_path
from cacheblend.nano.examples import EXAMPLES, answer_of, notes
from cacheblend.serve.fair_queue import SLICE_TOKENS
from cacheblend.serve.keys import ApiKey
from cacheblend.serve.routes.chunks import manifest_for
from cacheblend.serve.schemas import Body, Name, Ratio, RequestDocument
from cacheblend.serve.state import Key, ServerState
from cacheblend.serve.tenants import tenant_of

EXAMPLES_FILE = Path(str(files("cacheblend.data"))) / "examples.json"
STATIC = Path(str(files("cacheblend.serve"))) / "static"
PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}
"""Of the page: nothing is loaded from elsewhere, and no script or style stands in it."""


class Explain(Body):
    """A prompt to explain, and how it is blended; a selector that is named has its default settings."""

    documents: Annotated[list[RequestDocument], Field(min_length=1, max_length=64)]
    question: str
    recompute_ratio: Ratio | None = None
    selector: Name | None = None


def add_routes(app: FastAPI, state: ServerState) -> None:
    """Adds the routes of this module to the app."""

    @app.get("/", include_in_schema=False)
    async def page() -> Any:
        return FileResponse(STATIC / "index.html", headers=PAGE_HEADERS)

    engine = state.engine
    is_shipped = engine.fingerprint == read_profile(model_path() / PROFILE_NAME).fingerprint
    library = (_notes() if is_shipped else json.loads(EXAMPLES_FILE.read_text(encoding="utf-8"))) | {
        "model": {
            "name": engine.name,
            "parameters": sum(weights.numel() for weights in engine.model.parameters()),
            "layers": engine.runtime.survey.num_layers,
            "dtype": str(engine.runtime.survey.layout.dtype).removeprefix("torch."),
            "device": engine.model.device.type,
            "is_shipped": is_shipped,
        },
        "needs_key": state.settings.keys.needs_key,
    }

    @app.get("/playground/passages", include_in_schema=False)
    async def passages() -> Any:
        """With the selector that the engine uses by itself, and its ratio now; None if it has no fixed one."""
        settings = engine.runtime.settings
        ratio = 1.0 if settings.is_full else settings.selector().share
        shown = {
            "selector": settings.config.selector,
            "recompute_ratio": ratio,
            "shadow": engine.runtime.shadow is not None,
        }
        return library | {"settings": shown}

    @app.get("/playground/shadow", include_in_schema=False)
    async def shadow(key: Key) -> dict[str, Any]:
        check = engine.runtime.shadow
        if check is None:
            return {"on": False}
        figures, settings = check.watch.figures(), check.watch.settings
        return {
            "on": True,
            "share": settings.share,
            "floor": settings.floor,
            "window": settings.rows,
            "ratio": figures.ratio,
            "compared": sum(series.compared for series in figures.series),
            "dropped": sum(figures.dropped.values()),
            "waiting": check.waiting,
            "moments": [moment._asdict() for moment in check.watch.history()],
        }

    @app.post("/playground/explain", include_in_schema=False)
    async def explain(request: Request, asked: Explain, key: Key) -> dict[str, Any]:
        found: dict[str, Any] = await state.run_serially(request, lambda: _explain(state, asked, key))
        texts = [each.text for each in asked.documents]
        return found | {"expected": _expected(asked.question, texts) if is_shipped else None}

    app.mount("/static", StaticFiles(directory=STATIC), name="static")


def _notes() -> dict[str, Any]:
    """Passages and questions of the model that ships."""
    texts = notes()
    questions = [
        {"title": each.title, "about": each.about, "text": each.question, "passages": each.order}
        | (_expected(each.question, [texts[index] for index in each.order]) or {})
        for each in EXAMPLES
    ]
    passages = [{"title": f"Note {number}", "text": text} for number, text in enumerate(texts, 1)]
    return {"passages": passages, "questions": questions}


def _expected(question: str, texts: list[str]) -> dict[str, Any] | None:
    """What is right, and the sentences that the answer needs; None if that is not known."""
    found = answer_of(question, texts)
    return found and {"answer": found.text, "places": [place._asdict() for place in found.places]}


def _explain(state: ServerState, asked: Explain, key: ApiKey) -> Generator[None, None, dict[str, Any]]:
    engine = state.engine
    state.builder()
    state.text_limit.check([asked.question, *(each.text for each in asked.documents)])
    documents = [Passage(each.text, each.title) for each in asked.documents]
    prompt = engine.chat_prompt([{"role": "user", "content": asked.question}], documents)
    state.check_size(prompt)
    tenant, model = tenant_of(key, ""), engine.runtime.follow()
    stored, planner = 0, model.planner_of(tenant)
    if state.tenants.reserve_missing(key, [manifest_for(engine, planner, chunk) for chunk in prompt.chunks]):
        for some in slices(prompt.chunks, SLICE_TOKENS):
            yield
            stored += engine.warm(some, tenant=tenant, state=model).stored
    watched = Recorded(engine.runtime.settings.selector(asked.recompute_ratio, asked.selector))  # what it decides

    def raised(ratio: float) -> Selector:
        watched.inner = engine.runtime.settings.at_least(ratio)
        return watched

    own = asked.selector is None and asked.recompute_ratio is None  # then loading controller and floor decide, too
    mode: Mode = "prefix" if own and engine.runtime.settings.is_full else "blend"
    raises = raised if own else None
    a_slice = SLICE_TOKENS * engine.runtime.survey.num_layers
    with model.prefiller.open(prompt, planner, watched, mode, raised=raises) as prefill:
        yield from prefill.slices(a_slice)
        result = prefill.result()
    with model.prefiller.open_full(prompt, planner, 1) as prefill:
        yield from prefill.slices(a_slice)
        full = prefill.result()
    report, close = result.report, agreement(result.logits, full.logits)
    return {
        "segments": _segments(state, result.plan, watched),
        "strength": _measured(watched),
        "kl": close.kl,
        "top_1": close.first,
        "first_token": state.token_name(int(result.logits.argmax())),
        "full_first_token": state.token_name(int(full.logits.argmax())),
        "layers": engine.runtime.survey.num_layers,
        "prompt_tokens": report.prompt_tokens,
        "hit_tokens": report.hit_tokens,
        "recomputed_tokens": report.recomputed_tokens,
        "stored": stored,
    }


def _segments(state: ServerState, plan: BlendPlan, watched: Recorded) -> list[dict[str, Any]]:
    """The prompt by segment: each token's text and source, and for loaded tokens a strength 0..1."""
    strengths, kept = dict[int, float](), set(watched.kept)
    by_deviation = _measured(watched) == "deviation"  # hybrid has both, on scales that cannot be compared
    for asked in watched.asked:
        values = asked.deviation if by_deviation else asked.attention
        if values is not None:  # the last layer that measured it counts
            strengths |= dict(zip(asked.positions.tolist(), values.float().tolist(), strict=True))
    highest = max(strengths.values(), default=0.0) or 1.0
    texts = _texts(map(state.token_bytes, plan.prompt.token_ids.tolist()))
    found: list[dict[str, Any]] = []
    for span in plan.spans:
        if not found or found[-1]["segment"] != span.segment:
            segment = plan.prompt.segments[span.segment]
            found.append({"segment": span.segment, "is_chunk": segment.is_chunk, "title": segment.label, "tokens": []})
        for position in range(span.start, span.stop):
            source = {Source.PREFIX: "prefix", Source.LOADED: "loaded"}.get(span.source, "fresh")
            if source == "loaded" and position in kept:
                source = "recomputed"
            strength = round(strengths.get(position, 0.0) / highest, 3)
            found[-1]["tokens"].append({"text": texts[position], "source": source, "strength": strength})
    return found


def _texts(tokens: Iterable[bytes]) -> list[str]:
    """Texts of tokens. A character that several tokens make stands with the first of them; the others have none."""
    decoder, texts, start = codecs.getincrementaldecoder("utf-8")("replace"), list[str](), 0
    for number, token in enumerate(tokens):
        start = start if decoder.getstate()[0] else number
        texts.append("")
        texts[start] += decoder.decode(token)
    return texts


def _measured(watched: Recorded) -> str:
    """What strengths measure: ``deviation``, the question's ``attention``, or "" if the selector uses neither."""
    if any(asked.deviation is not None for asked in watched.asked):
        return "deviation"
    return "attention" if any(asked.attention is not None for asked in watched.asked) else ""
