"""Time to first token by turn: prefix caching, tool results marked as content parts, and nothing marked.

Each arm has a server and a cold store of its own, and gets the same requests in the same order. Arms take turns by
session; while one is asked, the others are stopped. Between turns an agent runs its tools: a pause, the same for all.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cacheblend.bench.stamp import stamp
from cacheblend.engines.hf.shapes import check_choice
from lab.servers.agents.conversation import Sizes, Turn, conversations, tool_results
from lab.servers.agents.servers import DISCOVERED, MARKED, MARKS, OPTIONS, PREFIX, ChatClient, chatting
from lab.servers.vllm_server import shape_folder

ARMS = (PREFIX, MARKED, DISCOVERED)
FIRST_COUNTED = 3
"""Turns from here on are what the gain is of."""


@dataclass(frozen=True)
class AgentBench:
    """What is measured.

    Attributes:
        data: passages, as `cacheblend.data.read_passages` reads them.
        model: a model folder; or `shape`: random weights of a known shape.
        sizes: of the conversations.
        ratio: recompute ratio.
        pause_s: seconds between an answer and the next request.
        answer_tokens: tokens of an answer.
        seed: of weights and of everything drawn.
    """

    data: Path
    model: str | None = None
    shape: str | None = None
    sizes: Sizes = field(default_factory=Sizes)
    ratio: float = 0.15
    pause_s: float = 4.0
    answer_tokens: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice(self.model, self.shape)


def run(what: AgentBench, advance: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Any]:
    """Asks all sessions of all arms; returns `figures` and every request.

    Args:
        what: is measured.
        advance: called with requests done, and in all.

    Raises:
        InvalidInputError: the passages or the model cannot be read, or a server does not start.
    """
    from transformers import AutoTokenizer

    asked: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    total = len(ARMS) * what.sizes.sessions * what.sizes.turns
    with ExitStack() as stack:
        folder = Path(what.model) if what.model else stack.enter_context(shape_folder(what.shape or "", what.seed))
        results = tool_results(what.data, AutoTokenizer.from_pretrained(folder), what.sizes)
        clients = {arm: stack.enter_context(chatting(arm, folder, what.ratio)) for arm in ARMS}
        for number, session in enumerate(conversations(results, what.sizes, what.seed)):
            for arm in _rotated(ARMS, number):
                with clients[arm].alone([clients[other] for other in ARMS if other != arm]):
                    for turn in session:
                        asked[arm].append(_ask(clients[arm], arm, turn, what))
                        advance(sum(map(len, asked.values())), total)
        learnt = clients[DISCOVERED].figures()
    name = Path(what.model).name if what.model else what.shape
    return {
        "figures": figures(asked),
        "ttft_by_turn_s": {arm: by_turn(requests) for arm, requests in asked.items()},
        "requests": asked,
        "discovery": learnt,
        "model": name,
        "settings": {
            **vars(what),
            "model": what.model and name,
            "data": what.data.name,
            "sizes": vars(what.sizes),
            "servers": OPTIONS,
            "marks": MARKS,
        },
        **stamp(),
    }


def _ask(client: ChatClient, arm: str, turn: Turn, what: AgentBench) -> dict[str, Any]:
    """One request and the pause behind it."""
    got = client.ask(turn.messages(MARKS[arm]), what.answer_tokens)
    time.sleep(what.pause_s)
    return {
        "session": turn.session,
        "turn": turn.number,
        "ttft_s": got.ttft_s,
        "prompt_tokens": got.prompt_tokens,
        "hit_tokens": got.hit_tokens,
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


def table(result: dict[str, Any]) -> str:
    """A line for each arm with its medians by turn, then one for each figure."""
    lines = [
        f"{arm}: " + "  ".join(f"{seconds:.2f}" for seconds in times.values()) + " s by turn"
        for arm, times in result["ttft_by_turn_s"].items()
    ]
    return "\n".join([*lines, *(f"{name}: {value:.3f}" for name, value in result["figures"].items())])


def plot(result: dict[str, Any], path: Path) -> None:
    """Draws time to first token by turn, a line an arm and a dot a request. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for number, (arm, requests) in enumerate(result["requests"].items()):
        medians = result["ttft_by_turn_s"][arm]
        axes.plot([int(turn) for turn in medians], list(medians.values()), marker="o", color=f"C{number}", label=arm)
        turns, seconds = [each["turn"] for each in requests], [each["ttft_s"] for each in requests]
        axes.scatter(turns, seconds, s=12, alpha=0.4, color=f"C{number}")
    axes.set(xlabel="turn", ylabel="time to first token, s", ylim=(0, None))
    gain, pause = result["figures"]["agent_gain"], result["settings"]["pause_s"]
    axes.set_title(f"An agent on {result['model']}, {pause:g} s between turns: {gain:.2f} times", parse_math=False)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _rotated(arms: Sequence[str], number: int) -> list[str]:
    at = number % len(arms)
    return [*arms[at:], *arms[:at]]
