"""Decoding, a step at a time: transformers' own logits processors and cache classes, and a text stream with stops."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.load.loader import LayerKV

GREEDY_BELOW = 1e-5
"""A temperature under it is greedy: logits divided by it would leave float32."""
_PENALTY_MIN, _PENALTY_MAX = 1e-2, 1e2


@dataclass(frozen=True)
class SamplingParams:
    """How an answer is drawn.

    Attributes:
        max_tokens: of the answer, at least 1.
        temperature: 0 is greedy, as is all below `GREEDY_BELOW`.
        top_k, top_p, min_p: as transformers' processors of these names; 0, 1 and 0 switch them off.
        repetition_penalty: 0.01 to 100; 1 switches it off.
        seed: the same seed draws the same answer; None: a new one each time.
        stop: texts that end the answer and are cut off.
        stop_token_ids: ids that end it, besides the model's own.
        ignore_eos: go on to `max_tokens` whatever comes.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InvalidInputError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidInputError(f"temperature must be finite and at least 0, got {self.temperature}")
        if self.top_k < 0:
            raise InvalidInputError(f"top_k must be at least 0 (off), got {self.top_k}")
        if not _PENALTY_MIN <= self.repetition_penalty <= _PENALTY_MAX:
            raise InvalidInputError(
                f"repetition_penalty lies in {_PENALTY_MIN:g}..{_PENALTY_MAX:g}, got {self.repetition_penalty}"
            )
        if not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise InvalidInputError(f"top_p lies in 0..1 (above 0), min_p in 0..1, got {self.top_p} and {self.min_p}")
        if isinstance(self.stop, str):
            raise InvalidInputError(f"stop must be a tuple of texts, not the text {self.stop!r}")
        if any(not text for text in self.stop):
            raise InvalidInputError("a stop text must not be empty")

    @property
    def greedy(self) -> bool:
        """Nothing is drawn: the likeliest token is taken."""
        return self.temperature < GREEDY_BELOW

    def processors(self) -> LogitsProcessorList:
        """Penalties first, then warpers, in transformers' own order."""
        chosen = []
        if self.repetition_penalty != 1:
            chosen.append(RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty)))
        if not self.greedy:
            chosen += [TemperatureLogitsWarper(float(self.temperature))] if self.temperature != 1 else []
            chosen += [TopKLogitsWarper(self.top_k)] if self.top_k else []
            chosen += [TopPLogitsWarper(self.top_p)] if self.top_p < 1 else []
            chosen += [MinPLogitsWarper(self.min_p)] if self.min_p > 0 else []
        return LogitsProcessorList(chosen)


class Draws:
    """One answer's tokens, drawn one by one from logits that somebody computes.

    Args:
        prompt_ids: [tokens] int64 on the model's device.
        logits: [vocab] of the prompt's last position.
        params: how to draw.
        eos_ids: ids that end the model's answers.

    Attributes:
        logits: [vocab] that the last token was drawn from; before the first, those it will be drawn from.
        finish_reason: ``stop`` or ``length`` behind the last token.
    """

    def __init__(
        self, prompt_ids: torch.Tensor, logits: torch.Tensor, params: SamplingParams, eos_ids: Sequence[int]
    ) -> None:
        self.logits, self._params = logits, params
        self._processors = params.processors()
        self._stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
        self._generator = torch.Generator(device=logits.device)
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)
        self._ids = prompt_ids[None]
        self._prompt_length = len(prompt_ids)
        self.finish_reason: str | None = None

    def __len__(self) -> int:
        """Tokens of prompt and answer."""
        return self._ids.shape[1]

    @property
    def count(self) -> int:
        """Tokens of the answer so far."""
        return len(self) - self._prompt_length

    @property
    def token_ids(self) -> list[int]:
        """The answer so far."""
        return [int(i) for i in self._ids[0, self._prompt_length :]]

    @property
    def last_id(self) -> torch.Tensor:
        """[1] the last token of prompt and answer."""
        return self._ids[0, -1:]

    @property
    def has_begun(self) -> bool:
        """A token was drawn: the next one needs logits of its own."""
        return self.count > 0

    def draw(self) -> int:
        """The next token, from `logits`."""
        scores: torch.Tensor = self._processors(self._ids, self.logits[None].float())[0]
        if self._params.greedy:
            token = scores.argmax()
        else:
            token = torch.multinomial(scores.softmax(-1), 1, generator=self._generator)[0]
        self._ids = torch.cat([self._ids, token[None, None]], dim=1)
        if int(token) in self._stops:
            self.finish_reason = "stop"
        elif self.count >= self._params.max_tokens:
            self.finish_reason = "length"
        return int(token)


class Decoding:
    """One sequence by transformers' own forward and cache: the next token at each `step`.

    Args:
        model: the loaded model.
        kv: the prompt's KV cache, or transformers' own, filled. A list is moved into one behind the first token,
            and emptied.
        prompt_ids, logits, params, eos_ids: see `Draws`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kv: list[LayerKV] | DynamicCache,
        prompt_ids: torch.Tensor,
        logits: torch.Tensor,
        params: SamplingParams,
        eos_ids: Sequence[int],
    ) -> None:
        self._model, self._kv = model, kv
        self._draws = Draws(prompt_ids, logits, params, eos_ids)

    @property
    def token_ids(self) -> list[int]:
        """The answer so far."""
        return self._draws.token_ids

    @property
    def finish_reason(self) -> str | None:
        """See `Draws`."""
        return self._draws.finish_reason

    @property
    def logits(self) -> torch.Tensor:
        """See `Draws`."""
        return self._draws.logits

    @torch.no_grad()
    def step(self) -> int:
        """Draws the next token; sets `finish_reason` behind the last one."""
        if self._draws.has_begun:
            self._draws.logits = self._forward()
        return self._draws.draw()

    def _forward(self) -> torch.Tensor:
        if not isinstance(self._kv, DynamicCache):
            self._kv = fill_cache(self._model, self._kv)
        last = self._draws.last_id
        position = torch.tensor([[len(self._draws) - 1]], device=last.device)
        out = self._model(input_ids=last[None], position_ids=position, past_key_values=self._kv, use_cache=True)
        logits: torch.Tensor = out.logits[0, -1]
        return logits


def fill_cache(model: PreTrainedModel, kv: list[LayerKV]) -> DynamicCache:
    """transformers' own cache with a prompt's KV in it; empties `kv` on the way, so that no layer is held twice."""
    cache = DynamicCache(config=model.config)
    for layer in range(len(kv)):
        keys, values = kv.pop(0)
        cache.update(keys[None], values[None], layer)
    return cache


class TextStream:
    """Ids to text as they come: no half characters, no half stop texts.

    Args:
        decode: ids to text.
        stop: texts that end the answer.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, stop
        self._ids: list[int] = []
        self._sent = ""  # it stays, even where a later token makes the bytes of a run unreadable
        self.text = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Text that is new and certain."""
        self._ids.append(token_id)
        return self._advance(final=False)

    def finish(self) -> str:
        """What was held back."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        if self.stopped:
            return ""
        self.text = self._sent + self._decode(self._ids)[len(self._sent) :]
        found = [at for at in (self.text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True
        certain = len(self.text) if final or self.stopped else len(self.text) - self._uncertain()
        new = self.text[len(self._sent) : certain]
        self._sent += new
        return new

    def _uncertain(self) -> int:
        """Characters at the end that later tokens may change, or that may begin a stop text."""
        whole = self.text.rstrip("\ufffd")
        starts = (n for stop in self._stop for n in range(1, len(stop)) if whole.endswith(stop[:n]))
        return len(self.text) - len(whole) + max(starts, default=0)
