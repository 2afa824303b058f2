"""The methods that an evaluation compares: each answers a question, timed and counted; made from names, selectors,
ratios and check layers by `make_methods`. Knows no files or scores."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError, StoreUnreachableError
from cacheblend.core.fuse.prefill import check_selector
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.report import BlendReport
from cacheblend.core.select.selection import Ratios, SelectorChoice
from cacheblend.core.select.selectors import Gradual, NoRows, Selector
from cacheblend.engines.hf import BlendEngine, Passage, SamplingParams
from cacheblend.engines.hf.baselines import FirstToken, finish, follow, full_recompute, fused, prefix_caching
from cacheblend.engines.shadow import kl_divergence
from cacheblend.evaluation.templates import Template

METHODS = ("full", "prefix", "reuse", "blend", "map-reduce", "map-rerank")
PROFILE = "profile"


@dataclass(frozen=True)
class Label:
    """Name and settings of a method, for reports."""

    name: str  # unique within a run
    kind: str  # of `METHODS`
    family: str  # the same for methods that differ only in their ratio; plots draw a family as one curve
    selector: str = ""  # as requested; empty if the method selects nothing
    ratio: float | None = None  # after the last check layer; None if the method has none
    check_layers: tuple[int, ...] = ()  # of the selector


@dataclass(frozen=True)
class Asked:
    """A question to answer from passages."""

    engine: BlendEngine  # holds the passages in its store
    template: Template
    question: str
    passages: Sequence[Passage]
    prompt: Prompt  # made of all passages; fits the model's context
    max_tokens: int  # most of each answer; 0: only its first token's logits are computed
    own: "OwnAnswer | None" = None  # that methods are compared over token by token; None: they are not


@dataclass(frozen=True)
class OwnAnswer:
    """The model's greedy answer under full recompute, at least one token."""

    token_ids: list[int]
    expected: torch.Tensor  # [tokens, vocab] logits that each was chosen by

    @staticmethod
    def of(asked: Asked) -> "OwnAnswer":
        seen: list[torch.Tensor] = []
        decoded = _decode(asked, asked.prompt, full_recompute(asked.engine, asked.prompt), seen)
        return OwnAnswer(decoded.token_ids, torch.stack(seen))


@dataclass(frozen=True)
class Outcome:
    """The answer of a method, and its cost; rows and tokens as in `BlendReport`."""

    text: str
    token_ids: list[int]
    ttft_s: float  # until the first token can be sampled; map methods include their earlier prompts
    total_s: float  # until the last token of the answer
    prompt_tokens: int  # of all prompts that were processed
    row_layers: int
    projected_rows: int = 0
    loaded_tokens: int = 0
    recomputed_tokens: int = 0
    missed_tokens: int = 0
    is_exact: bool = True  # nothing but an exact prefix was loaded
    logits: torch.Tensor | None = field(default=None, repr=False, compare=False)
    """[vocab] of the first token; None if the method's prompt differs from that of the other methods."""
    own_kl: float | None = None  # KL(full || method) of a token of the model's own answer, in nats, mean
    own_top_1: float | None = None  # share of these tokens that are the likeliest behind those in front of them


class Method(Protocol):
    """A way to answer a question: a frozen dataclass. It stores nothing and does not change the engine."""

    @property
    def label(self) -> Label:
        """Its name and settings."""

    def check(self, layers: int) -> None:
        """Raises `InvalidInputError` if the method does not work with a model of this many layers."""
        return  # it works with any

    def answer(self, asked: Asked) -> Outcome:
        """Answer and cost. Raises `PromptTooLongError` for a prompt of its own that exceeds the model's context."""


@dataclass(frozen=True)
class FullRecompute(Method):
    """Computes everything, with transformers' own forward pass."""

    label: Label = Label("full", "full", "full")

    def answer(self, asked: Asked) -> Outcome:
        return answer_by(asked, partial(full_recompute, asked.engine, asked.prompt))


@dataclass(frozen=True)
class PrefixCaching(Method):
    """Loads the exact prefix only, and computes the rest."""

    label: Label = Label("prefix", "prefix", "prefix")

    def answer(self, asked: Asked) -> Outcome:
        return answer_by(asked, partial(prefix_caching, asked.engine, asked.prompt))


@dataclass(frozen=True)
class Fused:
    """A fused prefill: full reuse and every blend, which differ in their selector."""

    label: Label
    selector: Selector

    def check(self, layers: int) -> None:
        check_selector(self.selector, layers)

    def answer(self, asked: Asked) -> Outcome:
        return answer_by(asked, partial(fused, asked.engine, asked.prompt, self.selector))


@dataclass(frozen=True)
class MapReduce(Method):
    """Asks each passage alone, then asks again over the joined answers. Loads nothing."""

    label: Label = Label("map-reduce", "map-reduce", "map-reduce")

    def answer(self, asked: Asked) -> Outcome:
        started = time.perf_counter()
        parts = _ask_alone(asked)
        text = asked.template.reduce_text([part.text for part in parts], asked.question)
        prompt = asked.template.reduce_layout.prompt(asked.engine, [], text)
        first = full_recompute(asked.engine, prompt)
        ttft_s = time.perf_counter() - started
        last = _decode(asked, prompt, first)
        layers = asked.engine.runtime.survey.num_layers
        tokens = len(prompt) + sum(part.prompt_tokens for part in parts)
        row_layers = first.row_layers + sum(part.rows for part in parts) * layers
        return Outcome(last.text, last.token_ids, ttft_s, time.perf_counter() - started, tokens, row_layers)


@dataclass(frozen=True)
class MapRerank(Method):
    """Asks each passage alone; takes the answer whose tokens have the highest mean log-probability."""

    label: Label = Label("map-rerank", "map-rerank", "map-rerank")

    def answer(self, asked: Asked) -> Outcome:
        started = time.perf_counter()
        parts = _ask_alone(asked)
        best = max(parts, key=lambda part: part.mean_log_probability)
        seconds = time.perf_counter() - started  # the best is known only behind all: first and last token together
        layers = asked.engine.runtime.survey.num_layers
        tokens, row_layers = sum(part.prompt_tokens for part in parts), sum(part.rows for part in parts) * layers
        return Outcome(best.text, best.token_ids, seconds, seconds, tokens, row_layers)


def make_methods(
    names: Sequence[str] = ("full", "prefix", "reuse", "blend"),
    *,
    selectors: Sequence[str] = (),
    ratios: Sequence[Ratios | float] = (),
    check_layers: Sequence[Sequence[int] | None] = (None,),
    profile: BlendConfig | None = None,
) -> list[Method]:
    """Makes the named methods; ``blend`` makes one for each combination of selectors, ratios and check layers.

    Decreasing ratios are only combined with as many check layers. Combinations with equal selectors (of selectors
    without a ratio, or without check layers) make one method.

    Args:
        names: of `METHODS`.
        selectors: see `SelectorChoice`; ``profile`` blends with `profile`, whose check layers are its own. Empty:
            ``profile`` where there is one and no check layers are given, else hkvd.
        ratios: each is one ratio, or decreasing ones. Empty: that of `profile`, and 0.15 for other selectors.
        check_layers: each is one list of check layers, or None for the selector's own: hkvd then filters gradually.
        profile: the model's own settings (`EngineRuntime.settings`).

    Raises:
        InvalidInputError: an unknown name, or decreasing ratios without as many check layers.
    """
    makers: dict[str, Any] = {
        "full": FullRecompute,
        "prefix": PrefixCaching,
        "reuse": lambda: Fused(Label("reuse", "reuse", "reuse", "none", 0.0), NoRows()),
        "map-reduce": MapReduce,
        "map-rerank": MapRerank,
    }
    methods: list[Method] = []
    if "blend" not in names and (selectors or ratios or any(check_layers)):
        raise InvalidInputError(
            f"selectors, ratios and check layers are those of blend, which is not among {', '.join(names)}; add it, or "
            "leave them out"
        )
    shares = [ratio if isinstance(ratio, tuple) else (float(ratio),) for ratio in ratios]
    selectors = selectors or ((PROFILE,) if profile is not None and not any(check_layers) else ("hkvd",))
    for name in dict.fromkeys(names):
        if name not in METHODS:
            raise InvalidInputError(f"there is no method {name!r}; choose from {', '.join(METHODS)}")
        methods += [makers[name]()] if name in makers else _blends(selectors, shares, check_layers, profile)
    if not methods:
        raise InvalidInputError(f"there is no method to evaluate; choose from {', '.join(METHODS)}")
    return methods


def _blends(
    selectors: Sequence[str],
    ratios: list[Ratios],
    check_layers: Sequence[Sequence[int] | None],
    profile: BlendConfig | None,
) -> list[Method]:
    checks = list(dict.fromkeys(None if layers is None else tuple(layers) for layers in check_layers))
    for decreasing in ratios:
        if len(decreasing) > 1 and not any(layers and len(layers) == len(decreasing) for layers in checks):
            raise InvalidInputError(
                f"{len(decreasing)} decreasing ratios {decreasing} need as many check layers, got {checks}"
            )
    seen: list[Selector] = []
    methods: list[Method] = []
    if PROFILE in selectors:
        if profile is None:
            raise InvalidInputError(f"the selector {PROFILE!r} needs a model's settings; choose another selector")
        if set(selectors) == {PROFILE} and (any(checks) or any(len(each) > 1 for each in ratios)):
            raise InvalidInputError(
                f"the selector {PROFILE!r} has check layers of its own, and takes one ratio each; name the selector "
                "that check layers or falling ratios are for"
            )
        has_ratio = profile.make_selector(0.0) != profile.make_selector(1.0)
        shares: list[float | None] = [each[0] for each in ratios if has_ratio and len(each) == 1]
        for asked in dict.fromkeys(shares) or [None]:
            own, share = profile.make_selector(asked), profile.recompute_ratio if asked is None else asked
            name = "blend" + ("" if asked is None else f" r={asked:g}")
            label = Label(name, "blend", PROFILE, PROFILE, share if has_ratio else None, own.check_layers)
            methods.append(Fused(label, own))
    for choice in (SelectorChoice.parse(text) for text in dict.fromkeys(selectors) if text != PROFILE):
        for layers in checks:
            for decreasing in ratios or [(0.15,)]:
                if len(decreasing) not in (1, len(layers or (1,))):
                    continue
                selector = choice.selector(decreasing, layers)
                if selector in seen:
                    continue
                seen.append(selector)
                # A selector that is the same at r = 0 and r = 1 has no ratio.
                has_ratio = choice.selector((0.0,), layers) != choice.selector((1.0,), layers)
                at = " @" + ",".join(map(str, selector.check_layers)) if selector.check_layers else ""
                if isinstance(getattr(selector, "inner", selector), Gradual):
                    at = " gradual"  # where it checks depends on the model
                family, ratio = f"{choice.text}{at}", decreasing[-1] if has_ratio else None
                name = f"blend {family}" + (" r=" + ",".join(f"{r:g}" for r in decreasing) if has_ratio else "")
                label = Label(name, "blend", family, choice.text, ratio, selector.check_layers)
                methods.append(Fused(label, selector))
    return methods


@dataclass(frozen=True)
class _Decoded:
    text: str
    token_ids: list[int]
    prompt_tokens: int
    mean_log_probability: float = 0.0

    @property
    def rows(self) -> int:
        """Rows computed: the prompt, and all sampled tokens but the last."""
        return self.prompt_tokens + len(self.token_ids) - 1


def answer_by(asked: Asked, prefill: Callable[[], FirstToken]) -> Outcome:
    """The outcome of a method that prefills the prompt in its own way, and decodes as all others do. Raises
    `StoreUnreachableError`: the store was so slow that what the method would load was computed."""
    started = time.perf_counter()
    first = prefill()
    prefill_s = time.perf_counter() - started
    report = first.report or BlendReport()
    if report.load_timeouts:
        raise StoreUnreachableError(
            f"the store was too slow ({report.load_timeouts[0]}), so full recompute would be compared with itself; "
            "let no other work run, or open the engine with a load_timeout_s of an hour"
        )
    compared = _over_own_answer(asked, first)
    started = time.perf_counter()
    decoded = _decode(asked, asked.prompt, first)
    return Outcome(
        text=decoded.text,
        token_ids=decoded.token_ids,
        ttft_s=first.ttft_s,
        total_s=prefill_s + time.perf_counter() - started,
        prompt_tokens=len(asked.prompt),
        row_layers=first.row_layers,
        projected_rows=report.projected_rows,
        loaded_tokens=report.loaded_tokens,
        recomputed_tokens=report.recomputed_tokens,
        missed_tokens=report.missed_tokens,
        is_exact=not report.selector,
        logits=first.logits,
        **compared,
    )


def _over_own_answer(asked: Asked, first: FirstToken) -> dict[str, float]:
    if asked.own is None:
        return {}
    ids, found = asked.own.token_ids, follow(asked.engine, asked.prompt, first, asked.own.token_ids)
    kl = [kl_divergence(full, other) for full, other in zip(asked.own.expected, found, strict=True)]
    same = [likeliest == token for likeliest, token in zip(found.argmax(-1).tolist(), ids, strict=True)]
    return {"own_kl": sum(kl) / len(ids), "own_top_1": sum(same) / len(ids)}


def _ask_alone(asked: Asked) -> list[_Decoded]:
    parts = []
    for passage in asked.passages:
        prompt = asked.template.map_layout.prompt(asked.engine, [passage], asked.question)
        seen: list[torch.Tensor] = []
        part = _decode(asked, prompt, full_recompute(asked.engine, prompt), seen)
        logs = torch.stack(seen).log_softmax(-1)
        parts.append(replace(part, mean_log_probability=float(logs[range(len(seen)), part.token_ids].mean())))
    return parts


def _decode(asked: Asked, prompt: Prompt, first: FirstToken, seen: list[torch.Tensor] | None = None) -> _Decoded:
    """`seen` gets the logits [vocab] that each token was chosen by."""
    if not asked.max_tokens:
        return _Decoded("", [], len(prompt))
    params = SamplingParams(max_new_tokens=asked.max_tokens, stop=asked.template.stop)
    params = params.within(asked.engine.runtime.survey.max_length, len(prompt))
    note = None if seen is None else lambda token, logits: seen.append(logits.float())
    text, ids = finish(asked.engine, prompt, first, params, note)
    return _Decoded(text, ids, len(prompt))
