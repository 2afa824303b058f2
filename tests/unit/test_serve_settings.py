"""Settings of a server that are out of range."""

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cacheblend.cli.serve import _reload_on_hangup
from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.hf.scheduler import Limits
from cacheblend.serve.keys import KeyRing, add_key, read_keys
from cacheblend.serve.settings import ServeSettings

COUNTS = ("chunk_tokens", "max_body_bytes", "max_prompt_tokens", "max_chunks", "max_choices", "max_tokens")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(({name: 0}, f"{name} must be 1 or more, got 0") for name in COUNTS),
        ({"store_bytes": -1}, "store_bytes must be 0 or more, got -1"),
        ({"pin_bytes": -1}, "pin_bytes must be 0 or more"),
        ({"drain_s": -1.0}, "drain_s must be 0 or more"),
        ({"drain_s": math.nan}, "drain_s must be 0 or more, got nan"),
        ({"timeout_s": 0.0}, "timeout_s must be a number of seconds above 0, got 0.0"),
        ({"timeout_s": math.inf}, "timeout_s must be a number of seconds above 0, got inf"),
        ({"body_s": -1.0}, "body_s must be a number of seconds above 0"),
        ({"headers_s": 0.0}, "headers_s must be a number of seconds above 0"),
        ({"tool_call_parser": "gpt"}, "no tool call parser 'gpt'; there are auto, hermes, llama3"),
        ({"limits": Limits(active=0)}, "at least 1 active and 0 waiting requests are needed, got 0 and 64"),
        ({"limits": Limits(waiting=-1)}, "got 8 and -1"),
    ],
)
def test_what_is_out_of_range_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        ServeSettings(**given)


def test_the_smallest_values_are_taken() -> None:
    ServeSettings(chunk_tokens=1, max_prompt_tokens=1, drain_s=0, store_bytes=0, limits=Limits(active=1, waiting=0))


def test_a_hangup_has_the_keys_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend.serve.keys.LOOK_S", math.inf)  # nobody looks at the file
    file, before = tmp_path / "keys.json", signal.getsignal(signal.SIGHUP)
    add_key(file, "one")
    settings = ServeSettings(keys=KeyRing(read_keys(file), file))
    try:
        _reload_on_hangup(settings)
        add_key(file, "two")
        assert [key.name for key in settings.keys.keys] == ["one"]
        os.kill(os.getpid(), signal.SIGHUP)
        assert [key.name for key in settings.keys.keys] == ["one", "two"]
    finally:
        signal.signal(signal.SIGHUP, before)
