"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

MODEL, BLENDING, PROMPT, OUTPUT = "Model", "Blending", "Prompt", "Output"

ModelFolder = Annotated[
    Path,
    typer.Option(
        "--model",
        "-m",
        help="Model folder: config.json, weights, tokenizer; or nano, which ships.",
        rich_help_panel=MODEL,
    ),
]
StoreUrl = Annotated[
    str,
    typer.Option(
        "--store", "-s", help="A folder, or file:///folder?max_bytes=200GiB&ram_bytes=4GiB.", rich_help_panel=MODEL
    ),
]
Dtype = Annotated[
    str,
    typer.Option("--dtype", help="auto (as the folder has it), float32, bfloat16 or float16.", rich_help_panel=MODEL),
]
Device = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda, cuda:1, ... Default: CUDA where there is one.", rich_help_panel=MODEL),
]
AnchorRule = Annotated[
    str,
    typer.Option(
        "--anchor",
        help="What a chunk stands behind when it is computed alone: auto, none, bos or system.",
        rich_help_panel=BLENDING,
    ),
]
BlockSize = Annotated[int, typer.Option("--block-size", help="Tokens of a block at most.", rich_help_panel=BLENDING)]
Capture = Annotated[
    bool,
    typer.Option(
        "--capture/--no-capture",
        help="Store the passages that were missed, behind the answer.",
        rich_help_panel=BLENDING,
    ),
]
Codec = Annotated[
    str,
    typer.Option("--codec", help="How stored passages are compressed: raw, fp8, int8, int4.", rich_help_panel=BLENDING),
]
CostModelFile = Annotated[
    Path | None,
    typer.Option("--cost-model", help="Cost model of `calibrate`: load what pays.", rich_help_panel=BLENDING),
]
Salt = Annotated[
    str,
    typer.Option("--salt", help="Keeps tenants apart who share a store.", rich_help_panel=BLENDING),
]
System = Annotated[
    str | None, typer.Option("--system", help="System prompt in front of the passages.", rich_help_panel=PROMPT)
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Use the model's chat template. Default: where the tokenizer has one.",
        rich_help_panel=PROMPT,
        show_default=False,
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="One JSON object on stdout, nothing else.", rich_help_panel=OUTPUT)
]
