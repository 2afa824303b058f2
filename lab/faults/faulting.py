"""A campaign of one engine: trials with faults, after which every request must have ended with a right answer.

A right answer is the plain one, or the one of a blend that met no fault, computed or found; at recompute ratio 1 all
are equal.
"""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.faults import damage
from lab.faults.engine import Answer, Engine, Request, is_same
from lab.faults.prompts import Asked, Texts
from lab.faults.trials import KINDS, MARK, Setting, Trial

_CHECK_LEFT_EVERY = 10
_FEW_BLOCKS = {"num_gpu_blocks_override": 44, "max_model_len": 1024}
_TWO_RANKS = {"tensor_parallel_size": 2}
SETTINGS = {
    "one rank": Setting(1.0, {"error": 20, "slow": 3, "hang": 2, "damage": 5, "removed": 2, "abort": 5}, 0.35),
    "few blocks": Setting(1.0, {"error": 4, "abort": 4, "crowd": 4}, 0.2, _FEW_BLOCKS, 40, 8, refresh_s=0.05),
    "two ranks": Setting(0.15, {"error": 20, "slow": 2, "abort": 4}, 0.3, _TWO_RANKS),
    "two ranks, ratio 1": Setting(1.0, {"error": 4, "hang": 1, "damage all": 8, "damage": 3}, 0.15, _TWO_RANKS),
}
"""What is varied over engines. At a smaller ratio an answer shows whether ranks chose the same rows; where blocks are
lost it has to be 1, since a blend of the blocks that are left has an answer of its own."""


def run(model: Path, store: Path, name: str, seed: int, count: int, first: int) -> Iterator[dict[str, Any]]:
    """Trials of an engine until `count` faults were met; a result for each.

    Args:
        model, store: folders.
        name: of the setting.
        seed: of everything drawn.
        count: faults to be met from here on.
        first: number of the first trial; the trials before it are left out.

    Yields:
        `met`: 1, or 0 if the fault lay where nothing passed; `wrong`, `hung`, `left`: counts; `what`, `longest_step_s`.
    """
    setting = SETTINGS[name]
    extra = {"store": f"file://{store}", "recompute_ratio": setting.ratio, "refresh_s": setting.refresh_s}
    options = {"enable_prefix_caching": True, "block_size": 32, "num_gpu_blocks_override": 200, **setting.engine}
    engine, texts = Engine(model, extra, **options), Texts(seed)
    pool = [texts.asked(texts.ids(texts.rng.randint(3, 110)), texts.rng.randint(2, 4)) for _ in range(10)]
    right = _right_answers(engine, texts, pool, setting)
    kept = store.with_name(f"{store.name}-kept")
    shutil.copytree(store, kept)
    number, met = first, 0
    while met < count and number < first + 3 * count:
        rng = random.Random(f"{seed} {number}")
        kind = rng.choices(list(setting.kinds), list(setting.kinds.values()))[0]
        yield {"begin": number, "kind": kind}
        trial = _trial_of(engine, store, setting, texts, rng, list(zip(pool, right, strict=True)), number)
        result = {"trial": number, "kind": kind, **_tried(trial, kind)}
        damage.restore(kept, store)
        if number % _CHECK_LEFT_EVERY == 0:
            result |= _left(engine)
        met += result["met"]
        number += 1
        yield result


def _right_answers(engine: Engine, texts: Texts, pool: list[Asked], setting: Setting) -> list[list[Answer]]:
    """Of each prompt: the plain answer, the blended one, and that of a request which finds the blended blocks.

    The last one computes the tokens behind the last full block itself, passages included, as vLLM does.
    """
    fill = texts.all_passages()
    engine.fill(fill.ids, fill.spans)
    found = []
    for number, one in enumerate(pool):
        answers = []
        for way, spans in (("plain", ()), ("blend", one.spans), ("again", one.spans)):
            if way != "again":
                engine.forget()
            name, before = f"{way}-{number}", _loaded_tokens(engine)
            with engine.patient():
                answers.append(engine.ask([Request(name, one.ids, spans, setting.answer_tokens)])[name])
            loaded, held = _loaded_tokens(engine) - before, sum(stop - start for start, stop in one.spans)
            if way == "blend" and loaded != held:  # a right answer would be missing
                raise RuntimeError(f"of prompt {number} {loaded:.0f} tokens were loaded, the store holds {held}")
        found.append(answers)
    return found


def _loaded_tokens(engine: Engine) -> float:
    return sum(value for name, value in engine.counters().items() if name.startswith("hit_tokens"))


def _trial_of(
    engine: Engine,
    store: Path,
    setting: Setting,
    texts: Texts,
    rng: random.Random,
    pool: list[tuple[Asked, list[Answer]]],
    number: int,
) -> Trial:
    """Requests for some of the prompts, the same one several times now and then; some of them are plain."""
    trial = Trial(engine, store, setting, texts, rng, [], {})
    chosen = rng.choices(pool, k=rng.randint(max(1, setting.most_requests // 3), setting.most_requests))
    for place, (asked, right) in enumerate(chosen):
        name, spans = f"{MARK}{number}-{place}", rng.choice([None, asked.spans, asked.spans])
        if place and rng.random() < 0.25:
            spans, right = (), right[:1]
        trial.requests.append(Request(name, asked.ids, spans, setting.answer_tokens))
        trial.right[name] = right
    engine.scramble(number)
    if rng.random() < 0.5:  # vLLM holds what stands in front of the first passage
        first = chosen[0][0]
        engine.ask([Request(f"{MARK}{number}-front", (*first.ids[: first.spans[0][0]], 7), (), 1)])
    return trial


def _tried(trial: Trial, kind: str) -> dict[str, Any]:
    answers = KINDS[kind](trial)
    trial.engine.settle()
    stayed = [each.name for each in trial.requests if each.name not in trial.aborted]
    wrong = {
        name: {key: [answer[key] for answer in (answers[name], *trial.right[name])] for key in ("tokens", "cached")}
        for name in stayed
        if name in answers and not any(is_same(answers[name], right) for right in trial.right[name])
    }
    return {
        "what": trial.what,
        "met": trial.met,
        "wrong": len(wrong),
        **({"answers": wrong} if wrong else {}),
        "hung": int(trial.is_hung or any(name not in answers for name in stayed)),
        "longest_step_s": round(trial.longest_step_s, 3),
    }


def _left(engine: Engine) -> dict[str, Any]:
    """What ended requests left behind: blocks of the KV cache, names in the connector."""
    for _ in range(3):
        engine.step()
    used, held = engine.used_blocks(), engine.leftovers([MARK])
    return {"left": used + len(held), "leftovers": [f"{used} blocks", *held[:5]]} if used or held else {}
