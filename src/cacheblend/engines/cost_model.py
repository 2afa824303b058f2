"""A cost model's file, and the loading controller that an engine makes from it."""

import json
from pathlib import Path
from typing import Any

from cacheblend.core.config import BlendConfig
from cacheblend.core.cost.controller import Controller
from cacheblend.core.cost.cost_model import CostModel
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.fuse.prefill import first_reused_layer
from cacheblend.core.plan.blocks import KVLayout

FORMAT = 1


def write_cost_model(path: Path, cost_model: CostModel, fingerprint: str, device: str, layout: KVLayout) -> None:
    """Writes a cost model for `read_cost_model`, with the model's fingerprint and the kind of device, such as
    ``cuda``."""
    data = {"format": FORMAT, "model": fingerprint, "device": device, "codec": layout.codec, **cost_model.to_dict()}
    path.write_text(json.dumps(data, indent=1) + "\n")


def load_cost_model(path: str | Path) -> CostModel:
    """Reads a cost model of any model. Raises `InvalidInputError`."""
    return CostModel.from_dict(_content(path))


def read_cost_model(path: str | Path, fingerprint: str, layout: KVLayout, device: str) -> CostModel:
    """Reads the cost model of this model, codec and kind of device. Raises `InvalidInputError`: it cannot be read, or
    was measured on another model, codec or kind of device."""
    data = _content(path)
    if data.get("model") != fingerprint:
        raise InvalidInputError(f"the cost model {path} was measured on another model; measure this one")
    for what, found, wanted in (("codec", data.get("codec"), layout.codec), ("device", data.get("device"), device)):
        if found != wanted:
            raise InvalidInputError(
                f"the cost model {path} was measured with {what} {found}, not {wanted}; measure again"
            )
    return CostModel.from_dict(data)


def _content(path: str | Path) -> dict[str, Any]:
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"the cost model {path} cannot be read: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InvalidInputError(f"{path} is no cost model of format {FORMAT}; make one with `cacheblend calibrate`")
    return data


def controller_of(cost_model: CostModel, config: BlendConfig, layout: KVLayout) -> Controller:
    """The controller of an engine with these settings; `layout` is that of the stored chunks."""
    selector = config.make_selector().of_model(len(layout.layers))
    early = selector.at_start or not selector.check_layers
    return Controller(
        cost_model,
        layers=len(layout.layers),
        bytes_per_token=layout.block_bytes(config.block_size) / config.block_size,  # tokens share a codec's scales
        floor=config.selection.final_ratio,  # the one that quality requires
        check_layer=None if early else first_reused_layer(selector),
    )
