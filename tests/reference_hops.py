"""The slow reference of hops: which spans ask in turn, with which rows, and what counts of it. Part of `reference`."""

from collections.abc import Callable

from cacheblend.core.plan.prompt import Prompt

Group = tuple[list[int], list[int]]
"""Rows that ask, the first of them generic, and rows whose attention from them does not count."""


class Hops:
    """Asks the best spans in turn, those that were not asked yet."""

    def __init__(
        self, prompt: Prompt, spans: list[int], candidates: list[int], question: list[int], limit: int
    ) -> None:
        self.ids, self.spans, self.candidates = prompt.token_ids.tolist(), spans, candidates
        self.segments = [number for number, segment in enumerate(prompt.segments) for _ in range(len(segment))]
        self.question, self.limit = question, limit
        self.done, self.asked = set[int](), list[list[list[int]]]()

    def follow(
        self, wanted: dict[int, float], most: int, weight: float, ask: Callable[..., dict[int, float]]
    ) -> dict[int, float]:
        """How much each candidate is wanted after one more hop of at most `most` spans."""
        best: dict[int, float] = {}
        for position in self.candidates:
            best[self.spans[position]] = max(best.get(self.spans[position], 0.0), wanted[position])
        open_spans = [span for span in sorted(best) if best[span] > 0 and span not in self.done]
        chosen = sorted(open_spans, key=lambda span: -best[span])[:most]
        self.done |= set(chosen)
        cues = [self._words(span, weight * min(1.0, best[span])) for span in chosen]
        groups = [group for group in map(self._group, chosen) if len(group[0]) > 1] if self.limit else []
        self.asked.append([rows for rows, _ in groups])
        cues += [ask(*groups)] if groups else []
        return {p: max(wanted[p], *(cue.get(p, 0.0) for cue in cues)) if cues else wanted[p] for p in wanted}

    def _words(self, span: int, weight: float) -> dict[int, float]:
        mine = [p for p in self.candidates if self.spans[p] == span]
        others = [p for p in range(self.question[0]) if p not in mine]
        words, ids_of_others = {self.ids[p] for p in mine}, [self.ids[p] for p in others]
        return {p: weight / ids_of_others.count(self.ids[p]) for p in others if self.ids[p] in words}

    def _group(self, span: int) -> Group:
        mine = [p for p in self.candidates if self.spans[p] == span]
        behind = [p for p in (mine[-1] + 1, mine[-1] + 2) if p in self.candidates]
        own = mine + [p for p in behind if self.segments[p] == self.segments[mine[-1]]]
        return first_and_last(own, self.limit), own


def first_and_last(rows: list[int], limit: int) -> list[int]:
    return rows if len(rows) <= limit else [rows[0], *rows[-(limit - 1) :]]
