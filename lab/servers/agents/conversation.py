"""An agent's requests, made of real passages: tool results that stay, move, go and come back.

    turn 1   head, task  [A B C]                      question    a search: several results at once
    turn 2   head, task  [A B C D]  note 1            question    one more is read; A B C are an exact prefix
    turn 3   head, task  [D B E C]  note 1, note 2    question    the oldest is dropped, the rest is ordered anew

Tool results are drawn from one pool, so that later turns and sessions read some of them again. Knows no server.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from cacheblend.core.errors import InvalidInputError
from cacheblend.data import read_passages

HEAD = (
    "You are a careful research agent. Read what the tools have returned, say what is still missing, and answer the "
    "task as soon as the results allow it. Name the result that each statement comes from."
)
OPENING, CLOSING = "Result of the tool:\n", "\n"
REQUEST = "\nAnswer in one sentence."
NOTE_CHARACTERS = 160
"""Of what an agent keeps of a turn."""


Marked = Literal["results", "question"]


class Tokenizer(Protocol):
    """What is used of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text."""

    def decode(self, token_ids: list[int]) -> str:
        """Text of ids."""


@dataclass(frozen=True)
class Sizes:
    """Of the conversations.

    Attributes:
        sessions: conversations one after the other, each with a task of its own.
        turns: requests of a session.
        results: different tool results that there are.
        result_tokens: about as many tokens has each, by the model's tokenizer.
        first_reads: results of the first turn's search.
        reads: results that each further turn adds.
        kept: results that a request has at most; the oldest are dropped.
        reorder: share of the turns that order the results anew.
    """

    sessions: int = 3
    turns: int = 6
    results: int = 10
    result_tokens: int = 384
    first_reads: int = 4
    reads: int = 1
    kept: int = 6
    reorder: float = 0.5

    def __post_init__(self) -> None:
        if self.results <= self.kept:
            raise InvalidInputError(f"{self.results} tool results, {self.kept} kept: there must be more than are kept")
        if max(self.first_reads, self.reads) > self.kept:
            most = max(self.first_reads, self.reads)
            raise InvalidInputError(f"a turn reads {most} tool results, of which only {self.kept} are kept; keep more")


@dataclass(frozen=True)
class Turn:
    """One request.

    Attributes:
        session, number: of the turn, from 1.
        notes: what the agent has kept of the turns before, oldest first.
        results: tool results, in the order of the request.
        task, question: of the session and of the turn.
    """

    session: int
    number: int
    notes: tuple[str, ...]
    results: tuple[str, ...]
    task: str
    question: str

    def messages(self, marked: Marked | None = None) -> list[dict[str, Any]]:
        """As OpenAI's API takes them; the text is the same whatever is marked.

        Args:
            marked: what is content parts of their own: the tool results, or the question alone; None: every message is
                one string.
        """
        read = [self.task, *(piece for result in self.results for piece in (OPENING, result, CLOSING))]
        asked = [self.question, REQUEST]
        notes = [{"role": "assistant", "content": note} for note in self.notes]
        return [
            {"role": "system", "content": HEAD},
            {"role": "user", "content": _content(read, marked == "results")},
            *notes,
            {"role": "user", "content": _content(asked, marked == "question")},
        ]


def _content(texts: Sequence[str], in_parts: bool) -> str | list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts] if in_parts else "".join(texts)


def tool_results(path: Path, tokenizer: Tokenizer, sizes: Sizes) -> list[str]:
    """Different texts of about `result_tokens` tokens, passages joined where one is too short.

    Raises:
        InvalidInputError: the file cannot be read, or has too little text.
    """
    found, ids = list[str](), list[int]()
    for passage in dict.fromkeys(passage.text for passage in read_passages(path)):
        ids += tokenizer.encode(passage + "\n", add_special_tokens=False)
        while len(ids) >= sizes.result_tokens and len(found) < sizes.results:
            found.append(tokenizer.decode(ids[: sizes.result_tokens]).strip())
            ids = ids[sizes.result_tokens :]
        if len(found) == sizes.results:
            return found
    raise InvalidInputError(
        f"{path} gives {len(found)} tool results of {sizes.result_tokens} tokens, {sizes.results} are needed"
    )


def conversations(results: Sequence[str], sizes: Sizes, seed: int) -> list[list[Turn]]:
    """The turns of each session.

    Args:
        results: as `tool_results`.
        sizes: of the conversations.
        seed: of what is read, and of orders.
    """
    rng = random.Random(seed)
    return [_session(number, results, sizes, rng) for number in range(1, sizes.sessions + 1)]


def _session(session: int, results: Sequence[str], sizes: Sizes, rng: random.Random) -> list[Turn]:
    turns, read, order, notes = list[Turn](), list[int](), list[int](), list[str]()
    for number in range(1, sizes.turns + 1):
        unread = [index for index in range(len(results)) if index not in read]
        new = rng.sample(unread, min(len(unread), sizes.first_reads if number == 1 else sizes.reads))
        read = [*read, *new][-sizes.kept :]  # by age
        order = [index for index in [*order, *new] if index in read]
        if number > 1 and rng.random() < sizes.reorder:
            rng.shuffle(order)
        task = f"Task {session}: compare what the results say, step by step."
        question = f"Turn {number} of task {session}: what follows from these {len(order)} results?"
        turns.append(Turn(session, number, tuple(notes), tuple(results[index] for index in order), task, question))
        notes.append(f"Note {number} of task {session}: " + results[new[0]][:NOTE_CHARACTERS])
    return turns
