"""Figure 5: quality and time to first token by batch size: so many requests at once, side by side."""

from collections.abc import Sequence
from typing import Any

from cacheblend.evaluation.compute import ComputeScale
from cacheblend.evaluation.methods import Method
from cacheblend.evaluation.runner import Case
from lab.paper import drawing
from lab.paper.answered import Answered, points, score
from lab.paper.compared import FULL, methods
from lab.paper.context import Context, LeftOutError, Part
from lab.paper.side_by_side import Sent, open_cases, send, store


def measure(context: Context) -> dict[str, Any]:
    """See `Part`. A method at a batch size is measured at once: an interrupted one is measured again."""
    cases, notes = open_cases(context)
    if not cases:
        raise LeftOutError("; ".join(notes))
    compared, sizes = methods(context.engine), sorted(set(context.sweeps.batch_sizes))
    answers: list[Answered] = []
    with context.kept("batch", {"methods": list(map(repr, compared))}, cases) as kept:
        resumed, keys = len(kept.items), [(size, method) for size in sizes for method in compared]
        is_stored = False
        for number, (size, method) in enumerate(keys):
            key = f"{method.label.name}, {size}"
            if not is_stored and not kept.has(key):
                store(context, cases)
                is_stored = True
            kept.get(key, lambda size=size, method=method: _run(context, method, cases, size))  # type: ignore[misc]
            context.progress("batch", number + 1, len(keys))
        for size in sizes:
            full = next(kept.value(f"{m.label.name}, {size}") for m in compared if m.label.kind == FULL)
            for method in compared:
                found = kept.value(f"{method.label.name}, {size}")
                answers += [_answered(context, method, size, *each) for each in zip(cases, found, full, strict=True)]
        return {"points": points(answers), "notes": notes, "machines": kept.machines, "resumed": resumed}


def _run(context: Context, method: Method, cases: Sequence[Case], size: int) -> list[dict[str, Any]]:
    """An answer for each case; the last batch is filled up with the first cases, whose second answers do not count."""
    padded = [case.longest for case in (list(cases) * size)[: -(-len(cases) // size) * size]]
    send(context, method, padded[:size], [0.0] * size, size)  # a warm-up
    sent: list[Sent] = []
    for start in range(0, len(padded), size):
        sent += send(context, method, padded[start : start + size], [0.0] * size, size)
    scale = ComputeScale.of(context.engine)
    return [
        {
            "ttft_s": each.ttft_s,
            "text": each.text,
            "token_ids": each.token_ids,
            "compute": scale.share(each.row_layers, each.projected_rows, len(case.longest)),
        }
        for each, case in zip(sent, cases, strict=False)
    ]


def _answered(
    context: Context, method: Method, size: int, case: Case, found: dict[str, Any], full: dict[str, Any]
) -> Answered:
    return Answered(
        case.row.category,
        (method.label.family, method.label.name),
        method.label.ratio,
        size,
        found["ttft_s"],
        score(context.scorers, found["text"], case.row.answers),
        float(found["token_ids"][:1] == full["token_ids"][:1]),
        found["compute"],
    )


PART = Part(
    "batch",
    "Batch size",
    measure,
    lambda result, title, path: drawing.sweep(result["points"], "requests at once", title, path, log=True),
    {"batch": lambda point: str(point["x"])},
)
