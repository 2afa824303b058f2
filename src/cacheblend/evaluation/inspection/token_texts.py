"""The text of each token of a prompt, special tokens and all."""

from collections.abc import Sequence
from typing import Any

LONGEST_CHARACTER = 8  # tokens that are held back at most; a character has four bytes


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """A text for each token; joined, they are the decoded prompt.

    A character of several tokens stands at the last of them, and the others are empty.

    Args:
        tokenizer: a transformers tokenizer; None: ids are shown as ``[17]``.
        ids: of the prompt.
    """
    if tokenizer is None:
        return [f"[{token}]" for token in ids]
    texts: list[str] = []
    before: list[int] = []  # decoding depends on the tokens just in front
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
    # Cleaning up spaces would change text in front.
    decoded: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return decoded
