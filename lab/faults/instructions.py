"""What the plug-in adds to a request of vLLM that blends nothing, in instructions of the processor, as valgrind counts
them: no clock is needed, so a busy machine shows the same as a quiet one.

    python -m lab.faults.instructions FILE.json

Two engines of qwen2.5-0.5b's layers, without the plug-in and with it, answer plain requests; answers of two lengths
tell a step that decodes one token from the rest of a request. Valgrind knows AVX2 and nothing newer, and the model has
a small vocabulary: with AVX-512 a step is shorter, with the whole vocabulary it is longer. Takes a quarter of an hour.
"""

import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODULE = "lab.faults.instructions"
PROMPT, SHORT, LONG = 64, 2, 18
"""Tokens of a prompt, and of answers of two lengths."""

TIMES = 2  # that each is counted
WIDE = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "head_dim": 64}
"""Of qwen2.5-0.5b, which has two heads of keys and 24 layers."""


def measure() -> dict[str, Any]:
    """Instructions of a step and of a request in both engines, and `figures`."""
    from cacheblend.engines.provenance import stamp
    from lab.faults.engine import environment, make_model
    from lab.servers.vllm_server import version_of_vllm

    counted: dict[str, dict[int, list[int]]] = {}
    with tempfile.TemporaryDirectory(prefix="cacheblend-instructions-") as name:
        make_model(Path(name) / "model", 24, **WIDE)
        environ = {**environment(), "TORCH_COMPILE_DISABLE": "1", "PYTHONHASHSEED": "0"}
        under = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
        running = {
            way: subprocess.Popen(
                [*under, f"--callgrind-out-file={name}/{way}", sys.executable, "-m", MODULE, "--child", name, way],
                env=environ,
            )
            for way in ("without", "with")
        }
        try:
            for way, child in running.items():
                if child.wait():
                    raise RuntimeError(f"vLLM {way} the plug-in ended with {child.returncode} under valgrind")
                found = json.loads((Path(name) / f"{way}.json").read_text())
                counted[way] = {tokens: found[str(tokens)] for tokens in (SHORT, LONG)}
        finally:
            for child in running.values():
                child.kill()
    without, plugged = ({tokens: min(times) for tokens, times in counted[way].items()} for way in counted)
    step, more = ((each[LONG] - each[SHORT]) / (LONG - SHORT) for each in (without, plugged))
    spread = max(max(times) / min(times) - 1 for way in counted.values() for times in way.values())
    figures = {"request": plugged[LONG] / without[LONG] - 1, "step": more / step - 1, "added": more - step}
    figures |= {"step_instructions": step, "spread": spread}
    return {"figures": figures, "counted": counted, **stamp(), "vllm": version_of_vllm()}


def child(folder: Path, way: str) -> None:
    """Counts in a process that has an engine; ends without waiting for vLLM's threads."""
    from lab.faults.engine import Engine, Request

    extra = None if way == "without" else {"store": f"file://{folder / 'store'}", "check_layers": [1]}
    engine = Engine(folder / "model", extra, kv_cache_memory_bytes=128 << 20, max_model_len=1024)
    rng, found = random.Random(3), dict[int, list[int]]()

    def ask(name: str, tokens: int) -> None:
        engine.ask([Request(name, [rng.randrange(20, 1000) for _ in range(PROMPT)], (), tokens)])

    ask("first", LONG)
    for number in range(TIMES):
        for tokens in (SHORT, LONG):
            _control("--instr=on")
            ask(f"counted {number} {tokens}", tokens)
            _control("--instr=off")
            _control("--dump")
            dumps = sorted(folder.glob(f"{way}.[0-9]*"), key=lambda path: int(path.suffix[1:]))
            totals = re.findall(r"^totals: (\d+)", dumps[-1].read_text(), re.MULTILINE)
            found.setdefault(tokens, []).append(int(totals[-1]))
    (folder / f"{way}.json").write_text(json.dumps(found))
    os._exit(0)


def _control(what: str) -> None:
    subprocess.run(["callgrind_control", what, str(os.getpid())], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        child(Path(sys.argv[2]), sys.argv[3])
    result = measure()
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: round(value, 6) for name, value in result["figures"].items()}))
