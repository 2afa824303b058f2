"""`lab cuda` on a CPU, at tiny size."""

from typing import Any

import pytest
import torch

from lab.gpu.context import Bench, Weights

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


def bench(**given: Any) -> Bench:
    device = torch.device("cpu")
    options = {"device": device, "dry_run": True, "until": 1e18, "progress": lambda what: None}
    options["weights"] = Weights(device)
    return Bench(**(options | given))  # type: ignore[arg-type]
