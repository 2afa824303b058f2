"""Reading an answer's tool calls while it is generated.

    "Let me look.\n"  "<tool"  "_call>{\"name\""  ...  "}</tool_call>"
     sent at once      may be a marker: held back       a call, once it is complete

What turns out to be no call is sent as text, whole. White space around calls that no text is beside is left out.
"""

from collections.abc import Collection

from cacheblend.serve.tools.formats import Call, Format
from cacheblend.serve.tools.scanning import SPACE, Held, NoCallError, Scan, skip

Pieces = list[str | Call]


class CallReader:
    """Reads the calls of one answer.

    Args:
        form: in which calls are written.
        names: of the request's tools; what calls another one is text.
        only_first: what is behind the first call is left out.

    Attributes:
        calls: how many were read.
    """

    def __init__(self, form: Format, names: Collection[str], *, only_first: bool = False) -> None:
        self._format, self._names, self._only_first = form, names, only_first
        self._held, self._pieces = Held(), list[str | Call]()
        self._scan = self._read()
        self.calls = 0

    def push(self, text: str) -> Pieces:
        """Adds text; returns the text and the calls that later text cannot change."""
        self._held.text += text
        return self._advance() if text else []

    def finish(self) -> Pieces:
        """Returns what was held back."""
        self._held.ended = True
        return self._advance()

    def finish_reason(self, reason: str) -> str:
        """OpenAI's name for the end of the answer; one that was cut says so, unless what was cut is left out."""
        is_whole = reason == "stop" or self._only_first
        return "tool_calls" if self.calls and is_whole else reason

    def _advance(self) -> Pieces:
        next(self._scan, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _read(self) -> Scan[None]:
        at, is_front = 0, True  # is_front: behind a call or the answer's beginning
        while not (self._only_first and self.calls):
            found = yield from self._beginning(at, is_front)
            if found is None:
                return
            start, body = found
            try:
                calls, at = yield from self._format.read(self._held, body)
                if not all(call.name in self._names for call in calls):
                    raise NoCallError(at)
            except NoCallError as error:
                self._add(self._held.text[start : error.at])
                at, is_front = error.at, False
            else:
                chosen = calls[:1] if self._only_first else calls
                self._pieces += chosen
                self.calls += len(chosen)
                is_front = True

    def _beginning(self, at: int, is_front: bool) -> Scan[tuple[int, int] | None]:
        """Passes on the text in front of what may be the next call. Returns the end of that text, and where the call's
        own text begins; None: the answer has ended."""
        held, begin = self._held, at
        if is_front:
            begin = yield from skip(held, at, SPACE + self._format.between if self.calls else SPACE)
            if begin == len(held.text):
                rest = held.text[at:]
                self._add(rest if not self.calls or rest.strip() else "")
                return None
            if held.text[begin] == self._format.bare:
                return at, begin
        look = begin
        while True:
            hits = [(place, mark) for mark in self._format.markers if (place := held.text.find(mark, look)) >= 0]
            if hits:
                place, mark = min(hits)
                if is_front and place == begin:
                    return at, place + len(mark)
                self._add(held.text[at:place])
                return place, place + len(mark)
            certain = len(held.text) - (0 if held.ended else self._uncertain(look))
            if certain > begin:
                self._add(held.text[at:certain])
                at = look = certain
            if held.ended:
                return None
            yield

    def _uncertain(self, look: int) -> int:
        """Characters at the end, from `look` on, that may begin a marker."""
        end = self._held.text[look:][-max(map(len, self._format.markers)) :]
        lengths = (n for mark in self._format.markers for n in range(1, len(mark)) if end.endswith(mark[:n]))
        return max(lengths, default=0)

    def _add(self, text: str) -> None:
        if text:
            self._pieces.append(text)
