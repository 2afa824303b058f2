"""Turns token ids into text while they are generated. Knows no tokenizer, only a decode function."""

from collections.abc import Callable, Sequence


class TextStream:
    """Streams the text of an answer without incomplete characters and without parts of a stop text.

    Args:
        decode: turns ids into text.
        stop: texts that end the answer.

    Attributes:
        text: the text of all tokens so far, cut at a stop text.
        stopped: True once a stop text was found.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, stop
        self._ids: list[int] = []
        self._sent = ""  # never changed, even if a later token makes earlier bytes undecodable
        self.text = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Adds a token; returns the new text that later tokens cannot change."""
        self._ids.append(token_id)
        return self._advance(final=False)

    def finish(self) -> str:
        """Returns the text that was held back."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        if self.stopped:
            return ""
        self.text = self._sent + self._decode(self._ids)[len(self._sent) :]
        found = [at for at in (self.text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True
        certain = len(self.text) if final or self.stopped else len(self.text) - self._uncertain()
        new = self.text[len(self._sent) : certain]
        self._sent += new
        return new

    def _uncertain(self) -> int:
        """Characters at the end that later tokens may change, or that may begin a stop text."""
        whole = self.text.rstrip("\ufffd")
        starts = (n for stop in self._stop for n in range(1, len(stop)) if whole.endswith(stop[:n]))
        return len(self.text) - len(whole) + max(starts, default=0)
