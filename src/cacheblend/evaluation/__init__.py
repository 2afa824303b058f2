"""Quality of blending on a user's own data: arms, scorers, intervals, reports."""

from cacheblend.evaluation.choices import ARMS, SelectorChoice, make_arms
from cacheblend.evaluation.methods import Arm, Asked, Fused, Label, Outcome
from cacheblend.evaluation.records import Cell, RowResult
from cacheblend.evaluation.runner import Evaluation, Settings, evaluate
from cacheblend.evaluation.scorers import SCORERS, Scorer, make_scorers
from cacheblend.evaluation.summary import summarise, with_cells
from cacheblend.evaluation.templates import Template, read_template

__all__ = [
    "ARMS",
    "SCORERS",
    "Arm",
    "Asked",
    "Cell",
    "Evaluation",
    "Fused",
    "Label",
    "Outcome",
    "RowResult",
    "Scorer",
    "SelectorChoice",
    "Settings",
    "Template",
    "evaluate",
    "make_arms",
    "make_scorers",
    "read_template",
    "summarise",
    "with_cells",
]
