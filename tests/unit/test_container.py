"""Limits of a container: both forms of control groups, none, and what cannot be read."""

import math
from pathlib import Path

import pytest
import torch

from cacheblend.core import container
from cacheblend.engines.hf import thread_count
from cacheblend.engines.hf.thread_count import fit_threads
from cacheblend.store.residence import default_memory_bytes


@pytest.mark.parametrize(
    ("files", "memory", "processors"),
    [
        ({}, math.inf, math.inf),
        ({"memory.max": "max\n", "cpu.max": "max 100000\n"}, math.inf, math.inf),
        ({"memory.max": "1073741824\n", "cpu.max": "150000 100000\n"}, 1 << 30, 1.5),
        ({"memory/memory.limit_in_bytes": "9223372036854771712", "cpu/cpu.cfs_quota_us": "-1"}, 2.0**63, math.inf),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf, 0.5),
        ({"memory.max": "", "cpu.max": "1 0"}, math.inf, math.inf),
        ({"memory.max": "\u00fc", "cpu.max": "1 2 3"}, math.inf, math.inf),
    ],
)
def test_limits(
    files: dict[str, str], memory: float, processors: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(container, "_GROUPS", tmp_path)
    assert container.memory_bytes() == pytest.approx(memory) and container.processors() == processors
    assert default_memory_bytes() <= memory / 4


def test_a_command_takes_no_more_threads_than_a_quota_has_processors_for(monkeypatch: pytest.MonkeyPatch) -> None:
    took = list[int]()
    monkeypatch.setattr(thread_count, "_OWN_THREADS", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(torch, "set_num_threads", took.append)
    for quota in (0.5, 3.2, 64, math.inf):
        monkeypatch.setattr(container, "processors", lambda quota=quota: quota)
        monkeypatch.setenv("OMP_NUM_THREADS", "8")
        fit_threads()
        monkeypatch.delenv("OMP_NUM_THREADS")
        fit_threads()
    assert took == [1, 4] and thread_count._OWN_THREADS == 4
