"""Scenes of plain and blended requests that share a front, drawn at random: who arrives when, and what is asked later.

    plain     front | own text                                  arrives in the same step as
    blended   front | more | passage passage | question         the plain ones, in any order
    later     plain requests over front, more, passages, question: every text that could have been polluted

The front ends on a block's border, or inside a block, or is shorter than one, or longer than an engine step computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lab.faults.engine import Request
from lab.faults.prompts import Asked, Texts, joined


@dataclass(frozen=True)
class Arrival:
    """A request of a scene.

    Attributes:
        request: what is asked.
        step: engine step in front of which it arrives.
        aborted: engine step after which its client goes away; None: it stays.
        is_plain: it must be answered as without the plug-in, at any recompute ratio.
    """

    request: Request
    step: int
    aborted: int | None
    is_plain: bool


@dataclass(frozen=True)
class Scene:
    """Requests that meet, and plain ones that are asked alone once all of those have ended."""

    arrivals: tuple[Arrival, ...]
    later: tuple[Request, ...]

    @property
    def requests(self) -> list[Request]:
        """All of them."""
        return [*(each.request for each in self.arrivals), *self.later]

    @property
    def compared(self) -> int:
        """Plain requests that stay to their end."""
        return sum(each.is_plain and each.aborted is None for each in self.arrivals) + len(self.later)


def draw(seed: int, count: int, block_size: int, *, plain_tokens: int = 3) -> list[Scene]:
    """Scenes, of which a longer list begins with the same ones.

    Args:
        seed: of everything drawn, the passages included (`Texts(seed)` has the same).
        count: of scenes.
        block_size: of the paged cache, in tokens.
        plain_tokens: tokens of the plain answers; many keep blocks busy, so that a small cache preempts.
    """
    texts = Texts(seed)
    return [_scene(texts, number, block_size, plain_tokens) for number in range(count)]


def _scene(texts: Texts, number: int, block_size: int, plain_tokens: int) -> Scene:
    rng = texts.rng
    front = texts.ids(_front_tokens(texts, block_size))
    more = texts.ids(rng.choice([0, 1, block_size - 1, block_size, 2 * block_size, 2 * block_size + 3, 4 * block_size]))
    blended = [
        _blended(texts, front, more if rng.random() < 0.7 else texts.ids(rng.randint(0, 3 * block_size)))
        for _ in range(rng.choice([1, 1, 2, 3]))
    ]
    plain = [
        (*front, *more[: rng.choice([0, 0, len(more) // 2, len(more)])], *texts.ids(rng.randint(1, 40)))
        for _ in range(rng.choice([1, 1, 2, 3]))
    ]
    arrivals = [
        *(_arrival(texts, f"blend-{number}-{i}", one.ids, _way(texts, one), 3) for i, one in enumerate(blended)),
        *(_arrival(texts, f"plain-{number}-{i}", ids, (), plain_tokens) for i, ids in enumerate(plain)),
    ]
    rng.shuffle(arrivals)
    later = [
        Request(f"later-{number}-{i}", ids) for i, ids in enumerate(_could_be_polluted(texts, front, more, blended))
    ]
    return Scene(tuple(arrivals), tuple(later))


def _front_tokens(texts: Texts, block_size: int) -> int:
    """Shorter than a block, one block, some blocks, one token around them, or longer than a small engine step."""
    rng = texts.rng
    blocks = rng.choice([0, 1, 1, 2, 4, 8, 12])
    return max(1, blocks * block_size + rng.choice([-1, 0, 0, 0, 1, rng.randrange(block_size)]))


def _blended(texts: Texts, front: Sequence[int], more: Sequence[int]) -> Asked:
    passages = texts.rng.sample(texts.passages, texts.rng.randint(2, 4))
    return joined((*front, *more), passages, texts.ids(texts.rng.randint(2, 20)))


def _way(texts: Texts, one: Asked) -> tuple[tuple[int, int], ...] | None:
    """Spans, or None: content is matched."""
    return one.spans if texts.rng.random() < 0.6 else None


def _arrival(
    texts: Texts, name: str, ids: Sequence[int], spans: tuple[tuple[int, int], ...] | None, tokens: int
) -> Arrival:
    rng = texts.rng
    step = 0 if rng.random() < 0.8 else rng.randint(1, 3)
    aborted = step + rng.randint(0, 2) if rng.random() < 0.12 else None
    return Arrival(Request(name, tuple(ids), spans, tokens), step, aborted, is_plain=spans == ())


def _could_be_polluted(
    texts: Texts, front: Sequence[int], more: Sequence[int], blended: Sequence[Asked]
) -> list[tuple[int, ...]]:
    """Prompts of plain requests over the texts of a scene: their front, and prompts cut anywhere."""
    rng = texts.rng
    found = [(*front, *more, *texts.ids(8)), (*front, *texts.ids(5))]
    for one in blended:
        cut = rng.randint(len(front), len(one.ids))
        found += [one.ids, (*one.ids[:cut], *texts.ids(3))]
    return found


def plain_twins(scenes: Sequence[Scene]) -> list[Request]:
    """All requests of the scenes as plain ones: what a vLLM without the plug-in is asked."""
    return [replace(request, spans=()) for scene in scenes for request in scene.requests]
