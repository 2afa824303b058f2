"""`plain_overhead` in instructions: what the plug-in adds to a request that blends nothing, in vLLM, by valgrind.

    python -m lab.faults.instructions FILE.json

Two engines of a narrow model, without the plug-in and with it, answer plain requests of `PROMPT` tokens inside
callgrind, which counts the instructions of all threads: those of vLLM for any connector are among what is added.
Answers of two lengths tell a step from a request. A step of a real model takes at least what it takes in the narrow
one, and `MACS` by the widest instruction that a processor of this kind has. Needs valgrind with its headers, and a C
compiler.
"""

import ctypes
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROMPT, SHORT, LONG = 64, 16, 48
"""Tokens of a prompt, and of answers of two lengths."""

DEPTH = 24
"""Layers, as qwen2.5-0.5b has: vLLM asks a connector twice in each."""

MACS, AT_ONCE = 494_000_000, 32
"""Products of one token of qwen2.5-0.5b with its head; and of one instruction: 32 numbers of bfloat16 in AVX-512."""

MODULE = "lab.faults.instructions"
MARKS = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void end(char *name) { CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }
"""


def measure() -> dict[str, Any]:
    """Instructions of a step and of a request in both engines, and `figures`."""
    from cacheblend.engines.provenance import stamp
    from lab.faults.engine import environment, make_model
    from lab.servers.vllm_server import version_of_vllm

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="cacheblend-instructions-") as name:
        folder = Path(name)
        make_model(folder / "model", DEPTH)
        (folder / "marks.c").write_text(MARKS)
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", folder / "marks.so", folder / "marks.c"], check=True)
        for way in ("without", "with"):
            counts = f"--callgrind-out-file={folder / way}"
            command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", counts, sys.executable, "-m", MODULE]
            subprocess.run(
                [*command, "--child", name, way], env={**environment(), "TORCH_COMPILE_DISABLE": "1"}, check=True
            )
            dumps = [Path(f"{folder / way}.{number}").read_text() for number in range(1, 5)]
            totals = [int(re.findall(r"^(?:totals|summary): (\d+)", dump, re.MULTILINE)[-1]) for dump in dumps]
            short, long = sum(totals[::2]) / 2, sum(totals[1::2]) / 2
            step = (long - short) / (LONG - SHORT)
            found[way] = {"step": step, "request": short - SHORT * step, "totals": totals}
    added = {what: found["with"][what] - found["without"][what] for what in ("step", "request")}
    step = found["without"]["step"] + MACS / AT_ONCE
    figures = {"plain_overhead_step": added["step"] / step, "plain_overhead_request": added["request"] / step}
    versions = {"vllm": version_of_vllm()}
    return {"figures": figures, "added": added, "instructions": found, "of_a_step": step, **stamp(), **versions}


def child(folder: Path, way: str) -> None:
    """Answers requests inside valgrind; ends without waiting for vLLM's threads."""
    from lab.faults.engine import Engine, Request

    marks, rng = ctypes.CDLL(str(folder / "marks.so")), random.Random(3)
    extra = None if way == "without" else {"store": f"file://{folder / 'store'}", "check_layers": [1]}
    engine = Engine(folder / "model", extra, kv_cache_memory_bytes=64 << 20, max_model_len=1024)

    def ask(name: str, tokens: int) -> None:
        engine.ask([Request(name, [rng.randrange(20, 1000) for _ in range(PROMPT)], (), tokens)])

    for number in range(3):
        ask(f"first {number}", SHORT)
    for number, tokens in enumerate((SHORT, LONG) * 2):
        marks.begin()
        ask(f"counted {number}", tokens)
        marks.end(str(number).encode())
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        child(Path(sys.argv[2]), sys.argv[3])
    result = measure()
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: round(value, 5) for name, value in result["figures"].items()}))
