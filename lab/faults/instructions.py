"""What the plug-in adds to a step of vLLM that blends nothing, in bytecodes of the engine's thread: no clock is needed,
so a busy machine shows the same as a quiet one.

    python -m lab.faults.instructions FILE.json

Two engines of a narrow model, without the plug-in and with it, answer plain requests of `PROMPT` tokens; answers of two
lengths tell a step from a request. What vLLM does for any connector is among what is added; `own` is this package's.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

MODULE = "lab.faults.instructions"
PROMPT, SHORT, LONG = 64, 16, 48
"""Tokens of a prompt, and of answers of two lengths."""

DEPTH = 24
"""Layers, as qwen2.5-0.5b has: vLLM asks a connector in each."""

PER_BYTECODE, STEP = 90, 37.4e6 + 494e6 / 32
"""Instructions of a bytecode of what is added, with the C functions that it calls, and of a decoding step of
qwen2.5-0.5b at least: those of the narrow model's, and its products by 32 at once (bfloat16 in AVX-512). Found by
callgrind, see the log of 2026-11-28."""


def measure() -> dict[str, Any]:
    """Bytecodes of a step and of a request in both engines, and `figures`."""
    from cacheblend.engines.provenance import stamp
    from lab.faults.engine import environment, make_model
    from lab.servers.vllm_server import version_of_vllm

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="cacheblend-instructions-") as name:
        make_model(Path(name) / "model", DEPTH)
        environ = {**environment(), "TORCH_COMPILE_DISABLE": "1"}
        for way in ("without", "with"):
            subprocess.run([sys.executable, "-m", MODULE, "--child", name, way], env=environ, check=True)
            short, long = json.loads((Path(name) / f"{way}.json").read_text())
            step = {what: (long[what] - short[what]) / (LONG - SHORT) for what in long}
            found[way] = {"step": step, "request": {what: short[what] - SHORT * step[what] for what in step}}
    added = found["with"]["step"]["all"] - found["without"]["step"]["all"]
    figures = {"added": added, "own": found["with"]["step"]["own"]}
    figures |= {f"{what}_share": PER_BYTECODE * count / STEP for what, count in figures.items()}
    return {"figures": figures, "bytecodes": found, **stamp(), "vllm": version_of_vllm()}


def child(folder: Path, way: str) -> None:
    """Counts in a process that has an engine; ends without waiting for vLLM's threads."""
    from lab.faults.engine import Engine, Request

    extra = None if way == "without" else {"store": f"file://{folder / 'store'}", "check_layers": [1]}
    engine = Engine(folder / "model", extra, kv_cache_memory_bytes=64 << 20, max_model_len=1024)
    rng, counted = random.Random(3), Counter[str]()

    def ask(name: str, tokens: int) -> None:
        engine.ask([Request(name, [rng.randrange(20, 1000) for _ in range(PROMPT)], (), tokens)])

    def enter(frame: Any, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        is_own = "/cacheblend/" in frame.f_code.co_filename

        def inside(frame: Any, event: str, arg: Any) -> Any:
            counted.update(all=event == "opcode", own=is_own and event == "opcode")
            return inside

        return inside

    for number in range(3):
        ask(f"first {number}", SHORT)
    found = []
    for tokens in (SHORT, LONG):
        counted.clear()
        sys.settrace(enter)
        ask(f"counted {tokens}", tokens)
        sys.settrace(None)
        found.append(dict(counted))
    (folder / f"{way}.json").write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        child(Path(sys.argv[2]), sys.argv[3])
    result = measure()
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: round(value, 5) for name, value in result["figures"].items()}))
