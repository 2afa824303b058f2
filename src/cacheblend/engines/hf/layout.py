"""Builds a prompt from passages and a question: the texts around them, chat or plain. Knows no files and no options."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cacheblend.core.plan.prompt import Prompt
from cacheblend.engines.hf.engine import BlendEngine
from cacheblend.engines.tokens import Content, Passage

SEPARATOR = "\n\n"


@dataclass(frozen=True)
class PromptLayout:
    """The texts around the passages and the question. A prompt has this order:

    system | before | heading 1 | passage 1 | separator | heading 2 | passage 2 | separator | question

    Passages are chunks, everything else is plain text. In a chat, `system` is a message of its own and the rest is
    the user's message; in a plain prompt, a separator follows `system`.
    """

    system: str = ""  # system prompt; empty for none
    before: str = ""  # text in front of the passages
    heading: str = ""  # text in front of each passage; ``{number}`` counts from 1, ``{title}`` is the passage's title
    separator: str = SEPARATOR  # text that follows each passage
    question: str = "{question}"  # the last text; ``{question}`` is replaced by the question
    chat: bool | None = None  # whether to use the chat template; None: if the tokenizer has one

    def is_chat(self, engine: BlendEngine) -> bool:
        return bool(getattr(engine.tokenizer, "chat_template", None)) if self.chat is None else self.chat

    def parts(self, engine: BlendEngine, passages: Sequence[Passage], question: str) -> list[Any]:
        """The input of `BlendEngine.prompt`: texts and passages, or chat messages."""
        content: list[Content] = [self.before] if self.before else []
        for number, passage in enumerate(passages, start=1):
            heading = fill(self.heading, {"number": str(number), "title": passage.title})
            content += [*([heading] if heading else []), passage, self.separator]
        content.append(fill(self.question, {"question": question}))
        if not self.is_chat(engine):
            return [self.system + self.separator, *content] if self.system else content
        messages: list[Any] = [{"role": "system", "content": self.system}] if self.system else []
        return [*messages, {"role": "user", "content": content}]

    def prompt(self, engine: BlendEngine, passages: Sequence[Passage], question: str) -> Prompt:
        """Builds the prompt and checks it against the model's limits; raises as `BlendEngine.prompt`."""
        return engine.prompt(self.parts(engine, passages, question))


def fill(template: str, values: Mapping[str, str]) -> str:
    """`template` with each ``{name}`` in `values` replaced; all other braces are kept."""
    names = "|".join(map(re.escape, values))
    return re.sub(rf"\{{({names})\}}", lambda found: values[found[1]], template)
