"""The settings that the quality gate tries, by increasing compute."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.select.selection import Ratios, Selection, SelectorChoice
from cacheblend.core.select.selectors import Selector, check_ratio, scaled_shares

RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
FOLLOWING = {"question_words": 5, "lead": 0, "head_rows": 16, "hops": 2}
"""Settings with which query follows what the question names over two hops, and recomputes the heads of
the chunks in which it finds something: the best on the model that ships (docs/log.md, 2026-11-25)."""


def named(selector: str, settings: Mapping[str, float]) -> str:
    """The text that `SelectorChoice` reads."""
    return f"{selector}:" + ",".join(f"{name}={json.dumps(value)}" for name, value in settings.items())


NARROWING = "narrowing"
NARROWING_SHARES = (0.52, 0.25, 0.1, 0.02)
"""Shares of a hybrid that is called `NARROWING`: in front of its first check layer and behind each of three, before
they are scaled to a mean over all layers. Many rows go through the first layers and hardly any through the last: with
the mean 0.129 it is what the model that ships has as its profile (docs/log.md, 2026-11-26)."""
HEADS = "head:recency=1,correction=0.5"
"""More rows of later chunks, and the other keys moved: the best on a pretrained model, behind the anchor text
(docs/log.md, 2026-11-27)."""
SELECTORS = (HEADS, "hkvd", "gradual", "query", named("query", FOLLOWING), "hybrid", NARROWING)
HKVD_CHECKS = (1, 2)


@dataclass(frozen=True)
class Candidate:
    """A setting to try."""

    name: str  # for people
    settings: Mapping[str, Any]  # the fields of `Selection` that affect quality

    def selector(self) -> Selector:
        return Selection(**self.settings).make_selector()


def grid(
    layers: int,
    selectors: Sequence[str] = (),
    ratios: Sequence[float] = (),
    fit: Callable[[Selector], object] = lambda selector: None,
) -> list[Candidate]:
    """Candidates for a model of so many layers, sorted by expected compute, ascending; those with check layers beyond
    it are left out, and equal ones. `selectors`: names of `Selection` but ``all``, ``gradual`` (hkvd without check
    layers) and ``narrowing`` (see `NARROWING_SHARES`), optionally with further settings (see `SelectorChoice`); empty:
    `SELECTORS`. `ratios`: shares of loaded tokens to recompute; empty: `RATIOS`. `fit` raises `InvalidInputError` for a
    selector that the model cannot have; of `SELECTORS` such are left out. Raises `InvalidInputError`: an unknown
    selector, a ratio outside 0..1, or a model with too few layers for all of them."""
    for ratio in ratios:
        check_ratio(ratio)
    names = selectors or SELECTORS
    found = dict[str, Candidate]()  # by selector: equal ones are measured once
    for each in (c for name in names for c in _of_selector(name, tuple(ratios or RATIOS), layers)):
        selector = each.selector()  # refuses invalid settings
        try:
            fit(selector)
        except InvalidInputError:
            if selectors:
                raise
        else:
            found.setdefault(repr(selector), each)
    if not found:
        raise InvalidInputError(f"a model of {layers} layers has too few for the check layers of {', '.join(names)}")
    return sorted(found.values(), key=lambda candidate: expected_compute(candidate, layers))


def expected_compute(candidate: Candidate, layers: int) -> float:
    """Expected share of the row-layers of a full prefill if all rows are loaded; the measured share may be higher."""
    config = Selection(**candidate.settings)
    if config.selector == "none":
        return 0.0
    selector = replace(config, correction=0.0).make_selector().of_model(layers)
    checks = selector.check_layers
    if not checks:
        return config.recompute_ratio
    shares: Ratios = getattr(selector, "ratios", (config.recompute_ratio,) * len(checks))
    ends = (*checks[1:], layers)
    active = sum(share * (end - start) for share, start, end in zip(shares, checks, ends, strict=False))
    return (checks[0] * getattr(selector, "early", 1.0) + active) / layers


def _of_selector(text: str, ratios: tuple[float, ...], layers: int) -> Iterator[Candidate]:
    """A selector, with its optional settings, at every ratio."""
    choice = SelectorChoice.parse(text)
    base = dict(choice.settings)
    kind = base["selector"]
    if kind == "all":
        raise InvalidInputError("the selector all recomputes everything, as what others are compared with; name others")
    if kind == "none" or base.get("threshold") is not None:
        yield Candidate(choice.text, base)
        return
    for ratio in ratios:
        name, own = f"{choice.text} r={ratio:g}", base | {"recompute_ratio": ratio}
        if kind == "hkvd":
            for check in (check for check in HKVD_CHECKS if check < layers):
                yield Candidate(name.replace("hkvd", f"hkvd@{check}", 1), own | {"check_layers": (check,)})
        elif kind == NARROWING:
            checks = layers // 6, layers // 4, layers // 3
            if 0 < checks[0] < checks[1] < checks[2]:
                lasting = [end - start for start, end in zip((0, *checks), (*checks, layers), strict=True)]
                early, *shares = scaled_shares(NARROWING_SHARES, lasting, ratio)
                own = FOLLOWING | {"head_rows": 24, "hops": 3, "hop_spans": 3, "recompute_ratio": shares[-1]}
                own |= {"check_layers": checks, "ratios": tuple(shares), "early_ratio": early}
                yield Candidate(name, own | base | {"selector": "hybrid"})
        elif kind != "gradual" or layers > 1:
            yield Candidate(name, own | {"selector": "hkvd" if kind == "gradual" else kind})
