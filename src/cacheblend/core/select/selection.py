"""The settings that decide which rows are recomputed, and so the quality of an answer: as fields, and a selector with
its settings as one text, as people write it: ``query:question_words=1,hops=1``."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

from cacheblend.core.errors import InvalidInputError, check_fields
from cacheblend.core.select.question_selectors import Hybrid, Pool, Query, QuestionSelector, Rank
from cacheblend.core.select.selectors import (
    AllRows,
    Corrected,
    Gradual,
    Head,
    Hkvd,
    NoRows,
    RandomRows,
    Selector,
    Threshold,
    check_ratio,
    check_schedule,
)

Ratios = tuple[float, ...]  # one ratio, or decreasing ones, one for each check layer
_OF_QUESTION = ("pool", "lead", "head_rows", "question_rows", "question_words", "hops", "hop_spans")
_OWN = {"hkvd": ("measure",), "threshold": ("threshold", "measure"), "head": ("recency",), "query": _OF_QUESTION}
_OWN |= {"hybrid": (*_OF_QUESTION, "early_ratio", "rank", "measure"), "random": (), "none": (), "all": ()}
"""The settings that a selector has beside its ratio and check layers."""


@dataclass(frozen=True)
class Selection:
    """Everything that decides quality.

    Attributes:
        recompute_ratio: share of the loaded, non-prefix tokens that are recomputed, 0..1.
        selector: hkvd, query, hybrid, threshold, head, random, none or all. auto: what measured best, see `chosen`; the
            paper's choice, gradual filtering by deviation, where nothing is known of the model.
        check_layers: layers at whose entrance deviation is measured. None: hkvd filters gradually, see `Gradual`, and
            hybrid, threshold, and hkvd with `ratios`, check at layer 1. (1,): one check, as in the authors' code.
        ratios: one ratio for each check layer, not rising; None: `recompute_ratio` at all of them.
        measure: deviation over ``"kv"``, ``"k"`` or ``"v"``.
        threshold: bound of the squared deviation, for the selector of that name.
        pool: query and hybrid select rows by ``"sentence"``, or in spans of this many tokens (1: single rows).
        lead: sentences (or spans) in front of an attended one that query and hybrid select with it.
        head_rows: tokens at the head of a chunk that query and hybrid count half as much as its most attended one.
        question_rows: most rows of the question whose attention query and hybrid use.
        question_words: weight of the question's rare words, by token id, added to its attention; 0: none.
        hops: how often query and hybrid look for the rare words of the best spans that they have found so far, 0..4;
            above 0 they need `question_words`.
        hop_spans: most spans that each hop follows, 1..8.
        early_ratio: share that hybrid keeps from layer 0 on, raised to the first ratio where that is larger; None:
            three times the last ratio.
        rank: at check layers hybrid ranks by ``"deviation"``, or by ``"either"`` of deviation and attention.
        recency: head gives every chunk the same number of rows (0), or in proportion to its place among them (1); 0..1.
            None: 0, or what auto chooses.
        correction: share of the recomputed keys' mean deviation that a chunk's others get, see `core.fuse.correction`;
            0..1. None: 0, or what auto chooses.

    Raises:
        InvalidInputError: a value that the selector cannot have; the message names it.
    """

    recompute_ratio: float = 0.15
    selector: str = "auto"
    check_layers: tuple[int, ...] | None = None
    ratios: tuple[float, ...] | None = None
    measure: Literal["kv", "k", "v"] = "kv"
    threshold: float | None = None
    pool: Pool = "sentence"
    lead: int = 1
    head_rows: int = 0
    question_rows: int = 64
    question_words: float = 0.0
    hops: int = 0
    hop_spans: int = 2
    early_ratio: float | None = None
    rank: Rank = "either"
    recency: float | None = None
    correction: float | None = None

    def __post_init__(self) -> None:
        check_ratio(self.recompute_ratio)
        for name in ("recency", "correction"):
            check_ratio(getattr(self, name) or 0.0, name)
        for name in ("check_layers", "ratios"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, tuple | list):
                raise InvalidInputError(f"{name} must be a list or tuple, one for each check layer, got {value!r}")
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        check_fields(self, ("selector", "ratios", "threshold"))
        self.make_selector()  # which knows the limits of the fields that it uses
        check_fields(self)

    @property
    def final_ratio(self) -> float:
        """Share of the loaded tokens that is recomputed after the last check layer, or on average if none is named."""
        return self.ratios[-1] if self.ratios else self.recompute_ratio

    def chosen(self, anchor: str) -> Self:
        """The same with a selector that is named. With the anchor ``text`` auto is head, whose rows need no check, with
        recency 1 and correction 0.5 unless these are set, which measured best (docs/results, "On pretrained weights").
        Otherwise, and with settings of checks, it is hkvd. `anchor`: of the model's chunks, or empty where a layer has
        no keys and values to correct."""
        if self.selector != "auto":
            return self
        if anchor != "text" or self.check_layers or self.ratios or self.measure != "kv":
            return replace(self, selector="hkvd")
        recency = 1.0 if self.recency is None else self.recency
        correction = 0.5 if self.correction is None else self.correction
        return replace(self, selector="head", recency=recency, correction=correction)

    def scaled(self, factor: float) -> Self:
        """The same with all shares so many times as large, each at most 1; a threshold stays as it is."""
        ratio = min(1.0, self.recompute_ratio * factor)
        ratios = None if self.ratios is None else tuple(min(1.0, each * factor) for each in self.ratios)
        early = None if self.early_ratio is None else min(1.0, self.early_ratio * factor)
        return replace(self, recompute_ratio=ratio, ratios=ratios, early_ratio=early)

    def make_selector(self, ratio: float | None = None) -> Selector:
        """The selector that these settings name; `ratio` overrides the configured one (and `ratios`).

        Raises:
            InvalidInputError: a ratio outside 0..1.
        """
        found = self._selector(ratio)
        return Corrected(found, self.correction) if self.correction else found

    def _selector(self, ratio: float | None) -> Selector:
        if ratio is not None:
            check_ratio(ratio)
        share = self.recompute_ratio if ratio is None else ratio
        checks = (1,) if self.check_layers is None else self.check_layers
        schedule = self.ratios if self.ratios and ratio is None else (share,) * len(checks)
        is_gradual = self.check_layers is None and self.ratios is None
        # the fields of `QuestionSelector`, which have the same names here, but for its `words`
        names = {f.name: f.name for f in fields(QuestionSelector)} | {"words": "question_words"}
        of_question: dict[str, Any] = {name: getattr(self, own) for name, own in names.items()}
        match self.selector:
            case "hkvd" | "auto":
                return Gradual(share, self.measure) if is_gradual else Hkvd(checks, schedule, self.measure)
            case "query":
                return Query(share, **of_question)
            case "hybrid":
                check_schedule(checks, schedule)
                early = min(1.0, 3 * schedule[-1]) if self.early_ratio is None else self.early_ratio
                check_ratio(early)
                return Hybrid(checks, schedule, max(early, schedule[0]), self.rank, self.measure, **of_question)
            case "threshold":
                if self.threshold is None:
                    raise InvalidInputError("the selector 'threshold' needs a bound; set `threshold`")
                return Threshold(self.threshold, checks, self.measure)
            case "head":
                return Head(share, self.recency or 0.0)
            case "random":
                return RandomRows(share)
            case "none":
                return NoRows()
            case "all":
                return AllRows()
        raise InvalidInputError(f"no selector is called {self.selector!r}; there are auto, {', '.join(_OWN)}")


def selection_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values whose names are fields of `Selection`."""
    names = {f.name for f in fields(Selection)}
    return {name: value for name, value in values.items() if name in names}


def unused_by(selector: str) -> set[str]:
    """Of ratio, check layers and measure what a selector does not go by; presets are kinds of hybrid."""
    checks = set() if "measure" in _OWN.get(selector, _OWN["hybrid"]) else {"check_layers", "measure"}
    return checks | ({"ratio"} if selector in ("threshold", "none", "all") else set())


@dataclass(frozen=True)
class SelectorChoice:
    """A selector as requested: ``hkvd``, or with settings of `Selection`, ``hkvd:measure=v``."""

    text: str  # as given by the user
    settings: tuple[tuple[str, Any], ...]  # fields for `Selection`

    @staticmethod
    def parse(text: str) -> "SelectorChoice":
        """``name`` or ``name:setting=value,setting=value``. Raises `InvalidInputError`: a setting that the selector
        does not have, or one without a value."""
        name, _, rest = text.partition(":")
        if name.strip() == "auto":
            raise InvalidInputError(f"selector {text!r}: that is what there is where none is named; name one, or none")
        known = [*_OWN.get(name.strip(), _OWN["hybrid"]), "correction"]  # presets are kinds of hybrid
        settings: dict[str, Any] = {"selector": name.strip()}
        for part in filter(None, (part.strip() for part in rest.split(","))):
            key, equals, value = part.partition("=")
            if equals and key not in known:
                raise InvalidInputError(
                    f"selector {text!r}: there is no setting {key!r} here; settings are {', '.join(known)}"
                )
            if not equals:
                raise InvalidInputError(
                    f"selector {text!r}: {part!r} is not of the form setting=value; settings are {', '.join(known)}"
                )
            try:
                settings[key] = json.loads(value)
            except ValueError:
                settings[key] = value
        return SelectorChoice(text.strip(), tuple(settings.items()))

    def selector(self, ratios: Ratios, check_layers: tuple[int, ...] | None) -> Selector:
        """The selector with these settings. Raises `InvalidInputError`: an unknown selector, or a value outside its
        range."""
        settings = dict(self.settings) | {"recompute_ratio": ratios[-1], "check_layers": check_layers}
        if len(ratios) > 1:
            settings["ratios"] = ratios
        return Selection(**settings).make_selector()
