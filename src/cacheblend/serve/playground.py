"""The page: pick passages, reorder them, ask; blend and full recompute answer side by side, and one sees why.

GET  /                       the page and its files
GET  /playground/passages    a small library of passages to pick from, and questions about them
POST /playground/explain     the prompt's text by source, with the deviation of its loaded tokens; how far the first
                             token's distribution is from full recompute's
"""

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from fastapi import Depends, FastAPI, Request
from fastapi.responses import FileResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, Field

from cacheblend.core.config import BlendConfig
from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.core.select.recorded import Recorded
from cacheblend.engines.hf import Passage
from cacheblend.engines.hf.baselines import agreement, full_recompute
from cacheblend.nano.questions import draw_questions
from cacheblend.serve.errors import ApiError
from cacheblend.serve.keys import ApiKey
from cacheblend.serve.schemas import Document, Name
from cacheblend.serve.tenants import tenant_of

if TYPE_CHECKING:
    from cacheblend.serve.app import Server

LIBRARY_SEED = 4321
STATIC = Path(str(files("cacheblend.serve"))) / "static"


class Explain(BaseModel):
    """What is to be explained: a prompt, and how it is blended."""

    documents: Annotated[list[Document], Field(min_length=1, max_length=64)]
    question: str
    recompute_ratio: Annotated[float, Field(ge=0, le=1)] = 0.15
    selector: Name = "hkvd"


def add_routes(app: FastAPI, server: "Server") -> None:
    """The page and what it asks for."""
    key_of = Annotated[ApiKey, Depends(server.key_of)]

    @app.get("/", include_in_schema=False)
    async def page() -> Any:
        return FileResponse(STATIC / "index.html", headers={"Cache-Control": "no-cache"})

    @app.get("/playground", include_in_schema=False)
    async def moved() -> Any:
        return RedirectResponse("/")

    library = _library()

    @app.get("/playground/passages", include_in_schema=False)
    async def passages() -> Any:
        return library

    @app.post("/playground/explain", include_in_schema=False)
    async def explain(request: Request, asked: Explain, key: key_of) -> dict[str, Any]:
        return await server.beside(request, lambda: _explain(server, asked, key))

    app.mount("/static", StaticFiles(directory=STATIC), name="static")


def _library() -> dict[str, Any]:
    """Passages of the small world that the shipped model was trained on, and questions that need several of them."""
    rows = draw_questions(LIBRARY_SEED, 1)
    texts = {text.text: text.title for row in rows for text in row.passages}
    passages = [{"title": f"note {number}", "text": text} for number, text in enumerate(texts, 1)]
    numbers = {text: number for number, text in enumerate(texts)}
    questions = [
        {
            "text": row.question,
            "answer": row.answers[0] if row.answers else "",
            "category": row.category,
            "passages": [numbers[text.text] for text in row.passages],
        }
        for row in rows
    ]
    return {"passages": passages, "questions": questions}


def _explain(server: "Server", asked: Explain, key: ApiKey) -> dict[str, Any]:
    engine = server.engine
    if engine.builder is None:
        raise ApiError(400, "this server has no tokenizer")
    documents = [Passage(each.text, each.title) for each in asked.documents]
    prompt = engine.chat_prompt([{"role": "user", "content": asked.question}], documents)
    server.check_size(prompt)
    chosen = BlendConfig(selector=asked.selector, recompute_ratio=asked.recompute_ratio).make_selector()
    watched = Recorded(chosen)
    tenant = tenant_of(key, "")
    server.tenants.count(key)
    if server.tenants.take_room(key, sum(map(len, prompt.chunks))):
        engine.warm([segment for segment in prompt.segments if segment.is_chunk], tenant=tenant)
    with torch.no_grad(), engine.open_prefill(prompt, selector=watched, tenant=tenant) as prefilling:
        while not prefilling.advance():
            pass
        result = prefilling.result()
        report = result.report
    full = full_recompute(engine, prompt)
    close = agreement(result.logits, full.logits)
    return {
        "segments": _segments(server, result.plan, watched),
        "strength": _measured(watched),
        "kl": close.kl,
        "top_1": close.top_1,
        "first_token": server.token_text(int(result.logits.argmax())),
        "full_first_token": server.token_text(int(full.logits.argmax())),
        "prompt_tokens": report.prompt_tokens,
        "hit_tokens": report.hit_tokens,
        "recomputed_tokens": report.recomputed_tokens,
    }


def _segments(server: "Server", plan: BlendPlan, watched: Recorded) -> list[dict[str, Any]]:
    """The prompt by segment: its tokens' text, source, and strength 0..1 of those that were loaded."""
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
                {"text": server.shown(ids[position]), "source": source, "strength": round(strength, 3)}
            )
    return found


def _measured(watched: Recorded) -> str:
    """What strengths are of: ``deviation``, the question's ``attention``, or nothing where rows are chosen without."""
    if any(asked.deviation is not None for asked in watched.asked):
        return "deviation"
    return "attention" if any(asked.attention is not None for asked in watched.asked) else ""


def _strengths(watched: Recorded) -> dict[int, float]:
    """By position: deviation where it was last measured, or the question's attention."""
    found: dict[int, float] = {}
    for asked in watched.asked:
        values = asked.deviation if asked.deviation is not None else asked.attention
        if values is not None:
            found |= dict(zip(asked.positions.tolist(), values.float().tolist(), strict=True))
    return found
