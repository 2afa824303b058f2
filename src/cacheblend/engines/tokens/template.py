"""What a chat template's source says of what it writes and reads; markers in its code that are no texts are none of it.

Knows Jinja's tokens. Renders nothing.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_NAME = re.compile(r"[\w .-]+")
_SPLITS = frozenset(
    {"split", "rsplit", "partition", "rpartition", "startswith", "endswith", "removeprefix", "removesuffix"}
)
"""Methods of texts that look for their argument."""


@dataclass(frozen=True)
class TemplateSource:
    """Parts of a template's source.

    Attributes:
        texts: what it may write: the text between its tags, and its constants, one a line.
        words: its names, and constants that are like names: what it may look up, or compare with.
        sought: constants that it looks for in other texts (``'</think>' in content``, ``content.split('</think>')``).
    """

    texts: str
    words: frozenset[str]
    sought: frozenset[str]

    @staticmethod
    def of(templates: Iterable[str]) -> "TemplateSource":
        """Of one or more templates; nothing of one that is not Jinja."""
        from jinja2 import Environment, TemplateSyntaxError

        lexer = Environment().lexer
        texts, words, sought = list[str](), set[str](), set[str]()
        for template in templates:
            try:
                tokens = list(lexer.tokenize(template))
            except TemplateSyntaxError:
                continue
            texts += [str(token.value) for token in tokens if token.type in ("data", "string")]
            names = {str(token.value) for token in tokens if token.type in ("name", "string")}
            words |= {name for name in names if _NAME.fullmatch(name)}
            for before, bracket, token, behind in zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False):
                is_tested = behind.type == "name" and behind.value in ("in", "not")
                is_split = before.type == "name" and before.value in _SPLITS and bracket.type == "lparen"
                if token.type == "string" and (is_tested or is_split):
                    sought.add(str(token.value))
        return TemplateSource("\n".join(texts), frozenset(words), frozenset(sought))
