"""Texts to token ids, segment by segment.

- A chat has exactly the ids that the tokenizer makes of what the chat template renders, and a prompt of one text those
  that it makes of the text.
- What a special token looks like in a passage or in a content of a chat (``<|im_end|>``) stays text, and so does a
  marker of the template (``<think>``). Other added tokens (line breaks, HTML tags) are text, too: they are parsed.
- A passage is tokenised on its own, so it has the same ids wherever it stands. Of a chat's passages those tokens are
  chunks that the whole text has, too: at its edges a passage may share a token with the text around it.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from difflib import SequenceMatcher
from functools import lru_cache, partial
from itertools import chain, pairwise, takewhile
from typing import Any, NamedTuple

from tokenizers import Encoding, Tokenizer

from cacheblend.core.errors import InvalidInputError, check_encodable
from cacheblend.core.names import join_ids
from cacheblend.core.plan import prompt as core_prompt
from cacheblend.core.plan.prompt import Prompt, Segment
from cacheblend.engines.tokens.chat import (
    Content,
    Conversation,
    Guard,
    Message,
    Place,
    Rendered,
    TemplateDocument,
    TemplateSource,
)
from cacheblend.engines.tokens.detokenizer import Detokenizer
from cacheblend.engines.tokens.passage import Passage

_SHORT = 2048  # characters of a text that is tokenised in a millisecond or two


class Encoded(NamedTuple):
    """Tokens of a text."""

    ids: list[int]  # [tokens]
    offsets: list[tuple[int, int]]  # [tokens] first character of each, and the one behind its last

    def moved(self, by: int) -> "Encoded":
        """The same tokens in a text with so many characters in front."""
        return self if not by else Encoded(self.ids, [(start + by, stop + by) for start, stop in self.offsets])

    @staticmethod
    def joined(parts: "Sequence[Encoded]") -> "Encoded":
        return Encoded([i for part in parts for i in part.ids], [o for part in parts for o in part.offsets])


class TextEncoder:
    """Encodes texts without the tokens that are set around a prompt; added tokens in `guarded` are not parsed."""

    def __init__(self, spec: dict[str, Any], guarded: Set[int] = frozenset()) -> None:
        kept = [token for token in spec["added_tokens"] if token["id"] not in guarded]
        spec = spec | {"added_tokens": kept, "post_processor": None, "truncation": None, "padding": None}
        self._first = Tokenizer.from_str(json.dumps(spec))
        plain = _without_dummy_prefix(spec)
        self._rest = self._first if plain == spec else Tokenizer.from_str(json.dumps(plain))
        # Without the guarded ones in front of it an added token may get another number here.
        numbers = {self._first.token_to_id(token["content"]): int(token["id"]) for token in kept}
        self._numbers = {here: there for here, there in numbers.items() if here != there}
        self._added = frozenset(numbers)

    def whole(self, text: str) -> Encoded:
        """Tokens of a text that a prompt begins with."""
        encoding = _encoded(self._first, text)
        return self._renumbered(encoding.ids, encoding.offsets)

    def continued(self, text: str) -> Encoded:
        """Tokens of a text with others in front of it: SentencePiece sets no space there, but behind added tokens."""
        encoding = _encoded(self._rest, text)
        if self._rest is self._first or self._added.isdisjoint(encoding.ids):
            return self._renumbered(encoding.ids, encoding.offsets)
        head = next(at for at, number in enumerate(encoding.ids) if number in self._added)
        start = encoding.offsets[head][0]
        spaced = _encoded(self._first, text)
        tail = next((at for at, (first, _) in enumerate(spaced.offsets) if first >= start), len(spaced.offsets))
        ids = [*encoding.ids[:head], *spaced.ids[tail:]]
        return self._renumbered(ids, [*encoding.offsets[:head], *spaced.offsets[tail:]])

    def count(self, text: str) -> int:
        return len(_encoded(self._rest, text))

    def _renumbered(self, ids: list[int], offsets: list[tuple[int, int]]) -> Encoded:
        return Encoded([self._numbers.get(i, i) for i in ids] if self._numbers else ids, offsets)


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


_THOUGHT = re.compile(r"think|thought|reason", re.IGNORECASE)  # what models write around their thoughts
_CHANNEL = re.compile(r"think|thought|reason|channel", re.IGNORECASE)  # what thoughts may begin or end with


class PromptBuilder:
    """Makes prompts of texts, for one tokenizer of transformers with a ``tokenizers`` backend; raises
    `InvalidInputError` if it has none. `longest_token`: characters of the vocabulary's longest token, of a byte-level
    one bytes; `bos_id`: the BOS token, if the tokenizer or its chat template sets it in front of a text, else None;
    `digest`: of the tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode  # a tokenizer of theirs is there by now

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise InvalidInputError(
                f"{type(tokenizer).__name__} has no fast backend (tokenizer.json); tokenise yourself and pass token ids"
            )
        spec = json.loads(backend.to_str())
        fixed = spec | {"truncation": None, "padding": None}  # which a call of the tokenizer may change
        self.digest = hashlib.sha256(json.dumps(fixed).encode()).hexdigest()
        self._tokenizer = tokenizer
        self._added = added = {int(token["id"]): str(token["content"]) for token in spec["added_tokens"]}
        self._special = {token["id"] for token in spec["added_tokens"] if token["special"]}
        self._all = TextEncoder(spec)
        # The special tokens that the tokenizer sets in front of a text, and behind it.
        ids, own = tokenizer("a")["input_ids"], self._all.whole("a").ids
        at = next((at for at in range(len(ids)) if ids[at : at + len(own)] == own), 0)
        self._front, self._back = list(ids[:at]), list(ids[at + len(own) :])
        # Of some models that see, a template reads the parts of a content alone: of a text it leaves nothing, whichever
        # it is.
        self._takes_parts = False
        some, other = ([{"role": "user", "content": text}] for text in ("What was said", "what was Said"))
        if self._try(some) == self._try(other):
            self._takes_parts = self._try(_in_parts(some)) != self._try(_in_parts(other))
        markers = self._find_markers({number: text for number, text in added.items() if number not in self._special})
        # What the model itself makes of letters that it does not know. The tokenizer's `unk_token` is often the end of
        # a text, too (GPT-2, Granite, SmolLM), which a text must not become.
        model = spec["model"]
        unknown = {model.get("unk_id"), backend.token_to_id(model.get("unk_token") or "")} - {tokenizer.eos_token_id}
        self._guarded = {number: added[number] for number in (self._special | markers) - unknown}
        self._plain = TextEncoder(spec, self._special | markers)
        # Around its thoughts a model writes guarded texts of such names, and what the template looks for that begins
        # with one (``'<|channel|>final<|message|>' in content``).
        channels = tuple(text for text in self._guarded.values() if _CHANNEL.search(text))
        thoughts = {text for text in channels if _THOUGHT.search(text)}
        thoughts |= {text for text in self.source.sought if text.startswith(channels)}
        self._guard = Guard(self._guarded.values(), thoughts, self.source.words)
        self._encode_front = lru_cache(_FRONTS)(self._encode_rendered)
        self.in_front = lru_cache(_FRONTS)(self._in_front)
        # Byte tokens, ``<0x00>`` to ``<0xFF>``, of which a run is decoded together; none in most tokenizers.
        names = [f"<0x{byte:02X}>" for byte in range(256)] if '"ByteFallback"' in json.dumps(spec["decoder"]) else []
        self._bytes = {number for name in names if (number := backend.token_to_id(name)) is not None}
        self._is_byte_level = '"ByteLevel"' in json.dumps(spec["decoder"])
        self._byte_of = {letter: bytes([byte]) for byte, letter in bytes_to_unicode().items()}
        self.token_bytes = lru_cache(1 << 16)(self._bytes_of)
        self.longest_token = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        bos, text = tokenizer.bos_token_id, tokenizer.bos_token
        is_first = bos is not None and (
            self._front[:1] == [bos] or (bool(tokenizer.chat_template) and self._try(_PROBES[0]).startswith(text))
        )
        self.bos_id: int | None = int(bos) if is_first else None

    def prompt(self, parts: Iterable[Content]) -> Prompt:
        """A prompt of strings, which are parsed as the tokenizer parses them, and `Passage`s, which are chunks. The
        special tokens that the tokenizer sets around a text are around it; where the chat template alone sets BOS, a
        prompt with passages begins with it, as their anchors do. A string instead of parts is a prompt of that text.
        Raises `InvalidInputError`: an empty prompt, a passage without a token, or a text with a lone surrogate."""
        segments = list[Segment]()
        for number, part in enumerate([parts] if isinstance(parts, str) else parts, 1):
            where = f"part {number} of the prompt"
            if isinstance(part, Passage):
                segments.append(self.passage(part, where))
                continue
            if not isinstance(part, str):
                raise InvalidInputError(f"a prompt is made of str and Passage, not {type(part).__name__}")
            _check(part, where)
            encode = self._all.continued if any(map(len, segments)) else self._all.whole
            segments.append(core_prompt.text(encode(part).ids))
        if not any(map(len, segments)):
            raise InvalidInputError("the prompt is empty; give it some text")
        prompt = Prompt.of([core_prompt.text(self._front), *segments, core_prompt.text(self._back)])
        if self.bos_id is None or not prompt.chunks or prompt.segments[0].token_ids[0] == self.bos_id:
            return prompt
        return Prompt.of([core_prompt.text([self.bos_id]), *prompt.segments])

    def text_ids(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a caller's own text, as the tokenizer makes them; `special`: with the special tokens around it. Raises
        `InvalidInputError` for a lone surrogate."""
        check_encodable(text, "the text")
        ids = self._all.whole(text).ids
        return [*self._front, *ids, *self._back] if special else ids

    def chat(self, messages: Sequence[Message], documents: Sequence[Passage] = (), **options: Any) -> Prompt:
        """A message list rendered by the model's chat template; special tokens are parsed in the template's text alone.
        Parts of type ``chunk`` are chunks, as far as it uses them; documents without a place start the last user
        message; options are the template's, e.g. ``tools``. The prompt says how many contents the template changed.
        Raises `InvalidInputError`: no chat template, no message, it refuses the messages, or a lone surrogate."""
        if not messages:
            raise InvalidInputError("the message list is empty; it needs at least one message")
        if not self._tokenizer.chat_template:
            raise InvalidInputError("the tokenizer has no chat template; build the prompt from texts instead")
        conversation = Conversation(messages, documents, options, self._guard)
        for number, content in enumerate(conversation.contents, 1):
            _check(content, f"content {number} of the messages")
        rendered = conversation.render(self._render)
        check_encodable(rendered.text, "the chat template's text")
        segments = self._segments(rendered, self._encode_rendered(rendered), conversation.contents)
        front = self._front_of(rendered, conversation.contents)
        ids = [] if front is None else join_ids([segment.token_ids for segment in front]).tolist()
        before = takewhile(lambda segment: not segment.is_chunk, segments)
        is_same = front is None or join_ids([segment.token_ids for segment in before]).tolist() == ids
        return Prompt.of(segments, rendered.changed, None if is_same else front)

    def _in_front(self, text: str) -> tuple[tuple[int, ...], ...]:
        """Ids, by segment, in front of a passage that follows a text in a plain prompt: what the chat template writes
        may be another with each day, and does not help (docs/log.md, 2026-11-27)."""
        prompt = self.prompt([*([text] if text else []), Passage("any passage")])
        return tuple(tuple(segment.token_ids.tolist()) for segment in prompt.in_front)

    def encode_in_frame(self, text: str, frame: str) -> list[int]:
        """Ids that a passage has inside a larger text, as in a server that tokenises whole prompts: the frame, with
        ``{passage}`` in its place. Tokens that belong to the frame in part are left out: they change with the text
        around it. Raises `InvalidInputError`: the frame has not one ``{passage}``, or a text has a lone surrogate."""
        around = frame.split("{passage}")
        if len(around) != 2:
            raise InvalidInputError(f"a frame has one {{passage}} in it, got {frame!r}")
        check_encodable(text, "the text")
        check_encodable(frame, "the frame")
        start, stop = len(around[0]), len(around[0]) + len(text)
        inside = zip(*self._all.whole(text.join(around)), strict=True)
        return [number for number, (first, last) in inside if first >= start and last <= stop]

    def encode(self, text: str, what: str = "the text") -> list[int]:
        """Ids of a passage, or of any other text in which no special token is parsed; `what` names it in the
        `InvalidInputError` for a lone surrogate."""
        check_encodable(text, what)
        return self._encode(text).ids

    def _encode(self, text: str) -> Encoded:
        encoded = self._plain.continued(text)
        if self._guarded.keys().isdisjoint(encoded.ids):
            return encoded
        # The vocabulary itself holds the text of a guarded token: cut it in two, so that it stays text.
        found = (place for number, place in zip(*encoded, strict=True) if number in self._guarded)
        cuts = [start + 1 for start, stop in found if stop - start > 1]
        pieces = ((start, text[start:stop]) for start, stop in pairwise([0, *cuts, len(text)]))
        return Encoded.joined([self._encode(piece).moved(start) for start, piece in pieces]) if cuts else encoded

    def count(self, text: str) -> int:
        """Tokens of a text, at least: as the tokenizer parses it, special tokens too."""
        return self._all.count(text)

    def decode(self, ids: Sequence[int], shown: Set[int] = frozenset()) -> str:
        """Text of generated ids, special tokens left out but for those in `shown`."""
        if shown:
            ids = [number for number in ids if number in shown or number not in self._special]
        # Cleaning up spaces would change text that has been streamed already.
        options = {"skip_special_tokens": not shown, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(ids), **options))

    def detokenizer(self, shown: Set[int] = frozenset()) -> Detokenizer:
        """Decodes as `decode` does, id by id."""
        hidden, token_of = self._special - shown, self._tokenizer.backend_tokenizer.id_to_token
        return Detokenizer(
            partial(self.decode, shown=shown),
            is_skipped=lambda number: number in hidden or token_of(number) is None,
            is_byte=lambda number: number in self._bytes,
        )

    @property
    def source(self) -> TemplateSource:
        """Of the chat template as the tokenizer has it now: several by name, one, or none."""
        templates = self._tokenizer.chat_template
        return TemplateSource.of(tuple(templates.values() if isinstance(templates, dict) else [templates or ""]))

    def _bytes_of(self, number: int) -> bytes:
        """What a token stands for, which may be a part of a character; of an added token its text."""
        token: str = self._tokenizer.backend_tokenizer.id_to_token(number) or ""
        if number in self._bytes:
            return bytes([int(token[3:5], 16)])
        if number in self._added or not self._is_byte_level:
            return token.replace("\u2581", " ").encode()
        return b"".join(self._byte_of.get(letter) or letter.encode() for letter in token)

    def special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Ids of the texts that are special tokens."""
        ids = (self._tokenizer.backend_tokenizer.token_to_id(text) for text in texts)
        return frozenset(number for number in ids if number in self._special)

    def passage(self, passage: Passage, where: str) -> Segment:
        """A chunk; `where` names its place. Raises `InvalidInputError`: it has no token, or a lone surrogate."""
        _check(passage, where)
        return core_prompt.chunk(self.encode(passage.text, f"{where}: the text"), passage.title)

    def _render(self, messages: list[Message], documents: list[TemplateDocument], options: Mapping[str, Any]) -> str:
        settings = {"add_generation_prompt": True, **options}
        if self._takes_parts:
            messages = _in_parts(messages)
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                messages, documents=documents or None, tokenize=False, **settings
            )
        except Exception as error:
            raise InvalidInputError(f"the chat template refused the messages: {error}") from error
        return rendered

    # ---- what a template rendered -----------------------------------------------------------------------

    def _encode_rendered(self, rendered: Rendered) -> Encoded:
        apart: set[tuple[int, int]] = set()
        for start, stop in rendered.guarded:
            apart |= {(start, stop), *((place.start, place.stop) for place in rendered.places_in(start, stop))}
        while True:
            pieces = chain.from_iterable(rendered.without_own(*span) for span in _merged(apart))
            text, parts, at = rendered.text, list[Encoded](), 0
            for start, stop in [*((start, stop) for start, stop in pieces if start < stop), (len(text), len(text))]:
                between = text[at:start]
                parts.append((self._all.continued(between) if at else self._all.whole(between)).moved(at))
                parts.append(self._encode(text[start:stop]).moved(start))
                at = stop
            encoded = Encoded.joined(parts)
            found = {span for span in self._forged(rendered, encoded) if span not in apart}
            if not found:
                return encoded
            apart |= found

    def _forged(self, rendered: Rendered, encoded: Encoded) -> list[tuple[int, int]]:
        """Spans of the text in which special tokens were found that are not the template's: a letter of them is the
        conversation's, or they are no more than like their text once the tokenizer has normalised it."""
        spans = []
        for number, (start, stop) in zip(*encoded, strict=True):
            if number not in self._guarded:
                continue
            found = rendered.text[start:stop]
            start += len(found) - len(found.lstrip())
            text = self._guarded[number].strip()
            if found.strip() != text or not rendered.is_own(start, start + len(text)):
                places = rendered.places_in(start, start + len(text))
                spans += [(start, stop), *((place.start, place.stop) for place in places)]
        return spans

    def _segments(self, rendered: Rendered, encoded: Encoded, contents: Sequence[Content]) -> list[Segment]:
        """Segments of the template's own text and of the contents; a token with characters of both is the former's."""
        segments: list[Segment] = []
        ids, offsets = encoded
        at = 0
        end = len(rendered.text)
        for place in [*rendered.places, Place(end, end, -1)]:
            start = at
            while start < len(ids) and offsets[start][0] < place.start:
                start += 1
            stop = start
            while stop < len(ids) and offsets[stop][1] <= place.stop and offsets[stop][0] < place.stop:
                stop += 1
            segments.append(core_prompt.text(ids[at:start]))
            content, at = contents[place.content] if place.content >= 0 else "", stop
            if isinstance(content, Passage):
                run = Encoded(ids[start:stop], offsets[start:stop]).moved(-place.start)
                segments += self._chunk(content, rendered.text[place.start : place.stop], run)
            else:
                segments.append(core_prompt.text(ids[start:stop]))
        return [*segments, core_prompt.text(ids[at:])]

    def _front_of(self, rendered: Rendered, contents: Sequence[Content]) -> list[Segment] | None:
        """The text in front of the first passage as it is whichever passage that is: as in front of a letter, or on its
        own where it shares a token with one. None: there is no passage."""
        stop = next((place.start for place in rendered.places if isinstance(contents[place.content], Passage)), None)
        if stop is None:
            return None
        for behind in (_LETTER, ""):
            front = rendered.front(stop, behind)
            ids, offsets = self._encode_front(front)
            tokens = sum(start < stop for start, _ in offsets)
            if not behind or not tokens or offsets[tokens - 1][1] <= stop:
                break
        return self._segments(front, Encoded(ids[:tokens], offsets[:tokens]), contents)

    def _chunk(self, passage: Passage, text: str, run: Encoded) -> list[Segment]:
        """The tokens that a passage has in a prompt, `run`: those in a row that it has on its own, too, are a chunk.
        `text` is what the template made of it; nothing but spaces at its ends may have gone."""
        trimmed, title = text.strip(), passage.title
        is_same = trimmed == passage.text.strip()
        whole = passage.text if is_same else trimmed  # the same at all places, whether trimmed there or not
        run = run.moved(len(whole) - len(whole.lstrip()) - (len(text) - len(text.lstrip())))
        alone = self._encode(whole)
        if run.ids == alone.ids:
            return [core_prompt.chunk(run.ids, title)] if run.ids else []
        ours, theirs = list(zip(*run, strict=True)), list(zip(*alone, strict=True))
        first, offset, tokens = SequenceMatcher(None, ours, theirs, autojunk=False).find_longest_match()
        if not tokens:
            return [core_prompt.text(run.ids)]
        chunk = core_prompt.part_of(alone.ids, offset, tokens, title)
        return [core_prompt.text(run.ids[:first]), chunk, core_prompt.text(run.ids[first + tokens :])]

    # ---- what the tokenizer is like ---------------------------------------------------------------------

    def _find_markers(self, added: Mapping[int, str]) -> set[int]:
        """Of added tokens that are not special those that the chat template writes itself (``<think>``)."""
        candidates = {number for number, text in added.items() if re.search(r"[^\w\s\u2581]", text)}
        if not candidates or not self._tokenizer.chat_template:
            return set()
        rendered = [number for chat in _PROBES for number in self._all.whole(self._try(chat)).ids]
        return {number for number in candidates if added[number] in self.source.texts} | (candidates & {*rendered})

    def _try(self, messages: list[Message]) -> str:
        try:
            return self._render(messages, [], {})
        except InvalidInputError:
            return ""


_FRONTS = 16  # texts in front of passages whose tokens are kept: system prompts come again and again
_LETTER = "a"  # what most passages begin like, as far as the tokens in front of them go

_PROBES: list[list[Message]] = [
    [{"role": "user", "content": "a"}],
    [{"role": role, "content": "a"} for role in ("system", "user", "assistant", "user")],
]
"""Conversations that show what a template writes itself."""


def _check(content: Content, where: str) -> None:
    if isinstance(content, Passage):
        check_encodable(content.title, f"{where}: the title")
        check_encodable(content.text, f"{where}: the text")
        if not content.text:
            core_prompt.chunk([])
    else:
        check_encodable(content, f"{where}: the text")


def _in_parts(messages: Iterable[Message]) -> list[Message]:
    """Messages whose texts are contents of one part."""
    return [
        {**each, "content": [{"type": "text", "text": each["content"]}]}
        if isinstance(each.get("content"), str)
        else each
        for each in messages
    ]


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged
