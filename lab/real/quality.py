"""How near settings are to full prefill on pretrained weights and real questions: KL and log-likelihood of the model's
own answers, and compute.

The greedy answer of a full prefill is given to the KV cache that a setting made, token by token, and what it expects of
each token is compared with what full prefill expects. So all tokens of an answer count, also where the first differs.
The tune rows are the first of a file, and all others whose answer stands in the same passage as one of theirs.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache

from cacheblend.cli.option_groups import numbers
from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.select.selection import SelectorChoice
from cacheblend.core.select.selectors import Selector
from cacheblend.data import QuestionRow, read_questions
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.baselines import full_recompute
from cacheblend.engines.hf.recurrent import fill_cache
from cacheblend.engines.provenance import stamp
from cacheblend.evaluation.compute import ComputeScale
from cacheblend.evaluation.demo import PRETRAINED
from cacheblend.evaluation.runner import Case, Settings, make_cases, store_passages
from cacheblend.evaluation.scorers import Contains, best
from cacheblend.evaluation.templates import Template
from lab.bench import Advance, picture, plain_table, silent
from lab.real.pretrained import made_folder
from lab.settings import Real

TEMPLATE = Template(question="Answer the question with a few words from the text.\nQuestion: {question}")
BASE = "bos none"
"""Full reuse of chunks that were computed behind BOS: what is taken back is a share of its loss."""
RESAMPLES = 2000
FIRST_TUNE = 80


class Way(NamedTuple):
    """A setting: ``text head:correction=0.5 0.04`` is an anchor, a selector and a ratio."""

    anchor: str
    selector: str
    ratio: float

    @property
    def name(self) -> str:
        return f"{self.anchor} {self.selector}" + ("" if self.selector in ("none", "all") else f" {self.ratio:g}")

    @staticmethod
    def of(text: str) -> "Way":
        try:
            anchor, selector, *ratio = text.split()
            way = Way(anchor, selector, float(" ".join(ratio) or 0))  # of several words no number is made
        except ValueError:
            raise InvalidInputError(f"--way {text!r}: expected an anchor, a selector and a ratio") from None
        if way.anchor not in ("none", "bos", "text"):
            raise InvalidInputError(f"--way {text!r}: the anchor is none, bos or text")
        way.make()  # refuses wrong settings before anything is computed
        return way

    @staticmethod
    def config(anchor: str) -> BlendConfig:
        """Of engines with this anchor."""
        return BlendConfig(anchor=anchor, discover=False)  # type: ignore[arg-type]

    def make(self) -> Selector:
        name, _, settings = self.selector.partition("@")  # check layers, if any
        layers = numbers("--way", settings.replace("+", ","), int) if settings else None
        return SelectorChoice.parse(name).selector((self.ratio,), layers)


OURS = {
    "15": "text head:recency=1,correction=0.5 0.165",
    "10": "text head:recency=1,correction=0.5 0.11",
    "05": "text head:recency=1,correction=0.5 0.055",
}
"""At most .20, .15 and .10 of a full prefill's compute, named by the ratio that this is about."""
WAYS = (
    *(BASE, "text none"),
    *OURS.values(),
    *("text head 0.165", "text head 0.055", "text random 0.165", "text random 0.055"),
    *("bos head 0.165", "bos hkvd@1 0.13"),
)


def run(asked: Real, advance: Advance = silent) -> dict[str, Any]:
    """Measures every way on every row; of each row its answer is made once."""
    ways = {way.name: way for way in map(Way.of, dict.fromkeys([BASE, *(asked.way or WAYS)]))}
    rows = {file.stem: rows_of([*read_questions(file)], asked.part)[: asked.rows] for file in asked.data}
    model, done, total = asked.model or made_folder(), 0, sum(map(len, rows.values()))
    found: dict[str, list[dict[str, Any]]] = {}
    for name, own in rows.items():
        found[name] = []
        with ExitStack() as stack:
            engines = {
                anchor: stack.enter_context(
                    BlendEngine.from_pretrained(model, store="memory", config=Way.config(anchor))
                )
                for anchor in dict.fromkeys(way.anchor for way in ways.values())
            }
            for case in make_cases(engines["bos"], Settings(TEMPLATE), own):
                if case.prompts:
                    found[name].append(_measure(engines, case, ways, asked.answer_tokens, first=not found[name]))
                advance(done := done + 1, total)
    named = asked.model.name if asked.model else PRETRAINED
    summary = {"model": named, "part": asked.part, "answer_tokens": asked.answer_tokens}
    by_file = {name: summarise({name: own})["ways"] for name, own in found.items()}
    return summary | summarise(found) | {"files": by_file} | stamp()


def rows_of(rows: Sequence[QuestionRow], part: str) -> list[QuestionRow]:
    """The rows of a part, ``tune`` or ``test``."""
    tuned = {holding(row) for row in rows[:FIRST_TUNE]}
    return [row for row in rows if (holding(row) in tuned) == (part == "tune")]


def holding(row: QuestionRow) -> str:
    """The passage that holds the answer, the first in the alphabet if several do."""
    return min(holding_any(row) or [passage.text for passage in row.passages])


def holding_any(row: QuestionRow) -> list[str]:
    """All passages that hold an answer."""
    texts = [passage.text for passage in row.passages]
    return [text for text in texts if any(answer.lower() in text.lower() for answer in row.answers)]


@torch.no_grad()
def _measure(
    engines: Mapping[str, BlendEngine], case: Case, ways: Mapping[str, Way], tokens: int, first: bool
) -> dict[str, Any]:
    prompt, engine, answers = case.longest, engines["bos"], case.row.answers
    assert engine.runtime.builder is not None
    scale, decode = ComputeScale.of(engine), engine.runtime.builder.decode
    start = full_recompute(engine, prompt)
    assert isinstance(start.kv, DynamicCache)
    full = torch.log_softmax(go_on(engine, start.kv, start.logits.reshape(1, -1).float(), tokens), -1)
    ids = full.argmax(-1)
    measured: dict[str, Any] = {
        "passage": hashlib.sha256(holding(case.row).encode()).hexdigest()[:8],
        "full": {
            "log_likelihood": _likelihood(full, ids),
            "tokens": len(ids),
            "contains": best(Contains(), decode(ids.tolist()), answers),
        },
    }
    for anchor, each in engines.items():
        store_passages(each, [case], silent, first=first)
        for way in (way for way in ways.values() if way.anchor == anchor):
            result = each.prefill(prompt, selector=way.make())
            report, expected = result.report, result.logits.reshape(1, -1).float()
            if report.missed_tokens:
                raise RuntimeError(f"{way.name}: {report.missed_tokens} tokens that were stored are not found")
            cache, length = fill_cache(each.model, list(result.kv), None), len(prompt)
            if len(ids) > 1:
                given = torch.arange(length, length + len(ids) - 1)[None]
                out = each.model(ids[None, :-1], position_ids=given, past_key_values=cache, use_cache=True)
                expected = torch.cat([expected, out.logits[0].float()])
            got = torch.log_softmax(expected, -1)
            same = int((got.argmax(-1) == ids).int().cumprod(0).sum())  # tokens in front of the first other one
            if same < len(ids):
                if same + 1 < len(ids):
                    cache.crop(same + 1 - len(ids))
                expected = go_on(each, cache, expected[: same + 1], tokens)
            own = decode(expected.argmax(-1).tolist())
            measured[way.name] = {
                "kl": float((full.exp() * (full - got)).sum(-1).mean()),
                "log_likelihood": _likelihood(got, ids),
                "same": float((got.argmax(-1) == ids).float().mean()),
                "compute": scale.share(report.row_layers, report.projected_rows, report.prompt_tokens),
                "contains": best(Contains(), own, answers),
            }
    return measured


def go_on(engine: BlendEngine, cache: DynamicCache, expected: torch.Tensor, tokens: int) -> torch.Tensor:
    """What the model expects of each token of its greedy answer, logits of [n, vocabulary]; `expected`: of the first
    ones, of which the cache has all but the last."""
    while int(expected[-1].argmax()) not in engine.runtime.eos_ids and len(expected) < tokens:
        out = engine.model(expected[-1:].argmax(-1)[None], past_key_values=cache, use_cache=True)
        expected = torch.cat([expected, out.logits[0].float()])
    return expected


def _likelihood(logs: torch.Tensor, ids: torch.Tensor) -> float:
    return float(logs[torch.arange(len(ids)), ids].mean())


def summarise(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Means of all rows pooled, with intervals: the same answers' passages, with all their rows, are drawn for all
    ways."""
    rows = [row for own in found.values() for row in own]
    if not rows:
        raise InvalidInputError("there are no rows of this part that fit the model's context")
    passages, of = np.unique([row["passage"] for row in rows], return_inverse=True)
    drawn = np.random.default_rng(0).multinomial(len(passages), [1 / len(passages)] * len(passages), RESAMPLES)
    weights = np.concatenate([np.ones((1, len(passages)), int), drawn])[:, of]  # the first is the rows themselves

    def means(way: str, figure: str) -> Any:
        return weights @ np.array([row[way][figure] for row in rows]) / weights.sum(1)

    def with_interval(values: Any) -> dict[str, float]:
        low, high = np.percentile(values[1:], [2.5, 97.5])
        return {"value": float(values[0]), "low": float(low), "high": float(high)}

    reuse, lost = means(BASE, "kl"), means("full", "log_likelihood") - means(BASE, "log_likelihood")
    removed = {way: 1 - means(way, "kl") / reuse for way in rows[0] if way not in ("full", "passage")}
    ways: dict[str, dict[str, Any]] = {
        way: {
            "kl": float(means(way, "kl")[0]),
            "kl_removed": with_interval(removed[way]),
            "taken_back": with_interval((means(way, "log_likelihood") - means(BASE, "log_likelihood")) / lost),
            "same": float(means(way, "same")[0]),
            "compute": float(means(way, "compute")[0]),
        }
        for way in removed
    }
    figures: dict[str, Any] = {f"rows_{name}": len(own) for name, own in found.items()}
    if is_answered := "contains" in rows[0]["full"]:
        figures["contains_full"] = float(means("full", "contains")[0])
        for way in ways:
            ways[way]["contains"] = float(means(way, "contains")[0])
            ways[way]["contains_loss"] = with_interval(100 * (means("full", "contains") - means(way, "contains")))
    intervals = {}
    for share, ours in OURS.items():
        if ours in ways:
            ratio = ours.rsplit(" ", 1)[1]
            figures[f"kl_removed_{share}"] = ways[ours]["kl_removed"]["value"]
            figures[f"taken_back_{share}"] = ways[ours]["taken_back"]["value"]
            figures[f"compute_{share}"] = ways[ours]["compute"]
            if is_answered:
                figures[f"contains_loss_{share}"] = ways[ours]["contains_loss"]["value"]
            for name, other in (("coin", f"text random {ratio}"), ("head", f"text head {ratio}")):
                if other in removed:
                    lead = with_interval(removed[ours] - removed[other])
                    figures[f"over_{name}_{share}"] = lead["value"]
                    intervals[f"over_{name}_{share}"] = (lead["low"], lead["high"])
    return {"figures": figures, "intervals": intervals, "ways": ways}


def table(found: dict[str, Any]) -> Any:
    """A line for each way, the nearest to full prefill last."""
    lines = sorted(found["ways"].items(), key=lambda item: item[1]["kl_removed"]["value"])
    counts = ", ".join(f"{found['figures'][f'rows_{name}']} rows of {name}" for name in found["files"])
    columns = {
        "compute": "{compute:.1%}",
        "KL": "{kl:.4f}",
        "removed, %": "{removed[0]:.0f} [{removed[1]:.0f}, {removed[2]:.0f}]",
        "back, %": "{back:.0f}",
    }
    caption = (
        "KL: nats a token to full prefill; removed: of that of full reuse behind BOS;\n"
        "back: what is taken back of its loss of log-likelihood; pooled, 95 % intervals\n"
        "by bootstrap over answers' passages"
    )
    shown = [
        {
            "way": way,
            **figures,
            "removed": [100 * figures["kl_removed"][each] for each in ("value", "low", "high")],
            "back": 100 * figures["taken_back"]["value"],
        }
        for way, figures in lines
    ]
    return plain_table(f"{found['model']}, {counts} ({found['part']})", {"way": "{way}"}, columns, caption, shown)


def plot(found: dict[str, Any], path: Path) -> None:
    """KL removed over compute: a curve for each anchor and selector."""
    families: dict[str, list[tuple[float, float]]] = {}
    for way, figures in found["ways"].items():
        family = way if way.endswith("none") else way.rsplit(" ", 1)[0]
        families.setdefault(family, []).append((figures["compute"], figures["kl_removed"]["value"]))
    with picture(path) as (axes,):
        for family, points in families.items():
            axes.plot(*zip(*sorted(points), strict=True), "-", marker="o", label=family)
        axes.set(xlabel="compute, share of a full prefill", ylabel="KL removed, of that of full reuse")
        axes.set_title(found["model"], parse_math=False)
        axes.legend(fontsize="small")
