"""The guards of all tests: what is mended without a word is counted, no benchmark shows a figure with it, and what a
run leaves out has its turn in another one.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import failing
from cacheblend.cli.bench import ResultOptions
from cacheblend.core.errors import CacheBlendError
from cacheblend.core.failures import count_failure, failures
from cacheblend.engines.hf.background import Background
from campaign import leave_out, rotating, seeds
from lab.servers.processes import count_failed, failed_in

VLLM = """
# HELP vllm:cacheblend_failures_total What failed and was mended.
vllm:cacheblend_failures_total{engine="0",model_name="served",reason="InvalidInputError"} 21.0
vllm:cacheblend_fallbacks_total{engine="0",model_name="served",reason="InvalidInputError"} 21.0
vllm:cacheblend_fallbacks_total{engine="0",model_name="served",reason="bad spans"} 3.0
vllm:cacheblend_failures_total{engine="0",model_name="served",reason="slow store"} 2.0
vllm:cacheblend_failures_created{engine="0",model_name="served",reason="slow store"} 1.7e9
vllm:cacheblend_failures_total{engine="0",model_name="served",reason="shadow check"} 1.0
vllm:cacheblend_not_blended_total{engine="0",model_name="served",reason="nothing stored"} 9.0
"""
EMBEDDED = """
cacheblend_failures_total{reason="block lost"} 2.0
cacheblend_failures_total{reason="background work"} 1.0
cacheblend_fallbacks_total{reason="lost block"} 2.0
cacheblend_captures_given_up_total{reason="queue full"} 5.0
"""


class Item:
    """A test as pytest collects it."""

    def __init__(self, nodeid: str, *marks: Any) -> None:
        self.nodeid, self._marks = nodeid, marks

    def iter_markers(self, name: str) -> list[Any]:
        return [mark for mark in self._marks if mark.name == name]

    def get_closest_marker(self, name: str) -> Any:
        return next(iter(self.iter_markers(name)), None)


def check(*declared: str) -> None:
    """As behind a test that declares these reasons."""
    failing.check(Item("t.py::declares", pytest.mark.may_fail(*declared).mark))  # type: ignore[arg-type]


def test_a_failure_fails_its_test_once_unless_it_is_declared(tmp_path: Path) -> None:
    for declared in ((), ("another",)):
        count_failure("RuntimeError", 2)
        with pytest.raises(pytest.fail.Exception, match="2 RuntimeError: failed, and was mended"):
            check(*declared)
        check()
    for known in ("RuntimeError", "*"):
        count_failure("RuntimeError")
        check(known)
        check()
    (tmp_path / "job.failed").write_text(json.dumps({"InvalidInputError": 3}))  # as a child writes it
    failing.take(tmp_path / "job.failed")
    failing.take(tmp_path / "none")
    with pytest.raises(pytest.fail.Exception, match="3 InvalidInputError"):
        check()


@pytest.mark.may_fail("background work")
def test_errors_in_background_threads_and_in_servers_are_failures() -> None:
    before, background = failures().get("background work", 0), Background(4)
    background.submit("one", lambda: 1 // 0)
    assert background.flush(10)
    background.close()
    assert failures()["background work"] == before + 1
    # of servers by their counters
    assert failed_in(VLLM.splitlines()) == {"InvalidInputError": 21, "slow store": 2, "shadow check": 1}
    assert failed_in(EMBEDDED.splitlines()) == {"block lost": 2, "background work": 1}


@pytest.mark.may_fail("InvalidInputError", "slow store", "shadow check")
def test_no_benchmark_shows_figures_with_a_failed_blend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    options = ResultOptions(json_file=out)
    count_failure("slow store")  # before the benchmark
    options.check()
    options.show("speedup: 3", {"figures": {"speedup": 3}})
    assert json.loads(out.read_text()) == {"figures": {"speedup": 3}, "failed_blends": 0}
    assert capsys.readouterr().out == "speedup: 3\nfailed_blends: 0\n"
    options.check()
    count_failed(VLLM.splitlines())  # as `serving` does when its server has been measured
    words = "no figures .* 21 InvalidInputError, 1 shadow check, 2 slow store failed while it was measured"
    with pytest.raises(CacheBlendError, match=words):
        options.show("speedup: 3", {"figures": {"speedup": 3}})
    assert json.loads(out.read_text())["failed_blends"] == 24
    assert capsys.readouterr().out == ""


# ---- what a run leaves out has its turn in another one --------------------------------------------------------
def items() -> list[Any]:
    values = rotating(["core", *"abcdefg", ("h", 1)], core=["core"])
    marks = [getattr(value, "marks", ()) for value in values]
    made = [Item(f"t.py::{test}[{at}]", *marks[at]) for test in ("one", "two") for at in range(len(values))]
    return [*made, *(Item(f"t.py::grid[{at}]", pytest.mark.slow.mark) for at in range(7)), Item("t.py::quick")]


@pytest.mark.parametrize("first", [0, 3, 10**6 - 1])
def test_five_runs_one_after_the_other_have_every_test_and_each_about_a_fifth(first: int) -> None:
    had: set[str] = set()
    for seed in range(first, first + 5):
        kept = items()
        left = leave_out(kept, seed, 5)
        names = {item.nodeid for item in kept}
        assert {"t.py::quick", "t.py::one[0]", "t.py::two[0]"} <= names and 17 <= len(left) <= 21
        assert {at.partition("[")[2] for at in names if "one" in at} == {
            at.partition("[")[2] for at in names if "two" in at
        }  # the same families
        had |= names
    assert had == {item.nodeid for item in items()}
    kept = items()
    assert leave_out(kept, 7, 1) == [] and len(kept) == len(items()), "all run where every campaign does"


@pytest.mark.parametrize(("count", "known"), [(16, 600), (600, 600), (1, 5), (5, 12)])
def test_seeds_are_known_to_go_well_and_none_comes_twice(count: int, known: int) -> None:
    drawn = seeds(count, known)
    assert len(set(drawn)) == count and set(drawn) <= set(range(known))
    assert set(range(count - count // 2)) <= set(drawn)
