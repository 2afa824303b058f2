"""Quality of blending on a user's own data: methods, scorers, confidence intervals, reports."""

from cacheblend.evaluation.methods import make_methods
from cacheblend.evaluation.runner import Evaluation, Settings, evaluate, make_cases
from cacheblend.evaluation.scorers import make_scorers
from cacheblend.evaluation.summary import summarise, with_cells
from cacheblend.evaluation.templates import read_template

__all__ = [
    "Evaluation",
    "Settings",
    "evaluate",
    "make_cases",
    "make_methods",
    "make_scorers",
    "read_template",
    "summarise",
    "with_cells",
]
