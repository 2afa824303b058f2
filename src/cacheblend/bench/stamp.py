"""What every figure of a benchmark is written with: machine, versions, commit."""

from typing import Any

from cacheblend.engines import provenance


def stamp() -> dict[str, Any]:
    """Machine, versions of the packages, commit of the source."""
    return {"machine": provenance.machine(), "versions": provenance.versions(), "commit": provenance.commit()}
