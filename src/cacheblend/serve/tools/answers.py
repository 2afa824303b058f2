"""Chats in whose answers tool calls are read: `message.tool_calls`, and the same as deltas of a stream.

A call is sent whole, once it is complete.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cacheblend.engines.hf.tickets import TokenEvent
from cacheblend.serve.responses import ChatFormat, Choice
from cacheblend.serve.tools.formats import Call
from cacheblend.serve.tools.reading import CallReader, Pieces


@dataclass(frozen=True)
class ToolChatFormat:
    """``chat.completion`` with tool calls; the methods are those of `ResponseFormat`. For one request.

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
        """See `ResponseFormat`."""
        return self.chat.kind

    @property
    def objects(self) -> tuple[str, str]:
        """See `ResponseFormat`."""
        return self.chat.objects

    def opening(self, number: int) -> dict[str, Any] | None:
        """See `ResponseFormat`."""
        delta = {"role": "assistant", "content": None}  # there may be none
        return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, event: TokenEvent, offset: int) -> dict[str, Any]:
        """See `ResponseFormat`."""
        reader = self._readers.get(event.choice) or self._readers.setdefault(event.choice, self.reader())
        first, pieces, reason = reader.calls, reader.push(event.text), event.finish_reason
        if reason is not None:
            pieces += reader.finish()
            reason = reader.finish_reason(reason)
        calls = [{"index": first + number, **call} for number, call in enumerate(self._calls(pieces))]
        text = _text(pieces)
        delta = ({"content": text} if text else {}) | ({"tool_calls": calls} if calls else {})
        return self.chat.piece(event, offset) | {"delta": delta, "finish_reason": reason}

    def choice(self, number: int, choice: Choice) -> dict[str, Any]:
        """See `ResponseFormat`."""
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
