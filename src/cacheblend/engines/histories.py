"""What earlier prompts of a conversation had computed in their context, found again where its history was edited.

    earlier prompt   system | u1 | thought | a1 | u2 | a2 | u3
    its chain        b0   b1   b2   b3   b4   b5   b6   b7          blocks whose KV is exact for that prompt
    prompt           system | u1 | a1 | u2 | a2 | u3 | a3 | u4
    source           exact prefix| moved             | text
                                 ^ the first difference

A stripped thought, a cleared tool result, or a clock in the first line changes a history in the middle. What stands
behind the edit was computed in nearly this context, at another place: it is loaded from the earlier prompt's blocks,
moved, and recomputed in part, as a chunk is. It has seen its own context, so it serves its conversation alone, and is
never stored again. Knows prompts and plans. Does not know how a block is stored.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from typing import NamedTuple

from cacheblend.core.names import BlockName, TokenIds, equal_length
from cacheblend.core.plan.blocks import BlockSource, ChunkManifest, EmptySource
from cacheblend.core.plan.chunk_matches import ChunkIndex
from cacheblend.core.plan.plan import BlendPlan, Source, Span
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, Segment, run_of, text
from cacheblend.engines.chunk_index import with_matches

MOST_CHAINS = 4
"""Earlier prompts of a conversation that are remembered, those that were asked or moved from last. A prompt that goes
on takes the place of what it begins with, so that there is one for each edit."""

SECTION, MOST_SECTION = 2048, 8192
"""Tokens of a history that are computed at once, while there is no request: so many, or behind a long prefix, all of
which is read each time, a quarter of it, but no more than the second."""

OVERHEAD = 256  # ids that a chain counts for beside its own
GONE = 3 / 4
"""Of what stood in front of a moved token, at most this share may stand in front of it no more, if it is more than a
shortest run. The first tokens of a run that are behind too little else are computed. Behind a summary of the older
half, where .9 and more was gone in front of runs, these were further from full prefill as a whole than if they had been
computed alone; without such tokens they are nearer (docs/log.md, 2026-11-30)."""


class _Block(NamedTuple):
    segment: int
    start: int
    stop: int
    name: BlockName


@dataclass(frozen=True, eq=False)
class _Chain:
    """What a prompt begins with and has exact blocks of: its ids, [tokens], and where its blocks lie."""

    token_ids: TokenIds
    blocks: tuple[_Block, ...]

    @staticmethod
    def of(exact: BlendPlan) -> "_Chain":
        blocks = (_Block(span.segment, span.start, span.stop, span.name) for span in exact.spans)
        return _Chain(exact.prompt.token_ids, tuple(blocks))

    def parts(self, root: BlockName, lost: Collection[BlockName] = ()) -> Iterator[ChunkManifest]:
        """Each segment, or what lies between lost blocks of it, as if it were a chunk behind the text in front."""
        for (_, is_lost), group in groupby(self.blocks, lambda block: (block.segment, block.name in lost)):
            if not is_lost:
                blocks, ids = [*group], self.token_ids
                start, stop, names = blocks[0].start, blocks[-1].stop, tuple(block.name for block in blocks)
                yield ChunkManifest(names[-1], root, ids[:start], ids[start:stop], names)

    def __len__(self) -> int:  # what it counts for, its names and arrays, too
        return len(self.token_ids) + OVERHEAD

    def shared(self, token_ids: TokenIds) -> int:
        """How many first tokens are the same."""
        return equal_length(self.token_ids, token_ids)

    def held(self, shared: int, lost: Collection[BlockName]) -> int:
        """How many of so many first tokens lie in front of the first lost block."""
        return min(shared, next((block.start for block in self.blocks if block.name in lost), shared))


class Histories:
    """The exact chains of recent conversations, for one engine. Thread-safe.

    Args:
        min_run_tokens: shorter runs are not moved.
        most_tokens: ids that are kept; conversations that were asked longest ago are forgotten.
    """

    def __init__(self, min_run_tokens: int, most_tokens: int) -> None:
        self._min_run_tokens, self._most_tokens, self._tokens = min_run_tokens, most_tokens, 0
        self._chains: OrderedDict[tuple[BlockName, str], tuple[_Chain, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def knows(self, root: BlockName, conversation: str) -> bool:
        """Whether anything is remembered of a conversation."""
        with self._lock:
            return (root, conversation) in self._chains

    def note(self, root: BlockName, conversation: str, exact: BlendPlan) -> None:
        """Remembers what was stored of a prompt, a plan of `exact_part`."""
        new = _Chain.of(exact)
        if len(new.token_ids) < self._min_run_tokens:
            return
        with self._lock:
            before = self._chains.pop((root, conversation), ())
            if any(each.shared(new.token_ids) == len(new.token_ids) for each in before):
                kept = before
            else:  # a template ends a prompt in tokens that no longer one has
                beyond = [len(each.token_ids) - each.shared(new.token_ids) for each in before]
                others = (each for each, left in zip(before, beyond, strict=True) if left >= self._min_run_tokens)
                kept = (*others, new)[-MOST_CHAINS:]
            self._chains[root, conversation] = kept
            self._tokens += sum(map(len, kept)) - sum(map(len, before))
            while self._tokens > self._most_tokens:
                _, gone = self._chains.popitem(last=False)
                self._tokens -= sum(map(len, gone))

    def match(self, root: BlockName, prompt: Prompt, lost: Collection[BlockName] = ()) -> Prompt:
        """The prompt with the runs behind its exact prefix that its conversation has exact KV of at other places, but
        in `lost` blocks. A prompt of no named conversation is matched with those that begin as it does, and has to."""
        if not prompt.chunks:  # one text, so that runs and blocks end at no message
            whole = Prompt.of([text(prompt.token_ids)], prompt.changed_contents)
            prompt = replace(whole, conversation=prompt.conversation)
        with self._lock:
            known = self._chains.get((root, prompt.conversation), ())
        needed = 0 if prompt.conversation else self._min_run_tokens
        shared = {each: count for each in known if (count := each.shared(prompt.token_ids)) >= needed}
        if not shared and not prompt.conversation:
            return prompt
        begun = max((each.held(count, lost) for each, count in shared.items()), default=0)
        in_front = sum(map(len, takewhile(lambda segment: not segment.is_chunk, prompt.segments)))
        begun = min(begun, in_front)  # behind a marked chunk nothing is an exact prefix
        prompt = replace(prompt, as_asked=prompt, begun=begun if begun >= self._min_run_tokens else 0)
        longest = max(shared.values(), default=0)
        beyond = max((len(each.token_ids) - count for each, count in shared.items()), default=0)
        if min(beyond, len(prompt) - longest) < self._min_run_tokens:
            return prompt  # nothing was edited, most often
        segments = self._with_runs(root, prompt, shared, lost)
        used = {segment.found_in.chunk_id for segment in segments if segment.is_moved and segment.found_in}
        if not used:
            return prompt
        with self._lock:  # what is moved from is forgotten last
            chains = self._chains.get((root, prompt.conversation), ())
            if chains:
                by_use = sorted(chains, key=lambda each: any(block.name in used for block in each.blocks))
                self._chains[root, prompt.conversation] = tuple(by_use)
        front, first = prompt.front, next((segment for segment in segments if segment.is_chunk), None)
        if first is not None and first.is_moved:  # the block in which the prefix ends is loaded in part
            front = tuple(text(each.token_ids) for each in max(shared, key=shared.__getitem__).parts(root))
        found = Prompt.of(segments, prompt.changed_contents, front)
        return replace(prompt, segments=found.segments, front=found.front)

    def _with_runs(
        self, root: BlockName, prompt: Prompt, shared: Mapping[_Chain, int], lost: Collection[BlockName]
    ) -> list[Segment]:
        """A prompt's segments with the runs that stand in these chains, which begin with so many of its tokens."""
        index, begins, kept = ChunkIndex(self._min_run_tokens), dict[BlockName, int](), max(shared.values())
        for each, count in shared.items():
            index.add(parts := [*each.parts(root, lost)])
            for part in parts:
                begins[part.chunk_id] = min(count, begins.get(part.chunk_id, count))
        segments = list[Segment]()
        for segment in with_matches(prompt, index, kept, moved=True).segments:
            found_in = segment.found_in
            if not segment.is_moved or found_in is None:
                segments.append(segment)
                continue
            # What stands in front of the first difference is where it was; its like elsewhere is text that is repeated.
            in_front = len(found_in.anchor_ids) + segment.offset
            skipped = max(0, begins[found_in.chunk_id] - in_front)
            if in_front - kept > self._min_run_tokens:
                skipped = max(skipped, math.ceil((in_front - kept) / GONE) - in_front)
            left = len(segment) - skipped
            if left >= self._min_run_tokens:
                run = run_of(found_in, segment.offset + skipped, left, moved=True)
                segments += [text(segment.token_ids[:skipped]), run]
            else:
                segments.append(text(segment.token_ids))
            kept += len(segment)
        return segments


def exact_part(planner: Planner, plan: BlendPlan) -> BlendPlan | None:
    """The text that a prefilled prompt begins with, as far as its KV is exact, cut into blocks as a prompt that no run
    was found in; None: there is none. Says nothing of what is stored."""

    def is_exact(span: Span) -> bool:  # a moved run that is not loaded is computed behind what stands in front
        is_computed = span.source is Source.MISS and plan.prompt.segments[span.segment].is_moved
        return is_computed or span.source in (Source.PREFIX, Source.TEXT)

    exact = [*takewhile(is_exact, plan.spans)]
    stop, segments, position = exact[-1].stop if exact else 0, list[Segment](), 0
    for segment in (plan.prompt.as_asked or plan.prompt).segments:
        if segment.is_chunk or position >= stop:
            break
        segments.append(text(segment.token_ids[: stop - position]))
        position += len(segment)
    return planner.plan(Prompt.of(segments), EmptySource()) if segments else None


def plan_of_held(
    prompt: Prompt,
    plan: Callable[[Prompt], BlendPlan],
    match: Callable[[Prompt, Collection[BlockName]], Prompt],
) -> BlendPlan:
    """The plan of a matched prompt. Of runs whose blocks the store has lost, with what other chains hold: `match`
    finds runs of the prompt as it was asked, but in these blocks; and chunks behind the first block that is lost of
    what the conversation had begun with."""
    found, lost = plan(prompt), set[BlockName]()
    for _ in range(MOST_CHAINS):
        asked, begun = found.prompt.as_asked, found.prompt.begun
        moved = [span for span in found.spans if found.prompt.segments[span.segment].is_moved]
        missed = {span.name for span in moved if span.source is Source.MISS}
        missed |= {span.name for span in found.spans if span.source is Source.TEXT and span.stop <= begun}
        if asked is None or not (missed := missed - found.left_out):
            break
        again = match(asked, lost := lost | missed)
        held = sum(len(span) for span in moved if span.source is not Source.MISS)
        if again.begun == begun and sum(len(segment) for segment in again.segments if segment.is_moved) < held:
            break
        planned = plan(again)
        if all(span.name in planned.left_out for span in planned.spans):
            break  # this time the store was too slow
        found = planned
    return found


def next_section(
    planner: Planner, prompt: Prompt, store: BlockSource, most: int, within: int | None = None
) -> tuple[BlendPlan | None, BlendPlan | None]:
    """What the store holds of a history, as `exact_part`; and the plan of it with the section behind, of `most` tokens
    at most, but a block at least, which ends in the first `within`. None: it holds nothing; it holds all so far."""
    plan = planner.plan(prompt, store)
    held = [*takewhile(lambda span: span.source is Source.PREFIX, plan.spans)]
    stop = sum(map(len, held))
    end = stop + min(max(SECTION, min(stop // 4, MOST_SECTION)), most)
    spans = plan.spans[: max(len(held) + 1, sum(span.stop <= end for span in plan.spans))]
    if within is not None:
        spans = tuple(span for span in spans if span.stop <= within)
    exact, section = (exact_part(planner, replace(plan, spans=tuple(part))) for part in (held, spans))
    if section is None or stop >= len(section):
        return exact, None
    return exact, replace(section, spans=spans[: len(section.spans)])
