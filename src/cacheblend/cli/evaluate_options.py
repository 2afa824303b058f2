"""The options of `cacheblend evaluate`."""

from pathlib import Path
from typing import Annotated

import typer

from cacheblend.cli.options import MODEL, OUTPUT, PROMPT

METHODS_PANEL, SCORES = "Methods", "Scores"

Model = Annotated[
    Path | None,
    typer.Option(
        "--model",
        "-m",
        help="Model folder: config.json, weights, tokenizer; or nano, which ships. --suite nano needs none.",
        rich_help_panel=MODEL,
        show_default=False,
    ),
]

Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        "-d",
        help="Questions with passages: JSON or JSONL, formats as for --format.",
        rich_help_panel=PROMPT,
        show_default=False,
    ),
]
SuiteName = Annotated[
    str | None,
    typer.Option(
        "--suite",
        help="In place of --data: nano, questions of every category on the model that ships, against its bars.",
        rich_help_panel=PROMPT,
        show_default=False,
    ),
]
SuiteSeeds = Annotated[
    list[int] | None,
    typer.Option(
        "--suite-seed",
        min=0,
        help="Of the suite, only these draws; several times. Default: 1, 2 and 3.",
        rich_help_panel=PROMPT,
        show_default=False,
    ),
]
SuiteParts = Annotated[
    list[str] | None,
    typer.Option(
        "--part",
        help="Of the suite, only main, sweep or gate; several times. Default: all.",
        rich_help_panel=PROMPT,
        show_default=False,
    ),
]
Format = Annotated[
    str,
    typer.Option(
        "--format",
        help="auto, cacheblend, ctxs (the CacheBlend authors') or longbench; auto goes by the first row's fields.",
        rich_help_panel=PROMPT,
    ),
]
Rows = Annotated[int | None, typer.Option("--rows", min=1, help="Only the first so many rows.", rich_help_panel=PROMPT)]
ChunkTokens = Annotated[
    int,
    typer.Option(
        "--chunk-tokens",
        help="Of LongBench's context: tokens of a passage at most, cut at sentence ends.",
        rich_help_panel=PROMPT,
    ),
]
TopK = Annotated[
    list[int] | None,
    typer.Option(
        "--top-k",
        help="Only the first so many passages of a row; several times: every method at each. Default: all.",
        rich_help_panel=PROMPT,
        show_default=False,
    ),
]
Templates = Annotated[
    Path | None,
    typer.Option(
        "--templates", help="TOML file of prompt templates. Default: the shipped ones.", rich_help_panel=PROMPT
    ),
]
TemplateName = Annotated[
    str, typer.Option("--template", help="Which one; shipped are bare, qa and summary.", rich_help_panel=PROMPT)
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        "-a",
        help="full, prefix, reuse, blend, map-reduce or map-rerank; several times. Default: the first four.",
        rich_help_panel=METHODS_PANEL,
        show_default=False,
    ),
]
Selectors = Annotated[
    list[str] | None,
    typer.Option(
        "--selector",
        help="Of blend, as for ask; profile: the model's own settings. Others' settings stand behind a colon: "
        "hkvd:measure=v. Several times. Default: hkvd.",
        rich_help_panel=METHODS_PANEL,
        show_default=False,
    ),
]
Ratios = Annotated[
    list[str] | None,
    typer.Option(
        "--ratio",
        "-r",
        help="Of blend, 0..1; several times. Falling ones for as many check layers with commas. Default: 0.15.",
        rich_help_panel=METHODS_PANEL,
        show_default=False,
    ),
]
CheckLayers = Annotated[
    list[str] | None,
    typer.Option(
        "--check-layers",
        help="Of blend: 1, or 1,2,3 for gradual filtering; several times. Default: 1.",
        rich_help_panel=METHODS_PANEL,
        show_default=False,
    ),
]
DeviationRows = Annotated[
    int,
    typer.Option(
        "--deviation-rows",
        min=0,
        help="Measure reuse and blend on so many rows, too: how far KV and the question's attention are from full "
        "recompute's, by layer. Takes longer than answering.",
        rich_help_panel=SCORES,
    ),
]
Scorers = Annotated[
    list[str] | None,
    typer.Option(
        "--scorer",
        help="em, f1, f1-tokens or rouge-l; several times. Default: em and f1.",
        rich_help_panel=SCORES,
        show_default=False,
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Of an answer.", rich_help_panel=PROMPT)]
Seed = Annotated[int, typer.Option("--seed", help="Of the bootstrap's draws.", rich_help_panel=SCORES)]
Store = Annotated[
    str, typer.Option("--store", "-s", help="memory, a folder, or its file:// URL.", rich_help_panel=MODEL)
]
Out = Annotated[
    Path, typer.Option("--out", "-o", help="Folder in which the folder of results is made.", rich_help_panel=OUTPUT)
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="Write everything here, every cell with it; - for stdout.", rich_help_panel=OUTPUT),
]
