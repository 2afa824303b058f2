"""Reading an answer's tool calls while it is generated.

    "Let me look.\n"  "<tool"  "_call>{\"name\""  ...  "}</tool_call>"
     sent at once      may be a marker: held back       a call, once it is complete

What turns out to be no call is sent as text, whole. White space around calls that no text is beside is left out.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from cacheblend.engines.hf.tickets import TokenEvent
from cacheblend.serve.responses import ChatFormat, ResponseChoice
from cacheblend.serve.tools.call_scanner import SPACE, HeldText, NoCallError, Scan, skip
from cacheblend.serve.tools.formats import Call, Format

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
        self._held, self._pieces = HeldText(), list[str | Call]()
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


@dataclass(frozen=True)
class ToolChatFormat:
    """``chat.completion`` with tool calls; the methods are those of `AnswerFormat`. For one request.

    Attributes:
        chat: what is not about calls.
        reader: makes the reader of a choice.
        new_id: makes a call's id.
    """

    chat: ChatFormat
    reader: Callable[[], CallReader]
    new_id: Callable[[], str]
    _readers: dict[int, CallReader] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """See `AnswerFormat`."""
        return self.chat.kind

    @property
    def objects(self) -> tuple[str, str]:
        """See `AnswerFormat`."""
        return self.chat.objects

    def opening(self, number: int) -> dict[str, Any] | None:
        """See `AnswerFormat`."""
        delta = {"role": "assistant", "content": None}  # there may be none
        return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, event: TokenEvent, offset: int) -> dict[str, Any]:
        """See `AnswerFormat`."""
        reader = self._readers.get(event.choice) or self._readers.setdefault(event.choice, self.reader())
        first, pieces, reason = reader.calls, reader.push(event.text), event.finish_reason
        if reason is not None:
            pieces += reader.finish()
            reason = reader.finish_reason(reason)
        calls = [{"index": first + number, **call} for number, call in enumerate(self._calls(pieces))]
        text = _text(pieces)
        delta = ({"content": text} if text else {}) | ({"tool_calls": calls} if calls else {})
        return self.chat.piece(event, offset) | {"delta": delta, "finish_reason": reason}

    def choice(self, number: int, choice: ResponseChoice) -> dict[str, Any]:
        """See `AnswerFormat`."""
        reader = self.reader()
        pieces = reader.push(choice.text) + reader.finish()
        calls, text = self._calls(pieces), _text(pieces)
        message = {"role": "assistant", "content": text if text or not calls else None}
        reason = choice.finish_reason and reader.finish_reason(choice.finish_reason)
        return self.chat.choice(number, choice) | {
            "message": message | ({"tool_calls": calls} if calls else {}),
            "finish_reason": reason,
        }

    def _calls(self, pieces: Pieces) -> list[dict[str, Any]]:
        return [
            {"id": self.new_id(), "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
            for each in pieces
            if isinstance(each, Call)
        ]


def _text(pieces: Pieces) -> str:
    return "".join(each for each in pieces if isinstance(each, str))
