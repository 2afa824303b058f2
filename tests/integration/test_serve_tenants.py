"""What one tenant stored tells another nothing: no hit, and no shorter time."""

import math
import random
from pathlib import Path
from typing import Any

import httpx

from cacheblend.serve.keys import KeyRing, add_key, read_keys
from cacheblend.serve.settings import ServeSettings
from campaign import share
from serving import running, shallow

TRIES = max(30, share(100))
WORDS = ["boot", "lamp", "rope", "coin", "drum", "flag", "glove", "helmet", "jar", "kite", "lock", "map"]


def passage(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(60))


def rank_sum_z(one: list[float], other: list[float]) -> float:
    """Mann and Whitney's statistic in standard deviations: 0 where both come from one distribution."""
    ranked = sorted((value, side) for side, values in enumerate((one, other)) for value in values)
    ranks = sum(rank for rank, (_, side) in enumerate(ranked, 1) if side == 0)
    n, m = len(one), len(other)
    mean, deviation = n * (n + m + 1) / 2, math.sqrt(n * m * (n + m + 1) / 12)
    return (ranks - mean) / deviation


def test_the_statistic_tells_distributions_apart() -> None:
    rng = random.Random(1)
    one, same, sooner = ([rng.gauss(mean, 1) for _ in range(100)] for mean in (0, 0, -1))
    assert abs(rank_sum_z(one, same)) < 3 < abs(rank_sum_z(one, sooner))


def test_no_hit_and_no_difference_in_time(tmp_path: Path) -> None:
    file, rng = tmp_path / "keys.json", random.Random(2)
    keys = {name: {"Authorization": f"Bearer {add_key(file, name)}"} for name in ("mine", "theirs")}
    settings = ServeSettings(keys=KeyRing(read_keys(file)), chunk_tokens=16)
    times: dict[str, list[float]] = {"stored by another": [], "never stored": [], "stored": []}
    with running(settings, model=shallow()) as url, httpx.Client(base_url=url, timeout=60) as http:

        def ask(text: str, key: dict[str, str]) -> dict[str, Any]:
            parts = [{"type": "text", "text": part} for part in (text, f"Who has the {rng.choice(WORDS)}?")]
            body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1, "temperature": 0}
            report: dict[str, Any] = http.post("/v1/chat/completions", json=body, headers=key).json()["cacheblend"]
            return report

        def store(text: str) -> None:
            assert http.post("/v1/chunks", json={"chunks": [{"text": text}]}, headers=keys["mine"]).status_code == 200

        ask(passage(rng), keys["theirs"])
        for number in range(TRIES):
            known, unknown = passage(rng), passage(rng)
            store(known)
            tries = [("stored by another", known), ("never stored", unknown)]
            for what, text in tries if number % 2 else tries[::-1]:
                report = ask(text, keys["theirs"])
                assert report["missed_tokens"] > 0 and report["hit_tokens"]["memory"] == 0
                assert report["hit_tokens"]["prefix"] < 5  # the template's own text
                times[what].append(report["ttft_s"])
            if number < 5:
                times["stored"].append(ask(known, keys["mine"])["ttft_s"])
                assert ask(known, keys["mine"])["missed_tokens"] == 0
    assert abs(rank_sum_z(times["stored by another"], times["never stored"])) < 4
