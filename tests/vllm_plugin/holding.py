"""A second connector, as one that saves prompts elsewhere in the background: `kv_connector_module_path: "holding"`,
with this folder on PYTHONPATH.

vLLM's own example, which loads within the step that schedules a request, and besides: of every request that has ended
the blocks are kept for some steps; prompts that name chunks are not saved (see "Beside another connector" in the docs).
"""

import zlib
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

STEPS = 4
"""Blocks are kept for 0 to so many steps, by the request's name."""


class Holding(ExampleConnector):
    """See above."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._naming: list[list[int]] = []
        self._kept: dict[str, int] = {}
        self._waited_for: set[str] = set()

    # ---- scheduler --------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        mine = (request.kv_transfer_params or {}).get("cacheblend", {})
        if mine.get("chunks") and request.prompt_token_ids not in self._naming:
            self._naming.append(list(request.prompt_token_ids))
        found, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return max(0, found), is_async

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        meta.requests = [each for each in meta.requests if not each.is_store or not self._names_chunks(each.token_ids)]
        return meta

    def _names_chunks(self, token_ids: Any) -> bool:
        ids = token_ids.tolist()
        return any(naming[: len(ids)] == ids for naming in self._naming)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._waited_for.add(request.request_id)
        return True, {"holding": {"kept": True}}

    def update_connector_output(self, connector_output: Any) -> None:
        self._waited_for -= connector_output.finished_sending or set()

    def has_pending_push_work(self) -> bool:
        return bool(self._waited_for)

    # ---- worker -----------------------------------------------------------------------------------------

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        for name in finished_req_ids:
            self._kept[name] = zlib.crc32(name.encode()) % (STEPS + 1)
        ended = {name for name, steps in self._kept.items() if steps == 0}
        self._kept = {name: steps - 1 for name, steps in self._kept.items() if steps}
        return ended or None, None
