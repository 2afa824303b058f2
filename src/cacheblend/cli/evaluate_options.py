"""Options of `cacheblend evaluate` alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from cacheblend.cli.options import MODEL_OPTION, OUTPUT, PROMPT
from cacheblend.cli.prompt_options import Methods
from cacheblend.cli.selection_options import Ratios
from cacheblend.cli.values import names, numbers

METHODS, SCORES = "Methods", "Scores"

OptionalModel = Annotated[Path | None, MODEL_OPTION]
Scorers = Annotated[
    list[str] | None,
    typer.Option(
        "--scorer",
        help="em, f1, f1-tokens or rouge-l; several times. Default: em and f1.",
        rich_help_panel=SCORES,
        show_default=False,
    ),
]
TopK = Annotated[
    list[int] | None,
    typer.Option(
        "--top-k",
        min=1,
        help="Only the first so many passages of a row; several times: each method at each. Default: all.",
        rich_help_panel=PROMPT,
        show_default=False,
    ),
]
Out = Annotated[
    Path, typer.Option("--out", "-o", help="Folder in which the folder of results is made.", rich_help_panel=OUTPUT)
]


@dataclass(frozen=True)
class MethodOptions:
    """The methods that are compared: blend stands for each combination of selectors, ratios and check layers."""

    methods: Methods = None
    selector: Annotated[
        list[str] | None,
        typer.Option(
            "--selector",
            help="Selectors of blend, as for ask; profile: the model's own settings. Further settings follow a colon: "
            "hkvd:measure=v. Several times. Default: hkvd.",
            rich_help_panel=METHODS,
            show_default=False,
        ),
    ] = None
    ratio: Ratios = None
    check_layers: Annotated[
        list[str] | None,
        typer.Option(
            "--check-layers",
            help="Check layers of blend: 1, or 1,2,3 with as many ratios; several times. Default: the selector's own, "
            "which are 1 to 4 with falling ratios for hkvd (gradual filtering) and 1 for hybrid.",
            rich_help_panel=METHODS,
            show_default=False,
        ),
    ] = None

    def choices(self) -> dict[str, Any]:
        """Arguments of the function that makes the methods.

        Raises:
            InvalidInputError: a ratio or a check layer is no number.
        """
        return {
            "names": names(self.methods) if self.methods else ("full", "prefix", "reuse", "blend"),
            "selectors": tuple(self.selector or ("hkvd",)),
            "ratios": [numbers("--ratio", text, float) for text in self.ratio or ("0.15",)],
            "check_layers": [numbers("--check-layers", text, int) for text in self.check_layers or ()] or [None],
        }
