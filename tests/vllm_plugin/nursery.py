"""Imports vLLM once, and runs each job in a fork of itself, which saves most of a small job's time.

A line on standard input names a job, `{"program", "job", "settings"}`: the module that runs it, its file, its
environment. What it prints is written beside the job, as `JOB.json.words`, and what failed in it and was mended as
`JOB.json.failed`. Two lines answer: the number of the job's
process, and how it ended. `--sees`: the jobs run models of images.
"""

import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import failing
import vision

MODULES = (
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.model_loader.default_loader",
    "compressed_tensors.quantization",
    "cacheblend.engines.vllm.connector",
    "cacheblend.engines.vllm.scheduler.scheduling",
    "cacheblend.engines.vllm.worker.worker",
)
"""What a job would import first of all; none of them starts a thread or reads the environment of one job."""


def main() -> None:
    if "--sees" in sys.argv:
        vision.make_importable()
    from vllm import LLM  # noqa: F401

    for name in MODULES:
        importlib.import_module(name)
    failing.observe()
    gc.collect()
    gc.freeze()  # a job's collections, and vLLM asks for several, need not look at what all of them share
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            run(json.loads(line))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def run(given: dict[str, Any]) -> None:
    """Does the job and ends the process."""
    words = os.open(given["job"] + ".words", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (words, 1), (words, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(given["settings"])
    gc.unfreeze = lambda: None  # what vLLM does when it ends, and a whole collection takes half a second
    code = 0
    try:
        importlib.import_module(given["program"]).main(Path(given["job"]))
    except BaseException:
        traceback.print_exc()
        code = 1
    failing.write(Path(given["job"] + ".failed"))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
