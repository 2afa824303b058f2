"""How near settings are to full prefill on pretrained weights and real questions: KL and log-likelihood of the model's
own answers, and compute.

The greedy answer of a full prefill is given to the KV cache that a setting made, token by token, and what it expects of
each token is compared with what full prefill expects. So all tokens of an answer count, also where the first differs.
Rows are split into tune and test by the passage that holds their answer.
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
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.selection import SelectorChoice
from cacheblend.core.select.selectors import Selector
from cacheblend.data import QuestionRow, read_questions
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.baselines import full_recompute
from cacheblend.engines.hf.recurrent import fill_cache
from cacheblend.engines.provenance import stamp
from cacheblend.evaluation.compute import ComputeScale
from cacheblend.evaluation.runner import Settings, make_cases
from cacheblend.evaluation.templates import Template
from lab.bench import Advance, picture, plain_table, silent
from lab.real.pretrained import pretrained_folder
from lab.settings import Real

TEMPLATE = Template(question="Answer the question with a few words from the text.\nQuestion: {question}")
BASE = "bos none"
"""Full reuse of chunks that were computed behind BOS: what is taken back is a share of its loss."""
RESAMPLES = 2000


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
        way.make()  # refuses wrong settings before anything is computed
        return way

    def make(self) -> Selector:
        name, _, settings = self.selector.partition("@")  # check layers, if any
        layers = numbers("--way", settings.replace("+", ","), int) if settings else None
        return SelectorChoice.parse(name).selector((self.ratio,), layers)


OURS = {
    "20": "text head:correction=0.5 0.14",
    "15": "text head:correction=0.5 0.09",
    "10": "text head:correction=0.5 0.04",
}
"""By the share of compute that all of a prefill may cost, in percent."""
WAYS = (
    *(BASE, "text none"),
    *OURS.values(),
    *("text head 0.14", "text head 0.09", "text head 0.04"),
    *("text random:correction=0.5 0.14", "text random 0.14"),
    *("bos head 0.14", "bos hkvd@1 0.11", "bos random 0.14"),
)


def run(asked: Real, advance: Advance = silent) -> dict[str, Any]:
    """Measures every way on every row; of each row its answer is made once."""
    ways = {way.name: way for way in map(Way.of, dict.fromkeys([BASE, *(asked.way or WAYS)]))}
    rows = {file.stem: rows_of(file, asked.part)[: asked.rows] for file in asked.data}
    model = asked.model or pretrained_folder()
    found: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        engines = {}
        for anchor in dict.fromkeys(way.anchor for way in ways.values()):
            config = BlendConfig(anchor=anchor, capture=False, discover=False)  # type: ignore[arg-type]
            engines[anchor] = stack.enter_context(BlendEngine.from_pretrained(model, store="memory", config=config))
        plain = next(iter(engines.values()))
        scale, done, total = ComputeScale.of(plain), 0, sum(map(len, rows.values()))
        for name, own in rows.items():
            found[name] = []
            for case in make_cases(plain, Settings(TEMPLATE), own, []):
                if case.prompts:
                    found[name].append(_measure(engines, case.prompts[None], ways, scale, asked.answer_tokens))
                advance(done := done + 1, total)
    summary = {"model": plain.name, "part": asked.part, "answer_tokens": asked.answer_tokens} | summarise(found)
    return summary | {"rows": found} | stamp()


def rows_of(file: Path, part: str) -> list[QuestionRow]:
    """The rows of a part, ``tune`` or ``test``: all rows whose answer stands in the same passage are of one part."""
    kept = []
    for row in read_questions(file):
        texts = [passage.text for passage in row.passages]
        holding = [text for text in texts if any(answer.lower() in text.lower() for answer in row.answers)]
        number = hashlib.sha256(min(holding or texts).encode()).digest()[0]
        if part == ("test" if number % 2 else "tune"):
            kept.append(row)
    return kept


@torch.no_grad()
def _measure(
    engines: Mapping[str, BlendEngine], prompt: Prompt, ways: Mapping[str, Way], scale: ComputeScale, tokens: int
) -> dict[str, Any]:
    engine = next(iter(engines.values()))
    first = full_recompute(engine, prompt)
    assert isinstance(first.kv, DynamicCache)
    answer, expected = [], [first.logits.float()]
    while True:
        answer.append(int(expected[-1].argmax()))
        if answer[-1] in engine.eos_ids or len(answer) == tokens:
            break
        expected.append(engine.model(torch.tensor([answer[-1:]]), past_key_values=first.kv).logits[0, -1].float())
    full = torch.log_softmax(torch.stack(expected), -1)
    ids = torch.tensor(answer)
    measured: dict[str, Any] = {"full": {"log_likelihood": _likelihood(full, ids), "tokens": len(answer)}}
    for anchor, each in engines.items():
        each.warm(prompt.chunks)
        for way in (way for way in ways.values() if way.anchor == anchor):
            result = each.prefill(prompt, selector=way.make())
            report, logits = result.report, [result.logits.reshape(1, -1).float()]
            if len(answer) > 1:
                cache, start = fill_cache(each.model, list(result.kv), None), len(prompt)
                at = torch.arange(start, start + len(answer) - 1)[None]
                out = each.model(ids[None, :-1], position_ids=at, past_key_values=cache, use_cache=True)
                logits.append(out.logits[0].float())
            got = torch.log_softmax(torch.cat(logits), -1)
            measured[way.name] = {
                "kl": float((full.exp() * (full - got)).sum(-1).mean()),
                "log_likelihood": _likelihood(got, ids),
                "same": float((got.argmax(-1) == ids).float().mean()),
                "compute": scale.share(report.row_layers, report.projected_rows, report.prompt_tokens),
            }
    return measured


def _likelihood(logs: torch.Tensor, ids: torch.Tensor) -> float:
    return float(logs[torch.arange(len(ids)), ids].mean())


def summarise(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Means of all rows pooled, with intervals: the same rows are drawn for all ways."""
    rows = [row for own in found.values() for row in own]
    if not rows:
        raise InvalidInputError("there are no rows of this part that fit the model's context")
    draws = np.random.default_rng(0).integers(0, len(rows), (RESAMPLES, len(rows)))
    draws = np.concatenate([np.arange(len(rows))[None], draws])  # the first is the rows themselves

    def means(way: str, figure: str) -> Any:
        return np.array([row[way][figure] for row in rows])[draws].mean(1)

    def with_interval(values: Any) -> dict[str, float]:
        low, high = np.percentile(values[1:], [2.5, 97.5])
        return {"value": float(values[0]), "low": float(low), "high": float(high)}

    reuse, lost = means(BASE, "kl"), means("full", "log_likelihood") - means(BASE, "log_likelihood")
    removed = {way: 1 - means(way, "kl") / reuse for way in rows[0] if way != "full"}
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
    intervals = {}
    for share, ours in OURS.items():
        if ours in ways:
            ratio = ours.rsplit(" ", 1)[1]
            figures[f"kl_removed_{share}"] = ways[ours]["kl_removed"]["value"]
            figures[f"taken_back_{share}"] = ways[ours]["taken_back"]["value"]
            figures[f"compute_{share}"] = ways[ours]["compute"]
            for name, other in (("coin", f"text random {ratio}"), ("head", f"text head {ratio}")):
                if other in removed:
                    lead = with_interval(removed[ours] - removed[other])
                    figures[f"over_{name}_{share}"] = lead["value"]
                    intervals[f"over_{name}_{share}"] = (lead["low"], lead["high"])
    return {"figures": figures, "intervals": intervals, "ways": ways}


def table(found: dict[str, Any]) -> Any:
    """A line for each way, the nearest to full prefill last."""
    lines = sorted(found["ways"].items(), key=lambda item: item[1]["kl_removed"]["value"])
    counts = ", ".join(f"{len(own)} rows of {name}" for name, own in found["rows"].items())
    columns = {
        "compute": "{compute:.1%}",
        "KL": "{kl:.4f}",
        "removed, %": "{removed[0]:.0f} [{removed[1]:.0f}, {removed[2]:.0f}]",
        "back, %": "{back:.0f}",
    }
    caption = (
        "KL: nats a token to full prefill; removed: of that of full reuse behind BOS; back: what is\n"
        "taken back of its loss of log-likelihood; pooled, 95 % intervals by bootstrap over rows"
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
