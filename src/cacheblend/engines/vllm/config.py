"""The connector's settings, from `kv_connector_extra_config` as users write it. Does not know vLLM.

    {"store": "file:///var/cache/cacheblend", "recompute_ratio": 0.15, "check_layers": [1], "selector": "hkvd"}

UCM's form is read as well: `ucm_connectors` names the folder, `ucm_sparse_config` holds the rest.
"""

import difflib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError, check_fields
from cacheblend.core.plan.chunk_matches import SHORTEST
from cacheblend.engines.shadow import ShadowSettings

_NOT_HERE = ("tile_rows", "read_ahead", "layer_graphs", "capture_batch_tokens", "discover", "min_run_tokens")
"""Fields of `BlendConfig` that users do not set here: the connector takes vLLM's own limits."""

logger = logging.getLogger("cacheblend.vllm")
_UCM_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\..*")


@dataclass(frozen=True)
class ConnectorConfig:
    """How the connector works.

    Attributes:
        blend_fields: the fields of `BlendConfig` that are set; the model's profile or the defaults give the others.
        store: the store's URL, see `open_store`; all ranks and the scheduler open the same one.
        chunk_end_token_id: a chunk is a run of tokens that ends with this one; None: there is no such token.
        match_content: look for stored chunks in prompts whose client names none.
        min_match_tokens: shorter runs are not matched.
        min_reused_share: a prompt of which a smaller share is stored is left to vLLM, whose own prefill is faster then.
        budget_row_layers: row-layers that blending and capturing may compute in one engine step; None: 0.4 of a full
            step of the scheduler, which is `max_num_batched_tokens` rows through all layers.
        lookup_timeout_s: a request whose chunks the store has not looked up after so many seconds is left to vLLM.
        workspace_bytes: of each GPU, which vLLM leaves to blending; None: what it needs at most (`workspace`); 0: none.
        read_timeout_s: a request whose next layer the store has not given after so many seconds is left to vLLM.
        capture_bytes: KV of chunks that are being captured and not stored yet, at most.
        refresh_s: seconds after which the store's list of chunks is read again, since others may write to it; 0: for
            each request, which waits for it.
        controller: leave out stored blocks that take longer to load than to compute, and recompute more where loading
            takes longer anyway, by the times observed (and by `cost_model`, to begin with); false: load all.
        in_pages: blend in vLLM's own cache, without buffers of the prompt's length, where its layout allows it; None:
            on GPUs that kernels serve; false: never.
        shadow: share of the blended requests that is computed once more in full, and compared; 0: none.
        shadow_floor: least agreement with full prefill, to which the recompute ratio is raised; None: it is not.
        discover: learn text that recurs in requests, and store it as chunks, which `match_content` then finds.
        on_unblendable: what happens where the model or a feature of vLLM cannot be blended: "error" ends the start with
            the reason; "plain" starts with a warning, and vLLM computes all prompts itself.
        allow_untested_version: start on a version of vLLM that was not tested (`versions.TESTED`), with a warning.
    """

    blend_fields: Mapping[str, Any] = field(default_factory=dict)
    store: str = "memory"
    chunk_end_token_id: int | None = None
    match_content: bool = True
    min_match_tokens: int = 64
    min_reused_share: float = 0.25
    budget_row_layers: int | None = None
    lookup_timeout_s: float = 1.0
    read_timeout_s: float = 10.0
    capture_bytes: int = 2 << 30
    workspace_bytes: int | None = None
    refresh_s: float = 5.0
    controller: bool = True
    in_pages: bool | None = None
    shadow: float = 0.0
    shadow_floor: float | None = None
    discover: bool = False
    on_unblendable: Literal["error", "plain"] = "error"
    allow_untested_version: bool = False

    @property
    def blend(self) -> BlendConfig:
        """The fields that are set, and defaults."""
        return BlendConfig(**self.blend_fields)

    @property
    def shadow_settings(self) -> ShadowSettings | None:
        """Raises InvalidInputError: a wrong value, or a floor without comparisons."""
        if self.shadow == 0 and not isinstance(self.shadow, bool):
            if self.shadow_floor is None:
                return None
            raise InvalidInputError(
                f"a shadow_floor of {self.shadow_floor!r} is held by comparing answers, and none is compared; also "
                "give shadow, the share of the requests to compare (0.02)"
            )
        try:
            return ShadowSettings(self.shadow, self.shadow_floor)
        except InvalidInputError as error:
            raise InvalidInputError(f"shadow {self.shadow!r}, shadow_floor {self.shadow_floor!r}: {error}") from error

    def __post_init__(self) -> None:
        _ = self.shadow_settings  # refuses wrong values
        if self.blend.anchor == "system":
            raise InvalidInputError(
                'anchor "system": chunks are found by content, whatever the system prompt; use "text", "bos" or "none"'
            )
        check_fields(self)
        whole = {"chunk_end_token_id": 0, "min_match_tokens": SHORTEST, "budget_row_layers": 1}
        whole |= {"capture_bytes": 1, "workspace_bytes": 0}
        for name, least in whole.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidInputError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if not 0 <= self.min_reused_share <= 1:
            raise InvalidInputError(f"min_reused_share must be in 0..1, got {self.min_reused_share!r}")
        if not self.refresh_s >= 0:
            raise InvalidInputError(f"refresh_s must be a number of seconds, 0 or more, got {self.refresh_s!r}")
        for name in ("lookup_timeout_s", "read_timeout_s"):
            if not getattr(self, name) > 0:
                raise InvalidInputError(f"{name} must be a number of seconds above 0, got {getattr(self, name)!r}")
        if not self.store:
            raise InvalidInputError(f'store must be a URL such as "file:///var/cache/cacheblend", got {self.store!r}')
        if self.discover and not (self.match_content and self.blend.capture):
            raise InvalidInputError(
                "discover stores text as chunks that are found by content: it needs match_content and capture, and one "
                "of them is false"
            )
        cost_model = self.blend.cost_model
        if cost_model is not None and not self.controller:
            raise InvalidInputError(f"cost_model {cost_model!r} is for the controller, and controller is false")


def read_config(extra: Mapping[str, Any]) -> ConnectorConfig:
    """The settings that `kv_connector_extra_config` holds, in this project's form or in UCM's. Raises
    InvalidInputError: an unknown key, a setting in both forms, or a wrong value; the message names the key."""
    own = {key: value for key, value in extra.items() if not key.startswith("ucm_")}
    ucm = {key: value for key, value in extra.items() if key.startswith("ucm_")}
    _check_keys(ucm, ("ucm_connectors", "ucm_sparse_config"), "kv_connector_extra_config")
    of_ucm = {"store": _store_of_ucm(ucm["ucm_connectors"])} if "ucm_connectors" in ucm else {}
    if "ucm_sparse_config" in ucm:
        of_ucm |= _blend_of_ucm(ucm["ucm_sparse_config"])
    for key, value in of_ucm.items():
        if key in own:
            raise InvalidInputError(f"{key} is given twice, directly and in the form of UCM; keep one of the two")
        own[key] = value
    blend_fields = {each.name for each in fields(BlendConfig)} - set(_NOT_HERE)
    connector_fields = {each.name for each in fields(ConnectorConfig)} - {"blend_fields"}
    _check_keys(own, blend_fields | connector_fields, "kv_connector_extra_config")
    blend = {
        key: tuple(value) if isinstance(value, list) else value for key, value in own.items() if key in blend_fields
    }
    rest = {key: value for key, value in own.items() if key in connector_fields}
    try:
        return ConnectorConfig(blend_fields=blend, **rest)
    except TypeError as error:
        raise InvalidInputError(f"kv_connector_extra_config: a value has the wrong type: {error}") from error


def _store_of_ucm(connectors: Any) -> str:
    if not isinstance(connectors, Sequence) or isinstance(connectors, str) or len(connectors) != 1:
        raise InvalidInputError(f"ucm_connectors must be a list of one connector, got {connectors!r}")
    connector = _mapping(connectors[0], "ucm_connectors[0]")
    _check_keys(connector, ("ucm_connector_name", "ucm_connector_config"), "ucm_connectors[0]")
    name = connector.get("ucm_connector_name")
    if name != "UcmNfsStore":
        raise InvalidInputError(f"ucm_connector_name {name!r} is not known; UcmNfsStore is")
    config = _mapping(connector.get("ucm_connector_config", {}), "ucm_connector_config")
    _check_keys(config, ("storage_backends", "use_direct"), "ucm_connector_config")
    folders, direct = config.get("storage_backends"), config.get("use_direct", False)
    if not isinstance(folders, str) or not folders:
        raise InvalidInputError(f"storage_backends must be a folder, got {folders!r}")
    if not isinstance(direct, bool):
        raise InvalidInputError(f"use_direct must be true or false, got {direct!r}")
    if direct:
        logger.warning("use_direct: folders are read through the page cache, which was faster wherever it was measured")
    return folders


def _blend_of_ucm(sparse: Any) -> dict[str, Any]:
    sparse = _mapping(sparse, "ucm_sparse_config")
    _check_keys(sparse, ("Blend",), "ucm_sparse_config")
    blend = _mapping(sparse.get("Blend"), "ucm_sparse_config.Blend")
    _check_keys(blend, ("chunk_end_token_id", "compute_meta"), "ucm_sparse_config.Blend")
    found: dict[str, Any] = {}
    if "chunk_end_token_id" in blend:
        found["chunk_end_token_id"] = blend["chunk_end_token_id"]
    ratios: dict[int, Any] = {}
    for layer_name, meta in _mapping(blend.get("compute_meta", {}), "compute_meta").items():
        named = _UCM_LAYER.fullmatch(layer_name)
        if named is None:
            raise InvalidInputError(
                f"compute_meta: {layer_name!r} names no layer, as model.layers.1.self_attn.attn does"
            )
        _check_keys(_mapping(meta, layer_name), ("ratio",), f"compute_meta[{layer_name!r}]")
        if "ratio" not in meta:
            raise InvalidInputError(f"compute_meta[{layer_name!r}] has no ratio")
        ratios[int(named[1])] = meta["ratio"]
    if ratios:
        layers = tuple(sorted(ratios))
        falling = tuple(ratios[layer] for layer in layers)
        found |= {"check_layers": layers, "ratios": falling, "recompute_ratio": falling[-1]}
    return found


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidInputError(f"{what} must be an object, got {value!r}")
    return value


def _check_keys(given: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    known = sorted(known)
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"
            raise InvalidInputError(f"{where} has the unknown key {key!r}{hint}")
