"""What compressing stored KV does to answers: `python benchmarks/codecs.py --json FILE`.

The quality suite's rows of one seed on the model that ships, blended as its profile has it, once for each codec: how
often the first token and the whole answer are those of uncompressed KV, how far the first token's distribution moves,
and the share of right answers. Full reuse beside it, where nothing is recomputed that compression could have harmed.
"""

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cacheblend.core.plan.codec import CODECS
from cacheblend.core.select.selectors import NoRows
from cacheblend.data import QuestionRow
from cacheblend.engines import provenance
from cacheblend.engines.hf import BlendEngine, Passage, SamplingParams
from cacheblend.engines.hf.baselines import agreement, finish, full_recompute, fused
from cacheblend.evaluation.scorers import ExactMatch, best
from cacheblend.evaluation.suite import SETTINGS, Suite
from cacheblend.nano import model_path
from cacheblend.nano.questions import draw_questions

SUITE = Suite()


def measure(engines: dict[str, BlendEngine], rows: Sequence[QuestionRow]) -> list[dict[str, Any]]:
    """A line a question and arm."""
    plain = engines["raw"]
    selectors = {"blend": plain.settings.selector(), "reuse": NoRows()}
    layout, params = SETTINGS.template.layout, SamplingParams(max_new_tokens=SETTINGS.max_tokens)
    found = []
    for number, row in enumerate(rows):
        passages = [Passage(text.text, text.title) for text in row.passages]
        prompt = plain.prompt(layout.prompt(plain, passages, row.question))
        for how, selector in selectors.items():
            wanted = None
            for codec, engine in engines.items():
                engine.warm(prompt.chunks)
                first = fused(engine, prompt, selector)
                logits = first.logits
                answer, ids = finish(engine, prompt, first, params)
                wanted = wanted or (logits, ids)
                close = agreement(logits, wanted[0])
                found.append(
                    {
                        "row": number,
                        "category": row.category,
                        "how": how,
                        "codec": codec,
                        "top_1": close.top_1,
                        "kl": close.kl,
                        "same_answer": ids == wanted[1],
                        "right": best(ExactMatch(), answer, row.answers),
                    }
                )
        full = finish(plain, prompt, full_recompute(plain, prompt), params)[0]
        found.append({"row": number, "how": "full", "codec": "raw", "right": best(ExactMatch(), full, row.answers)})
        plain.store.prune(1 << 28)
    return found


def summary(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each way and codec, in %, KL in nats."""
    found = []
    for how in ("blend", "reuse"):
        for codec in CODECS:
            of = [line for line in lines if (line["how"], line["codec"]) == (how, codec)]
            found.append(
                {
                    "how": how,
                    "codec": codec,
                    "questions": len(of),
                    "top_1": 100 * statistics.mean(line["top_1"] for line in of),
                    "kl": statistics.mean(line["kl"] for line in of),
                    "same_answer": 100 * statistics.mean(line["same_answer"] for line in of),
                    "right": 100 * statistics.mean(line["right"] for line in of),
                }
            )
    return found


def table(rows: list[dict[str, Any]], full: float) -> Table:
    out = Table(
        title=f"{rows[0]['questions']} questions; full recompute is right in {full:.1f} %",
        title_justify="left",
        caption="1st, answer: % the same as with uncompressed KV; KL of the first token, nats; right: % exact match",
        caption_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
    )
    for column in ("", "codec", "1st", "KL", "answer", "right"):
        out.add_column(column, justify="left" if column in ("", "codec") else "right", no_wrap=True)
    for row in rows:
        out.add_row(
            row["how"],
            row["codec"],
            f"{row['top_1']:.1f}",
            f"{row['kl']:.2g}",
            f"{row['same_answer']:.1f}",
            f"{row['right']:.1f}",
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, choices=SUITE.seeds, default=SUITE.seeds[0], help="of the suite")
    parser.add_argument("--rows", type=int, help="of the seed, the first ones; all of them otherwise")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.rows is not None and options.rows < 1:
        parser.error("--rows must be at least 1")
    asked = draw_questions(options.seed, SUITE.per_category)[: options.rows]
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
        lines = measure(engines, asked)
        profile = plain.settings.selector()
    rows = summary(lines)
    full = 100 * statistics.mean(line["right"] for line in lines if line["how"] == "full")
    figures = {f"{row['codec']}_top_1": row["top_1"] for row in rows if row["how"] == "blend" and row["codec"] != "raw"}
    Console().print(table(rows, full))
    if options.json is not None:
        result = {
            "figures": figures,
            "full_right": full,
            "arms": rows,
            "selector": repr(profile),
            "data": f"the suite nano, main, seed {options.seed}: {len(asked)} rows",
            "categories": dict(Counter(row.category for row in asked)),
            "machine": provenance.machine(),
            "versions": provenance.versions(),
            "commit": provenance.commit(),
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
