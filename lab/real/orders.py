"""What else answers of pretrained weights depend on: on what was asked before, which they must not, and on the order of
the passages, beside full prefill's own share.

Two engines fill their stores with the same passages by what they are asked: one row after the other, or from the last
to the first with each row's passages reversed. Then both blend each row's passages in several orders. Both are asked
the first row first: the text in front of all passages is kept as the first prompt's pass computed it, as any prefix
cache does, and in bfloat16 the length of that prompt decides how it is rounded.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache

from cacheblend.core.fuse.prefill import PrefillResult
from cacheblend.data import QuestionRow, read_questions
from cacheblend.engines.hf import BlendEngine, SamplingParams
from cacheblend.engines.hf.baselines import full_recompute
from cacheblend.engines.hf.recurrent import fill_cache
from cacheblend.engines.provenance import stamp
from cacheblend.evaluation.runner import Case, Settings, make_cases
from lab.bench import Advance, silent
from lab.real.pretrained import made_folder
from lab.real.quality import OURS, TEMPLATE, Way, go_on, rows_of
from lab.settings import Real

ORDERS = 5


@torch.no_grad()
def run(asked: Real, advance: Advance = silent) -> dict[str, Any]:
    """`figures`: answers, and the share of them that another history, or another order of the passages, changes."""
    way = Way.of(asked.way[0] if asked.way else OURS["15"])
    config, model, counts, done = Way.config(way.anchor), asked.model or made_folder(), Counter[str](), 0
    rows = [rows_of([*read_questions(file)], asked.part)[: asked.rows] for file in asked.data]
    for own in rows:
        with (
            BlendEngine.from_pretrained(model, store="memory", config=config) as one,
            BlendEngine.from_pretrained(model, store="memory", config=config) as other,
        ):
            cases = [make_cases(one, Settings(TEMPLATE), list(in_orders(row))) for row in own]
            cases = [case for case in cases if all(each.prompts for each in case)]
            for engine in (one, other):
                _ask(engine, [case[0] for case in cases[:1]])
            _ask(one, [case[0] for case in cases])
            _ask(other, [case[-1] for case in reversed(cases)])
            for case in cases:
                counts += _compare(one, other, case, way, asked.answer_tokens)
                advance(done := done + 1, sum(map(len, rows)))
    orders = max(1, counts["orders"])
    figures = {
        "answers": counts["answers"],
        "history_variation": counts["history"],
        "order_variation": counts["order"] / orders,
        "order_variation_full": counts["order_full"] / orders,
    }
    return {"figures": figures, "way": way.name} | stamp()


def in_orders(row: QuestionRow) -> Iterator[QuestionRow]:
    """The row with its passages as they are, in random orders, and reversed."""
    draw = random.Random(row.question)
    yield row
    for _ in range(ORDERS - 2):
        yield replace(row, passages=tuple(draw.sample(row.passages, len(row.passages))))
    yield replace(row, passages=row.passages[::-1])


def _ask(engine: BlendEngine, cases: Sequence[Case]) -> None:
    """Has the passages stored by requests."""
    for case in cases:
        engine.generate(case.longest, SamplingParams(max_new_tokens=1))
        engine.flush()


def _compare(one: BlendEngine, other: BlendEngine, orders: Sequence[Case], way: Way, tokens: int) -> Counter[str]:
    answers, full = [], []
    counts = Counter(answers=len(orders), orders=len(orders) - 1)
    for case in orders:
        prompt, found = case.longest, []
        for engine in (one, other):
            result = engine.prefill(prompt, selector=way.make())
            if result.report.missed_tokens:
                raise RuntimeError(f"{result.report.missed_tokens} tokens that were asked for before are not stored")
            found.append(result)
        told = found[:1] if _same(*found) else found
        mine, *its = (_answer(one, fill_cache(one.model, list(each.kv)), each.logits, tokens) for each in told)
        counts["history"] += its not in ([], [mine])
        answers.append(mine)
        start = full_recompute(one, prompt)
        assert isinstance(start.kv, DynamicCache)
        full.append(_answer(one, start.kv, start.logits, tokens))
    counts["order"] = sum(answer != answers[0] for answer in answers)
    counts["order_full"] = sum(answer != full[0] for answer in full)
    return counts


def _same(one: PrefillResult, other: PrefillResult) -> bool:
    pairs = zip(one.kv, other.kv, strict=True)
    return all(torch.equal(mine.keys, its.keys) and torch.equal(mine.values, its.values) for mine, its in pairs)


def _answer(engine: BlendEngine, cache: DynamicCache, logits: torch.Tensor, tokens: int) -> list[int]:
    expected: list[int] = go_on(engine, cache, logits.reshape(1, -1).float(), tokens).argmax(-1).tolist()
    return expected
