"""The text of each token of a prompt, including special tokens."""

from collections.abc import Sequence
from typing import Any

LONGEST_CHARACTER = 8  # most tokens joined to one character; a character has up to four bytes


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """One text per token; joined, they are the decoded prompt.

    A character of several tokens is the text of the last of them; the others are empty.

    Args:
        tokenizer: a transformers tokenizer; None shows ids as ``[17]``.
        ids: token ids of the prompt.
    """
    if tokenizer is None:
        return [f"[{token}]" for token in ids]
    texts: list[str] = []
    before: list[int] = []  # decoding depends on the preceding tokens
    held: list[int] = []
    for token in ids:
        held.append(token)
        new = _decode(tokenizer, before + held)[len(_decode(tokenizer, before)) :]
        if new.endswith("\ufffd") and len(held) < LONGEST_CHARACTER and len(texts) + 1 < len(ids):
            texts.append("")
        else:
            texts.append(new)
            before, held = held, []
    return texts


def _decode(tokenizer: Any, ids: list[int]) -> str:
    # Cleaning up spaces would change preceding text.
    decoded: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return decoded
