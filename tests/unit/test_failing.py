"""What is mended without a word is counted: the guard of all tests bites, and no benchmark shows a figure with it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import failing
from cacheblend.cli.bench import ResultOptions
from cacheblend.core.errors import CacheBlendError
from cacheblend.core.failures import count_failure, failures
from cacheblend.engines.hf.background import Background
from cacheblend.engines.vllm.reasons import DECISIONS, failed
from lab.servers.processes import count_failed, failed_in

VLLM = """
# HELP vllm:cacheblend_fallbacks_total Times that stored KV could not be reused.
vllm:cacheblend_fallbacks_total{engine="0",model_name="served",reason="InvalidInputError"} 21.0
vllm:cacheblend_fallbacks_total{engine="0",model_name="served",reason="bad spans"} 3.0
vllm:cacheblend_fallbacks_total{engine="0",model_name="served",reason="slow store"} 2.0
vllm:cacheblend_fallbacks_created{engine="0",model_name="served",reason="slow store"} 1.7e9
vllm:cacheblend_shadow_dropped_total{engine="0",model_name="served",reason="failed"} 1.0
vllm:cacheblend_not_blended_total{engine="0",model_name="served",reason="nothing stored"} 9.0
"""
EMBEDDED = """
cacheblend_fallbacks_total{reason="lost block"} 2.0
cacheblend_captures_given_up_total{reason="queue full"} 5.0
cacheblend_captures_given_up_total{reason="failed"} 1.0
cacheblend_shadow_dropped_total{reason="closed"} 4.0
cacheblend_store_errors_total{tier="disk",what="write"} 3.0
cacheblend_store_errors_total{tier="disk",what="read"} 0.0
"""


class Item:
    """A test that declares these reasons."""

    def __init__(self, *reasons: str) -> None:
        self._reasons = reasons

    def iter_markers(self, name: str) -> list[Any]:
        assert name == "may_fail"
        return [SimpleNamespace(args=self._reasons)]


def test_a_failure_fails_its_test_once_unless_it_is_declared(tmp_path: Path) -> None:
    for declared in ((), ("another",)):
        count_failure("RuntimeError", 2)
        with pytest.raises(pytest.fail.Exception, match="2 RuntimeError: failed, and was mended"):
            failing.check(Item(*declared))  # type: ignore[arg-type]
        failing.check(Item())  # type: ignore[arg-type]
    for known in ("RuntimeError", "*"):
        count_failure("RuntimeError")
        failing.check(Item(known))  # type: ignore[arg-type]
        failing.check(Item())  # type: ignore[arg-type]
    (tmp_path / "job.failed").write_text(json.dumps({"InvalidInputError": 3}))  # as a child writes it
    failing.take(tmp_path / "job.failed")
    failing.take(tmp_path / "none")
    with pytest.raises(pytest.fail.Exception, match="3 InvalidInputError"):
        failing.check(Item())  # type: ignore[arg-type]


@pytest.mark.may_fail("background work")
def test_an_error_in_a_background_thread_is_a_failure() -> None:
    before, background = failures().get("background work", 0), Background(4)
    background.submit("one", lambda: 1 // 0)
    assert background.flush(10)
    background.close()
    assert failures()["background work"] == before + 1


def test_servers_failures_are_read_from_their_counters() -> None:
    assert failed_in(VLLM.splitlines()) == {"InvalidInputError": 21, "slow store": 2, "shadow check": 1}
    assert failed_in(EMBEDDED.splitlines()) == {"lost block": 2, "background work": 1, "store write": 3}
    assert failed({"bad spans": 2.0, "RuntimeError": 1.0, "store": 0.0}) == {"RuntimeError": 1.0}
    assert failed(dict.fromkeys(DECISIONS, 1.0)) == {}


@pytest.mark.may_fail("InvalidInputError", "slow store", "shadow check")
def test_no_benchmark_shows_figures_with_a_failed_blend_in_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
