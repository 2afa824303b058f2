"""A RAGPulse trace, read and replayed: which requests, what is stored before, first tokens by rate, the most to gain.

Its folder is the data set's (flashserve/RAGPulse): `0_trace.jsonl` has the requests in order of arrival, others the
length of each text. Of texts only ids and lengths are known; tokens are random.

A request is a few new tokens, its passages, the user's input: only the passages recur, as in the trace, where a system
prompt of its own precedes each request.
"""

import json
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cacheblend.core.errors import InvalidInputError
from lab.bench import AdvanceStage, draw_curves, picture
from lab.servers.clients import ask_at, poisson_times, random_ids

REQUESTS = "0_trace.jsonl"
LENGTHS = {
    "sys_prompt": "1_sys_prompt.jsonl",
    "passages_ids": "2_passages.jsonl",
    "history": "3_history.jsonl",
    "user_input": "4_user_input.jsonl",
    "web_search": "5_web_search.jsonl",
}


@dataclass(frozen=True)
class TraceText:
    """A text of the trace: id, and length in tokens."""

    id: int
    tokens: int

    def token_ids(self) -> list[int]:
        """Random ids of the tokenizer that ships; always the same for one text."""
        return random_ids(f"text {self.id}", self.tokens)


@dataclass(frozen=True)
class TraceRequest:
    """One request; each part in order."""

    system: tuple[TraceText, ...]
    passages: tuple[TraceText, ...]
    history: tuple[TraceText, ...]
    question: tuple[TraceText, ...]
    web_search: tuple[TraceText, ...]


def tokens_of(texts: Iterable[TraceText]) -> int:
    return sum(text.tokens for text in texts)


def read_trace(folder: Path) -> list[TraceRequest]:
    lengths: dict[int, int] = {}
    for file in LENGTHS.values():
        for line, row in _rows(folder / file):
            try:
                name = next(key for key in row if key.endswith("_id"))
                lengths[int(row[name])] = int(row["token_length"])
            except (StopIteration, KeyError, TypeError, ValueError):
                raise InvalidInputError(f"{folder / file}, line {line}: no id and token_length in {row!r}") from None
    return [_request(folder, line, row, lengths) for line, row in _rows(folder / REQUESTS)]


def _request(folder: Path, line: int, row: Mapping[str, Any], lengths: Mapping[int, int]) -> TraceRequest:
    def texts(name: str) -> tuple[TraceText, ...]:
        try:
            return tuple(TraceText(int(each), lengths[int(each)]) for each in row["hash_ids"][name])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInputError(
                f"{folder / REQUESTS}, line {line}: hash_ids.{name} is missing, or names a text whose length "
                f"{LENGTHS[name]} does not have ({error})"
            ) from None

    return TraceRequest(
        *(texts(name) for name in ("sys_prompt", "passages_ids", "history", "user_input", "web_search"))
    )


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidInputError(f"{path}: {error.strerror}; a RAGPulse folder has {REQUESTS} and lengths") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InvalidInputError(f"{path}, line {number}: {error}") from None
        if not isinstance(row, dict):
            raise InvalidInputError(f"{path}, line {number}: a row is an object, got {type(row).__name__}")
        yield number, row


# ---- the replay ---------------------------------------------------------------------------------------------

Prompt = TypeVar("Prompt")
CHECK_LAYER = 1  # as the benchmarks set it
FILL, RATES, LEARN = "filling the store", "rates", "learning"
OWN_TOKENS, ANSWER_TOKENS = 32, 4
"""New tokens that precede each request, and tokens of each answer."""
SHARES, RATE_REQUESTS = (0.2, 0.4, 0.6, 0.8), 24
"""Rates of requests, as shares of saturation; requests at each."""


@dataclass(frozen=True)
class Sample:
    """The requests, and the passages that are stored before they arrive.

    Attributes:
        requests: sampled from the last third.
        before: requests of the first two thirds.
        stored: passages that occur in both.
    """

    requests: list[TraceRequest]
    before: list[TraceRequest]
    stored: frozenset[TraceText]

    @staticmethod
    def of(trace: Sequence[TraceRequest], count: int, seed: int) -> "Sample":
        """Samples requests with passages from the last third of a trace."""
        cut = len(trace) * 2 // 3
        before, last = ([r for r in part if r.passages] for part in (trace[:cut], trace[cut:]))
        if len(last) < count:
            raise InvalidInputError(f"the trace's last third has {len(last)} requests with passages, not {count}")
        requests = random.Random(seed).sample(last, count)
        named = {passage for request in before for passage in request.passages}
        return Sample(requests, before, frozenset(p for r in requests for p in r.passages if p in named))

    @property
    def passages(self) -> list[list[int]]:
        """Token ids of what is stored."""
        return [passage.token_ids() for passage in sorted(self.stored, key=lambda passage: passage.id)]

    def held_tokens(self, request: TraceRequest) -> int:
        return tokens_of(p for p in request.passages if p in self.stored)

    def lengths(self, tokens: Sequence[int], layers: int, ratio: float) -> dict[str, Any]:
        """Of the requests' prompts: tokens, stored ones, and the most that blending can gain."""
        held = [self.held_tokens(request) for request in self.requests]
        ceiling = row_layer_ceiling(zip(tokens, held, strict=True), layers, ratio)
        return {"tokens": list(tokens), "held_tokens": held, "ceiling": ceiling}


def row_layer_ceiling(requests: Iterable[tuple[int, int]], layers: int, ratio: float) -> float:
    """Full prefill's row-layers over blending's: the gain if compute were all, and nothing else were shared.

    `requests` has (tokens, stored tokens) of each.
    """
    plain = blended = 0.0
    for tokens, held in requests:
        plain += tokens * layers
        blended += tokens * CHECK_LAYER + (tokens - held + ratio * held) * (layers - CHECK_LAYER)
    return plain / blended


def own_ids(seed: int, name: str) -> list[int]:
    """The new tokens in front of a request of this name."""
    return random_ids(f"{seed} own {name}", OWN_TOKENS)


def prompt(request: TraceRequest, own: list[int], *, whole: bool = False) -> list[int]:
    """Token ids of a request behind its own; `whole`: also its system prompt, history and web search."""
    texts: tuple[TraceText, ...] = (*request.passages, *request.question)
    if whole:
        texts = (*request.system, *request.passages, *request.history, *request.web_search, *request.question)
    return [*own, *(token for text in texts for token in text.token_ids())]


def at_rates(
    arms: Mapping[str, Callable[[Prompt], float]],
    prompts: Callable[[str, float], Sequence[Prompt]],
    shares: Sequence[float],
    saturation: float,
    seed: int,
    advance: AdvanceStage,
) -> list[dict[str, Any]]:
    """Time to first token at each share of the saturation, counted from when a request was due; arm after arm.

    `prompts` makes those of an arm at a share.
    """
    found = []
    for number, share in enumerate(shares, 1):
        point: dict[str, Any] = {"requests_per_s": share * saturation}
        for name, ask in arms.items():
            asked = prompts(name, share)
            due = poisson_times(share * saturation, len(asked), f"{seed} {share}")
            times = ask_at(ask, list(zip(due, asked, strict=True)))
            point[name] = {"ttft_s": times, "median_s": statistics.median(times)}
        found.append(point)
        advance(RATES, number, len(shares))
    return found


def draw_rates(
    rates: Sequence[dict[str, Any]], saturated: Mapping[str, tuple[str, float]], title: str, path: Path
) -> None:
    """Draws the points of `at_rates`, a curve for each server, and a line where it saturates.

    `saturated` has label and requests per second at saturation by the arm's name.
    """
    xs = [point["requests_per_s"] for point in rates]
    with picture(path) as (axes,):
        for number, (_, rate) in enumerate(saturated.values()):
            label = f"saturation, {rate:.2f} a second"
            axes.axvline(rate, linestyle="--", color=f"C{number}", alpha=0.6, label=label)
        curves = {label: (xs, [point[name]["median_s"] for point in rates]) for name, (label, _) in saturated.items()}
        draw_curves(
            axes, curves, title, xlabel="requests per second", ylabel="median time to first token, s", ylim=(0, None)
        )
