"""The form of an answer: `Grammar`, what is checked of it, and its masks of logits for one tokenizer, by xgrammar."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from transformers import LogitsProcessor

from cacheblend.core.errors import InvalidInputError, check_encodable, check_type
from cacheblend.engines.hf import grammar_trial

MOST_BYTES = 1 << 16  # of a grammar's text: 64 KiB compile in half a second, a MB in minutes
MOST_REPETITIONS = 10_000
"""Of a bounded repetition, those inside each other multiplied: matching (a{1,1000}){1,1000} slows down by the token."""
Kind = Literal["json_object", "json_schema", "regex", "choice", "ebnf"]


@dataclass(frozen=True)
class Grammar:
    """A form that an answer has from its first to its last character.

    Attributes:
        kind: ``json_object``: any JSON object. ``json_schema``: JSON by a schema; properties that it does not name and
            does not allow in `additionalProperties` are not written, properties come in the schema's order.
            ``regex``: a regular expression that the whole answer matches. ``choice``: one of some texts. ``ebnf``: a
            grammar in GBNF, whose first rule is ``root``.
        text: the schema as JSON, the expression, the texts as a JSON list, or the grammar; empty for ``json_object``.

    Raises:
        InvalidInputError: an unknown kind, or a text that is too long, nested too deeply or of the wrong kind.
    """

    kind: Kind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise InvalidInputError(f"a grammar's kind is one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        if not isinstance(self.text, str):
            raise InvalidInputError(f"a grammar's text must be a text, got {type(self.text).__name__}")
        check_encodable(self.text, f"the {self.kind}")
        if (size := len(self.text.encode())) > MOST_BYTES:
            raise InvalidInputError(f"the {self.kind} has {size:,} bytes; at most {MOST_BYTES:,} are compiled")
        if self.kind == "json_object" and self.text:
            raise InvalidInputError("json_object has no text; for a schema use the kind json_schema")
        if self.kind == "json_schema":
            _check_schema(_json(self.text, "json_schema"))
        elif self.kind == "choice":
            choices = _json(self.text, "choice")
            if not isinstance(choices, list) or not all(isinstance(each, str) for each in choices):
                raise InvalidInputError("choice is a list of texts")
            if not choices:
                raise InvalidInputError("choice is an empty list; give at least one text")
        elif self.kind != "json_object":
            check_repetitions(self.text)

    @staticmethod
    def of_schema(schema: Any) -> "Grammar":
        """JSON by a schema, given as Python's dicts and lists."""
        try:
            return Grammar("json_schema", json.dumps(schema, ensure_ascii=False))
        except (RecursionError, TypeError, ValueError) as error:
            if isinstance(error, InvalidInputError):
                raise
            raise InvalidInputError(f"the schema cannot be written as JSON: {error}") from None

    @staticmethod
    def of_choices(choices: Sequence[str]) -> "Grammar":
        check_type(choices, list | tuple, "choices", "a list of texts")
        return Grammar("choice", json.dumps(list(choices), ensure_ascii=False))

    def source(self) -> tuple[Literal["json_schema", "regex", "ebnf"], str]:
        """What the library compiles: its kind there, and the text."""
        if self.kind == "json_object":
            return "json_schema", '{"type": "object"}'
        if self.kind == "choice":
            return "ebnf", "root ::= " + " | ".join(map(_literal, json.loads(self.text)))
        return self.kind, self.text


def check_repetitions(text: str) -> None:
    """Refuses repetitions whose product is too large, in a regular expression or in GBNF."""
    groups, atom = [1], 1  # the most repetitions inside each open group; those of the last atom
    for match in _TOKEN.finditer(text):
        found = match.group()
        if found == "(":
            groups.append(1)
        elif found == ")" and len(groups) > 1:
            atom = groups.pop()
            groups[-1] = max(groups[-1], atom)
        elif found[0] == "{" and len(found) > 1:
            atom *= max(1, *(int(number[:20]) for number in re.findall("[0-9]+", found)))
            groups[-1] = max(groups[-1], atom)
            if atom > MOST_REPETITIONS:
                raise InvalidInputError(
                    f"the repetition {found[:40]} makes {atom:,} with those inside it; at most {MOST_REPETITIONS:,} "
                    "are allowed: use * or +, or smaller numbers"
                )
        else:
            atom = 1


_TOKEN = re.compile(
    r"\\.|\[(?:\\.|[^\]\\])*\]|\"(?:\\.|[^\"\\])*\"|\{\s*[0-9]*\s*,?\s*[0-9]*\s*\}|\s+|.", re.DOTALL | re.ASCII
)
"""An escape, a class, a quoted text (of GBNF), a repetition, blanks, or one character."""


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise InvalidInputError(f"the {what} is nested too deeply to be read") from None
    except ValueError as error:
        raise InvalidInputError(f"the {what} is not JSON: {error}") from None


def _literal(text: str) -> str:
    """A text as GBNF quotes it; ``\\x`` would take the digits behind it, too."""
    escaped = (f"\\{c}" if c in '"\\' else f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else c for c in text)
    return f'"{"".join(escaped)}"'


# ---- JSON schemas -------------------------------------------------------------------------------------------

MOST_NESTED = 100  # lists and objects inside each other: compiling 1,000 takes minutes
_SAYS_NOTHING = ("$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly",
                 "writeOnly", "discriminator", "contentEncoding", "contentMediaType", "$defs",
                 "definitions")  # fmt: skip
"""Keywords that allow and forbid nothing, as those that begin with x-."""
_RANGE = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_TYPES: Mapping[str, tuple[Any, frozenset[str]]] = {
    "object": (dict, frozenset(("properties", "required", "additionalProperties"))),
    "array": (list, frozenset(("items", "prefixItems", "minItems", "maxItems"))),
    "string": (str, frozenset(("minLength", "maxLength", "pattern", "format"))),
    "integer": (int, _RANGE),
    "number": (float, _RANGE),
    "boolean": (bool, frozenset()),
    "null": (type(None), frozenset()),
}
"""What each type is in Python, and the keywords that are held beside it."""
_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "const", "enum")  # keywords beside which the library ignores every other
_FORMATS = ("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri",
            "uri-reference", "uri-template", "json-pointer", "relative-json-pointer")  # fmt: skip


def _check_schema(schema: Any) -> None:
    """Refuses keywords that the library would not hold. It ignores what it does not know, and some of what it knows in
    other places. Part of a schema is not what was asked for, so every other keyword is refused by name and place."""
    check_depth(schema)
    waiting = [("schema", schema)]
    while waiting:
        where, each = waiting.pop()
        if isinstance(each, bool):
            continue
        if not isinstance(each, dict):
            raise InvalidInputError(f"{where} must be an object, true or false, got {str(each)[:80]!r}")
        _check_keywords(where, each)
        if isinstance(each.get("pattern"), str):
            check_repetitions(each["pattern"])
        for name in ("properties", "$defs", "definitions"):
            if not isinstance(inner := each.get(name, {}), dict):
                raise InvalidInputError(f"{where}.{name} must be an object, got {str(inner)[:80]!r}")
            waiting += ((f"{where}.{name}.{key[:80]}", value) for key, value in inner.items())
        for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
            if not isinstance(inner := each.get(name, []), list):
                raise InvalidInputError(f"{where}.{name} must be a list, got {str(inner)[:80]!r}")
            waiting += ((f"{where}.{name}.{number}", value) for number, value in enumerate(inner))
        waiting += ((f"{where}.{name}", each[name]) for name in ("items", "additionalProperties") if name in each)


def check_depth(value: Any) -> None:
    """Raises `InvalidInputError` for lists and objects that are nested too deeply; itself without recursion."""
    waiting = [(value, 1)]
    while waiting:
        each, depth = waiting.pop()
        inner = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        if inner and depth > MOST_NESTED:
            raise InvalidInputError(f"the schema is nested deeper than {MOST_NESTED} lists and objects; use $ref")
        waiting.extend((one, depth + 1) for one in inner if isinstance(one, dict | list))


def _check_keywords(where: str, schema: Mapping[str, Any]) -> None:
    said = [name for name in schema if name not in _SAYS_NOTHING and not name.startswith("x-")]
    types: tuple[str, ...] = ()
    alone = next((name for name in _ALONE if name in schema), None)
    if "type" in schema and alone in (None, "const", "enum"):
        types = tuple(schema["type"]) if isinstance(schema["type"], list) else (schema["type"],)
        if not types or not all(isinstance(kind, str) and kind in _TYPES for kind in types):
            raise InvalidInputError(f"{where}: the type {str(schema['type'])[:80]!r} is not one of {', '.join(_TYPES)}")
    if alone is not None:
        allowed, place = ({alone, "type"} if alone in ("const", "enum") else {alone}), f"beside {alone}"
    else:
        allowed = {"type"}.union(*(_TYPES[kind][1] for kind in types))
        place = f"of type {' or '.join(types)}" if types else "without a type"
    for name in said:
        if name not in allowed:
            known = ", ".join(sorted(allowed))
            raise InvalidInputError(f"{where}: the keyword {name[:80]!r} is not held {place}; held are {known}")
    if alone is not None and types:  # beside values the library ignores the type
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        for value in values if isinstance(values, list) else ():
            if not any(_is_of(value, kind) for kind in types):
                raise InvalidInputError(f"{where}: {str(value)[:80]!r} is not of type {' or '.join(types)}")
    elif alone is None:
        _check_combination(where, schema, said, types)


def _check_combination(where: str, schema: Mapping[str, Any], said: list[str], types: tuple[str, ...]) -> None:
    if len(types) > 1 and set(said) != {"type"}:
        raise InvalidInputError(f"{where} has several types and {said[-1]!r}: write it as anyOf of one type each")
    if ("pattern" in schema or "format" in schema) and len({*said} - {"type"}) > 1:
        raise InvalidInputError(f"{where}: of pattern, format and lengths one is held; keep one")
    if "format" in schema and schema["format"] not in _FORMATS:
        raise InvalidInputError(f"{where}: the format {str(schema['format'])[:80]!r} is not one of {sorted(_FORMATS)}")
    for name in schema["required"] if isinstance(schema.get("required"), list) else ():
        if not isinstance(name, str) or name not in schema.get("properties", {}):
            raise InvalidInputError(
                f"{where}: required names {str(name)[:80]!r}, which is none of its properties: add it"
            )
    if types == ("array",) and not {"items", "prefixItems"} & {*said} and len(said) > 1:
        raise InvalidInputError(f"{where}: an array with {said[-1]} needs items, {{}} for any")


def _is_of(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (kind == "number" or isinstance(value, int) or value.is_integer())
    return isinstance(value, _TYPES[kind][0])


# ---- compiled for a tokenizer -------------------------------------------------------------------------------

TRIAL_S = 5.0  # computing seconds in which a grammar is compiled and tried; its bytes are `TRIAL_BYTES`
TRIAL_BYTES = 2 << 30
KEPT, KEPT_BYTES = 256, 256 << 20  # compiled grammars that are kept, and their bytes
FREE_S, TOKEN_S = 2.0, 0.02  # computing seconds that an answer's masks may take: at once, and more for each token


class GrammarMatcher(LogitsProcessor):  # type: ignore[misc, unused-ignore]
    """Where one answer is in its grammar. `never`: [vocab] bool, tokens that no text has. Raises `InvalidInputError`
    where no token is left, or the masks take too long and hold up other answers."""

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
        return GrammarMatcher(self.compiled, self.never)


class Grammars:
    """Compiles grammars, and keeps those used last. May be called from any thread; one compiles at a time.
    `vocab_size`: width of the model's logits. `eos_ids` end an answer whose grammar is complete."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, list(eos_ids)
        self._kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._keeping, self._compiling = threading.Lock(), threading.Lock()
        self._trial: _Trial | None = None
        self._info: Any = None
        self._compiler: Any = None
        self._never = torch.zeros(0, dtype=torch.bool)

    def compile(self, grammar: Grammar | None) -> CompiledGrammar | None:
        """A grammar for answers of this model; None for None. Takes up to `TRIAL_S` seconds of computing, twice, and
        some more the first time. Raises `InvalidInputError`: it is wrong, nothing satisfies it, it takes too long, or
        xgrammar is not installed."""
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
        if (reason := self._trial.why_not(kind, text)) is not None:
            raise InvalidInputError(f"the {grammar.kind} cannot be used: {reason}")
        return CompiledGrammar(grammar, grammar_trial.compile_source(self._compiler, kind, text), self._never)

    def close(self) -> None:
        """Ends the process that tries grammars; the next grammar starts another."""
        with self._compiling:
            if self._trial is not None:
                self._trial.close()
            self._trial = None

    def _open(self) -> None:
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
        return self._process.poll() is None

    def why_not(self, kind: str, text: str) -> str | None:
        answer = self._ask(json.dumps([kind, text]))
        if answer is None or json.loads(answer) is False:
            return f"it takes more than {TRIAL_S:.0f} s or {TRIAL_BYTES >> 30} GiB to compile: make it simpler"
        reason: str | None = json.loads(answer)
        return reason

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, line: str) -> str | None:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            return self._process.stdout.readline() or None
        except BrokenPipeError:
            return None
        except BaseException:  # an interrupt: the answer, which comes late, would be taken for the next job's
            self._process.kill()
            self._process.wait()
            raise
