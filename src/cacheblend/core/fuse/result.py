"""What a prefill leaves behind: logits, KV cache, and what they cost."""

from dataclasses import dataclass
from typing import Any

import torch

from cacheblend.core.load.loader import LayerKV, LayerLoader
from cacheblend.core.naming import BlockName
from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.core.report import BlendReport


@dataclass
class PrefillResult:
    """A finished prefill.

    Attributes:
        logits: [vocab] of the last position; [n, vocab] of the last n, if more than one was asked for; empty where the
            engine computes them itself.
        kv: the request's KV cache, one entry a layer; empty where it was handed out layer by layer.
        plan: the plan that was carried out in the end.
        report: what was reused and what it cost; times of decoding are still zero.
        read_s: seconds the loader read, by tier.
        states: what recurrent layers keep of the prompt, see `Recurrence.kept`; None without such layers.
        slow: stored blocks that the loading controller left out, since computing them was expected to be faster.
    """

    logits: torch.Tensor
    kv: list[LayerKV]
    plan: BlendPlan
    report: BlendReport
    read_s: dict[str, float]
    states: Any = None
    slow: frozenset[BlockName] = frozenset()


@dataclass
class ComputedRows:
    """Rows that were computed for a prompt, restarts included.

    Attributes:
        row_layers: rows times layers, without the question's passes.
        question_row_layers: those of the question's pass and its hops.
        projected_rows: rows that went through a layer's norm and projections only.
    """

    row_layers: int = 0
    question_row_layers: int = 0
    projected_rows: int = 0


def report_of(
    plan: BlendPlan, computed: ComputedRows, loader: LayerLoader, recomputed: int, plan_s: float, prefill_s: float
) -> BlendReport:
    """The report of a prefill.

    Args:
        plan: that was carried out.
        computed: rows of all passes.
        loader: of the last pass.
        recomputed: loaded rows that were still active after the last selection.
        plan_s: seconds of names, look-ups and plan.
        prefill_s: seconds of the passes.
    """
    tokens = plan.tokens_by_source()
    left_out = sum(len(span) for span in plan.spans if span.source is Source.MISS and span.name in plan.left_out)
    return BlendReport(
        prompt_tokens=len(plan),
        hit_tokens=plan.hit_tokens(),
        missed_tokens=tokens["miss"] - left_out,
        left_out_tokens=left_out,
        text_tokens=tokens["text"],
        recomputed_tokens=recomputed,
        row_layers=computed.row_layers + computed.question_row_layers,
        question_row_layers=computed.question_row_layers,
        projected_rows=computed.projected_rows,
        plan_s=plan_s,
        load_s=loader.load_s,
        wait_s=loader.wait_s,
        compute_s=prefill_s - loader.wait_s,
        ttft_s=plan_s + prefill_s,
        changed_contents=plan.prompt.changed_contents,
    )
