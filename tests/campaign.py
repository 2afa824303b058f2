"""How much of a campaign a run of the tests draws: a fifth, `make test-all` all of it. Draws differ from run to run."""

import os

SHARE = float(os.environ.get("CACHEBLEND_CAMPAIGNS", "0.2"))


def share(whole: int) -> int:
    """Of so many cases, or seconds, those of this run; one at least."""
    return max(1, round(whole * SHARE))
