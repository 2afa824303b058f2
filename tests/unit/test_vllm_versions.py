"""Which versions of vLLM are refused, and by which words."""

import logging

import pytest

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.vllm.versions import TESTED, check_version


@pytest.mark.parametrize("found", ["0.29.0", "0.30.1", "0.31.0", "0.32.0", "0.32.2", "0.32.0+cpu", "0.32.0.post1"])
def test_what_the_tests_ran_on_starts(found: str) -> None:
    check_version(found, allowed=False)


@pytest.mark.parametrize(
    "found", ["0.28.0", "0.28.9", "0.33.0", "0.3.2", "1.32.0", "0.320.0", "0.32.0rc1", "0.32.1.dev7", "dev"]
)
def test_another_version_is_refused_by_number(found: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidInputError) as refused:
        check_version(found, allowed=False)
    words = str(refused.value)
    assert found in words and ", ".join(TESTED) in words and '"allow_untested_version": true' in words
    with caplog.at_level(logging.WARNING, logger="cacheblend.vllm"):
        check_version(found, allowed=True)
    assert found in caplog.text
