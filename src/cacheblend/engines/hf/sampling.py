"""Sampling of an answer's tokens: parameters, and a sampler with transformers' own logits processors."""

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, TypedDict

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cacheblend.core.errors import InvalidInputError, ModelOverflowError, check_encodable, check_fields, shown
from cacheblend.engines.hf.grammar import CompiledGrammar, Grammar, GrammarMatcher

GREEDY_BELOW = 1e-5  # lower temperatures decode greedily: logits divided by them would exceed float32's range


@dataclass(frozen=True)
class SamplingParams:
    """How an answer is sampled.

    Attributes:
        max_new_tokens: maximum length of the answer in tokens, at least 1.
        temperature: 0 and all values below `GREEDY_BELOW` decode greedily.
        top_k, top_p, min_p: as in transformers' processors of these names; 0, 1 and 0 disable them. Without effect
            where `temperature` is 0; `generate`, `stream` and `chat` warn of that.
        repetition_penalty: 0.01 to 100; 1 disables it.
        presence_penalty: -2 to 2, subtracted from the logits of the answer's tokens so far; 0 disables it.
        frequency_penalty: the same, as many times as the token stands in the answer.
        logit_bias: (token id, -100 to 100), added to its logit.
        bad_words: sequences of token ids that the answer must not have.
        seed: the same seed gives the same answer; None: a random seed for each answer.
        stop: texts that end the answer; they are not part of it. One text stands for a tuple of it, a list for a tuple.
        stop_token_ids: ids that end the answer, in addition to the model's EOS ids.
        ignore_eos: do not stop at the model's EOS ids.
        min_new_tokens: until then no EOS or stop id is drawn; stop texts end the answer nevertheless.
        grammar: the form of the answer, see `Grammar`; None: any. An answer that ends by its length, a stop text or a
            stop id has the beginning of that form.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "logit_bias", "bad_words"):
            object.__setattr__(self, name, _as_tuples(getattr(self, name)))
        check_fields(self)
        most, penalty = self.max_new_tokens, self.repetition_penalty
        wanted = (
            (most >= 1, f"max_new_tokens must be at least 1, got {most}"),
            (0 <= self.temperature < math.inf, f"temperature must be finite and at least 0, got {self.temperature}"),
            (self.top_k >= 0, f"top_k must be at least 0 (off), got {self.top_k}"),
            (1e-2 <= penalty <= 1e2, f"repetition_penalty must be in 0.01..100, got {penalty}"),
            (-2 <= self.presence_penalty <= 2, f"presence_penalty must be in -2..2, got {self.presence_penalty}"),
            (-2 <= self.frequency_penalty <= 2, f"frequency_penalty must be in -2..2, got {self.frequency_penalty}"),
            (
                0 <= self.min_new_tokens <= most,
                f"min_new_tokens must be in 0..{most} (max_new_tokens), got {self.min_new_tokens}",
            ),
            (
                all(-100 <= bias <= 100 for _, bias in self.logit_bias),
                f"each logit_bias must be in -100..100, got {dict(self.logit_bias)}",
            ),
            (all(self.bad_words), "an entry of bad_words has no tokens"),
            (
                0 < self.top_p <= 1 and 0 <= self.min_p <= 1,
                f"top_p must be in 0..1 (above 0) and min_p in 0..1, got {self.top_p} and {self.min_p}",
            ),
            (self.seed is None or -(2**63) <= self.seed < 2**64, f"seed must fit 64 bits, got {self.seed}"),
            (all(self.stop), "a stop text must not be empty"),
        )
        for is_right, message in wanted:
            if not is_right:
                raise InvalidInputError(message)
        for text in self.stop:
            check_encodable(text, "a stop text")
        if self.grammar is not None and (self.ignore_eos or self.min_new_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_new_tokens (min_tokens)"
            raise InvalidInputError(f"{name} cannot hold beside a grammar: once that is complete, only EOS is allowed")

    def within(self, context: int | None, prompt_tokens: int) -> "SamplingParams":
        """The same, with as many new tokens at most as the context has left after a prompt; None: no limit."""
        left = self.max_new_tokens if context is None else context - prompt_tokens + 1
        most = min(self.max_new_tokens, left)
        return replace(self, max_new_tokens=most, min_new_tokens=min(self.min_new_tokens, most))

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def processors(
        self,
        prompt_tokens: int,
        stop_ids: Sequence[int],
        matcher: GrammarMatcher | None = None,
        device: torch.device | str = "cpu",
    ) -> LogitsProcessorList:
        """In transformers' order: penalties, the grammar (`matcher`), then warpers; `stop_ids` end the answer. `device`
        is that of the logits."""
        chosen: list[LogitsProcessor] = []
        if self.logit_bias:
            biases = {(token,): float(bias) for token, bias in self.logit_bias}
            chosen.append(SequenceBiasLogitsProcessor(biases))
        if self.repetition_penalty != 1:
            chosen.append(RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty)))
        if self.presence_penalty or self.frequency_penalty:
            chosen.append(CountPenalties(prompt_tokens, self.presence_penalty, self.frequency_penalty))
        if self.bad_words:
            chosen.append(BadWords(prompt_tokens, [list(word) for word in self.bad_words]))
        if self.min_new_tokens and stop_ids:
            least = MinNewTokensLengthLogitsProcessor(prompt_tokens, self.min_new_tokens, list(stop_ids), str(device))
            chosen.append(least)
        chosen += [matcher] if matcher is not None else []
        if not self.greedy:
            chosen += [TemperatureLogitsWarper(float(self.temperature))] if self.temperature != 1 else []
            chosen += [TopKLogitsWarper(self.top_k)] if self.top_k else []
            chosen += [TopPLogitsWarper(self.top_p)] if self.top_p < 1 else []
            chosen += [MinPLogitsWarper(self.min_p)] if self.min_p > 0 else []
        return LogitsProcessorList(chosen)


class CountPenalties(LogitsProcessor):  # type: ignore[misc, unused-ignore]
    """OpenAI's penalties: of tokens by whether and how often they stand in the answer, behind the prompt."""

    def __init__(self, prompt_tokens: int, presence: float, frequency: float) -> None:
        self._prompt_tokens, self._presence, self._frequency = prompt_tokens, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[1, vocab] scores after [1, tokens] ids."""
        answer = input_ids[:, self._prompt_tokens :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self._presence * (counts > 0) - self._frequency * counts


class BadWords(NoBadWordsLogitsProcessor):  # type: ignore[misc, unused-ignore]
    """Forbids words of the answer: one that begins in the prompt is none."""

    def __init__(self, prompt_tokens: int, words: list[list[int]]) -> None:
        super().__init__(words)
        self._prompt_tokens = prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[1, vocab] scores after [1, tokens] ids."""
        own = input_ids[:, self._prompt_tokens - 1 :].clone()
        own[:, 0] = -1  # no token: some versions of transformers forbid nothing behind fewer ids than a word has
        found: torch.Tensor = super().__call__(own, scores)
        return found


def _as_tuples(values: object) -> object:
    return tuple(map(_as_tuples, values)) if isinstance(values, list | tuple) else values


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams`, as keyword arguments of `generate`, `stream` and `chat`."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Sequence[tuple[int, float]]
    bad_words: Sequence[Sequence[int]]
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_new_tokens: int
    grammar: Grammar | None


def sampling_of(params: SamplingParams | None, options: SamplingOptions) -> SamplingParams:
    """Sampling parameters from a `SamplingParams`, from single options (None: not given), or the defaults.
    Raises `InvalidInputError`: both are given, an option is unknown, or a value is out of range."""
    if params is not None and options:
        raise InvalidInputError(f"give sampling parameters or the options {', '.join(options)}, not both")
    if params is None:
        given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        known = [field.name for field in fields(SamplingParams)]
        for name in given:
            if name not in known:
                if name in ("documents", "messages"):
                    raise InvalidInputError(f"{name} are for `chat`, or for `chat_prompt`, whose prompt this one takes")
                near = get_close_matches(name, known, 1)
                meant = f"; did you mean {near[0]}?" if near else ""
                raise InvalidInputError(f"unknown sampling option {name!r}{meant}; the options are {', '.join(known)}")
        params = SamplingParams(**given)
    check_params(params)
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    narrowing = [f"{name}={getattr(params, name)}" for name in off if getattr(params, name) != off[name]]
    if narrowing and params.greedy:  # nothing is drawn; Python shows it once for a line of code outside of this package
        package, frame, level = __name__.partition(".")[0], inspect.currentframe(), 1
        while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
            frame, level = frame.f_back, level + 1
        warnings.warn(
            f"{' and '.join(narrowing)} without effect: at temperature {params.temperature:g} the most likely token is "
            "taken; set temperature=1.0 to sample",
            UserWarning,
            stacklevel=level,
        )
    return params


def check_params(params: object) -> SamplingParams:
    """The sampling parameters; raises `InvalidInputError` if they are none."""
    if not isinstance(params, SamplingParams):
        way_out = (
            "SamplingParams(**params), or the options by name" if isinstance(params, Mapping) else "options by name"
        )
        raise InvalidInputError(
            f"params must be SamplingParams, got {shown(params)}; pass {way_out}, max_new_tokens=64"
        )
    return params


class Sampler:
    """Samples one answer's tokens, one at a time, from logits that the caller computes. `prompt_ids` are [tokens] int64
    on the model's device; `logits` are [vocab] for the next token, at first those at the prompt's last position: the
    caller sets them before each `sample` but the first. `grammar` is the parameters' own, compiled. `finish_reason`:
    ``stop`` or ``length`` after the last token, else None."""

    def __init__(
        self,
        prompt_ids: torch.Tensor,
        logits: torch.Tensor,
        params: SamplingParams,
        eos_ids: Sequence[int],
        grammar: CompiledGrammar | None = None,
    ) -> None:
        if params.grammar != (None if grammar is None else grammar.grammar):
            raise InvalidInputError("a grammar is compiled before its answer is drawn, by the engine's `grammars`")
        self._matcher = None if grammar is None else grammar.matcher()
        self.logits, self._params = logits, params
        self._stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
        self._processors = params.processors(len(prompt_ids), sorted(self._stops), self._matcher, logits.device)
        self._generator = torch.Generator(device=logits.device)
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)
        self._ids = prompt_ids[None]
        self._prompt_length = len(prompt_ids)
        self.finish_reason: str | None = None

    def __len__(self) -> int:
        return self._ids.shape[1]

    @property
    def count(self) -> int:
        return len(self) - self._prompt_length

    @property
    def token_ids(self) -> list[int]:
        return [int(i) for i in self._ids[0, self._prompt_length :]]

    @property
    def last_id(self) -> torch.Tensor:
        """The last token of prompt and answer, [1] int64."""
        return self._ids[0, -1:]

    @property
    def has_begun(self) -> bool:
        """True once a token was sampled: the next token needs new logits."""
        return self.count > 0

    def sample(self) -> int:
        """Samples the next token from `logits` and appends it. Raises `ModelOverflowError`: infinities or NaN."""
        if not bool(self.logits.max().isfinite()):  # of NaN the most likely token would be any, and a grammar has none
            found = f"the model's logits behind token {len(self)} have infinities or NaN"
            raise ModelOverflowError(found, self.logits.dtype)
        scores: torch.Tensor = self._processors(self._ids, self.logits[None].float())[0]
        if self._params.greedy:
            token = scores.argmax()
        else:
            token = torch.multinomial(scores.softmax(-1), 1, generator=self._generator)[0]
        self._ids = torch.cat([self._ids, token[None, None]], dim=1)
        if int(token) in self._stops:
            self.finish_reason = "stop"
        elif self.count >= self._params.max_new_tokens:
            self.finish_reason = "length"
        elif self._matcher is not None:
            self._matcher.accept(int(token))
        return int(token)
