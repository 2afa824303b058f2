"""Token ids to text while they are generated, at constant work a token. Knows no tokenizer, only its decode function.

ids   c c | r r r r          context: ids whose text has been returned; decoded again, since what a tokenizer makes
text  ... | returned  tail   of an id may depend on the one in front of it
"""

from collections.abc import Callable, Sequence

_RUN = 16
"""Ids that are decoded again with each new one, at most, unless the bytes of a character stay incomplete."""
_INCOMPLETE = "\ufffd"


def _never(token_id: int) -> bool:
    return False


class Detokenizer:
    """The text of ids that come one by one: all that it returns, put together, is the text of all ids.

    Text is returned as soon as no later id can change it. Two kinds may change: bytes that are not a whole character
    yet, and a run of byte tokens (``<0x0A>``), which one invalid byte makes undecodable as a whole. While such a run
    goes on for more than `_RUN` ids, it is decoded each time that its length has doubled.

    Args:
        decode: text of ids. That of an id depends on the ids next to it only.
        is_skipped: whether `decode` leaves an id out.
        is_byte: whether an id is a byte token, of a tokenizer that decodes a run of them together.

    Attributes:
        tail: what the ids so far decode to behind the text that was returned. Out of date in a long run.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        is_skipped: Callable[[int], bool] = _never,
        is_byte: Callable[[int], bool] = _never,
    ) -> None:
        self._decode, self._is_skipped, self._is_byte = decode, is_skipped, is_byte
        self._context, self._run = list[int](), list[int]()
        self._returned = 0  # characters of the text of context and run
        self._unsettled = 0  # ids since a tail was empty
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
        certain = text if final else "" if self._in_bytes else text.rstrip(_INCOMPLETE)
        self._returned += len(certain)
        self.tail = text[len(certain) :]
        if not self.tail and (len(self._run) < _RUN or self._begin_run()):
            self._unsettled = 0
        return certain

    def _begin_run(self) -> bool:
        """Begins a new run behind ids that have a text; False: there are none.

        A first id loses its leading space in many tokenizers, so that one without a text is no context. One that begins
        inside of a character is: what follows a whole character is decoded alike.
        """
        ids = [*self._context, *self._run]
        for size in range(1, len(ids) + 1):
            if text := self._decode(ids[-size:]):
                self._context, self._run, self._returned = ids[-size:], [], len(text)
                return True
        return False
