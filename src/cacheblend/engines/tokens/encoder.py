"""A tokenizer's backend with some of its added tokens: text to ids, and which characters each id stands for.

    kept      parsed in a text as the tokenizer parses them
    guarded   not found: what looks like one stays letters

Knows the backend's specification. Does not know which tokens are guarded, or why.
"""

import json
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

from tokenizers import Encoding, Tokenizer

_SHORT = 2048
"""Characters of a text that is tokenised in a millisecond or two."""


class Encoded(NamedTuple):
    """Tokens of a text."""

    ids: list[int]  # [tokens]
    offsets: list[tuple[int, int]]  # [tokens] first character of each, and the one behind its last

    def moved(self, by: int) -> "Encoded":
        """The same tokens in a text with so many characters in front."""
        return self if not by else Encoded(self.ids, [(start + by, stop + by) for start, stop in self.offsets])

    @staticmethod
    def joined(parts: "Sequence[Encoded]") -> "Encoded":
        """The tokens of all parts in a row."""
        return Encoded([i for part in parts for i in part.ids], [o for part in parts for o in part.offsets])


class TextEncoder:
    """Encodes texts, without the tokens that a tokenizer sets around a whole prompt; added tokens in `guarded` are not
    parsed."""

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
        """Tokens of a text."""
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
