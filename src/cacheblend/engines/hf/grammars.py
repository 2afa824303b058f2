"""Grammars compiled for one tokenizer, and the masks of logits that they make; the library is xgrammar."""

import json
import os
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.hf import grammar_trial
from cacheblend.engines.hf.grammar import Grammar

TRIAL_S = 5.0
"""Computing seconds in which a grammar is compiled and tried; its bytes are `TRIAL_BYTES`."""
TRIAL_BYTES = 2 << 30
KEPT, KEPT_BYTES = 256, 256 << 20
"""Compiled grammars that are kept, and their bytes."""
FREE_S, TOKEN_S = 2.0, 0.02
"""Computing seconds that an answer's masks may take: at once, and more for each token."""


class GrammarMatcher(LogitsProcessor):  # type: ignore[misc, unused-ignore]
    """Where one answer is in its grammar. `never`: [vocab] bool, tokens that no text has.

    Raises `InvalidInputError` where no token is left, or the masks take too long and hold up other answers.
    """

    def __init__(self, compiled: Any, never: torch.Tensor) -> None:
        import xgrammar

        self._matcher, self._never = xgrammar.GrammarMatcher(compiled), never
        self._bits = xgrammar.allocate_token_bitmask(1, len(never))
        self._spent = 0.0
        self._tokens = 0

    def allowed(self) -> torch.Tensor:
        """The tokens that may come next, [vocab] bool on the CPU; EOS ids alone once the grammar is complete."""
        began = time.thread_time()
        self._matcher.fill_next_token_bitmask(self._bits)
        bits = np.unpackbits(self._bits.numpy().view(np.uint8), bitorder="little")[: len(self._never)]
        allowed = torch.from_numpy(bits.astype(bool)) & ~self._never
        self._spend(began)
        return allowed

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[1, vocab] scores, minus infinity where a token is not allowed."""
        allowed = torch.zeros(scores.shape[-1], dtype=torch.bool)
        found = self.allowed()[: scores.shape[-1]]
        allowed[: len(found)] = found
        masked = scores.masked_fill(~allowed.to(scores.device), -torch.inf)
        if not bool((masked > -torch.inf).any()):
            raise InvalidInputError(
                f"after {self._tokens} tokens none is left that the grammar allows and bad_words do not forbid"
            )
        return masked

    def accept(self, token: int) -> None:
        """Notes the answer's next token, one that `allowed` has."""
        began = time.thread_time()
        if not self._matcher.accept_token(token):
            raise InvalidInputError(f"the grammar does not allow the token {token}")
        self._tokens += 1
        self._spend(began)

    def _spend(self, began: float) -> None:
        self._spent += time.thread_time() - began
        most = FREE_S + TOKEN_S * self._tokens
        if self._spent > most:
            raise InvalidInputError(
                f"the grammar took {self._spent:.1f} s for {self._tokens} tokens; {most:.1f} s are allowed: make it "
                "simpler"
            )


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar compiled for one tokenizer; any number of answers may use it at a time."""

    grammar: Grammar
    compiled: Any
    never: torch.Tensor

    def matcher(self) -> GrammarMatcher:
        """For a new answer."""
        return GrammarMatcher(self.compiled, self.never)


class Grammars:
    """Compiles grammars, and keeps those used last. May be called from any thread; one compiles at a time.

    Args:
        tokenizer: transformers'; None: no grammar can be compiled.
        vocab_size: width of the model's logits.
        eos_ids: the model's EOS ids, which end an answer whose grammar is complete.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, list(eos_ids)
        self._kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._keeping, self._compiling = threading.Lock(), threading.Lock()
        self._trial: _Trial | None = None
        self._info: Any = None
        self._compiler: Any = None
        self._never = torch.zeros(0, dtype=torch.bool)

    def compile(self, grammar: Grammar | None) -> CompiledGrammar | None:
        """A grammar for answers of this model; None for None. Takes up to `TRIAL_S` seconds of computing,
        twice, and some more the first time.

        Raises:
            InvalidInputError: it is wrong, nothing satisfies it, it takes too long, or xgrammar is not installed.
        """
        if grammar is None:
            return None
        if (found := self.find(grammar)) is not None:
            return found
        with self._compiling:
            if (found := self.find(grammar)) is not None:
                return found
            if self._compiler is None:
                self._open()
            found = self._compile(grammar)
            with self._keeping:
                self._kept[grammar] = found
                while len(self._kept) > KEPT or (
                    len(self._kept) > 1
                    and sum(each.compiled.memory_size_bytes for each in self._kept.values()) > KEPT_BYTES
                ):
                    self._kept.popitem(last=False)
            return found

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        """Here, where it can be used, once another process has shown that it can: that is quicker than to send it."""
        if self._trial is None or not self._trial.is_alive:
            self._trial = _Trial(self._info.serialize_json())
        kind, text = grammar.source()
        reason = self._trial.why_not(kind, text)
        if reason is not None:
            raise InvalidInputError(f"the {grammar.kind} cannot be used: {reason}")
        return CompiledGrammar(grammar, grammar_trial.compile_source(self._compiler, kind, text), self._never)

    def close(self) -> None:
        """Ends the process that tries grammars; the next grammar starts another."""
        with self._compiling:
            if self._trial is not None:
                self._trial.close()
            self._trial = None

    def _open(self) -> None:
        """Reads the vocabulary."""
        try:
            import xgrammar
        except ImportError:
            message = "answers of a given form need xgrammar: pip install 'cacheblend[structured]'"
            raise InvalidInputError(message) from None
        if self._tokenizer is None:
            raise InvalidInputError("without a tokenizer no grammar can be held: a grammar is about text")
        if not self._eos_ids:
            raise InvalidInputError("the model has no EOS id, so no answer could end where its grammar is complete")
        try:
            self._info = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=self._eos_ids
            )
        except (ValueError, RuntimeError) as error:
            raise InvalidInputError(f"xgrammar cannot read this tokenizer: {error}") from None
        self._never = torch.zeros(self._vocab_size, dtype=torch.bool)
        special = {*self._tokenizer.all_special_ids} - {*self._eos_ids}  # they would stand for their names' letters
        self._never[[token for token in special if token < self._vocab_size]] = True
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)

    def find(self, grammar: Grammar) -> CompiledGrammar | None:
        """The grammar if it is compiled and kept; waits for nothing."""
        with self._keeping:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
            return self._kept.get(grammar)


class _Trial:
    """The process of `grammar_trial`, which ends with this one."""

    def __init__(self, vocabulary: str) -> None:
        command = [sys.executable, "-P", str(Path(grammar_trial.__file__)), str(TRIAL_S), str(TRIAL_BYTES)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment, text=True, encoding="utf-8"
        )
        if self._ask(vocabulary) is None:
            self.close()
            raise InvalidInputError("the process that tries grammars did not start; is xgrammar whole?")

    @property
    def is_alive(self) -> bool:
        """Whether it takes another grammar."""
        return self._process.poll() is None

    def why_not(self, kind: str, text: str) -> str | None:
        """See `grammar_trial.why_not`; also that it took too long, or too much memory."""
        answer = self._ask(json.dumps([kind, text]))
        if answer is None or json.loads(answer) is False:
            return f"it takes more than {TRIAL_S:.0f} s or {TRIAL_BYTES >> 30} GiB to compile: make it simpler"
        reason: str | None = json.loads(answer)
        return reason

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()

    def _ask(self, line: str) -> str | None:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._process.stdout.readline() or None
