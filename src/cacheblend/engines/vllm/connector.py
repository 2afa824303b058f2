"""The connector, created by vLLM in the scheduler's process and in each worker's: delegates to the two sides."""

import logging
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cacheblend.core.errors import CacheBlendError, InvalidInputError, ModelNotBlendableError
from cacheblend.core.fuse.prefill import check_latents
from cacheblend.engines.fingerprint import ModelIdentity, file_digest, fingerprint_folder, loaded_with, room_of
from cacheblend.engines.folders import name_of
from cacheblend.engines.settings import load_cost_model, resolve_settings
from cacheblend.engines.shadow import ShadowWatch
from cacheblend.engines.tokens import PromptBuilder, find_sentence_end_ids
from cacheblend.engines.vllm import versions
from cacheblend.engines.vllm.config import read_config
from cacheblend.engines.vllm.internals import decoder, interface, prefix_cache, weight_loader
from cacheblend.engines.vllm.internals.kv_cache import float32_precision, is_fp8
from cacheblend.engines.vllm.internals.tensor_parallel import TensorParallel
from cacheblend.engines.vllm.jobs import CaptureJob, StepJobs, StepReport
from cacheblend.engines.vllm.metrics import NOT_BLENDED, BlendPromMetrics, BlendStats, Counts
from cacheblend.engines.vllm.reasons import OTHER_WEIGHTS
from cacheblend.engines.vllm.scheduler.chunk_finder import ChunkFinder, TenantPlanners
from cacheblend.engines.vllm.scheduler.load_control import LoadControl
from cacheblend.engines.vllm.scheduler.scheduler import Scheduling
from cacheblend.engines.vllm.scheduler.tracked_requests import Tracked
from cacheblend.engines.vllm.stores import device_bytes, shared_store
from cacheblend.engines.vllm.worker.model import BlendModel
from cacheblend.engines.vllm.worker.paged_cache import LayerGroups
from cacheblend.engines.vllm.worker.prefill_factory import Opener
from cacheblend.engines.vllm.worker.ranks import Ranks
from cacheblend.engines.vllm.worker.worker import NOT_BLENDABLE, IdleWorker, Worker
from cacheblend.engines.vllm.workspace import COPIED, gib, workspace_of

# Formats of which vLLM takes every weight from the model's folder.
_PLAIN_READERS = ("auto", "bitsandbytes", "gguf", "hf", "mistral", "npcache", "pt", "safetensors", "sharded_state")
_FAST_READERS = ("fastsafetensors", "instanttensor", "runai_streamer", "runai_streamer_sharded")
OF_FOLDER = frozenset([*_PLAIN_READERS, *_FAST_READERS])


def identify(config: Any, tokenizer: Any) -> ModelIdentity:
    """The identity of the model in vLLM's configuration. Raises InvalidInputError: its files cannot be found."""
    model, load = config.model_config, config.load_config
    folder, overrides = weight_loader.files_of(config), model.hf_overrides
    overrides = {} if callable(overrides) else overrides or {}  # what a function does is in the fields
    fields, stored = weight_loader.config_fields(config, folder), getattr(model.hf_config, "quantization_config", None)
    quantizing = [folder / "hf_quant_config.json", Path(overrides.get("quantization_config_file") or "")]
    options = {
        "hf_overrides": overrides,
        # transformers orders the rotated numbers of DeepSeek-V3 otherwise than vLLM
        "latents": "vllm" if model.use_mla else None,
        "quantization": None if stored else model.quantization,  # the folder's own is part of its config.json
        "quantization_config": getattr(model, "quantization_config", None),  # not in each version
        **{file.name: file_digest(file) for file in quantizing if file.is_file()},
        "float32": float32_precision(model.dtype),
    }
    if load.load_format not in OF_FOLDER:  # random weights, a plug-in's
        options["weights"] = (str(load.load_format), repr(load.model_loader_extra_config))
    weights = fingerprint_folder(folder, files=weight_loader.weights_of(config, folder), fields=fields)
    builder = None if tokenizer is None else PromptBuilder(tokenizer)
    return ModelIdentity(
        folder=folder,
        fingerprint=loaded_with(weights, {name: value for name, value in options.items() if value}),
        dtype=str(model.dtype).removeprefix("torch."),
        bos_id=None if builder is None else builder.bos_id,
        name=name_of(folder),
        has_exact_hits=not is_fp8(config.cache_config, model.hf_config),
        weights=weights,
        in_front=None if builder is None else builder.in_front,
        room=room_of(getattr(model.hf_text_config, "max_position_embeddings", None), not model.use_mla),
    )


def open_tokenizer(config: Any) -> Any:
    """transformers' tokenizer of the model in vLLM's configuration; None if vLLM skips it or, with a warning, it cannot
    be opened."""
    from transformers import AutoTokenizer

    model = config.model_config
    if model.skip_tokenizer_init:
        return None
    try:
        return AutoTokenizer.from_pretrained(
            model.tokenizer,
            revision=model.tokenizer_revision,
            trust_remote_code=model.trust_remote_code,
            mistral_format=False,  # else the one of mistral-common, which has no tokenizer.json
        )
    except Exception as error:
        message = "transformers cannot open the tokenizer %s (%s): passages are stored as for a model without one"
        logger.warning(message, model.tokenizer, error)
        return None


logger = logging.getLogger("vllm.cacheblend")  # which vLLM shows


def _log_as_vllm() -> None:
    """What this package logs goes where vLLM's own goes, at its level: vLLM's configuration names its loggers alone,
    and may have turned off all that there were before."""
    ours, theirs = logging.getLogger("cacheblend"), logging.getLogger("vllm")
    if not logging.root.handlers:  # else ours are among what the program shows
        for handler in theirs.handlers:
            ours.addHandler(handler)
        if theirs.level and not ours.level:
            ours.setLevel(theirs.level)
    for name, each in list(logging.root.manager.loggerDict.items()):
        if name.partition(".")[0] == "cacheblend" and isinstance(each, logging.Logger):
            each.disabled = False


CPU_COPIED = 1 << 23  # bytes of histories that a step may copy on a CPU: some ten milliseconds
STEP_SHARE = 0.4
"""The default budget, of a full step of vLLM's scheduler: tokens of other requests must come sooner beside a blend than
beside a plain prefill, and scattered rows attend more slowly than those of a plain one."""


class CacheBlendConnector(interface.KVConnectorBase_V1, interface.SupportsHMA):
    """See the package's docstring for how vLLM is configured to use it. Raises InvalidInputError: an unknown setting,
    or a combination that is not tested; the message names it."""

    def __init__(
        self, vllm_config: interface.VllmConfig, role: interface.KVConnectorRole, kv_cache_config: Any
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _log_as_vllm()
        self._config = read_config(self._kv_transfer_config.kv_connector_extra_config)
        versions.check_version(versions.vllm_version(), allowed=self._config.allow_untested_version)
        self._scheduling: Scheduling | None = None
        self._worker: Worker | IdleWorker | None = None
        self._unblendable = ""  # the reason, where `on_unblendable` is "plain"
        self._left = Counts()  # requests that were left to vLLM for it
        self._is_compared = False  # the weights of this worker with those that the scheduler's side names
        if self._kv_transfer_config.kv_role != "kv_both":
            raise InvalidInputError(f"kv_role is {self._kv_transfer_config.kv_role!r}; use 'kv_both'")
        refused = [*interface.refusals(vllm_config), *filter(None, [prefix_cache.refused_groups(kv_cache_config)])]
        if refused:
            reason = f"CacheBlendConnector was not tested with, and refuses: {'; '.join(refused)}"
            return self._leave_to_vllm(InvalidInputError(reason))
        self._tokenizer = open_tokenizer(vllm_config)
        self.identity = identify(vllm_config, self._tokenizer)
        assert self.identity.folder is not None  # vLLM loads models from folders
        fields = self._config.blend_fields
        found = resolve_settings(fields, self.identity.folder, self.identity.fingerprint)
        self._settings = found.on(self.identity)
        self._selector = self._settings.selector()
        if vllm_config.model_config.use_mla:
            check_latents(self._selector)
        self._planner = self.identity.planner(self._settings.config)
        self.anchor = self._planner.anchor.rule  # of chunks
        self._settings.compare(self._planner)
        self._block_size = int(vllm_config.cache_config.block_size)
        is_scheduler = role == interface.KVConnectorRole.SCHEDULER
        if not is_scheduler:
            weight_loader.check_files(vllm_config, self.identity.folder)
        self._store = shared_store(
            self._config.store,
            str(self._kv_transfer_config.engine_id),
            is_one_process=interface.is_one_process(vllm_config),
            looks_up=is_scheduler,
        )
        self._kv_caches = kv_cache_config
        if is_scheduler:
            # What cannot be blended is computed; vLLM reads this after it has made the connector, and would fail it.
            self._kv_transfer_config.kv_load_failure_policy = "recompute"
            self._scheduling = self._open_scheduling()

    def _open_scheduling(self) -> Scheduling:
        blend, layout = self._settings.config, interface.kv_layout(self._vllm_config, self._settings.config.codec)
        if blend.edits and not self.identity.has_exact_hits:
            raise InvalidInputError(
                "edits moves KV that is exact in an earlier prompt, and a kv_cache_dtype of eight bits rounds it; "
                "--kv-cache-dtype bfloat16, or leave edits out"
            )
        control = None
        if self._config.controller:
            known = None
            if blend.cost_model is not None:
                measured = {"model": self.identity.fingerprint, "codec": layout.codec}
                device = str(self._vllm_config.device_config.device_type)
                known = load_cost_model(blend.cost_model, **measured, device=device)
            control = LoadControl(blend, layout, known)
        planners, events = TenantPlanners(self.identity, blend), self._vllm_config.kv_events_config
        keeps_events = events is not None and bool(events.enable_kv_cache_events)
        finder = ChunkFinder(self._config, self._settings, planners, self._store, control, keeps_events=keeps_events)
        watch, checked = None, self._config.shadow_settings
        if checked is not None:
            watch = ShadowWatch(checked, self.identity.name, self._selector.share, finder.raise_by)
        windows = prefix_cache.windows_of(self._kv_caches)
        window = getattr(self._vllm_config.model_config.hf_text_config, "sliding_window", None)
        limits, scheduler = [window for window in (window, *windows) if window], interface.calling_scheduler()
        may_copy = interface.names_computed(scheduler, type(self)) and prefix_cache.keeps_prompts(self._kv_caches)
        copied = CPU_COPIED if str(self._vllm_config.device_config.device_type) == "cpu" else COPIED
        return Scheduling(
            self._config,
            self._settings,
            finder,
            self._block_size,
            bytes_per_token=interface.kv_layout(self._vllm_config).block_bytes(1),
            longest=int(self._vllm_config.model_config.max_model_len),
            windows=windows,
            watch=watch,
            window=min(limits, default=None),
            is_paused=interface.pause_of(scheduler),
            copied_bytes=copied if may_copy else 0,
            spare_blocks=interface.draft_blocks(self._vllm_config, len(windows)),
        )

    def _leave_to_vllm(self, error: CacheBlendError) -> None:
        """All prompts are vLLM's from now on; raises the error unless the settings say so."""
        if self._config.on_unblendable != "plain":
            raise error
        self._unblendable = str(error)
        logger.warning("nothing is blended, vLLM computes all prompts: %s", error)

    @cached_property
    def _sentence_end_ids(self) -> npt.NDArray[np.int64] | None:
        return None if self._tokenizer is None else find_sentence_end_ids(self._tokenizer)

    # ---- scheduler --------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        if self._scheduling is not None:
            self._scheduling.on_new(request)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduling is not None:
            self._scheduling.cache.bind(kv_cache_manager)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        claimed = 0 if self._scheduling is None else self._scheduling.claim(request, num_computed_tokens)
        return claimed, bool(claimed)  # provided over several engine steps

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduling is not None:
            self._scheduling.allocated(request, [list(ids) for ids in blocks.get_block_ids()], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepJobs:
        if self._scheduling is None:
            return StepJobs()
        jobs = self._scheduling.take_jobs(is_idle=not scheduler_output.total_num_scheduled_tokens)
        jobs.weights = self.identity.weights
        return jobs

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduling is None:
            return False, self._left_to_vllm(request) if self._unblendable else None
        told = self._scheduling.finished(request)  # vLLM adds it to the request's answer
        return self._scheduling.holds(request), told

    def _left_to_vllm(self, request: Any) -> dict[str, Any]:
        """What the client of a request is told where nothing can be blended."""
        self._left.add(NOT_BLENDED, 1, NOT_BLENDABLE)
        tracked = Tracked(request, 0)
        tracked.leave(NOT_BLENDABLE, self._unblendable)
        return tracked.answer()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See `request_finished`; vLLM calls one of the two, and their blocks are not asked for."""
        return self.request_finished(request, [])  # encoders have no group at all

    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduling is None:
            return
        self._scheduling.provided(connector_output.finished_recving or ())
        report = getattr(connector_output, "kv_connector_worker_meta", None)
        if isinstance(report, StepReport):
            self._scheduling.reported(report)
            if report.unblendable:  # all prompts are vLLM's from now on
                self._unblendable, self._left = report.unblendable, self._scheduling.counts
                self._scheduling.close()
                self._scheduling = None

    def has_pending_push_work(self) -> bool:
        """Keeps vLLM stepping while chunks are captured and answers compared, even when there are no requests."""
        return self._scheduling is not None and self._scheduling.is_busy

    def take_events(self) -> Iterable[Any]:
        return () if self._scheduling is None else self._scheduling.take_events()

    def reset_cache(self) -> bool:
        if self._scheduling is not None:
            self._scheduling.reset()
        return True

    # ---- worker -----------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a preempted request needs nothing of what this connector has not finished."""
        return False

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Creates the worker side: the model is loaded and has its cache, so that its layers can be run."""
        reserved = weight_loader.release_reserved(to_device=device_bytes(self._config.store) > 0)
        if self._unblendable:
            return
        worker, ranks = None, TensorParallel()
        try:
            worker = self._open_worker(reserved)
        except ModelNotBlendableError as error:
            self._leave_to_vllm(error)
        # All ranks blend, or none: the others would wait for this one.
        is_plain = self._config.on_unblendable == "plain" and ranks.size > 1
        if is_plain and ranks.maximum([int(worker is None)])[0] and worker is not None:
            self._leave_to_vllm(
                ModelNotBlendableError("another tensor-parallel rank cannot blend its part of the model")
            )
            worker.close()
            worker = None
        self._worker = worker or IdleWorker(self._block_size, self._unblendable)

    def _open_worker(self, reserved: int) -> Worker:
        rows = int(self._vllm_config.scheduler_config.max_num_batched_tokens)
        model = BlendModel(self._vllm_config)
        layers = len(model.layers)
        extra = self._kv_transfer_config.kv_connector_extra_config
        needed = workspace_of(decoder.model_sizes(self._vllm_config, model.device, extra))
        logger.info("blending takes up to %s beside vLLM's own memory; reserved for it: %s", needed, gib(reserved))
        groups = prefix_cache.groups_of(self._kv_caches, [layer.layer_name for layer in model.attention])
        # GPU kernels are not made for many short sequences, and were not measured with them; those for latents attend
        # to the cache for decoded rows only.
        builders = None
        if model.device.type == "cpu" and not any(shape.is_latent for shape in model.head_shapes):
            builders = interface.metadata_builders(self._vllm_config, model.attention, self._kv_caches)
        opener = Opener(
            model,
            self._store,
            self._planner,
            Ranks(TensorParallel()),
            LayerGroups(groups, prefix_cache.windows_of(self._kv_caches)),
            block_size=self._block_size,
            tile_rows=rows,
            builders=builders,
            in_pages=self._config.in_pages,
            sentence_end_ids=lambda: self._sentence_end_ids,
        )
        budget = self._config.budget_row_layers or int(rows * layers * STEP_SHARE) or 1
        selector = self._selector.of_model(layers)
        return Worker(opener, selector, budget, self.identity.name, self._config.read_timeout_s)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Called behind a step's forward; in front of it only where another connector loads for this very step."""
        jobs = self._get_connector_metadata()
        if self._worker is None or not isinstance(jobs, StepJobs):
            return
        if jobs.weights and not self._is_compared and isinstance(self._worker, Worker):
            self._compare_weights(self._worker, jobs.weights)
        self._worker.step(jobs)

    def _compare_weights(self, worker: Worker, named: str) -> None:
        """Refuses all jobs if blocks would get the names of weights that some rank does not run; all ranks call it. The
        scheduler's side reads the files after the workers have loaded them, and no handshake says so (`IdleWorker`)."""
        self._is_compared = True
        own = self.identity.weights
        if not worker.is_any(named != own):
            return
        running = f"this worker runs {own[:12]}" if own != named else "another rank runs others"
        reason = (
            f"the files in {self.identity.folder} were changed while vLLM started: stored KV would be named by the "
            f"weights {named[:12]}, and {running}; nothing is blended or stored: restart vLLM once they are complete"
        )
        logger.error(reason)
        worker.close()
        self._worker = IdleWorker(self._block_size, reason, OTHER_WEIGHTS)

    def has_connector_metadata(self) -> bool:
        """False: each layer's forward asks, to call what follows."""
        return False

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: a prompt's KV is complete before vLLM computes its last token."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: chunks are computed alone, not taken from prompts."""

    def wait_for_save(self) -> None:
        """Does nothing: no KV is saved from prompts."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Ended requests whose blocks have been read, and requests whose prompts are complete in the paged cache."""
        if self._worker is None:
            return None, None
        return self._worker.take_read() or None, self._worker.take_provided() or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """As `get_finished`, and the requests of which everything has to be computed."""
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None:
            results.failed_recving |= self._worker.take_failed_requests()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that vLLM must compute itself (with `kv_load_failure_policy` "recompute")."""
        return self._worker.take_failed_blocks() if self._worker else set()

    def build_connector_worker_meta(self) -> StepReport | None:
        return None if self._worker is None else self._worker.report()

    def capture(self, jobs: list[CaptureJob]) -> None:
        assert self._worker is not None
        self._worker.capture(jobs)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduling is not None:
            self._scheduling.close()

    # ---- statistics -------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> BlendStats | None:
        side = self._worker or self._scheduling
        found = (self._left if side is None else side.counts).take()
        return None if self._worker is not None and self._worker.is_follower else found  # ranks do the same work

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> BlendStats:
        return BlendStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: interface.VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> BlendPromMetrics:
        return BlendPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


# Also where VLLM_PLUGINS leaves the plug-in out.
interface.register_connector(CacheBlendConnector.__name__, "cacheblend.engines.vllm")
