"""`lab routing` at its smallest: a Redis, two servers for each policy, and what it counts."""

import pytest

from command_line import runner
from lab.cli import main
from redis_server import needs_redis

SMALL = "routing --shape tiny --chunks 2 --chunk-tokens 64 --topics 4 --requests 8 --clients 1"


@needs_redis
def test_affinity_finds_its_own_topics_in_memory(capsys: pytest.CaptureFixture[str]) -> None:
    found = runner(capsys, main=main)(*SMALL.split(), "--json").json
    for policy in ("round robin", "affinity"):
        assert sum(found[policy]["loaded_tokens"].values()) == 8 * 2 * 64, "every chunk was stored, and is loaded"
        assert len(found[policy]["ttft_s"]) == 8
    assert found["figures"]["affinity_memory"] == 1.0
    assert found["figures"]["round_robin_memory"] < 1.0
    assert found["affinity"]["loaded_tokens"].get("redis", 0) == 0
