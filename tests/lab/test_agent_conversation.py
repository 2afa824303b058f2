"""An agent's requests: what stays, moves, goes and comes back; and what is made of the answers."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from cacheblend.core.errors import InvalidInputError
from cacheblend.nano import model_path
from lab.servers.agents.conversation import Sizes, Turn, conversations, tool_results
from lab.servers.agents.run import FIRST_COUNTED, figures
from lab.servers.agents.servers import DISCOVERED, MARKED, PREFIX


def _text(message: dict[str, object]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)  # type: ignore[union-attr]


@given(
    st.builds(
        lambda kept, more, first, reads, turns, reorder: Sizes(
            sessions=2, turns=turns, results=kept + more, first_reads=min(first, kept), reads=min(reads, kept),
            kept=kept, reorder=reorder,
        ),
        st.integers(1, 6), st.integers(1, 5), st.integers(1, 6), st.integers(1, 6), st.integers(3, 8),
        st.sampled_from([0.0, 0.5, 1.0]),
    ),
    st.integers(0, 99),
)  # fmt: skip
def test_history_grows_and_results_are_dropped_oldest_first(sizes: Sizes, seed: int) -> None:
    results = [f"result {number} " for number in range(sizes.results)]
    sessions = conversations(results, sizes, seed)
    assert sessions == conversations(results, sizes, seed)
    assert [[turn.number for turn in session] for session in sessions] == [list(range(1, sizes.turns + 1))] * 2
    for session in sessions:
        for before, turn in pairwise(session):
            assert turn.notes[:-1] == before.notes and len(turn.notes) == turn.number - 1
            assert len(set(turn.results)) == len(turn.results) <= sizes.kept
            assert len(set(turn.results) - set(before.results)) >= 1, "each turn reads something"
            if not sizes.reorder:  # without reordering what stays keeps its order
                stays = [each for each in before.results if each in turn.results]
                assert list(turn.results[: len(stays)]) == stays


@given(st.lists(st.text(min_size=1), min_size=1, max_size=4), st.lists(st.text(min_size=1), max_size=3))
def test_marks_do_not_change_the_text(results: list[str], notes: list[str]) -> None:
    turn = Turn(1, 2, tuple(notes), tuple(results), "a task", "a question")
    plain = turn.messages()
    assert all(isinstance(message["content"], str) for message in plain)
    for marked in (turn.messages("results"), turn.messages("question")):
        assert [_text(message) for message in marked] == [_text(message) for message in plain]
        assert [message["role"] for message in marked] == [message["role"] for message in plain]
        assert sum(isinstance(message["content"], list) for message in marked) == 1


def test_tool_results_have_the_length_that_is_asked_for(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    data = tmp_path / "passages.json"
    data.write_text(json.dumps([{"text": f"The mill number {n} stands by the river. " * 6} for n in range(20)]))
    sizes = Sizes(results=7, result_tokens=64)
    found = tool_results(data, tokenizer, sizes)
    assert len(set(found)) == 7
    assert all(abs(len(tokenizer.encode(text, add_special_tokens=False)) - 64) <= 8 for text in found)
    with pytest.raises(InvalidInputError, match="are needed"):
        tool_results(data, tokenizer, Sizes(results=7, result_tokens=100_000))


@pytest.mark.parametrize("wrong", [{"results": 6}, {"first_reads": 7}, {"reads": 7}])
def test_sizes_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidInputError):
        Sizes(**wrong)


def test_the_gain_is_of_later_turns_alone() -> None:
    def requests(early: float, late: float) -> list[dict[str, object]]:
        same = {"hit_tokens": {"chunk": 5}, "prompt_tokens": 10}
        times = {turn: early if turn < FIRST_COUNTED else late for turn in range(1, 6)}
        return [{"turn": turn, "ttft_s": seconds, **same} for turn, seconds in times.items()]

    found = figures({PREFIX: requests(1, 6), MARKED: requests(9, 3), DISCOVERED: requests(9, 2)})
    assert found["agent_gain"] == 3 and found["agent_gain_marked"] == 2 and found["loaded_prefix"] == 0.5
