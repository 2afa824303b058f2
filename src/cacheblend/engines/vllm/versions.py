"""Which versions of vLLM the connector starts on: those that all of its tests ran on. vLLM's connector interface and
scheduler change between minor versions without being announced: on a version whose tests did not run, answers may be
wrong without an error."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from cacheblend.core.errors import InvalidInputError

TESTED = ("0.31", "0.32", "0.33")  # minor versions, any patch level; docs/vllm-reference.md says what was run on which
logger = logging.getLogger("cacheblend.vllm")


def vllm_version() -> str:
    """The installed version, as in "0.32.0"."""
    import vllm

    return str(vllm.__version__)


def check_version(found: str, *, allowed: bool) -> None:
    """Raises InvalidInputError: a version, as in "0.32.0" or "0.31.1rc2.dev5+cpu", was not tested, and is not allowed;
    the message names it, the tested ones, the setting."""
    if is_tested(found):
        return
    message = _untested(found)
    if not allowed:
        raise InvalidInputError(
            f"{message}: answers may be wrong without an error. Install one of these, or set "
            '"allow_untested_version": true in kv_connector_extra_config'
        )
    logger.warning("%s: answers may be wrong without an error (allow_untested_version is set)", message)


def is_tested(found: str) -> bool:
    """Whether it is a release of a minor version in `TESTED`."""
    numbers = re.match(r"(\d+)\.(\d+)(?:\.\d+)*(.*)", found)
    is_release = numbers is not None and not re.match(r"\.?(a|b|rc|dev)\d", numbers[3])
    return numbers is not None and is_release and f"{numbers[1]}.{numbers[2]}" in TESTED


@contextmanager
def explained_imports() -> Iterator[None]:
    """Around imports of vLLM's internals, which another version may have elsewhere or not at all. Raises
    InvalidInputError: one failed on a version that was not tested; the message names it and the tested ones."""
    try:
        yield
    except ImportError as error:
        if not (error.name or "").startswith("vllm") or is_tested(found := vllm_version()):
            raise
        message = f"{_untested(found)}, which lacks what it needs: {error}. Install one of these"
        raise InvalidInputError(message) from error


def _untested(found: str) -> str:
    return f"CacheBlendConnector was tested with vLLM {', '.join(TESTED)}, and this is vLLM {found}"
