"""A store that does not answer while others decode: nobody waits for it, neither in a step nor when something ends."""

from typing import Any

import pytest

from vllm_running import EXTENDED, Served, Texts, ask


@pytest.mark.may_fail("slow store")
@pytest.mark.usefixtures("extension")
def test_a_store_that_hangs_holds_up_nobody(llama: Served) -> None:
    texts = Texts(41)
    passages = texts.passages(4)
    one, two = texts.prompt(passages[:3]), texts.prompt([passages[3], passages[0], passages[1]])
    plain = texts.ids(40)

    def begin(name: str, asked: Any = None, tokens: int = 8) -> dict[str, Any]:
        what = {"ids": plain} if asked is None else {"ids": asked.ids, "chunks": asked.spans}
        return {"begin": name, **what, "sampling": {"max_tokens": tokens}}

    steps: dict[str, dict[str, Any]] = {
        "exact": {"ask": [one.ids, two.ids], "chunks": [[], []]},
        "warm": ask([one, two], alone=True),
        "right": ask([one, two]),
        "hang": {"rpc": ["hang_store", True]},
        "plain begins": begin("plain", tokens=60),
        "plain decodes": {"until": "plain", "steps": 5},
        "one begins": begin("one", one),
        "two begins": begin("two", two),
        "plain ends": {"until": "plain"},  # reads hang meanwhile: an engine that waits for them stays here
        "one is not there": {"until": "one", "steps": 3},
        "two is aborted": {"abort": "two"},
        "steps go on": {"until": "one", "steps": 3},
        "answers": {"rpc": ["hang_store", False]},
        "one is there": {"until": "one"},
        "hangs again": {"rpc": ["hang_store", True]},
        "soon late": {"rpc": ["read_timeout", 0.2]},
        "no pause": {"rpc": ["pause_after_slow_reads", 0.0]},
        "late begins": begin("late", two),
        "late ends": {"until": "late"},
        "answers again": {"rpc": ["hang_store", False]},
        "two begins again": begin("again", two),
        "two is there": {"until": "again"},
        "hangs to the end": {"rpc": ["hang_store", True]},
        "no longer late": {"rpc": ["read_timeout", 600.0]},
        "last begins": begin("last", one),
        "last is read": {"until": "last", "steps": 4},  # and the process ends meanwhile
    }
    extra = {"recompute_ratio": 0.1, "min_reused_share": 0.0}
    result = llama.run(list(steps.values()), extra, enable_prefix_caching=False, **EXTENDED)
    found = dict(zip(steps, result["answers"], strict=True))
    (exact_two,) = found["exact"][1]["tokens"]
    right_one, right_two = (answer["tokens"] for answer in found["right"])
    assert right_two != [exact_two]
    assert found["plain ends"]["steps"] == 60 - 5  # one token a step: nothing took its place
    for name in ("one is not there", "steps go on", "last is read"):
        assert found[name]["tokens"] is None
    assert found["one is there"]["tokens"] == right_one
    assert found["late ends"]["tokens"] == [exact_two]
    assert found["two is there"]["tokens"] == right_two
    assert result["metrics"]["vllm:cacheblend_fallbacks slow store"] == 1
