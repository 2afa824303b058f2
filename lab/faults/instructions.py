"""What the plug-in adds to a request of vLLM that blends nothing, in instructions of the processor, as valgrind counts
them: no clock is needed, so a busy machine shows the same as a quiet one.

    python -m lab.faults.instructions FILE.json

Three engines of a narrow model, without a connector, with one that does nothing, and with the plug-in, answer plain
requests of `PROMPT` tokens; answers of two lengths tell a step that decodes one token from the rest of a request. What
is added depends on the number of layers and not on their width; `STEP` and `ROW` say what a model of qwen2.5-0.5b's
width computes at least. Takes a quarter of an hour.
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

MODULE, IDLE = "lab.faults.instructions", "lab.faults.idle_connector"
PROMPT, SHORT, LONG = 64, 2, 18
"""Tokens of a prompt, and of answers of two lengths."""

DEPTH = 24
"""Layers, as qwen2.5-0.5b has: vLLM asks a connector in each."""

WAYS = ("without", "nothing", "with")
TIMES = 3
"""That each is counted; the median is taken."""

ROW, STEP = 358e6 / 32, 494e6 / 32
"""Instructions of the products of a prompt's row, and of a step's, which has the vocabulary's, too: of qwen2.5-0.5b's
weights by 32 at once (bfloat16 in AVX-512). What else vLLM does is counted, with the narrow model."""

REQUEST = (512, 64)
"""Tokens of a plain request and its answer, whose share is reported."""


def measure() -> dict[str, Any]:
    """Instructions of a step and of the rest of a request in both engines, and `figures`."""
    from cacheblend.engines.provenance import stamp
    from lab.faults.engine import environment, make_model
    from lab.servers.vllm_server import version_of_vllm

    with tempfile.TemporaryDirectory(prefix="cacheblend-instructions-") as name:
        make_model(Path(name) / "model", DEPTH)
        environ = {**environment(), "TORCH_COMPILE_DISABLE": "1", "PYTHONHASHSEED": "0"}
        under = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
        running = {
            way: subprocess.Popen(
                [*under, f"--callgrind-out-file={name}/{way}", sys.executable, "-m", MODULE, "--child", name, way],
                env=environ,
            )
            for way in WAYS
        }
        try:
            for way, child in running.items():
                if child.wait():
                    raise RuntimeError(f"vLLM {way} the plug-in ended with {child.returncode} under valgrind")
            counted = {way: json.loads((Path(name) / f"{way}.json").read_text()) for way in running}
        finally:
            for child in running.values():
                child.kill()
    found = {}
    for way, (short, long) in counted.items():
        step = (sorted(long)[TIMES // 2] - sorted(short)[TIMES // 2]) / (LONG - SHORT)
        found[way] = {"step": step, "rest": sorted(short)[TIMES // 2] - SHORT * step}
    tokens, answered = REQUEST
    step = found["without"]["step"] + STEP
    request = found["without"]["rest"] + tokens * ROW + answered * step
    figures = dict[str, float]()
    for name, way, than in (("added", "with", "without"), ("own", "with", "nothing")):
        more = {what: found[way][what] - found[than][what] for what in found[way]}
        figures |= {name: more["step"], f"{name}_step": more["step"] / step}
        figures[f"{name}_request"] = (more["rest"] + answered * more["step"]) / request
    return {"figures": figures, "instructions": found, "counted": counted, **stamp(), "vllm": version_of_vllm()}


def child(folder: Path, way: str) -> None:
    """Counts in a process that has an engine; ends without waiting for vLLM's threads."""
    from lab.faults.engine import Engine, Request

    extra = {"store": f"file://{folder / 'store'}", "check_layers": [1]} if way == "with" else None
    options: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20, "max_model_len": 1024}
    if way == "nothing":
        options["kv_transfer_config"] = {"kv_connector": "IdleConnector", "kv_connector_module_path": IDLE}
        options["kv_transfer_config"]["kv_role"] = "kv_both"
    engine = Engine(folder / "model", extra, **options)
    rng, found = random.Random(3), (list[int](), list[int]())

    def ask(name: str, tokens: int) -> None:
        engine.ask([Request(name, [rng.randrange(20, 1000) for _ in range(PROMPT)], (), tokens)])

    for number in range(2):
        ask(f"first {number}", LONG)
    for number in range(TIMES):
        for tokens, counts in zip((SHORT, LONG), found, strict=True):
            _control("--instr=on")
            ask(f"counted {number} {tokens}", tokens)
            _control("--instr=off")
            _control("--dump")
            dumps = sorted(folder.glob(f"{way}.[0-9]*"), key=lambda path: int(path.suffix[1:]))
            totals = re.findall(r"^totals: (\d+)", dumps[-1].read_text(), re.MULTILINE)
            counts.append(int(totals[-1]))
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
