"""What a prefill leaves behind: logits, KV cache, and what they cost."""

from dataclasses import dataclass, field
from typing import Any

import torch

from cacheblend.core.load.loader import LayerKV, LayerLoader
from cacheblend.core.names import BlockName
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
        read_s: seconds of reading, by tier, in passes that were given up too.
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
class Work:
    """What a prompt took, passes that were given up included.

    Attributes:
        row_layers: rows times layers, without the question's passes.
        question_row_layers: those of the question's pass and its hops.
        projected_rows: rows that went through a layer's norm and projections only.
        busy_s: seconds of the passes, without what passes between two steps of the caller.
        load_s, wait_s, read_s: see `LayerLoader`.
    """

    row_layers: int = 0
    question_row_layers: int = 0
    projected_rows: int = 0
    busy_s: float = 0.0
    load_s: float = 0.0
    wait_s: float = 0.0
    read_s: dict[str, float] = field(default_factory=dict)

    def add_loads(self, loader: LayerLoader) -> None:
        """Adds the times of a pass's loader, which loads no more."""
        self.load_s += loader.load_s
        self.wait_s += loader.wait_s
        for tier, seconds in loader.read_s.items():
            self.read_s[tier] = self.read_s.get(tier, 0.0) + seconds


def report_of(plan: BlendPlan, work: Work, recomputed: int, plan_s: float, ttft_s: float) -> BlendReport:
    """The report of a prefill.

    Args:
        plan: that was carried out.
        work: of all passes.
        recomputed: loaded rows that were still active after the last selection.
        plan_s: seconds of names, look-ups and plan.
        ttft_s: seconds from the call on.
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
        row_layers=work.row_layers + work.question_row_layers,
        question_row_layers=work.question_row_layers,
        projected_rows=work.projected_rows,
        plan_s=plan_s,
        load_s=work.load_s,
        wait_s=work.wait_s,
        compute_s=work.busy_s - work.wait_s,
        ttft_s=ttft_s,
        changed_contents=plan.prompt.changed_contents,
    )
