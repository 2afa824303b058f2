"""A process that compiles grammars first and tries them out, since what a client writes may take minutes or all memory.

python -P grammar_trial.py SECONDS BYTES      a tokenizer's vocabulary in the first line of its input, then a job a line

It imports nothing of this package, so as to start quickly. Each job runs in a process forked from this one, which
SECONDS of computing end (SIGPROF), `STUCK` times as many of waiting (SIGALRM), and more than BYTES of memory.
"""

import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = 256  # tokens of an answer that are tried
STEPS_S = 2.0  # seconds of computing that they may take
STUCK = 12  # how many times as long as it may compute a job may take: one that waits for ever does not compute


def compile_source(compiler: Any, kind: str, text: str) -> Any:
    """What the library makes of a `Grammar.source`; raises `RuntimeError` in its own words."""
    if kind == "json_schema":
        return compiler.compile_json_schema(text)
    return compiler.compile_regex(text) if kind == "regex" else compiler.compile_grammar(text)


def cleaned(message: str) -> str:
    """The library's words without time, file and condition, in at most 300 characters."""
    message = re.sub(r"\[[\d:]+\] \S+?:\d+: ", "", message)
    message = re.sub(r"Check failed: \(.*?\) is false: ", "", message)
    return " ".join(message.split())[:300]


def why_not(compiler: Any, vocab_size: int, kind: str, text: str) -> str | None:
    """Why a grammar is not to be used; None: it may be."""
    try:
        compiled = compile_source(compiler, kind, text)
    except RuntimeError as error:
        if "bad_alloc" in str(error):
            return "it takes too much memory to compile: make it simpler"
        return cleaned(str(error)) or "it cannot be compiled"
    return _walk(compiled, vocab_size, None) or _walk(compiled, vocab_size, random.Random(0))


def _walk(compiled: Any, vocab_size: int, chance: random.Random | None) -> str | None:
    """Writes an answer of the first token that is allowed, or one by chance; returns what is wrong with that."""
    import numpy as np
    import xgrammar

    matcher, bits = xgrammar.GrammarMatcher(compiled), xgrammar.allocate_token_bitmask(1, vocab_size)
    stops, started = set(matcher.stop_token_ids), time.process_time()
    for step in range(STEPS):
        matcher.fill_next_token_bitmask(bits)
        allowed = np.unpackbits(bits.numpy().view(np.uint8), bitorder="little")[:vocab_size].nonzero()[0]
        if not len(allowed):
            return "nothing satisfies it" if step == 0 else None  # a dead end of one way, not of all
        going = [each for each in allowed[:64].tolist() if each not in stops]
        if not going:
            return None
        token = going[0] if chance is None else int(chance.choice(allowed))
        if token in stops or not matcher.accept_token(token):
            return None
        if (took := time.process_time() - started) > STEPS_S:
            return f"the first {step + 1} tokens take {took:.1f} s; {STEPS} may take {STEPS_S:.0f} s: make it simpler"
    return None


def main(seconds: float, most_bytes: int) -> None:
    """Answers jobs until its input ends; a line of JSON each: null, the reason against it, or false: it was ended."""
    import xgrammar

    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    info = xgrammar.TokenizerInfo.deserialize_json(sys.stdin.readline())
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    with tempfile.TemporaryFile() as warnings:
        os.dup2(warnings.fileno(), 1)  # the library prints what it ignores
        os.dup2(warnings.fileno(), 2)
        print(json.dumps(None), file=answers, flush=True)
        for line in sys.stdin:
            warnings.seek(0)
            warnings.truncate()
            if (job := os.fork()) == 0:
                signal.setitimer(signal.ITIMER_PROF, seconds)
                signal.setitimer(signal.ITIMER_REAL, STUCK * seconds)
                if sys.platform == "linux":
                    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                    most = in_use + most_bytes
                    resource.setrlimit(resource.RLIMIT_AS, (most, most))
                reason = why_not(compiler, info.vocab_size, *json.loads(line))
                warnings.seek(0)
                if ignored := cleaned(warnings.read().decode(errors="replace")):
                    ignored = f"it would not be held whole: {ignored}"
                print(json.dumps(reason or ignored or None), file=answers, flush=True)
                os._exit(0)
            if os.waitpid(job, 0)[1] != 0:
                print(json.dumps(False), file=answers, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
