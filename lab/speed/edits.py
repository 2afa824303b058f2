"""What moving an edited history's KV saves, and what it costs in quality, turn by turn of an agent's conversation.

    thinking     the thoughts of all steps of a turn are stripped when the next turn begins
    clearing     tool results older than three turns are replaced by a line
    compaction   every fourth turn a summary replaces the older half
    clock        the first line says the time, which is another one in each turn

Tool results are real passages, thoughts are words of others. One engine answers all turns, and is asked behind the
steps of each, too; between prompts it has time to store what the last one computed. From the fifth turn on each prompt
whose history was edited, whether anything in it is moved or not, is prefilled by prefix caching and by moved runs, on
the same store, in turn. On pretrained weights what the model expects of the tokens of its own answer is compared with
full prefill, beside that of the same runs computed alone, as chunks, and blended at the same ratio.
With --vllm the same prompts are timed in two servers of vLLM, which compute one token of each.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer, DynamicCache

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError, PromptTooLongError
from cacheblend.core.names import TokenIds, as_token_ids, equal_length
from cacheblend.core.plan.prompt import Prompt, chunk
from cacheblend.core.select.selection import SelectorChoice
from cacheblend.core.select.selectors import Selector
from cacheblend.data import QuestionRow, read_questions
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.baselines import full_recompute, touch
from cacheblend.engines.hf.recurrent import fill_cache
from cacheblend.engines.provenance import stamp
from cacheblend.evaluation.compute import ComputeScale
from lab.bench import Advance, draw_curves, picture, silent
from lab.real.quality import go_on
from lab.servers.vllm_server import Server, ServerSettings, dtype_of, folder_of, serving
from lab.settings import Edits

SYSTEM = "You are a careful agent. Think, look things up, and answer from what the tools have returned."
FIRST_COUNTED = 5
"""Turns from here on count."""
TEMPLATES_OWN = 16
"""Tokens, at most, that a template has behind a prompt's last message."""
KEPT, EVERY = 3, 4
"""Turns whose results are kept; turns between two summaries."""
CLEARED = "[the result was cleared]"
ARMS = {"prefix": "prefix caching", "moved": "moved runs"}


class Step(NamedTuple):
    """A tool call: what was thought, asked and found, and what was said of it."""

    thought: str
    question: str
    result: str
    answer: str


Messages = list[dict[str, str]]
Prompted = tuple[int, Messages]
"""A turn's number, from 1 on, and what is asked in it; 0: it goes on with the prompt before it."""


def thinking(turns: Sequence[Sequence[Step]]) -> Iterator[Prompted]:
    for number, turn in enumerate(turns):
        said = [each for turn in turns[:number] for each in _said(turn, thoughts=False)]
        yield from _asked(number, [*_head(), *said], turn, thoughts=True)


def clearing(turns: Sequence[Sequence[Step]]) -> Iterator[Prompted]:
    for number, turn in enumerate(turns):
        cleared = [[step._replace(result=CLEARED) for step in turn] for turn in turns[: max(0, number - KEPT)]]
        said = [each for turn in (*cleared, *turns[len(cleared) : number]) for each in _said(turn, thoughts=False)]
        yield from _asked(number, [*_head(), *said], turn)


def compaction(turns: Sequence[Sequence[Step]]) -> Iterator[Prompted]:
    summary, since = "", 0
    for number, turn in enumerate(turns):
        if number and number % EVERY == 0:
            older = turns[since : (since + number) // 2]
            summary += " ".join(f"{step.question} {step.answer}" for turn in older for step in turn) + " "
            since = (since + number) // 2
        said = [each for turn in turns[since:number] for each in _said(turn, thoughts=False)]
        head = [_user(f"What was said before: {summary}")] if summary else []
        yield from _asked(number, [*_head(), *head, *said], turn)


def clock(turns: Sequence[Sequence[Step]]) -> Iterator[Prompted]:
    for number, turn in enumerate(turns):
        said = [each for turn in turns[:number] for each in _said(turn, thoughts=False)]
        now = f"It is {9 + number // 4}:{15 * (number % 4):02d}. "
        yield from _asked(number, [*_head(now), *said], turn)


SCENES: dict[str, Callable[[Sequence[Sequence[Step]]], Iterator[Prompted]]] = {
    each.__name__: each for each in (thinking, clearing, compaction, clock)
}


def _head(line: str = "") -> Messages:
    return [{"role": "system", "content": line + SYSTEM}]


def _asked(number: int, before: Messages, turn: Sequence[Step], *, thoughts: bool = False) -> Iterator[Prompted]:
    """A turn's prompt, and that behind all its steps: a model is asked at each of them, and that is no edit."""
    yield number + 1, [*before, _user(turn[0].question)]
    yield 0, [*before, *_said(turn, thoughts=thoughts), _user("Go on.")]


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _said(turn: Sequence[Step], *, thoughts: bool) -> Iterator[dict[str, str]]:
    yield _user(turn[0].question)
    for step in turn:
        thought = f"<think>{step.thought}</think>" if thoughts else ""
        yield {"role": "assistant", "content": f"{thought}Look up: {step.question}"}
        yield _user(f"Result of the tool:\n{step.result}")
        yield {"role": "assistant", "content": step.answer}


def drawn(rows: Sequence[QuestionRow], asked: Edits, seed: int) -> list[list[Step]]:
    """The turns of a conversation, from rows of questions."""
    draw, turns = random.Random(seed), list[list[Step]]()
    for _ in range(asked.turns):
        turns.append([])
        for row in draw.sample(list(rows), asked.steps):
            words = draw.choice(rows).passages[0].text.split()[: draw.randint(40, 120)]
            found = draw.sample(row.passages, min(asked.passages, len(row.passages)))
            answer = f"It is {row.answers[0]}." if row.answers else "It does not say."
            turns[-1].append(Step(" ".join(words), row.question, "\n".join(each.text for each in found), answer))
    return turns


@torch.no_grad()
def run(asked: Edits, advance: Advance = silent) -> dict[str, Any]:
    """Plays each scene's conversations. `figures` by scene: gain in time to first token, medians of the turns that
    count; compute, and moved tokens, as shares of a full prefill's; KL a token of moved runs, and of chunks."""
    rows = [row for file in asked.data for row in read_questions(file)]
    if len(rows) < asked.steps:
        raise InvalidInputError(f"{len(rows)} questions, {asked.steps} are needed for each turn; give more --data")
    ways = {way: selector_of(way) for way in asked.way or ("head 0.05",)}
    scenes, turns = asked.scene or [*SCENES], list[dict[str, Any]]()
    plays = [(number, scene) for number in range(asked.conversations) for scene in scenes]
    with ExitStack() as stack:
        folder = stack.enter_context(folder_of(asked.resolved(), asked.seed))
        servers = stack.enter_context(_servers(folder, asked)) if asked.vllm else None
        for done, (number, scene) in enumerate(plays, 1):
            prompts = SCENES[scene](drawn(rows, asked, asked.seed + number))
            if servers is not None:
                played = list(_timed(*servers, folder, prompts, asked, f"{scene} {number}"))
            else:
                config = BlendConfig(discover=False, edits=True)
                with BlendEngine.from_pretrained(folder, store="memory", config=config) as engine:
                    played = list(_played(engine, prompts, asked, ways))
            turns += [{"scene": scene, "conversation": number} | turn for turn in played]
            advance(done, len(plays))
    if not turns:
        raise InvalidInputError(f"no prompt of turn {FIRST_COUNTED} or later fits the model's context")
    figures = {f"{scene}_{name}": value for scene in scenes for name, value in _figures(turns, scene, [*ways]).items()}
    return {"figures": figures, "turns": turns, "ways": [*ways], "model": asked.resolved().called} | stamp()


def selector_of(way: str) -> Selector:
    """Of a selector and a ratio, `head 0.05`. Raises `InvalidInputError`: it is not such a text."""
    name, _, ratio = way.rpartition(" ")
    try:
        share = float(ratio)
    except ValueError:
        raise InvalidInputError(f"--way {way!r}: expected a selector and a ratio") from None
    return SelectorChoice.parse(name).selector((share,), None)


@contextmanager
def _servers(folder: Path, asked: Edits) -> Iterator[tuple[Server, Server]]:
    """vLLM with prefix caching, and the same with the plug-in and an empty store."""
    with ExitStack() as stack:
        store = stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-bench-"))
        extra = {"store": f"file://{store}?ram_bytes=4GiB", "edits": True, "match_content": False}
        limits = asked.tokens + 64, max(2048, asked.tokens // 8)
        settings = (ServerSettings(folder, each, *limits, dtype_of("auto")) for each in (None, extra))
        first, second = (stack.enter_context(serving(each)) for each in settings)
        yield first, second


def _timed(
    plain: Server, mine: Server, folder: Path, scene: Iterator[Prompted], asked: Edits, name: str
) -> Iterator[dict[str, Any]]:
    """As `_played`, of two servers; between two prompts both have nothing to do, as while an agent's tools run."""
    tokenizer, last = AutoTokenizer.from_pretrained(folder), as_token_ids([])
    for turn, (number, messages) in enumerate(scene):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        if len(ids) + 1 > asked.tokens:
            return
        times, before = dict[str, float](), mine.counters()
        for arm in ("prefix", "moved")[:: 1 if turn % 2 else -1]:
            server = plain if arm == "prefix" else mine
            times[f"{arm}_s"] = server.ask(ids, 1, conversation="" if arm == "prefix" else name).ttft_s
            if arm == "moved":
                mine.wait_until_idle()
        found = {key: value - before.get(key, 0) for key, value in mine.counters().items()}
        moved = sum(value for key, value in found.items() if "hit_tokens" in key and 'source="moved"' in key)
        was_edited, last = _is_edited(last, as_token_ids(ids)), as_token_ids(ids)
        if number >= FIRST_COUNTED and was_edited:
            yield {"turn": number, "tokens": len(ids), "moved_tokens": moved} | times


def _played(
    engine: BlendEngine, scene: Iterator[Prompted], asked: Edits, ways: dict[str, Selector]
) -> Iterator[dict[str, Any]]:
    """Asks the prompts of a conversation in order; of each counted one that was edited, what was measured."""
    last = as_token_ids([])
    for number, messages in scene:
        try:
            prompt = replace(engine.chat_prompt(messages), conversation="agent")
        except PromptTooLongError:
            return
        if len(prompt) + asked.answer_tokens > asked.tokens:
            return
        known = engine.runtime.known_in(prompt, engine.runtime.follow())
        was_edited, last = _is_edited(last, prompt.token_ids), prompt.token_ids
        if number >= FIRST_COUNTED and was_edited:
            yield {"turn": number} | _measured(engine, known, asked, ways)
        engine.runtime.store_missed(engine.prefill(known))
        engine.flush()


def _is_edited(last: TokenIds, token_ids: TokenIds) -> bool:
    """Whether a prompt goes on otherwise than with the last one; templates end prompts in tokens of their own."""
    return len(last) - equal_length(last, token_ids) > TEMPLATES_OWN


def _measured(engine: BlendEngine, known: Prompt, asked: Edits, ways: dict[str, Selector]) -> dict[str, Any]:
    scale, found, prompt = ComputeScale.of(engine), dict[str, Any](), known.as_asked or known
    first, times = next(iter(ways.values())), dict[str, list[float]](prefix=[], moved=[])
    for turn in range(asked.runs):
        for arm in ("prefix", "moved")[:: 1 if turn % 2 else -1]:
            touch(engine, prompt)
            began = time.perf_counter()
            result = engine.prefill(prompt, mode="prefix") if arm == "prefix" else engine.prefill(known, selector=first)
            times[arm].append(time.perf_counter() - began)
            report = result.report
            found[f"{arm}_compute"] = scale.share(report.row_layers, report.projected_rows, report.prompt_tokens)
    found |= {f"{arm}_s": statistics.median(each) for arm, each in times.items()}
    found |= {"tokens": len(prompt), "moved_tokens": sum(len(each) for each in known.segments if each.is_moved)}
    if asked.answer_tokens and found["moved_tokens"]:
        alone = Prompt.of([chunk(each.token_ids) if each.is_moved else each for each in known.segments])
        engine.warm(alone.chunks)
        start = full_recompute(engine, prompt)
        assert isinstance(start.kv, DynamicCache)
        full = go_on(engine, start.kv, start.logits.reshape(1, -1).float(), asked.answer_tokens).log_softmax(-1)
        for way, selector in ways.items():
            for kind, blended in (("moved", known), ("alone", alone)):
                found[f"kl_{kind} {way}"] = _kl(engine, blended, selector, full)
    return found


def _kl(engine: BlendEngine, prompt: Prompt, selector: Selector, full: torch.Tensor) -> float:
    """KL(full || method) a token of the full prefill's own answer, whose log-probabilities are given."""
    result, ids = engine.prefill(prompt, selector=selector), full.argmax(-1)
    got, cache = result.logits.reshape(1, -1).float(), fill_cache(engine.model, list(result.kv), None)
    if len(ids) > 1:
        places = torch.arange(len(prompt), len(prompt) + len(ids) - 1)[None]
        out = engine.model(ids[None, :-1], position_ids=places, past_key_values=cache, use_cache=True)
        got = torch.cat([got, out.logits[0].float()])
    return float((full.exp() * (full - got.log_softmax(-1))).sum(-1).mean())


def _figures(turns: Sequence[dict[str, Any]], scene: str, ways: Sequence[str]) -> dict[str, Any]:
    own = [turn for turn in turns if turn["scene"] == scene]
    if not own:
        return {"turns": 0}
    figures = {
        "turns": len(own),
        "moved_turns": sum(turn["moved_tokens"] > 0 for turn in own),
        "tokens": statistics.median(turn["tokens"] for turn in own),
        "gain": statistics.median(turn["prefix_s"] for turn in own)
        / statistics.median(turn["moved_s"] for turn in own),
        **{name: statistics.mean(turn[name] for turn in own) for name in own[0] if name.endswith("_compute")},
        "moved_share": statistics.mean(turn["moved_tokens"] / turn["tokens"] for turn in own),
    }
    measured = {name for turn in own for name in turn if name.startswith("kl_")}
    return figures | {name: statistics.mean(turn[name] for turn in own if name in turn) for name in sorted(measured)}


def plot(result: dict[str, Any], path: Path) -> None:
    """Draws time to first token by turn, a picture a scene, a dot a prompt; each title says how long prompts are."""
    scenes = list(dict.fromkeys(turn["scene"] for turn in result["turns"]))
    with picture(path, columns=len(scenes), width=4.5) as axes:
        for scene, where in zip(scenes, axes, strict=True):
            own = sorted((turn for turn in result["turns"] if turn["scene"] == scene), key=lambda turn: turn["turn"])
            numbers, lengths = [turn["turn"] for turn in own], [turn["tokens"] for turn in own]
            curves = {name: (numbers, [turn[f"{arm}_s"] for turn in own]) for arm, name in ARMS.items()}
            gain = f"{result['figures'][f'{scene}_gain']:.1f} times"
            title = f"{scene}, {min(lengths)} to {max(lengths)} tokens: {gain}"
            draw_curves(where, curves, title, xlabel="turn", ylabel="time to first token, s", ylim=(0, None))
