"""Settings of a server that are out of range."""

import math
from typing import Any

import pytest

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.hf.scheduler import Limits
from cacheblend.serve.settings import ServeSettings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(
            ({name: 0}, f"{name} must be 1 or more, got 0")
            for name in (
                "chunk_tokens",
                "max_body_bytes",
                "max_prompt_tokens",
                "max_chunks",
                "max_choices",
                "max_tokens",
            )
        ),
        ({"store_bytes": -1}, "store_bytes must be 0 or more, got -1"),
        ({"pin_bytes": -1}, "pin_bytes must be 0 or more"),
        ({"drain_s": -1.0}, "drain_s must be 0 or more"),
        ({"drain_s": math.nan}, "drain_s must be 0 or more, got nan"),
        ({"timeout_s": 0.0}, "timeout_s must be a number of seconds above 0, got 0.0"),
        ({"timeout_s": math.inf}, "timeout_s must be a number of seconds above 0, got inf"),
        ({"body_s": -1.0}, "body_s must be a number of seconds above 0"),
        ({"limits": Limits(active=0)}, "at least 1 active and 0 waiting requests are needed, got 0 and 64"),
        ({"limits": Limits(waiting=-1)}, "got 8 and -1"),
    ],
)
def test_what_is_out_of_range_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        ServeSettings(**given)


def test_the_smallest_values_are_taken() -> None:
    ServeSettings(chunk_tokens=1, max_prompt_tokens=1, drain_s=0, store_bytes=0, limits=Limits(active=1, waiting=0))
