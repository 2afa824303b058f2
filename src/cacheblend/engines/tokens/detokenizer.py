"""Token ids to text while they are generated, at constant work a token. Knows no tokenizer, only its decode function.

ids   c c | r r r r          context: ids whose text has been returned; decoded again, since what a tokenizer makes
text  ... | returned  tail   of an id may depend on the one in front of it
"""

from collections.abc import Callable, Sequence

_RUN = 16  # ids that are decoded again with each new one, beside the context, unless nothing of them is settled
_INCOMPLETE = "\ufffd"
_LONGEST_CHARACTER = 4  # bytes


class Detokenizer:
    """The text of ids that come one by one: all that it returns, put together, is the text of all ids.

    Text is returned as soon as no later id can change it. Two kinds may change: the bytes at the end that are not a
    whole character yet, which are one replacement character, and a run of byte tokens (``<0x0A>``), which one invalid
    byte makes undecodable as a whole. While such a run goes on for more than `_RUN` ids, it is decoded each time that
    its length has doubled. What `decode` makes of an id depends on the ids next to it only; `is_skipped`: it leaves the
    id out; `is_byte`: of a tokenizer that decodes a run of byte tokens together. `tail` is what the ids so far decode
    to behind the text that was returned; out of date in a long run of byte tokens.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        is_skipped: Callable[[int], bool] = lambda token_id: False,
        is_byte: Callable[[int], bool] = lambda token_id: False,
    ) -> None:
        self._decode, self._is_skipped, self._is_byte = decode, is_skipped, is_byte
        self._context, self._run = list[int](), list[int]()
        self._returned = 0  # characters of the text of context and run
        self._unsettled = 0  # ids since `_run` was short, or became so
        self._in_bytes = False
        self.tail = ""

    def push(self, token_id: int) -> str:
        """Adds an id; returns the new text that later ids cannot change."""
        if self._is_skipped(token_id):
            return ""
        was_in_bytes, self._in_bytes = self._in_bytes, self._is_byte(token_id)
        self._run.append(token_id)
        self._unsettled += 1
        is_due = self._unsettled <= _RUN or self._unsettled.bit_count() == 1
        if is_due or (was_in_bytes and not self._in_bytes):
            return self._advance(final=False)
        return ""

    def finish(self) -> str:
        """Returns the rest: what is incomplete stays so."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        text = self._decode([*self._context, *self._run])[self._returned :]
        certain = text if final else "" if self._in_bytes else text.removesuffix(_INCOMPLETE)
        self._returned += len(certain)
        self.tail = text[len(certain) :]
        if not self._in_bytes and (len(self._run) < _RUN or self._begin_run()):
            self._unsettled = 0
        return certain

    def _begin_run(self) -> bool:
        """Begins a run behind the last ids with a text in front of the tail; False: there are none. A first id loses
        its leading space in many tokenizers, so one without a text is no context. One that begins inside of a character
        is: what follows a whole character is decoded alike, and what follows as many bytes as a character has."""
        ids, size = [*self._context, *self._run], 1
        while size < 2 * len(ids):
            context = ids[-size:]
            text = self._decode(context)
            settled = text.removesuffix(self.tail)
            if settled.strip(_INCOMPLETE) or len(settled) >= _LONGEST_CHARACTER:
                self._context, self._run, self._returned = context, [], len(settled)
                return True
            size *= 2
        if self._returned or self.tail or self._decode(few := [ids[0], ids[-1]]):
            return False
        self._context, self._run = few, []  # ids without any text, of which the first may differ
        return True


class TextStream:
    """Streams the text of an answer without incomplete characters and without parts of a stop text, which ends it
    (`stopped`). Without a detokenizer answers have none."""

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
        seen = self._held + self._tail
        found = [at for at in map(seen.find, self._stop) if at >= 0]
        if found:
            self._held, self._tail, self.stopped = seen[: min(found)], "", True
        certain = len(self._held)
        if not final and not self.stopped:  # in front of the longest end that may begin a stop text, whatever follows
            longest = min(certain, max(map(len, self._stop), default=1) - 1)
            for at in range(certain - longest, len(self._held)):
                if any(stop.startswith(self._held[at:]) and stop != self._held[at:] for stop in self._stop):
                    certain = at
                    break
        new, self._held = self._held[:certain], self._held[certain:]
        self._sent.append(new)
        return new
