"""Quality of blending on a user's own data: methods, scorers, confidence intervals, reports."""

from cacheblend.core.select.selection import SelectorChoice
from cacheblend.evaluation.methods import Asked, Fused, Label, Method, Outcome, make_methods
from cacheblend.evaluation.records import Cell, RowResult
from cacheblend.evaluation.runner import Evaluation, Settings, evaluate, usable_rows
from cacheblend.evaluation.scorers import make_scorers
from cacheblend.evaluation.summary import summarise, with_cells
from cacheblend.evaluation.templates import Template, read_template

__all__ = [
    "Asked",
    "Cell",
    "Evaluation",
    "Fused",
    "Label",
    "Method",
    "Outcome",
    "RowResult",
    "SelectorChoice",
    "Settings",
    "Template",
    "evaluate",
    "make_methods",
    "make_scorers",
    "read_template",
    "summarise",
    "usable_rows",
    "with_cells",
]
