"""A connector that does nothing: what vLLM itself does for any is not the plug-in's."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class IdleConnector(KVConnectorBase_V1):  # type: ignore[misc, unused-ignore]
    """Finds nothing, loads nothing, saves nothing."""

    def start_load_kv(self, *given: Any, **more: Any) -> None: ...
    def wait_for_layer_load(self, *given: Any) -> None: ...
    def save_kv_layer(self, *given: Any, **more: Any) -> None: ...
    def wait_for_save(self) -> None: ...
    def update_state_after_alloc(self, *given: Any) -> None: ...
    def get_num_new_matched_tokens(self, *given: Any) -> tuple[int, bool]:
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return KVConnectorMetadata()
