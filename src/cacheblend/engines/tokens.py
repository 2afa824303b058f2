"""Texts to token ids, segment by segment, without the traps.

- A passage is tokenised on its own, the same ids wherever it stands.
- Text that looks like a special or added token (``<think>``, ``<|im_end|>``) in a passage stays text.
- No SentencePiece dummy prefix in the middle of a prompt.
- BOS once, in front, where the tokenizer or its chat template sets one.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan import prompt as core_prompt
from cacheblend.core.plan.prompt import Prompt, Segment


@dataclass(frozen=True)
class Passage:
    """A text that is reused as a unit at any position.

    Attributes:
        text: what the model reads.
        title: a name for people; not read by the model.
    """

    text: str
    title: str = ""


Content = str | Passage
Message = dict[str, Any]
"""``{"role": ..., "content": ...}``; content is a string, or parts ``{"type": "text" | "chunk", "text": ...}``."""


class PromptBuilder:
    """Makes prompts of texts, for one tokenizer.

    Args:
        tokenizer: a transformers tokenizer with a ``tokenizers`` backend.

    Raises:
        InvalidInputError: it has no such backend.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise InvalidInputError(
                f"{type(tokenizer).__name__} has no fast backend (tokenizer.json); tokenise yourself and pass token ids"
            )
        spec = json.loads(backend.to_str()) | {"post_processor": None, "truncation": None, "padding": None}
        self._tokenizer = tokenizer
        self._literals = {token["id"] for token in spec["added_tokens"]} - {tokenizer.unk_token_id}
        self._plain = Tokenizer.from_str(json.dumps(_without_dummy_prefix(spec) | {"added_tokens": []}))
        self._frame = Tokenizer.from_str(json.dumps(_without_dummy_prefix(spec)))
        self._first = Tokenizer.from_str(json.dumps(spec))
        self.bos_id = self._find_bos()

    def prompt(self, parts: Iterable[Content]) -> Prompt:
        """Strings are plain text, `Passage`s are chunks; BOS is put in front where the tokenizer sets one.

        A string instead of parts is a prompt of that one text.

        Raises:
            InvalidInputError: an empty prompt, or a passage without a token.
        """
        segments = [] if self.bos_id is None else [core_prompt.text([self.bos_id])]
        segments += [self._segment(part) for part in ([parts] if isinstance(parts, str) else parts)]
        if all(segment.token_ids.tolist() == [self.bos_id] for segment in segments if len(segment)):
            raise InvalidInputError("the prompt is empty; give it some text")
        return Prompt.of(segments)

    def chat(self, messages: Sequence[Message], documents: Sequence[Passage] = (), **options: Any) -> Prompt:
        """A message list through the model's chat template, its contents kept apart from the template's own tokens.

        Args:
            messages: content parts of type ``chunk`` are chunks.
            documents: passages handed to the template; where it has no place for them they stand in front of the
                last user message.
            **options: for the template, e.g. ``tools`` or ``enable_thinking``.

        Raises:
            InvalidInputError: no chat template, no message, or the template drops or repeats a content.
        """
        if not messages:
            raise InvalidInputError("the message list is empty; it needs at least one message")
        if not self._tokenizer.chat_template:
            raise InvalidInputError("the tokenizer has no chat template; build the prompt from texts instead")
        slots: list[Content] = []
        marked = [self._mark_message(message, slots) for message in messages]
        marks = [_mark(slots, document) for document in documents]
        # Templates name a document's text "text" (transformers' own examples), "content" or "contents".
        handed = [{"title": "", "text": mark, "content": mark, "contents": mark} for mark in marks]
        rendered = self._render(marked, handed, options)
        if any(mark not in rendered for mark in marks):
            rendered = self._render(_in_front_of_question(marked, marks), [], options)
        return Prompt.of(self._split(rendered, slots))

    def encode_in_frame(self, text: str, frame: str) -> list[int]:
        """Ids that a passage has inside a text, as a server has them that tokenises prompts whole.

        Tokens that belong to the frame in part are left out: they change with what stands there.

        Args:
            text: the passage.
            frame: what stands around it, with ``{passage}`` in its place.

        Raises:
            InvalidInputError: the frame has no such place, or more than one.
        """
        around = frame.split("{passage}")
        if len(around) != 2:
            raise InvalidInputError(f"a frame has one {{passage}} in it, got {frame!r}")
        start, stop = len(around[0]), len(around[0]) + len(text)
        encoding = self._first.encode(text.join(around), add_special_tokens=False)
        inside = zip(encoding.ids, encoding.offsets, strict=True)
        return [number for number, (first, last) in inside if first >= start and last <= stop]

    def encode(self, text: str) -> list[int]:
        """Ids of a passage or another text that is not a template's."""
        encoding = self._plain.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        if self._literals.isdisjoint(ids):
            return ids
        # The vocabulary itself holds the literal of an added token: cut it in two, so that it stays text.
        found = (place for i, place in zip(ids, encoding.offsets, strict=True) if i in self._literals)
        cuts = [start + 1 for start, stop in found if stop - start > 1]
        pieces = (text[start:stop] for start, stop in pairwise([0, *cuts, len(text)]))
        return [i for piece in pieces for i in self.encode(piece)] if cuts else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated ids, special tokens left out."""
        # Cleaning up spaces would change text that was streamed already.
        decoded: str = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return decoded

    def _segment(self, part: Content) -> Segment:
        if isinstance(part, Passage):
            return core_prompt.chunk(self.encode(part.text), part.title)
        if not isinstance(part, str):
            raise InvalidInputError(f"a prompt is made of str and Passage, not {type(part).__name__}")
        return core_prompt.text(self.encode(part))

    def _mark_message(self, message: Message, slots: list[Content]) -> Message:
        content = message.get("content")
        if isinstance(content, list):
            parts = [_content_part(part) for part in content]
            return {**message, "content": "".join(_mark(slots, part) for part in parts)}
        return {**message, "content": _mark(slots, content)} if isinstance(content, str) and content else message

    def _render(self, messages: list[Message], documents: list[dict[str, str]], options: dict[str, Any]) -> str:
        settings = {"add_generation_prompt": True, **options}
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                messages, documents=documents or None, tokenize=False, **settings
            )
        except Exception as error:
            raise InvalidInputError(f"the chat template refused the messages: {error}") from error
        return rendered

    def _split(self, rendered: str, slots: list[Content]) -> list[Segment]:
        """The template's own text as frames, special tokens in it parsed; contents in between as they are."""
        segments: list[Segment] = []
        rest = rendered
        for at in _order(rendered, len(slots)):
            frame, _, rest = rest.partition(_placeholder(at))
            segments += [self._frame_segment(frame, first=not segments), self._segment(slots[at])]
        segments.append(self._frame_segment(rest, first=not segments))
        first = next((s for s in segments if len(s)), None)
        if self.bos_id is not None and (first is None or first.token_ids[0] != self.bos_id):
            segments.insert(0, core_prompt.text([self.bos_id]))
        return segments

    def _frame_segment(self, frame: str, first: bool) -> Segment:
        tokenizer = self._first if first else self._frame
        return core_prompt.text(tokenizer.encode(frame, add_special_tokens=False).ids)

    def _find_bos(self) -> int | None:
        bos = self._tokenizer.bos_token_id
        if bos is None:
            return None
        if self._tokenizer("a")["input_ids"][:1] == [bos]:
            return int(bos)
        if self._tokenizer.chat_template:
            try:
                rendered = self._render([{"role": "user", "content": "a"}], [], {})
            except InvalidInputError:
                return None
            if rendered.startswith(self._tokenizer.bos_token):
                return int(bos)
        return None


def _without_dummy_prefix(spec: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer without the space that SentencePiece models put in front of a text."""

    def strip(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        if node.get("type") == "Sequence":
            for key in ("normalizers", "pretokenizers"):
                if key in node:
                    node = node | {key: [kept for kept in map(strip, node[key]) if kept is not None]}
        if node.get("type") == "Metaspace":
            return node | {"prepend_scheme": "never"}
        if node.get("type") == "ByteLevel" and node.get("add_prefix_space"):
            return node | {"add_prefix_space": False}
        return None if node.get("type") == "Prepend" else node

    return spec | {"normalizer": strip(spec["normalizer"]), "pre_tokenizer": strip(spec["pre_tokenizer"])}


def _content_part(part: Any) -> Content:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
    if kind not in ("text", "chunk") or not isinstance(text, str):
        raise InvalidInputError(f"a content part is {{'type': 'text' or 'chunk', 'text': ...}}, got {part!r}")
    return text if kind == "text" else Passage(text, part.get("title", ""))


def _placeholder(index: int) -> str:
    # Private-use characters: no template looks for them, and no text of a prompt is ever rendered beside them.
    return f"\ue0c0{index}\ue0c1"


def _mark(slots: list[Content], part: Content) -> str:
    slots.append(part)
    return _placeholder(len(slots) - 1)


def _order(rendered: str, count: int) -> list[int]:
    """The slots in the order in which the template put them; each must be there once."""
    for index in range(count):
        found = rendered.count(_placeholder(index))
        if found != 1:
            raise InvalidInputError(
                f"the chat template used content {index + 1} of the messages {found} times, not once"
            )
    return sorted(range(count), key=lambda index: rendered.index(_placeholder(index)))


def _in_front_of_question(messages: list[Message], documents: list[str]) -> list[Message]:
    last_user = max((i for i, m in enumerate(messages) if m.get("role") == "user"), default=len(messages) - 1)
    question = messages[last_user]
    moved = {**question, "content": "".join(documents) + (question.get("content") or "")}
    return [*messages[:last_user], moved, *messages[last_user + 1 :]]
