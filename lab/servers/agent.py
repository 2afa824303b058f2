"""Time to first token by turn: prefix caching, tool results marked as content parts, and nothing marked.

Each arm has a server and a cold store of its own, and gets the same requests in the same order. Arms take turns by
session; while one is asked, the others are stopped. Between turns an agent runs its tools: a pause, the same for all.

    turn 1   head, task  [A B C]                      question    a search: several results at once
    turn 2   head, task  [A B C D]  note 1            question    one more is read; A B C are an exact prefix
    turn 3   head, task  [D B E C]  note 1, note 2    question    the oldest is dropped, the rest is ordered anew

Tool results are real passages, drawn from one pool, so that later turns and sessions read some of them again.
"""

import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cacheblend.core.errors import InvalidInputError
from cacheblend.data import read_passages
from cacheblend.engines.provenance import stamp
from lab.bench import Advance, draw_curves, picture, silent
from lab.servers.embedded_server import chatting
from lab.servers.vllm_server import folder_of
from lab.settings import Agent, Sizes

HEAD = (
    "You are a careful research agent. Read what the tools have returned, say what is still missing, and answer the "
    "task as soon as the results allow it. Name the result that each statement comes from."
)
OPENING, CLOSING = "Result of the tool:\n", "\n"
REQUEST = "\nAnswer in one sentence."
NOTE_CHARACTERS = 160
"""Of what an agent keeps of a turn."""


Marked = Literal["results", "question"]


@dataclass(frozen=True)
class Turn:
    """One request."""

    session: int
    number: int
    notes: tuple[str, ...]
    results: tuple[str, ...]
    task: str
    question: str

    def messages(self, marked: Marked | None = None) -> list[dict[str, Any]]:
        """As OpenAI's API takes them; what is marked has content parts of its own, and the text is always the same."""
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


def tool_results(path: Path, tokenizer: Any, sizes: Sizes) -> list[str]:
    """Different texts of about `result_tokens` tokens, passages joined where one is too short."""
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
    """The turns of each session, of such `tool_results`; the seed is of what is read, and of orders."""
    rng, sessions = random.Random(seed), list[list[Turn]]()
    for session in range(1, sizes.sessions + 1):
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
        sessions.append(turns)
    return sessions


# ---- the comparison -----------------------------------------------------------------------------------------

PREFIX, MARKED, DISCOVERED = "prefix caching", "marked", "discovered"
ARMS = (PREFIX, MARKED, DISCOVERED)
OPTIONS: dict[str, tuple[str, ...]] = {
    PREFIX: ("--no-discover", "--chunk-tokens", "4"),
    MARKED: ("--no-discover",),
    DISCOVERED: ("--discover",),
}
"""Of each arm's server. All of them capture, and find exact prefixes."""

MARKS: dict[str, Marked | None] = {PREFIX: "question", MARKED: "results", DISCOVERED: None}
"""What each arm's client marks. The text in front of the first chunk is stored as an exact prefix, at its first
sighting. So the question, which never comes again, is prefix caching's only chunk: it gets all that it can use, and
blends nothing. With discovery what prompts begin with is stored at its second sighting."""

FIRST_COUNTED = 3
"""Turns from here on are what the gain is of."""
ANSWER_TOKENS = 4


def run(what: Agent, sizes: Sizes, advance: Advance = silent) -> dict[str, Any]:
    """Asks all sessions of all arms; returns `figures` and every request."""
    from transformers import AutoTokenizer

    asked: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    total = len(ARMS) * sizes.sessions * sizes.turns
    with ExitStack() as stack:
        folder = stack.enter_context(folder_of(what, what.seed))
        results = tool_results(what.data, AutoTokenizer.from_pretrained(folder), sizes)
        clients = {arm: stack.enter_context(chatting(folder, what.ratio, OPTIONS[arm])) for arm in ARMS}
        for number, session in enumerate(conversations(results, sizes, what.seed)):
            for arm in (*ARMS[number % len(ARMS) :], *ARMS[: number % len(ARMS)]):
                with clients[arm].alone([clients[other] for other in ARMS if other != arm]):
                    for turn in session:
                        got = clients[arm].ask(turn.messages(MARKS[arm]), ANSWER_TOKENS)
                        time.sleep(what.pause)
                        facts: dict[str, Any] = {"session": turn.session, "turn": turn.number, "ttft_s": got.ttft_s}
                        facts |= {"prompt_tokens": got.prompt_tokens, "hit_tokens": got.hit_tokens}
                        asked[arm].append(facts)
                        advance(sum(map(len, asked.values())), total)
        learnt = clients[DISCOVERED].metrics("cacheblend_discov")
    name = what.model.name if what.model else what.shape
    settings = {key: value for key, value in vars(what).items() if key != "pause"}
    return {
        "figures": figures(asked),
        "ttft_by_turn_s": {arm: by_turn(requests) for arm, requests in asked.items()},
        "requests": asked,
        "discovery": learnt,
        "model": name,
        "settings": {
            **settings,
            "model": what.model and name,
            "data": what.data.name,
            "sizes": vars(sizes),
            "pause_s": what.pause,
            "answer_tokens": ANSWER_TOKENS,
            "servers": OPTIONS,
            "marks": MARKS,
        },
        **stamp(),
    }


def figures(asked: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Medians of turns from `FIRST_COUNTED` on, prefix caching by the others, and the share of tokens loaded."""
    late = {arm: [each for each in requests if each["turn"] >= FIRST_COUNTED] for arm, requests in asked.items()}
    medians = {arm: statistics.median(each["ttft_s"] for each in requests) for arm, requests in late.items()}
    loaded = {
        f"loaded_{arm.split()[0]}": sum(sum(each["hit_tokens"].values()) for each in requests)
        / sum(each["prompt_tokens"] for each in requests)
        for arm, requests in late.items()
    }
    return {
        "agent_gain": medians[PREFIX] / medians[DISCOVERED],
        "agent_gain_marked": medians[PREFIX] / medians[MARKED],
        **loaded,
    }


def by_turn(requests: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Median seconds to the first token, by turn."""
    turns = sorted({each["turn"] for each in requests})
    return {str(turn): statistics.median(each["ttft_s"] for each in requests if each["turn"] == turn) for turn in turns}


def plot(result: dict[str, Any], path: Path) -> None:
    """Draws time to first token by turn, a line an arm and a dot a request."""
    medians = {arm: (list(map(int, times)), list(times.values())) for arm, times in result["ttft_by_turn_s"].items()}
    gain, pause = result["figures"]["agent_gain"], result["settings"]["pause_s"]
    title = f"An agent on {result['model']}, {pause:g} s between turns: {gain:.2f} times"
    with picture(path) as (axes,):
        for number, requests in enumerate(result["requests"].values()):
            turns, seconds = [each["turn"] for each in requests], [each["ttft_s"] for each in requests]
            axes.scatter(turns, seconds, s=12, alpha=0.4, color=f"C{number}")
        draw_curves(axes, medians, title, xlabel="turn", ylabel="time to first token, s", ylim=(0, None))
