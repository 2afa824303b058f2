"""What compressing stored KV does to answers.

The quality suite's rows of one seed on the model that ships, blended as its profile says, once for each codec: how
often the first token and the whole answer equal those of uncompressed KV, how far the distribution of the first token
moves, and the share of right answers. Full reuse is measured as well: it recomputes nothing that compression harmed.
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from typing import Any

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.codec import CODECS
from cacheblend.core.select.selectors import NoRows
from cacheblend.data import QuestionRow
from cacheblend.engines.hf import BlendEngine, SamplingParams
from cacheblend.engines.hf.baselines import finish, full_recompute, fused
from cacheblend.engines.provenance import stamp
from cacheblend.engines.shadow import agreement
from cacheblend.evaluation.scorers import ExactMatch, best
from cacheblend.nano import model_path
from lab.bench import Advance, silent
from lab.nano.questions import draw_questions
from lab.suite.suite import SETTINGS, Suite

SUITE = Suite()
STORE_BYTES = 1 << 28


def run(seed: int = SUITE.seeds[0], limit: int | None = None, advance: Advance = silent) -> dict[str, Any]:
    """Asks the first `limit` rows of a seed of the suite with every codec; `figures` beside all shares."""
    if seed not in SUITE.seeds:
        raise InvalidInputError(f"the suite has no seed {seed}; there are {', '.join(map(str, SUITE.seeds))}")
    asked = draw_questions(seed, SUITE.per_category)[:limit]
    with ExitStack() as stack:
        plain = stack.enter_context(BlendEngine.from_pretrained(model_path(), store="memory"))
        engines = {"raw": plain}
        for codec in CODECS:
            if codec != "raw":
                config = replace(plain.config, codec=codec)
                engine = BlendEngine(
                    plain.model, plain.tokenizer, store=plain.store, config=config, fingerprint=plain.fingerprint
                )
                engines[codec] = stack.enter_context(engine)
        lines = _measure(engines, asked, advance)
        selector = plain.runtime.settings.selector()
    shares = []  # by way and codec, in %; KL in nats
    for how, codec in product(("blend", "reuse"), CODECS):
        of = [line for line in lines if (line["how"], line["codec"]) == (how, codec)]
        means = {name: statistics.mean(line[name] for line in of) for name in ("top_1", "kl", "same_answer", "right")}
        shares.append({"how": how, "codec": codec, "questions": len(of)})
        shares[-1] |= {name: mean if name == "kl" else 100 * mean for name, mean in means.items()}
    return {
        "figures": {
            f"{share['codec']}_top_1": share["top_1"]
            for share in shares
            if share["how"] == "blend" and share["codec"] != "raw"
        },
        "full_right": 100 * statistics.mean(line["right"] for line in lines if line["how"] == "full"),
        "arms": shares,
        "selector": repr(selector),
        "data": f"the suite nano, main, seed {seed}: {len(asked)} rows",
        "categories": dict(Counter(row.category for row in asked)),
        **stamp(),
    }


def _measure(engines: dict[str, BlendEngine], rows: Sequence[QuestionRow], advance: Advance) -> list[dict[str, Any]]:
    """An entry for each row and each way to answer it; the engines, by codec, are on one store."""
    plain = engines["raw"]
    selectors = {"blend": plain.runtime.settings.selector(), "reuse": NoRows()}
    layout, params = SETTINGS.template, SamplingParams(max_new_tokens=SETTINGS.max_tokens)
    found = []
    for number, row in enumerate(rows):
        prompt = plain.prompt(layout.prompt(plain, row.passages, row.question))
        for how, selector in selectors.items():
            wanted = None
            for codec, engine in engines.items():
                engine.warm(prompt.chunks)
                first = fused(engine, prompt, selector)
                answer, ids = finish(engine, prompt, first, params)
                wanted = wanted or (first.logits, ids)
                close, right = agreement(first.logits, wanted[0]), best(ExactMatch(), answer, row.answers)
                line = {"how": how, "codec": codec, "top_1": close.first, "kl": close.kl}
                found.append(line | {"same_answer": ids == wanted[1], "right": right})
        full = finish(plain, prompt, full_recompute(plain, prompt), params)[0]
        found.append({"how": "full", "codec": "raw", "right": best(ExactMatch(), full, row.answers)})
        plain.store.prune(STORE_BYTES)
        advance(number + 1, len(rows))
    return found
