"""Answers as text while they are generated, up to a stop text."""

from collections.abc import Sequence

from cacheblend.engines.tokens.detokenizer import Detokenizer


class TextStream:
    """Streams the text of an answer without incomplete characters and without parts of a stop text.

    Args:
        detokenizer: turns ids into text; None: answers have none.
        stop: texts that end the answer.

    Attributes:
        stopped: True once a stop text was found.
    """

    def __init__(self, detokenizer: Detokenizer | None, stop: Sequence[str] = ()) -> None:
        self._detokenizer, self._stop = detokenizer, stop
        self._sent: list[str] = []
        self._held = ""  # settled, but may begin a stop text
        self._tail = ""  # may change
        self.stopped = False

    @property
    def text(self) -> str:
        """The text of all tokens so far, cut at a stop text."""
        return "".join(self._sent) + self._held + self._tail

    def push(self, token_id: int) -> str:
        """Adds a token; returns the new text that later tokens cannot change."""
        if self._detokenizer is None or self.stopped:
            return ""
        self._held += self._detokenizer.push(token_id)
        self._tail = self._detokenizer.tail
        return self._send(final=False)

    def finish(self) -> str:
        """Returns the text that was held back."""
        if self._detokenizer is None or self.stopped:
            return ""
        self._held += self._detokenizer.finish()
        self._tail = ""
        return self._send(final=True)

    def _send(self, final: bool) -> str:
        """Sends what is settled. A stop text cannot begin in what was sent before."""
        seen = self._held + self._tail
        found = [at for at in map(seen.find, self._stop) if at >= 0]
        if found:
            self._held, self._tail, self.stopped = seen[: min(found)], "", True
        certain = len(self._held) if final or self.stopped else self._certain()
        new, self._held = self._held[:certain], self._held[certain:]
        self._sent.append(new)
        return new

    def _certain(self) -> int:
        """Characters in front of the longest end that may begin a stop text, whatever the tail becomes."""
        held = self._held
        longest = min(len(held), max(map(len, self._stop), default=1) - 1)
        begins = (at for at in range(len(held) - longest, len(held)) if self._may_begin(held[at:]))
        return next(begins, len(held))

    def _may_begin(self, end: str) -> bool:
        return any(stop.startswith(end) and stop != end for stop in self._stop)
