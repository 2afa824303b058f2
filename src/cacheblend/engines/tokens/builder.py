"""Texts to token ids, segment by segment.

- A passage is tokenised on its own, so it has the same ids wherever it stands.
- Text in a passage that looks like a special or added token (``<think>``, ``<|im_end|>``) stays text.
- No SentencePiece dummy prefix in the middle of a prompt.
- BOS once, at the start of the prompt, if the tokenizer or its chat template sets one.
"""

import json
from collections.abc import Iterable, Sequence, Set
from functools import partial
from itertools import pairwise
from typing import Any

from tokenizers import Encoding, Tokenizer

from cacheblend.core.errors import InvalidInputError, check_encodable
from cacheblend.core.plan import prompt as core_prompt
from cacheblend.core.plan.prompt import Prompt, Segment
from cacheblend.engines.tokens.chat import Content, MarkedContents, Message, Passage, put_before_question
from cacheblend.engines.tokens.detokenizer import Detokenizer

_SHORT = 2048
"""Characters of a text that is tokenised in a millisecond or two."""


class PromptBuilder:
    """Makes prompts of texts, for one tokenizer.

    Args:
        tokenizer: a transformers tokenizer with a ``tokenizers`` backend.

    Attributes:
        longest_token: characters of the vocabulary's longest token; of a byte-level vocabulary, bytes.

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
        self._special = {token["id"] for token in spec["added_tokens"] if token["special"]}
        self._plain = Tokenizer.from_str(json.dumps(_without_dummy_prefix(spec) | {"added_tokens": []}))
        self._frame = Tokenizer.from_str(json.dumps(_without_dummy_prefix(spec)))
        self._first = Tokenizer.from_str(json.dumps(spec))
        self._bytes = _byte_tokens(spec, backend)
        self.longest_token = max(map(len, backend.get_vocab(with_added_tokens=False)), default=1)
        self.bos_id = self._find_bos()

    def prompt(self, parts: Iterable[Content]) -> Prompt:
        """A prompt of strings, which are plain text, and `Passage`s, which are chunks; starts with BOS if the tokenizer
        sets one.

        A string instead of parts is a prompt of that one text.

        Raises:
            InvalidInputError: an empty prompt, a passage without a token, or a text with a lone surrogate.
        """
        segments = [] if self.bos_id is None else [core_prompt.text([self.bos_id])]
        parts = [parts] if isinstance(parts, str) else parts
        segments += [self._segment(part, f"part {number} of the prompt") for number, part in enumerate(parts, 1)]
        if all(segment.token_ids.tolist() == [self.bos_id] for segment in segments if len(segment)):
            raise InvalidInputError("the prompt is empty; give it some text")
        return Prompt.of(segments)

    def chat(self, messages: Sequence[Message], documents: Sequence[Passage] = (), **options: Any) -> Prompt:
        """A message list rendered by the model's chat template; contents are tokenised apart from the template's text.

        Args:
            messages: content parts of type ``chunk`` are chunks.
            documents: passages for the template; if it has no place for them, they start the last user message.
            **options: for the template, e.g. ``tools`` or ``enable_thinking``.

        Raises:
            InvalidInputError: no chat template, no message, the template drops or repeats a content, or a text has a
                lone surrogate.
        """
        if not messages:
            raise InvalidInputError("the message list is empty; it needs at least one message")
        if not self._tokenizer.chat_template:
            raise InvalidInputError("the tokenizer has no chat template; build the prompt from texts instead")
        contents = MarkedContents()
        marked = [contents.mark_message(message) for message in messages]
        marks = [contents.mark(document) for document in documents]
        # Templates name a document's text "text" (transformers' own examples), "content" or "contents".
        handed = [{"title": "", "text": mark, "content": mark, "contents": mark} for mark in marks]
        rendered = self._render(marked, handed, options)
        if any(mark not in rendered for mark in marks):
            rendered = self._render(put_before_question(marked, marks), [], options)
        return Prompt.of(self._split(rendered, contents))

    def encode_in_frame(self, text: str, frame: str) -> list[int]:
        """Ids that a passage has inside a larger text, as in a server that tokenises whole prompts.

        Tokens that belong to the frame in part are left out: they change with the text around the passage.

        Args:
            text: the passage.
            frame: the text around the passage, with ``{passage}`` in its place.

        Raises:
            InvalidInputError: the frame has no ``{passage}``, or more than one; or a text has a lone surrogate.
        """
        around = frame.split("{passage}")
        if len(around) != 2:
            raise InvalidInputError(f"a frame has one {{passage}} in it, got {frame!r}")
        check_encodable(text, "the text")
        check_encodable(frame, "the frame")
        start, stop = len(around[0]), len(around[0]) + len(text)
        encoding = _encoded(self._first, text.join(around))
        inside = zip(encoding.ids, encoding.offsets, strict=True)
        return [number for number, (first, last) in inside if first >= start and last <= stop]

    def encode(self, text: str, what: str = "the text") -> list[int]:
        """Ids of a passage or of any other text that does not come from a template; `what` names it for messages.

        Raises:
            InvalidInputError: the text has a lone surrogate.
        """
        check_encodable(text, what)
        encoding = _encoded(self._plain, text)
        ids: list[int] = encoding.ids
        if self._literals.isdisjoint(ids):
            return ids
        # The vocabulary itself holds the text of an added token: cut it in two, so that it stays text.
        found = (place for i, place in zip(ids, encoding.offsets, strict=True) if i in self._literals)
        cuts = [start + 1 for start, stop in found if stop - start > 1]
        pieces = (text[start:stop] for start, stop in pairwise([0, *cuts, len(text)]))
        return [i for piece in pieces for i in self.encode(piece)] if cuts else ids

    def count(self, text: str) -> int:
        """Tokens of a text; fewer than `encode` gives where it holds the text of a special token."""
        return len(_encoded(self._plain, text))

    def decode(self, ids: Sequence[int], shown: Set[int] = frozenset()) -> str:
        """Text of generated ids, special tokens left out but for those in `shown`."""
        if shown:
            ids = [number for number in ids if number in shown or number not in self._special]
        # Cleaning up spaces would change text that has been streamed already.
        decoded: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=not shown, clean_up_tokenization_spaces=False
        )
        return decoded

    def detokenizer(self, shown: Set[int] = frozenset()) -> Detokenizer:
        """Decodes as `decode` does, id by id."""
        hidden, token_of = self._special - shown, self._tokenizer.backend_tokenizer.id_to_token
        return Detokenizer(
            partial(self.decode, shown=shown),
            is_skipped=lambda number: number in hidden or token_of(number) is None,
            is_byte=lambda number: number in self._bytes,
        )

    def special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Ids of the texts that are special tokens."""
        ids = (self._tokenizer.backend_tokenizer.token_to_id(text) for text in texts)
        return frozenset(number for number in ids if number in self._special)

    def passage(self, passage: Passage, where: str) -> Segment:
        """The passage as a chunk; `where` names its place for messages.

        Raises:
            InvalidInputError: it has no token, or its text or title has a lone surrogate.
        """
        check_encodable(passage.title, f"{where}: the title")
        return core_prompt.chunk(self.encode(passage.text, f"{where}: the text"), passage.title)

    def _segment(self, part: Content, where: str) -> Segment:
        if isinstance(part, Passage):
            return self.passage(part, where)
        if not isinstance(part, str):
            raise InvalidInputError(f"a prompt is made of str and Passage, not {type(part).__name__}")
        return core_prompt.text(self.encode(part, f"{where}: the text"))

    def _render(self, messages: list[Message], documents: list[dict[str, str]], options: dict[str, Any]) -> str:
        settings = {"add_generation_prompt": True, **options}
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                messages, documents=documents or None, tokenize=False, **settings
            )
        except Exception as error:
            raise InvalidInputError(f"the chat template refused the messages: {error}") from error
        return rendered

    def _split(self, rendered: str, contents: MarkedContents) -> list[Segment]:
        """Segments of the template's own text, in which special tokens are parsed, and of the contents as they are."""
        segments: list[Segment] = []
        for frame, number, content in contents.pieces(rendered):
            segments.append(self._frame_segment(frame, first=not segments))
            if content is not None:
                segments.append(self._segment(content, f"content {number} of the messages"))
        first = next((s for s in segments if len(s)), None)
        if self.bos_id is not None and (first is None or first.token_ids[0] != self.bos_id):
            segments.insert(0, core_prompt.text([self.bos_id]))
        return segments

    def _frame_segment(self, frame: str, first: bool) -> Segment:
        check_encodable(frame, "the chat template's text")
        tokenizer = self._first if first else self._frame
        return core_prompt.text(_encoded(tokenizer, frame).ids)

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


def _byte_tokens(spec: dict[str, Any], backend: Tokenizer) -> frozenset[int]:
    """Ids of the tokens of which a run is decoded together, ``<0x00>`` to ``<0xFF>``; none in most tokenizers."""
    if '"ByteFallback"' not in json.dumps(spec["decoder"]):
        return frozenset()
    found = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(number for number in found if number is not None)


def _encoded(tokenizer: Tokenizer, text: str) -> Encoding:
    """The text's tokens. Of a batch, tokenizers lets go of the interpreter's lock while it works; of a single text it
    does not, and a long one would hold up all other threads for seconds."""
    if len(text) <= _SHORT:
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode_batch([text], add_special_tokens=False)[0]


def _without_dummy_prefix(spec: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer's specification without the space that SentencePiece models put in front of a text."""

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
